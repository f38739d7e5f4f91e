//! The state of a volume's blocks at the target: missing, or applied there without confirmation.
//!
//! ```text
//!            claim                 applied                       confirmed
//!   missing ───────► in flight ───────────► applied, unconfirmed ─────────► durable
//!      ▲                 │ failed, or written meanwhile │ target restarted      │
//!      └─────────────────┴──────────────────────────────┴───────────────────────┘ (a write that is not mirrored)
//! ```
//! The strategy keeps the blocks *in flight*, because it knows the purpose of each.
//!
//! A strategy with rounds has two sets of missing blocks. One is for the current round, the other holds writes of the open epoch
//! for the next round. [`ReplicaBlocks::advance_epoch`] moves the second into the first. A third set is missing but put off,
//! until the policy takes it up (`hot.rs`).

use std::time::Duration;

use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};

use crate::planted::{Bug, broken};
use crate::strategy::FlushId;

pub(super) struct ReplicaBlocks {
    missing: LayeredBitmap,
    /// Blocks that are missing as well, because guests have written them in this epoch. They are copied after its end.
    /// The set is empty without rounds.
    dirty: LayeredBitmap,
    /// Blocks that are missing as well, and are hot: the policy decides when they are copied.
    put_off: LayeredBitmap,
    /// Applied at the target since the last successful flush was requested.
    unconfirmed: LayeredBitmap,
    flushing: Option<Flush>,
}

struct Flush {
    id: FlushId,
    since: Duration,
    /// The blocks that it will confirm; `None`: these are missing again, and only its result is awaited.
    confirms: Option<LayeredBitmap>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    UnderWay,
    /// A flush requested before a restart of the target or a failed flush: it confirms nothing.
    Void,
    Unknown,
}

impl ReplicaBlocks {
    pub(super) fn new(blocks: BlockCount) -> Self {
        let empty = || LayeredBitmap::new(blocks);
        Self { missing: empty(), dirty: empty(), put_off: empty(), unconfirmed: empty(), flushing: None }
    }

    /// Grows the replica; the new part is neither missing nor unconfirmed.
    pub(super) fn grow(&mut self, blocks: BlockCount) {
        let confirms = self.flushing.as_mut().and_then(|flush| flush.confirms.as_mut());
        [&mut self.missing, &mut self.dirty, &mut self.put_off, &mut self.unconfirmed]
            .into_iter()
            .chain(confirms)
            .for_each(|set| set.grow(blocks));
    }

    pub(super) fn is_complete(&self) -> bool {
        let is_taken_up = self.put_off.is_empty() || broken(Bug::HotBlocksLeftOut);
        self.missing.is_empty() && self.dirty.is_empty() && is_taken_up
    }

    pub(super) fn is_epoch_copied(&self) -> bool {
        self.missing.is_empty()
    }

    /// Returns the blocks that are missing or not known to be durable.
    pub(super) fn lacking(&self) -> LayeredBitmap {
        let mut lacking = self.missing.clone();
        lacking.union_with(&self.dirty);
        lacking.union_with(&self.put_off);
        lacking.union_with(&self.unconfirmed);
        if let Some(confirms) = self.flushing.as_ref().and_then(|flush| flush.confirms.as_ref()) {
            lacking.union_with(confirms);
        }
        lacking
    }

    pub(super) fn blocks_missing(&self) -> u64 {
        let put_off = if broken(Bug::HotBlocksLeftOut) { 0 } else { self.put_off.count() };
        self.missing.count() + self.dirty.count() + put_off
    }

    pub(super) fn blocks_put_off(&self) -> u64 {
        self.put_off.count()
    }

    pub(super) fn blocks_dirty(&self) -> u64 {
        self.dirty.count()
    }

    pub(super) fn misses_any(&self, blocks: BlockRange) -> bool {
        self.sets().into_iter().any(|set| set.contains_any(blocks))
    }

    fn sets(&self) -> [&LayeredBitmap; 3] {
        [&self.missing, &self.dirty, &self.put_off]
    }

    /// Returns the first run within `within` that is missing in any set.
    pub(super) fn first_missed_within(&self, within: BlockRange) -> Option<BlockRange> {
        let runs = self.sets().map(|set| first_run_within(set, within));
        runs.into_iter().flatten().min_by_key(|run| run.start)
    }

    pub(super) fn blocks_there(&self, blocks: BlockRange) -> u64 {
        if self.dirty.is_empty() && self.put_off.is_empty() {
            return blocks.len() - self.missing.count_in(blocks);
        }
        let (mut there, mut from) = (0, blocks.start);
        while let Some(run) = self.first_missed_within(BlockRange { start: from, ..blocks }) {
            there += run.start.0 - from.0;
            from = run.end;
        }
        there + blocks.end.0.saturating_sub(from.0)
    }

