//! A guest's knowledge of its disk: the content of every block.
//!
//! A version is never used twice for a block, even after the block was made zero, so that a lost or stale write can never look
//! right. Requests in flight do not overlap ([`Content::claim`]), so that the expected content of a block is always unique.

use std::ops::Range;

use super::pattern::{Expected, Mismatch, Stamp};

/// The content of every block of a disk, as its only writer knows it.
#[derive(Clone, Debug)]
pub struct Content {
    seed: u64,
    block_bytes: u32,
    disk_bytes: u64,
    blocks: Vec<BlockState>,
    /// One bit per block: a request for it is in flight.
    claimed: Vec<u64>,
}

/// Version and flags of one block, packed: there is one for each block of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BlockState(u32);

impl BlockState {
    /// The block was made zero after its last version had been written.
    const ZEROED: u32 = 1 << 31;
    /// A request for the block failed: it may hold anything until it is written again.
    const UNCERTAIN: u32 = 1 << 30;
    const VERSION: u32 = Self::UNCERTAIN - 1;

    fn version(self) -> u32 {
        self.0 & Self::VERSION
    }
}

impl Content {
    /// Returns the content of a zeroed disk.
    ///
    /// # Panics
    /// If `block_bytes` is 0 or not a multiple of 512.
    pub fn new(disk_bytes: u64, block_bytes: u32, seed: u64) -> Self {
        assert!(block_bytes > 0 && block_bytes.is_multiple_of(512), "blocks are made of sectors");
        let blocks = usize::try_from(disk_bytes / u64::from(block_bytes)).unwrap_or(usize::MAX);
        let blocks = vec![BlockState::default(); blocks];
        let claimed = vec![0; blocks.len().div_ceil(64)];
        Self { seed, block_bytes, disk_bytes, blocks, claimed }
    }

    /// Returns the number of whole blocks. The rest of the disk is never written, and must stay zero.
    pub fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Claims blocks for a request; returns whether that worked. If not, nothing changes.
    pub fn claim(&mut self, blocks: Range<u64>) -> bool {
        let free = blocks.end <= self.blocks()
            && blocks.clone().all(|block| self.claimed[(block / 64) as usize] & (1 << (block % 64)) == 0);
        if free {
            for block in blocks {
                self.claimed[(block / 64) as usize] |= 1 << (block % 64);
            }
        }
        free
    }

    /// Ends the claim of a request that was answered.
    pub fn release(&mut self, blocks: Range<u64>) {
        for block in blocks {
            self.claimed[(block / 64) as usize] &= !(1 << (block % 64));
        }
    }

    /// Returns the content for the next write of `block`.
    pub fn next_stamp(&self, block: u64) -> Stamp {
        let version = self.blocks[block as usize].version() + 1;
        debug_assert!(version < BlockState::VERSION, "no workload rewrites a block a thousand million times");
        Stamp { seed: self.seed, block, version }
    }

    /// Records that the blocks were written with their next stamps.
    pub fn note_written(&mut self, blocks: Range<u64>) {
        for state in self.states(blocks) {
            *state = BlockState(state.version() + 1);
        }
    }

    /// Records that the blocks were made zero.
    pub fn note_zeroed(&mut self, blocks: Range<u64>) {
        for state in self.states(blocks) {
            *state = BlockState(state.version() | BlockState::ZEROED);
        }
    }

    /// Records that writing or zeroing the blocks failed: they may hold anything.
    pub fn note_failed(&mut self, blocks: Range<u64>) {
        for state in self.states(blocks) {
            // The stamp that may have arrived is used up.
            *state = BlockState((state.version() + 1) | BlockState::UNCERTAIN);
        }
    }

    /// Returns the expected content of a block; `None` if a request for it failed.
    pub fn expected(&self, block: u64) -> Option<Expected> {
        let state = self.blocks[block as usize];
        match (state.0 & BlockState::UNCERTAIN != 0, state.0 & BlockState::ZEROED != 0, state.version()) {
            (true, _, _) => None,
            (false, true, _) | (false, false, 0) => Some(Expected::Zeroes),
            (false, false, version) => Some(Expected::Stamp(Stamp { seed: self.seed, block, version })),
        }
    }

    /// Returns the number of blocks whose expected content is not zeroes.
    pub fn blocks_written(&self) -> u64 {
        let written = |state: &&BlockState| state.version() > 0 && state.0 & BlockState::ZEROED == 0;
        self.blocks.iter().filter(written).count() as u64
    }

