//! A set of blocks that costs memory and time only where a volume is neither all clean nor all dirty.
//!
//! It is the layered bitmap of \[TPM\] §IV-A-2: an upper layer says which parts of the volume are dirty, a lower part
//! exists only once something in it was written. Two steps beyond the paper: the upper layer is itself layered, so
//! that a 16 TiB disk is skipped through as quickly as a small one, and a part whose blocks are *all* dirty is
//! given up again, so that a copy that starts with everything missing starts with a bitmap of a few bytes.
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
//! The form is canonical: equal sets of equally long volumes have equal trees. It knows nothing of bytes, epochs or
//! replicas, and has no form on disk or on the wire.

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
/// Nothing that is put into a set is left out: a range beyond the volume's end makes it the set of a larger volume, and only
/// [`LayeredBitmap::cut_to`] takes blocks away by a size. What is asked or taken out beyond the end is in no set. No call panics, and
/// none walks block by block; the cost of each is given in *runs* (unbroken stretches of blocks).
#[derive(Clone, PartialEq, Eq)]
pub struct LayeredBitmap {
    /// How many blocks the volume has; at most [`BLOCKS_MAX`].
    blocks: u64,
    /// How many of them are in the set.
    count: u64,
    /// The layers below `root`; 0 when the root is a leaf.
    height: u32,
    /// The topmost part. It may span more than `blocks`; what lies beyond them stays clean.
    root: Part,
}

impl LayeredBitmap {
    /// The empty set of a volume with so many blocks. Allocates nothing.
    ///
    /// More than [`BLOCKS_MAX`] blocks count as that many.
    pub fn new(blocks: BlockCount) -> Self {
        let blocks = blocks.0.min(BLOCKS_MAX.0);
        let mut height = 0;
        while span(height) < blocks {
            height += 1;
        }
        Self { blocks, count: 0, height, root: Part::Clean }
    }

    /// The set of all blocks of a volume. Stores next to nothing.
    pub fn full(blocks: BlockCount) -> Self {
        let mut bitmap = Self::new(blocks);
        bitmap.insert(bitmap.bounds());
        bitmap
    }

    /// Makes it the set of a volume that has grown to so many blocks; the new ones are not in it.
    ///
    /// A number that is not larger changes nothing. Costs next to nothing, whatever is in the set.
    pub fn grow(&mut self, blocks: BlockCount) {
        let blocks = blocks.0.min(BLOCKS_MAX.0);
        while span(self.height) < blocks {
            self.root.raise(self.height);
            self.height += 1;
        }
        self.blocks = self.blocks.max(blocks);
    }

    /// How many blocks the volume has.
    pub fn blocks(&self) -> BlockCount {
        BlockCount(self.blocks)
    }

    /// How many blocks are in the set. Costs nothing.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Tells whether no block is in the set. Costs nothing.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Tells whether a block is in the set.
    pub fn contains(&self, block: BlockIndex) -> bool {
        self.contains_any(BlockRange::new(block.0, block.0.saturating_add(1)))
    }

    /// Tells whether at least one block of the range is in the set.
    pub fn contains_any(&self, range: BlockRange) -> bool {
        let range = self.clip(range);
        !range.is_empty()
            && self.root.next_set(self.height, range.start.0).is_some_and(|set| set < range.end.0)
    }

    /// Tells whether every block of the range that the volume has is in the set; true for an empty range.
    pub fn contains_all(&self, range: BlockRange) -> bool {
        let range = self.clip(range);
        range.is_empty() || self.root.contains_all(self.height, range.start.0, range.end.0)
    }

    /// How many blocks of the range are in the set.
    pub fn count_in(&self, range: BlockRange) -> u64 {
        let range = self.clip(range);
        if range.is_empty() { 0 } else { self.root.count_in(self.height, range.start.0, range.end.0) }
    }

    /// Leaves out what lies beyond so many blocks: of a volume that has no more, rounded up to regions.
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

    /// Puts the blocks of the range into the set and returns how many were not in it before. Beyond the end the volume becomes larger
    /// ([`LayeredBitmap::grow`]); bytes have no blocks beyond [`BLOCKS_MAX`].
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

    /// Takes the blocks of the range out of the set and returns how many were in it.
    ///
    /// Parts that become clean give their memory back.
    pub fn remove(&mut self, range: BlockRange) -> u64 {
        let range = self.clip(range);
        if range.is_empty() {
            return 0;
        }
        let newly_cleared = self.root.remove(self.height, range.start.0, range.end.0);
        self.count -= newly_cleared;
        newly_cleared
    }

    /// Takes everything out and gives the memory back.
    pub fn clear(&mut self) {
        self.root = Part::Clean;
        self.count = 0;
    }

    /// The first run at or after `from`, at most `blocks_max` blocks of it; `None` if there is none.
    ///
    /// A run that begins before `from` and reaches beyond it counts from `from` on. What was cut off at
    /// `blocks_max` is what the next call from the returned end answers. `blocks_max` of 0 yields `None`.
    pub fn next_run(&self, from: BlockIndex, blocks_max: u64) -> Option<BlockRange> {
        if from.0 >= self.blocks || blocks_max == 0 {
            return None;
        }
        let start = self.root.next_set(self.height, from.0)?;
        let end = self.root.next_clear(self.height, start).unwrap_or(self.blocks).min(self.blocks);
        Some(BlockRange::new(start, end.min(start.saturating_add(blocks_max))))
    }

    /// Visits every run, in order, each as long as it is.
    pub fn runs(&self) -> Runs<'_> {
        Runs { bitmap: self, from: BlockIndex(0), leaf: None }
    }

    /// Puts every block of another set into this one.
    ///
    /// Parts that are clean in `other`, or full here, are skipped whole. If `other` has blocks beyond this volume's end, it becomes
    /// larger.
    pub fn union_with(&mut self, other: &Self) {
        if self.blocks == other.blocks {
            self.count += self.root.union_with(&other.root, self.height);
        } else {
            for run in other.runs() {
                self.insert(run);
            }
        }
    }

    /// Takes every block of another set out of this one. Skips as [`LayeredBitmap::union_with`] does.
    pub fn subtract(&mut self, other: &Self) {
        if self.blocks == other.blocks {
            self.count -= self.root.subtract(&other.root, self.height);
        } else {
            for run in other.runs() {
                self.remove(run);
            }
        }
    }

    /// The memory that the set occupies, in bytes, without the allocator's own overhead.
    pub fn bytes_used(&self) -> usize {
        size_of::<Self>() + self.root.bytes_allocated()
    }

    /// All blocks of the volume.
    fn bounds(&self) -> BlockRange {
        BlockRange::new(0, self.blocks)
    }

    /// The part of a range that the volume has.
    fn clip(&self, range: BlockRange) -> BlockRange {
        range.intersect(&self.bounds())
    }
}

impl fmt::Debug for LayeredBitmap {
    /// Prints the counts and the first runs: a set may hold millions.
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
    /// Where the next run may begin.
    from: BlockIndex,
    /// The leaf in which `from` lies and its first block: scattered blocks lie several to a leaf, and most runs are
    /// found without a descent through the layers.
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

/// How many runs `Debug` prints: enough to recognise a small set in a failing test, one line in a log.
const DEBUG_RUNS_MAX: usize = 8;
