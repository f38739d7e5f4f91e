//! The kinds of guests' requests, whose latencies are compared like with like, and the kinds of movers.

/// Upper bounds in bytes of the classes of size, but for the last.
const SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
const SIZE_CLASSES: usize = SIZES.len() + 1;

/// The kind and the size of a guest's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestClass(u8);

impl RequestClass {
    /// How many there are.
    pub(crate) const COUNT: usize = 2 * SIZE_CLASSES + 1;

    /// The class of a flush.
    pub const FLUSH: Self = Self((Self::COUNT - 1) as u8);

    /// The class of a read of this many bytes.
    pub fn read(bytes: u64) -> Self {
        Self(size_class(bytes) as u8)
    }

    /// The class of a write, discard or zeroing of this many bytes.
    pub fn write(bytes: u64) -> Self {
        Self((SIZE_CLASSES + size_class(bytes)) as u8)
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

fn size_class(bytes: u64) -> usize {
    SIZES.iter().position(|bound| bytes <= *bound).unwrap_or(SIZES.len())
}

/// What a mover moves, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MoverClass {
    /// Blocks that a volume lacks at its owner.
    Filling,
    /// A migration's blocks.
    Migration,
    /// What a standby lacks.
    Standby,
}

impl MoverClass {
    /// Returns how much a mover of this class moves, as a multiple of a migration, while both wait.
    pub(crate) fn weight(self) -> f64 {
        match self {
            Self::Filling => 10.0,
            Self::Migration => 1.0,
            Self::Standby => 0.25,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_writes_and_flushes_of_each_size_are_apart() {
        let sizes = [1, 4 << 10, 8 << 10, 64 << 10, 1 << 20];
        let reads = sizes.map(|bytes| RequestClass::read(bytes).index());
        let writes = sizes.map(|bytes| RequestClass::write(bytes).index());
        assert_eq!((reads, writes), ([0, 0, 1, 2, 4], [5, 5, 6, 7, 9]));
        assert_eq!(RequestClass::FLUSH.index() + 1, RequestClass::COUNT);
    }
}
