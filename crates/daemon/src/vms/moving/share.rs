//! How much of its migration's limit a VM's memory may use: what its volumes leave, and half of it while they want more, but at least
//! [`LEAST`]: memory that is sent more slowly than its guest writes it never arrives.

use std::num::NonZeroU64;
use std::time::Duration;

use migration::{Budget, Used};

/// A limit that differs from the present one by less than this part of it is not worth an order to the hypervisor.
const WORTH_AN_ORDER: u64 = 16;
/// What memory may use at least, in bytes a second, however small the limit is.
const LEAST: u64 = 8 << 20;

#[derive(Debug)]
pub(super) struct MemoryShare {
    budget: Budget,
    /// What the volumes had used at the last look, and when that was.
    used: Used,
    looked: Duration,
    /// What the hypervisor had sent then.
    sent: u64,
    given: Option<NonZeroU64>,
}

impl MemoryShare {
    pub(super) fn new(budget: Budget) -> Self {
        Self { budget, used: Used::default(), looked: Duration::ZERO, sent: 0, given: None }
    }

    /// Returns the limit with which the memory begins, in bytes a second; `None`: no limit.
    pub(super) fn begin(&mut self, now: Duration) -> Option<NonZeroU64> {
        (self.used, self.looked, self.sent) = (self.budget.used(), now, 0);
        self.given = self.budget.rate().and_then(|rate| NonZeroU64::new(rate.max(LEAST)));
        self.given
    }

    /// Counts the memory that has been sent so far. Returns the limit that the hypervisor is to be given; `None`: the present one
    /// stays.
    pub(super) fn next(&mut self, now: Duration, sent: u64) -> Option<Option<NonZeroU64>> {
        let lasted = now.saturating_sub(self.looked);
        // What memory used beyond the limit is no debt of the volumes.
        let within = self.budget.rate().map_or(u64::MAX, |rate| (rate as f64 * lasted.as_secs_f64()) as u64);
        self.budget.note_memory(now, sent.saturating_sub(self.sent).min(within));
        let used = self.budget.used();
        let by_volumes = (used.bytes - self.used.bytes) as f64 / lasted.as_secs_f64().max(0.001);
        let limit = self.budget.rate().map(|rate| match used.held > self.used.held {
            true => rate / 2,
            false => rate.saturating_sub(by_volumes as u64).max(rate / 2),
        });
        (self.used, self.looked, self.sent) = (used, now, sent);
        let limit = limit.map(|limit| NonZeroU64::new(limit.max(LEAST)).unwrap_or(NonZeroU64::MIN));
        let is_near = match (limit, self.given) {
            (Some(limit), Some(given)) => limit.get().abs_diff(given.get()) < given.get() / WORTH_AN_ORDER,
            (limit, given) => limit == given,
        };
        if is_near {
            return None;
        }
        self.given = limit;
        Some(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 100 << 20;

    fn limit(bytes_per_s: u64) -> Option<Option<NonZeroU64>> {
        Some(NonZeroU64::new(bytes_per_s))
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn memory_gets_what_the_volumes_leave_and_half_while_they_want_more() {
        let budget = Budget::of(Some(RATE));
        let mut share = MemoryShare::new(budget.clone());
        assert_eq!(share.begin(at(1)), NonZeroU64::new(RATE));
        assert_eq!(share.next(at(2), 0), None);
        budget.note_guest_write(RATE / 4);
        assert_eq!(share.next(at(3), 0), limit(RATE / 4 * 3));
        budget.note_guest_write(RATE * 2);
        assert_eq!(share.next(at(4), 0), limit(RATE / 2));
        assert_eq!(share.next(at(5), 0), limit(RATE));
        // A chunk waits for the limit, which memory has used up.
        assert_eq!(share.next(at(6), RATE), None);
        assert!(budget.next_start(at(6)) > at(6));
        assert_eq!(share.next(at(7), RATE), limit(RATE / 2));
    }

    #[test]
    fn memory_gets_what_it_needs_to_arrive_however_small_the_limit_is() {
        let budget = Budget::of(Some(64 << 10));
        let mut share = MemoryShare::new(budget.clone());
        assert_eq!(share.begin(at(1)), NonZeroU64::new(LEAST));
        assert_eq!(share.next(at(2), LEAST), None);
        assert!(budget.next_start(at(2)) <= at(3), "the volumes wait for what memory used");
    }

    #[test]
    fn an_order_for_another_limit_is_followed() {
        let budget = Budget::of(None);
        let mut share = MemoryShare::new(budget.clone());
        assert_eq!((share.begin(at(1)), share.next(at(2), 5)), (None, None));
        budget.set_rate(Some(RATE));
        assert_eq!(share.next(at(3), 5), limit(RATE));
        budget.set_rate(Some(RATE + RATE / 100));
        assert_eq!(share.next(at(4), 5), None);
        budget.set_rate(None);
        assert_eq!(share.next(at(5), 5), limit(0));
    }
}
