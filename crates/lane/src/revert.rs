//! Reverts a volume to a snapshot: makes it equal, by changing only the blocks that differ.
//!
//! ```text
//!   gate closed since the lane began ──► pieces: allocation of both ─► read both ─► changes below the gate ──┐
//!   clients wait                                                                                            ▼
//!                              gate opened ◄── *reverted* durable ◄── flushed ◄─────────────────────── all pieces
//! ```
//! The changes go through the volume's stack below the gate, as a guest's would. So its chronicle has them, and copies at other hosts
//! and a standby receive them later like any write. A crash leaves the order in the journal, and the next lane does it again: what
//! is equal by then is not changed again.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::filter::Aligner;
use block::{BlockDevice, Buffer, BufferPool, ByteRange, Change, Durability, ExtentKind, Opened, ZeroMode};
use migration::journal::Record;
use tracing::info;

use crate::handle::{Command, LaneHandle};
use crate::refused::Refused;
use crate::thread::Lane;

/// The bytes that are looked at in one step, of which those with data are read.
const STEP_BYTES: u64 = 4 << 20;
/// The bytes of a read and of a comparison.
const PIECE_BYTES: u64 = 1 << 20;
/// The bytes that are changed if one of them differs: the smallest block of a chronicle.
const UNIT_BYTES: usize = 4096;

/// The progress of a revert.
#[derive(Debug, Default)]
pub struct Reverted {
    /// The bytes of the volume that are equal to the snapshot for certain, from its beginning on.
    pub bytes_done: AtomicU64,
    /// The bytes that were changed.
    pub bytes_changed: AtomicU64,
}

impl LaneHandle {
    /// Makes the volume equal to a snapshot, and opens its gate. The lane [waits](crate::Opening::Waiting): no guest has been served.
    /// What the snapshot does not have, because the volume has grown since, becomes zeroes.
    ///
    /// # Errors
    /// [`Refused`]; the gate stays closed, and the volume is partly reverted.
    pub async fn revert(&self, snapshot: Opened, shared: Arc<Reverted>) -> Result<(), Refused> {
        self.ask(|answer| Command::Revert(snapshot, shared, answer)).await?
    }
}

impl Lane {
    /// Carries out [`LaneHandle::revert`].
    pub(crate) async fn revert(self: &Rc<Self>, snapshot: Opened, shared: &Reverted) -> Result<(), Refused> {
        self.check_idle()?;
        self.check_whole()?;
        let _busy = self.begins_to_duplicate();
        let from =
            snapshot.into_device(self.handle(), self.engine()).await.map_err(Refused::SnapshotUnread)?;
        let to = self.volume().below_the_gate().ok_or(Refused::NotHere)?;
        let from = Rc::new(Aligner::new(self.engine().buffers().clone(), self.handle().clone()).over(from));
        let pair = Pair { buffers: self.engine().buffers().clone(), from, to: Rc::clone(&to) };
        let (size_bytes, kept_bytes) = (self.volume().size(), pair.from.geometry().size);
        let mut at = 0;
        while at < size_bytes {
            let end = if at < kept_bytes { kept_bytes.min(size_bytes) } else { size_bytes };
            let step = ByteRange::new(at, (end - at).min(STEP_BYTES));
            let changed =
                if at < kept_bytes { pair.make_equal(step).await? } else { pair.make_zero(step).await? };
            at = step.end();
            shared.bytes_done.store(at, Ordering::Relaxed);
            shared.bytes_changed.fetch_add(changed, Ordering::Relaxed);
        }
        to.flush().await.map_err(Refused::Unwritten)?;
        // N.B. Before the first client is served: a restart would take its writes back.
        let reverted = vec![Record::Reverted { volume: self.volume().id() }];
        self.control().commit(reverted).await.map_err(Refused::NotRecorded)?;
        self.volume().open();
        let bytes_changed = shared.bytes_changed.load(Ordering::Relaxed);
        info!(volume = %self.volume().id(), bytes_changed, "the volume is reverted");
        Ok(())
    }
}

