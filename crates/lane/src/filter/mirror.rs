//! Sends guest writes where the strategy says: to the source, or to source and target at once.
//!
//! ```text
//!   write ──► ask the strategy ──► (held) ──► source ─────────────► answer the guest
//!                                      └────► target (or parts), in a task ──► when both have answered, or patience ends
//! ```
//! It decides nothing: [`crate::copy::VolumeCopy`] asks the core. Reads and flushes go to the source, which owns the
//! volume (design §5.6). Futures of writes are to be run to their end, as [`super::Gate`] says.

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Durability, Extent, Geometry, IoFuture, ZeroMode};
use futures_util::future::join_all;
use migration::planted::{Bug, broken};
use migration::strategy::Route;

use crate::copy::VolumeCopy;

/// The mirror of one volume; in the stack while the volume is being copied.
pub struct MirrorFilter {
    copy: Rc<VolumeCopy>,
}

/// A change to the volume, which can be made on either store.
#[derive(Clone)]
enum Change {
    Write(u64, Buffer),
    Discard(ByteRange),
    Zero(ByteRange, ZeroMode),
}

impl MirrorFilter {
    /// Makes the mirror of a volume that is being copied.
    pub fn new(copy: Rc<VolumeCopy>) -> Self {
        Self { copy }
    }

    async fn change(&self, change: Change, durability: Durability) -> Result<(), block::IoError> {
        let range = change.range();
        let source = self.copy.source();
        if range.length == 0 {
            return change.apply(source, durability).await;
        }
        let ticket = self.copy.arrive(range);
        let mirrored = match ticket.route().await {
            Route::SourceOnly => Vec::new(),
            Route::Both => vec![change.clone()],
            Route::BothInPart(parts) => parts.into_iter().map(|part| change.part(part)).collect(),
        };
        let is_mirrored = !mirrored.is_empty();
        if is_mirrored {
            let (copy, write) = (Rc::clone(&self.copy), ticket.id());
            self.copy.handle().spawn(async move {
                // All of them to their end: what is still under way must not be taken for over.
                let parts = mirrored.into_iter().map(|part| part.mirror(copy.mirror_target()));
                let result = join_all(parts).await.into_iter().collect();
                copy.target_written(write, &result);
            });
        }
        let result = change.apply(source, durability).await;
        ticket.source_written(&result);
        if is_mirrored {
            ticket.completed().await;
        }
        result
    }
}

impl Change {
    fn range(&self) -> ByteRange {
        match self {
            Self::Write(offset, data) => ByteRange::new(*offset, data.len() as u64),
            Self::Discard(range) | Self::Zero(range, _) => *range,
        }
    }

    /// The change to the bytes of `part`, which lies within its range.
    fn part(&self, part: ByteRange) -> Self {
        match self {
            Self::Write(offset, data) => {
                // Within the buffer, so both fit.
                let (start, length) = ((part.offset - offset) as usize, part.length as usize);
                Self::Write(part.offset, data.slice(start, length))
            }
            Self::Discard(_) => Self::Discard(part),
            Self::Zero(_, mode) => Self::Zero(part, *mode),
        }
    }

    fn apply<'a>(self, device: &'a Rc<dyn BlockDevice>, durability: Durability) -> IoFuture<'a, ()> {
        match self {
            Self::Write(offset, data) => device.write(offset, data, durability),
            Self::Discard(range) => device.discard(range),
            Self::Zero(range, mode) => device.write_zeroes(range, mode, durability),
        }
    }

    /// Applies it to the target, which is flushed before it owns the volume: nothing need be durable before.
    async fn mirror(self, target: &Rc<dyn BlockDevice>) -> Result<(), block::IoError> {
        if matches!(self, Self::Discard(_)) && broken(Bug::Discard) {
            return Ok(());
        }
        self.apply(target, Durability::Volatile).await
    }
}

impl BlockDevice for MirrorFilter {
    /// Passthrough.
    fn geometry(&self) -> Geometry {
        self.copy.source().geometry()
    }

    /// Passthrough.
    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.copy.source().read(offset, buffer)
    }

    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(self.change(Change::Write(offset, data), durability))
    }

    /// Passthrough.
    fn flush(&self) -> IoFuture<'_, ()> {
        self.copy.source().flush()
    }

    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        Box::pin(self.change(Change::Discard(range), Durability::Volatile))
    }

    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(self.change(Change::Zero(range, mode), durability))
    }

    /// As the slower of both stores: a guest waits for the target, too.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.copy.source().zeroes_fast(mode) && self.copy.mirror_target().zeroes_fast(mode)
    }

    /// Passthrough.
    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.copy.source().allocation(range)
    }
}
