//! Types for numbers that must not be mixed up: block sizes, indices, counts and ranges, epochs and generations.
//!
//! A block is the unit in which writes are recorded and copies are made. It is neither the unit of a guest's writes nor
//! the sector of a disk. The arithmetic saturates or clips, and never panics.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The size of a block in bytes: a power of two between [`BlockSize::MIN_BYTES`] and [`BlockSize::MAX_BYTES`].
///
/// It is fixed for the life of a volume's chronicle, because bitmaps of different block sizes cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct BlockSize {
    /// The binary logarithm of the size, so that a division is a shift.
    shift: u32,
}

impl BlockSize {
    /// The smallest block, 4 KiB: Sterna's disks have sectors of this size, and smaller blocks could not be copied.
    pub const MIN_BYTES: u32 = 4 << 10;

    /// The largest block, 1 MiB: with it a write of 4 KiB already costs 256 times its size on the link.
    pub const MAX_BYTES: u32 = 1 << 20;

    /// 4 KiB, the unit of disk I/O: a scattered write costs only its own size when it is copied again. A disk of 16 TiB has 4
    /// thousand million blocks, but a set costs memory only where it is scattered. Neighbours are copied as one.
    pub const DEFAULT: Self = Self { shift: 12 };

    /// Returns the block size of `bytes` bytes.
    ///
    /// # Errors
    /// [`InvalidBlockSize`] if `bytes` is not a power of two or out of bounds.
    pub const fn new(bytes: u32) -> Result<Self, InvalidBlockSize> {
        if bytes.is_power_of_two() && bytes >= Self::MIN_BYTES && bytes <= Self::MAX_BYTES {
            Ok(Self { shift: bytes.trailing_zeros() })
        } else {
            Err(InvalidBlockSize { bytes })
        }
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift
    }

    /// Returns the blocks that a byte range touches, in whole or in part; none if `length` is 0. These are the blocks
    /// to *record* for a write. A range beyond 2^64 bytes is cut there.
    pub const fn covering(self, offset: u64, length: u64) -> BlockRange {
        let start = offset >> self.shift;
        if length == 0 {
            return BlockRange::new(start, start);
        }
        let last = offset.saturating_add(length - 1) >> self.shift;
        BlockRange::new(start, last + 1)
    }

    /// Returns the offset and length in bytes of a range of blocks. Saturates. The last block may reach beyond the
    /// volume's end; the caller clips.
    pub const fn byte_range(self, blocks: BlockRange) -> (u64, u64) {
        (blocks.start.0.saturating_mul(self.bytes()), blocks.len().saturating_mul(self.bytes()))
    }

    /// Returns the number of blocks of a volume of `size_bytes` bytes; the last one may be partial.
    pub const fn blocks_of(self, size_bytes: u64) -> BlockCount {
        BlockCount(size_bytes.div_ceil(self.bytes()))
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} KiB", self.bytes() >> 10)
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = InvalidBlockSize;

    fn try_from(bytes: u32) -> Result<Self, Self::Error> {
        Self::new(bytes)
    }
}

impl From<BlockSize> for u32 {
    fn from(size: BlockSize) -> Self {
        1 << size.shift
    }
}

/// The error for a refused block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "use blocks of {bytes} bytes: not a power of two from {} to {}",
    BlockSize::MIN_BYTES,
    BlockSize::MAX_BYTES
)]
pub struct InvalidBlockSize {
    /// The requested size in bytes.
    pub bytes: u32,
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, formatter)
            }
        }
    };
}

number! {
    /// The position of a block on its volume, counted from 0.
    BlockIndex
}

number! {
    /// A number of blocks.
    BlockCount
}

number! {
    /// The number of an epoch: a stretch of a volume's history.
    ///
    /// Numbers only grow. None is given out twice on one branch of a lineage, not even across a crash
    /// ([`Chronicle::resume`](crate::Chronicle::resume)).
    Epoch
}

number! {
    /// The number of handovers of a volume. If two hosts both claim a volume, the one with the lower generation is wrong.
    Generation
}

