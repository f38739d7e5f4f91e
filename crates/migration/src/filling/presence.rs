//! The writer's side of a presence file ([`super::log`]): what is appended, and when the file is written anew.
//!
//! ```text
//!   entry ──► known ──┬─ fits ────────────────────────► appended
//!                     └─ no room, or a write failed ──► anew: snapshot into the spare file, then the names are exchanged
//! ```
//! A presence file and its spare are made and reserved before the volume is taken: both have [`PresenceFile::reserved`] bytes, and
//! no snapshot needs more. So a full data folder cannot keep a guest's write from being recorded. The writer never reads the file
//! again: after a failed sync its pages may hold what the disk does not, or the reverse.

use super::log::{HEADER_BYTES, Known, LogEntry, LogFault, encode_entry, header};
use super::snapshot;
use super::units::units_of;
use crate::planted::{Bug, broken};

/// The bytes of entries that a file takes at least before it is written anew.
const ENTRIES_BYTES: u64 = 64 << 10;

/// A presence file, as its writer knows it.
#[derive(Debug)]
pub struct PresenceFile {
    size_bytes: u64,
    whose: [u8; 32],
    boot: [u8; 16],
    known: Known,
    /// The offset and the number of the next frame.
    position: u64,
    sequence: u64,
    reserved: u64,
    /// Whether the content of the file is unknown: the next write replaces it.
    is_doubted: bool,
}

/// A write to a presence file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PresenceWrite {
    /// Write the bytes at this offset.
    Append {
        /// The offset of the first byte.
        at: u64,
        /// The bytes of the entry.
        bytes: Vec<u8>,
    },
    /// Write these bytes to the spare file, with zeroes behind them, sync it, and let it take the place of the file.
    Anew(Vec<u8>),
}

impl PresenceFile {
    /// Begins the file of a residency, on a host whose current start is `boot`.
    pub fn begin(size_bytes: u64, whose: [u8; 32], boot: [u8; 16]) -> Self {
        let known = Known::nothing(size_bytes);
        let reserved = Self::reserved(size_bytes);
        Self { size_bytes, whose, boot, known, position: 0, sequence: 0, reserved, is_doubted: true }
    }

    /// Lets the file have these bytes in place of [`PresenceFile::reserved`], or as many as it needs.
    pub fn limited_to(self, bytes: u64) -> Self {
        Self { reserved: bytes.max(Self::snapshot_max(self.size_bytes)), ..self }
    }

    /// Continues a file that an earlier process wrote.
    ///
    /// # Errors
    /// [`LogFault`]: nothing in the file may be relied on.
    pub fn found(bytes: &[u8], size_bytes: u64, whose: [u8; 32], boot: [u8; 16]) -> Result<Self, LogFault> {
        let (known, ..) = Known::replay(bytes, size_bytes, whose, boot)?;
        Ok(Self { known, ..Self::begin(size_bytes, whose, boot) })
    }

    /// Returns the bytes to reserve for the file, and once more for its spare.
    pub fn reserved(size_bytes: u64) -> u64 {
        let snapshot = Self::snapshot_max(size_bytes);
        snapshot + (snapshot / 2).max(ENTRIES_BYTES)
    }

    /// Returns the bytes that the file never exceeds.
    pub fn limit(&self) -> u64 {
        self.reserved
    }

    fn snapshot_max(size_bytes: u64) -> u64 {
        HEADER_BYTES as u64 + snapshot::bytes_max(units_of(size_bytes))
    }

    /// Returns the write that adds an entry. The entry must be true already, because a later write repeats it if this one fails.
    ///
    /// # Errors
    /// [`LogFault`]: the entry does not fit the volume.
    pub fn add(&mut self, entry: LogEntry) -> Result<PresenceWrite, LogFault> {
        let mut bytes = Vec::new();
        let is_encoded = encode_entry(self.sequence, &entry, &mut bytes);
        self.known.apply(entry, self.boot)?;
        let end = self.position + bytes.len() as u64;
        let has_room = end <= self.reserved || broken(Bug::PresenceNeedsSpace);
        if is_encoded && has_room && !self.is_doubted {
            let at = self.position;
            (self.position, self.sequence) = (end, self.sequence + 1);
            return Ok(PresenceWrite::Append { at, bytes });
        }
        Ok(self.anew())
    }

    /// Notes that the last write failed.
    pub fn failed(&mut self) {
        self.is_doubted = true;
    }

