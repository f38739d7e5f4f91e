//! A run of bytes of a volume.

/// `length` bytes from `offset` on. A hostile client may choose both numbers: arithmetic saturates, so an out-of-bounds
/// range stays out of bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteRange {
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes covered.
    pub length: u64,
}

impl ByteRange {
    /// Returns the range of `length` bytes from `offset` on.
    pub const fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }

    /// Returns the offset of the first byte after the range.
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Returns whether both ranges have a byte in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}
