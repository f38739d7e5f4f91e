//! The latencies that guests' requests have without us, of each class.

use std::time::Duration;

use crate::class::RequestClass;
use crate::histogram::Histogram;

/// A pause with this many samples of a class counts for half of what was known of it.
const SAMPLES_HALF: f64 = 32.0;
/// Latencies that differ by this factor from the known ones count for more: the disk, or the load, may be another.
const JUMP: f64 = 1.5;
const WEIGHT_OF_JUMP: f64 = 0.75;
/// The least samples for that.
const JUMP_SAMPLES: u32 = 8;
/// Longer latencies count as this many times the mean.
const BELIEVED: f64 = 8.0;
/// What an earlier pause still counts for in the percentile.
const KEPT_OF_PERCENTILE: f32 = 0.7;

/// Latencies of one class: their count and sum.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) count: u32,
    pub(crate) total: Duration,
}

pub(crate) type Sums = [Sum; RequestClass::COUNT];

impl Sum {
    pub(crate) fn add(&mut self, latency: Duration) {
        self.count += 1;
        self.total += latency;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.total.as_secs_f64() / f64::from(self.count))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Baseline {
    /// Seconds; `None`: not known.
    means: [Option<f64>; RequestClass::COUNT],
    percentiles: Histogram,
    p99: Option<Duration>,
}

impl Baseline {
    /// Learns from one pause. Returns by which factor, 1 or more, the latencies differ from those that were known.
    pub(crate) fn learn(&mut self, sums: &Sums, latencies: &[Duration]) -> f64 {
        let change = self.ratio(sums).map_or(JUMP, |ratio| ratio.max(1.0 / ratio));
        for (known, sum) in self.means.iter_mut().zip(sums) {
            let Some(mean) = sum.mean() else { continue };
            *known = Some(match *known {
                Some(old) => {
                    let weight = f64::from(sum.count) / (f64::from(sum.count) + SAMPLES_HALF);
                    let has_jumped = change >= JUMP && sum.count >= JUMP_SAMPLES;
                    old + (mean - old) * if has_jumped { weight.max(WEIGHT_OF_JUMP) } else { weight }
                }
                None => mean,
            });
        }
        if change >= JUMP {
            self.percentiles.clear();
        } else {
            self.percentiles.scale(KEPT_OF_PERCENTILE);
        }
        latencies.iter().for_each(|latency| self.percentiles.add(*latency));
        self.p99 = self.percentiles.p99().or(self.p99);
        change
    }

    /// Returns the mean latency of these requests as a multiple of that without us. `None`: none of their classes is known.
    pub(crate) fn ratio(&self, sums: &Sums) -> Option<f64> {
        let (mut count, mut total) = (0.0, 0.0);
        for (known, sum) in self.means.iter().zip(sums) {
            if let (Some(known), Some(mean)) = (known, sum.mean()) {
                count += f64::from(sum.count);
                total += f64::from(sum.count) * mean / known.max(1e-6);
            }
        }
        (count > 0.0).then(|| total / count)
    }

    /// Returns the latency that 99 of 100 requests do not exceed without us.
    pub(crate) fn p99(&self) -> Option<Duration> {
        self.p99
    }

    /// Returns the longest latency of a class that counts as it is: a single longer one tells of something else, such as a thread
    /// that did not run.
    pub(crate) fn longest_believed(&self, class: usize) -> Duration {
        self.means[class].map_or(Duration::MAX, |mean| Duration::from_secs_f64(mean * BELIEVED))
    }

    pub(crate) fn is_known(&self) -> bool {
        self.means.iter().any(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(of: &[(RequestClass, u32, u64)]) -> Sums {
        let mut sums = Sums::default();
        for (class, count, micros) in of {
            (0..*count).for_each(|_| sums[class.index()].add(Duration::from_micros(*micros)));
        }
        sums
    }

    #[test]
    fn like_is_compared_with_like() {
        let (small, large) = (RequestClass::read(4096), RequestClass::write(1 << 20));
        let mut baseline = Baseline::default();
        baseline.learn(&sums(&[(small, 32, 100), (large, 32, 5000)]), &[]);
        // More of the slow requests, and each as fast as before.
        assert!((baseline.ratio(&sums(&[(small, 1, 100), (large, 31, 5000)])).unwrap() - 1.0).abs() < 1e-6);
        assert!((baseline.ratio(&sums(&[(small, 10, 200), (large, 10, 5000)])).unwrap() - 1.5).abs() < 1e-6);
        assert_eq!(baseline.ratio(&sums(&[(RequestClass::FLUSH, 5, 9)])), None);
    }

    #[test]
    fn a_disk_that_became_slow_is_believed_soon() {
        let class = RequestClass::read(4096);
        let mut baseline = Baseline::default();
        baseline.learn(&sums(&[(class, 64, 100)]), &[Duration::from_micros(100); 64]);
        assert!(baseline.learn(&sums(&[(class, 64, 300)]), &[Duration::from_micros(300); 64]) > 2.9);
        baseline.learn(&sums(&[(class, 64, 300)]), &[Duration::from_micros(300); 64]);
        assert!((baseline.ratio(&sums(&[(class, 16, 300)])).unwrap() - 1.0).abs() < 0.1);
        assert!(baseline.p99().unwrap() >= Duration::from_micros(300));
    }
}
