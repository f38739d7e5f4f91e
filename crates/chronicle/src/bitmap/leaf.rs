//! The lowest layer of a [`LayeredBitmap`](super::LayeredBitmap): 4096 blocks in 64 words.
//!
//! Only words that are neither clean nor full are stored. Writes cluster, and the gap between two clusters takes two
//! words of flags instead of sixty words of bits. The leaf checks no bounds; the layers above do.

/// The number of blocks of a leaf: 64 words of 64 blocks.
pub(super) const LEAF_BLOCKS: u64 = 4096;

/// One bit for each of 4096 blocks. A leaf is clean or full only while its part is being changed; the part then frees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// The words with at least one bit set.
    dirty: u64,
    /// The words with all bits set; a subset of `dirty`.
    full: u64,
    /// The words that are dirty and not full, in order.
    words: Vec<u64>,
}

impl Leaf {
    pub(super) const fn clean() -> Self {
        Self { dirty: 0, full: 0, words: Vec::new() }
    }

    pub(super) const fn full() -> Self {
        Self { dirty: u64::MAX, full: u64::MAX, words: Vec::new() }
    }

    pub(super) const fn is_clean(&self) -> bool {
        self.dirty == 0
    }

    pub(super) const fn is_full(&self) -> bool {
        self.full == u64::MAX
    }

    pub(super) fn count(&self) -> u64 {
        64 * ones(self.full) + self.words.iter().map(|&word| ones(word)).sum::<u64>()
    }

    pub(super) fn count_in(&self, start: u64, end: u64) -> u64 {
        let (first, last) = (start / 64, (end - 1) / 64);
        (first..=last).map(|index| ones(self.word(index) & mask_in_word(index, start, end))).sum()
    }

    pub(super) fn contains_all(&self, start: u64, end: u64) -> bool {
        let (first, last) = (start / 64, (end - 1) / 64);
        (first..=last).all(|index| {
            let mask = mask_in_word(index, start, end);
            self.word(index) & mask == mask
        })
    }

    pub(super) fn next_set(&self, from: u64) -> Option<u64> {
        let index = from / 64;
        let rest = self.word(index) & (u64::MAX << (from % 64));
        if rest != 0 {
            return Some(index * 64 + lowest(rest));
        }
        let index = lowest_above(self.dirty, index)?;
        Some(index * 64 + lowest(self.word(index)))
    }

    pub(super) fn next_clear(&self, from: u64) -> Option<u64> {
        let index = from / 64;
        let rest = !self.word(index) & (u64::MAX << (from % 64));
        if rest != 0 {
            return Some(index * 64 + lowest(rest));
        }
        let index = lowest_above(!self.full, index)?;
        Some(index * 64 + lowest(!self.word(index)))
    }

    /// Returns the first run at or after `from` if it ends in this leaf. A longer one may continue in the next leaf.
    pub(super) fn next_run_inside(&self, from: u64) -> Option<(u64, u64)> {
        let start = self.next_set(from)?;
        Some((start, self.next_clear(start)?))
    }

    /// Sets the blocks `start..end` (not empty); returns how many were clear.
    pub(super) fn insert(&mut self, start: u64, end: u64) -> u64 {
        let (first, last) = (start / 64, (end - 1) / 64);
        let mut newly_set = self.set_in_word(first, mask_in_word(first, start, end));
        if first < last {
            newly_set += self.set_in_word(last, mask_in_word(last, start, end));
            newly_set += 64 * (last - first - 1) - self.drop_words(first + 1, last);
            let between = words_between(first + 1, last);
            self.dirty |= between;
            self.full |= between;
        }
        newly_set
    }

    /// Clears the blocks `start..end` (not empty); returns how many were set.
    pub(super) fn remove(&mut self, start: u64, end: u64) -> u64 {
        let (first, last) = (start / 64, (end - 1) / 64);
        let mut newly_cleared = self.clear_in_word(first, mask_in_word(first, start, end));
        if first < last {
            newly_cleared += self.clear_in_word(last, mask_in_word(last, start, end));
            newly_cleared += self.drop_words(first + 1, last);
        }
        newly_cleared
    }

    /// Sets the blocks that are set in `other`; returns how many were clear.
    pub(super) fn union_with(&mut self, other: &Self) -> u64 {
        self.combine(other, |here, there| here | there)
    }

