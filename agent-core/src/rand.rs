//! Injected randomness: jitter and UUIDs. Seeded by the shell, so that a run can be repeated.

use alloc::string::String;
use core::time::Duration;

/// SplitMix64. Good enough for jitter and event ids, never for secrets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose whole output follows from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; `0` when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next_u64() % bound }
    }

    /// Uniform in `low..=high` (whole milliseconds).
    pub fn between(&mut self, low: Duration, high: Duration) -> Duration {
        let low_millis = u64::try_from(low.as_millis()).unwrap_or(u64::MAX);
        let high_millis = u64::try_from(high.as_millis()).unwrap_or(u64::MAX);
        let span = high_millis.saturating_sub(low_millis);
        Duration::from_millis(low_millis + self.below(span.saturating_add(1)))
    }

    /// A version 4 UUID in its usual text form.
    pub fn uuid(&mut self) -> String {
        use core::fmt::Write;
        let (a, b) = (self.next_u64(), self.next_u64());
        let mut out = String::with_capacity(36);
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
            a >> 32,
            (a >> 16) & 0xffff,
            a & 0xfff,
            0x8000 | ((b >> 48) & 0x3fff),
            b & 0xffff_ffff_ffff
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_has_version_and_variant() {
        let mut rng = Rng::new(7);
        for _ in 0..100 {
            let uuid = rng.uuid();
            assert_eq!(uuid.len(), 36);
            assert_eq!(uuid.as_bytes()[14], b'4');
            assert!(matches!(uuid.as_bytes()[19], b'8' | b'9' | b'a' | b'b'), "{uuid}");
        }
    }

    #[test]
    fn same_seed_same_output() {
        let (mut a, mut b) = (Rng::new(3), Rng::new(3));
        assert!((0..10).all(|_| a.next_u64() == b.next_u64()));
        let low = Duration::from_millis(5);
        let high = Duration::from_millis(7);
        assert!((0..100).all(|_| (low..=high).contains(&a.between(low, high))));
    }
}
