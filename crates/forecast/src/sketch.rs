//! Counts distinct blocks in little memory (HyperLogLog, Flajolet and others 2007), within some three per cent.

use crate::random::mixed;

/// The binary logarithm of the number of registers: the error is 1.04 ÷ √1024.
const BITS: u32 = 10;
const REGISTERS: usize = 1 << BITS;

/// A set of blocks, of which only the number is known.
#[derive(Clone, Debug)]
pub(crate) struct Sketch(Box<[u8; REGISTERS]>);

impl Default for Sketch {
    fn default() -> Self {
        Self(Box::new([0; REGISTERS]))
    }
}

impl Sketch {
    pub(crate) fn add(&mut self, block: u64) {
        let hash = mixed(block.wrapping_add(0x9E37_79B9_7F4A_7C15));
        let register = (hash >> (64 - BITS)) as usize;
        // The bit that is set bounds the rank, which is at most 55.
        let rank = ((hash << BITS) | 1 << (BITS - 1)).leading_zeros() as u8 + 1;
        if let Some(highest) = self.0.get_mut(register) {
            *highest = rank.max(*highest);
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (highest, theirs) in self.0.iter_mut().zip(other.0.iter()) {
            *highest = (*theirs).max(*highest);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Returns the number of distinct blocks, nearly.
    pub(crate) fn count(&self) -> f64 {
        let registers = REGISTERS as f64;
        let sum: f64 = self.0.iter().map(|rank| half_to_the(*rank)).sum();
        let estimate = 0.7213 / (1.0 + 1.079 / registers) * registers * registers / sum;
        let empty = self.0.iter().filter(|rank| **rank == 0).count();
        // Small sets are better told by the registers that nothing has reached.
        if empty > 0 && estimate <= 2.5 * registers {
            registers * (registers / empty as f64).ln()
        } else {
            estimate
        }
    }
}

/// Returns 2 to the power of minus `rank`, by the bits of the float.
fn half_to_the(rank: u8) -> f64 {
    f64::from_bits((1023 - u64::from(rank)) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_what_is_distinct_within_a_tenth() {
        for count in [0_u64, 1, 10, 300, 2_500, 5_000, 100_000, 3_000_000] {
            let mut sketch = Sketch::default();
            for block in (0..count).chain(0..count.min(10_000)) {
                sketch.add(block * 7);
            }
            let told = sketch.count();
            assert!((told - count as f64).abs() <= 0.1 * count as f64 + 0.5, "{told} of {count}");
        }
    }

    #[test]
    fn two_sets_together_count_what_is_in_both_once() {
        let (mut one, mut two) = (Sketch::default(), Sketch::default());
        (0..20_000).for_each(|block| one.add(block));
        (10_000..30_000).for_each(|block| two.add(block));
        one.merge(&two);
        assert!((one.count() - 30_000.0).abs() < 3_000.0, "{}", one.count());
        one.clear();
        assert_eq!(one.count(), 0.0);
    }
}
