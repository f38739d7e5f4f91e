//! A volume that is being filled, for tests.

use chronicle::{BlockRange, ByteRange, LayeredBitmap};
use migration::PacingSettings;
use migration::filling::{Filling, FillingSettings, Manifest, Told, UNIT_BYTES, UnitMap, units_of};

pub(crate) const UNITS: u64 = 8;

pub(crate) fn units(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start * UNIT_BYTES, (end - start) * UNIT_BYTES)
}

/// Returns a filling that lacks all but its first unit.
pub(crate) fn filling(pacing: PacingSettings) -> Filling {
    let size_bytes = UNITS * UNIT_BYTES;
    let empty = || LayeredBitmap::new(units_of(size_bytes));
    let mut missing = empty();
    missing.insert(BlockRange::new(1, UNITS));
    let manifest = Manifest::of(&missing);
    let known = UnitMap { missing, late: empty(), volatile: empty(), manifest };
    Told::new(size_bytes, Some(known)).begin(FillingSettings { size_bytes, pacing })
}
