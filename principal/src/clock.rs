//! Time and randomness for the cores: they have none of their own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_core::time::{Instant, Wall};

/// The process's monotonic clock, whose zero is the start.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: tokio::time::Instant,
    wall: Wall,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch_millis_at_zero = u64::try_from(epoch.as_millis()).unwrap_or(u64::MAX);
        Self { origin: tokio::time::Instant::now(), wall: Wall { epoch_millis_at_zero } }
    }

    /// Now, in the core's time.
    pub fn now(&self) -> Instant {
        Instant::from_millis(u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// What the core needs to know of wall time.
    pub fn wall(&self) -> Wall {
        self.wall
    }

    /// Sleeps until the core's deadline has passed. Its time counts whole milliseconds, cut off: one more, or the
    /// deadline is found still ahead and the sleep is made twice.
    pub async fn sleep_until(&self, at: Instant) {
        let at = self.origin + Duration::from_millis(at.as_millis()) + Duration::from_millis(1);
        tokio::time::sleep_until(at).await;
    }
}

/// A seed from the operating system.
pub fn seed() -> u64 {
    // Without entropy the jitter of two processes may coincide, which is harmless.
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()))
}

/// A random UUID, for identities and token ids.
pub fn uuid() -> String {
    agent_core::rand::Rng::new(seed()).uuid()
}
