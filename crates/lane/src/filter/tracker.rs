//! Records every write in the volume's chronicle, before it is submitted (design §5.1, §5.3).

use std::cell::RefCell;
use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Durability, Extent, Geometry, IoFuture, ZeroMode};
use chronicle::{Chronicle, Epoch, Recorded};

/// The tracker of one volume. It is always in the stack.
pub struct Tracker {
    below: Rc<dyn BlockDevice>,
    chronicle: Rc<RefCell<Chronicle>>,
}

impl Tracker {
    /// Makes a tracker above `below` that feeds `chronicle`.
    pub fn new(below: Rc<dyn BlockDevice>, chronicle: Rc<RefCell<Chronicle>>) -> Self {
        Self { below, chronicle }
    }

    /// Carries `write` out between two looks at the chronicle.
    async fn tracked<T>(&self, range: ByteRange, write: IoFuture<'_, T>) -> Result<T, block::IoError> {
        let opened = self.record(range);
        let result = write.await;
        // It may have reached the disk in either epoch, also if it failed: it is in both.
        if self.chronicle.borrow().open_epoch() != opened {
            self.record(range);
        }
        result
    }

    /// Returns the epoch in which the range is recorded.
    fn record(&self, range: ByteRange) -> Epoch {
        match self.chronicle.borrow_mut().record(range.offset, range.length) {
            Recorded::Marked(epoch) => epoch,
            // The lane's chronicles have volatile marks (`MarkPolicy::Volatile`), for which this is never answered.
            Recorded::WaitForMark(epoch) => epoch,
        }
    }
}

impl BlockDevice for Tracker {
    /// Passthrough.
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    /// Passthrough.
    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.below.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        let range = ByteRange::new(offset, data.len() as u64);
        Box::pin(async move { self.tracked(range, self.below.write(offset, data, durability)).await })
    }

    /// Passthrough.
    fn flush(&self) -> IoFuture<'_, ()> {
        self.below.flush()
    }

    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        Box::pin(async move { self.tracked(range, self.below.discard(range)).await })
    }

    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move { self.tracked(range, self.below.write_zeroes(range, mode, durability)).await })
    }

    /// Passthrough.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    /// Passthrough.
    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.below.allocation(range)
    }
}
