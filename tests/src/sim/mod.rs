//! Both halves against each other in virtual time, with everything that can go wrong, from a seed.
//!
//! A run is a pure function of its seed: [`run`] plays the steps of [`scenario::generate`] in a `World` of two embedded
//! API servers, a link that loses what is under way when it is cut, users on both sides, and Argo CD's controller; then
//! it heals everything and judges. [`explore`] runs many seeds and shortens what fails.

pub mod checker;
mod content;
pub mod half;
pub mod model;
pub mod plant;
pub mod scenario;

mod shrink;
mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde_json::{Value, json};

pub use checker::Violation;
pub use plant::Plant;
use scenario::{Family, Pairing, Step};

/// Counts of what happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(BTreeMap<&'static str, u64>);

/// How one run ended.
#[derive(Clone, Debug)]
pub struct Report {
    pub violation: Option<Violation>,
    pub counters: Counters,
    /// Of every frame and every write, in order.
    pub trace_hash: u64,
}

/// Which seeds to run.
#[derive(Clone, Debug)]
pub struct Options {
    pub base: u64,
    pub seeds: u64,
    /// `None`: all in turn.
    pub family: Option<Family>,
    pub plant: Option<Plant>,
    pub threads: usize,
}

/// A seed that failed, and the short way to its failure.
#[derive(Clone, Debug)]
pub struct Failure {
    pub seed: u64,
    pub family: Family,
    pub violation: Violation,
    pub trace: Vec<Step>,
}

/// The sum of many runs.
#[derive(Clone, Debug)]
pub struct Summary {
    pub seeds: u64,
    pub violations: u64,
    /// Every seed that failed, and the rule it broke.
    pub failed: Vec<(u64, &'static str)>,
    /// The first ones, shortened.
    pub failures: Vec<Failure>,
    pub counters: Counters,
    pub trace_hash: u64,
}

/// Plays `steps` as seed `seed`.
pub fn run(seed: u64, pairing: Pairing, steps: &[Step], plant: Option<Plant>) -> Report {
    world::World::new(seed, pairing, plant).run(steps)
}

/// The family of a seed when none is asked for.
pub fn family_of(seed: u64) -> Family {
    Family::STEPS[(seed % Family::STEPS.len() as u64) as usize]
}

/// Runs all seeds; with a plant only until it is caught: a seed that fails with the plant and not without it.
pub fn explore(options: &Options) -> Summary {
    let next = AtomicU64::new(0);
    let caught = AtomicBool::new(false);
    let reports = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                while !(options.plant.is_some() && caught.load(Ordering::Relaxed)) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= options.seeds {
                        return;
                    }
                    let seed = options.base + number;
                    let family = options.family.unwrap_or_else(|| family_of(seed));
                    let steps = scenario::generate(seed, family);
                    let pairing = family.pairing(seed);
                    let mut report = run(seed, pairing, &steps, options.plant);
                    if options.plant.is_some() && run(seed, pairing, &steps, None).violation.is_some() {
                        // What fails anyhow says nothing about the plant.
                        report.violation = None;
                    }
                    if report.violation.is_some() {
                        caught.store(true, Ordering::Relaxed);
                    }
                    reports.lock().unwrap_or_else(PoisonError::into_inner).insert(seed, (family, report));
                }
            });
        }
    });
    let reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut summary = Summary {
        seeds: reports.len() as u64,
        violations: 0,
        failed: Vec::new(),
        failures: Vec::new(),
        counters: Counters::default(),
        trace_hash: 0,
    };
    for (seed, (family, report)) in reports {
        summary.counters.merge(&report.counters);
        // In the order of the seeds, whichever thread was faster.
        summary.trace_hash = summary.trace_hash.rotate_left(7) ^ report.trace_hash;
        if let Some(violation) = report.violation {
            summary.violations += 1;
            summary.failed.push((seed, violation.rule));
            if summary.failures.len() < FAILURES_SHOWN {
                summary.failures.push(shorten(seed, family, violation, options.plant));
            }
        }
    }
    summary
}

fn shorten(seed: u64, family: Family, violation: Violation, plant: Option<Plant>) -> Failure {
    let (pairing, steps) = (family.pairing(seed), scenario::generate(seed, family));
    let fails = |steps: &[Step]| {
        run(seed, pairing, steps, plant).violation.is_some_and(|other| other.rule == violation.rule)
    };
    let trace = shrink::shrink(&steps, SHRINK_ATTEMPTS, fails);
    let violation = run(seed, pairing, &trace, plant).violation.unwrap_or(violation);
    Failure { seed, family, violation, trace }
}

