//! `interop [--agent CMD] [--principal CMD] [--agentctl CMD] [--json]`: the scenario table on real API servers.

use std::process::ExitCode;

use harness::{arguments::Peers, interop};
use serde_json::json;

fn main() -> ExitCode {
    let mut peers = Peers::default();
    let outcome = peers.parse("interop", &mut |_, _| Ok(false)).and_then(|()| {
        let options = peers.options()?;
        interop::run(options, |row| {
            if !peers.json {
                let result = if row.held { "held  " } else { "FAILED" };
                eprintln!("{result} {:<22} {:>6.2} s  {}", row.name, row.seconds, row.note);
                if !row.held {
                    eprintln!("{}", row.detail);
                }
            }
        })
    });
    match outcome {
        Ok(rows) => {
            let held = rows.iter().filter(|row| row.held).count();
            if peers.json {
                let rows: Vec<_> = rows.iter().map(interop::Row::to_json).collect();
                harness::arguments::print_json(&json!({"rows": rows}));
            } else {
                eprintln!("{held} passed, {} failed", rows.len() - held);
            }
            if held == rows.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("[FATAL]: {error}");
            ExitCode::FAILURE
        }
    }
}
