//! A set of blocks whose memory and time cost depends on how mixed the volume is. Entirely clean or entirely dirty
//! parts cost almost nothing.
//!
//! This is the layered bitmap of \[TPM\] §IV-A-2. An upper layer says which parts of the volume are dirty, and a lower part
//! exists only after a write to it. There are two steps beyond the paper. The upper layer is itself layered, so that a scan skips
//! through a 16 TiB disk as quickly as through a small one. A part whose blocks are *all* dirty is freed, so that a copy which
//! lacks everything starts with a bitmap of a few bytes.
//!
//! ```text
//!   LayeredBitmap   blocks, count
//!     └ upper       64 parts of one layer below: a word "dirty", a word "full"
//!         ├ clean   (nothing stored)
//!         ├ full    (nothing stored)
//!         └ upper … as many layers as the volume's size asks for
//!             └ leaf  4096 blocks = 64 words: "dirty", "full", and only those words that are neither clean nor full
//! ```
//!
//! The form is canonical: equal sets of equally long volumes have equal trees. This module knows nothing of bytes,
//! epochs or replicas, and defines no form on disk or on the wire.

mod leaf;
mod part;

use std::fmt;

use crate::units::{BlockCount, BlockIndex, BlockRange};
use leaf::Leaf;
use part::{Part, span};

/// The most blocks that a volume can have: its size in bytes fits in 64 bits, its blocks are 4 KiB or more.
pub const BLOCKS_MAX: BlockCount = BlockCount(1 << 52);

/// A set of the blocks of one volume.
///
/// Insertion never drops blocks: a range beyond the volume's end makes this the set of a larger volume. Only
/// [`LayeredBitmap::cut_to`] removes blocks by size. Queries and removals beyond the end find no block there. No call
/// panics, and none walks block by block. Costs are given in *runs* (unbroken stretches of blocks).
#[derive(Clone, PartialEq, Eq)]
pub struct LayeredBitmap {
    /// The size of the volume in blocks; at most [`BLOCKS_MAX`].
    blocks: u64,
    count: u64,
    /// The number of layers below `root`; 0 when the root is a leaf.
    height: u32,
    /// The topmost part. It may span more than `blocks`; the surplus stays clean.
    root: Part,
}

impl LayeredBitmap {
    /// Returns the empty set of a volume of `blocks` blocks, at most [`BLOCKS_MAX`]. Allocates nothing.
    pub fn new(blocks: BlockCount) -> Self {
        let blocks = blocks.0.min(BLOCKS_MAX.0);
        let mut height = 0;
        while span(height) < blocks {
            height += 1;
        }
        Self { blocks, count: 0, height, root: Part::Clean }
    }

    /// Returns the set of all blocks of a volume. Needs almost no memory.
    pub fn full(blocks: BlockCount) -> Self {
        let mut bitmap = Self::new(blocks);
        bitmap.insert(bitmap.bounds());
        bitmap
    }

    /// Grows the volume to `blocks` blocks; the new ones are not in the set. Does nothing if the volume is at least
    /// that large. The cost does not depend on the content of the set.
    pub fn grow(&mut self, blocks: BlockCount) {
        let blocks = blocks.0.min(BLOCKS_MAX.0);
        while span(self.height) < blocks {
            self.root.raise(self.height);
            self.height += 1;
        }
        self.blocks = self.blocks.max(blocks);
    }

    /// Returns the size of the volume in blocks.
    pub fn blocks(&self) -> BlockCount {
        BlockCount(self.blocks)
    }

    /// Returns the number of blocks in the set, in constant time.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns whether no block is in the set, in constant time.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether a block is in the set.
    pub fn contains(&self, block: BlockIndex) -> bool {
        self.contains_any(BlockRange::new(block.0, block.0.saturating_add(1)))
    }

    /// Returns whether at least one block of the range is in the set.
    pub fn contains_any(&self, range: BlockRange) -> bool {
        let range = self.clip(range);
        !range.is_empty()
            && self.root.next_set(self.height, range.start.0).is_some_and(|set| set < range.end.0)
    }

    /// Returns whether every block of the range that the volume has is in the set; true for an empty range.
    pub fn contains_all(&self, range: BlockRange) -> bool {
        let range = self.clip(range);
        range.is_empty() || self.root.contains_all(self.height, range.start.0, range.end.0)
    }

    /// Returns how many blocks of the range are in the set.
    pub fn count_in(&self, range: BlockRange) -> u64 {
        let range = self.clip(range);
        if range.is_empty() { 0 } else { self.root.count_in(self.height, range.start.0, range.end.0) }
    }

    /// Removes the blocks from `blocks` on. For sets that were rounded up to whole regions.
    #[must_use]
    pub fn cut_to(self, blocks: BlockCount) -> Self {
        if self.blocks <= blocks.0 {
            return self;
        }
        let mut cut = Self::new(blocks);
        for run in self.runs() {
            cut.insert(cut.clip(run));
        }
        cut
    }

