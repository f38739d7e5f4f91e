//! How a store becomes larger while it is used: first room is made where nobody sees it, then it is shown, at once.
//!
//! ```text
//!                capacity            prepare                       show
//!   as it was ──────────► enough? ──────────► room, zero, durable ──────► larger for everybody
//!       ▲                   │ no                │ something else failed
//!       └───────────────────┴───────────────────┘ undo
//! ```
//!
//! Between the two steps whoever grows a volume makes sure of everything else that it takes: a second store that must
//! have the same size, a journal that must know. Showing cannot fail, so that nothing is ever half as large.

use std::cell::Cell;

use crate::device::{ByteRange, Geometry, IoFuture, check_range, check_write};
use crate::error::IoError;

/// A store that can become larger. It never becomes smaller.
///
/// Sizes are in bytes, and multiples of [`ALIGNMENT`](crate::device::ALIGNMENT), whatever the store's first size was.
/// One growth at a time; requests go on meanwhile.
pub trait Growth {
    /// Tells how large it could become: `None` if nothing is known to be in the way.
    ///
    /// Asked anew each time: a logical volume, or what a server has, may have become larger.
    fn capacity(&self) -> IoFuture<'_, Option<u64>>;

    /// Makes the store hold `size` bytes, durably; what is new reads as zeroes.
    ///
    /// Nobody sees it yet: [`geometry`](crate::BlockDevice::geometry) is as before. It may be repeated, also after a
    /// crash in the midst of it, and with another size. If it fails, [`Growth::undo`] is to be called.
    fn prepare(&self, size: u64) -> IoFuture<'_, ()>;

    /// Lets everybody see it: `size` was prepared, and is larger than the present one.
    fn show(&self, size: u64);

    /// Gives up what was prepared and not shown: what the store's file says of its size is durably as before.
    fn undo(&self) -> IoFuture<'_, ()>;
}

/// The geometry of a store that may grow, and what requests are judged by.
///
/// A request that ends where the store ended at first may be under way when that becomes the middle of a block: it is
/// taken all the same.
pub struct GrowingGeometry {
    now: Cell<Geometry>,
    size_at_first: u64,
}

impl GrowingGeometry {
    /// Begins with `geometry`.
    pub fn new(geometry: Geometry) -> Self {
        Self { now: Cell::new(geometry), size_at_first: geometry.size }
    }

    /// As it is now.
    pub fn get(&self) -> Geometry {
        self.now.get()
    }

    /// Size in bytes, now.
    pub fn size(&self) -> u64 {
        self.now.get().size
    }

    /// Shows a larger size; a smaller one changes nothing.
    pub fn show(&self, size: u64) {
        let now = self.now.get();
        self.now.set(Geometry { size: now.size.max(size), ..now });
    }

    /// As [`check_range`].
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

    /// As [`check_write`].
    ///
    /// # Errors
    /// Those of [`check_write`].
    pub fn check_write(&self, range: ByteRange) -> Result<(), IoError> {
        // Of a read-only store nothing else is told.
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
