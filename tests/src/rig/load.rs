//! Many Applications at once: a fixed number of writers, and a watch that notes when each one arrives.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Kube, KubeError};

/// Calls `write` for 0..count from [`WRITERS`] threads; returns when the last one has returned.
pub fn write_all(
    kube: &Kube,
    count: usize,
    write: impl Fn(&Kube, usize) -> Result<(), KubeError> + Sync,
) -> Result<Duration, String> {
    let started = Instant::now();
    let next = AtomicUsize::new(0);
    let outcome = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= count {
                            return Ok(());
                        }
                        write(kube, index)?;
                    }
                })
            })
            .collect();
        writers.into_iter().try_for_each(|writer| {
            writer.join().unwrap_or_else(|_| Err(KubeError::Transport("a writer panicked".to_owned())))
        })
    });
    outcome.map_err(|error| error.to_string())?;
    Ok(started.elapsed())
}

/// Notes the names of objects that come to satisfy a condition.
#[derive(Debug)]
pub struct Arrivals {
    names: Receiver<(String, Instant)>,
}

impl Arrivals {
    /// Watches from now on.
    pub fn watch(
        kube: &Kube,
        path: &str,
        condition: impl Fn(&Value) -> bool + Send + 'static,
    ) -> Result<Self, String> {
        let list = kube.get(&format!("{path}?limit=1"))?;
        let from = list["metadata"]["resourceVersion"].as_str().unwrap_or("0").to_owned();
        let watch = kube.watch(path, &from)?;
        let (sender, names) = mpsc::channel();
        // Ends with the watch, or with the first arrival after the receiver is gone.
        thread::spawn(move || {
            for event in watch {
                let object = &event["object"];
                if matches!(event["type"].as_str(), Some("ADDED" | "MODIFIED")) && condition(object) {
                    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                    if sender.send((name, Instant::now())).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Self { names })
    }

    /// When the last of `count` different objects arrived.
    pub fn await_count(&self, count: usize, limit: Duration) -> Result<Instant, String> {
        let end = Instant::now() + limit;
        let mut seen = BTreeSet::new();
        loop {
            let missing = || format!("{} of {count} arrived within {} s", seen.len(), limit.as_secs());
            match self.names.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((name, at)) => {
                    seen.insert(name);
                    if seen.len() == count {
                        return Ok(at);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(missing()),
                Err(RecvTimeoutError::Disconnected) => return Err(format!("the watch ended; {}", missing())),
            }
        }
    }
}

/// As many as the reference's figures were taken with.
pub const WRITERS: usize = 8;
