//! Asserts the contract of [`BlockDevice`] between two layers, in tests.
//!
//! Panics at the first violation and names it. So it finds the faulty layer of a stack before a guest sees the effect.

use std::cell::Cell;
use std::rc::Rc;

use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{BlockDevice, ByteRange, Extent, Geometry, IoFuture, ZeroMode, check_range, check_write};
use crate::error::IoError;
use crate::filter::Operation;
use crate::growth::Growth;

/// Checks every request and every answer that passes.
pub struct Check {
    inner: Rc<dyn BlockDevice>,
    requests: Requests,
    /// The latest geometry; only its size may change, by growing.
    geometry: Cell<Geometry>,
}

/// The requests that may come from above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// Valid requests only: a filter above has checked them.
    Valid,
    /// All kinds: the device must refuse invalid ones with the right error.
    Any,
}

impl Check {
    /// Puts the filter over `inner`.
    ///
    /// # Panics
    /// If the geometry of `inner` makes no sense.
    pub fn new(inner: Rc<dyn BlockDevice>, requests: Requests) -> Self {
        let geometry = inner.geometry();
        assert!(geometry.alignment.is_power_of_two(), "alignment of {}", geometry.alignment);
        Self { inner, requests, geometry: Cell::new(geometry) }
    }

    fn current(&self) -> Geometry {
        let now = self.inner.geometry();
        let before = self.geometry.replace(now);
        assert!(now.size >= before.size, "a device does not shrink: {before:?}, {now:?}");
        assert_eq!(
            Geometry { size: before.size, ..now },
            before,
            "but for its size, a device does not change"
        );
        now
    }

    /// Returns the required error for a request on this range, if it is certain.
    fn expected(&self, refusal: Result<(), IoError>) -> Option<IoError> {
        if self.requests == Requests::Valid {
            assert_eq!(refusal, Ok(()), "an invalid request was passed on");
        }
        refusal.err()
    }
}

impl BlockDevice for Check {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        let expected = self.expected(check_range(&self.current(), range));
        assert!(buffer.is_unique(), "a buffer to be read into has another handle");
        Box::pin(async move {
            let answer = self.inner.read(offset, buffer).await;
            assert_refused(expected, answer.as_ref().err(), Operation::Read, range);
            if let Ok(buffer) = &answer {
                assert_eq!(buffer.len() as u64, range.length, "read gave back another length");
                assert!(buffer.is_unique(), "read gave back a shared buffer");
            }
            answer
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let (operation, range) = (Operation::of(&change), change.range());
        let expected = self.expected(check_write(&self.current(), range));
        Box::pin(async move {
            let answer = self.inner.change(change).await;
            assert_refused(expected, answer.as_ref().err(), operation, range);
            answer
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.inner.flush()
    }

    fn growth(&self) -> Option<&dyn Growth> {
        self.inner.growth()
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.inner.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        let expected = self.expected(check_range(&self.current(), range));
        Box::pin(async move {
            let answer = self.inner.allocation(range).await;
            assert_refused(expected, answer.as_ref().err(), Operation::Allocation, range);
            if let Ok(extents) = &answer {
                assert_covers(extents, range);
            }
            answer
        })
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        let expected = self.expected(check_range(&self.current(), range));
        Box::pin(async move {
            let answer = self.inner.own_allocation(range).await;
            assert_refused(expected, answer.as_ref().err(), Operation::Allocation, range);
            if let Ok(extents) = &answer {
                assert_covers(extents, range);
            }
            answer
        })
    }
}

/// Asserts that extents lie in order, without gaps, and cover a range exactly. Panics if they do not.
pub(crate) fn assert_covers(extents: &[Extent], range: ByteRange) {
    let mut position = range.offset;
    for extent in extents {
        assert_eq!(extent.range.offset, position, "a gap or an overlap in {extents:?}");
        assert_ne!(extent.range.length, 0, "an empty extent in {extents:?}");
        position = extent.range.end();
    }
    assert_eq!(position, range.end(), "{extents:?} do not cover {range:?}");
}

fn assert_refused(
    expected: Option<IoError>,
    answer: Option<&IoError>,
    operation: Operation,
    range: ByteRange,
) {
    if let Some(expected) = expected {
        assert_eq!(answer, Some(&expected), "{operation:?} of {range:?}");
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::store::MemoryStore;

    fn over_memory(requests: Requests) -> Check {
        Check::new(Rc::new(MemoryStore::new(1 << 16)), requests)
    }

    #[test]
    #[should_panic(expected = "an invalid request was passed on")]
    fn a_filter_that_passes_on_what_is_misaligned_is_caught() {
        let _ = over_memory(Requests::Valid).discard(ByteRange::new(1, 4096)).now_or_never();
    }

    #[test]
    #[should_panic(expected = "another handle")]
    fn a_shared_buffer_is_caught() {
        let buffer = Buffer::zeroed(4096);
        let _other = buffer.clone();
        let _ = over_memory(Requests::Any).read(0, buffer).now_or_never();
    }

    #[test]
    fn what_is_wrong_is_refused_below_if_anything_may_come() {
        let answer =
            over_memory(Requests::Any).discard(ByteRange::new(1 << 20, 4096)).now_or_never().unwrap();
        assert!(matches!(answer, Err(IoError::OutOfRange { .. })));
    }
}
