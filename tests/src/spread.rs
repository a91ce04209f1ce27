//! Hub-to-edge time of many Applications, and their status back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::arguments::hundredths;
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
    /// Of those, after the last one was written.
    pub status_lag: f64,
    pub agent_rss_kib: u64,
    pub principal_rss_kib: u64,
}

impl Spread {
    /// From the creation of the last Application until the last one was on the site.
    pub fn lag(&self) -> f64 {
        self.arrived - self.created
    }

    pub fn to_json(&self) -> Value {
        json!({
            "created_s": hundredths(self.created),
            "arrived_s": hundredths(self.arrived),
            "lag_s": hundredths(self.lag()),
            "status_s": hundredths(self.status),
            "status_lag_s": hundredths(self.status_lag),
            "agent_rss_kib": self.agent_rss_kib,
            "principal_rss_kib": self.principal_rss_kib,
        })
    }
}

/// Measures each pair of peers three times, each time on fresh API servers with fresh peers, and returns the medians by arrival.
///
/// The pairs take turns, so that a busy machine is busy for all of them.
pub fn measure(
    pairs: &[StackOptions],
    count: usize,
    report: impl Fn(usize, &Spread),
) -> Result<Vec<Spread>, String> {
    let mut runs = vec![Vec::with_capacity(RUNS); pairs.len()];
    for _ in 0..RUNS {
        for (index, options) in pairs.iter().enumerate() {
            let run = once(options, count)?;
            report(index, &run);
            runs[index].push(run);
        }
    }
    Ok(runs.into_iter().map(median).collect())
}

fn median(mut runs: Vec<Spread>) -> Spread {
    runs.sort_by(|a, b| a.arrived.total_cmp(&b.arrived));
    runs[runs.len() / 2]
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
    let written = write_all(&stack.edge.admin, count, |kube, index| {
        kube.merge_patch(&edge_app(&name(index)), &status("v1", "Healthy")).map(drop)
    })?;
    let reported = statuses.await_count(count, LIMIT).map_err(|e| format!("{e}\n{}", stack.last_words()))?;
    let rss = |process: &crate::rig::Process| process.memory().map(|memory| memory.rss_kib);
    let status = reported.duration_since(writing).as_secs_f64();
    Ok(Spread {
        created: created.as_secs_f64(),
        arrived: arrived.duration_since(started).as_secs_f64(),
        status,
        // The last one may have arrived before its writer had the answer.
        status_lag: (status - written.as_secs_f64()).max(0.0),
        agent_rss_kib: rss(stack.agent()?).map_err(|error| error.to_string())?,
        principal_rss_kib: rss(stack.principal()?).map_err(|error| error.to_string())?,
    })
}

fn name(index: usize) -> String {
    format!("app-{index:05}")
}

const RUNS: usize = 3;
/// The reference needs about 20 s for 1,000.
const LIMIT: Duration = Duration::from_secs(240);