    /// Clears the blocks that are set in `other`; returns how many were set.
    pub(super) fn subtract(&mut self, other: &Self) -> u64 {
        self.combine(other, |here, there| here & !there)
    }

    /// Returns the bytes allocated outside of the leaf itself.
    pub(super) fn bytes_allocated(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
    }

    /// Recomputes every word; returns the change of the count, up or down.
    fn combine(&mut self, other: &Self, operation: impl Fn(u64, u64) -> u64) -> u64 {
        let mut combined = Self::clean();
        let mut changed = 0;
        let mut rest = self.dirty | other.dirty;
        while rest != 0 {
            let index = lowest(rest);
            rest &= rest - 1;
            let before = self.word(index);
            let after = operation(before, other.word(index));
            changed += ones(before ^ after);
            match after {
                0 => {}
                u64::MAX => {
                    combined.dirty |= 1 << index;
                    combined.full |= 1 << index;
                }
                _ => {
                    combined.dirty |= 1 << index;
                    combined.words.push(after);
                }
            }
        }
        *self = combined;
        changed
    }

    const fn stored(&self) -> u64 {
        self.dirty & !self.full
    }

    /// Returns where in `words` a word is stored, or would be inserted.
    const fn position(&self, index: u64) -> usize {
        (self.stored() & ((1 << index) - 1)).count_ones() as usize
    }

    fn word(&self, index: u64) -> u64 {
        let bit = 1 << index;
        if self.dirty & bit == 0 {
            0
        } else if self.full & bit != 0 {
            u64::MAX
        } else {
            self.words[self.position(index)]
        }
    }

    /// Sets the bits of `mask` in one word; returns how many were clear.
    fn set_in_word(&mut self, index: u64, mask: u64) -> u64 {
        let before = self.word(index);
        let after = before | mask;
        self.replace_word(index, before, after);
        ones(after ^ before)
    }

    /// Clears the bits of `mask` in one word; returns how many were set.
    fn clear_in_word(&mut self, index: u64, mask: u64) -> u64 {
        let before = self.word(index);
        let after = before & !mask;
        self.replace_word(index, before, after);
        ones(after ^ before)
    }

    fn replace_word(&mut self, index: u64, before: u64, after: u64) {
        if before == after {
            return;
        }
        let bit = 1 << index;
        let position = self.position(index);
        match (is_stored(before), is_stored(after)) {
            (true, true) => self.words[position] = after,
            (false, true) => self.words.insert(position, after),
            (true, false) => {
                self.words.remove(position);
            }
            (false, false) => {}
        }
        self.dirty = if after == 0 { self.dirty & !bit } else { self.dirty | bit };
        self.full = if after == u64::MAX { self.full | bit } else { self.full & !bit };
    }

    /// Makes the words `first..end` clean; returns how many blocks were set in them.
    fn drop_words(&mut self, first: u64, end: u64) -> u64 {
        let range = words_between(first, end);
        if range & self.dirty == 0 {
            return 0;
        }
        let start = self.position(first);
        let stored = (self.stored() & range).count_ones() as usize;
        let dropped = self.words.drain(start..start + stored).map(ones).sum::<u64>();
        let full = 64 * ones(self.full & range);
        self.dirty &= !range;
        self.full &= !range;
        dropped + full
    }
}

/// Returns the lowest index above `index` (below 64) whose bit is set in `mask`.
pub(super) fn lowest_above(mask: u64, index: u64) -> Option<u64> {
    // Two shifts, because a shift by 64 is not defined.
    let above = mask & ((u64::MAX << index) << 1);
    (above != 0).then(|| lowest(above))
}

const fn is_stored(word: u64) -> bool {
    word != 0 && word != u64::MAX
}

/// Returns the bits of word `index` that lie in `start..end`, a range that reaches into the word.
const fn mask_in_word(index: u64, start: u64, end: u64) -> u64 {
    let base = index * 64;
    let low = start.saturating_sub(base);
    let high = if end - base < 64 { end - base } else { 64 };
    (u64::MAX << low) & (u64::MAX >> (64 - high))
}

/// Returns the bits `first..end` of a word; `end` is at most 63.
const fn words_between(first: u64, end: u64) -> u64 {
    if first < end { (u64::MAX << first) & ((1 << end) - 1) } else { 0 }
}

const fn lowest(word: u64) -> u64 {
    word.trailing_zeros() as u64
}

const fn ones(word: u64) -> u64 {
    word.count_ones() as u64
}
