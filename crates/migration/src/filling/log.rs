//! Which units are present, as it outlasts a daemon: a file that is only ever appended to.
//!
//! ```text
//!   header   8 bytes   "STERNAP" and the version │ u64 size of the volume │ 32 bytes whose it is
//!   frame    Missing, everything: what was told before does not count
//!   frame    Missing, too: what has become missing since
//!   frame    Present: durable by now                                          … until nothing is missing
//!   frame    Noted: present as long as the host has not been started again; only these are not synced
//! ```
//! **N.B.** A unit that is present here must never be missing again: it would be fetched, and newer writes undone. So a file
//! that is damaged, or that does not begin with the manifest of the handover, is not read as far as it goes, but not at all
//! (design §5.8); the volume is not served then. What is cut off at the end was never relied on.

use chronicle::{BlockRange, LayeredBitmap};
use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use super::units::units_of;
use crate::journal::framing::{self, Ending, Frames};
use crate::planted::{Bug, broken};

const MAGIC: &[u8; 8] = b"STERNAP\x01";
/// Length of the header.
const HEADER_BYTES: usize = 48;

/// What is known of a volume's units.
#[derive(Clone, Debug)]
pub struct UnitMap {
    /// What is missing.
    pub missing: LayeredBitmap,
    /// Of that, what was told after the first telling: it was written last.
    pub late: LayeredBitmap,
    /// What is present, and not known to be durable: guests wrote it, and the daemon that knew of it was killed.
    pub volatile: LayeredBitmap,
    /// What was missing at the handover.
    pub manifest: Manifest,
}

/// One frame of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogEntry {
    /// These units are missing.
    Missing {
        /// Besides which others.
        telling: Telling,
        /// The units.
        runs: Vec<BlockRange>,
    },
    /// These units are present until the host is started again.
    Noted {
        /// This start of the host.
        boot: [u8; 16],
        /// The units.
        runs: Vec<BlockRange>,
    },
    /// These units are present, durably.
    Present {
        /// The units.
        runs: Vec<BlockRange>,
    },
}

/// What is told to be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Telling {
    /// Everything: nothing that was told before counts.
    Everything,
    /// More of that.
    EverythingGoesOn,
    /// What has become missing since.
    Since,
}

/// Why a file cannot be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFault {
    /// It is not a file of presence, or of another version.
    #[error("it is no file of presence that this program reads")]
    NotOne,
    /// It belongs to another volume, or stay.
    #[error("it belongs to another volume, or to another stay of it")]
    OfAnother,
    /// Something in it is damaged.
    #[error("it is damaged")]
    Damaged,
    /// It does not begin with what was missing at the handover.
    #[error("it does not have what was missing at the handover")]
    NotTheManifest,
}

/// What a file begins with; `whose` is the same for all that belongs to one stay of one volume.
pub fn header(size_bytes: u64, whose: [u8; 32]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&size_bytes.to_le_bytes());
    bytes.extend_from_slice(&whose);
    bytes
}

/// Appends an entry as the frame number `sequence` to `bytes`; returns whether it fits.
pub fn encode_entry(sequence: u64, entry: &LogEntry, bytes: &mut Vec<u8>) -> bool {
    // Runs have nothing that postcard cannot encode.
    let payload = postcard::to_stdvec(entry).unwrap_or_default();
    !payload.is_empty() && framing::append(sequence, &payload, bytes)
}

/// No start of a host: nothing counts that was only noted. So is read what a store has that starts without its host.
pub const NO_START: [u8; 16] = [0xff; 16];

/// Reads a file, on a host whose present start is `boot`; also returns where the next frame goes, and its number.
///
/// # Errors
/// [`LogFault`]: nothing of it may be believed.
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
    // What was only noted may lie behind what a loss of power has cut off: it was not synced.
    let is_synced = |payload: &[u8]| !matches!(postcard::from_bytes(payload), Ok(LogEntry::Noted { .. }));
    if frames.ending(is_synced) != Ending::Torn {
        return Err(LogFault::Damaged);
    }
    let manifest = Manifest::of(&told);
    Ok((UnitMap { missing, late, volatile, manifest }, frames.position(), frames.sequence()))
}
