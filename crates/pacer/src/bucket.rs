//! A rate of bytes: when the next chunk may begin.

use std::time::Duration;

/// The burst that a rate allows: a chunk may begin this long before its bytes are due.
const BURST: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket {
    /// When everything that was granted will have been moved at the rate.
    carried_at: Duration,
}

impl Bucket {
    pub(crate) fn opens_at(&self) -> Duration {
        self.carried_at.saturating_sub(BURST)
    }

    pub(crate) fn spend(&mut self, now: Duration, bytes: u64, bytes_per_second: f64) {
        let cost = Duration::from_secs_f64((bytes as f64 / bytes_per_second.max(1.0)).min(60.0));
        self.carried_at = self.carried_at.max(now) + cost;
    }

    /// Shrinks what is owed, after the rate has grown, or the other way round.
    pub(crate) fn rescale(&mut self, now: Duration, factor: f64) {
        let owed = self.carried_at.saturating_sub(now);
        self.carried_at = now + owed.mul_f64(factor.clamp(0.0, 10.0)).min(Duration::from_secs(60));
    }
}
