//! Sends guest writes to the source, or to source and target at once, as the strategy decides.
//!
//! ```text
//!   write ──► ask the strategy ──► (held) ──► source ─────────────► answer the guest
//!                                      └────► target (or parts), in a task ──► when both have answered, or patience ends
//! ```
//! [`crate::copy::VolumeCopy`] asks the core for the decision. Reads and flushes go to the source, which owns the volume (design
//! §5.6). Run the futures of writes to their end, as [`super::Gate`] says.

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use futures_util::future::join_all;
use migration::planted::{Bug, broken};
use migration::strategy::Route;

use crate::copy::VolumeCopy;

/// The mirror of one volume; in the stack while the volume is being copied.
pub struct MirrorFilter {
    copy: Rc<VolumeCopy>,
}

impl MirrorFilter {
    /// Makes the mirror of a volume that is being copied.
    pub fn new(copy: Rc<VolumeCopy>) -> Self {
        Self { copy }
    }

    async fn mirrored(&self, change: Change) -> Result<(), IoError> {
        let range = change.range();
        let source = self.copy.source();
        if range.length == 0 {
            return source.change(change).await;
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
                // All parts are awaited: a write in flight must not count as ended.
                let parts = mirrored.into_iter().map(|part| make_at_target(copy.mirror_target(), part));
                let result = join_all(parts).await.into_iter().collect();
                copy.target_written(write, &result);
            });
        }
        let result = source.change(change).await;
        ticket.source_written(&result);
        if is_mirrored {
            ticket.completed().await;
        }
        result
    }
}

/// Makes a change at the target, without durability: the target is flushed before it owns the volume.
async fn make_at_target(target: &Rc<dyn BlockDevice>, change: Change) -> Result<(), IoError> {
    if matches!(change, Change::Discard(_)) && broken(Bug::Discard) {
        return Ok(());
    }
    target.change(change.volatile()).await
}

impl BlockDevice for MirrorFilter {
    fn geometry(&self) -> Geometry {
        self.copy.source().geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.copy.source().read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.mirrored(change))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.copy.source().flush()
    }

    /// Returns whether both stores zero fast: a guest waits for the target, too.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.copy.source().zeroes_fast(mode) && self.copy.mirror_target().zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.copy.source().allocation(range)
    }
}
