//! `spread --apps N [--agent CMD] [--principal CMD] [--json]`: hub-to-edge time, median of three.

use std::process::ExitCode;

use harness::arguments::{Build, Peers, print_json};
use harness::spread;

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
    let mut apps = 1000;
    peers.parse("spread", &mut |name, value| {
        if name != "--apps" {
            return Ok(false);
        }
        apps = value()?.parse().map_err(|error| format!("spread: --apps: {error}"))?;
        Ok(true)
    })?;
    let options = peers.options()?;
    let [_, median, _] = spread::measure(&options, apps, |run| eprintln!("{}", run.to_json()))?;
    print_json(&median.to_json());
    Ok(())
}
