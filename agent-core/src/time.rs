//! The core's own clock type: it never reads a clock, the shell hands `now` in.

use core::ops::{Add, AddAssign, Sub};
use core::time::Duration;

/// Milliseconds since the shell started (monotonic; the origin has no meaning).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(u64);

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self(0);

    /// `millis` after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the origin.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Time since `earlier`; zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}

/// Wall time, known to the core only as an offset from [`Instant`]: it stamps `sentat` and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wall {
    /// Milliseconds since the Unix epoch at [`Instant::ZERO`].
    pub epoch_millis_at_zero: u64,
}

impl Wall {
    /// RFC 3339 in UTC with the fraction's trailing zeros trimmed, as the reference stamps `sentat`
    /// (docs/protocol.md, "CloudEvent attributes").
    pub fn rfc3339(self, now: Instant) -> alloc::string::String {
        use core::fmt::Write;
        let total = self.epoch_millis_at_zero.saturating_add(now.0);
        let (secs, millis) = (total / 1000, total % 1000);
        let (days, second_of_day) = (secs / 86_400, secs % 86_400);
        let (year, month, day) = civil_from_days(days);
        let mut out = alloc::string::String::with_capacity(24);
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}",
            second_of_day / 3600,
            second_of_day / 60 % 60,
            second_of_day % 60
        );
        if millis != 0 {
            let _ = write!(out, ".{millis:03}");
            while out.ends_with('0') {
                out.pop();
            }
        }
        out.push('Z');
        out
    }
}

/// Proleptic Gregorian date of a day count since 1970-01-01, counted in 400-year cycles that start on 1 March.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc3339_trims_the_fraction() {
        let wall = Wall { epoch_millis_at_zero: 1_790_000_000_000 };
        assert_eq!(wall.rfc3339(Instant::ZERO), "2026-09-21T14:13:20Z");
        assert_eq!(wall.rfc3339(Instant::from_millis(120)), "2026-09-21T14:13:20.12Z");
        let leap = Wall { epoch_millis_at_zero: 1_709_164_800_000 };
        assert_eq!(leap.rfc3339(Instant::ZERO), "2024-02-29T00:00:00Z");
        assert_eq!(Wall { epoch_millis_at_zero: 0 }.rfc3339(Instant::ZERO), "1970-01-01T00:00:00Z");
    }
}
