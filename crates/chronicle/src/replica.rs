//! A copy of a volume, and what it lacks.
//!
//! The chronicle records every write; a replica decides for itself what a write means to it (design §5.3). Its sets
//! change while the guest writes, and a block is taken out of them *before* it is read for sending (design §5.2), so
//! that a write in between puts it back.
//!
//! ```text
//!              begin_pass                   take_next
//!    missing ─────────────► planned ──────────────────► in flight or synchronised
//!       ▲                      ▲                            │    (the caller knows which)
//!       │                      └ written ahead of the       │
//!       │                        cursor: stays              │
//!       └──────────── written, or unconfirmed ──────────────┘
//! ```
//!
//! It does not know what is in flight, which writes may be mirrored by value, or when a pass is worth its while:
//! that is a strategy's business.

use crate::bitmap::LayeredBitmap;
use crate::chronicle::Chronicle;
use crate::lineage::{BranchPoint, LineageId};
use crate::units::{BlockIndex, BlockRange, Epoch};

/// What is known of one copy of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    lineage: LineageId,
    /// As of which epoch it is current once nothing is missing and nothing in flight.
    as_of: BranchPoint,
    /// The blocks that wait for a pass to be begun.
    missing: LayeredBitmap,
    /// The blocks that the pass under way has yet to take. Disjoint from `missing`, save under
    /// [`MissingPolicy::EveryWrite`].
    planned: LayeredBitmap,
    /// Up to where the pass has come; what is planned lies at or beyond it.
    cursor: BlockIndex,
    policy: MissingPolicy,
}

/// Whether a written block that the pass under way is going to copy anyway becomes missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPolicy {
    /// It does, and is copied twice: plain dirty block tracking (\[ESX\] §2.3), to measure the other against.
    EveryWrite,
    /// It does not: incremental tracking (\[ESX\] §2.3.4). A block that the pass was *not* going to copy, such as a
    /// hole ahead of the cursor, becomes missing all the same (hard case 5).
    AheadOfCursorLeftOut,
}

impl Replica {
    /// A copy that is current as of a point but for the blocks of `missing`.
    pub fn new(
        lineage: LineageId,
        as_of: BranchPoint,
        missing: LayeredBitmap,
        policy: MissingPolicy,
    ) -> Self {
        let planned = LayeredBitmap::new(missing.blocks());
        Self { lineage, as_of, missing, planned, cursor: BlockIndex(0), policy }
    }

    /// The volume of which it is a copy.
    pub fn lineage(&self) -> LineageId {
        self.lineage
    }

    /// As of which point it is current, but for the blocks that it lacks.
    pub fn as_of(&self) -> BranchPoint {
        self.as_of
    }

    /// Tells whether it lacks nothing: neither missing nor planned. What is in flight the caller knows.
    pub fn is_current(&self) -> bool {
        self.missing.is_empty() && self.planned.is_empty()
    }

    /// The blocks that wait for the next pass. With those of [`Replica::planned`] they are what the copy lacks.
    pub fn missing(&self) -> &LayeredBitmap {
        &self.missing
    }

    /// The blocks that the pass under way has yet to take.
    pub fn planned(&self) -> &LayeredBitmap {
        &self.planned
    }

    /// All that the copy lacks, missing and planned: what is to be persisted or handed to a target.
    pub fn lacking(&self) -> LayeredBitmap {
        let mut lacking = self.missing.clone();
        lacking.union_with(&self.planned);
        lacking
    }

    /// How far the pass under way has come: it has nothing left to take below.
    pub fn cursor(&self) -> BlockIndex {
        self.cursor
    }

    /// Takes note of a write that reached the volume and not this copy; returns how many blocks became missing.
    ///
    /// Called when the write is submitted and, if blocks of it may have been read for sending meanwhile, once more
    /// when it completes.
    pub fn written(&mut self, blocks: BlockRange) -> u64 {
        match self.policy {
            MissingPolicy::EveryWrite => self.missing.insert(blocks),
            MissingPolicy::AheadOfCursorLeftOut => self.insert_unless_planned(blocks),
        }
    }

    /// Takes note that the copy may not hold these blocks after all: a frame was lost, or a target restarted before
    /// it had made them durable (design §5.7).
    pub fn unconfirmed(&mut self, blocks: BlockRange) {
        self.insert_unless_planned(blocks);
    }

