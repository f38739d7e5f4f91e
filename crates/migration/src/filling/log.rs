//! The durable record of which units are present: a file that is appended to, and written anew when its space is used up
//! ([`super::presence`]).
//!
//! ```text
//!   header   8 bytes   "STERNAP" and the version │ u64 size of the volume │ 32 bytes identity of the volume
//!   frames   Snapshot, States …: the state of every unit so far
//!   frame    Missing, everything: replaces all earlier updates
//!   frame    Missing, more: blocks that became missing after the last update
//!   frame    Present: durable                                                 … until nothing is missing
//!   frame    Noted: present until the host is started again; only these frames are not synced
//!   zeroes   reserved
//! ```
//! **N.B.** A unit recorded as present must never become missing again: it would be fetched, and newer writes undone. So a file
//! that is damaged, or does not begin with the manifest of the handover, is rejected as a whole (design §5.8). The volume is not
//! served then. A torn end is acceptable, because nothing relied on it.

use chronicle::{BlockRange, LayeredBitmap};
use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use super::snapshot;
use super::units::{units_of, within};
use crate::journal::framing::{self, Ending, Frames};
use crate::planted::{Bug, broken};

const MAGIC: &[u8; 8] = b"STERNAP\x02";
pub(super) const HEADER_BYTES: usize = 48;

/// The known state of a volume's units.
#[derive(Clone, Debug)]
pub struct UnitMap {
    /// The units that are missing.
    pub missing: LayeredBitmap,
    /// The missing units of later updates: these were written last.
    pub late: LayeredBitmap,
    /// The present units not known to be durable: guests wrote them before the previous daemon was killed.
    pub volatile: LayeredBitmap,
    /// The manifest of the blocks missing at the handover.
    pub manifest: Manifest,
}

/// One frame of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogEntry {
    /// These units are missing.
    Missing {
        /// How this set relates to earlier ones.
        telling: Telling,
        /// The missing units, in order.
        runs: Vec<BlockRange>,
    },
    /// These units are present until the host is started again.
    Noted {
        /// The identity of this start of the host.
        boot: [u8; 16],
        /// The present units, in order.
        runs: Vec<BlockRange>,
    },
    /// These units are present, durably.
    Present {
        /// The present units, in order.
        runs: Vec<BlockRange>,
    },
    /// The state of every unit follows, in [`LogEntry::States`].
    Snapshot {
        /// The manifest of the blocks missing at the handover.
        manifest: Manifest,
        /// The start of the host for which units are noted.
        boot: [u8; 16],
    },
    /// The state of units of a snapshot.
    States {
        /// The first of these units.
        first: u64,
        /// The states of these units.
        states: Packed,
    },
}

/// States of units: present, missing, written last, noted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Packed {
    /// Runs of equal states: lengths, with the state in the two lowest bits.
    Runs(Vec<u8>),
    /// Two bits a unit, from the lowest on.
    Bits(Vec<u8>),
}

/// How a missing-set update relates to earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Telling {
    /// A complete set: earlier updates do not count.
    Everything,
    /// A further part of a complete set.
    EverythingGoesOn,
    /// The units that have become missing since.
    Since,
}

/// The reason why a file cannot be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFault {
    /// The file is not a presence file, or has another version.
    #[error("it is no presence file that this program can read")]
    NotOne,
    /// The file belongs to another volume or residency.
    #[error("it belongs to another volume, or to another residency of it")]
    OfAnother,
    /// Some frame of the file is damaged.
    #[error("it is damaged")]
    Damaged,
    /// The file does not begin with the manifest of the handover.
    #[error("it does not record what was missing at the handover")]
    NotTheManifest,
}

/// Returns the header of a file; `whose` identifies one residency of one volume.
pub fn header(size_bytes: u64, whose: [u8; 32]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&size_bytes.to_le_bytes());
    bytes.extend_from_slice(&whose);
    bytes
}

/// Appends an entry as frame number `sequence` to `bytes`; returns whether it fits.
pub fn encode_entry(sequence: u64, entry: &LogEntry, bytes: &mut Vec<u8>) -> bool {
    // Postcard can encode every run.
    let payload = postcard::to_stdvec(entry).unwrap_or_default();
    !payload.is_empty() && framing::append(sequence, &payload, bytes)
}

/// The start of no host: notes do not count. Used to read a store that starts without its host.
pub const NO_START: [u8; 16] = [0xff; 16];

/// Reads a file on a host whose current start is `boot`. Also returns the offset and the number of the next frame.
///
/// # Errors
/// [`LogFault`]: nothing in the file may be relied on.
pub fn replay(
    bytes: &[u8],
    size_bytes: u64,
    whose: [u8; 32],
    boot: [u8; 16],
) -> Result<(UnitMap, usize, u64), LogFault> {
    let (known, position, sequence) = Known::replay(bytes, size_bytes, whose, boot)?;
    Ok((known.units, position, sequence))
}

