//! The durable record of which units are present: a file that is only appended to.
//!
//! ```text
//!   header   8 bytes   "STERNAP" and the version │ u64 size of the volume │ 32 bytes identity of the volume
//!   frame    Missing, everything: replaces all earlier updates
//!   frame    Missing, more: blocks that became missing after the last update
//!   frame    Present: durable                                                 … until nothing is missing
//!   frame    Noted: present until the host is started again; only these frames are not synced
//! ```
//! **N.B.** A unit recorded as present must never become missing again: it would be fetched, and newer writes undone. So a file
//! that is damaged, or does not begin with the manifest of the handover, is rejected as a whole (design §5.8). The volume is not
//! served then. A torn end is acceptable, because nothing relied on it.

use chronicle::{BlockRange, LayeredBitmap};
use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use super::units::units_of;
use crate::journal::framing::{self, Ending, Frames};
use crate::planted::{Bug, broken};

const MAGIC: &[u8; 8] = b"STERNAP\x01";
const HEADER_BYTES: usize = 48;

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
    let expected = header(size_bytes, whose);
    match bytes.get(..HEADER_BYTES) {
        Some(found) if found == expected => {}
        Some(found) if found[..MAGIC.len()] == *MAGIC => return Err(LogFault::OfAnother),
        _ => return Err(LogFault::NotOne),
    }
    let units = units_of(size_bytes);
    let empty = || LayeredBitmap::new(units);
    let (mut missing, mut late, mut told, mut volatile) = (empty(), empty(), empty(), empty());
    let mut frames = Frames::new(&bytes[HEADER_BYTES..], HEADER_BYTES);
    while let Some(payload) = frames.peek() {
        let Ok(entry) = postcard::from_bytes::<LogEntry>(payload) else { return Err(LogFault::NotOne) };
        let (LogEntry::Missing { runs, .. } | LogEntry::Present { runs } | LogEntry::Noted { runs, .. }) =
            &entry;
        if runs.iter().any(|run| run.is_empty() || run.end.0 > units.0) {
            return Err(LogFault::Damaged);
        }
        match entry {
            LogEntry::Missing { telling, runs } => {
                if telling == Telling::Everything {
                    (missing, late, told, volatile) = (empty(), empty(), empty(), empty());
                }
                for run in runs {
                    missing.insert(run);
                    told.insert(run);
                    if telling == Telling::Since {
                        late.insert(run);
                    }
                }
            }
            LogEntry::Present { .. } if broken(Bug::PresenceForgotten) => {}
            LogEntry::Present { runs } => {
                for run in runs {
                    missing.remove(run);
                    late.remove(run);
                    volatile.remove(run);
                }
            }
            LogEntry::Noted { boot: noted, .. } if noted != boot || boot == NO_START => {}
            LogEntry::Noted { runs, .. } => {
                for run in runs {
                    missing.remove(run);
                    late.remove(run);
                    volatile.insert(run);
                }
            }
        }
        frames.accept(payload);
    }
    // A mere note may lie behind a part that was lost with the power, because notes are not synced.
    let is_synced = |payload: &[u8]| !matches!(postcard::from_bytes(payload), Ok(LogEntry::Noted { .. }));
    if frames.ending(is_synced) != Ending::Torn {
        return Err(LogFault::Damaged);
    }
    let manifest = Manifest::of(&told);
    Ok((UnitMap { missing, late, volatile, manifest }, frames.position(), frames.sequence()))
}
