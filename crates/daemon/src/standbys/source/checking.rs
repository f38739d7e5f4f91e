//! Compares all blocks of a group with its standby, which receives meanwhile. It has no I/O and no clock.
//!
//! ```text
//!   watch: what the standby lacks ─► read ─► Compare: the hashes ─► Wanted: what differs ─► unwatch: what was written meanwhile
//!                                                differs, was not lacking, was not written ─► Doubted: sent again
//! ```

use chronicle::{BlockCount, BlockRange, LayeredBitmap};
use standby::VolumeIndex;
use standby::verification::Comparison;

/// The number of blocks that are compared at once: 1 MiB.
const PORTION_BLOCKS: u64 = 256;

/// A comparison that has begun.
#[derive(Debug)]
pub(super) struct Check {
    sizes: Vec<BlockCount>,
    volume: usize,
    next: u64,
    /// The portion that is compared, and what the standby lacked of it when that began.
    portion: Option<(Portion, LayeredBitmap)>,
    pub(super) tally: CheckTally,
}

/// Blocks that are compared at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) volume: VolumeIndex,
    pub(super) blocks: BlockRange,
}

/// Numbers of compared blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CheckTally {
    pub(super) total: u64,
    pub(super) done: u64,
    /// The standby lacked these just then, or guests wrote them: they are sent anyway.
    pub(super) left_out: u64,
    pub(super) differing: u64,
}

impl CheckTally {
    /// Shows the numbers in what is told of the comparison.
    pub(super) fn show_in(self, comparison: &mut Comparison) {
        let Self { total, done, left_out, differing } = self;
        *comparison = Comparison { total, done, left_out, differing, ..comparison.clone() };
    }
}

impl Check {
    pub(super) fn begin(sizes: Vec<BlockCount>) -> Self {
        let total = sizes.iter().map(|size| size.0).sum();
        let tally = CheckTally { total, ..CheckTally::default() };
        Self { sizes, volume: 0, next: 0, portion: None, tally }
    }

    /// Returns the next portion; `None`: everything was compared. The same one again if it has no answer.
    pub(super) fn next(&mut self) -> Option<Portion> {
        self.portion = None;
        while self.sizes.get(self.volume)?.0 <= self.next {
            (self.volume, self.next) = (self.volume + 1, 0);
        }
        let end = self.sizes[self.volume].0.min(self.next + PORTION_BLOCKS);
        Some(Portion { volume: VolumeIndex(self.volume as u16), blocks: BlockRange::new(self.next, end) })
    }

    /// Notes what the standby lacks of a portion, before it is read.
    pub(super) fn begun(&mut self, portion: Portion, lacks: LayeredBitmap) {
        self.portion = Some((portion, lacks));
    }

    /// Takes which blocks of the portion differ, and what of it was written since it was begun. Returns the volume, and what differs
    /// without a reason. `None`: nothing is compared, or the runs are not of the portion.
    pub(super) fn ended(
        &mut self,
        runs: &[(u64, u64)],
        written: &[BlockRange],
    ) -> Option<(VolumeIndex, Vec<BlockRange>)> {
        let (Portion { volume, blocks }, lacks) = self.portion.take()?;
        let mut excused = LayeredBitmap::new(BlockCount(blocks.end.0));
        let of_portion = |run: BlockRange| run.intersect(&blocks);
        lacks.runs().map(of_portion).chain(written.iter().map(|run| of_portion(*run))).for_each(|run| {
            excused.insert(run);
        });
        let mut differing = LayeredBitmap::new(BlockCount(blocks.end.0));
        for (start, count) in runs {
            let end = start.checked_add(*count)?;
            if *start < blocks.start.0 || end > blocks.end.0 {
                return None;
            }
            differing.insert(BlockRange::new(*start, end));
        }
        differing.subtract(&excused);
        self.tally.done += blocks.len();
        self.tally.left_out += excused.count();
        self.tally.differing += differing.count();
        self.next = blocks.end.0;
        Some((volume, differing.runs().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(runs: &[(u64, u64)], size: u64) -> LayeredBitmap {
        let mut set = LayeredBitmap::new(BlockCount(size));
        runs.iter().for_each(|(start, end)| {
            set.insert(BlockRange::new(*start, *end));
        });
        set
    }

    #[test]
    fn all_blocks_of_all_volumes_are_compared_once() {
        let mut check = Check::begin(vec![BlockCount(300), BlockCount(0), BlockCount(10)]);
        let mut portions = Vec::new();
        while let Some(portion) = check.next() {
            assert_eq!(check.next(), Some(portion), "without an answer it is asked again");
            check.begun(portion, set(&[], 300));
            assert_eq!(check.ended(&[], &[]).unwrap().1, []);
            portions.push((portion.volume.0, portion.blocks.start.0, portion.blocks.end.0));
        }
        assert_eq!(portions, [(0, 0, 256), (0, 256, 300), (2, 0, 10)]);
        assert_eq!(check.tally, CheckTally { total: 310, done: 310, left_out: 0, differing: 0 });
    }

    #[test]
    fn what_was_lacking_or_was_written_is_no_damage() {
        let mut check = Check::begin(vec![BlockCount(20)]);
        let portion = check.next().unwrap();
        check.begun(portion, set(&[(0, 2)], 20));
        let doubted = check.ended(&[(1, 5), (10, 2)], &[BlockRange::new(3, 4), BlockRange::new(11, 40)]);
        assert_eq!(
            doubted.unwrap().1,
            [BlockRange::new(2, 3), BlockRange::new(4, 6), BlockRange::new(10, 11)]
        );
        assert_eq!(check.tally, CheckTally { total: 20, done: 20, left_out: 12, differing: 4 });
        assert!(check.ended(&[], &[]).is_none(), "it has one answer");
    }

    #[test]
    fn an_answer_about_other_blocks_is_none() {
        for runs in [(0, 21), (25, 1), (1, u64::MAX)] {
            let mut check = Check::begin(vec![BlockCount(20)]);
            let portion = check.next().unwrap();
            check.begun(portion, set(&[], 20));
            assert!(check.ended(&[runs], &[]).is_none());
            assert_eq!(check.next(), Some(portion));
        }
    }
}
