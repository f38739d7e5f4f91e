//! Measures the chronicle: the cost of recording a write, the cost of scanning a large disk, and memory use.
//!
//! The disk has 16 TiB, of which 0.1 % is dirty. Two layouts are measured: random single blocks, where layering does not help,
//! and clusters of 64 blocks, which resemble guest writes. The memory of a flat bitmap is printed for comparison.

use std::hint::black_box;

use chronicle::{BlockCount, BlockIndex, BlockRange, BlockSize, Chronicle, Epoch, LayeredBitmap};
use criterion::{Criterion, criterion_group, criterion_main};

criterion_group!(benches, recording, scanning);
criterion_main!(benches);

const DISK_BYTES: u64 = 16 << 40;

/// One block in this many is dirty.
const DIRTY_ONE_IN: u64 = 1000;

const CLUSTER_BLOCKS: u64 = 64;

/// The block sizes measured: the default one, and the former default.
const BLOCK_BYTES: [u32; 2] = [4 << 10, 64 << 10];

fn recording(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("record");
    for block_bytes in BLOCK_BYTES {
        let block_size = BlockSize::new(block_bytes).unwrap_or(BlockSize::DEFAULT);
        let kib = block_bytes >> 10;
        let mut chronicle = Chronicle::new(block_size, DISK_BYTES, Epoch(1));
        let mut random = Random(1);
        // The part is warm: 8 KiB of each 64 KiB of its 4 GiB have been written. One in eight is left out, so that
        // nothing is full.
        let offsets = (0..65_536).map(|place| place << 16).collect::<Vec<u64>>();
        for offset in offsets.iter().filter(|&offset| (offset >> 16) % 8 != 0) {
            let _ = chronicle.record(*offset, 8192);
        }
        group.bench_function(format!("{kib} KiB blocks, 8 KiB again into a warm part"), |bencher| {
            bencher.iter(|| {
                let place = random.below(8192) * 8 + 1;
                black_box(chronicle.record(black_box(place << 16), 8192)).ok()
            });
        });
        let mut fresh = Chronicle::new(block_size, DISK_BYTES, Epoch(1));
        let mut written = 0_u64;
        let anywhere = format!("{kib} KiB blocks, 8 KiB anywhere on 16 TiB, epoch advanced every 100,000");
        group.bench_function(anywhere, |bencher| {
            bencher.iter(|| {
                written += 1;
                if written.is_multiple_of(100_000) {
                    fresh.advance();
                    fresh.merge_unreferenced(&[]);
                }
                black_box(fresh.record(random.below(DISK_BYTES), 8192))
            });
        });
    }
    group.finish();
}

fn scanning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan 16 TiB, 0.1 % dirty");
    group.sample_size(10);
    for block_bytes in BLOCK_BYTES {
        let blocks = DISK_BYTES / u64::from(block_bytes);
        for (name, bitmap) in [("random", dirty(blocks, 1)), ("clustered", dirty(blocks, CLUSTER_BLOCKS))] {
            let name = format!("{} KiB blocks, {name}", block_bytes >> 10);
            let runs = bitmap.runs().count();
            let (used, flat) = (bitmap.bytes_used() >> 10, blocks >> 13);
            println!("{name}: {} blocks in {runs} runs, {used} KiB used (flat: {flat} KiB)", bitmap.count());
            group.bench_function(format!("{name}, every run"), |bencher| {
                bencher.iter(|| bitmap.runs().map(|run| run.len()).sum::<u64>());
            });
        }
    }
    let mut nearly_clean = LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(DISK_BYTES));
    nearly_clean.insert(BlockRange::new(nearly_clean.blocks().0 - 1, nearly_clean.blocks().0));
    group.bench_function("4 KiB blocks, one dirty at the end", |bencher| {
        bencher.iter(|| nearly_clean.next_run(black_box(BlockIndex(0)), 1));
    });
    group.finish();
}

/// Returns a bitmap with one dirty block in a thousand, in aligned clusters of a given length.
fn dirty(blocks: u64, cluster_blocks: u64) -> LayeredBitmap {
    let mut bitmap = LayeredBitmap::new(BlockCount(blocks));
    let mut random = Random(42);
    while bitmap.count() < blocks / DIRTY_ONE_IN {
        let start = random.below(blocks / cluster_blocks) * cluster_blocks;
        bitmap.insert(BlockRange::new(start, start + cluster_blocks));
    }
    bitmap
}

/// A small generator (splitmix64), so that every run measures the same disk.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(mixed ^ (mixed >> 31)) * u128::from(limit)) >> 64) as u64
    }
}