    /// Adds the blocks of the range and returns how many were not in the set before. A range beyond the end grows the
    /// volume ([`LayeredBitmap::grow`]). Blocks beyond [`BLOCKS_MAX`] do not exist and are ignored.
    pub fn insert(&mut self, range: BlockRange) -> u64 {
        let range = range.intersect(&BlockRange::new(0, BLOCKS_MAX.0));
        if range.is_empty() {
            return 0;
        }
        self.grow(BlockCount(range.end.0));
        let newly_set = self.root.insert(self.height, range.start.0, range.end.0);
        self.count += newly_set;
        newly_set
    }

    /// Removes the blocks of the range and returns how many were in the set. Frees the memory of parts that become clean.
    pub fn remove(&mut self, range: BlockRange) -> u64 {
        let range = self.clip(range);
        if range.is_empty() {
            return 0;
        }
        let newly_cleared = self.root.remove(self.height, range.start.0, range.end.0);
        self.count -= newly_cleared;
        newly_cleared
    }

    /// Removes all blocks and frees the memory.
    pub fn clear(&mut self) {
        self.root = Part::Clean;
        self.count = 0;
    }

    /// Returns the first run at or after `from`, cut to `blocks_max` blocks; `None` if there is none.
    ///
    /// Only the part of a run from `from` on counts. A call from the returned end yields the part that was cut off.
    /// `blocks_max` of 0 yields `None`.
    pub fn next_run(&self, from: BlockIndex, blocks_max: u64) -> Option<BlockRange> {
        if from.0 >= self.blocks || blocks_max == 0 {
            return None;
        }
        let start = self.root.next_set(self.height, from.0)?;
        let end = self.root.next_clear(self.height, start).unwrap_or(self.blocks).min(self.blocks);
        Some(BlockRange::new(start, end.min(start.saturating_add(blocks_max))))
    }

    /// Iterates over the runs in order, each in full length.
    pub fn runs(&self) -> Runs<'_> {
        Runs { bitmap: self, from: BlockIndex(0), leaf: None }
    }

    /// Adds every block of another set. Skips parts that are clean in `other` or full here. Grows the volume if `other`
    /// has blocks beyond its end.
    pub fn union_with(&mut self, other: &Self) {
        if self.blocks == other.blocks {
            self.count += self.root.union_with(&other.root, self.height);
        } else {
            for run in other.runs() {
                self.insert(run);
            }
        }
    }

    /// Removes every block of another set. Skips parts as [`LayeredBitmap::union_with`] does.
    pub fn subtract(&mut self, other: &Self) {
        if self.blocks == other.blocks {
            self.count -= self.root.subtract(&other.root, self.height);
        } else {
            for run in other.runs() {
                self.remove(run);
            }
        }
    }

    /// Returns the memory that the set occupies, in bytes, without the allocator's own overhead.
    pub fn bytes_used(&self) -> usize {
        size_of::<Self>() + self.root.bytes_allocated()
    }

    fn bounds(&self) -> BlockRange {
        BlockRange::new(0, self.blocks)
    }

    fn clip(&self, range: BlockRange) -> BlockRange {
        range.intersect(&self.bounds())
    }
}

impl fmt::Debug for LayeredBitmap {
    /// Prints the counts and the first runs only, because a set may hold millions.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LayeredBitmap {{ {} of {}:", self.count, self.blocks)?;
        for run in self.runs().take(DEBUG_RUNS_MAX) {
            write!(formatter, " {run}")?;
        }
        let more = if self.runs().nth(DEBUG_RUNS_MAX).is_some() { " …" } else { "" };
        write!(formatter, "{more} }}")
    }
}

/// The runs of a [`LayeredBitmap`], in order.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    bitmap: &'a LayeredBitmap,
    from: BlockIndex,
    /// The leaf in which `from` lies, and its first block. A leaf holds several scattered runs, so most runs are found
    /// without a descent through the layers.
    leaf: Option<(u64, &'a Leaf)>,
}

impl Iterator for Runs<'_> {
    type Item = BlockRange;

    fn next(&mut self) -> Option<BlockRange> {
        if let Some((base, leaf)) = self.leaf
            && let Some((start, end)) = leaf.next_run_inside(self.from.0 - base)
        {
            self.from = BlockIndex(base + end);
            return Some(BlockRange::new(base + start, base + end));
        }
        let run = self.bitmap.next_run(self.from, u64::MAX)?;
        self.from = run.end;
        self.leaf = self.bitmap.root.leaf_at(self.bitmap.height, run.end.0);
        Some(run)
    }
}

/// The number of runs that `Debug` prints: enough to recognise a small set in a failing test, and one line in a log.
const DEBUG_RUNS_MAX: usize = 8;
