//! The pace of copying: depth, chunk size and rate.

use std::time::Duration;

/// The burst that a rate limit allows: a chunk may begin this long before its bytes are due.
const BURST: Duration = Duration::from_millis(20);

/// The limits of the mover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacingSettings {
    /// The chunks in flight, at least one. Towards another host: this many full-size chunks, or the same bytes in smaller ones.
    pub depth: usize,
    /// The bytes of a chunk, rounded down to whole blocks; at least one block.
    pub chunk_bytes: u64,
    /// The rate limit in bytes a second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for PacingSettings {
    /// Eight chunks of 512 KiB keep a local disk busy, and a second pass over a chunk holds a write for only a few milliseconds.
    fn default() -> Self {
        Self { depth: 8, chunk_bytes: 512 << 10, bytes_per_second: None }
    }
}

/// Decides when the next chunk may begin.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    settings: PacingSettings,
    /// When everything granted so far will have been sent at the limited rate.
    carried_at: Duration,
}

impl Pacing {
    pub(crate) fn new(settings: PacingSettings) -> Self {
        Self { settings, carried_at: Duration::ZERO }
    }

    /// Returns the earliest start of the next chunk; `now` if it may start at once.
    pub(crate) fn next_start(&self, now: Duration) -> Duration {
        match self.settings.bytes_per_second {
            None => now,
            Some(_) => now.max(self.carried_at.saturating_sub(BURST)),
        }
    }

    pub(crate) fn spend(&mut self, now: Duration, bytes: u64) {
        if let Some(rate) = self.settings.bytes_per_second {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
            let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            self.carried_at = self.carried_at.max(now).saturating_add(cost);
        }
    }

    /// Changes the rate, and drops the debt of earlier grants.
    pub(crate) fn set_rate(&mut self, bytes_per_second: Option<u64>) {
        self.settings.bytes_per_second = bytes_per_second;
        self.carried_at = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_rate_is_kept_over_time_whatever_the_chunks() {
        let rate = 100 << 20;
        let settings = PacingSettings { depth: 8, chunk_bytes: 1 << 20, bytes_per_second: Some(rate) };
        let mut pacing = Pacing::new(settings);
        let mut now = Duration::from_secs(7);
        let mut bytes = 0;
        while now < Duration::from_secs(9) {
            now = pacing.next_start(now);
            let chunk = 4096 + bytes % (1 << 20);
            pacing.spend(now, chunk);
            bytes += chunk;
        }
        let allowed = 2.0 * rate as f64;
        assert!((bytes as f64) < allowed * 1.03 && bytes as f64 > allowed * 0.97, "{bytes} of {allowed}");
    }

    #[test]
    fn without_a_rate_a_chunk_begins_at_once() {
        let mut pacing = Pacing::new(PacingSettings::default());
        let now = Duration::from_secs(1);
        pacing.spend(now, u64::MAX);
        assert_eq!(pacing.next_start(now), now);
    }
}
