//! Real peers as processes: API servers, Redis, principals, agents, and the link between them.

pub mod apps;
mod cluster;
mod embedded;
mod kube;
mod link;
pub mod load;
mod process;
mod real_kube;
mod stack;

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs, io, process as std_process, thread};

pub use cluster::{Cluster, Rights, write_kubeconfig};
pub use embedded::embedded_cluster;
pub use kube::{Kube, KubeError, Watch};
pub use link::{Link, Traffic};
pub use process::{CommandLine, Memory, MemoryWatch, Process};
pub use real_kube::{RealKube, kube_assets};
pub use stack::{AGENT, EDGE_NAMESPACE, HUB_NAMESPACE, Stack, StackOptions};

/// Asks `condition` until it answers `Some` or the time is over.
///
/// Processes and sockets of others cannot be awaited otherwise; nothing sleeps longer than the condition needs.
pub fn wait_for<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// A loopback port that is free now. The listener is closed before the caller binds, which another process
/// may use; the kernel hands out ephemeral ports round-robin, so it practically does not.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// A directory that is removed with its owner, unless `HARNESS_KEEP` is set.
#[derive(Debug)]
pub struct WorkDir(PathBuf);

impl WorkDir {
    pub fn new(name: &str) -> io::Result<Self> {
        for attempt in 0..1000_u32 {
            let path = env::temp_dir().join(format!("{name}-{}-{attempt}", std_process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("no unused name for a work directory"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if env::var_os("HARNESS_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}
