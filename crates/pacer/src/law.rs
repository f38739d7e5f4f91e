//! The law: from how much longer guests' requests take beside the copies to the rate of all copies of a store.

use std::time::Duration;

/// The rate before anything is known, in bytes a second: a slow disk bears it, and a fast one is reached within a second.
const RATE_AT_FIRST: f64 = (16 << 20) as f64;
/// The part of the highest rate that copies always get, so that they end.
const FLOOR: f64 = 0.01;
/// The least rate of all, in bytes a second.
const FLOOR_MIN: f64 = (256 << 10) as f64;
/// A rate that copies do not use does not grow beyond this many times what they use.
const UNUSED: f64 = 2.0;
/// How fast the highest rate is forgotten, at each step.
const PEAK_KEPT: f64 = 0.999;
/// Samples that count for half in the smoothed ratio.
const SAMPLES_HALF: f64 = 24.0;
/// The most that one step counts for: what else makes requests slow comes and goes.
const WEIGHT_MAX: f64 = 0.5;
/// The excess that halves the rate, and a little more.
const EXCESS_MAX: f64 = 3.0;
/// The least that the tail leaves of what guests may lose.
const TAIL_MIN: f64 = 0.25;

/// What guests of a store may lose to copies: a part of their throughput, for those that wait for each answer.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Impact(f64);

impl Impact {
    /// Returns an impact of this many per cent, from 1 to 90; `None` outside of that.
    pub fn percent(percent: u8) -> Option<Self> {
        (1..=90).contains(&percent).then(|| Self(f64::from(percent) / 100.0))
    }

    /// Returns the impact in per cent.
    pub fn in_percent(self) -> u8 {
        (self.0 * 100.0).round() as u8
    }

    /// The greatest impact; beyond it a copy does not give way at all.
    pub const MOST: Self = Self(0.9);

    /// Returns the impact this many times as large, at least 1 %; `None` beyond [`Impact::MOST`].
    pub fn times(self, factor: f64) -> Option<Self> {
        let part = (self.0 * factor).max(0.01);
        (part <= Self::MOST.0).then_some(Self(part))
    }

    /// Returns the part of their throughput that guests may lose, above 0 and below 1.
    pub fn part(self) -> f64 {
        self.0
    }

    /// Returns the latency, as a multiple of that without us, at which guests lose this part.
    pub(crate) fn ratio(self) -> f64 {
        1.0 / (1.0 - self.0)
    }
}

impl Default for Impact {
    /// Guests may lose a fifth.
    fn default() -> Self {
        Self(0.2)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Law {
    bytes_per_second: f64,
    /// Smoothed latency of guests' requests, as a multiple of that without us.
    ratio: f64,
    /// The part of the permitted impact that the slowest requests leave.
    tail: f64,
    /// The highest rate that copies have had.
    peak: f64,
}

impl Default for Law {
    fn default() -> Self {
        Self { bytes_per_second: RATE_AT_FIRST, ratio: 1.0, tail: 1.0, peak: 0.0 }
    }
}

/// The measurements of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// Latency of guests' requests as a multiple of that without us.
    pub(crate) ratio: f64,
    pub(crate) samples: u32,
    /// What copies have moved, in bytes a second.
    pub(crate) moved: f64,
}

impl Law {
    /// Changes the rate. Returns by how much guests exceed what they may lose: 1 is just that.
    pub(crate) fn step(&mut self, seen: Seen, impact: Impact) -> f64 {
        let weight = (f64::from(seen.samples) / (f64::from(seen.samples) + SAMPLES_HALF)).min(WEIGHT_MAX);
        // More than this changes nothing more at once, and must not be remembered either.
        let highest = 1.0 + (impact.ratio() - 1.0) * EXCESS_MAX;
        self.ratio += (seen.ratio.min(highest) - self.ratio) * weight;
        self.note_moved(seen.moved);
        let excess = (self.ratio - 1.0) / ((impact.ratio() - 1.0) * self.tail);
        if excess > 1.1 {
            self.bytes_per_second *= (1.0 - 0.4 * (excess - 1.0)).max(0.5);
        } else if excess < 0.8 && self.bytes_per_second < UNUSED * seen.moved.max(RATE_AT_FIRST) {
            self.bytes_per_second *= 1.0 + 0.25 * (1.0 - excess.max(0.0));
        }
        self.bytes_per_second = self.bytes_per_second.max(self.floor());
        excess
    }

    /// Requests are in flight, and none is completed.
    pub(crate) fn stuck(&mut self) {
        self.bytes_per_second = (self.bytes_per_second * 0.5).max(self.floor());
    }

    /// Judges the slowest requests of some seconds.
    pub(crate) fn judge_tail(&mut self, p99: Duration, without_us: Duration) {
        if p99 > without_us * 2 {
            self.tail = (self.tail * 0.5).max(TAIL_MIN);
        } else if p99 < without_us * 3 / 2 {
            self.tail = (self.tail * 2.0).min(1.0);
        }
    }

    /// The latencies without us are known anew: the smoothed ratio is not comparable with them.
    pub(crate) fn begin_anew(&mut self) {
        self.ratio = 1.0;
    }

    pub(crate) fn note_moved(&mut self, bytes_per_second: f64) {
        self.peak = (self.peak * PEAK_KEPT).max(bytes_per_second);
    }

    pub(crate) fn rate(&self) -> f64 {
        self.bytes_per_second
    }

    pub(crate) fn peak(&self) -> f64 {
        self.peak
    }

    /// Returns the part of their throughput that guests lose which wait for each answer.
    pub(crate) fn loss(&self) -> f64 {
        (1.0 - 1.0 / self.ratio.max(1.0)).clamp(0.0, 1.0)
    }

    pub(crate) fn floor(&self) -> f64 {
        (self.peak * FLOOR).max(FLOOR_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that shares its time fairly between one guest, which waits for each answer, and the copies.
    fn settle(capacity: f64, impact: Impact, steps: usize) -> (Law, f64) {
        let mut law = Law::default();
        let mut ratio = 1.0;
        for _ in 0..steps {
            let share = (law.rate() / capacity).min(0.9);
            ratio = 1.0 / (1.0 - share);
            law.step(Seen { ratio, samples: 64, moved: share * capacity }, impact);
        }
        (law, ratio)
    }

    #[test]
    fn a_guest_loses_what_it_may_and_not_more() {
        for percent in [5, 10, 20, 50] {
            for capacity in [50e6, 500e6, 5e9] {
                let (_, ratio) = settle(capacity, Impact::percent(percent).unwrap(), 200);
                let loss = 1.0 - 1.0 / ratio;
                let ordered = f64::from(percent) / 100.0;
                assert!((0.7 * ordered..1.12 * ordered).contains(&loss), "{percent} % of {capacity}: {loss}");
            }
        }
    }

    #[test]
    fn the_rate_never_falls_below_the_floor() {
        let (mut law, _) = settle(500e6, Impact::default(), 200);
        let peak = law.peak;
        for _ in 0..500 {
            law.step(Seen { ratio: 50.0, samples: 64, moved: 0.0 }, Impact::default());
            law.stuck();
        }
        assert!(law.rate() >= FLOOR_MIN && law.rate() <= peak * FLOOR * 1.01, "{law:?}");
    }

    #[test]
    fn an_impact_is_a_part_of_the_whole() {
        assert_eq!((Impact::percent(0), Impact::percent(91)), (None, None));
        assert!((1..=90).all(|percent| Impact::percent(percent).unwrap().in_percent() == percent));
        assert!((Impact::percent(20).unwrap().ratio() - 1.25).abs() < 1e-9);
    }
}
