//! A volume's history of writes, cut into epochs.
//!
//! The chronicle answers one question: which blocks may a copy that is current as of epoch *e* lack? It errs to one
//! side only: a listed block may be unchanged, but an unlisted block never changed. It holds no data and knows no
//! replicas: the caller passes the epochs that replicas still refer to.
//!
//! ```text
//!        frozen                                 open
//!   ┌───────────────┬────────┬────────┐  ┌────────────────┐
//!   │ 1 … 7, merged │   8    │   9    │  │ 10 ◄─ record() │
//!   └───────────────┴────────┴────────┘  └────────────────┘
//!                   ▲                      │ advance(): freezes 10, opens 11
//!      a replica as of 7: since(7) = 8 ∪ 9 ∪ 10
//! ```

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::bitmap::LayeredBitmap;
use crate::kept::{Kept, KeptReplica, ReplicaOf};
use crate::units::{BlockCount, BlockIndex, BlockRange, BlockSize, Epoch};

/// The epochs of one volume on one branch of its lineage.
#[derive(Clone, Debug)]
pub struct Chronicle {
    block_size: BlockSize,
    size_bytes: u64,
    /// The oldest epoch whose later writes are all known. For older epochs `since` returns every block.
    known_after: Epoch,
    /// The blocks written in each epoch before the open one, after merging, in order of number.
    frozen: BTreeMap<Epoch, LayeredBitmap>,
    open: Epoch,
    open_blocks: LayeredBitmap,
    mark_policy: MarkPolicy,
    /// The blocks of the regions durably marked for the open epoch. Stays empty while marks are volatile.
    marked: LayeredBitmap,
}

impl Chronicle {
    /// Begins the history of a volume with the open epoch `first`.
    ///
    /// `since` of the epoch before `first` holds everything written from here on, so a copy made before any write has
    /// that epoch. Hence `first` is at least 1, unless the volume's beginning is never asked for.
    pub fn new(block_size: BlockSize, size_bytes: u64, first: Epoch) -> Self {
        let blocks = block_size.blocks_of(size_bytes);
        Self {
            block_size,
            size_bytes,
            known_after: Epoch(first.0.saturating_sub(1)),
            frozen: BTreeMap::new(),
            open: first,
            open_blocks: LayeredBitmap::new(blocks),
            mark_policy: MarkPolicy::Volatile,
            marked: LayeredBitmap::new(blocks),
        }
    }

    /// Starts a new history after a crash that lost the old one.
    ///
    /// `through` is the highest number in anything durable. The open epoch follows it, so that no number is given out twice (hard
    /// case 11). Earlier writes are not known: for `through` and every older epoch, [`Chronicle::since`] returns every block.
    pub fn resume(block_size: BlockSize, size_bytes: u64, through: Epoch) -> Self {
        let open = through.next();
        Self { known_after: open, ..Self::new(block_size, size_bytes, open) }
    }

    /// Restores a kept history, exactly after a clean stop, otherwise as coarse as the marks of [`MarkPolicy::Regions`].
    ///
    /// `kept` lists the blocks that may have been written in each epoch later than `known_after`. An epoch that is absent counts
    /// as an epoch without writes; entries of older epochs are ignored. The open epoch follows `through` and every number in
    /// `kept`, so that no number is given out twice. Blocks beyond the volume's end are dropped: marks cover whole regions.
    pub fn restore(
        block_size: BlockSize,
        size_bytes: u64,
        known_after: Epoch,
        kept: impl IntoIterator<Item = (Epoch, LayeredBitmap)>,
        through: Epoch,
    ) -> Self {
        let mut found: BTreeMap<Epoch, LayeredBitmap> = BTreeMap::new();
        let blocks = block_size.blocks_of(size_bytes);
        for (epoch, written) in kept.into_iter().filter(|(epoch, _)| known_after < *epoch) {
            let empty = LayeredBitmap::new(blocks);
            found.entry(epoch).or_insert(empty).union_with(&written.cut_to(blocks));
        }
        let highest = found.keys().next_back().copied().unwrap_or(known_after);
        let chronicle = Self::resume(block_size, size_bytes, highest.max(through).max(known_after));
        Self { known_after, frozen: found, ..chronicle }
    }

