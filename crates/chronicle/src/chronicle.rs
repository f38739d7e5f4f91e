//! A volume's history of writes, cut into epochs.
//!
//! It answers one question: what may a copy that was right as of epoch *e* lack? It errs to one side only: a block
//! that it names may be unchanged, a block that it does not name is. It holds no data, knows no replica (who does
//! tells it which epochs are still asked for) and does nothing by itself.
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
    /// The oldest epoch after which everything written is known. Of older ones `since` answers every block.
    known_after: Epoch,
    /// What was written in each epoch before the open one, after merging; in order of number.
    frozen: BTreeMap<Epoch, LayeredBitmap>,
    /// The epoch that records.
    open: Epoch,
    /// What was written in the open epoch.
    open_blocks: LayeredBitmap,
    mark_policy: MarkPolicy,
    /// Blocks of the regions marked durably for the open epoch. Stays empty while marks are volatile.
    marked: LayeredBitmap,
}

impl Chronicle {
    /// Begins the history of a volume with the open epoch `first`.
    ///
    /// `since` of the epoch before `first` is everything written from here on: a copy made before any write is as
    /// of that one. Hence `first` is 1 or more, save for a volume that nobody will ask about its beginning.
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

    /// Goes on after a crash that took the history with it.
    ///
    /// `through` is the highest number that anything durable bears. The open epoch comes after it, so that no number is ever
    /// given out twice (hard case 11). What was written up to here is not known: of `through` and every older epoch,
    /// [`Chronicle::since`] answers every block.
    pub fn resume(block_size: BlockSize, size_bytes: u64, through: Epoch) -> Self {
        let open = through.next();
        Self { known_after: open, ..Self::new(block_size, size_bytes, open) }
    }

    /// Goes on with a history that was kept: exactly, after a clean stop; as the marks of [`MarkPolicy::Regions`]
    /// tell it, after a crash.
    ///
    /// `kept` says what may have been written in each epoch later than `known_after`; one that it leaves out counts as
    /// one without writes. Entries of older epochs are passed over. The open epoch comes after every number that is
    /// found here, and after `through`, so that none is given out twice. What is kept of blocks that the volume does not have is
    /// left out: marks are of whole regions.
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

    /// Chooses how a write is marked before it may be submitted; to be called before the first `record`.
    pub fn with_mark_policy(mut self, policy: MarkPolicy) -> Self {
        self.mark_policy = policy;
        self
    }

    /// Changes how writes are marked, from the next epoch on, which it opens; returns that one's number.
    ///
    /// What was written before under [`MarkPolicy::Volatile`] is known to this object only.
    pub fn advance_under(&mut self, policy: MarkPolicy) -> Epoch {
        self.mark_policy = policy;
        self.advance()
    }

    /// How a write is marked before it may be submitted.
    pub fn mark_policy(&self) -> MarkPolicy {
        self.mark_policy
    }

    /// The regions that were written in the open epoch: those that are likely to be written in the next one, too.
    ///
    /// Empty while marks are volatile.
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

    /// What is to be kept of it for replicas that are as of `oldest` or later, once the open epoch has been frozen
    /// ([`Chronicle::advance`]): every epoch before the open one, exactly.
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

    /// Goes on with a volume that has grown; a size that is not larger changes nothing.
    ///
    /// To be called before anything is written to the new part. No epoch up to here has written there: a copy that is
    /// as of one of them, and has grown as well, has zeroes there as the volume has.
    pub fn grow(&mut self, size_bytes: u64) {
        self.size_bytes = self.size_bytes.max(size_bytes);
        let blocks = self.block_size.blocks_of(self.size_bytes);
        let bitmaps = self.frozen.values_mut().chain([&mut self.open_blocks, &mut self.marked]);
        bitmaps.for_each(|bitmap| bitmap.grow(blocks));
    }

    /// The size of the blocks that it records.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The size of the volume in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The size of the volume in blocks, the last one perhaps in part.
    pub fn blocks(&self) -> BlockCount {
        self.block_size.blocks_of(self.size_bytes)
    }

    /// The oldest epoch of which [`Chronicle::since`] knows more than that every block may have been written.
    pub fn known_after(&self) -> Epoch {
        self.known_after
    }

