//! Compares the chronicle with a list of the writes of every epoch.

use std::collections::{BTreeMap, BTreeSet};

use chronicle::{BeyondTheEnd, BlockRange, BlockSize, Chronicle, Epoch, LayeredBitmap, MarkPolicy, Recorded};
use proptest::prelude::*;

const BLOCK: u64 = 4 << 10;
/// The last block is partial.
const SIZE_BYTES: u64 = 300 * BLOCK + 512;

fn set(bitmap: &LayeredBitmap) -> BTreeSet<u64> {
    bitmap.runs().flat_map(|run| run.iter()).map(|block| block.0).collect()
}

fn new(first: u64) -> Chronicle {
    Chronicle::new(BlockSize::DEFAULT, SIZE_BYTES, Epoch(first))
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        offset: u64,
        length: u64,
    },
    Advance,
    /// A copy becomes current as of the last frozen epoch.
    Refer,
    /// The n-th oldest copy is given up.
    Forget(usize),
    Merge,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..SIZE_BYTES + BLOCK, 0..8 * BLOCK).prop_map(|(offset, length)| Step::Write { offset, length }),
        4 => Just(Step::Advance),
        2 => Just(Step::Refer),
        1 => (0_usize..4).prop_map(Step::Forget),
        2 => Just(Step::Merge),
    ]
}

/// Records every epoch and never merges.
struct Oracle {
    written: BTreeMap<u64, BTreeSet<u64>>,
    open: u64,
}

impl Oracle {
    fn since(&self, epoch: u64) -> BTreeSet<u64> {
        self.written.range(epoch + 1..).flat_map(|(_, blocks)| blocks.iter().copied()).collect()
    }

