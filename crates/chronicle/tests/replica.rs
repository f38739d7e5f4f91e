//! A replica against the copy that it describes: whoever copies what it says ends with what the volume holds.

use chronicle::{
    BlockCount, BlockRange, BlockSize, BranchId, BranchPoint, Chronicle, Epoch, LayeredBitmap, LineageId,
    MissingPolicy, Recorded, Replica,
};
use proptest::prelude::*;

const BLOCKS: u64 = 200;
const BLOCK: u64 = 64 << 10;

/// Something that happens while a volume is copied.
#[derive(Clone, Debug)]
enum Step {
    Write(BlockRange),
    /// A write that reaches the copy as well, by value.
    WriteBoth(BlockRange),
    BeginPass,
    Copy {
        blocks_max: u64,
    },
    /// A copy that is lost on the way, and known to be.
    CopyLost {
        blocks_max: u64,
    },
    /// All that was to be known of the replica is lost but as of when it was current; the chronicle remains.
    ForgetAndFallBehind,
}

fn ranges() -> impl Strategy<Value = BlockRange> {
    (0..BLOCKS, 1_u64..20).prop_map(|(start, length)| BlockRange::new(start, (start + length).min(BLOCKS)))
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => ranges().prop_map(Step::Write),
        2 => ranges().prop_map(Step::WriteBoth),
        2 => Just(Step::BeginPass),
        8 => (1_u64..30).prop_map(|blocks_max| Step::Copy { blocks_max }),
        2 => (1_u64..30).prop_map(|blocks_max| Step::CopyLost { blocks_max }),
        1 => Just(Step::ForgetAndFallBehind),
    ]
}

/// A volume and a copy of it; a block holds the number of the write that wrote it.
struct Copying {
    volume: Vec<u64>,
    copy: Vec<u64>,
    history: Chronicle,
    replica: Replica,
    writes: u64,
}

impl Copying {
    fn new(missing: &LayeredBitmap, policy: MissingPolicy) -> Self {
        let volume = vec![1; BLOCKS as usize];
        let copy = (0..BLOCKS).map(|block| u64::from(!missing.contains(chronicle::BlockIndex(block))));
        let as_of = BranchPoint { branch: BranchId([1; 16]), epoch: Epoch(0) };
        let mut history = Chronicle::new(BlockSize::DEFAULT, BLOCKS * BLOCK, Epoch(1));
        // What is missing at the start has been written since the copy was current.
        for run in missing.runs() {
            let _ = history.record(run.start.0 * BLOCK, run.len() * BLOCK);
        }
        let replica = Replica::new(LineageId([7; 16]), as_of, missing.clone(), policy);
        Self { copy: copy.collect(), volume, history, replica, writes: 1 }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write(blocks) => {
                self.write(blocks);
                self.replica.written(blocks);
            }
            Step::WriteBoth(blocks) => {
                self.write(blocks);
                self.send(blocks);
                self.replica.synchronised(blocks);
            }
            Step::BeginPass => self.replica.begin_pass(),
            Step::Copy { blocks_max } => {
                if let Some(blocks) = self.replica.take_next(blocks_max) {
                    assert!(blocks.len() <= blocks_max);
                    self.send(blocks);
                }
            }
            Step::CopyLost { blocks_max } => {
                if let Some(blocks) = self.replica.take_next(blocks_max) {
                    self.replica.unconfirmed(blocks);
                }
            }
            Step::ForgetAndFallBehind => {
                let policy = MissingPolicy::AheadOfCursorLeftOut;
                let nothing = LayeredBitmap::new(BlockCount(BLOCKS));
                self.replica = Replica::new(self.replica.lineage(), self.replica.as_of(), nothing, policy);
                self.replica.fall_behind(&self.history);
            }
        }
    }

    fn write(&mut self, blocks: BlockRange) {
        self.writes += 1;
        let recorded = self.history.record(blocks.start.0 * BLOCK, blocks.len() * BLOCK);
        assert!(matches!(recorded, Recorded::Marked(_)));
        for block in blocks.iter() {
            self.volume[block.0 as usize] = self.writes;
        }
    }

    fn send(&mut self, blocks: BlockRange) {
        for block in blocks.iter() {
            self.copy[block.0 as usize] = self.volume[block.0 as usize];
        }
    }

    /// Every block that differs is known to be lacking.
    fn check(&self) {
        let lacking = self.replica.lacking();
        for block in (0..BLOCKS).filter(|&block| self.copy[block as usize] != self.volume[block as usize]) {
            assert!(lacking.contains(chronicle::BlockIndex(block)), "block {block} differs unnoticed");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_block_that_differs_is_lacking_until_it_has_been_copied(
        missing in proptest::collection::vec(ranges(), 0..6),
        policy in prop_oneof![Just(MissingPolicy::EveryWrite), Just(MissingPolicy::AheadOfCursorLeftOut)],
        script in proptest::collection::vec(steps(), 1..60),
    ) {
        let mut bitmap = LayeredBitmap::new(BlockCount(BLOCKS));
        for range in missing {
            bitmap.insert(range);
        }
        let mut copying = Copying::new(&bitmap, policy);
        for step in &script {
            copying.apply(step);
            copying.check();
        }
        // Without further writes two passes are enough: the one under way and one over what it left.
        for _ in 0..2 {
            while let Some(blocks) = copying.replica.take_next(7) {
                copying.send(blocks);
            }
            copying.replica.begin_pass();
        }
        prop_assert!(copying.replica.is_current());
        prop_assert_eq!(&copying.copy, &copying.volume);
    }
}
