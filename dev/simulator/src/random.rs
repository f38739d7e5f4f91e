//! The only source of chance in a simulation: SplitMix64, so that a seed means the same on every machine.

use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed ^ 0x5354_4552_4E41_0001);
        // Neighbouring seeds begin with neighbouring states.
        random.next();
        random
    }

    /// Returns a separate stream, so that the draws of one part do not shift another's.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product: no division, and a bias far below what a simulation could notice.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low))
    }

    pub(crate) fn index(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// Returns a duration between both, with a uniform logarithm: small ones are as likely as large ones.
    pub(crate) fn duration(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let (low, high) = (shortest.as_nanos().max(1) as f64, longest.as_nanos().max(1) as f64);
        let part = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        Duration::from_nanos((low * (high / low).powf(part)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_within_their_bounds() {
        let mut random = Random::new(7);
        for _ in 0..1000 {
            assert!(random.below(3) < 3);
            assert!((5..9).contains(&random.between(5, 9)));
            let duration = random.duration(Duration::from_micros(1), Duration::from_secs(1));
            assert!(duration <= Duration::from_secs(1) && duration >= Duration::from_nanos(999));
        }
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn a_stream_depends_on_its_seed_alone() {
        let draw = |seed| {
            (0..8)
                .map({
                    let mut random = Random::new(seed);
                    move |_| random.next()
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