    fn write(&mut self, offset: u64, length: u64) {
        let bytes = offset.min(SIZE_BYTES)..offset.saturating_add(length).min(SIZE_BYTES);
        let touched = (0..=300).filter(|block| {
            let (start, end) = (block * BLOCK, (block + 1) * BLOCK);
            !bytes.is_empty() && start < bytes.end && bytes.start < end
        });
        self.written.entry(self.open).or_default().extend(touched);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn since_is_what_was_written_later_whatever_is_merged(
        first in 1_u64..5,
        script in proptest::collection::vec(steps(), 1..60),
    ) {
        let mut chronicle = new(first);
        let mut oracle = Oracle { written: BTreeMap::new(), open: first };
        let mut referenced: Vec<Epoch> = Vec::new();
        let mut merged = false;
        for step in script {
            match step {
                Step::Write { offset, length } => {
                    let recorded = chronicle.record(offset, length);
                    if length > 0 && offset + length > SIZE_BYTES {
                        let refused = BeyondTheEnd { offset, length, size_bytes: SIZE_BYTES };
                        prop_assert_eq!(recorded, Err(refused));
                    } else {
                        prop_assert_eq!(recorded, Ok(Recorded::Marked(Epoch(oracle.open))));
                        oracle.write(offset, length);
                    }
                }
                Step::Advance => {
                    oracle.open += 1;
                    prop_assert_eq!(chronicle.advance(), Epoch(oracle.open));
                }
                Step::Refer => referenced.push(Epoch(oracle.open - 1)),
                Step::Forget(index) => {
                    if index < referenced.len() {
                        referenced.remove(index);
                    }
                }
                Step::Merge => {
                    chronicle.merge_unreferenced(&referenced);
                    merged = true;
                    let apart = referenced.iter().collect::<BTreeSet<_>>().len();
                    prop_assert!(chronicle.epochs().count() <= apart + 2, "{:?}", chronicle);
                }
            }
            for &epoch in &referenced {
                let lacking = chronicle.since(epoch);
                prop_assert_eq!(set(&lacking), oracle.since(epoch.0), "since {}", epoch);
                prop_assert_eq!(chronicle.blocks_since(epoch), lacking.count());
            }
            for epoch in first - 1..=oracle.open {
                let (answered, written) = (set(&chronicle.since(Epoch(epoch))), oracle.since(epoch));
                prop_assert!(answered.is_superset(&written), "since {} leaves out a write", epoch);
                prop_assert!(merged || answered == written, "since {} is exact before any merging", epoch);
            }
            prop_assert_eq!(chronicle.epochs().last(), Some(chronicle.open_epoch()));
        }
    }

    #[test]
    fn a_write_is_recorded_only_in_a_region_whose_mark_is_durable(
        blocks_per_region in 0_u64..20,
        script in proptest::collection::vec((0..SIZE_BYTES, 1..20 * BLOCK, 0_u8..8), 1..40),
    ) {
        let mut chronicle = new(1).with_mark_policy(MarkPolicy::Regions { blocks_per_region });
        // The content of a journal: after a crash exactly these blocks count as written.
        let mut durable: BTreeMap<Epoch, LayeredBitmap> = BTreeMap::new();
        for (offset, length, chance) in script {
            let length = length.min(SIZE_BYTES - offset);
            if let Ok(Recorded::WaitForMark(epoch)) = chronicle.record(offset, length) {
                prop_assert_eq!(epoch, chronicle.open_epoch());
                let regions = chronicle.regions_to_mark(offset, length);
                let empty = LayeredBitmap::new(chronicle.blocks());
                durable.entry(epoch).or_insert(empty).insert(regions);
                if chance == 0 {
                    chronicle.advance();
                }
                chronicle.regions_marked_durable(epoch, regions);
                let expected = match chance {
                    0 => Recorded::WaitForMark(chronicle.open_epoch()),
                    _ => Recorded::Marked(epoch),
                };
                prop_assert_eq!(chronicle.record(offset, length), Ok(expected));
            }
            for epoch in chronicle.epochs() {
                let recorded = chronicle.written_in(epoch).expect("it is listed");
                let marked = durable.get(&epoch).map(set).unwrap_or_default();
                prop_assert!(set(recorded).is_subset(&marked), "epoch {}", epoch);
            }
        }
        let (known_after, reserved) = (chronicle.known_after(), chronicle.open_epoch());
        let restored =
            Chronicle::restore(chronicle.block_size(), SIZE_BYTES, known_after, durable, reserved);
        prop_assert_eq!(restored.open_epoch(), reserved.next());
        for epoch in (0..=reserved.0).map(Epoch) {
            let before = set(&chronicle.since(epoch));
            prop_assert!(set(&restored.since(epoch)).is_superset(&before), "a crash forgot a write");
        }
    }
}

#[test]
fn a_write_beyond_the_end_is_an_error_until_the_volume_has_grown() {
    let mut chronicle = new(1);
    let size_bytes = SIZE_BYTES;
    for (offset, length) in [(SIZE_BYTES - 1, 2), (SIZE_BYTES, 1), (u64::MAX, 1), (0, u64::MAX)] {
        let refused = BeyondTheEnd { offset, length, size_bytes };
        assert_eq!(chronicle.record(offset, length), Err(refused));
    }
    assert!(chronicle.since(Epoch(0)).is_empty());
    chronicle.advance();
    chronicle.grow(SIZE_BYTES + BLOCK);
    assert_eq!(chronicle.record(SIZE_BYTES, BLOCK), Ok(Recorded::Marked(Epoch(2))));
    let last = SIZE_BYTES.div_ceil(BLOCK);
    assert!(chronicle.since(Epoch(1)).contains(chronicle::BlockIndex(last)));
}

#[test]
fn what_was_kept_and_marked_in_regions_is_cut_to_the_volume() {
    let mut marked = LayeredBitmap::new(new(1).blocks());
    marked.insert(BlockRange::new(0, 1 << 20));
    let kept = [(Epoch(2), marked)];
    let chronicle = Chronicle::restore(BlockSize::DEFAULT, SIZE_BYTES, Epoch(1), kept, Epoch(2));
    assert_eq!(chronicle.since(Epoch(1)), LayeredBitmap::full(chronicle.blocks()));
}

#[test]
fn merging_takes_the_newest_number_and_stops_at_referenced_epochs() {
    let mut chronicle = new(1);
    for block in 1..=6 {
        let _ = chronicle.record(block * BLOCK, 1);
        chronicle.advance();
    }
    chronicle.merge_unreferenced(&[Epoch(2), Epoch(5)]);
    assert_eq!(chronicle.epochs().collect::<Vec<_>>(), [2, 5, 6, 7].map(Epoch));
    assert_eq!(set(&chronicle.since(Epoch(2))), BTreeSet::from([3, 4, 5, 6]));
    assert_eq!(set(&chronicle.since(Epoch(5))), BTreeSet::from([6]));
    assert_eq!(
        set(&chronicle.since(Epoch(3))),
        BTreeSet::from([3, 4, 5, 6]),
        "merged: it errs to the safe side"
    );
    assert_eq!(chronicle.written_in(Epoch(5)).map(set), Some(BTreeSet::from([3, 4, 5])));
    assert_eq!(chronicle.written_in(Epoch(4)), None);
}

#[test]
fn a_restart_skips_ahead_and_takes_everything_older_for_written() {
    let chronicle = Chronicle::resume(BlockSize::DEFAULT, SIZE_BYTES, Epoch(41));
    assert_eq!(chronicle.open_epoch(), Epoch(42));
    for epoch in [0, 7, 40, 41] {
        assert_eq!(chronicle.blocks_since(Epoch(epoch)), 301);
        assert_eq!(chronicle.since(Epoch(epoch)), LayeredBitmap::full(chronicle.blocks()));
    }
}

#[test]
fn after_a_clean_stop_history_is_as_exact_as_before() {
    let mut chronicle = new(3);
    for block in [7, 8, 9] {
        let _ = chronicle.record(block * BLOCK, 1);
        chronicle.advance();
    }
    let kept = chronicle.epochs().filter_map(|epoch| Some((epoch, chronicle.written_in(epoch)?.clone())));
    let older = [(Epoch(2), LayeredBitmap::full(chronicle.blocks()))];
    let (block_size, known_after) = (chronicle.block_size(), chronicle.known_after());
    let last = Epoch(chronicle.open_epoch().0 + 100);
    let restored = Chronicle::restore(block_size, SIZE_BYTES, known_after, kept.chain(older), last);
    assert_eq!(restored.open_epoch(), last.next());
    for epoch in (0..=chronicle.open_epoch().0).map(Epoch) {
        assert_eq!(restored.since(epoch), chronicle.since(epoch), "since {epoch}");
    }
}

#[test]
fn a_restart_goes_on_above_every_epoch_that_it_finds_and_leaves_none_out() {
    let written = |block| {
        let mut set = LayeredBitmap::new(new(1).blocks());
        set.insert(BlockRange::new(block, block + 1));
        set
    };
    let found = [(Epoch(9), written(1)), (Epoch(9999), written(2)), (Epoch(9), written(3))];
    let restored = Chronicle::restore(BlockSize::DEFAULT, SIZE_BYTES, Epoch(4), found, Epoch(7));
    assert_eq!(restored.open_epoch(), Epoch(10_000));
    assert_eq!(set(&restored.since(Epoch(4))), BTreeSet::from([1, 2, 3]));
    assert_eq!(set(&restored.since(Epoch(9))), BTreeSet::from([2]));
}

#[test]
fn after_a_restart_history_is_exact_again_from_the_first_epoch_frozen() {
    let mut chronicle = Chronicle::resume(BlockSize::DEFAULT, SIZE_BYTES, Epoch(41));
    let _ = chronicle.record(0, 1);
    chronicle.advance();
    let _ = chronicle.record(3 * BLOCK, 1);
    assert_eq!(set(&chronicle.since(Epoch(42))), BTreeSet::from([3]));
    assert_eq!(chronicle.blocks_since(Epoch(42)), 1);
}

#[test]
fn an_epoch_that_has_never_been_open_lacks_everything() {
    let chronicle = new(5);
    assert_eq!(chronicle.blocks_since(Epoch(6)), 301, "a copy from a lost future");
    assert_eq!(chronicle.blocks_since(Epoch(3)), 301, "a copy from before this history");
    assert_eq!(chronicle.blocks_since(Epoch(4)), 0);
    assert_eq!(chronicle.blocks_since(Epoch(5)), 0);
}

#[test]
fn a_write_under_way_while_the_epoch_advances_is_recorded_in_both() {
    let mut chronicle = new(1);
    let Ok(Recorded::Marked(submitted)) = chronicle.record(9 * BLOCK, BLOCK) else {
        panic!("marks are volatile")
    };
    chronicle.advance();
    assert_ne!(submitted, chronicle.open_epoch(), "so the caller records it again at completion");
    let _ = chronicle.record(9 * BLOCK, BLOCK);
    assert_eq!(set(&chronicle.since(Epoch(0))), BTreeSet::from([9]));
    assert_eq!(set(&chronicle.since(Epoch(1))), BTreeSet::from([9]));
}

#[test]
fn a_mark_serves_the_epoch_that_it_was_made_for_only() {
    let mut chronicle = new(1).with_mark_policy(MarkPolicy::Regions { blocks_per_region: 16 });
    assert_eq!(chronicle.record(20 * BLOCK, 1), Ok(Recorded::WaitForMark(Epoch(1))));
    assert_eq!(chronicle.since(Epoch(0)).count(), 0, "nothing is recorded before the mark is durable");
    let regions = chronicle.regions_to_mark(20 * BLOCK, 1);
    assert_eq!(regions, BlockRange::new(16, 32));
    chronicle.regions_marked_durable(Epoch(1), regions);
    assert_eq!(chronicle.record(31 * BLOCK, BLOCK), Ok(Recorded::Marked(Epoch(1))));
    assert_eq!(chronicle.record(31 * BLOCK, 2 * BLOCK), Ok(Recorded::WaitForMark(Epoch(1))));
    assert!(chronicle.regions_to_mark(16 * BLOCK, 1).is_empty());
    chronicle.advance();
    chronicle.regions_marked_durable(Epoch(1), regions);
    assert_eq!(chronicle.record(20 * BLOCK, 1), Ok(Recorded::WaitForMark(Epoch(2))));
}

#[test]
fn idle_epochs_cost_next_to_nothing_and_merge_away() {
    let mut chronicle = Chronicle::new(BlockSize::new(4096).unwrap(), 16 << 40, Epoch(1));
    for _ in 0..1000 {
        chronicle.advance();
    }
    assert!(chronicle.bytes_used() < 128 << 10, "{} bytes", chronicle.bytes_used());
    chronicle.merge_unreferenced(&[]);
    assert_eq!(chronicle.epochs().count(), 2);
}
