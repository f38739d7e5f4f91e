//! Compares the layered bitmap with a set of integers, a slow but obvious oracle.

use std::collections::BTreeSet;

use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};
use proptest::prelude::*;

/// Sizes around the bounds of words (64), leaves (4096) and the first upper layer (262,144).
const SIZES: [u64; 12] = [0, 1, 63, 64, 65, 4095, 4096, 4097, 12_345, 262_144, 262_145, 600_000];

/// The most blocks by which a volume grows in a test.
const BEYOND: u64 = 5000;

fn near(range: BlockRange, limit: u64) -> BlockRange {
    range.intersect(&BlockRange::new(0, limit))
}

#[derive(Clone, Debug)]
enum Step {
    Insert(BlockRange),
    Remove(BlockRange),
    UnionWith(Vec<BlockRange>),
    Subtract(Vec<BlockRange>),
    Clear,
}

#[derive(Clone, Debug, Default)]
struct Oracle {
    blocks: u64,
    /// Insertions are cut at this limit, because the oracle works block by block.
    limit: u64,
    set: BTreeSet<u64>,
}

impl Oracle {
    fn clip(&self, range: BlockRange) -> std::ops::Range<u64> {
        let end = range.end.0.min(self.blocks);
        range.start.0.min(end)..end
    }

    /// Ranges beyond the end grow the volume, as in the bitmap.
    fn insert(&mut self, range: BlockRange) -> u64 {
        if range.start < range.end {
            self.blocks = self.blocks.max(range.end.0);
        }
        self.clip(range).map(|block| u64::from(self.set.insert(block))).sum()
    }

    fn near(&self, range: BlockRange) -> BlockRange {
        near(range, self.limit)
    }

    fn remove(&mut self, range: BlockRange) -> u64 {
        self.clip(range).map(|block| u64::from(self.set.remove(&block))).sum()
    }

    fn runs(&self) -> Vec<BlockRange> {
        let mut runs: Vec<BlockRange> = Vec::new();
        for &block in &self.set {
            match runs.last_mut() {
                Some(run) if run.end.0 == block => run.end.0 += 1,
                _ => runs.push(BlockRange::new(block, block + 1)),
            }
        }
        runs
    }
}

fn build(blocks: u64, ranges: &[BlockRange]) -> LayeredBitmap {
    let mut bitmap = LayeredBitmap::new(BlockCount(blocks));
    for &range in ranges {
        bitmap.insert(range);
    }
    bitmap
}

fn apply(step: &Step, bitmap: &mut LayeredBitmap, oracle: &mut Oracle) {
    let blocks = oracle.blocks;
    assert_eq!(bitmap.blocks(), BlockCount(blocks));
    match step {
        Step::Insert(range) => {
            let range = oracle.near(*range);
            assert_eq!(bitmap.insert(range), oracle.insert(range));
        }
        Step::Remove(range) => assert_eq!(bitmap.remove(*range), oracle.remove(*range)),
        Step::UnionWith(ranges) => {
            let ranges: Vec<_> = ranges.iter().map(|range| oracle.near(*range)).collect();
            bitmap.union_with(&build(blocks, &ranges));
            for range in ranges {
                oracle.insert(range);
            }
        }
        Step::Subtract(ranges) => {
            bitmap.subtract(&build(blocks, ranges));
            for &range in ranges {
                oracle.remove(range);
            }
        }
        Step::Clear => {
            bitmap.clear();
            oracle.set.clear();
        }
    }
}

