//! Latencies of requests in logarithmic buckets: a few instructions for each request, and percentiles later.
//!
//! ```text
//!   0 … 7 µs: one bucket each      8 … 15, 16 … 31, 32 … 63, … µs: eight buckets each, 12.5 % wide
//! ```

use std::cell::{Cell, RefCell};
use std::time::Duration;

/// Buckets for each doubling, as a power of two: a percentile is at most an eighth too high.
const BUCKETS_LOG: u32 = 3;
const BUCKETS: usize = (24 << BUCKETS_LOG) as usize;

/// Counted latencies, in the order of their buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Bucket and count; no bucket twice, none empty.
    counts: Vec<(u8, u64)>,
    longest: Duration,
    sum: Duration,
}

impl Latencies {
    /// Returns how many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// Returns the sum of all latencies.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns how many were shorter than `bound`; exact if that is a power of two of microseconds, 8 µs or more.
    pub fn count_below(&self, bound: Duration) -> u64 {
        let below = |bucket: u8| Duration::from_micros(last_of(bucket)) < bound;
        self.counts.iter().filter(|(bucket, _)| below(*bucket)).map(|(_, count)| count).sum()
    }

    /// Returns the longest; `None` if nothing was counted.
    pub fn longest(&self) -> Option<Duration> {
        (!self.counts.is_empty()).then_some(self.longest)
    }

    /// Returns the latency that `permille` of a thousand did not exceed, at most an eighth too high; `None`
    /// if nothing was counted.
    pub fn quantile(&self, permille: u16) -> Option<Duration> {
        let wanted = (self.count() * u64::from(permille)).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.counts.iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.map(|(bucket, _)| Duration::from_micros(last_of(*bucket)).min(self.longest))
    }

    /// Counts one latency in its bucket.
    pub fn add(&mut self, latency: Duration) {
        self.add_to(bucket_of(micros(latency)), 1);
        self.longest = self.longest.max(latency);
        self.sum += latency;
    }

    /// Adds the counts of another one.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.counts {
            self.add_to(*bucket, *count);
        }
        self.longest = self.longest.max(other.longest);
        self.sum += other.sum;
    }

    /// Returns the counts since `earlier`, an older copy of this one. The longest is that of all.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |bucket: u8| {
            earlier.counts.iter().find(|(known, _)| *known == bucket).map_or(0, |(_, count)| *count)
        };
        let counts =
            self.counts.iter().map(|(bucket, count)| (*bucket, count.saturating_sub(before(*bucket))));
        Self {
            counts: counts.filter(|(_, count)| *count > 0).collect(),
            longest: self.longest,
            sum: self.sum.saturating_sub(earlier.sum),
        }
    }

    fn add_to(&mut self, bucket: u8, count: u64) {
        match self.counts.binary_search_by_key(&bucket, |(bucket, _)| *bucket) {
            Ok(index) => self.counts[index].1 += count,
            Err(index) => self.counts.insert(index, (bucket, count)),
        }
    }
}

/// Counts latencies until they are taken, and remembers the taken ones.
#[derive(Debug)]
pub struct Buckets {
    counts: [Cell<u32>; BUCKETS],
    longest: Cell<Duration>,
    sum: Cell<Duration>,
    taken: RefCell<Latencies>,
}

impl Buckets {
    /// Counts one latency in its bucket.
    pub fn add(&self, latency: Duration) {
        let count = &self.counts[usize::from(bucket_of(micros(latency)))];
        count.set(count.get().saturating_add(1));
        self.sum.set(self.sum.get() + latency);
        if latency > self.longest.get() {
            self.longest.set(latency);
        }
    }

    /// Takes the present counts and starts again from zero.
    pub fn take(&self) -> Latencies {
        let taken = self.look();
        self.counts.iter().for_each(|count| count.set(0));
        self.longest.set(Duration::ZERO);
        self.sum.set(Duration::ZERO);
        self.taken.borrow_mut().merge(&taken);
        taken
    }

    /// Returns all latencies that were ever counted.
    pub fn all(&self) -> Latencies {
        let mut all = self.taken.borrow().clone();
        all.merge(&self.look());
        all
    }

