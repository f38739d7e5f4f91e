//! A request that changes a device's content, as one value: filters pass it on without looking into it.

use chronicle::ByteRange;

use crate::buffer::Buffer;
use crate::device::{Durability, ZeroMode};

/// A change of a device's content.
#[derive(Clone, Debug)]
pub enum Change {
    /// Writes bytes from an offset on.
    Write(u64, Buffer, Durability),
    /// Makes a range read as zeroes, and frees its space if the store can.
    Discard(ByteRange),
    /// Makes a range read as zeroes.
    Zero(ByteRange, ZeroMode, Durability),
}

impl Change {
    /// Returns the range that it changes.
    pub fn range(&self) -> ByteRange {
        match self {
            Self::Write(offset, data, _) => ByteRange::new(*offset, data.len() as u64),
            Self::Discard(range) | Self::Zero(range, ..) => *range,
        }
    }

    /// Returns when the change may be acknowledged.
    pub fn durability(&self) -> Durability {
        match self {
            Self::Write(_, _, durability) | Self::Zero(_, _, durability) => *durability,
            Self::Discard(_) => Durability::Volatile,
        }
    }

    /// Returns the same change, acknowledged as soon as later reads see it.
    #[must_use]
    pub fn volatile(self) -> Self {
        match self {
            Self::Write(offset, data, _) => Self::Write(offset, data, Durability::Volatile),
            Self::Zero(range, mode, _) => Self::Zero(range, mode, Durability::Volatile),
            Self::Discard(range) => Self::Discard(range),
        }
    }

    /// Returns the same change of a part of its range. An empty part may lie anywhere.
    ///
    /// # Panics
    /// If a part of a write lies outside its range.
    #[must_use]
    pub fn part(&self, part: ByteRange) -> Self {
        match self {
            Self::Write(offset, data, durability) => {
                let start = part.offset.saturating_sub(*offset) as usize;
                Self::Write(part.offset, data.slice(start, part.length as usize), *durability)
            }
            Self::Discard(_) => Self::Discard(part),
            Self::Zero(_, mode, durability) => Self::Zero(part, *mode, *durability),
        }
    }

    /// Returns how many parts of at most `bytes` it can be split into. A write stays one part, because its data
    /// is in memory anyway.
    pub fn steps(&self, bytes: u64) -> u64 {
        match self {
            Self::Write(..) => 1,
            Self::Discard(range) | Self::Zero(range, ..) => range.length.div_ceil(bytes).max(1),
        }
    }

    /// Splits it into those parts, in order.
    pub fn in_steps(&self, bytes: u64) -> impl Iterator<Item = Self> + use<'_> {
        let ByteRange { offset, length } = self.range();
        let bytes = if matches!(self, Self::Write(..)) { length } else { bytes };
        (0..self.steps(bytes)).map(move |number| {
            let start = number * bytes;
            self.part(ByteRange::new(offset + start, bytes.min(length - start)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_steps_cover_its_range_in_order_and_nothing_else() {
        let zero =
            |length| Change::Zero(ByteRange::new(100, length), ZeroMode::MayUnmap, Durability::Durable);
        let ranges = |change: &Change| -> Vec<_> {
            change.in_steps(10).map(|step| (step.range().offset, step.range().length)).collect()
        };
        assert_eq!(ranges(&zero(25)), [(100, 10), (110, 10), (120, 5)]);
        assert_eq!(ranges(&zero(0)), [(100, 0)]);
        assert!(zero(25).in_steps(10).all(|step| step.durability() == Durability::Durable));
        let write = Change::Write(100, Buffer::zeroed(25), Durability::Volatile);
        assert_eq!((write.steps(10), ranges(&write)), (1, vec![(100, 25)]));
        assert_eq!((zero(25).steps(10), zero(0).steps(10)), (3, 1));
    }

    #[test]
    fn a_part_of_a_write_has_its_bytes() {
        let write = Change::Write(8, Buffer::copy_of(b"abcdef"), Durability::Durable);
        let Change::Write(offset, data, durability) = write.part(ByteRange::new(10, 3)) else {
            panic!("it is a write");
        };
        assert_eq!((offset, data.as_slice(), durability), (10, &b"cde"[..], Durability::Durable));
    }
}