    /// Sets how a write is marked before it may be submitted. Must be called before the first `record`.
    pub fn with_mark_policy(mut self, policy: MarkPolicy) -> Self {
        self.mark_policy = policy;
        self
    }

    /// Opens the next epoch under another mark policy and returns its number. Writes recorded earlier under
    /// [`MarkPolicy::Volatile`] exist in this object only.
    pub fn advance_under(&mut self, policy: MarkPolicy) -> Epoch {
        self.mark_policy = policy;
        self.advance()
    }

    /// Returns how a write is marked before it may be submitted.
    pub fn mark_policy(&self) -> MarkPolicy {
        self.mark_policy
    }

    /// Returns the regions written in the open epoch, likely to be written in the next, too. Empty while marks are volatile.
    pub fn regions_written(&self) -> Vec<BlockRange> {
        let mut regions: Vec<BlockRange> = Vec::new();
        let mut from = BlockIndex(0);
        while let Some(run) = self.open_blocks.next_run(from, u64::MAX) {
            let region = self.regions_of(run);
            if region.is_empty() {
                break;
            }
            from = region.end;
            match regions.last_mut() {
                Some(last) if last.end >= region.start => last.end = region.end,
                _ => regions.push(region),
            }
        }
        regions
    }

    /// Returns the form to store for replicas that are as of `oldest` or later: every epoch before the open one,
    /// exactly. Call it once the open epoch has been frozen ([`Chronicle::advance`]).
    pub fn keep(&self, oldest: Epoch, replicas: BTreeMap<ReplicaOf, KeptReplica>) -> Kept {
        let later = self.frozen.range((Bound::Excluded(oldest), Bound::Unbounded));
        Kept {
            block_size: self.block_size,
            size_bytes: self.size_bytes,
            known_after: self.known_after.max(oldest),
            through: Epoch(self.open.0.saturating_sub(1)),
            epochs: later.map(|(epoch, written)| (*epoch, written.clone())).collect(),
            replicas,
        }
    }

    /// Grows the volume; a size that is not larger changes nothing.
    ///
    /// Must be called before the first write to the new part. No earlier epoch has written there: a copy of such an
    /// epoch that has grown as well holds zeroes there, as the volume does.
    pub fn grow(&mut self, size_bytes: u64) {
        self.size_bytes = self.size_bytes.max(size_bytes);
        let blocks = self.block_size.blocks_of(self.size_bytes);
        let bitmaps = self.frozen.values_mut().chain([&mut self.open_blocks, &mut self.marked]);
        bitmaps.for_each(|bitmap| bitmap.grow(blocks));
    }

    /// Returns the size of the recorded blocks.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Returns the size of the volume in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the size of the volume in blocks; the last block may be partial.
    pub fn blocks(&self) -> BlockCount {
        self.block_size.blocks_of(self.size_bytes)
    }

    /// Returns the oldest epoch for which [`Chronicle::since`] is more precise than "every block".
    pub fn known_after(&self) -> Epoch {
        self.known_after
    }

    /// Returns the epoch that records writes.
    pub fn open_epoch(&self) -> Epoch {
        self.open
    }

    /// Records a write, a discard or a write of zeroes in the open epoch.
    ///
    /// The caller records *before* it submits the write to the store, and keeps the returned epoch. When the write has ended,
    /// even with an error, and [`Chronicle::open_epoch`] has changed, the caller records the range once more. A copy of the
    /// earlier epoch may have read the block during the write (design §5.1).
    ///
    /// On [`Recorded::WaitForMark`] nothing was recorded, and the write must not be submitted. Empty writes record nothing.
    ///
    /// # Errors
    /// [`BeyondTheEnd`]: nothing was recorded, and the write must not be submitted. The volume has grown without a call
    /// of [`Chronicle::grow`].
    pub fn record(&mut self, offset: u64, length: u64) -> Result<Recorded, BeyondTheEnd> {
        let size_bytes = self.size_bytes;
        if offset.checked_add(length).is_none_or(|end| end > size_bytes) && length > 0 {
            return Err(BeyondTheEnd { offset, length, size_bytes });
        }
        let blocks = self.block_size.covering(offset, length);
        if let MarkPolicy::Regions { .. } = self.mark_policy
            && !self.marked.contains_all(blocks)
        {
            return Ok(Recorded::WaitForMark(self.open));
        }
        // Guests rewrite the same blocks: this check is cheaper than a change without effect.
        if !self.open_blocks.contains_all(blocks) {
            self.open_blocks.insert(blocks);
        }
        Ok(Recorded::Marked(self.open))
    }