    /// Takes note that the copy got these blocks by another way, such as a whole block mirrored by value.
    pub fn synchronised(&mut self, blocks: BlockRange) {
        self.missing.remove(blocks);
        self.planned.remove(blocks);
    }

    /// Adds what the volume's history says was written since the copy was current: the incremental return of \[TPM\]
    /// §V, and where a standby or an interrupted copy goes on.
    ///
    /// `history` belongs to the branch that the copy is on; for another branch see
    /// [`missing_after_branching`](crate::lineage::missing_after_branching).
    pub fn fall_behind(&mut self, history: &Chronicle) {
        self.missing.union_with(&history.since(self.as_of.epoch));
        self.missing.subtract(&self.planned);
    }

    /// Begins a pass over all that is missing, from the volume's first block on.
    ///
    /// What an unfinished pass had still planned is planned again.
    pub fn begin_pass(&mut self) {
        self.planned.union_with(&self.missing);
        self.missing.clear();
        self.cursor = BlockIndex(0);
    }

    /// Takes the next run of at most `blocks_max` blocks out of the pass; `None` when the pass is over.
    ///
    /// **N.B.** From here on only the caller knows that the copy lacks these blocks: it reads and sends them, and
    /// answers for them with [`Replica::unconfirmed`] if that fails. It reads them only after the writes already
    /// submitted to them have completed (design §5.1).
    pub fn take_next(&mut self, blocks_max: u64) -> Option<BlockRange> {
        let run = self.planned.next_run(self.cursor, blocks_max)?;
        self.planned.remove(run);
        self.cursor = run.end;
        Some(run)
    }

    /// Takes note that the copy holds all that was written up to the end of a frozen `epoch`, but for what it lacks.
    ///
    /// The caller has seen to it that nothing written in `epoch` or before is in flight. An epoch earlier than the
    /// one reached changes nothing.
    pub fn reached(&mut self, epoch: Epoch) {
        self.as_of.epoch = self.as_of.epoch.max(epoch);
    }

