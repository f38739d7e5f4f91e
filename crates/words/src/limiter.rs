//! Limits lines of each kind by a token bucket, and counts the suppressed ones.
//!
//! ```text
//!   a line of a kind ──► its bucket has one left ──yes──► Pass
//!                                  │ no                      the bucket fills again, `per_s` a second
//!                                  └────────────────────► Suppress, and counted until `drain` returns it
//! ```
//! There is a bucket for each kind, and a common one for kinds beyond the limit.

use std::collections::BTreeMap;
use std::time::Duration;

/// The allowed number of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Lines that may be written at once.
    pub burst: u32,
    /// Lines a second after these, at least one.
    pub per_s: u32,
}

/// The decision for a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The line is written.
    Pass,
    /// The line is only counted.
    Suppress,
}

/// A number of suppressed lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suppressed<K> {
    /// Their kind; `None`: kinds without a bucket of their own.
    pub kind: Option<K>,
    /// Their number since the last report.
    pub count: u64,
}

/// Decides on lines, and counts the suppressed ones.
#[derive(Debug)]
pub struct Limiter<K> {
    budget: Budget,
    /// Largest number of kinds with a bucket.
    kinds_max: usize,
    buckets: BTreeMap<K, Bucket>,
    /// The common bucket of all other kinds.
    others: Bucket,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Remaining budget, in thousandths of a line.
    left_milli: u64,
    filled_at: Duration,
    suppressed: u64,
}

impl<K: Ord + Clone> Limiter<K> {
    /// Returns a limiter with full buckets.
    pub fn new(budget: Budget, kinds_max: usize) -> Self {
        let others = Bucket::full(budget, Duration::ZERO);
        Self { budget, kinds_max, buckets: BTreeMap::new(), others }
    }

    /// Decides on a line of this kind.
    pub fn ask(&mut self, now: Duration, kind: &K) -> Verdict {
        let budget = self.budget;
        if !self.buckets.contains_key(kind) {
            if self.buckets.len() >= self.kinds_max {
                // A full bucket without a count equals a new one.
                self.buckets.retain(|_, bucket| !bucket.is_idle(budget, now));
            }
            if self.buckets.len() < self.kinds_max {
                self.buckets.insert(kind.clone(), Bucket::full(budget, now));
            }
        }
        self.buckets.get_mut(kind).unwrap_or(&mut self.others).take(budget, now)
    }

    /// Returns whether suppressed lines were not yet reported.
    pub fn owes(&self) -> bool {
        self.others.suppressed > 0 || self.buckets.values().any(|bucket| bucket.suppressed > 0)
    }

    /// Returns the suppressed lines since the last call, and resets their counts.
    pub fn drain(&mut self) -> Vec<Suppressed<K>> {
        let mut told = Vec::new();
        let all = self.buckets.iter_mut().map(|(kind, bucket)| (Some(kind.clone()), bucket));
        for (kind, bucket) in all.chain([(None, &mut self.others)]) {
            let count = std::mem::take(&mut bucket.suppressed);
            if count > 0 {
                told.push(Suppressed { kind, count });
            }
        }
        told
    }
}

impl Bucket {
    fn full(budget: Budget, now: Duration) -> Self {
        Self { left_milli: u64::from(budget.burst) * 1000, filled_at: now, suppressed: 0 }
    }

    fn fill(&mut self, budget: Budget, now: Duration) {
        let elapsed_ms = u64::try_from(now.saturating_sub(self.filled_at).as_millis()).unwrap_or(u64::MAX);
        let more = elapsed_ms.saturating_mul(u64::from(budget.per_s));
        self.left_milli = self.left_milli.saturating_add(more).min(u64::from(budget.burst) * 1000);
        self.filled_at += Duration::from_millis(elapsed_ms);
    }

    fn take(&mut self, budget: Budget, now: Duration) -> Verdict {
        self.fill(budget, now);
        match self.left_milli.checked_sub(1000) {
            Some(left) => {
                self.left_milli = left;
                Verdict::Pass
            }
            None => {
                self.suppressed += 1;
                Verdict::Suppress
            }
        }
    }

    fn is_idle(&mut self, budget: Budget, now: Duration) -> bool {
        self.fill(budget, now);
        self.suppressed == 0 && self.left_milli >= u64::from(budget.burst) * 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { burst: 3, per_s: 2 };

    fn passed(limiter: &mut Limiter<u32>, at_ms: u64, kind: u32, lines: usize) -> usize {
        let now = Duration::from_millis(at_ms);
        (0..lines).filter(|_| limiter.ask(now, &kind) == Verdict::Pass).count()
    }

    #[test]
    fn a_kind_that_is_loud_is_limited_and_others_are_not() {
        let mut limiter = Limiter::new(BUDGET, 8);
        assert_eq!(passed(&mut limiter, 0, 1, 1000), 3);
        assert_eq!(passed(&mut limiter, 0, 2, 3), 3);
        assert_eq!(passed(&mut limiter, 1000, 1, 1000), 2);
        assert_eq!(limiter.drain(), [Suppressed { kind: Some(1), count: 1995 }]);
        assert!(!limiter.owes());
        assert_eq!(passed(&mut limiter, 60_000, 1, 1000), 3, "no more than the burst is saved up");
    }

    #[test]
    fn time_that_comes_in_small_pieces_is_not_lost() {
        let mut limiter = Limiter::new(BUDGET, 8);
        passed(&mut limiter, 0, 1, 3);
        let passed: usize = (1..=10_000).map(|ms| passed(&mut limiter, ms, 1, 1)).sum();
        assert_eq!(passed, 20);
    }

    #[test]
    fn kinds_without_end_share_one_bucket_and_cost_bounded_memory() {
        let mut limiter = Limiter::new(BUDGET, 8);
        let through: usize = (0..10_000).map(|kind| passed(&mut limiter, 0, kind, 1)).sum();
        assert_eq!(through, 8 + 3);
        assert_eq!(limiter.buckets.len(), 8);
        assert_eq!(limiter.drain(), [Suppressed { kind: None, count: 10_000 - 11 }]);
        assert_eq!(passed(&mut limiter, 60_000, 20_000, 1), 1, "idle kinds make room");
        assert_eq!(limiter.buckets.len(), 1);
    }
}