    /// The epoch that records writes.
    pub fn open_epoch(&self) -> Epoch {
        self.open
    }

    /// Records a write, a discard or a write of zeroes, in the open epoch.
    ///
    /// The caller records *before* it submits the write to the store, and keeps the epoch of the answer. When the
    /// write completes, with success or error, and [`Chronicle::open_epoch`] is another one by then, it records
    /// the range once more: a copy of the earlier epoch may have read the block while the write was under way
    /// (design §5.1).
    ///
    /// On [`Recorded::WaitForMark`] nothing has been recorded and the write must not be submitted. A write of no bytes records
    /// nothing.
    ///
    /// # Errors
    /// [`BeyondTheEnd`]: it has not been recorded, and cannot be: it must not be submitted. The volume has grown, and its chronicle
    /// was not told ([`Chronicle::grow`]).
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
        // Guests write where they have written: a look is cheaper than a change that changes nothing.
        if !self.open_blocks.contains_all(blocks) {
            self.open_blocks.insert(blocks);
        }
        Ok(Recorded::Marked(self.open))
    }

    /// The regions that have to be marked before a write can be recorded, as the blocks they consist of.
    ///
    /// Empty when [`Chronicle::record`] would not ask to wait. It may include regions that are marked already.
    pub fn regions_to_mark(&self, offset: u64, length: u64) -> BlockRange {
        let blocks = self.block_size.covering(offset, length);
        if self.marked.contains_all(blocks) {
            return BlockRange::default();
        }
        self.regions_of(blocks)
    }

    /// Takes note that it is durable that these blocks may be written in `epoch`.
    ///
    /// Marks for an epoch that is no longer open are of no use and are passed over.
    pub fn regions_marked_durable(&mut self, epoch: Epoch, blocks: BlockRange) {
        if epoch == self.open && self.mark_policy != MarkPolicy::Volatile {
            self.marked.insert(blocks);
        }
    }

    /// Freezes the open epoch, opens the next and returns the new one's number, which is one higher.
    ///
    /// **N.B.** The number has to be durable before anything that bears it leaves this host (design §5.8). The
    /// blocks of the frozen epoch may be read for copying only after every write that was submitted before this
    /// call has completed (design §5.1).
    pub fn advance(&mut self) -> Epoch {
        let empty = LayeredBitmap::new(self.blocks());
        let written = std::mem::replace(&mut self.open_blocks, empty);
        self.frozen.insert(self.open, written);
        self.marked.clear();
        self.open = self.open.next();
        self.open
    }

    /// Every block that may have been written in an epoch later than the given one: what a copy that is current as
    /// of `epoch` lacks.
    ///
    /// Exact for the epoch before the first, for every frozen epoch that has not been merged into a later one, and
    /// for every epoch passed to [`Chronicle::merge_unreferenced`] ever since. For others it may hold more: the
    /// whole of the merged epoch that the given one fell into; every block, for an epoch from before this history
    /// or from another one (a number that has never been open). For the open epoch it is empty: no copy can be
    /// current as of an epoch that is still being written.
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

    /// How many blocks [`Chronicle::since`] holds.
    pub fn blocks_since(&self, epoch: Epoch) -> u64 {
        let mut written = self.later_than(epoch).filter(|blocks| !blocks.is_empty());
        match (self.knows(epoch), written.next(), written.next()) {
            (false, _, _) => self.blocks().0,
            (true, None, _) => 0,
            (true, Some(only), None) => only.count(),
            (true, Some(_), Some(_)) => self.since(epoch).count(),
        }
    }

    /// What was written in one epoch; `None` if it has been merged into a later one or has never been open.
    ///
    /// A merged epoch answers for every epoch that went into it.
    pub fn written_in(&self, epoch: Epoch) -> Option<&LayeredBitmap> {
        if epoch == self.open { Some(&self.open_blocks) } else { self.frozen.get(&epoch) }
    }

    /// Merges neighbouring frozen epochs that no replica tells apart.
    ///
    /// `referenced` are the epochs as of which replicas are current, in any order. For each of them `since` is the
    /// same before and after; between two of them one epoch remains. A merged epoch takes the number of its newest
    /// (design §5.8). The open epoch stays by itself.
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

    /// The numbers of the epochs, after merging, in order; the open one is the last.
    pub fn epochs(&self) -> impl Iterator<Item = Epoch> {
        self.frozen.keys().copied().chain([self.open])
    }

    /// The memory that the history occupies, in bytes, without the allocator's own overhead.
    pub fn bytes_used(&self) -> usize {
        let inline = 2 * size_of::<LayeredBitmap>();
        let bitmaps = self.frozen.values().chain([&self.open_blocks, &self.marked]);
        let numbers = self.frozen.len() * size_of::<Epoch>();
        size_of::<Self>() - inline + numbers + bitmaps.map(LayeredBitmap::bytes_used).sum::<usize>()
    }

    /// The regions that a run of blocks touches; empty while marks are volatile.
    fn regions_of(&self, blocks: BlockRange) -> BlockRange {
        let MarkPolicy::Regions { blocks_per_region } = self.mark_policy else {
            return BlockRange::default();
        };
        let region = blocks_per_region.max(1);
        let end = blocks.end.0.div_ceil(region).saturating_mul(region);
        BlockRange::new(blocks.start.0 / region * region, end.min(self.blocks().0))
    }

    /// Tells whether everything written after `epoch` has been recorded here.
    fn knows(&self, epoch: Epoch) -> bool {
        self.known_after <= epoch && epoch <= self.open
    }

    /// The bitmaps of the epochs later than `epoch`.
    fn later_than(&self, epoch: Epoch) -> impl Iterator<Item = &LayeredBitmap> {
        let frozen = self.frozen.range((Bound::Excluded(epoch), Bound::Unbounded)).map(|(_, blocks)| blocks);
        frozen.chain((epoch < self.open).then_some(&self.open_blocks))
    }
}

