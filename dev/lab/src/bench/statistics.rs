//! Medians and spreads of rounds.
//!
//! Rounds are few, and the VM's speed varies: medians rather than means, and the whole range rather than a deviation, which would
//! assume a normal distribution.

use serde::Serialize;

/// A figure that was measured several times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    /// Half of the samples are below, half above.
    pub(super) median: f64,
    pub(super) lower_quartile: f64,
    pub(super) upper_quartile: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    /// A sample for each round; `None`: the round has no such figure.
    pub(super) samples: Vec<Option<f64>>,
}

impl Summary {
    /// Summarises the rounds that have a sample; `None` if none has.
    pub(super) fn of(samples: Vec<Option<f64>>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.iter().flatten().copied().collect();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            min: *sorted.first()?,
            lower_quartile: quantile(&sorted, 0.25),
            median: quantile(&sorted, 0.5),
            upper_quartile: quantile(&sorted, 0.75),
            max: *sorted.last()?,
            samples,
        })
    }

    /// Returns the round whose sample is closest to the median.
    pub(super) fn typical_round(&self) -> usize {
        let distance = |sample: &Option<f64>| sample.map_or(f64::MAX, |sample| (sample - self.median).abs());
        let rounds = self.samples.iter().enumerate();
        rounds.min_by(|(_, a), (_, b)| distance(a).total_cmp(&distance(b))).map_or(0, |(round, _)| round)
    }
}

/// Returns the value below which `part` of the sorted samples lie, interpolated between its neighbours.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = part * (sorted.len() - 1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::Summary;

    fn summary(samples: &[f64]) -> Summary {
        Summary::of(samples.iter().copied().map(Some).collect()).unwrap()
    }

    #[test]
    fn medians_and_quartiles_lie_between_the_samples() {
        let odd = summary(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(
            (odd.min, odd.lower_quartile, odd.median, odd.upper_quartile, odd.max),
            (1., 2., 3., 4., 5.)
        );
        assert_eq!(odd.samples[0], Some(5.0), "the order of the rounds is kept");
        let even = summary(&[4.0, 1.0, 3.0, 2.0]);
        assert_eq!((even.lower_quartile, even.median, even.upper_quartile), (1.75, 2.5, 3.25));
        let one = summary(&[7.0]);
        assert_eq!((one.min, one.lower_quartile, one.median, one.max), (7.0, 7.0, 7.0, 7.0));
    }

    #[test]
    fn rounds_without_a_figure_are_left_out() {
        let some = Summary::of(vec![None, Some(3.0), Some(1.0)]).unwrap();
        assert_eq!((some.median, some.samples[0]), (2.0, None));
        assert_eq!(Summary::of(vec![None]), None);
    }

    #[test]
    fn the_typical_round_is_the_one_in_the_middle() {
        assert_eq!(summary(&[9.0, 1.0, 3.0]).typical_round(), 2);
        assert_eq!(summary(&[5.0]).typical_round(), 0);
        assert_eq!(Summary::of(vec![None, Some(1.0)]).unwrap().typical_round(), 1);
    }
}