impl Summary {
    /// Names of the counters that stayed at 0.
    pub fn zero_counters(&self) -> Vec<&'static str> {
        // What only a foreign half does is exercised where one takes part.
        let foreign = self.counters.get("model_done") > 0;
        let of_foreign =
            |name: &str| name.starts_with("model_") || matches!(name, "deletes_by_model" | "lapses");
        let is_zero = |name: &&str| self.counters.get(name) == 0 && (foreign || !of_foreign(name));
        COUNTERS.iter().copied().filter(is_zero).collect()
    }

    pub fn to_json(&self) -> Value {
        let counters: BTreeMap<&str, u64> =
            COUNTERS.iter().map(|name| (*name, self.counters.get(name))).collect();
        let failures: Vec<Value> = self
            .failures
            .iter()
            .map(|failure| {
                json!({
                    "seed": failure.seed, "family": failure.family.as_str(), "rule": failure.violation.rule,
                    "text": failure.violation.text,
                    "trace": failure.trace.iter().map(ToString::to_string).collect::<Vec<_>>()
                })
            })
            .collect();
        json!({
            "seeds": self.seeds, "violations": self.violations, "failed": self.failed, "failures": failures,
            "counters": counters,
            "trace_hash": format!("{:016x}", self.trace_hash)
        })
    }
}

impl Counters {
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    fn add(&mut self, name: &'static str, count: u64) {
        *self.0.entry(name).or_default() += count;
    }

    fn merge(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            assert!(COUNTERS.contains(name), "{name} is not listed");
            self.add(name, *count);
        }
    }
}

/// The agent's name, and the hub's namespace for it.
pub const AGENT: &str = "agent-1";
/// Where the hub's Argo CD and the principal live.
pub const HUB_NAMESPACE: &str = "argocd-hub";
/// Where the agent keeps Applications.
pub const EDGE_NAMESPACE: &str = "argocd";
/// Survives every crash of the principal.
pub const PRINCIPAL_UID: &str = "0f8a6a3e-5d0c-4d3f-9a51-5e7c1c7f0001";

const FAILURES_SHOWN: usize = 3;
const SHRINK_ATTEMPTS: usize = 2000;

/// Everything that is counted. A run of many seeds that leaves one at 0 has not exercised it.
pub const COUNTERS: &[&str] = &[
    "acks",
    "api_errors",
    "api_refusals",
    "api_too_many",
    "compactions",
    "confirmed_deletes",
    "conflicts",
    "content_deleted",
    "content_edge_deletes",
    "content_edge_edits",
    "content_withdrawn",
    "content_written",
    "controller_finalized",
    "controller_reconciled",
    "controller_started",
    "controller_succeeded",
    "controller_terminated",
    "controller_touched",
    "crashes_edge",
    "crashes_hub",
    "creates",
    "cuts",
    "deletes",
    "deletes_by_model",
    "deletes_with_finalizer",
    "dials_failed",
    "disconnects_seen",
    "edge_deletes",
    "edge_deletes_by_agent",
    "edge_edits",
    "edge_locals",
    "edge_squats",
    "edge_unmarks",
    "empty_lists",
    "expired_watches",
    "failed_lists",
    "frame_bytes",
    "frames_lost",
    "frames_to_edge",
    "frames_to_hub",
    "heals",
    "health_changes",
    "held",
    "idle_periods",
    "lapses",
    "late_acks",
    "lost_answers",
    "lost_requests",
    "metadata_edits",
    "model_acked_failures",
    "model_adopted",
    "model_discarded",
    "model_discarded_creates",
    "model_done",
    "model_dropped_unsent",
    "model_ended",
    "model_existed",
    "model_failed_recreates",
    "model_failed_reverts",
    "model_failed_starts",
    "model_given_up",
    "model_merged",
    "model_missed_ends",
    "model_operations",
    "model_overflows",
    "model_recreated",
    "model_replaced",
    "model_resent",
    "model_restarts",
    "model_resyncs",
    "model_reverted",
    "model_rounds",
    "model_seen",
    "model_stale_reverts",
    "model_terminated",
    "model_unacked_failures",
    "moves",
    "operations",
    "operations_arrived",
    "pages",
    "reads",
    "recreated",
    "recreates",
    "refreshes",
    "refused",
    "resent",
    "resyncs",
    "reverted",
    "rounds",
    "rounds_equal",
    "seeds",
    "slow_answers",
    "streams",
    "swallowed",
    "terminates",
    "trouble",
    "updates",
    "watches",
    "watches_broken",
    "watches_renewed",
    "writes_edge",
    "writes_hub",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_follows_from_its_seed() {
        for seed in [3, 8] {
            let family = family_of(seed);
            let (pairing, steps) = (family.pairing(seed), scenario::generate(seed, family));
            let (first, second) = (run(seed, pairing, &steps, None), run(seed, pairing, &steps, None));
            assert_eq!(first.trace_hash, second.trace_hash);
            assert_eq!(first.counters, second.counters);
            assert_eq!(first.violation, second.violation);
        }
    }

    #[test]
    fn every_counter_is_listed_once_and_in_order() {
        assert!(COUNTERS.is_sorted());
        assert!(COUNTERS.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
