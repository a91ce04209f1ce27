//! Hub-to-edge time of many Applications, and their status back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::apps::{application, edge_app, edge_apps, hub_apps, status};
use crate::rig::load::{Arrivals, write_all};
use crate::rig::{RealKube, Stack, StackOptions};

/// One measurement, in seconds and KiB.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Until the last Application was created on the hub.
    pub created: f64,
    /// From the same start until the last one was on the site.
    pub arrived: f64,
    /// From the first status written on the site to the last one on the hub.
    pub status: f64,
    pub agent_rss_kib: u64,
    pub principal_rss_kib: u64,
}

impl Spread {
    pub fn to_json(&self) -> Value {
        let round = |seconds: f64| (seconds * 100.0).round() / 100.0;
        json!({
            "created_s": round(self.created),
            "arrived_s": round(self.arrived),
            "lag_s": round(self.arrived - self.created),
            "status_s": round(self.status),
            "agent_rss_kib": self.agent_rss_kib,
            "principal_rss_kib": self.principal_rss_kib,
        })
    }
}

/// Three measurements, each on fresh API servers with fresh peers, sorted by arrival. The median is the second.
pub fn measure(
    options: &StackOptions,
    count: usize,
    report: impl Fn(&Spread),
) -> Result<[Spread; 3], String> {
    let mut runs = [once(options, count)?, once(options, count)?, once(options, count)?];
    runs.iter().for_each(report);
    runs.sort_by(|a, b| a.arrived.total_cmp(&b.arrived));
    Ok(runs)
}

fn once(options: &StackOptions, count: usize) -> Result<Spread, String> {
    let (hub, edge) = RealKube::start_pair()?;
    let (hub, edge) = (Arc::new(hub).into_cluster()?, Arc::new(edge).into_cluster()?);
    let mut options = options.clone();
    // What an operator runs with; info writes a line for each event.
    options.log_level = "warning".to_owned();
    let stack = Stack::start(hub, edge, options)?;
    let arrivals = Arrivals::watch(&stack.edge.admin, &edge_apps(), |_| true)?;
    let started = Instant::now();
    let created = write_all(&stack.hub.admin, count, |kube, index| {
        kube.create(&hub_apps(), &application(&name(index))).map(drop)
    })?;
    let arrived = arrivals.await_count(count, LIMIT).map_err(|e| format!("{e}\n{}", stack.last_words()))?;

    let statuses = Arrivals::watch(&stack.hub.admin, &hub_apps(), |object| {
        object["status"]["health"]["status"] == "Healthy"
    })?;
    let writing = Instant::now();
    write_all(&stack.edge.admin, count, |kube, index| {
        kube.merge_patch(&edge_app(&name(index)), &status("v1", "Healthy")).map(drop)
    })?;
    let reported = statuses.await_count(count, LIMIT).map_err(|e| format!("{e}\n{}", stack.last_words()))?;
    let rss = |process: &crate::rig::Process| process.memory().map(|memory| memory.rss_kib);
    Ok(Spread {
        created: created.as_secs_f64(),
        arrived: arrived.duration_since(started).as_secs_f64(),
        status: reported.duration_since(writing).as_secs_f64(),
        agent_rss_kib: rss(stack.agent()?).map_err(|error| error.to_string())?,
        principal_rss_kib: rss(stack.principal()?).map_err(|error| error.to_string())?,
    })
}

fn name(index: usize) -> String {
    format!("app-{index:05}")
}

/// The reference needs about 20 s for 1,000.
const LIMIT: Duration = Duration::from_secs(240);
