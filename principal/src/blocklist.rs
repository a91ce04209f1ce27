//! Client certificates that are refused although their CA is good.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::kube::material::Material;

/// The blocklist's ConfigMap, as of a few seconds ago.
pub struct Blocklist {
    /// `None`: client certificates do not authenticate, so none is refused.
    material: Option<Material>,
    cached: Mutex<Option<(Instant, BTreeSet<String>)>>,
}

impl Blocklist {
    /// Reads it for the first time, so that trouble shows at start.
    pub async fn load(material: Option<Material>) -> Result<Self, String> {
        let blocklist = Self { material, cached: Mutex::default() };
        blocklist.refresh().await.map(|_| blocklist)
    }

    /// Whether a fingerprint is on it. An API server that does not answer is an error: who is refused must not get
    /// in by its trouble.
    pub async fn has(&self, fingerprint: &str) -> Result<bool, String> {
        if fingerprint.is_empty() || self.material.is_none() {
            return Ok(false);
        }
        let fresh = {
            let cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
            cached.as_ref().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, set)| set.contains(fingerprint))
        };
        match fresh {
            Some(known) => Ok(known),
            None => Ok(self.refresh().await?.contains(fingerprint)),
        }
    }

    /// Reads it again. Empty when there is none.
    pub async fn refresh(&self) -> Result<BTreeSet<String>, String> {
        let Some(material) = &self.material else { return Ok(BTreeSet::new()) };
        let set: BTreeSet<String> = material.blocklist().await?.into_iter().collect();
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        *cached = Some((Instant::now(), set.clone()));
        Ok(set)
    }

    /// Whether there is anything to refresh.
    pub fn is_used(&self) -> bool {
        self.material.is_some()
    }
}

/// A thousand agents that reconnect at once cost one read.
const FRESH: Duration = Duration::from_secs(5);
