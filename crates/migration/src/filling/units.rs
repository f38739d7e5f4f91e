//! Units of 4 KiB, in which a filling counts.

use chronicle::{BlockCount, BlockRange, BlockSize, ByteRange, LayeredBitmap};

/// One unit. The align filter rounds every request to units, so that none covers part of one.
pub const UNIT: BlockSize = match BlockSize::new(BlockSize::MIN_BYTES) {
    Ok(unit) => unit,
    Err(_) => BlockSize::DEFAULT,
};

/// The bytes of one unit.
pub const UNIT_BYTES: u64 = UNIT.bytes();

/// Returns the number of units of a volume of `size_bytes` bytes; the last one may be partial.
pub const fn units_of(size_bytes: u64) -> BlockCount {
    UNIT.blocks_of(size_bytes)
}

pub(super) fn covering(range: ByteRange) -> BlockRange {
    UNIT.covering(range.offset, range.length)
}

/// Returns the bytes of these units, cut to the volume's size.
pub(super) fn bytes_of(units: BlockRange, size_bytes: u64) -> ByteRange {
    let (offset, length) = UNIT.byte_range(units);
    ByteRange::new(offset, length.min(size_bytes.saturating_sub(offset)))
}

/// Returns the runs of a set within a range, in order.
pub(super) fn within(set: &LayeredBitmap, range: BlockRange) -> Vec<BlockRange> {
    let mut runs = Vec::new();
    let mut rest = range;
    while let Some(run) = set.next_run(rest.start, rest.len()) {
        let run = run.intersect(&range);
        if run.is_empty() {
            break;
        }
        runs.push(run);
        rest.start = run.end;
    }
    runs
}

/// Returns the runs of a range that a set does not have, in order.
pub(super) fn within_complement(set: &LayeredBitmap, range: BlockRange) -> Vec<BlockRange> {
    let mut runs = Vec::new();
    let mut start = range.start;
    for run in within(set, range) {
        runs.push(BlockRange { start, end: run.start });
        start = run.end;
    }
    runs.push(BlockRange { start, end: range.end });
    runs.retain(|run| !run.is_empty());
    runs
}

pub(super) fn without(run: BlockRange, busy: BlockRange) -> impl Iterator<Item = BlockRange> {
    let before = BlockRange { start: run.start, end: run.end.min(busy.start) };
    let after = BlockRange { start: run.start.max(busy.end), end: run.end };
    let parts = if run.overlaps(&busy) { [before, after] } else { [run, BlockRange::default()] };
    parts.into_iter().filter(|part| !part.is_empty())
}