    pub(super) fn mark_all_missing(&mut self, blocks: &LayeredBitmap) {
        self.missing.union_with(blocks);
    }

    /// Notes guests' writes in the open epoch. Blocks that are put off stay in that set, and are copied with their new content.
    pub(super) fn mark_dirty(&mut self, blocks: BlockRange) {
        insert_unless(&mut self.dirty, &[&self.put_off], blocks);
    }

    /// Like `mark_dirty`, but blocks that this round has still to copy are copied with their new content.
    pub(super) fn mark_dirty_unless_missing(&mut self, blocks: BlockRange) {
        insert_unless(&mut self.dirty, &[&self.missing, &self.put_off], blocks);
    }

    /// Ends the epoch: the blocks written in it are to be copied.
    pub(super) fn advance_epoch(&mut self) {
        self.missing.union_with(&self.dirty);
        self.dirty.clear();
    }

    pub(super) fn mark_missing(&mut self, blocks: BlockRange) {
        self.missing.insert(blocks);
    }

    /// Notes guests' writes without rounds. Blocks that are put off stay in that set, and are copied with their new content.
    pub(super) fn mark_written(&mut self, blocks: BlockRange) {
        insert_unless(&mut self.missing, &[&self.put_off], blocks);
    }

    pub(super) fn put_off(&mut self, blocks: BlockRange) {
        self.missing.remove(blocks);
        self.dirty.remove(blocks);
        self.put_off.insert(blocks);
    }

    pub(super) fn take_up(&mut self) {
        self.missing.union_with(&self.put_off);
        self.put_off.clear();
    }

    pub(super) fn next_missing(&self, from: BlockIndex, blocks_max: u64) -> Option<BlockRange> {
        self.missing.next_run(from, blocks_max)
    }

    pub(super) fn missing_within(&self, within: BlockRange) -> Option<BlockRange> {
        first_run_within(&self.missing, within)
    }

    /// Removes blocks from the missing set before they are read for sending (design §5.2).
    pub(super) fn claim(&mut self, blocks: BlockRange) {
        self.missing.remove(blocks);
    }

    pub(super) fn applied(&mut self, blocks: BlockRange) {
        self.unconfirmed.insert(blocks);
    }

    pub(super) fn blocks_unconfirmed(&self) -> u64 {
        self.unconfirmed.count()
    }

    pub(super) fn is_flushing(&self) -> bool {
        self.flushing.is_some()
    }

    /// Begins a flush, which confirms everything applied so far, and nothing that is applied later.
    pub(super) fn begin_flush(&mut self, id: FlushId, since: Duration) {
        let blocks = self.unconfirmed.blocks();
        let confirms = std::mem::replace(&mut self.unconfirmed, LayeredBitmap::new(blocks));
        self.flushing = Some(Flush { id, since, confirms: Some(confirms) });
    }

    pub(super) fn flushing_since(&self) -> Option<Duration> {
        self.flushing.as_ref().map(|flush| flush.since)
    }

    pub(super) fn end_flush(&mut self, flush: FlushId, confirmed: Confirmed) -> Ended {
        match self.flushing.take_if(|under_way| under_way.id == flush) {
            None => Ended::Unknown,
            Some(Flush { confirms: None, .. }) => Ended::Void,
            Some(Flush { confirms: Some(confirms), .. }) => {
                if confirmed == Confirmed::No {
                    self.unconfirmed.union_with(&confirms);
                }
                Ended::UnderWay
            }
        }
    }

    /// Handles the target's loss of data that was not durable: all of it is missing (hard case 13).
    ///
    /// **N.B.** A flush under way is still awaited: if it failed beside the flush of a promise, the loss would not be reported.
    pub(super) fn target_restarted(&mut self) {
        if let Some(confirms) = self.flushing.as_mut().and_then(|flush| flush.confirms.take()) {
            self.missing.union_with(&confirms);
        }
        self.missing.union_with(&self.unconfirmed);
        self.unconfirmed.clear();
    }
}

fn insert_unless(set: &mut LayeredBitmap, others: &[&LayeredBitmap], blocks: BlockRange) {
    let mut rest = blocks;
    while !rest.is_empty() {
        let found = others.iter().filter_map(|other| first_run_within(other, rest));
        let found =
            found.min_by_key(|run| run.start).unwrap_or(BlockRange { start: rest.end, end: rest.end });
        set.insert(BlockRange { end: found.start, ..rest });
        rest.start = found.end;
    }
}

fn first_run_within(set: &LayeredBitmap, within: BlockRange) -> Option<BlockRange> {
    let run = set.next_run(within.start, within.len())?.intersect(&within);
    (!run.is_empty()).then_some(run)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Confirmed {
    Yes,
    No,
}
