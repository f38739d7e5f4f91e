//! The whole state of a volume's units, as entries of a presence file: at most two bits a unit.

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::log::{LogEntry, Packed, UnitMap};
use super::manifest::{put, take};
use super::units::within;
use crate::planted::{Bug, broken};

pub(super) const SEGMENT_UNITS: u64 = 1 << 15;
/// The most bytes of an entry besides its states: its numbers, and the head of its frame.
const ENTRY_BYTES_MAX: u64 = 64;

const PRESENT: u8 = 0;
const MISSING: u8 = 1;
/// Missing, and written last.
const LATE: u8 = 2;
/// Present until the host is started again.
const NOTED: u8 = 3;

/// Returns the bytes of the longest snapshot of a volume.
pub(super) fn bytes_max(units: BlockCount) -> u64 {
    // Two bits a unit.
    units.0.div_ceil(4) + (1 + units.0.div_ceil(SEGMENT_UNITS)) * ENTRY_BYTES_MAX
}

/// Returns the entries that say all of `known`; its noted units are noted for the start `boot` of the host.
pub(super) fn entries(known: &UnitMap, boot: [u8; 16]) -> impl Iterator<Item = LogEntry> {
    let units = known.missing.blocks().0;
    let head = LogEntry::Snapshot { manifest: known.manifest, boot };
    let segments = (0..units).step_by(SEGMENT_UNITS as usize).map(move |start| {
        let segment = BlockRange::new(start, units.min(start + SEGMENT_UNITS));
        LogEntry::States { first: start, states: pack(&states(known, segment)) }
    });
    std::iter::once(head).chain(segments)
}

fn states(known: &UnitMap, segment: BlockRange) -> Vec<u8> {
    let mut states = vec![PRESENT; usize::try_from(segment.len()).unwrap_or(0)];
    let mut set = |units: &LayeredBitmap, state| {
        for run in within(units, segment) {
            let index = |unit: u64| usize::try_from(unit - segment.start.0).unwrap_or(usize::MAX);
            if let Some(part) = states.get_mut(index(run.start.0)..index(run.end.0)) {
                part.fill(state);
            }
        }
    };
    set(&known.missing, MISSING);
    set(&known.late, LATE);
    if broken(Bug::NotesLeftOut) {
        set(&known.volatile, MISSING);
    } else {
        set(&known.volatile, NOTED);
    }
    states
}

/// Packs states as runs, or with two bits each if that is shorter.
fn pack(states: &[u8]) -> Packed {
    let mut runs = Vec::new();
    for run in states.chunk_by(|one, next| one == next) {
        put(&mut runs, ((run.len() as u64) << 2) | u64::from(run[0]));
    }
    if runs.len() <= states.len().div_ceil(4) {
        return Packed::Runs(runs);
    }
    let four = |four: &[u8]| four.iter().rev().fold(0, |bits, state| (bits << 2) | state);
    Packed::Bits(states.chunks(4).map(four).collect())
}

/// Puts the packed states of the segment from `first` on into `known`; returns its end, or `None` if it is malformed.
pub(super) fn unpack(known: &mut UnitMap, first: u64, packed: &Packed, notes_count: bool) -> Option<u64> {
    let end = known.missing.blocks().0.min(first.checked_add(SEGMENT_UNITS)?);
    let mut start = first;
    let mut add = |length: u64, state: u8| {
        let run = BlockRange::new(start, start.checked_add(length).filter(|end_of_run| *end_of_run <= end)?);
        match state {
            PRESENT => {}
            NOTED if notes_count => drop(known.volatile.insert(run)),
            _ => drop(known.missing.insert(run)),
        }
        if state == LATE {
            known.late.insert(run);
        }
        start = run.end.0;
        Some(())
    };
    match packed {
        Packed::Runs(bytes) => {
            let mut bytes = bytes.as_slice();
            while !bytes.is_empty() {
                let run = take(&mut bytes)?;
                add(run >> 2, (run & 3) as u8)?;
            }
        }
        Packed::Bits(bytes) => {
            for unit in 0..end.checked_sub(first)? {
                let byte = bytes.get(usize::try_from(unit / 4).ok()?)?;
                add(1, (byte >> (unit % 4 * 2)) & 3)?;
            }
        }
    }
    (start == end).then_some(end)
}
