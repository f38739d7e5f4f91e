//! Converts values to places on a plot, and chooses the values at an axis.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Equal differences have equal distances.
    Linear { low: f64, high: f64 },
    /// Equal ratios have equal distances.
    Logarithmic {
        /// The value at the low end; more than zero.
        low: f64,
        high: f64,
    },
}

impl Scale {
    /// Returns a linear scale from zero to a round value at or above `highest`.
    pub(crate) fn from_zero(highest: f64) -> Self {
        let step = round_step(highest.max(f64::MIN_POSITIVE), 4.0);
        Self::Linear { low: 0.0, high: (highest / step).ceil().max(1.0) * step }
    }

    /// Returns a logarithmic scale of whole decades around the values, at least two.
    pub(crate) fn decades(lowest: f64, highest: f64) -> Self {
        let low = 10f64.powf(lowest.max(1.0).log10().floor());
        let high = 10f64.powf(highest.max(1.0).log10().ceil());
        Self::Logarithmic { low, high: high.max(low * 100.0) }
    }

    /// Returns the place of a value, 0 to 1. Values outside are at the ends.
    pub(crate) fn place(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { low, high } => (value - low) / (high - low),
            Self::Logarithmic { low, high } => (value.max(low) / low).ln() / (high / low).ln(),
        };
        if place.is_finite() { place.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Returns the values for the axis, from low to high.
    pub(crate) fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear { low, high } => steps(low, high, 4.0),
            Self::Logarithmic { low, high } => {
                let decades = (high / low).log10().round() as i32;
                (0..=decades).map(|decade| low * 10f64.powi(decade)).collect()
            }
        }
    }
}

/// Returns about `count` round values from `low` to `high`.
pub(crate) fn steps(low: f64, high: f64, count: f64) -> Vec<f64> {
    let step = round_step(high - low, count);
    let first = (low / step).ceil() as i64;
    // Products do not drift as sums do. The limit is a little above the end, so that rounding does not lose it.
    let values = (first..).map(|index| index as f64 * step);
    values.take_while(|value| *value <= high + step * 1e-6).take(TICKS_MAX).collect()
}

/// Largest number of readable ticks on one axis.
const TICKS_MAX: usize = 24;

/// Returns 1, 2 or 5 times a power of ten, so that about `count` steps make `length`.
fn round_step(length: f64, count: f64) -> f64 {
    let rough = (length / count).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= rough * 0.999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_values() {
        assert_eq!(Scale::from_zero(7382.0), Scale::Linear { low: 0.0, high: 8000.0 });
        assert_eq!(Scale::from_zero(7382.0).ticks(), [0.0, 2000.0, 4000.0, 6000.0, 8000.0]);
        assert_eq!(Scale::decades(87.0, 14_000.0).ticks(), [10.0, 100.0, 1000.0, 10_000.0, 100_000.0]);
        assert_eq!(steps(-3.0, 4.2, 8.0), [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn places_are_between_the_ends_whatever_the_value() {
        for scale in [Scale::from_zero(0.0), Scale::from_zero(1e18), Scale::decades(0.0, 0.0)] {
            for value in [-1.0, 0.0, 1.0, 1e30, f64::NAN, f64::INFINITY] {
                assert!((0.0..=1.0).contains(&scale.place(value)), "{scale:?} {value}");
            }
            assert!(scale.ticks().len() <= TICKS_MAX);
        }
        assert_eq!(Scale::decades(10.0, 1000.0).place(100.0), 0.5);
    }
}
