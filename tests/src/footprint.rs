//! What an agent costs a site: bytes, memory, threads, requests, traffic.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, thread};

use serde_json::{Value, json};

use crate::rig::apps::{application, await_equal, edge_app, edge_apps, hub_apps, status};
use crate::rig::load::{Arrivals, write_all};
use crate::rig::{CommandLine, Link, RealKube, Stack, StackOptions, wait_for};

/// Figures by the names of `tests/budgets.toml`.
pub type Figures = BTreeMap<&'static str, u64>;

/// A line of `tests/budgets.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    pub name: String,
    pub gate: u64,
    pub aim: u64,
    pub unit: String,
    pub how: String,
    /// What stands in the way of the aim, while it is missed.
    pub obstacle: String,
}

/// Measures one agent command between fresh API servers.
pub fn measure(options: &StackOptions, idle: Duration) -> Result<Figures, String> {
    let mut figures = Figures::new();
    let binary = fs::metadata(program_file(&options.agent)?).map_err(|error| error.to_string())?;
    figures.insert("binary_bytes", binary.len());

    let (hub, edge) = RealKube::start_pair()?;
    let edge_server = Arc::new(edge);
    let (hub, edge) = (Arc::new(hub).into_cluster()?, edge_server.clone().into_cluster()?);
    let peer_user = edge.peer_user.clone();
    let mut options = options.clone();
    options.log_level = "warning".to_owned();
    let mut stack = Stack::start(hub, edge, options)?;
    populate(&stack, 0..FEW)?;
    settle(&stack);

    let writes = || writes_of(&edge_server, &peer_user);
    let memory = |stack: &Stack| -> Result<_, String> { stack.agent()?.memory().map_err(|e| e.to_string()) };
    let (writes_before, memory_before, traffic_before) = (writes(), memory(&stack)?, stack.link.traffic());
    thread::sleep(idle);
    let (writes_after, memory_after, traffic_after) = (writes(), memory(&stack)?, stack.link.traffic());
    let per_minute = |n: u64| (n as f64 * 60.0 / idle.as_secs_f64()).round() as u64;
    figures.insert("rss_idle_kib", memory_after.rss_kib);
    figures.insert("rss_anon_kib", memory_after.anon_kib);
    figures.insert("threads", memory_after.threads);
    figures.insert("api_writes_idle", writes_after - writes_before);
    figures.insert("link_bytes_idle", traffic_after.up - traffic_before.up);
    let switches = memory_after.voluntary_switches - memory_before.voluntary_switches;
    figures.insert("wakeups_per_min", per_minute(switches));

    let before = total(&stack.link);
    write_statuses(&stack, 0..FEW, "Degraded")?;
    settle(&stack);
    figures.insert("bytes_status_update", (total(&stack.link) - before) / FEW as u64);

    let before = total(&stack.link);
    stack.link.cut();
    wait_for(LIMIT, || (!stack.agent_is_connected()).then_some(()))
        .ok_or("the agent did not notice that its link was cut")?;
    stack.link.heal();
    stack.await_connected(LIMIT)?;
    settle(&stack);
    figures.insert("bytes_reconnect", total(&stack.link) - before);

    populate(&stack, FEW..MANY)?;
    settle(&stack);
    figures.insert("rss_1000_kib", memory(&stack)?.rss_kib);
    stack.terminate_agent()?;
    stack.start_agent()?;
    settle(&stack);
    figures.insert("rss_restart_1000_kib", memory(&stack)?.rss_kib);
    await_equal(&stack.hub.admin, &stack.edge.admin, LIMIT)?;
    Ok(figures)
}

/// Reads `tests/budgets.toml`: sections of integers and strings, no other TOML.
pub fn parse_budgets(text: &str) -> Result<Vec<Budget>, String> {
    let mut budgets: Vec<Budget> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        let wrong = || format!("budgets.toml:{}: {line}", number + 1);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            budgets.push(Budget { name: name.to_owned(), ..Budget::default() });
            continue;
        }
        let (key, value) = line.split_once('=').ok_or_else(wrong)?;
        let budget = budgets.last_mut().ok_or_else(wrong)?;
        let value = value.trim();
        let text = || value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).map(str::to_owned);
        match key.trim() {
            "gate" => budget.gate = value.parse().map_err(|_| wrong())?,
            "aim" => budget.aim = value.parse().map_err(|_| wrong())?,
            "unit" => budget.unit = text().ok_or_else(wrong)?,
            "how" => budget.how = text().ok_or_else(wrong)?,
            "obstacle" => budget.obstacle = text().ok_or_else(wrong)?,
            _ => return Err(wrong()),
        }
    }
    Ok(budgets)
}

