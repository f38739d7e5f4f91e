//! The upper layers of a [`LayeredBitmap`](super::LayeredBitmap): a tree of parts, down to the leaves.
//!
//! A part does not store its height; the caller passes it. A part of height 0 spans one leaf, and each layer above spans 64 times
//! as much. Positions are relative to the part's first block. Ranges are not empty and lie inside the part.
//!
//! ```text
//!             insert                     insert that completes it
//!   ┌─ Clean ────────► Upper or Leaf ─────────────────────────────► Full
//!   └────────◄───────────────┘ ▲───────────────────────────────────┘
//!      remove that empties it                 remove
//! ```

use std::sync::Arc;

use super::leaf::{LEAF_BLOCKS, Leaf, lowest_above};

/// Returns the number of blocks that a part of this height spans. Every position fits in 64 bits, because a bitmap has
/// at most 2^52 blocks and hence a height of at most 7.
pub(super) const fn span(height: u32) -> u64 {
    1 << shift(height)
}

/// The binary logarithm of [`span`]. A division by the span would cost more than the rest of a layer's work.
const fn shift(height: u32) -> u32 {
    LEAF_BLOCKS.trailing_zeros() + 6 * height
}

/// A stretch of the volume. Canonical: an `Upper` or a `Leaf` is neither clean nor full, except while it is being changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Clean,
    Full,
    /// Some blocks are set; the height is above 0. Copies of the set share it until either changes. A copy therefore
    /// costs almost nothing at first, and its cost is spread over later changes.
    Upper(Arc<Upper>),
    /// Some blocks are set; the height is 0.
    Leaf(Leaf),
}

impl Part {
    pub(super) fn count(&self, height: u32) -> u64 {
        match self {
            Self::Clean => 0,
            Self::Full => span(height),
            Self::Upper(upper) => upper.count,
            Self::Leaf(leaf) => leaf.count(),
        }
    }

    pub(super) fn count_in(&self, height: u32, start: u64, end: u64) -> u64 {
        match self {
            Self::Clean => 0,
            Self::Full => end - start,
            _ if end - start == span(height) => self.count(height),
            Self::Upper(upper) => upper.count_in(height - 1, start, end),
            Self::Leaf(leaf) => leaf.count_in(start, end),
        }
    }

    pub(super) fn next_set(&self, height: u32, from: u64) -> Option<u64> {
        match self {
            Self::Clean => None,
            Self::Full => Some(from),
            Self::Upper(upper) => upper.next_set(height - 1, from),
            Self::Leaf(leaf) => leaf.next_set(from),
        }
    }

    pub(super) fn next_clear(&self, height: u32, from: u64) -> Option<u64> {
        match self {
            Self::Clean => Some(from),
            Self::Full => None,
            Self::Upper(upper) => upper.next_clear(height - 1, from),
            Self::Leaf(leaf) => leaf.next_clear(from),
        }
    }

    pub(super) fn contains_all(&self, height: u32, start: u64, end: u64) -> bool {
        let (mut part, mut height, mut from, to) = (self, height, start, end);
        let mut base = 0;
        // Descends for as long as the range lies in one part.
        loop {
            match part {
                Self::Clean => return false,
                Self::Full => return true,
                Self::Leaf(leaf) => return leaf.contains_all(from, to - base),
                Self::Upper(upper) => {
                    height -= 1;
                    let (index, inside) = locate(height, from);
                    if locate(height, to - base - 1).0 != index {
                        let clear = upper.next_clear(height, from);
                        return clear.is_none_or(|clear| clear >= to - base);
                    }
                    base += from - inside;
                    (part, from) = (&upper.parts[index], inside);
                }
            }
        }
    }

    /// Returns the leaf in which a position lies, with the leaf's first block. `None` where all is clean or full, and
    /// beyond the part's end.
    pub(super) fn leaf_at(&self, height: u32, position: u64) -> Option<(u64, &Leaf)> {
        if position >= span(height) {
            return None;
        }
        let mut part = self;
        let mut height = height;
        loop {
            match part {
                Self::Clean | Self::Full => return None,
                Self::Leaf(leaf) => return Some((position - position % LEAF_BLOCKS, leaf)),
                Self::Upper(upper) => {
                    height -= 1;
                    let (index, _) = locate(height, position & (span(height + 1) - 1));
                    part = &upper.parts[index];
                }
            }
        }
    }

    /// Sets the blocks `start..end`; returns how many were clear.
    pub(super) fn insert(&mut self, height: u32, start: u64, end: u64) -> u64 {
        if end - start == span(height) {
            return self.fill(height);
        }
        let newly_set = match self {
            Self::Full => return 0,
            Self::Clean => {
                *self = Self::opened(height, Fill::Clean);
                return self.insert(height, start, end);
            }
            Self::Upper(upper) => Arc::make_mut(upper).insert(height - 1, start, end),
            Self::Leaf(leaf) => leaf.insert(start, end),
        };
        self.settle();
        newly_set
    }