    fn anew(&mut self) -> PresenceWrite {
        let mut bytes = header(self.size_bytes, self.whose);
        let mut sequence = 0;
        for entry in snapshot::entries(self.known.units(), self.boot) {
            // Every entry of a snapshot is far smaller than a frame.
            let is_encoded = encode_entry(sequence, &entry, &mut bytes);
            debug_assert!(is_encoded);
            sequence += 1;
        }
        (self.position, self.sequence, self.is_doubted) = (bytes.len() as u64, sequence, false);
        PresenceWrite::Anew(bytes)
    }
}

#[cfg(test)]
mod tests {
    use chronicle::BlockRange;

    use super::super::{Telling, UNIT_BYTES, replay};
    use super::*;

    const UNITS: u64 = 3 * snapshot::SEGMENT_UNITS + 5;
    const SIZE: u64 = UNITS * UNIT_BYTES;
    const WHOSE: [u8; 32] = [7; 32];
    const BOOT: [u8; 16] = [3; 16];

    fn one(unit: u64) -> Vec<BlockRange> {
        vec![BlockRange::new(unit, unit + 1)]
    }

    fn all_missing() -> LogEntry {
        LogEntry::Missing { telling: Telling::Everything, runs: vec![BlockRange::new(0, UNITS)] }
    }

    /// The file, as far as it is written.
    fn put(file: &mut Vec<u8>, write: PresenceWrite) -> bool {
        match write {
            PresenceWrite::Anew(bytes) => {
                *file = bytes;
                true
            }
            PresenceWrite::Append { at, bytes } => {
                file.truncate(usize::try_from(at).unwrap());
                file.extend(bytes);
                false
            }
        }
    }

    #[test]
    fn a_file_never_outgrows_its_reservation_and_says_the_same_however_often_it_is_written_anew() {
        let (mut log, mut file) = (PresenceFile::begin(SIZE, WHOSE, BOOT), Vec::new());
        put(&mut file, log.add(all_missing()).unwrap());
        let manifest = replay(&file, SIZE, WHOSE, BOOT).unwrap().0.manifest;
        let mut anew = 0;
        // Every other unit: the longest snapshot.
        for unit in (0..UNITS).step_by(2) {
            let runs = one(unit);
            let entry =
                if unit % 4 == 0 { LogEntry::Present { runs } } else { LogEntry::Noted { boot: BOOT, runs } };
            anew += u64::from(put(&mut file, log.add(entry).unwrap()));
            assert!(file.len() as u64 <= PresenceFile::reserved(SIZE), "unit {unit}: {} bytes", file.len());
        }
        assert!(anew > 1, "written anew {anew} times");
        file.extend([0; 500]);
        let (found, ..) = replay(&file, SIZE, WHOSE, BOOT).unwrap();
        assert_eq!(found.missing.count(), UNITS / 2);
        assert_eq!(found.volatile.count(), UNITS / 4);
        assert_eq!(found.manifest, manifest);
        let (after_boot, ..) = replay(&file, SIZE, WHOSE, [4; 16]).unwrap();
        assert_eq!(after_boot.missing.count(), UNITS / 2 + UNITS / 4, "notes are for one start of the host");
    }

    #[test]
    fn what_was_added_before_a_failed_write_is_written_again() {
        let (mut log, mut file) = (PresenceFile::begin(SIZE, WHOSE, BOOT), Vec::new());
        put(&mut file, log.add(all_missing()).unwrap());
        let durable = file.len();
        put(&mut file, log.add(LogEntry::Noted { boot: BOOT, runs: one(1) }).unwrap());
        log.add(LogEntry::Present { runs: one(2) }).unwrap();
        log.failed();
        // The note was never synced, and the page that had it is gone.
        file.truncate(durable);
        assert!(put(&mut file, log.add(LogEntry::Present { runs: one(3) }).unwrap()));
        let (found, ..) = replay(&file, SIZE, WHOSE, BOOT).unwrap();
        assert_eq!(found.missing.count(), UNITS - 3);
        assert_eq!(found.volatile.count(), 1);
    }

    #[test]
    fn a_snapshot_that_lacks_a_part_is_not_believed() {
        let (mut log, mut file) = (PresenceFile::begin(SIZE, WHOSE, BOOT), Vec::new());
        put(&mut file, log.add(all_missing()).unwrap());
        for length in [100, file.len() - 1] {
            assert!(replay(&file[..length], SIZE, WHOSE, BOOT).is_err(), "{length} of {} bytes", file.len());
        }
    }
}
