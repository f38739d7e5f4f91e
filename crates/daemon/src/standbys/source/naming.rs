//! Names contents by their hashes before they are sent, while the standby's host may have them already.
//!
//! ```text
//!   read from the disk ─► Named: the hashes ─► that host takes what its image has ─► Wanted: the rest ─► extents
//! ```
//! That host hands what it has found to its machine as if it had been sent. So neither machine knows of this, and an image of any origin
//! will do. A read ends, for the machine here, once all of it was found or sent.

use std::collections::BTreeMap;

use bytes::Bytes;
use chronicle::BlockRange;
use lane::capture::BLOCK_BYTES;
use ring::digest::{SHA256, digest};
use standby::VolumeIndex;
use standby::owner::ReadId;

/// Contents whose host has not answered, of one stream.
#[derive(Default)]
pub(super) struct Naming {
    /// Whether the standby's image has any content.
    has_content: bool,
    /// Whether the standby lacks everything, as far as is known here; `None`: its host has not agreed to receive.
    lacks_everything: Option<bool>,
    /// Whether it did on any stream of the group.
    has_had_nothing: bool,
    last: u64,
    asked: BTreeMap<u64, Asked>,
}

struct Asked {
    read: ReadId,
    volume: VolumeIndex,
    blocks: BlockRange,
    content: Bytes,
}

/// What an answer means.
pub(super) struct Wanted {
    pub(super) volume: VolumeIndex,
    /// The blocks that were named.
    pub(super) named: BlockRange,
    /// What the standby's host does not have.
    pub(super) runs: Vec<(BlockRange, Bytes)>,
    /// The read, if nothing else of it is named.
    pub(super) ended: Option<ReadId>,
}

impl Naming {
    /// Forgets everything, for a new stream. Returns the reads that have not ended.
    pub(super) fn begin(&mut self) -> Vec<ReadId> {
        let Self { last, asked, has_had_nothing, .. } = std::mem::take(self);
        // An answer that comes late must find nothing.
        (self.last, self.has_had_nothing) = (last, has_had_nothing);
        let mut reads: Vec<ReadId> = asked.into_values().map(|asked| asked.read).collect();
        reads.dedup();
        reads
    }

    pub(super) fn note_content(&mut self) {
        self.has_content = true;
    }

    pub(super) fn agreed(&mut self, lacks_everything: bool) {
        self.lacks_everything = Some(lacks_everything);
        self.has_had_nothing |= lacks_everything;
    }

    /// Returns whether the standby's host had nothing that is known here, on any stream of the group.
    pub(super) fn has_had_nothing(&self) -> bool {
        self.has_had_nothing
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.has_content && self.lacks_everything == Some(true)
    }

    /// Returns whether the standby's host receives, and so answers questions.
    pub(super) fn is_agreed(&self) -> bool {
        self.lacks_everything.is_some()
    }

    /// Returns the number of a new question.
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Keeps the content of blocks until their host has answered. Returns the number of the question.
    pub(super) fn ask(
        &mut self,
        read: ReadId,
        volume: VolumeIndex,
        blocks: BlockRange,
        content: Bytes,
    ) -> u64 {
        let number = self.number();
        self.asked.insert(number, Asked { read, volume, blocks, content });
        number
    }

    /// Takes the answer to a question: first block and number of blocks of runs, in order. `None`: no question has this number, or the
    /// runs are not of its blocks.
    pub(super) fn answered(&mut self, number: u64, runs: &[(u64, u64)]) -> Option<Wanted> {
        let Asked { read, volume, blocks, content } = self.asked.remove(&number)?;
        let mut wanted = Vec::new();
        let mut from = blocks.start.0;
        for (start, count) in runs {
            let end = start.checked_add(*count)?;
            if *count == 0 || *start < from || end > blocks.end.0 {
                return None;
            }
            let bytes = |block: u64| ((block - blocks.start.0) * BLOCK_BYTES) as usize;
            wanted.push((BlockRange::new(*start, end), content.slice(bytes(*start)..bytes(end))));
            from = end;
        }
        let ended = self.asked.values().all(|other| other.read != read).then_some(read);
        Some(Wanted { volume, named: blocks, runs: wanted, ended })
    }
}

/// Returns the SHA-256 hashes of successive blocks.
pub(super) fn hashes_of(content: &[u8]) -> Bytes {
    let blocks = content.chunks(BLOCK_BYTES as usize);
    blocks.flat_map(|block| digest(&SHA256, block).as_ref().to_vec()).collect::<Vec<u8>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeIndex = VolumeIndex(0);

    fn content(blocks: u64) -> Bytes {
        (0..blocks).flat_map(|block| vec![block as u8; BLOCK_BYTES as usize]).collect::<Vec<u8>>().into()
    }

    #[test]
    fn a_read_ends_when_all_of_it_is_answered() {
        let mut naming = Naming::default();
        let first = naming.ask(ReadId(1), VOLUME, BlockRange::new(10, 14), content(4));
        let second = naming.ask(ReadId(1), VOLUME, BlockRange::new(20, 21), content(1));
        let answer = naming.answered(first, &[(10, 1), (12, 2)]).unwrap();
        assert_eq!(answer.ended, None);
        let starts: Vec<_> =
            answer.runs.iter().map(|(run, bytes)| (run.start.0, run.len(), bytes[0])).collect();
        assert_eq!(starts, [(10, 1, 0), (12, 2, 2)]);
        assert_eq!(answer.runs[1].1.len() as u64, 2 * BLOCK_BYTES);
        assert_eq!(naming.answered(second, &[]).unwrap().ended, Some(ReadId(1)));
        assert!(naming.answered(second, &[]).is_none(), "a question has one answer");
    }

    #[test]
    fn an_answer_about_other_blocks_is_none() {
        for runs in [&[(9, 2)][..], &[(10, 5)], &[(12, 1), (11, 1)], &[(10, 0)], &[(11, u64::MAX)]] {
            let mut naming = Naming::default();
            let number = naming.ask(ReadId(1), VOLUME, BlockRange::new(10, 14), content(4));
            assert!(naming.answered(number, runs).is_none(), "{runs:?}");
        }
    }

    #[test]
    fn reads_of_an_ended_stream_end_with_it() {
        let mut naming = Naming::default();
        let number = naming.ask(ReadId(1), VOLUME, BlockRange::new(0, 1), content(1));
        naming.ask(ReadId(1), VOLUME, BlockRange::new(2, 3), content(1));
        naming.ask(ReadId(2), VOLUME, BlockRange::new(4, 5), content(1));
        assert_eq!(naming.begin(), [ReadId(1), ReadId(2)]);
        assert!(naming.answered(number, &[]).is_none());
        assert!(!naming.is_wanted());
    }
}
