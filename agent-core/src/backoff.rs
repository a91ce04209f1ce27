//! Waiting times between attempts: initial, factor, cap, and full jitter.

use core::fmt;
use core::time::Duration;

use crate::rand::Rng;

/// How long to wait after the n-th failure in a row. Built by [`Policy::new`], which checks it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    initial_millis: u64,
    factor_percent: u64,
    cap_millis: u64,
}

impl Policy {
    /// A policy whose ceiling starts at `initial` and grows by `factor_percent` (200 doubles it) up to `cap`.
    ///
    /// `const`, so that the policies that are constants are checked at compile time.
    pub const fn new(initial: Duration, factor_percent: u32, cap: Duration) -> Result<Self, PolicyError> {
        let initial_millis = initial.as_millis();
        let cap_millis = cap.as_millis();
        if initial_millis == 0 {
            return Err(PolicyError::ZeroInitial);
        }
        if factor_percent < 100 {
            return Err(PolicyError::Shrinking);
        }
        if cap_millis < initial_millis {
            return Err(PolicyError::CapBelowInitial);
        }
        if cap_millis > MAX_MILLIS {
            return Err(PolicyError::CapTooLong);
        }
        Ok(Self {
            // Both are at most MAX_MILLIS, checked above.
            initial_millis: initial_millis as u64,
            factor_percent: factor_percent as u64,
            cap_millis: cap_millis as u64,
        })
    }

    /// The longest possible wait after `failures` failures in a row (0 counts as 1).
    pub const fn ceiling(&self, failures: u32) -> Duration {
        let mut millis = self.initial_millis;
        let mut left = failures;
        while left > 1 && millis < self.cap_millis && self.factor_percent > 100 {
            // At least one more millisecond each time, so that small ceilings grow too and the loop ends.
            let grown = millis.saturating_mul(self.factor_percent) / 100;
            millis = if grown > millis { grown } else { millis + 1 };
            left -= 1;
        }
        Duration::from_millis(if millis < self.cap_millis { millis } else { self.cap_millis })
    }

    /// The wait after `failures` failures in a row, with full jitter.
    ///
    /// Uniform between half the initial wait and the ceiling: a fleet that lost its hub in the same second must
    /// spread over the whole span, and no draw may come so close to zero that a loop runs hot.
    pub fn delay(&self, failures: u32, rng: &mut Rng) -> Duration {
        rng.between(Duration::from_millis(self.initial_millis.div_ceil(2)), self.ceiling(failures))
    }
}

/// A [`Policy`] and the number of failures since the last success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backoff {
    policy: Policy,
    failures: u32,
}

impl Backoff {
    /// No failure yet.
    pub const fn new(policy: Policy) -> Self {
        Self { policy, failures: 0 }
    }

    /// Counts one more failure and says how long to wait.
    pub fn fail(&mut self, rng: &mut Rng) -> Duration {
        self.failures = self.failures.saturating_add(1);
        self.policy.delay(self.failures, rng)
    }

    /// Forgets the failures.
    pub fn succeed(&mut self) {
        self.failures = 0;
    }

    /// Failures since the last success.
    pub const fn failures(&self) -> u32 {
        self.failures
    }
}

/// Why a policy makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyError {
    /// An initial wait of zero is a hot loop.
    ZeroInitial,
    /// A factor below 100 % waits less after each failure.
    Shrinking,
    /// The cap is below the initial wait.
    CapBelowInitial,
    /// The cap is above one week.
    CapTooLong,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroInitial => "the initial wait must not be zero",
            Self::Shrinking => "the factor must be at least 100 %",
            Self::CapBelowInitial => "the cap must not be below the initial wait",
            Self::CapTooLong => "the cap must not be above one week",
        })
    }
}

const MAX_MILLIS: u128 = 7 * 24 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(initial: u64, factor: u32, cap: u64) -> Result<Policy, PolicyError> {
        Policy::new(Duration::from_millis(initial), factor, Duration::from_millis(cap))
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(policy(0, 200, 10), Err(PolicyError::ZeroInitial));
        assert_eq!(policy(10, 99, 10), Err(PolicyError::Shrinking));
        assert_eq!(policy(10, 200, 9), Err(PolicyError::CapBelowInitial));
        assert_eq!(policy(10, 200, u64::MAX), Err(PolicyError::CapTooLong));
    }

    #[test]
    fn the_ceiling_grows_to_the_cap() {
        let p = policy(1000, 200, 60_000).unwrap();
        let seconds: [u64; 9] = core::array::from_fn(|n| p.ceiling(n as u32).as_secs());
        assert_eq!(seconds, [1, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(p.ceiling(u32::MAX).as_secs(), 60);
        assert_eq!(policy(1, 120, 5).unwrap().ceiling(4).as_millis(), 4);
        assert_eq!(policy(5, 100, 50).unwrap().ceiling(u32::MAX).as_millis(), 5);
    }

    #[test]
    fn delays_use_the_whole_span_and_never_run_hot() {
        let mut rng = Rng::new(11);
        let p = policy(1000, 200, 60_000).unwrap();
        let drawn: [u64; 200] = core::array::from_fn(|_| p.delay(20, &mut rng).as_millis() as u64);
        assert!(drawn.iter().all(|d| (500..=60_000).contains(d)));
        assert!(drawn.iter().any(|d| *d < 10_000) && drawn.iter().any(|d| *d > 50_000));
    }

    #[test]
    fn success_starts_over() {
        let mut rng = Rng::new(1);
        let mut backoff = Backoff::new(policy(1000, 1000, 100_000).unwrap());
        for _ in 0..5 {
            backoff.fail(&mut rng);
        }
        assert_eq!(backoff.failures(), 5);
        backoff.succeed();
        assert!(backoff.fail(&mut rng).as_millis() <= 1000);
    }
}