fn check(bitmap: &LayeredBitmap, oracle: &Oracle, asked: BlockRange, blocks_max: u64) {
    assert_eq!(bitmap.count(), oracle.set.len() as u64);
    assert_eq!(bitmap.is_empty(), oracle.set.is_empty());
    let runs = oracle.runs();
    assert_eq!(bitmap.runs().collect::<Vec<_>>(), runs);

    let inside = oracle.clip(asked);
    let count = oracle.set.range(inside.clone()).count() as u64;
    assert_eq!(bitmap.count_in(asked), count, "count in {asked}");
    assert_eq!(bitmap.contains_any(asked), count > 0, "any of {asked}");
    assert_eq!(bitmap.contains_all(asked), count == inside.end - inside.start, "all of {asked}");
    assert_eq!(bitmap.contains(asked.start), oracle.set.contains(&asked.start.0));

    let first = runs.iter().map(|run| run.intersect(&BlockRange::new(asked.start.0, u64::MAX)));
    let expected = first
        .filter(|run| !run.is_empty() && blocks_max > 0)
        .map(|run| BlockRange::new(run.start.0, run.end.0.min(run.start.0 + blocks_max)));
    assert_eq!(bitmap.next_run(asked.start, blocks_max), expected.min());

    // The form is canonical: a set built straight from its runs is equal, however this one came about.
    assert_eq!(*bitmap, build(oracle.blocks, &runs));
}

fn ranges() -> impl Strategy<Value = BlockRange> {
    let edge = prop_oneof![
        0_u64..700_000,
        0_u64..300,
        (0_u64..160, 0_u64..3).prop_map(|(leaf, off)| (leaf * 4096 + off).saturating_sub(1)),
        (0_u64..3, 0_u64..3).prop_map(|(upper, off)| (upper * 262_144 + off).saturating_sub(1)),
    ];
    let length = prop_oneof![0_u64..4, 0_u64..200, 0_u64..10_000, Just(4096), Just(262_144), Just(700_000)];
    (edge, length).prop_map(|(start, length)| BlockRange::new(start, start + length))
}

