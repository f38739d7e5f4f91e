//! A run of bytes on a volume.

/// The bytes from `offset` on, `length` of them.
///
/// Both numbers may come from a hostile client: arithmetic saturates, so a range that is out of bounds stays so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

impl ByteRange {
    /// The range of `length` bytes from `offset` on.
    pub const fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }

    /// The first byte after the range.
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Tells whether both ranges have a byte in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}