    /// Clears the blocks `start..end`; returns how many were set.
    pub(super) fn remove(&mut self, height: u32, start: u64, end: u64) -> u64 {
        if end - start == span(height) {
            return self.wipe(height);
        }
        let newly_cleared = match self {
            Self::Clean => return 0,
            Self::Full => {
                *self = Self::opened(height, Fill::Full);
                return self.remove(height, start, end);
            }
            Self::Upper(upper) => Arc::make_mut(upper).remove(height - 1, start, end),
            Self::Leaf(leaf) => leaf.remove(start, end),
        };
        self.settle();
        newly_cleared
    }

    /// Sets the blocks that are set in `other`, a part of the same height; returns how many were clear.
    pub(super) fn union_with(&mut self, other: &Self, height: u32) -> u64 {
        let newly_set = match (&mut *self, other) {
            (Self::Full, _) | (_, Self::Clean) => return 0,
            (_, Self::Full) => return self.fill(height),
            (Self::Clean, _) => {
                *self = other.clone();
                return self.count(height);
            }
            (Self::Upper(upper), Self::Upper(other)) => Arc::make_mut(upper).union_with(other, height - 1),
            (Self::Leaf(leaf), Self::Leaf(other)) => leaf.union_with(other),
            (Self::Upper(_), Self::Leaf(_)) | (Self::Leaf(_), Self::Upper(_)) => return unequal_heights(),
        };
        self.settle();
        newly_set
    }

    /// Clears the blocks that are set in `other`, a part of the same height; returns how many were set.
    pub(super) fn subtract(&mut self, other: &Self, height: u32) -> u64 {
        let newly_cleared = match (&mut *self, other) {
            (Self::Clean, _) | (_, Self::Clean) => return 0,
            (_, Self::Full) => return self.wipe(height),
            (Self::Full, _) => {
                *self = Self::opened(height, Fill::Full);
                return self.subtract(other, height);
            }
            (Self::Upper(upper), Self::Upper(other)) => Arc::make_mut(upper).subtract(other, height - 1),
            (Self::Leaf(leaf), Self::Leaf(other)) => leaf.subtract(other),
            (Self::Upper(_), Self::Leaf(_)) | (Self::Leaf(_), Self::Upper(_)) => return unequal_heights(),
        };
        self.settle();
        newly_cleared
    }

    /// Returns the bytes allocated outside of the part itself, including memory shared with copies.
    pub(super) fn bytes_allocated(&self) -> usize {
        match self {
            Self::Clean | Self::Full => 0,
            Self::Upper(upper) => {
                size_of::<Upper>() + upper.parts.iter().map(Self::bytes_allocated).sum::<usize>()
            }
            Self::Leaf(leaf) => leaf.bytes_allocated(),
        }
    }

    /// Adds a layer above this part, which becomes the first of 64; the others are clean.
    pub(super) fn raise(&mut self, height: u32) {
        let part = std::mem::replace(self, Self::Clean);
        let count = part.count(height);
        if count > 0 {
            let mut upper = Upper::clean();
            upper.parts[0] = part;
            upper.note(0);
            upper.count = count;
            *self = Self::Upper(Arc::new(upper));
        }
    }

    /// Returns a part in expanded form, to be changed at once.
    fn opened(height: u32, fill: Fill) -> Self {
        match (height, fill) {
            (0, Fill::Clean) => Self::Leaf(Leaf::clean()),
            (0, Fill::Full) => Self::Leaf(Leaf::full()),
            (_, Fill::Clean) => Self::Upper(Arc::new(Upper::clean())),
            (_, Fill::Full) => Self::Upper(Arc::new(Upper::full(height - 1))),
        }
    }

    /// Returns to the compact form if nothing or everything is set.
    fn settle(&mut self) {
        let (clean, full) = match self {
            Self::Upper(upper) => (upper.dirty == 0, upper.full == u64::MAX),
            Self::Leaf(leaf) => (leaf.is_clean(), leaf.is_full()),
            Self::Clean | Self::Full => return,
        };
        if clean {
            *self = Self::Clean;
        } else if full {
            *self = Self::Full;
        }
    }

    fn fill(&mut self, height: u32) -> u64 {
        let newly_set = span(height) - self.count(height);
        *self = Self::Full;
        newly_set
    }

    fn wipe(&mut self, height: u32) -> u64 {
        let newly_cleared = self.count(height);
        *self = Self::Clean;
        newly_cleared
    }
}

#[derive(Clone, Copy)]
enum Fill {
    Clean,
    Full,
}