    /// Returns the blocks of the regions that must be marked before a write can be recorded. Empty if
    /// [`Chronicle::record`] would not ask to wait. May include regions that are marked already.
    pub fn regions_to_mark(&self, offset: u64, length: u64) -> BlockRange {
        let blocks = self.block_size.covering(offset, length);
        if self.marked.contains_all(blocks) {
            return BlockRange::default();
        }
        self.regions_of(blocks)
    }

    /// Notes that the marks of these blocks for `epoch` are durable. Ignored if that epoch is not the open one.
    pub fn regions_marked_durable(&mut self, epoch: Epoch, blocks: BlockRange) {
        if epoch == self.open && self.mark_policy != MarkPolicy::Volatile {
            self.marked.insert(blocks);
        }
    }

    /// Freezes the open epoch, opens the next one and returns its number.
    ///
    /// **N.B.** The number must be durable before anything that bears it leaves this host (design §5.8). The blocks of the frozen
    /// epoch may be read for copying only after every write submitted before this call has completed (design §5.1).
    pub fn advance(&mut self) -> Epoch {
        let empty = LayeredBitmap::new(self.blocks());
        let written = std::mem::replace(&mut self.open_blocks, empty);
        self.frozen.insert(self.open, written);
        self.marked.clear();
        self.open = self.open.next();
        self.open
    }

    /// Returns every block that may have been written in an epoch later than the given one. A copy that is current as
    /// of `epoch` lacks these.
    ///
    /// Exact for the epoch before the first, for every unmerged frozen epoch, and for every epoch passed to each
    /// [`Chronicle::merge_unreferenced`] since. For other epochs the result may be larger:
    /// - for an epoch that was merged: the whole of the merged epoch;
    /// - for an epoch from before this history or from another one (a number that was never open): every block.
    ///
    /// The result for the open epoch is empty: no copy can be current as of an epoch that is still being written.
    pub fn since(&self, epoch: Epoch) -> LayeredBitmap {
        if !self.knows(epoch) {
            return LayeredBitmap::full(self.blocks());
        }
        let mut union = LayeredBitmap::new(self.blocks());
        for blocks in self.later_than(epoch) {
            union.union_with(blocks);
        }
        union
    }

    /// Returns the number of blocks in [`Chronicle::since`].
    pub fn blocks_since(&self, epoch: Epoch) -> u64 {
        let mut written = self.later_than(epoch).filter(|blocks| !blocks.is_empty());
        match (self.knows(epoch), written.next(), written.next()) {
            (false, _, _) => self.blocks().0,
            (true, None, _) => 0,
            (true, Some(only), None) => only.count(),
            (true, Some(_), Some(_)) => self.since(epoch).count(),
        }
    }

    /// Returns the blocks written in one epoch; `None` if it was merged into a later one or was never open. A merged
    /// epoch answers for every epoch that it contains.
    pub fn written_in(&self, epoch: Epoch) -> Option<&LayeredBitmap> {
        if epoch == self.open { Some(&self.open_blocks) } else { self.frozen.get(&epoch) }
    }

    /// Merges neighbouring frozen epochs that no replica distinguishes.
    ///
    /// `referenced` lists the epochs as of which replicas are current, in any order. The result of `since` stays the
    /// same for each of them, and one epoch remains between two of them. A merged epoch takes the number of its newest
    /// member (design §5.8). The open epoch is never merged.
    pub fn merge_unreferenced(&mut self, referenced: &[Epoch]) {
        let told_apart = |older: Epoch, newer: Epoch| referenced.iter().any(|&r| older <= r && r < newer);
        let mut last: Option<(Epoch, LayeredBitmap)> = None;
        for (epoch, mut blocks) in std::mem::take(&mut self.frozen) {
            match last.take() {
                Some((older, written)) if told_apart(older, epoch) => {
                    self.frozen.insert(older, written);
                }
                Some((_, written)) => blocks.union_with(&written),
                None => {}
            }
            last = Some((epoch, blocks));
        }
        self.frozen.extend(last);
    }