impl Epoch {
    /// Returns the epoch after this one. Saturates: at one epoch a microsecond the numbers last 584,000 years.
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Generation {
    /// Returns the generation after the next handover.
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// The blocks from `start` up to, but not including, `end`. Empty if `end` is not beyond `start`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockRange {
    /// The first block of the range.
    pub start: BlockIndex,
    /// The first block after the range.
    pub end: BlockIndex,
}

impl BlockRange {
    /// Returns the range from `start` up to, but not including, `end`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start: BlockIndex(start), end: BlockIndex(end) }
    }

    /// Returns the number of blocks in the range.
    pub const fn len(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Returns whether the range holds no block.
    pub const fn is_empty(&self) -> bool {
        self.end.0 <= self.start.0
    }

    /// Returns whether a block lies in the range.
    pub const fn contains(&self, block: BlockIndex) -> bool {
        self.start.0 <= block.0 && block.0 < self.end.0
    }

    /// Returns whether both ranges have a block in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        !self.intersect(other).is_empty()
    }

    /// Returns the blocks that lie in both ranges; empty if there are none.
    pub const fn intersect(&self, other: &Self) -> Self {
        let start = if self.start.0 > other.start.0 { self.start.0 } else { other.start.0 };
        let end = if self.end.0 < other.end.0 { self.end.0 } else { other.end.0 };
        Self::new(start, if end < start { start } else { end })
    }

    /// Iterates over the blocks in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = BlockIndex> + use<> {
        (self.start.0..self.end.0).map(BlockIndex)
    }
}

impl fmt::Display for BlockRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4 << 10;

    #[test]
    fn block_sizes_are_powers_of_two_from_4_kib_to_1_mib() {
        for shift in 12..=20 {
            assert_eq!(BlockSize::new(1 << shift).map(BlockSize::bytes), Ok(1 << shift));
        }
        for bytes in [0, 1, 2048, 4095, 4097, 12 << 10, 2 << 20, u32::MAX] {
            assert_eq!(BlockSize::new(bytes), Err(InvalidBlockSize { bytes }));
        }
        assert_eq!(BlockSize::DEFAULT.bytes(), BLOCK);
    }

    #[test]
    fn a_write_touches_every_block_that_it_reaches_into() {
        let size = BlockSize::DEFAULT;
        assert!(size.covering(5 * BLOCK, 0).is_empty());
        assert_eq!(size.covering(0, 1), BlockRange::new(0, 1));
        assert_eq!(size.covering(BLOCK - 1, 1), BlockRange::new(0, 1));
        assert_eq!(size.covering(BLOCK - 1, 2), BlockRange::new(0, 2));
        assert_eq!(size.covering(BLOCK, BLOCK), BlockRange::new(1, 2));
        assert_eq!(size.covering(u64::MAX, u64::MAX), BlockRange::new(u64::MAX >> 12, (u64::MAX >> 12) + 1));
    }

    #[test]
    fn blocks_and_bytes_convert_there_and_back() {
        let size = BlockSize::DEFAULT;
        assert_eq!(size.byte_range(BlockRange::new(2, 5)), (2 * BLOCK, 3 * BLOCK));
        assert_eq!(size.byte_range(BlockRange::new(u64::MAX, u64::MAX)), (u64::MAX, 0));
        assert_eq!(size.blocks_of(0), BlockCount(0));
        assert_eq!(size.blocks_of(BLOCK + 1), BlockCount(2));
        assert_eq!(size.blocks_of(u64::MAX), BlockCount(1 << 52));
    }

    #[test]
    fn a_range_that_ends_before_it_starts_is_empty() {
        let backwards = BlockRange::new(9, 3);
        assert!(backwards.is_empty());
        assert_eq!(backwards.len(), 0);
        assert_eq!(backwards.iter().count(), 0);
        assert!(!backwards.overlaps(&BlockRange::new(0, 20)));
    }

    #[test]
    fn touching_ranges_do_not_overlap() {
        assert!(!BlockRange::new(0, 4).overlaps(&BlockRange::new(4, 8)));
        assert!(BlockRange::new(0, 5).overlaps(&BlockRange::new(4, 8)));
        assert_eq!(BlockRange::new(0, 5).intersect(&BlockRange::new(4, 8)), BlockRange::new(4, 5));
        assert!(BlockRange::new(0, 2).intersect(&BlockRange::new(4, 8)).is_empty());
    }
}
