//! Shows a volume's changes to its group, before they are submitted and after they have ended (`crate::capture`).

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use chronicle::BlockSize;

use crate::capture::Member;

/// In the stack while the volume has a standby. It lies below the tracker, so the chronicle knows a change first.
pub(super) struct Capture {
    below: Rc<dyn BlockDevice>,
    member: Member,
    block_size: BlockSize,
}

impl Capture {
    pub(super) fn new(below: Rc<dyn BlockDevice>, member: Member, block_size: BlockSize) -> Self {
        Self { below, member, block_size }
    }
}

impl BlockDevice for Capture {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.below.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if change.range().length == 0 {
                return self.below.change(change).await;
            }
            let Some(write) = self.member.ask(&change, self.block_size).await else {
                return self.below.change(change).await;
            };
            let result = self.below.change(change.clone()).await;
            self.member.ended(write, &change, self.block_size, result);
            result
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let result = self.below.flush().await;
            if matches!(result, Err(IoError::Os { .. })) {
                self.member.flush_failed();
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