    /// Iterates over the numbers of the epochs, after merging, in order; the open one is the last.
    pub fn epochs(&self) -> impl Iterator<Item = Epoch> {
        self.frozen.keys().copied().chain([self.open])
    }

    /// Returns the memory that the history occupies, in bytes, without the allocator's own overhead.
    pub fn bytes_used(&self) -> usize {
        let inline = 2 * size_of::<LayeredBitmap>();
        let bitmaps = self.frozen.values().chain([&self.open_blocks, &self.marked]);
        let numbers = self.frozen.len() * size_of::<Epoch>();
        size_of::<Self>() - inline + numbers + bitmaps.map(LayeredBitmap::bytes_used).sum::<usize>()
    }

    /// Returns the regions that a run of blocks touches; empty while marks are volatile.
    fn regions_of(&self, blocks: BlockRange) -> BlockRange {
        let MarkPolicy::Regions { blocks_per_region } = self.mark_policy else {
            return BlockRange::default();
        };
        let region = blocks_per_region.max(1);
        let end = blocks.end.0.div_ceil(region).saturating_mul(region);
        BlockRange::new(blocks.start.0 / region * region, end.min(self.blocks().0))
    }

    /// Returns whether everything written after `epoch` has been recorded here.
    fn knows(&self, epoch: Epoch) -> bool {
        self.known_after <= epoch && epoch <= self.open
    }

    fn later_than(&self, epoch: Epoch) -> impl Iterator<Item = &LayeredBitmap> {
        let frozen = self.frozen.range((Bound::Excluded(epoch), Bound::Unbounded)).map(|(_, blocks)| blocks);
        frozen.chain((epoch < self.open).then_some(&self.open_blocks))
    }
}

/// A write beyond the volume's end, as the chronicle knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record a change of {length} bytes at {offset}: the chronicle is of {size_bytes} bytes")]
pub struct BeyondTheEnd {
    /// The first byte of the write.
    pub offset: u64,
    /// The length of the write in bytes.
    pub length: u64,
    /// The volume's size in bytes, as the chronicle knows it.
    pub size_bytes: u64,
}

/// The result of [`Chronicle::record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a write that has to wait for its mark must not be submitted"]
pub enum Recorded {
    /// The write is recorded in this epoch and may be submitted.
    Marked(Epoch),
    /// This is the first write into a region in this epoch; the region's mark must be durable before it.
    ///
    /// The caller stores `(epoch, regions_to_mark(…))` durably, calls [`Chronicle::regions_marked_durable`] and records again
    /// until no wait is requested, because the epoch may have advanced meanwhile. Never returned under [`MarkPolicy::Volatile`].
    WaitForMark(Epoch),
}

/// What must be durable before a write may be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkPolicy {
    /// Nothing. A crash loses the history: [`Chronicle::resume`] counts every block as written.
    Volatile,
    /// A mark, once per region and epoch, as in write-intent logs. After a crash the history is coarse:
    /// [`Chronicle::restore`] counts the marked regions as written.
    Regions {
        /// The length of a region in blocks; 0 counts as 1. Larger regions make fewer writes wait; smaller ones limit
        /// the copying after a crash.
        blocks_per_region: u64,
    },
}

/// The smallest region: writing it costs far more than its mark.
const REGION_BYTES_MIN: u64 = 1 << 20;
/// The largest region: the least that is copied for one block written before a crash.
const REGION_BYTES_MAX: u64 = 64 << 20;
/// The least number of regions, unless they would be too small. A guest waits for at most this many marks per epoch. A crash
/// costs a thousandth of the volume for each place being written.
const REGIONS: u64 = 1024;

impl MarkPolicy {
    /// Returns regions that suit a volume of this size.
    pub fn regions_for(block_size: BlockSize, size_bytes: u64) -> Self {
        let bytes = size_bytes.div_ceil(REGIONS).max(1).checked_next_power_of_two();
        let bytes = bytes.unwrap_or(REGION_BYTES_MAX).clamp(REGION_BYTES_MIN, REGION_BYTES_MAX);
        Self::Regions { blocks_per_region: (bytes / block_size.bytes()).max(1) }
    }
}
