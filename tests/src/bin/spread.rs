//! `spread --apps N [--agent CMD] [--principal CMD] [--compare] [--json]`: hub-to-edge time, median of three.
//!
//! With `--compare` our own pair is measured beside the given one, in turns, and the ratios are told as well.

use std::process::ExitCode;

use harness::arguments::{Build, Peers, hundredths, print_json};
use harness::spread;
use serde_json::json;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("[FATAL]: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut peers = Peers { build: Build::Shipped, ..Peers::default() };
    let (mut apps, mut compare) = (1000, false);
    peers.parse("spread", &mut |name, value| {
        match name {
            "--apps" => apps = value()?.parse().map_err(|error| format!("spread: --apps: {error}"))?,
            "--compare" => compare = true,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let mut pairs = vec![peers.options()?];
    if compare {
        pairs.push(Peers { build: peers.build, ..Peers::default() }.options()?);
    }
    let names = ["given", "ours"];
    let medians = spread::measure(&pairs, apps, |index, run| {
        let name = if compare { names[index] } else { "" };
        eprintln!("{name:<5} {}", run.to_json());
    })?;
    print_json(&match medians[..] {
        [given, ours] => json!({
            "given": given.to_json(),
            "ours": ours.to_json(),
            "lag_ratio": hundredths(ours.lag() / given.lag()),
            "arrived_ratio": hundredths(ours.arrived / given.arrived),
        }),
        _ => medians[0].to_json(),
    });
    Ok(())
}
