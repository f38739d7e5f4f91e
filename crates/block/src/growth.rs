//! Growth of a store in use: first space is prepared invisibly, then the new size is shown at once.
//!
//! ```text
//!                capacity            prepare                       show
//!   as it was ──────────► enough? ──────────► room, zero, durable ──────► larger for all
//!       ▲                   │ no                │ something else failed
//!       └───────────────────┴───────────────────┘ undo
//! ```
//!
//! Between the two steps the caller prepares everything else: a second store of the same size, and the record in the journal.
//! Showing cannot fail, so a volume is never half grown.

use std::cell::Cell;

use crate::device::{ByteRange, Geometry, IoFuture, check_range, check_write};
use crate::error::IoError;

/// A store that can become larger. It never becomes smaller.
///
/// Sizes are in bytes, and multiples of [`ALIGNMENT`](crate::device::ALIGNMENT), whatever the store's first size was. One growth
/// at a time; requests continue meanwhile.
pub trait Growth {
    /// Returns the largest possible size; `None` if no limit is known.
    ///
    /// Ask anew each time: a logical volume, or an export, may have grown.
    fn capacity(&self) -> IoFuture<'_, Option<u64>>;

    /// Makes the store hold `size` bytes, durably; the new part reads as zeroes.
    ///
    /// The new size is not visible yet: [`geometry`](crate::BlockDevice::geometry) is as before. It may be repeated with any
    /// size, also after a crash. If it fails, call [`Growth::undo`].
    fn prepare(&self, size: u64) -> IoFuture<'_, ()>;

    /// Makes the new size visible: `size` was prepared, and is larger than the present one.
    fn show(&self, size: u64);

    /// Gives up a prepared size that was not shown: the size of the store's file is durably as before.
    fn undo(&self) -> IoFuture<'_, ()>;
}

/// The geometry of a store that may grow, and the check of requests against it.
///
/// A request that ends at the store's first end may be in flight when that becomes the middle of a block: it is
/// accepted all the same.
pub struct GrowingGeometry {
    now: Cell<Geometry>,
    size_at_first: u64,
}

impl GrowingGeometry {
    /// Makes a growing geometry from `geometry`.
    pub fn new(geometry: Geometry) -> Self {
        Self { now: Cell::new(geometry), size_at_first: geometry.size }
    }

    /// Returns the present geometry.
    pub fn get(&self) -> Geometry {
        self.now.get()
    }

    /// Returns the present size in bytes.
    pub fn size(&self) -> u64 {
        self.now.get().size
    }

    /// Shows a larger size; a smaller one changes nothing.
    pub fn show(&self, size: u64) {
        let now = self.now.get();
        self.now.set(Geometry { size: now.size.max(size), ..now });
    }

    /// Checks a range against the present geometry.
    ///
    /// # Errors
    /// Those of [`check_range`].
    pub fn check(&self, range: ByteRange) -> Result<(), IoError> {
        let now = self.now.get();
        match check_range(&now, range) {
            Err(error @ IoError::Misaligned { .. }) => {
                check_range(&Geometry { size: self.size_at_first, ..now }, range).map_err(|_| error)
            }
            result => result,
        }
    }

    /// Checks a write against the present geometry.
    ///
    /// # Errors
    /// Those of [`check_write`].
    pub fn check_write(&self, range: ByteRange) -> Result<(), IoError> {
        // A read-only store returns only that error.
        check_write(&self.now.get(), ByteRange::new(0, 0))?;
        self.check(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_ended_at_the_first_end_is_still_taken_and_no_other_odd_one() {
        let geometry = Geometry { size: 4096 + 512, alignment: 4096, read_only: false, discards: true };
        let growing = GrowingGeometry::new(geometry);
        let (old, beyond) = (ByteRange::new(4096, 512), ByteRange::new(8192, 4096));
        assert_eq!(growing.check_write(old), Ok(()));
        assert!(matches!(growing.check(beyond), Err(IoError::OutOfRange { size: 4608, .. })));
        growing.show(12_288);
        assert_eq!((growing.check(old), growing.check(beyond)), (Ok(()), Ok(())));
        for (offset, length) in [(4096, 1024), (4097, 511), (0, 12_287)] {
            let range = ByteRange::new(offset, length);
            assert!(matches!(growing.check(range), Err(IoError::Misaligned { .. })), "{range:?}");
        }
        growing.show(4096);
        assert_eq!(growing.size(), 12_288, "it does not shrink");
    }
}
