//! The set of frame numbers that have arrived: all below a floor, and a bitmap of those above it.
//!
//! ```text
//!   1 2 3 4 5 6 │ 7 8 9 10 …       floor = 7: the lowest that has not arrived
//!   all there   │ . x x .          a bit each, for at most SPAN_MAX numbers
//! ```
//!
//! Exactly-once delivery depends on it, so it never forgets a number: all below the floor count as arrived.

use std::collections::VecDeque;

/// Limit of the numbers between the lowest missing and the highest frame: 32 KiB of bits. The largest window has room for this
/// many frames of the least cost, so a sender that keeps within it is never refused.
pub(crate) const SPAN_MAX: u64 = 1 << 18;

/// A set of sequence numbers, which begin at 1.
#[derive(Clone, Debug)]
pub(crate) struct SequenceSet {
    floor: u64,
    /// Bits of the numbers from `first` on.
    bits: VecDeque<u64>,
    /// The number of the lowest bit: a multiple of 64, at most the floor.
    first: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    New,
    /// It was there: the frame has been sent twice.
    Known,
    /// It is zero or too far from the lowest missing one: no correct sender uses it.
    OutOfSpan,
}

impl SequenceSet {
    pub(crate) fn new() -> Self {
        Self { floor: 1, bits: VecDeque::new(), first: 0 }
    }

    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        if number < self.floor {
            return true;
        }
        let Ok(word) = usize::try_from((number - self.first) / 64) else { return false };
        self.bits.get(word).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    pub(crate) fn is_within_span(&self, number: u64) -> bool {
        number > 0 && number < self.floor.saturating_add(SPAN_MAX)
    }

    pub(crate) fn insert(&mut self, number: u64) -> Inserted {
        if !self.is_within_span(number) {
            return Inserted::OutOfSpan;
        }
        if self.contains(number) {
            return Inserted::Known;
        }
        let Ok(word) = usize::try_from((number - self.first) / 64) else { return Inserted::OutOfSpan };
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        self.bits[word] |= 1 << (number % 64);
        if number == self.floor {
            self.raise_floor();
        }
        Inserted::New
    }

    /// Returns the runs above the floor, lowest first, each with its first and last number; at most `count_max` of them.
    pub(crate) fn ranges(&self, count_max: usize) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (place, word) in self.bits.iter().enumerate() {
            let mut left = *word;
            while left != 0 {
                let number = self.first + place as u64 * 64 + u64::from(left.trailing_zeros());
                left &= left - 1;
                if number < self.floor {
                    continue;
                }
                match ranges.last_mut() {
                    Some((_, last)) if *last + 1 == number => *last = number,
                    _ => ranges.push((number, number)),
                }
                if ranges.len() > count_max {
                    ranges.pop();
                    return ranges;
                }
            }
        }
        ranges
    }

    fn raise_floor(&mut self) {
        while let Some(word) = self.bits.front() {
            let offset = self.floor - self.first;
            let seen = (word >> offset).trailing_ones();
            self.floor += u64::from(seen);
            if self.floor - self.first < 64 {
                return;
            }
            self.bits.pop_front();
            self.first += 64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{Inserted, SPAN_MAX, SequenceSet};

    #[test]
    fn numbers_beyond_the_span_are_refused() {
        let mut set = SequenceSet::new();
        assert_eq!(set.insert(0), Inserted::OutOfSpan);
        assert_eq!(set.insert(SPAN_MAX + 1), Inserted::OutOfSpan);
        assert_eq!(set.insert(u64::MAX), Inserted::OutOfSpan);
        assert_eq!(set.insert(SPAN_MAX), Inserted::New);
        assert_eq!(set.ranges(9), [(SPAN_MAX, SPAN_MAX)]);
        assert_eq!(set.insert(1), Inserted::New);
        assert_eq!(set.insert(SPAN_MAX + 1), Inserted::New);
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_plain_set(numbers in proptest::collection::vec(1u64..400, 0..600)) {
            let mut set = SequenceSet::new();
            let mut plain = BTreeSet::new();
            for number in numbers {
                let expected = if plain.insert(number) { Inserted::New } else { Inserted::Known };
                prop_assert_eq!(set.insert(number), expected);
            }
            let floor = (1..).find(|number| !plain.contains(number)).unwrap();
            prop_assert_eq!(set.floor(), floor);
            for number in 0..500 {
                prop_assert_eq!(set.contains(number), number == 0 || plain.contains(&number));
            }
            let above: BTreeSet<u64> = set.ranges(1000).iter().flat_map(|&(first, last)| first..=last).collect();
            prop_assert_eq!(above, plain.split_off(&floor));
        }
    }
}
