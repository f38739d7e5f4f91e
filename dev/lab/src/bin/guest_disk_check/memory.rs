//! Memory that is checked and rewritten all the time. This reveals a VM whose memory was moved wrongly: pages that were lost,
//! mixed up, or left in the state of an earlier round.
//!
//! A page's version determines its content, and the versions lie in other pages. A page that was moved without its version, or
//! the version without its page, is noticed. Both left behind together are not, so there are many pages, changed at random.

use std::time::Duration;

use crate::pattern::{Expected, Stamp};
use crate::random::Random;
use crate::tally::Tally;

/// Hypervisors track and send pages of this many bytes.
const PAGE_BYTES: usize = 4096;
const PAGES_PER_TURN: u32 = 2;
/// Pause between two turns. About 8 MB are rewritten each second: enough for several rounds, and little enough for any link.
const PAUSE: Duration = Duration::from_millis(1);
/// Sets the stamps of pages apart from those of the disk's blocks.
const SEED_SALT: u64 = 0x6d65_6d6f;

const PAGES_SWEPT_AT_ONCE: usize = 256;

/// Memory that is written faster than any link: one word of each page, over and over.
pub(crate) struct Sweep {
    bytes: Vec<u8>,
    passes: u64,
}

impl Sweep {
    /// Allocates `bytes`, rounded down to whole pages.
    pub(crate) fn new(bytes: u64) -> Self {
        let count = usize::try_from(bytes).unwrap_or(0) / PAGE_BYTES;
        Self { bytes: vec![0; count * PAGE_BYTES], passes: 0 }
    }

    /// Writes all pages until the tally is stopped.
    pub(crate) fn work(&mut self, tally: &Tally) {
        while !tally.is_stopped() && !self.bytes.is_empty() {
            self.pass(tally);
        }
    }

    fn pass(&mut self, tally: &Tally) {
        for pages in self.bytes.chunks_mut(PAGES_SWEPT_AT_ONCE * PAGE_BYTES) {
            for page in pages.chunks_exact_mut(PAGE_BYTES) {
                let word = &mut page[..8];
                if *word != self.passes.to_le_bytes() {
                    tally.wrong(&format!("a page that is swept is not of pass {}", self.passes));
                }
                word.copy_from_slice(&(self.passes + 1).to_le_bytes());
            }
            std::thread::sleep(PAUSE);
        }
        self.passes += 1;
    }
}

pub(crate) struct Memory {
    bytes: Vec<u8>,
    versions: Vec<u32>,
    seed: u64,
}

impl Memory {
    /// Fills `bytes`, rounded down to whole pages.
    pub(crate) fn fill(bytes: u64, seed: u64) -> Self {
        let count = usize::try_from(bytes).unwrap_or(0) / PAGE_BYTES;
        let (bytes, versions) = (vec![0; count * PAGE_BYTES], vec![0; count]);
        let mut memory = Self { bytes, versions, seed: seed ^ SEED_SALT };
        for page in 0..count {
            memory.rewrite(page);
        }
        memory
    }

    pub(crate) fn pages(&self) -> usize {
        self.versions.len()
    }

    /// Checks and rewrites pages until the tally is stopped.
    pub(crate) fn work(&mut self, tally: &Tally) {
        let mut random = Random::new(self.seed);
        while !tally.is_stopped() && self.pages() > 0 {
            for _ in 0..PAGES_PER_TURN {
                let page = random.below(self.pages() as u64) as usize;
                self.check(page, tally);
                self.rewrite(page);
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub(crate) fn verify(&self, tally: &Tally) {
        for page in 0..self.pages() {
            self.check(page, tally);
        }
    }

    fn check(&self, page: usize, tally: &Tally) {
        let expected = Expected::Stamp(self.stamp(page));
        let bytes = &self.bytes[page * PAGE_BYTES..][..PAGE_BYTES];
        if let Err(mismatch) = expected.check(bytes) {
            tally.wrong(&format!("page {page} of memory: {mismatch}"));
        }
    }

    fn rewrite(&mut self, page: usize) {
        self.versions[page] += 1;
        let stamp = self.stamp(page);
        stamp.fill(&mut self.bytes[page * PAGE_BYTES..][..PAGE_BYTES]);
    }

    fn stamp(&self, page: usize) -> Stamp {
        Stamp { seed: self.seed, block: page as u64, version: self.versions[page] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_missed_a_sweep_is_wrong() {
        let mut sweep = Sweep::new(3 * PAGE_BYTES as u64);
        let tally = Tally::default();
        sweep.pass(&tally);
        let old = sweep.bytes[..PAGE_BYTES].to_vec();
        sweep.pass(&tally);
        assert_eq!(tally.errors(), 0);
        sweep.bytes[..PAGE_BYTES].copy_from_slice(&old);
        sweep.pass(&tally);
        assert_eq!(tally.errors(), 1);
    }

    #[test]
    fn a_page_that_is_lost_mixed_up_or_old_is_wrong() {
        let mut memory = Memory::fill(8 * PAGE_BYTES as u64 + 1, 7);
        assert_eq!(memory.pages(), 8);
        let old = memory.bytes[..PAGE_BYTES].to_vec();
        memory.rewrite(0);
        let tally = Tally::default();
        memory.verify(&tally);
        assert_eq!(tally.errors(), 0);
        memory.bytes[..PAGE_BYTES].copy_from_slice(&old);
        memory.bytes.copy_within(PAGE_BYTES..2 * PAGE_BYTES, 2 * PAGE_BYTES);
        memory.bytes[3 * PAGE_BYTES..4 * PAGE_BYTES].fill(0);
        memory.verify(&tally);
        assert_eq!(tally.errors(), 3);
    }
}
