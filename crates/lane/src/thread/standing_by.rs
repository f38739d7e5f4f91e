//! A volume that has a standby: shows its changes to its group, and reads what the group sends.

use block::{Buffer, ByteRange};
use chronicle::{BlockRange, Generation, LayeredBitmap, ReplicaOf};

use super::Lane;
use crate::capture::BLOCK_BYTES;
use crate::chronicler::NotDurable;
use crate::handle::CaptureOrder;
use crate::refused::Refused;

/// The generation under which chronicles know a standby: it stays the same when the volume changes hands.
const GENERATION: Generation = Generation(0);

impl Lane {
    pub(super) async fn capture(&self, order: CaptureOrder) -> Result<Option<LayeredBitmap>, Refused> {
        let CaptureOrder { member, of } = order;
        if member.is_some() {
            self.check_capturable()?;
        }
        let in_place = self.volume.set_member(member);
        // The group has the size that was recorded when it was made; later growth is told by the volume.
        if let Some(member) = self.volume.member() {
            member.grown(self.volume.block_size().blocks_of(self.volume.size()));
        }
        in_place.await;
        Ok(self.volume.chronicler().lacking(of, GENERATION))
    }

    fn check_capturable(&self) -> Result<(), Refused> {
        let block_bytes = self.volume.block_size().bytes();
        if block_bytes != BLOCK_BYTES {
            return Err(Refused::BlockSize(block_bytes));
        }
        self.check_whole()
    }

    /// Reads blocks below the gate. The group lets no change of them pass meanwhile.
    pub(super) async fn read_for_standby(&self, blocks: BlockRange) -> Result<Buffer, Refused> {
        if !self.volume.is_here() {
            return Err(Refused::NotHere);
        }
        let range = ByteRange::new(blocks.start.0 * BLOCK_BYTES, blocks.len() * BLOCK_BYTES);
        self.standby_may_read(range.length).await;
        // Taken now: the volume may have moved to another store while the disk's guests had the turn.
        let store = self.volume.store();
        let buffer = self.engine.buffers().take(range.length as usize);
        let read = store.read(range.offset, buffer).await;
        let now = self.handle.now();
        self.standby_mover.borrow_mut().ended(now, range.length);
        read.map_err(Refused::Unread)
    }

    /// Waits until the pacer of the volume's disk lets the standby read.
    async fn standby_may_read(&self, bytes: u64) {
        loop {
            let now = self.handle.now();
            let at = self.standby_mover.borrow_mut().next_start(now, bytes);
            if at <= now {
                self.standby_mover.borrow_mut().began(now, bytes);
                return;
            }
            self.handle.sleep_until(at).await;
        }
    }

    /// Makes durable what the standby lacks. Its group has flushed the volume's store.
    pub(super) async fn forget_for_standby(&self, of: ReplicaOf) -> Result<(), NotDurable> {
        let missing = || self.volume.member()?.unforgotten();
        self.volume.chronicler().refer_to(of, GENERATION, || None, missing).await
    }
}