/// A snapshot, and the volume that becomes equal to it.
struct Pair {
    buffers: BufferPool,
    from: Rc<dyn BlockDevice>,
    to: Rc<dyn BlockDevice>,
}

impl Pair {
    /// Makes a range of the volume equal to the snapshot's; returns how many bytes were changed.
    async fn make_equal(&self, range: ByteRange) -> Result<u64, Refused> {
        let mut changed = 0;
        let kept = self.from.allocation(range).await.map_err(Refused::SnapshotUnread)?;
        for extent in kept {
            if extent.kind != ExtentKind::Data {
                changed += self.make_zero(extent.range).await?;
                continue;
            }
            for piece in pieces(extent.range) {
                let buffer = self.buffers.take(piece.length as usize);
                let kept = self.from.read(piece.offset, buffer).await.map_err(Refused::SnapshotUnread)?;
                changed += self.make_piece_equal(&kept, piece).await?;
            }
        }
        Ok(changed)
    }

    /// Makes a range of the volume read as zeroes; returns how many bytes were changed.
    async fn make_zero(&self, range: ByteRange) -> Result<u64, Refused> {
        let mut changed = 0;
        let present = self.to.allocation(range).await.map_err(Refused::Unread)?;
        for extent in present.into_iter().filter(|extent| extent.kind == ExtentKind::Data) {
            for piece in pieces(extent.range) {
                changed += self.make_piece_equal(&Buffer::zeroed(piece.length as usize), piece).await?;
            }
        }
        Ok(changed)
    }

    async fn make_piece_equal(&self, kept: &Buffer, piece: ByteRange) -> Result<u64, Refused> {
        let buffer = self.buffers.take(piece.length as usize);
        let present = self.to.read(piece.offset, buffer).await.map_err(Refused::Unread)?;
        let mut changed = 0;
        for (start, length) in differing(kept.as_slice(), present.as_slice()) {
            let part = kept.slice(start, length);
            let (offset, bytes) = (piece.offset + start as u64, length as u64);
            let change = if part.is_zero() {
                Change::Zero(ByteRange::new(offset, bytes), ZeroMode::MayUnmap, Durability::Volatile)
            } else {
                Change::Write(offset, part, Durability::Volatile)
            };
            self.to.change(change).await.map_err(Refused::Unwritten)?;
            changed += bytes;
        }
        Ok(changed)
    }
}

/// Cuts a range into pieces that are read at once.
fn pieces(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let starts = (range.offset..range.end()).step_by(PIECE_BYTES as usize);
    starts.map(move |at| ByteRange::new(at, (range.end() - at).min(PIECE_BYTES)))
}

/// Returns the runs of units that differ, as starts and lengths in bytes.
fn differing(one: &[u8], other: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (index, (one, other)) in one.chunks(UNIT_BYTES).zip(other.chunks(UNIT_BYTES)).enumerate() {
        if one == other {
            continue;
        }
        let start = index * UNIT_BYTES;
        match runs.last_mut() {
            Some((first, length)) if *first + *length == start => *length += one.len(),
            _ => runs.push((start, one.len())),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_units_that_differ_are_changed_and_neighbours_at_once() {
        let kept = vec![7; 5 * UNIT_BYTES + 512];
        assert_eq!(differing(&kept, &kept), []);
        let mut present = kept.clone();
        for at in [UNIT_BYTES, 3 * UNIT_BYTES - 1, 5 * UNIT_BYTES] {
            present[at] = 8;
        }
        assert_eq!(differing(&kept, &present), [(UNIT_BYTES, 2 * UNIT_BYTES), (5 * UNIT_BYTES, 512)]);
    }

    #[test]
    fn the_pieces_of_a_range_cover_it_exactly() {
        let range = ByteRange::new(512, 3 * PIECE_BYTES + 7);
        let cut: Vec<_> = pieces(range).collect();
        assert_eq!(cut.len(), 4);
        assert_eq!((cut[0].offset, cut[3].end()), (range.offset, range.end()));
        assert!(cut.windows(2).all(|pair| pair[0].end() == pair[1].offset));
    }
}
