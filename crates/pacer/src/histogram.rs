//! A histogram of latencies that forgets: buckets an eighth of a doubling wide, whose counts can be scaled down.

use std::time::Duration;

/// A percentile of fewer samples says little.
const SAMPLES_MIN: f32 = 64.0;
const BUCKETS_LOG: u32 = 3;
/// From 1 µs to 16 s; what is longer counts as that.
const BUCKETS: usize = (25 << BUCKETS_LOG) as usize;

#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    counts: Box<[f32; BUCKETS]>,
    total: f32,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0.0; BUCKETS]), total: 0.0 }
    }
}

impl Histogram {
    pub(crate) fn add(&mut self, latency: Duration) {
        self.counts[bucket_of(latency)] += 1.0;
        self.total += 1.0;
    }

    pub(crate) fn scale(&mut self, by: f32) {
        self.counts.iter_mut().for_each(|count| *count *= by);
        self.total *= by;
    }

    pub(crate) fn clear(&mut self) {
        self.scale(0.0);
    }

    /// Returns the latency that 99 of 100 did not exceed, at most an eighth too high; `None` with too few samples for it.
    pub(crate) fn p99(&self) -> Option<Duration> {
        if self.total < SAMPLES_MIN {
            return None;
        }
        let mut above = self.total * 0.01;
        let found = self.counts.iter().rposition(|count| {
            above -= count;
            above < 0.0
        });
        found.map(upper_bound)
    }
}

fn bucket_of(latency: Duration) -> usize {
    let micros = (latency.as_micros() as u64).max(1);
    let log = micros.ilog2();
    let fine = if log >= BUCKETS_LOG { micros >> (log - BUCKETS_LOG) } else { micros << (BUCKETS_LOG - log) };
    let within = fine as usize - (1 << BUCKETS_LOG);
    (((log as usize) << BUCKETS_LOG) + within).min(BUCKETS - 1)
}

fn upper_bound(bucket: usize) -> Duration {
    let (log, within) = (bucket >> BUCKETS_LOG, bucket & ((1 << BUCKETS_LOG) - 1));
    let eighths = (1 << BUCKETS_LOG) + within + 1;
    Duration::from_nanos(((eighths as u64 * 1000) << log) >> BUCKETS_LOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_at_most_an_eighth_too_high() {
        for micros in [1, 2, 7, 8, 100, 999, 12_345, 900_000] {
            let mut histogram = Histogram::default();
            (0..100).for_each(|_| histogram.add(Duration::from_micros(micros)));
            let p99 = histogram.p99().unwrap().as_nanos() as f64 / 1000.0;
            assert!(p99 >= micros as f64 && p99 <= micros as f64 * 1.126, "{micros} gave {p99}");
        }
    }

    #[test]
    fn one_of_a_hundred_is_left_out_and_two_are_not() {
        let mut histogram = Histogram::default();
        (0..990).for_each(|_| histogram.add(Duration::from_micros(100)));
        (0..9).for_each(|_| histogram.add(Duration::from_millis(9)));
        assert!(histogram.p99().unwrap() < Duration::from_micros(120));
        (0..9).for_each(|_| histogram.add(Duration::from_millis(9)));
        assert!(histogram.p99().unwrap() > Duration::from_millis(8));
    }

    #[test]
    fn few_samples_have_no_percentile() {
        let mut histogram = Histogram::default();
        (0..63).for_each(|_| histogram.add(Duration::from_micros(100)));
        assert_eq!(histogram.p99(), None);
    }
}
