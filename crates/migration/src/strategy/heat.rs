//! Detects hot blocks, which guests write again and again, with the multi-stage filter of \[ESX\] §2.3.3.
//!
//! ```text
//!   a block ──hash──► stage 0  … 3 0 1 7 …     a write raises those of its counters that are lowest (conservative
//!                ├──► stage 1  … 0 4 3 2 …     update): none of them is ever less than the times it was written
//!                └──► stage 2  … 9 3 0 5 …     hot: the lowest of them is at least the threshold
//! ```
//! There are two generations of counters: when one has counted [`GENERATION_WRITES`], the older one is cleared (ageing). A
//! block written [`THRESHOLD`] times within that many writes always counts as hot. A block written less often hardly ever does,
//! as long as there are more counters than counted writes.
//!
//! The memory is fixed, whatever the volume's size. A table with a count for each block would grow with the volume.

use chronicle::{BlockIndex, BlockRange};

/// The arrays of counters, each with its own hash function: enough that hardly any block shares all its counters with others.
const STAGES: usize = 3;
const COUNTERS: usize = 1 << COUNTER_BITS;
const COUNTER_BITS: u32 = 17;
const GENERATIONS: usize = 2;
/// The writes that make a block hot: two may be chance.
pub const THRESHOLD: u32 = 3;
/// The writes of single blocks that a generation counts: the number of counters in a stage.
pub const GENERATION_WRITES: u64 = COUNTERS as u64;

const BYTES_MAX: usize = 1 << 20;
const _: () = assert!(GENERATIONS * STAGES * COUNTERS * size_of::<Counter>() <= BYTES_MAX);
const _: () = assert!(STAGES as u32 * COUNTER_BITS <= u64::BITS, "one hash names a counter of each stage");

/// It saturates at the highest value.
type Counter = u8;

/// Counts, roughly, how often each block of a volume was written recently.
#[derive(Debug, Default)]
pub struct HeatFilter {
    present: Generation,
    former: Generation,
    counted: u64,
}

/// The counters of all stages, in order; empty before the first write.
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

    /// Returns whether a block counts as hot.
    pub fn is_hot(&self, block: BlockIndex) -> bool {
        self.times(block) >= THRESHOLD
    }

    /// Returns whether each of these blocks was written at least `times` times recently.
    pub fn were_written(&self, blocks: BlockRange, times: u32) -> bool {
        blocks.iter().all(|block| self.times(block) >= times)
    }

    /// Returns the first blocks of a run with the same heat as its first block; a block written `times` times is hot.
    pub fn alike(&self, run: BlockRange, times: u32) -> (BlockRange, Heat) {
        let is_hot = |block| self.times(block) >= times;
        let first = is_hot(run.start);
        let other = run.iter().skip(1).find(|block| is_hot(*block) != first);
        let heat = if first { Heat::Hot } else { Heat::Cold };
        (BlockRange { end: other.unwrap_or(run.end), ..run }, heat)
    }

    /// Returns how often a block was written recently: never too low, hardly ever too high.
    fn times(&self, block: BlockIndex) -> u32 {
        self.present.at_least(block) + self.former.at_least(block)
    }

    /// Returns the memory of the filter, in bytes.
    pub fn bytes_used(&self) -> usize {
        (self.present.0.capacity() + self.former.0.capacity()) * size_of::<Counter>()
    }
}

/// Whether blocks are written again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heat {
    /// The blocks are hot.
    Hot,
    /// The blocks are cold.
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

    /// Returns the block's count, never too low, up to the highest value.
    fn at_least(&self, block: BlockIndex) -> u32 {
        let counters = places(block).into_iter().filter_map(|place| self.0.get(place).copied());
        counters.min().unwrap_or_default().into()
    }
}

fn places(block: BlockIndex) -> [usize; STAGES] {
    // SplitMix64: it scatters neighbours, which guests write together.
    let mut mixed = block.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    let counter = |stage: usize| (mixed >> (stage as u32 * COUNTER_BITS)) as usize & (COUNTERS - 1);
    std::array::from_fn(|stage| stage * COUNTERS + counter(stage))
}
