//! `footprint [--agent CMD]… [--principal CMD] [--idle SECONDS] [--check] [--json] [--write FILE [--symbols FILE]]`
//!
//! Without `--agent`: ours. With `--check` a figure of ours above its gate in tests/budgets.toml fails. With `--symbols` (what
//! `cross/build --symbols` made) the report says whose the bytes are.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs};

use harness::arguments::{Build, Peers, print_json};
use harness::attribution;
use harness::footprint::{self, Figures};
use serde_json::{Map, Value};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("[FATAL]: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, String> {
    let mut peers = Peers { build: Build::Shipped, ..Peers::default() };
    let (mut idle, mut check, mut write, mut symbols) = (60, false, None, None);
    peers.parse("footprint", &mut |name, value| {
        match name {
            "--idle" => idle = value()?.parse().map_err(|error| format!("footprint: --idle: {error}"))?,
            "--check" => check = true,
            "--write" => write = Some(value()?),
            "--symbols" => symbols = Some(value()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let budgets = footprint::budgets()?;
    let idle = Duration::from_secs(idle);
    let mut agents: Vec<(String, Figures)> = Vec::new();
    if peers.agent.is_empty() || check {
        agents.push((OURS.to_owned(), footprint::measure(&peers.options_with(None)?, idle)?));
    }
    for agent in &peers.agent {
        let file = agent.program().rsplit('/').next().unwrap_or_default().to_owned();
        agents.push((file, footprint::measure(&peers.options_with(Some(agent))?, idle)?));
    }

    let table = footprint::table(&budgets, &agents);
    if peers.json {
        let by_name: Map<String, Value> =
            agents.iter().map(|(name, figures)| (name.clone(), footprint::to_json(figures))).collect();
        print_json(&Value::Object(by_name));
    } else {
        eprintln!("{table}");
    }
    if let Some(file) = write {
        let ours = agents.first().filter(|(name, _)| name == OURS).map(|(_, figures)| figures);
        let mut text = report(&command_shape(), idle, &table, &budgets, ours);
        if let Some(symbols) = symbols {
            text.push_str(&bytes_by_crate(&attribution::by_crate(Path::new(&symbols))?));
        }
        fs::write(&file, text).map_err(|error| format!("{file}: {error}"))?;
    }
    if !check {
        return Ok(true);
    }
    let ours = &agents[0].1;
    let mut failed = 0;
    for budget in &budgets {
        match ours.get(budget.name.as_str()) {
            Some(figure) if *figure <= budget.gate => {}
            Some(figure) => {
                eprintln!("{}: {figure} {} is above the gate {}", budget.name, budget.unit, budget.gate);
                failed += 1;
            }
            None => {
                eprintln!("{}: not measured", budget.name);
                failed += 1;
            }
        }
    }
    println!("{} passed, {failed} failed", budgets.len() - failed);
    Ok(failed == 0)
}

/// The arguments of this run without the names of files, which are those of one machine.
fn command_shape() -> String {
    let mut shape = Vec::new();
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = match argument.as_str() {
            "--agent" | "--principal" | "--agentctl" => Some("CMD"),
            "--write" | "--symbols" => Some("FILE"),
            _ => None,
        };
        shape.push(argument);
        if let Some(value) = value.filter(|_| arguments.next().is_some()) {
            shape.push(value.to_owned());
        }
    }
    shape.join(" ")
}

fn report(
    command: &str,
    idle: Duration,
    table: &str,
    budgets: &[footprint::Budget],
    ours: Option<&Figures>,
) -> String {
    let mut text = format!(
        "# What the edge half costs\n\n\
         Written by `cargo run -p harness --bin footprint -- {command}` (idle time {} s); reviewed like code.\n\n{table}\n",
        idle.as_secs()
    );
    for budget in budgets {
        text.push_str(&format!("- `{}`: {}.\n", budget.name, budget.how));
    }
    let missed: Vec<_> = budgets
        .iter()
        .filter(|budget| {
            ours.and_then(|ours| ours.get(budget.name.as_str())).is_some_and(|figure| *figure > budget.aim)
        })
        .collect();
    if !missed.is_empty() {
        text.push_str("\n## Aims that are missed\n\n");
        for budget in missed {
            let obstacle = if budget.obstacle.is_empty() { "not looked into yet" } else { &budget.obstacle };
            text.push_str(&format!("- `{}`: {obstacle}.\n", budget.name));
        }
    }
    text
}

fn bytes_by_crate(sizes: &[(String, u64)]) -> String {
    let mut text = String::from("\n## Bytes by crate\n\n| crate | bytes |\n| --- | ---: |\n");
    let (shown, small): (Vec<_>, Vec<_>) = sizes.iter().partition(|(_, bytes)| *bytes >= SHOWN_BYTES);
    for (name, bytes) in shown {
        text.push_str(&format!("| {name} | {bytes} |\n"));
    }
    let rest: u64 = small.iter().map(|(_, bytes)| bytes).sum();
    text.push_str(&format!("| {} smaller ones | {rest} |\n", small.len()));
    text
}

/// Crates below this stand in one line of the report.
const SHOWN_BYTES: u64 = 2048;

const OURS: &str = "agent-lite";
