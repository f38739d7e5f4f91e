//! The list of the blocks that a target lacks at a handover, and its encoding on the way from the source.
//!
//! The source sends two missing-set updates: a complete set while the guests work, and later changes behind the closed gate. An
//! update is sent in pieces. Once the target has answered the last piece, the update is durable there.

use chronicle::{BlockRange, ByteRange, LayeredBitmap};

use super::units::{UNIT, UNIT_BYTES, covering, units_of};

/// Identifies the missing units of a volume at a handover. Both sides compute it, and a promise bears it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Manifest {
    /// The number of missing units.
    pub units: u64,
    /// The CRC-32C of their runs.
    pub checksum: u32,
}

impl Manifest {
    /// The manifest of a volume that lacks nothing.
    pub const NOTHING: Self = Self { units: 0, checksum: 0 };

    /// Returns the manifest of these missing units.
    pub fn of(missing: &LayeredBitmap) -> Self {
        let checksum = missing.runs().fold(0, |checksum, run| {
            let checksum = crc32c::crc32c_append(checksum, &run.start.0.to_le_bytes());
            crc32c::crc32c_append(checksum, &run.end.0.to_le_bytes())
        });
        Self { units: missing.count(), checksum }
    }
}

/// Encodes runs, in order and not adjacent, as gaps and lengths. Returns at least one piece, each of at most `bytes_max` bytes.
pub fn encode_runs(runs: impl Iterator<Item = BlockRange>, bytes_max: usize) -> Vec<Vec<u8>> {
    let mut pieces = vec![Vec::new()];
    let mut last = 0;
    for run in runs {
        // Two numbers of at most ten bytes.
        if pieces.last().is_some_and(|piece| piece.len() + 20 > bytes_max) {
            pieces.push(Vec::new());
            last = 0;
        }
        if let Some(piece) = pieces.last_mut() {
            put(piece, run.start.0 - last);
            put(piece, run.len());
        }
        last = run.end.0;
    }
    pieces
}

/// Decodes the runs of a piece; `None` if the bytes are malformed or exceed this volume.
pub fn decode_runs(mut bytes: &[u8], size_bytes: u64) -> Option<Vec<BlockRange>> {
    let units = units_of(size_bytes).0;
    let (mut runs, mut last) = (Vec::new(), 0_u64);
    while !bytes.is_empty() {
        let start = last.checked_add(take(&mut bytes)?)?;
        let length = take(&mut bytes)?;
        let end = start.checked_add(length)?;
        if length == 0 || end > units {
            return None;
        }
        runs.push(BlockRange::new(start, end));
        last = end;
    }
    Some(runs)
}

/// Converts a set of blocks of another size to units.
pub fn to_units(blocks: &LayeredBitmap, block_bytes: u64, size_bytes: u64) -> LayeredBitmap {
    let mut units = LayeredBitmap::new(units_of(size_bytes));
    if block_bytes == UNIT_BYTES && blocks.blocks() == units.blocks() {
        return blocks.clone();
    }
    debug_assert!(block_bytes.is_multiple_of(UNIT.bytes()));
    for run in blocks.runs() {
        let offset = run.start.0.saturating_mul(block_bytes);
        let length = run.len().saturating_mul(block_bytes).min(size_bytes.saturating_sub(offset));
        units.insert(covering(ByteRange::new(offset, length)));
    }
    units
}

pub(super) fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        number |= part << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