fn steps() -> impl Strategy<Value = Step> {
    let several = || proptest::collection::vec(ranges(), 0..6);
    prop_oneof![
        6 => ranges().prop_map(Step::Insert),
        4 => ranges().prop_map(Step::Remove),
        1 => several().prop_map(Step::UnionWith),
        1 => several().prop_map(Step::Subtract),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn behaves_like_a_set_of_integers(
        blocks in proptest::sample::select(&SIZES[..]),
        starts_full in any::<bool>(),
        script in proptest::collection::vec((steps(), ranges(), 0_u64..5000), 1..24),
    ) {
        let mut oracle = Oracle { blocks, limit: blocks + BEYOND, ..Oracle::default() };
        let mut bitmap = LayeredBitmap::new(BlockCount(blocks));
        if starts_full {
            bitmap = LayeredBitmap::full(BlockCount(blocks));
            oracle.insert(BlockRange::new(0, blocks));
        }
        for (step, asked, blocks_max) in &script {
            apply(step, &mut bitmap, &mut oracle);
            check(&bitmap, &oracle, *asked, *blocks_max);
        }
    }

    #[test]
    fn sets_of_volumes_of_different_sizes_combine_and_lose_nothing(
        here in proptest::sample::select(&SIZES[..]),
        there in proptest::sample::select(&SIZES[..]),
        first in proptest::collection::vec(ranges(), 0..6),
        second in proptest::collection::vec(ranges(), 0..6),
    ) {
        let first: Vec<_> = first.into_iter().map(|range| near(range, here + BEYOND)).collect();
        let second: Vec<_> = second.into_iter().map(|range| near(range, there + BEYOND)).collect();
        let clipped = build(there, &second).runs().collect::<Vec<_>>();
        let mut union = build(here, &first);
        union.union_with(&build(there, &second));
        let mut difference = build(here, &first);
        difference.subtract(&build(there, &second));

        let mut oracle = Oracle { blocks: here, ..Oracle::default() };
        for &range in &first {
            oracle.insert(range);
        }
        let mut without = oracle.clone();
        for &range in &clipped {
            oracle.insert(range);
            without.remove(range);
        }
        prop_assert_eq!(union.runs().collect::<Vec<_>>(), oracle.runs());
        prop_assert_eq!(difference.runs().collect::<Vec<_>>(), without.runs());
        prop_assert_eq!(union.count(), oracle.set.len() as u64);
        prop_assert_eq!(difference.count(), without.set.len() as u64);
        let cut = union.cut_to(BlockCount(there.min(here)));
        let rest = oracle.runs().into_iter().map(|run| run.intersect(&BlockRange::new(0, there.min(here))));
        prop_assert_eq!(cut.runs().collect::<Vec<_>>(), rest.filter(|run| !run.is_empty()).collect::<Vec<_>>());
    }
}

#[test]
fn the_largest_volume_is_as_cheap_as_a_small_one() {
    let blocks = BlockCount(u64::MAX);
    let mut bitmap = LayeredBitmap::full(blocks);
    assert_eq!(bitmap.blocks(), chronicle::bitmap::BLOCKS_MAX);
    assert_eq!(bitmap.count(), 1 << 52);
    let last = (1 << 52) - 1;
    assert_eq!(bitmap.remove(BlockRange::new(1, last)), last - 1);
    let ends = [BlockRange::new(0, 1), BlockRange::new(last, last + 1)];
    assert_eq!(bitmap.runs().collect::<Vec<_>>(), ends);
    assert!(bitmap.bytes_used() < 64 << 10, "{} bytes", bitmap.bytes_used());
}

#[test]
fn a_part_that_becomes_clean_or_full_gives_its_memory_back() {
    let mut bitmap = LayeredBitmap::new(BlockCount(1 << 24));
    let empty = bitmap.bytes_used();
    for start in (0..1 << 24).step_by(1 << 12) {
        bitmap.insert(BlockRange::new(start + 5, start + 9));
    }
    assert!(bitmap.bytes_used() > 100 * empty);
    bitmap.insert(BlockRange::new(0, 1 << 24));
    assert_eq!(bitmap.bytes_used(), empty);
    bitmap.remove(BlockRange::new(77, 78));
    bitmap.remove(BlockRange::new(0, 1 << 24));
    assert_eq!(bitmap.bytes_used(), empty);
}

#[test]
fn an_insert_touches_memory_only_where_it_falls() {
    let mut bitmap = LayeredBitmap::new(BlockCount(1 << 32));
    bitmap.insert(BlockRange::new(3_000_000_000, 3_000_000_001));
    assert!(bitmap.bytes_used() < 16 << 10, "{} bytes", bitmap.bytes_used());
    assert_eq!(bitmap.next_run(BlockIndex(0), 8), Some(BlockRange::new(3_000_000_000, 3_000_000_001)));
    assert_eq!(bitmap.next_run(BlockIndex(3_000_000_001), 8), None);
}

#[test]
fn a_run_is_cut_at_the_limit_and_goes_on_from_there() {
    let mut bitmap = LayeredBitmap::new(BlockCount(10_000));
    bitmap.insert(BlockRange::new(4000, 4200));
    assert_eq!(bitmap.next_run(BlockIndex(0), 150), Some(BlockRange::new(4000, 4150)));
    assert_eq!(bitmap.next_run(BlockIndex(4150), 150), Some(BlockRange::new(4150, 4200)));
    assert_eq!(bitmap.next_run(BlockIndex(4200), 150), None);
    assert_eq!(bitmap.next_run(BlockIndex(0), 0), None);
    assert_eq!(bitmap.next_run(BlockIndex(u64::MAX), 1), None);
}

#[test]
fn debug_output_stays_short() {
    let mut bitmap = LayeredBitmap::new(BlockCount(1 << 20));
    for start in (0..1 << 20).step_by(64) {
        bitmap.insert(BlockRange::new(start, start + 1));
    }
    let text = format!("{bitmap:?}");
    assert!(text.starts_with("LayeredBitmap { 16384 of 1048576: [0, 1) [64, 65)"), "{text}");
    assert!(text.ends_with("… }") && text.len() < 200, "{text}");
}
