//! Measures how fast blocks become synchronised, and predicts the end.

use std::collections::VecDeque;
use std::time::Duration;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// The samples considered: five seconds, so that a single stall neither disappears in the mean nor dominates it.
const SAMPLES_MAX: usize = 20;
/// The least number of samples for a prediction.
const SAMPLES_MIN: usize = 3;

/// A fraction that is rounded to 100.0 % is shown only after the handover.
const FRACTION_MAX: f64 = 0.999;

#[derive(Debug, Default)]
pub(super) struct Meter {
    blocks: u64,
    samples: VecDeque<(Duration, u64)>,
    fraction_max: f64,
}

impl Meter {
    pub(super) fn add(&mut self, now: Duration, blocks: u64) {
        self.blocks += blocks;
        let due = self.samples.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= SAMPLE_INTERVAL);
        if due {
            if self.samples.len() == SAMPLES_MAX {
                self.samples.pop_front();
            }
            self.samples.push_back((now, self.blocks));
        }
    }

    pub(super) fn carry(&mut self, blocks: u64, fraction: f64) {
        self.blocks = blocks;
        self.fraction_max = fraction.clamp(0.0, FRACTION_MAX);
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn rate(&self) -> f64 {
        match (self.samples.front(), self.samples.back()) {
            (Some(first), Some(last)) => rate_between(first, last),
            _ => 0.0,
        }
    }

    /// Returns the time for `remaining` blocks at the fastest and at the slowest recent pace.
    pub(super) fn remaining(&self, remaining: u64) -> Option<(Duration, Duration)> {
        if self.samples.len() < SAMPLES_MIN {
            return None;
        }
        let mean = self.rate();
        let halfway = self.samples.get(self.samples.len() / 2)?;
        let recent = rate_between(halfway, self.samples.back()?);
        let (slow, fast) = (mean.min(recent) * 0.9, mean.max(recent) * 1.1);
        let time = |rate: f64| Duration::try_from_secs_f64(remaining as f64 / rate).ok();
        Some((time(fast)?, time(slow)?))
    }

    /// Returns the part that is done. It never falls (design §5.19), and never reaches 1, because a write may make a block
    /// missing until the handover.
    pub(super) fn fraction(&mut self, remaining: u64) -> f64 {
        let all = self.blocks + remaining;
        if all > 0 {
            self.fraction_max = self.fraction_max.max((self.blocks as f64 / all as f64).min(FRACTION_MAX));
        }
        self.fraction_max
    }
}

fn rate_between(first: &(Duration, u64), last: &(Duration, u64)) -> f64 {
    let seconds = last.0.saturating_sub(first.0).as_secs_f64();
    if seconds > 0.0 { (last.1 - first.1) as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fraction_never_falls_and_is_never_rounded_up_to_the_whole() {
        let mut meter = Meter::default();
        meter.add(Duration::ZERO, 90);
        let before = meter.fraction(10);
        assert!(meter.fraction(1000) >= before);
        meter.add(Duration::from_secs(1), 100_000_000);
        assert!(meter.fraction(0) < 0.9995);
    }

    #[test]
    fn the_forecast_brackets_a_steady_pace() {
        let mut meter = Meter::default();
        for tick in 0..40u64 {
            meter.add(Duration::from_millis(250 * tick), 25);
        }
        let (earliest, latest) = meter.remaining(1000).unwrap();
        assert!(earliest <= Duration::from_secs(10) && Duration::from_secs(10) <= latest);
    }
}