    /// Makes blocks missing, but for those that the pass is going to copy; returns how many became so.
    fn insert_unless_planned(&mut self, blocks: BlockRange) -> u64 {
        let mut newly_missing = 0;
        let mut start = blocks.start;
        while let Some(planned) = self.planned.next_run(start, u64::MAX)
            && planned.start < blocks.end
        {
            newly_missing += self.missing.insert(BlockRange { start, end: planned.start });
            start = planned.end;
        }
        newly_missing + self.missing.insert(BlockRange { start, end: blocks.end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::BranchId;
    use crate::units::{BlockCount, BlockSize};

    const BLOCKS: BlockCount = BlockCount(1000);

    fn replica(missing: &[(u64, u64)], policy: MissingPolicy) -> Replica {
        let mut bitmap = LayeredBitmap::new(BLOCKS);
        for &(start, end) in missing {
            bitmap.insert(BlockRange::new(start, end));
        }
        let as_of = BranchPoint { branch: BranchId([1; 16]), epoch: Epoch(3) };
        Replica::new(LineageId([7; 16]), as_of, bitmap, policy)
    }

    fn runs(bitmap: &LayeredBitmap) -> Vec<(u64, u64)> {
        bitmap.runs().map(|run| (run.start.0, run.end.0)).collect()
    }

    #[test]
    fn a_write_ahead_of_the_cursor_adds_nothing_and_one_behind_it_does() {
        let mut replica = replica(&[(0, 100)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        assert_eq!(replica.take_next(40), Some(BlockRange::new(0, 40)));
        assert_eq!(replica.written(BlockRange::new(38, 42)), 2);
        assert_eq!(runs(replica.missing()), [(38, 40)]);
        assert_eq!(runs(&replica.lacking()), [(38, 100)]);
    }

    #[test]
    fn plain_tracking_copies_a_block_written_ahead_of_the_cursor_twice() {
        let mut replica = replica(&[(0, 100)], MissingPolicy::EveryWrite);
        replica.begin_pass();
        assert_eq!(replica.written(BlockRange::new(50, 52)), 2);
        while replica.take_next(64).is_some() {}
        assert_eq!(runs(replica.missing()), [(50, 52)]);
    }

    #[test]
    fn a_write_into_a_hole_ahead_of_the_cursor_becomes_missing() {
        let mut replica = replica(&[(0, 10), (20, 30), (40, 50)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        assert_eq!(replica.written(BlockRange::new(5, 60)), 30);
        assert_eq!(runs(replica.missing()), [(10, 20), (30, 40), (50, 60)]);
    }

    #[test]
    fn a_block_written_after_it_was_taken_is_missing_again_before_it_is_read() {
        let mut replica = replica(&[(7, 8)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        assert_eq!(replica.take_next(1), Some(BlockRange::new(7, 8)));
        assert!(replica.is_current());
        replica.written(BlockRange::new(7, 8));
        assert!(!replica.is_current());
        assert_eq!(replica.take_next(1), None, "it waits for the next pass");
        replica.begin_pass();
        assert_eq!(replica.take_next(1), Some(BlockRange::new(7, 8)));
    }

    #[test]
    fn what_was_not_confirmed_is_missing_again() {
        let mut replica = replica(&[(0, 9)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        replica.take_next(4);
        replica.unconfirmed(BlockRange::new(0, 6));
        assert_eq!(runs(replica.missing()), [(0, 4)]);
        assert_eq!(runs(&replica.lacking()), [(0, 9)]);
    }

    #[test]
    fn a_pass_begun_before_the_last_was_over_loses_nothing() {
        let mut replica = replica(&[(0, 10)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        replica.take_next(4);
        replica.written(BlockRange::new(1, 2));
        replica.begin_pass();
        assert_eq!(replica.take_next(u64::MAX), Some(BlockRange::new(1, 2)));
        assert_eq!(replica.take_next(u64::MAX), Some(BlockRange::new(4, 10)));
        assert!(replica.is_current());
    }

    #[test]
    fn blocks_ahead_of_one_copys_cursor_are_recorded_for_every_other_copy() {
        let block = BlockSize::DEFAULT.bytes();
        let mut history = Chronicle::new(BlockSize::DEFAULT, BLOCKS.0 * block, Epoch(4));
        let mut moving = replica(&[(0, 1000)], MissingPolicy::AheadOfCursorLeftOut);
        let mut standby = replica(&[], MissingPolicy::EveryWrite);
        moving.begin_pass();

        let _ = history.record(500 * block, block);
        assert_eq!(moving.written(BlockRange::new(500, 501)), 0);
        assert_eq!(standby.written(BlockRange::new(500, 501)), 1);
        assert_eq!(runs(&history.since(Epoch(3))), [(500, 501)], "the way home starves without it");
    }

    #[test]
    fn coming_back_costs_what_was_written_since() {
        let block = BlockSize::DEFAULT.bytes();
        let mut history = Chronicle::new(BlockSize::DEFAULT, BLOCKS.0 * block, Epoch(3));
        let _ = history.record(0, 5 * block);
        history.advance();
        let _ = history.record(2 * block, block);
        let mut replica = replica(&[], MissingPolicy::AheadOfCursorLeftOut);
        replica.fall_behind(&history);
        assert_eq!(runs(replica.missing()), [(2, 3)]);

        replica.reached(Epoch(2));
        assert_eq!(replica.as_of().epoch, Epoch(3), "a copy does not grow older");
        replica.reached(Epoch(4));
        assert_eq!(replica.as_of().epoch, Epoch(4));
    }

    #[test]
    fn falling_behind_during_a_pass_copies_no_block_twice() {
        let block = BlockSize::DEFAULT.bytes();
        let mut history = Chronicle::new(BlockSize::DEFAULT, BLOCKS.0 * block, Epoch(4));
        let _ = history.record(0, 10 * block);
        let mut replica = replica(&[(0, 10)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        replica.take_next(4);
        replica.fall_behind(&history);
        assert_eq!(runs(replica.missing()), [(0, 4)]);
        assert_eq!(runs(replica.planned()), [(4, 10)]);
    }

    #[test]
    fn a_block_mirrored_whole_is_neither_missing_nor_planned() {
        let mut replica = replica(&[(0, 4)], MissingPolicy::AheadOfCursorLeftOut);
        replica.begin_pass();
        replica.take_next(2);
        replica.written(BlockRange::new(0, 1));
        replica.synchronised(BlockRange::new(0, 3));
        assert_eq!(runs(&replica.lacking()), [(3, 4)]);
    }
}