/// A write that reaches beyond the end of the volume as its chronicle knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record a change of {length} bytes at {offset}: the chronicle is of {size_bytes} bytes")]
pub struct BeyondTheEnd {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// How large the volume is, as far as its chronicle knows.
    pub size_bytes: u64,
}

/// What became of a write that was to be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a write that has to wait for its mark must not be submitted"]
pub enum Recorded {
    /// It is recorded in this epoch and may be submitted.
    Marked(Epoch),
    /// It is the first write into a region in this epoch, and the region's mark has to be durable before it.
    ///
    /// The caller stores `(epoch, regions_to_mark(…))` durably, calls [`Chronicle::regions_marked_durable`] and
    /// records again, as often as it is told to wait: the epoch may have moved on meanwhile. Never answered under
    /// [`MarkPolicy::Volatile`].
    WaitForMark(Epoch),
}

/// What has to be durable before a write may be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkPolicy {
    /// Nothing. A crash loses the history: [`Chronicle::resume`] takes every block for written.
    Volatile,
    /// A mark, once per region and epoch, as write-intent logs do. A crash makes the history coarse:
    /// [`Chronicle::restore`] takes the marked regions for written.
    Regions {
        /// The length of a region: large, so that few writes wait; small, so that little is copied after a crash.
        /// 0 counts as 1.
        blocks_per_region: u64,
    },
}

/// Smallest region: what a mark costs is little beside writing as much.
const REGION_BYTES_MIN: u64 = 1 << 20;
/// Largest region: what is copied at least for a block that was written before a crash.
const REGION_BYTES_MAX: u64 = 64 << 20;
/// Regions of a volume at least, unless they would be too small: so many marks an epoch is the most that a guest waits
/// for, and a crash costs a thousandth of the volume for each place that it was writing to.
const REGIONS: u64 = 1024;

impl MarkPolicy {
    /// Regions that suit a volume of this size.
    pub fn regions_for(block_size: BlockSize, size_bytes: u64) -> Self {
        let bytes = size_bytes.div_ceil(REGIONS).max(1).checked_next_power_of_two();
        let bytes = bytes.unwrap_or(REGION_BYTES_MAX).clamp(REGION_BYTES_MIN, REGION_BYTES_MAX);
        Self::Regions { blocks_per_region: (bytes / block_size.bytes()).max(1) }
    }
}
