//! Tests the filter for hot blocks: it never misses one, hardly ever reports another, and has a fixed memory.

use std::collections::{BTreeMap, VecDeque};

use chronicle::{BlockIndex, BlockRange};
use migration::strategy::{GENERATION_WRITES, HeatFilter, THRESHOLD};
use proptest::prelude::*;

#[derive(Default)]
struct Exact {
    latest: VecDeque<u64>,
    counts: BTreeMap<u64, u32>,
}

impl Exact {
    fn note(&mut self, block: u64) {
        self.latest.push_back(block);
        *self.counts.entry(block).or_default() += 1;
        if self.latest.len() as u64 > GENERATION_WRITES
            && let Some(gone) = self.latest.pop_front()
            && let Some(count) = self.counts.get_mut(&gone)
        {
            *count -= 1;
        }
    }

    fn hot(&self) -> impl Iterator<Item = u64> {
        self.counts.iter().filter(|(_, count)| **count >= THRESHOLD).map(|(block, _)| *block)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}

#[derive(Clone, Debug)]
struct Stretch {
    seed: u64,
    writes: u64,
    /// The number of blocks written, the first of them, and their distance.
    blocks: u64,
    from: u64,
    apart: u64,
}

fn stretches() -> impl Strategy<Value = Vec<Stretch>> {
    let stretch = (any::<u64>(), 0..GENERATION_WRITES, 1..1_u64 << 16, 0..1_u64 << 40, 1..1_u64 << 12)
        .prop_map(|(seed, writes, blocks, from, apart)| Stretch { seed, writes, blocks, from, apart });
    proptest::collection::vec(stretch, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_was_written_often_enough_within_the_window_is_never_called_cold(stretches in stretches()) {
        let (mut filter, mut exact) = (HeatFilter::default(), Exact::default());
        for stretch in &stretches {
            let mut random = Random(stretch.seed);
            for _ in 0..stretch.writes {
                let block = stretch.from + random.below(stretch.blocks) * stretch.apart;
                filter.note(BlockRange::new(block, block + 1));
                exact.note(block);
            }
            for block in exact.hot() {
                prop_assert!(filter.is_hot(BlockIndex(block)), "block {}", block);
            }
        }
        prop_assert!(filter.bytes_used() <= 1 << 20, "{} bytes", filter.bytes_used());
    }
}

#[test]
fn blocks_that_are_written_once_are_hardly_ever_called_hot() {
    let mut filter = HeatFilter::default();
    for block in 0..10 * GENERATION_WRITES {
        filter.note(BlockRange::new(block * 37, block * 37 + 1));
    }
    let asked = 100_000;
    let hot = (0..asked).filter(|block| filter.is_hot(BlockIndex(block * 41 + 5))).count();
    assert!(hot as u64 <= asked / 1000, "{hot} of {asked}");
}

#[test]
fn what_is_written_no_more_becomes_cold() {
    let mut filter = HeatFilter::default();
    (0..THRESHOLD).for_each(|_| filter.note(BlockRange::new(7, 8)));
    assert!(filter.is_hot(BlockIndex(7)));
    for block in 0..2 * GENERATION_WRITES {
        filter.note(BlockRange::new(1_000_000 + block, 1_000_001 + block));
    }
    assert!(!filter.is_hot(BlockIndex(7)));
}

#[test]
fn an_empty_filter_takes_nothing_and_calls_nothing_hot() {
    let filter = HeatFilter::default();
    assert_eq!((filter.bytes_used(), filter.is_hot(BlockIndex(0))), (0, false));
}