/// What a file says so far.
#[derive(Debug)]
pub(super) struct Known {
    units: UnitMap,
    /// Whether the manifest must be computed from the missing units.
    is_told: bool,
    /// The first unit of a snapshot whose state must follow; `None`: no snapshot is incomplete.
    follows: Option<u64>,
    /// The start of the host for which the snapshot notes units.
    noted: [u8; 16],
}

impl Known {
    pub(super) fn nothing(size_bytes: u64) -> Self {
        let empty = || LayeredBitmap::new(units_of(size_bytes));
        let (missing, late, volatile) = (empty(), empty(), empty());
        let units = UnitMap { missing, late, volatile, manifest: Manifest::NOTHING };
        Self { units, is_told: false, follows: None, noted: NO_START }
    }

    pub(super) fn units(&mut self) -> &UnitMap {
        self.complete_manifest();
        &self.units
    }

    fn complete_manifest(&mut self) {
        if std::mem::take(&mut self.is_told) {
            self.units.manifest = Manifest::of(&self.units.missing);
        }
    }

    pub(super) fn replay(
        bytes: &[u8],
        size_bytes: u64,
        whose: [u8; 32],
        boot: [u8; 16],
    ) -> Result<(Self, usize, u64), LogFault> {
        let expected = header(size_bytes, whose);
        match bytes.get(..HEADER_BYTES) {
            Some(found) if found == expected => {}
            Some(found) if found[..MAGIC.len()] == *MAGIC => return Err(LogFault::OfAnother),
            _ => return Err(LogFault::NotOne),
        }
        let mut known = Self::nothing(size_bytes);
        let mut frames = Frames::new(&bytes[HEADER_BYTES..], HEADER_BYTES);
        while let Some(payload) = frames.peek() {
            let entry = postcard::from_bytes::<LogEntry>(payload).map_err(|_| LogFault::NotOne)?;
            known.apply(entry, boot)?;
            frames.accept(payload);
        }
        // A mere note may lie behind a part that was lost with the power, because notes are not synced.
        let is_synced = |payload: &[u8]| !matches!(postcard::from_bytes(payload), Ok(LogEntry::Noted { .. }));
        if known.follows.is_some() || frames.ending(is_synced) != Ending::Torn {
            return Err(LogFault::Damaged);
        }
        known.complete_manifest();
        Ok((known, frames.position(), frames.sequence()))
    }

    /// Takes an entry, on a host whose current start is `boot`.
    pub(super) fn apply(&mut self, entry: LogEntry, boot: [u8; 16]) -> Result<(), LogFault> {
        let blocks = self.units.missing.blocks();
        if let LogEntry::Missing { runs, .. } | LogEntry::Present { runs } | LogEntry::Noted { runs, .. } =
            &entry
            && (self.follows.is_some() || runs.iter().any(|run| run.is_empty() || run.end.0 > blocks.0))
        {
            return Err(LogFault::Damaged);
        }
        if !matches!(entry, LogEntry::Missing { .. }) {
            self.complete_manifest();
        }
        match entry {
            LogEntry::Missing { telling, runs } => self.lacks(telling, runs),
            LogEntry::Present { .. } if broken(Bug::PresenceForgotten) => {}
            LogEntry::Present { runs } => {
                for run in runs {
                    self.units.missing.remove(run);
                    self.units.late.remove(run);
                    self.units.volatile.remove(run);
                }
            }
            LogEntry::Noted { boot: noted, .. } if noted != boot || boot == NO_START => {}
            LogEntry::Noted { runs, .. } => {
                let missing = &self.units.missing;
                let written: Vec<_> = runs.into_iter().flat_map(|run| within(missing, run)).collect();
                for run in written {
                    self.units.missing.remove(run);
                    self.units.late.remove(run);
                    self.units.volatile.insert(run);
                }
            }
            LogEntry::Snapshot { manifest, boot } => {
                let UnitMap { missing, late, volatile, .. } = &mut self.units;
                [missing, late, volatile].into_iter().for_each(LayeredBitmap::clear);
                self.units.manifest = manifest;
                (self.follows, self.noted) = (Some(0).filter(|_| blocks.0 > 0), boot);
            }
            LogEntry::States { first, states } => {
                let notes_count = self.noted == boot && boot != NO_START;
                let end = self.follows.filter(|follows| *follows == first);
                let end =
                    end.and_then(|first| snapshot::unpack(&mut self.units, first, &states, notes_count));
                self.follows = Some(end.ok_or(LogFault::Damaged)?).filter(|end| *end < blocks.0);
            }
        }
        Ok(())
    }

    fn lacks(&mut self, telling: Telling, runs: Vec<BlockRange>) {
        let UnitMap { missing, late, volatile, .. } = &mut self.units;
        if telling == Telling::Everything {
            [&mut *missing, late, volatile].into_iter().for_each(LayeredBitmap::clear);
        }
        for run in runs {
            missing.insert(run);
            volatile.remove(run);
            if telling == Telling::Since {
                late.insert(run);
            }
        }
        self.is_told = true;
    }
}
