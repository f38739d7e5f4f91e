//! Bits per second.

use std::fmt;
use std::time::Duration;

/// The rate of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitRate(u64);

impl BitRate {
    /// Returns a rate of `bits` per second; at least one, so that everything arrives at last.
    pub const fn bits(bits: u64) -> Self {
        Self(if bits == 0 { 1 } else { bits })
    }

    /// Returns a rate of `megabits` million bits per second.
    pub const fn megabits(megabits: u64) -> Self {
        Self::bits(megabits.saturating_mul(1_000_000))
    }

    /// Returns the bits per second.
    pub fn bits_per_second(self) -> u64 {
        self.0
    }

    /// Returns the bytes per second.
    pub fn bytes_per_second(self) -> f64 {
        self.0 as f64 / 8.0
    }

    /// Returns how long `bytes` take.
    pub fn time_of(self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Returns how many bytes fit into `time`.
    pub fn bytes_in(self, time: Duration) -> u64 {
        let bytes = u128::from(self.0).saturating_mul(time.as_nanos()) / 8 / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bits if bits >= 1_000_000_000 => write!(f, "{} Gbit/s", bits as f64 / 1e9),
            bits => write!(f, "{} Mbit/s", bits as f64 / 1e6),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_times_are_each_others_inverse() {
        let rate = BitRate::megabits(1000);
        assert_eq!(rate.time_of(125_000), Duration::from_millis(1));
        assert_eq!(rate.bytes_in(Duration::from_millis(180)), 22_500_000);
        assert_eq!(
            (rate.to_string(), BitRate::bits(500_000_000).to_string()),
            ("1 Gbit/s".into(), "500 Mbit/s".into())
        );
    }

    #[test]
    fn absurd_figures_do_not_overflow() {
        assert_eq!(BitRate::bits(0).time_of(u64::MAX), Duration::from_nanos(u64::MAX));
        assert_eq!(BitRate::bits(u64::MAX).bytes_in(Duration::MAX), u64::MAX);
    }
}
