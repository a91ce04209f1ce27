//! Seeded simulation: `sim --seeds N [--base B] [--family F] [--plant NAME] [--json]`.
//!
//! Exit code 0: no violation and no counter at 0; with `--plant`, that the planted fault was caught by a short trace.

use std::process::ExitCode;

use harness::sim::scenario::Family;
use harness::sim::{self, Options, Plant, Summary};

fn main() -> ExitCode {
    let (options, json) = match parse(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("sim: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let started = std::time::SystemTime::now();
    let summary = sim::explore(&options);
    let seconds = started.elapsed().unwrap_or_default().as_secs_f64();
    let mut out = std::io::stdout().lock();
    let written = if json {
        serde_json::to_writer(&mut out, &summary.to_json()).map_err(std::io::Error::from)
    } else {
        print(&mut out, &summary, seconds)
    };
    if written.and_then(|()| std::io::Write::flush(&mut out)).is_err() {
        return ExitCode::FAILURE;
    }
    let good = match options.plant {
        None => {
            summary.violations == 0
                && (summary.seeds < SEEDS_FOR_COUNTERS || summary.zero_counters().is_empty())
        }
        Some(_) => {
            !summary.failures.is_empty()
                && summary.failures.iter().all(|failure| failure.trace.len() <= TRACE_LIMIT)
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print(out: &mut dyn std::io::Write, summary: &Summary, seconds: f64) -> std::io::Result<()> {
    for failure in &summary.failures {
        let (seed, family, violation) = (failure.seed, failure.family.as_str(), &failure.violation);
        writeln!(out, "seed {seed} ({family}) breaks {}: {}", violation.rule, violation.text)?;
        writeln!(out, "  {} steps:", failure.trace.len())?;
        for step in &failure.trace {
            writeln!(out, "  {step}")?;
        }
    }
    for (seed, rule) in summary.failed.iter().skip(summary.failures.len()) {
        writeln!(out, "seed {seed} breaks {rule}")?;
    }
    for name in sim::COUNTERS {
        writeln!(out, "{name:>24} {}", summary.counters.get(name))?;
    }
    writeln!(
        out,
        "{} seeds in {seconds:.1} s ({:.0}/s), {} violations, trace hash {:016x}",
        summary.seeds,
        summary.seeds as f64 / seconds.max(0.001),
        summary.violations,
        summary.trace_hash
    )?;
    let zero = summary.zero_counters();
    if !zero.is_empty() {
        writeln!(out, "never happened: {}", zero.join(", "))?;
    }
    Ok(())
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<(Options, bool), String> {
    let mut options = Options { base: 0, seeds: 100, family: None, plant: None, threads: 2 };
    let mut json = false;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text:?} is no number"));
        match argument.as_str() {
            "--seeds" => options.seeds = number(value()?)?,
            "--base" => options.base = number(value()?)?,
            "--family" => {
                let word = value()?;
                options.family = Some(Family::parse(&word).ok_or_else(|| {
                    format!("no family {word:?}; there are {}", Family::ALL.map(Family::as_str).join(", "))
                })?);
            }
            "--plant" => {
                let word = value()?;
                options.plant = Some(Plant::parse(&word).ok_or_else(|| {
                    format!("no plant {word:?}; there are {}", Plant::ALL.map(Plant::as_str).join(", "))
                })?);
            }
            "--json" => json = true,
            _ => return Err(format!("unknown argument {argument:?}")),
        }
    }
    Ok((options, json))
}

const USAGE: &str = "usage: sim --seeds N [--base B] [--family F] [--plant NAME] [--json]";
/// Fewer seeds may leave a rare thing out.
const SEEDS_FOR_COUNTERS: u64 = 1000;
/// A trace that a person can read.
const TRACE_LIMIT: usize = 30;
