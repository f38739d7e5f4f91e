//! Medians, spreads, and ratios of pairs.
//!
//! Rounds are few, and the VM's speed varies: medians rather than means, and the whole range rather than a deviation, which would
//! assume a normal distribution.

use serde::Serialize;

/// A figure that was measured several times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Half of the samples are below, half above.
    pub median: f64,
    /// A quarter of the samples are below.
    pub lower_quartile: f64,
    /// A quarter of the samples are above.
    pub upper_quartile: f64,
    /// The smallest of the samples.
    pub min: f64,
    /// The largest of the samples.
    pub max: f64,
    /// All samples, in the order of the rounds.
    pub samples: Vec<f64>,
}

impl Summary {
    /// Summarises `samples`; `None` if there are none, or one is not a number.
    pub fn of(samples: Vec<f64>) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
            return None;
        }
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5),
            lower_quartile: quantile(&sorted, 0.25),
            upper_quartile: quantile(&sorted, 0.75),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            samples,
        })
    }

    /// Summarises `combine` of two figures of the same round, round by round: a slow round affects both figures, but not their
    /// ratio. `None` if the numbers of rounds differ, or a result is not a number.
    pub fn of_pairs(first: &Self, second: &Self, combine: impl Fn(f64, f64) -> f64) -> Option<Self> {
        if first.samples.len() != second.samples.len() {
            return None;
        }
        let pairs = first.samples.iter().zip(&second.samples);
        Self::of(pairs.map(|(first, second)| combine(*first, *second)).collect())
    }

    /// Summarises `first` ÷ `second`, round by round.
    pub fn of_ratios(first: &Self, second: &Self) -> Option<Self> {
        Self::of_pairs(first, second, |first, second| first / second)
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
        Summary::of(samples.to_vec()).unwrap()
    }

    #[test]
    fn medians_and_quartiles_lie_between_the_samples() {
        let odd = summary(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(
            (odd.min, odd.lower_quartile, odd.median, odd.upper_quartile, odd.max),
            (1., 2., 3., 4., 5.)
        );
        assert_eq!(odd.samples, [5.0, 1.0, 3.0, 2.0, 4.0], "the order of the rounds is kept");
        let even = summary(&[4.0, 1.0, 3.0, 2.0]);
        assert_eq!((even.lower_quartile, even.median, even.upper_quartile), (1.75, 2.5, 3.25));
        let one = summary(&[7.0]);
        assert_eq!((one.min, one.lower_quartile, one.median, one.max), (7.0, 7.0, 7.0, 7.0));
    }

    #[test]
    fn ratios_are_those_of_neighbours() {
        // The third round was twice as slow for both.
        let ratios =
            Summary::of_ratios(&summary(&[90.0, 92.0, 45.0]), &summary(&[100.0, 100.0, 50.0])).unwrap();
        assert_eq!((ratios.median, ratios.min, ratios.max), (0.9, 0.9, 0.92));
        let added = Summary::of_pairs(&summary(&[5.0, 9.0]), &summary(&[2.0, 3.0]), |a, b| a - b).unwrap();
        assert_eq!(added.samples, [3.0, 6.0]);
    }

    #[test]
    fn what_is_no_number_has_no_summary() {
        assert_eq!(Summary::of(Vec::new()), None);
        assert_eq!(Summary::of(vec![1.0, f64::NAN]), None);
        assert_eq!(Summary::of_ratios(&summary(&[1.0]), &summary(&[0.0])), None);
        assert_eq!(Summary::of_ratios(&summary(&[1.0]), &summary(&[1.0, 2.0])), None);
    }
}
