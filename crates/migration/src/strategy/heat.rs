//! Which blocks guests write again and again: the multi-stage filter of \[ESX\] §2.3.3.
//!
//! ```text
//!   a block ──hash──► stage 0  … 3 0 1 7 …     a write raises those of its counters that are lowest (conservative
//!                ├──► stage 1  … 0 4 3 2 …     update): none of them is ever less than the times it was written
//!                └──► stage 2  … 9 3 0 5 …     hot: the lowest of them is at least the threshold
//! ```
//! There are two generations of counters: when one has counted [`GENERATION_WRITES`] the older one is forgotten (ageing). What
//! was written [`THRESHOLD`] times within the last so many writes is always called hot; a block that was written less is called
//! hot hardly ever, while the counters are more than the writes that they count.
//!
//! It takes a fixed memory whatever the volume's size: a table of each block's count would not.

use chronicle::{BlockIndex, BlockRange};

/// Arrays of counters, each with a hash function of its own: with so many hardly any block has only counters that others
/// have raised.
const STAGES: usize = 3;
/// Counters of one stage.
const COUNTERS: usize = 1 << COUNTER_BITS;
const COUNTER_BITS: u32 = 17;
/// Generations of counters that are looked at.
const GENERATIONS: usize = 2;
/// Times that a block has to be written to be hot: twice may be chance.
pub const THRESHOLD: u32 = 3;
/// Writes of single blocks that a generation counts: as many as a stage has counters.
pub const GENERATION_WRITES: u64 = COUNTERS as u64;

/// Bytes that a filter may take.
const BYTES_MAX: usize = 1 << 20;
const _: () = assert!(GENERATIONS * STAGES * COUNTERS * size_of::<Counter>() <= BYTES_MAX);
const _: () = assert!(STAGES as u32 * COUNTER_BITS <= u64::BITS, "one hash names a counter of each stage");

/// It stays at its highest when it is there.
type Counter = u8;

/// Counts, roughly, how often each block of a volume was written of late.
#[derive(Debug, Default)]
pub struct HeatFilter {
    present: Generation,
    former: Generation,
    /// Writes that the present one has counted.
    counted: u64,
}

/// The counters of all stages, one after the other; empty before the first write.
#[derive(Debug, Default)]
struct Generation(Vec<Counter>);

impl HeatFilter {
    /// Counts a write to these blocks.
    pub fn note(&mut self, blocks: BlockRange) {
        for block in blocks.iter() {
            if self.counted == GENERATION_WRITES {
                std::mem::swap(&mut self.present, &mut self.former);
                self.present.0.fill(0);
                self.counted = 0;
            }
            self.present.note(block);
            self.counted += 1;
        }
    }

    /// Tells whether a block is written again and again.
    pub fn is_hot(&self, block: BlockIndex) -> bool {
        self.times(block) >= THRESHOLD
    }

    /// Tells whether all of these blocks were written so many times of late, or more.
    pub fn were_written(&self, blocks: BlockRange, times: u32) -> bool {
        blocks.iter().all(|block| self.times(block) >= times)
    }

    /// The first blocks of a run that are as hot, or not, as its first one, if hot is what was written so many times.
    pub fn alike(&self, run: BlockRange, times: u32) -> (BlockRange, Heat) {
        let is_hot = |block| self.times(block) >= times;
        let first = is_hot(run.start);
        let other = run.iter().skip(1).find(|block| is_hot(*block) != first);
        let heat = if first { Heat::Hot } else { Heat::Cold };
        (BlockRange { end: other.unwrap_or(run.end), ..run }, heat)
    }

    /// How often a block was written of late: no less than that, hardly ever more.
    fn times(&self, block: BlockIndex) -> u32 {
        self.present.at_least(block) + self.former.at_least(block)
    }

    /// The memory that it takes, in bytes.
    pub fn bytes_used(&self) -> usize {
        (self.present.0.capacity() + self.former.0.capacity()) * size_of::<Counter>()
    }
}

/// Whether blocks are written again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heat {
    /// They are.
    Hot,
    /// They are not.
    Cold,
}

impl Generation {
    fn note(&mut self, block: BlockIndex) {
        if self.0.is_empty() {
            self.0 = vec![0; STAGES * COUNTERS];
        }
        let places = places(block);
        let lowest = places.into_iter().filter_map(|place| self.0.get(place).copied()).min();
        let raised = lowest.unwrap_or_default().saturating_add(1);
        for place in places {
            if let Some(counter) = self.0.get_mut(place) {
                *counter = raised.max(*counter);
            }
        }
    }

    /// No less than the times that the block was written, up to the highest count.
    fn at_least(&self, block: BlockIndex) -> u32 {
        let counters = places(block).into_iter().filter_map(|place| self.0.get(place).copied());
        counters.min().unwrap_or_default().into()
    }
}

/// Where the counters of a block are, one of each stage.
fn places(block: BlockIndex) -> [usize; STAGES] {
    // SplitMix64: neighbours, as guests write them, are scattered.
    let mut mixed = block.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    let counter = |stage: usize| (mixed >> (stage as u32 * COUNTER_BITS)) as usize & (COUNTERS - 1);
    std::array::from_fn(|stage| stage * COUNTERS + counter(stage))
}
