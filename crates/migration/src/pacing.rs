//! The pace of copying: depth, chunk size and rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The burst that a rate limit allows: a chunk may begin this long before its bytes are due.
const BURST: Duration = Duration::from_millis(20);
/// Memory is counted after it was sent. A burst of it holds chunks back for this long at most.
const MEMORY_OWES_MAX: Duration = Duration::from_millis(200);

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

/// What everything of one migration may send together: the chunks of its volumes, whatever their lanes, and its VM's memory.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    /// Bytes a second; 0: no limit.
    rate: AtomicU64,
    /// When everything granted so far will have been sent at the rate, in nanoseconds.
    carried_at: AtomicU64,
    /// The bytes that volumes have sent: chunks, and guests' writes.
    by_volumes: AtomicU64,
    /// How often the limit has held a chunk back.
    held: AtomicU64,
}

impl Budget {
    /// Makes a budget of this many bytes a second; `None`: no limit.
    pub fn of(bytes_per_second: Option<u64>) -> Self {
        let budget = Self::default();
        budget.set_rate(bytes_per_second);
        budget
    }

    /// Returns the limit in bytes a second; `None`: there is none.
    pub fn rate(&self) -> Option<u64> {
        Some(self.0.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Changes the limit, and drops the debt of earlier grants.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.0.rate.store(bytes_per_second.map_or(0, |rate| rate.max(1)), Ordering::Relaxed);
        self.0.carried_at.store(0, Ordering::Relaxed);
    }

    /// Returns the earliest start of the next chunk; `now` if it may start at once.
    pub fn next_start(&self, now: Duration) -> Duration {
        if self.rate().is_none() {
            return now;
        }
        let carried_at = Duration::from_nanos(self.0.carried_at.load(Ordering::Relaxed));
        let start = carried_at.saturating_sub(BURST);
        if start > now {
            self.0.held.fetch_add(1, Ordering::Relaxed);
        }
        start.max(now)
    }

    /// Counts a chunk that begins.
    pub fn spend(&self, now: Duration, bytes: u64) {
        self.note_guest_write(bytes);
        self.owe(now, bytes, Duration::MAX);
    }

    /// Counts a guest's write that goes to the target as well. No limit holds it back.
    pub fn note_guest_write(&self, bytes: u64) {
        self.0.by_volumes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts memory that has been sent. Chunks wait for it, but not for long at a time.
    pub fn note_memory(&self, now: Duration, bytes: u64) {
        self.owe(now, bytes, MEMORY_OWES_MAX);
    }

    fn owe(&self, now: Duration, bytes: u64, owes_max: Duration) {
        let Some(rate) = self.rate() else { return };
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let (now, cost) = (nanos(now), u64::try_from(cost).unwrap_or(u64::MAX));
        let latest = now.saturating_add(nanos(owes_max));
        let owed =
            |carried_at: u64| Some(carried_at.max(now).saturating_add(cost).min(latest.max(carried_at)));
        // The closure always returns a value.
        let _ = self.0.carried_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, owed);
    }

    /// Returns whether somebody else has it, too.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Returns what the volumes have used so far.
    pub fn used(&self) -> Used {
        Used { bytes: self.0.by_volumes.load(Ordering::Relaxed), held: self.0.held.load(Ordering::Relaxed) }
    }
}

/// What the volumes of a migration have used of its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The bytes of their chunks and of guests' writes.
    pub bytes: u64,
    /// How often the limit has held a chunk back.
    pub held: u64,
}

/// Two budgets are equal if they are the same one.
impl PartialEq for Budget {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Budget {}

/// Decides when the next chunk may begin.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    budget: Budget,
}

impl Pacing {
    pub(crate) fn new(settings: &PacingSettings) -> Self {
        Self { budget: Budget::of(settings.bytes_per_second) }
    }

    /// Uses the budget of the whole migration, which has its limit already.
    pub(crate) fn share(&mut self, budget: Budget) {
        self.budget = budget;
    }

    /// Returns the earliest start of the next chunk; `now` if it may start at once.
    pub(crate) fn next_start(&self, now: Duration) -> Duration {
        self.budget.next_start(now)
    }

    pub(crate) fn spend(&self, now: Duration, bytes: u64) {
        self.budget.spend(now, bytes);
    }

    pub(crate) fn note_guest_write(&self, bytes: u64) {
        self.budget.note_guest_write(bytes);
    }

    /// Changes the rate, and drops the debt of earlier grants.
    pub(crate) fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.budget.set_rate(bytes_per_second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_rate_is_kept_over_time_whatever_the_chunks() {
        let rate = 100 << 20;
        let settings = PacingSettings { depth: 8, chunk_bytes: 1 << 20, bytes_per_second: Some(rate) };
        let pacing = Pacing::new(&settings);
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
        let pacing = Pacing::new(&PacingSettings::default());
        let now = Duration::from_secs(1);
        pacing.spend(now, u64::MAX);
        assert_eq!(pacing.next_start(now), now);
    }

    #[test]
    fn lanes_and_memory_share_one_budget() {
        let budget = Budget::of(Some(1000));
        let now = Duration::from_secs(7);
        budget.spend(now, 1000);
        let other = budget.clone();
        assert_eq!(other.next_start(now), now + Duration::from_secs(1) - BURST);
        assert_eq!(other.used(), Used { bytes: 1000, held: 1 });
        other.set_rate(None);
        assert_eq!((budget.rate(), budget.next_start(now)), (None, now));
        // Memory that was sent holds chunks back, however much of it there was only for a moment.
        budget.set_rate(Some(1000));
        budget.note_memory(now, 100);
        assert_eq!(budget.next_start(now), now + Duration::from_millis(100) - BURST);
        budget.note_memory(now, 1_000_000);
        assert_eq!(budget.next_start(now), now + MEMORY_OWES_MAX - BURST);
        budget.note_guest_write(5);
        assert_eq!(budget.used().bytes, 1005);
    }
}
