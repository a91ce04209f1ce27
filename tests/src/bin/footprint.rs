//! `footprint [--agent CMD]… [--principal CMD] [--idle SECONDS] [--check] [--json] [--write FILE]`
//!
//! Without `--agent`: ours. With `--check` a figure of ours above its gate in tests/budgets.toml fails.

use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs};

use harness::arguments::{Build, Peers, print_json};
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
    let (mut idle, mut check, mut write) = (60, false, None);
    peers.parse("footprint", &mut |name, value| {
        match name {
            "--idle" => idle = value()?.parse().map_err(|error| format!("footprint: --idle: {error}"))?,
            "--check" => check = true,
            "--write" => write = Some(value()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let budgets = footprint::budgets()?;
    let idle = Duration::from_secs(idle);
    let mut agents: Vec<(String, Figures)> = Vec::new();
    if peers.agent.is_empty() || check {
        agents.push(("agent-lite".to_owned(), footprint::measure(&peers.options_with(None)?, idle)?));
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
        let command = env::args().skip(1).collect::<Vec<_>>().join(" ");
        let text = report(&command, idle, &table, &budgets);
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

fn report(command: &str, idle: Duration, table: &str, budgets: &[footprint::Budget]) -> String {
    let mut text = format!(
        "# What the edge half costs\n\n\
         Written by `cargo run -p harness --bin footprint -- {command}` (idle time {} s); reviewed like code.\n\n{table}\n",
        idle.as_secs()
    );
    for budget in budgets {
        text.push_str(&format!("- `{}`: {}.\n", budget.name, budget.how));
    }
    text
}