    fn look(&self) -> Latencies {
        let counts = (0..).zip(&self.counts).filter(|(_, count)| count.get() > 0);
        let counts = counts.map(|(bucket, count)| (bucket, u64::from(count.get()))).collect();
        Latencies { counts, longest: self.longest.get(), sum: self.sum.get() }
    }
}

impl Default for Buckets {
    fn default() -> Self {
        Self {
            counts: std::array::from_fn(|_| Cell::new(0)),
            longest: Cell::default(),
            sum: Cell::default(),
            taken: RefCell::default(),
        }
    }
}

fn micros(latency: Duration) -> u64 {
    latency.as_secs() * 1_000_000 + u64::from(latency.subsec_micros())
}

fn bucket_of(micros: u64) -> u8 {
    let doublings = micros.checked_ilog2().unwrap_or(0).saturating_sub(BUCKETS_LOG);
    // Below 8 µs `doublings` is 0 and the bucket is the number itself.
    let bucket = (u64::from(doublings) << BUCKETS_LOG) + (micros >> doublings);
    u8::try_from(bucket.min(BUCKETS as u64 - 1)).unwrap_or(u8::MAX)
}

fn last_of(bucket: u8) -> u64 {
    let doublings = (bucket >> BUCKETS_LOG).saturating_sub(1);
    let first = u64::from(bucket) - (u64::from(doublings) << BUCKETS_LOG);
    ((first + 1) << doublings) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_since_a_copy_is_the_difference() {
        let mut all = Latencies::default();
        all.add(Duration::from_millis(50));
        let earlier = all.clone();
        assert_eq!(all.since(&earlier).quantile(500), None);
        (0..100).for_each(|_| all.add(Duration::from_micros(100)));
        let since = all.since(&earlier);
        assert_eq!((since.count(), since.sum()), (100, Duration::from_millis(10)));
        assert!(since.quantile(990).unwrap() < Duration::from_micros(113));
    }

    #[test]
    fn every_latency_falls_into_the_bucket_that_ends_at_or_after_it_and_at_most_an_eighth_later() {
        let mut before = 0;
        for micros in (0..5000).chain((5000..60_000_000).step_by(7919)) {
            let bucket = bucket_of(micros);
            let last = last_of(bucket);
            assert!(bucket >= before && last >= micros && last <= micros + micros / 8, "{micros}: {last}");
            before = bucket;
        }
        assert!(usize::from(bucket_of(u64::MAX)) == BUCKETS - 1);
    }

    #[test]
    fn what_was_taken_is_still_in_the_whole_and_is_counted_exactly_at_powers_of_two() {
        let buckets = Buckets::default();
        let mut by_hand = Latencies::default();
        let all = (0..3000).chain((3000..40_000_000).step_by(7919)).map(Duration::from_micros);
        for (turn, latency) in all.clone().enumerate() {
            buckets.add(latency);
            by_hand.add(latency);
            if turn % 100 == 0 {
                buckets.take();
            }
        }
        assert_eq!(buckets.all(), by_hand);
        assert_eq!(by_hand.sum(), all.clone().sum());
        for power in 3..26 {
            let bound = Duration::from_micros(1 << power);
            let below = all.clone().filter(|latency| *latency < bound).count();
            assert_eq!(by_hand.count_below(bound), below as u64, "{bound:?}");
        }
    }

    #[test]
    fn percentiles_of_what_was_taken_and_merged() {
        let buckets = Buckets::default();
        assert_eq!((buckets.take().quantile(500), buckets.take().longest()), (None, None));
        (0..990).for_each(|_| buckets.add(Duration::from_micros(100)));
        let mut all = buckets.take();
        (0..10).for_each(|_| buckets.add(Duration::from_millis(20)));
        all.merge(&buckets.take());
        assert_eq!((all.count(), all.longest()), (1000, Some(Duration::from_millis(20))));
        let median = all.quantile(500).unwrap().as_micros();
        assert!((100..=112).contains(&median), "{median}");
        assert_eq!(all.quantile(990), all.quantile(500));
        assert_eq!(all.quantile(991), Some(Duration::from_millis(20)));
    }
}