/// The budgets of this tree.
pub fn budgets() -> Result<Vec<Budget>, String> {
    parse_budgets(include_str!("../budgets.toml"))
}

/// A Markdown table: one column for each agent.
pub fn table(budgets: &[Budget], agents: &[(String, Figures)]) -> String {
    let mut text = String::from("| figure | unit | gate | aim |");
    for (name, _) in agents {
        text.push_str(&format!(" {name} |"));
    }
    text.push_str("\n| --- | --- | ---: | ---: |");
    text.push_str(&" ---: |".repeat(agents.len()));
    for budget in budgets {
        text.push_str(&format!(
            "\n| `{}` | {} | {} | {} |",
            budget.name, budget.unit, budget.gate, budget.aim
        ));
        for (_, figures) in agents {
            let figure = figures.get(budget.name.as_str()).map_or_else(|| "-".to_owned(), u64::to_string);
            text.push_str(&format!(" {figure} |"));
        }
    }
    text.push('\n');
    text
}

pub fn to_json(figures: &Figures) -> Value {
    figures
        .iter()
        .map(|(&name, &figure)| (name.to_owned(), json!(figure)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn populate(stack: &Stack, range: std::ops::Range<usize>) -> Result<(), String> {
    let arrivals = Arrivals::watch(&stack.edge.admin, &edge_apps(), |_| true)?;
    let count = range.len();
    write_all(&stack.hub.admin, count, |kube, index| {
        kube.create(&hub_apps(), &application(&name(range.start + index))).map(drop)
    })?;
    arrivals.await_count(count, LIMIT)?;
    write_statuses(stack, range, "Healthy")
}

fn write_statuses(stack: &Stack, range: std::ops::Range<usize>, health: &'static str) -> Result<(), String> {
    let statuses = Arrivals::watch(&stack.hub.admin, &hub_apps(), move |object| {
        object["status"]["health"]["status"] == health
    })?;
    write_all(&stack.edge.admin, range.len(), |kube, index| {
        kube.merge_patch(&edge_app(&name(range.start + index)), &status("v1", health)).map(drop)
    })?;
    statuses.await_count(range.len(), LIMIT).map(drop)
}

/// Until the link is silent for two seconds: acknowledgements and resync rounds have ended.
fn settle(stack: &Stack) {
    let mut last = total(&stack.link);
    let mut silent = 0;
    wait_for(LIMIT, || {
        thread::sleep(Duration::from_millis(500));
        let now = total(&stack.link);
        silent = if now == last { silent + 1 } else { 0 };
        last = now;
        (silent >= 4).then_some(())
    });
}

fn total(link: &Link) -> u64 {
    let traffic = link.traffic();
    traffic.up + traffic.down
}

fn writes_of(server: &RealKube, user: &str) -> u64 {
    let requests = server.requests_of(user);
    ["create", "update", "patch", "delete"].iter().filter_map(|verb| requests.get(*verb)).sum()
}

/// The file of a command's program, by PATH if it has no slash.
fn program_file(command: &CommandLine) -> Result<PathBuf, String> {
    let program = PathBuf::from(command.program());
    if program.components().count() > 1 {
        return Ok(program);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|dir| dir.join(&program))
        .find(|file| file.is_file())
        .ok_or_else(|| format!("{} is not in PATH", program.display()))
}

fn name(index: usize) -> String {
    format!("app-{index:05}")
}

const FEW: usize = 50;
const MANY: usize = 1000;
const LIMIT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budgets_of_this_tree_are_complete() {
        let budgets = budgets().unwrap();
        assert!(budgets.len() >= 10);
        for budget in budgets {
            assert!(budget.aim <= budget.gate, "{}: the aim is beyond the gate", budget.name);
            assert!(!budget.unit.is_empty() && !budget.how.is_empty(), "{}: unit and how", budget.name);
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_line() {
        assert_eq!(parse_budgets("[a]\ngate = x"), Err("budgets.toml:2: gate = x".to_owned()));
        assert!(parse_budgets("gate = 1").is_err());
        assert!(parse_budgets("[a]\nother = 1").is_err());
    }
}