    /// Compares data, read from `offset` on, with the expected content, and adds differences to `findings`.
    ///
    /// `offset` must be the start of a block; only the disk's end may cut the last block short.
    pub fn check(&self, offset: u64, data: &[u8], findings: &mut Findings) {
        let first = offset / u64::from(self.block_bytes);
        for (bytes, block) in data.chunks(self.block_bytes as usize).zip(first..) {
            // The part beyond the last whole block is never written.
            let expected = if block < self.blocks() { self.expected(block) } else { Some(Expected::Zeroes) };
            if let Some(Err(mismatch)) = expected.map(|expected| expected.check(bytes)) {
                findings.add(Finding::Content { block, mismatch });
            }
        }
    }

    /// Returns the blocks of a byte range.
    pub fn blocks_of(&self, offset: u64, length: u64) -> Range<u64> {
        let block_bytes = u64::from(self.block_bytes);
        offset / block_bytes..(offset + length).div_ceil(block_bytes)
    }

    fn states(&mut self, blocks: Range<u64>) -> &mut [BlockState] {
        &mut self.blocks[blocks.start as usize..blocks.end as usize]
    }
}

/// The errors of a guest's disk. The first few are kept, all are counted.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    count: u64,
    first: Vec<Finding>,
}

/// An error that a correct disk never makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A block did not hold what was written to it.
    Content {
        /// The number of the block.
        block: u64,
        /// The expected and the found content.
        mismatch: Mismatch,
    },
    /// A request was answered with an error.
    Failed {
        /// The requested operation: `read`, `write`, `flush`, `trim`, `write-zeroes`.
        operation: &'static str,
        /// First byte of the range.
        offset: u64,
        /// The server's error code.
        errno: u32,
    },
}

impl Findings {
    /// A broken disk fails in thousands of places; the first ones show why.
    const KEPT_MAX: usize = 16;

    /// Adds and counts a finding.
    pub fn add(&mut self, finding: Finding) {
        self.count += 1;
        if self.first.len() < Self::KEPT_MAX {
            self.first.push(finding);
        }
    }

    /// Adds all findings of `other`.
    pub fn append(&mut self, other: Self) {
        self.count += other.count;
        let room = Self::KEPT_MAX - self.first.len();
        self.first.extend(other.first.into_iter().take(room));
    }

    /// Returns the number of all findings.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the kept findings, the first ones.
    pub fn first(&self) -> &[Finding] {
        &self.first
    }

    /// Returns whether there are no findings.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Content { block, mismatch } => write!(formatter, "block {block}: {mismatch}"),
            Self::Failed { operation, offset, errno } => {
                write!(
                    formatter,
                    "{operation} at byte {offset} failed: {}",
                    testbed::nbd_client::Errno(*errno)
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &mut Content, block: u64) -> Vec<u8> {
        let mut data = vec![0; content.block_bytes() as usize];
        content.next_stamp(block).fill(&mut data);
        content.note_written(block..block + 1);
        data
    }

    fn count(content: &Content, offset: u64, data: &[u8]) -> u64 {
        let mut findings = Findings::default();
        content.check(offset, data, &mut findings);
        findings.count()
    }

    #[test]
    fn a_version_is_not_used_again_after_zeroes_or_failure() {
        let mut content = Content::new(1 << 20, 4096, 1);
        let first = written(&mut content, 3);
        content.note_zeroed(3..4);
        assert_eq!(count(&content, 3 * 4096, &first), 1, "what was trimmed must not come back");
        assert_eq!(count(&content, 3 * 4096, &[0; 4096]), 0);
        let second = written(&mut content, 3);
        assert_eq!(count(&content, 3 * 4096, &first), 1, "stale data after trim and rewrite");
        assert_eq!(count(&content, 3 * 4096, &second), 0);
        let lost = content.next_stamp(3);
        content.note_failed(3..4);
        assert_eq!(content.expected(3), None);
        assert!(content.next_stamp(3).version > lost.version);
    }

    #[test]
    fn claims_exclude_each_other_and_end_at_the_disks_end() {
        let mut content = Content::new(1 << 20, 4096, 1);
        assert!(content.claim(60..70));
        assert!(!content.claim(69..80));
        assert!(content.claim(70..80), "the refused claim must not have claimed anything");
        content.release(60..70);
        assert!(content.claim(69..70));
        assert!(!content.claim(255..257), "beyond the end");
    }

    #[test]
    fn what_lies_beyond_the_last_whole_block_must_be_zero() {
        let content = Content::new(8192 + 512, 8192, 1);
        assert_eq!(count(&content, 8192, &[0; 512]), 0);
        assert_eq!(count(&content, 8192, &[1; 512]), 1);
    }
}