/// 64 parts of the layer below. Its methods take the height of these parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Upper {
    /// The parts with at least one block set. A scan reads only this word to skip the others.
    dirty: u64,
    /// The parts with all blocks set; a subset of `dirty`.
    full: u64,
    count: u64,
    parts: [Part; 64],
}

impl Upper {
    fn clean() -> Self {
        Self { dirty: 0, full: 0, count: 0, parts: [const { Part::Clean }; 64] }
    }

    fn full(parts_height: u32) -> Self {
        let count = 64 * span(parts_height);
        Self { dirty: u64::MAX, full: u64::MAX, count, parts: [const { Part::Full }; 64] }
    }

    fn count_in(&self, parts_height: u32, start: u64, end: u64) -> u64 {
        let pieces = pieces(parts_height, start, end).filter(|piece| self.dirty & (1 << piece.index) != 0);
        pieces.map(|piece| self.parts[piece.index].count_in(parts_height, piece.start, piece.end)).sum()
    }

    fn next_set(&self, parts_height: u32, from: u64) -> Option<u64> {
        let (index, inside) = locate(parts_height, from);
        if let Some(set) = self.parts[index].next_set(parts_height, inside) {
            return Some(from - inside + set);
        }
        let index = lowest_above(self.dirty, index as u64)?;
        let set = self.parts[index as usize].next_set(parts_height, 0)?;
        Some(index * span(parts_height) + set)
    }

    fn next_clear(&self, parts_height: u32, from: u64) -> Option<u64> {
        let (index, inside) = locate(parts_height, from);
        if let Some(clear) = self.parts[index].next_clear(parts_height, inside) {
            return Some(from - inside + clear);
        }
        let index = lowest_above(!self.full, index as u64)?;
        let clear = self.parts[index as usize].next_clear(parts_height, 0)?;
        Some(index * span(parts_height) + clear)
    }

    fn insert(&mut self, parts_height: u32, start: u64, end: u64) -> u64 {
        let mut newly_set = 0;
        for piece in pieces(parts_height, start, end) {
            newly_set += self.parts[piece.index].insert(parts_height, piece.start, piece.end);
            self.note(piece.index);
        }
        self.count += newly_set;
        newly_set
    }

    fn remove(&mut self, parts_height: u32, start: u64, end: u64) -> u64 {
        let mut newly_cleared = 0;
        for piece in pieces(parts_height, start, end) {
            newly_cleared += self.parts[piece.index].remove(parts_height, piece.start, piece.end);
            self.note(piece.index);
        }
        self.count -= newly_cleared;
        newly_cleared
    }

    fn union_with(&mut self, other: &Self, parts_height: u32) -> u64 {
        let mut newly_set = 0;
        for index in indices(other.dirty & !self.full) {
            newly_set += self.parts[index].union_with(&other.parts[index], parts_height);
            self.note(index);
        }
        self.count += newly_set;
        newly_set
    }

    fn subtract(&mut self, other: &Self, parts_height: u32) -> u64 {
        let mut newly_cleared = 0;
        for index in indices(other.dirty & self.dirty) {
            newly_cleared += self.parts[index].subtract(&other.parts[index], parts_height);
            self.note(index);
        }
        self.count -= newly_cleared;
        newly_cleared
    }

    fn note(&mut self, index: usize) {
        let bit = 1 << index;
        match self.parts[index] {
            Part::Clean => {
                self.dirty &= !bit;
                self.full &= !bit;
            }
            Part::Full => {
                self.dirty |= bit;
                self.full |= bit;
            }
            Part::Upper(_) | Part::Leaf(_) => {
                self.dirty |= bit;
                self.full &= !bit;
            }
        }
    }
}

struct Piece {
    index: usize,
    /// Relative to the part, as is `end`.
    start: u64,
    end: u64,
}

/// Splits a range at the bounds of parts of this height.
fn pieces(parts_height: u32, start: u64, end: u64) -> impl Iterator<Item = Piece> {
    let (span, shift) = (span(parts_height), shift(parts_height));
    (start >> shift..=(end - 1) >> shift).map(move |index| {
        let base = index << shift;
        Piece { index: index as usize, start: start.saturating_sub(base), end: (end - base).min(span) }
    })
}

/// Returns the index of the part in which a position lies, and the position inside the part.
fn locate(parts_height: u32, position: u64) -> (usize, u64) {
    ((position >> shift(parts_height)) as usize, position & (span(parts_height) - 1))
}

fn indices(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (index < 64).then_some(index as usize)
    })
}

/// Called for two parts of one height but different kinds, which bitmaps of one size cannot have.
fn unequal_heights() -> u64 {
    debug_assert!(false, "parts of unequal heights were combined");
    0
}
