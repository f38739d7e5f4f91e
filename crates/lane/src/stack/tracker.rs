//! Records every write in the volume's chronicle, before it is submitted (design §5.1, §5.3).

use std::cell::Cell;
use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use chronicle::BeyondTheEnd;
use rustix::io::Errno;

use crate::chronicler::Chronicler;

/// The tracker of one volume, which is always in its stack.
pub struct Tracker {
    below: Rc<dyn BlockDevice>,
    chronicler: Rc<Chronicler>,
}

/// Failed flushes of a volume whose askers have not got their error yet, with the latest error.
///
/// It outlives its tracker. A flush in the stack of an ended migration must not succeed while one in the migration's stack has
/// failed and may have lost data.
#[derive(Default)]
pub(crate) struct Untold(Cell<Option<(u32, IoError)>>);

/// A flush that has failed, until its asker has its error or has gone.
struct Telling<'a>(&'a Untold);

impl Tracker {
    /// Makes a tracker above `below` that records in the chronicle of `chronicler`.
    pub fn new(below: Rc<dyn BlockDevice>, chronicler: Rc<Chronicler>) -> Self {
        Self { below, chronicler }
    }
}

impl BlockDevice for Tracker {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.below.read(offset, buffer)
    }

    /// Makes a change between two checks of the chronicle's epoch.
    ///
    /// **N.B.** The stack below gets the change at the very instant of the first check: a copy that is referred to from then on
    /// knows it as a write in flight.
    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let range = change.range();
            // N.B. an unrecordable change is not made: a copy that relies on the chronicle would lack it unnoticed.
            let recorded = self.chronicler.record(range).await.map_err(unrecorded)?;
            let result = self.below.change(change).await;
            // The change may have reached the disk in either epoch, even if it failed: it is recorded in both.
            if self.chronicler.open_epoch() != recorded {
                self.chronicler.record(range).await.map_err(unrecorded)?;
            }
            result
        })
    }

    /// Flushes. A failure is answered only once copies do not rely on the possibly lost data. A flush that begins before
    /// that fails as well.
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let untold = self.chronicler.untold().error().map_or(Ok(()), Err);
            let result = self.below.flush().await.and(untold);
            if let Err(error @ IoError::Os { .. }) = result {
                let _telling = Telling::begin(self.chronicler.untold(), error);
                self.chronicler.store_failed().await;
            }
            result
        })
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.below.allocation(range)
    }
}

fn unrecorded(error: BeyondTheEnd) -> IoError {
    tracing::error!(%error, "a guest's write is refused: it cannot be recorded; this is a defect");
    IoError::os("record a change", Errno::IO)
}

impl Untold {
    fn error(&self) -> Option<IoError> {
        self.0.get().map(|(_, error)| error)
    }
}

impl<'a> Telling<'a> {
    fn begin(untold: &'a Untold, error: IoError) -> Self {
        untold.0.set(Some((untold.0.get().map_or(0, |(flushes, _)| flushes) + 1, error)));
        Self(untold)
    }
}

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        let others = self.0.0.get().filter(|(flushes, _)| *flushes > 1);
        self.0.0.set(others.map(|(flushes, error)| (flushes - 1, error)));
    }
}

#[cfg(test)]
mod tests {
    use block::MemoryStore;
    use chronicle::{BlockSize, Chronicle, Epoch};
    use futures_util::FutureExt as _;
    use migration::VolumeId;

    use super::*;

    #[test]
    fn a_write_that_cannot_be_recorded_fails_and_is_not_made() {
        let chronicle = Chronicle::new(BlockSize::DEFAULT, 4096, Epoch(1));
        let chronicler = Chronicler::volatile(VolumeId([7; 16]), chronicle);
        let store = Rc::new(MemoryStore::new(8192));
        let tracker = Tracker::new(Rc::clone(&store) as Rc<dyn BlockDevice>, Rc::clone(&chronicler));
        let write = |offset| {
            let mut data = Buffer::zeroed(4096);
            data.fill_from(&[7; 4096]);
            tracker.change(Change::Write(offset, data, block::Durability::Volatile)).now_or_never()
        };
        let refused = IoError::os("record a change", Errno::IO);
        assert_eq!((write(0), write(4096)), (Some(Ok(())), Some(Err(refused))));
        let read = store.read(4096, Buffer::zeroed(4096)).now_or_never().expect("memory is at hand");
        assert_eq!(read.expect("it is there").as_slice()[0], 0);
        chronicler.grow(8192);
        assert_eq!(write(4096), Some(Ok(())));
    }

    #[test]
    fn a_flush_in_the_next_stack_fails_until_one_that_failed_in_the_former_is_told() {
        let chronicle = Chronicle::new(BlockSize::DEFAULT, 4096, Epoch(1));
        let chronicler = Chronicler::volatile(VolumeId([7; 16]), chronicle);
        let next = Tracker::new(Rc::new(MemoryStore::new(4096)), Rc::clone(&chronicler));
        let lost = IoError::os("flush", Errno::IO);
        let former = Telling::begin(chronicler.untold(), lost);
        assert_eq!(next.flush().now_or_never(), Some(Err(lost)));
        drop(former);
        assert_eq!(next.flush().now_or_never(), Some(Ok(())));
    }
}
