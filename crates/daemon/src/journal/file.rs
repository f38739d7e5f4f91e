//! The journal's file: read as a whole at the start, replaced as a whole when it is compacted, appended to between.
//!
//! Its space is zeroed beforehand, so that an append changes no metadata of the file system and costs one flush of the
//! disk (44 µs instead of 69 µs here). An append that fails is wiped out again; only if that fails too is it unknown
//! what a restart will find.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use migration::journal::{CodecError, Ending, Entry, Frames, HEADER, State, VERSION, encode};
use rustix::fs::OFlags;

use super::JournalError;
use crate::fail_point::{self, Step};
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file::{Left, believe};

/// Size beyond which the journal is compacted as soon as no migration would have to wait for it.
pub(super) const COMPACT_BYTES: usize = 1 << 20;
/// Room behind a snapshot. What is beyond [`COMPACT_BYTES`] is for the migrations under way: thousands of commits.
const ROOM_BYTES: usize = 2 << 20;
/// Largest journal that is read: the largest snapshot and its room, twice.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// What the writer needs of a file; tests have one that fails.
pub(super) trait Storage: Sized {
    /// Writes all of `bytes` at `position`, durably.
    fn write_at(&self, position: usize, bytes: &[u8]) -> io::Result<()>;

    /// Bytes that are preallocated.
    fn capacity(&self) -> usize;

    /// Replaces the file by one that holds `state` alone, and says where the next frame goes.
    fn replace(&self, state: &State) -> Result<(Self, NextFrame), ReplaceFault>;
}

/// Why a file was not replaced by a compacted one.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplaceFault {
    /// The old file is in its place, as it was.
    #[error("the old file stays in use")]
    Kept(#[source] io::Error),
    /// A crash may leave the old file or the new one: nothing may be written to either of them.
    #[error("whether the new file or the old one will be found after a crash is unknown")]
    Unknown(#[source] io::Error),
}

/// An open journal file.
pub(super) struct JournalFile {
    file: File,
    path: PathBuf,
    capacity: usize,
    next: NextFrame,
}

/// Where a frame goes, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextFrame {
    pub(super) position: usize,
    pub(super) sequence: u64,
}

/// A journal that was read.
pub(super) struct Found {
    pub(super) state: State,
    /// How it goes on.
    next: NextFrame,
    /// Its size in bytes.
    length: usize,
    /// The version of its encoding.
    version: u8,
}

impl JournalFile {
    /// Puts a file that holds `state` alone in the place of whatever is at `path`.
    pub(super) fn create(path: &Path, state: &State) -> Result<Self, ReplaceFault> {
        fail_point::before(Step::Compact);
        let new = path.with_extension("new");
        let file = Self::write_new(path, &new, state).map_err(ReplaceFault::Kept)?;
        std::fs::rename(&new, path).map_err(ReplaceFault::Kept)?;
        // N.B. Before the folder is durable a power cut may bring the old file back: nothing is appended before that.
        sync_folder_of(path).map_err(ReplaceFault::Unknown)?;
        fail_point::after(Step::Compact);
        Ok(file)
    }

    /// Goes on with the file that is there: for a disk that has no room for a new one. One of an older version cannot be
    /// gone on with: what follows would be read as that version.
    pub(super) fn reopen(path: &Path, found: &Found) -> io::Result<Self> {
        if found.version != VERSION {
            let why = "it was written by an older version, and there is no room to write it anew; make room";
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        let file = OpenOptions::new().write(true).custom_flags(OFlags::DSYNC.bits() as i32).open(path)?;
        Ok(Self { file, path: path.to_owned(), capacity: found.length, next: found.next })
    }

    fn write_new(path: &Path, new: &Path, state: &State) -> io::Result<Self> {
        let mut bytes = HEADER.to_vec();
        let snapshot = Entry { at_unix_ms: now_unix_ms(), records: state.snapshot() };
        encode(0, &snapshot, &mut bytes).map_err(io::Error::other)?;
        let next = NextFrame { position: bytes.len(), sequence: 1 };
        bytes.resize(next.position + ROOM_BYTES, 0);

        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(new)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        drop(file);
        // Opened again for synchronous writes: the bulk above needed one flush, not one a write.
        let file = OpenOptions::new().write(true).custom_flags(OFlags::DSYNC.bits() as i32).open(new)?;
        Ok(Self { file, path: path.to_owned(), capacity: bytes.len(), next })
    }

    /// Where the first frame goes that is written by this process.
    pub(super) fn next(&self) -> NextFrame {
        self.next
    }
}

impl Storage for JournalFile {
    fn write_at(&self, position: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, position as u64)
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn replace(&self, state: &State) -> Result<(Self, NextFrame), ReplaceFault> {
        let file = Self::create(&self.path, state)?;
        let next = file.next;
        Ok((file, next))
    }
}

/// Reads a journal, if there is one, once it is durable: a commit that a killed daemon had under way may be in the page
/// cache only.
pub(super) fn read(path: &Path, left: &(impl Left + ?Sized)) -> Result<Option<Found>, JournalError> {
    let failed = |source| JournalError::Io { path: path.to_owned(), operation: "read", source };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
            return Err(JournalError::TooLarge { path: path.to_owned(), bytes: metadata.len() });
        }
        _ => {}
    }
    believe(left, FILE_BYTES_MAX).map_err(failed)?.map(|bytes| fold(path, &bytes)).transpose()
}

/// Says what the bytes of a journal say.
pub(super) fn fold(path: &Path, bytes: &[u8]) -> Result<Found, JournalError> {
    let codec = |source| JournalError::Codec { path: path.to_owned(), source };
    let mut frames = Frames::new(bytes).map_err(codec)?;
    let mut state = State::default();
    for entry in frames.by_ref() {
        state.apply(&entry).map_err(|source| JournalError::Inconsistent { path: path.to_owned(), source })?;
    }
    let position = frames.position();
    match frames.ending() {
        // A journal takes its place with a snapshot in it: one without was not torn but damaged.
        Ending::Torn if frames.sequence() == 0 => Err(codec(CodecError::NotAJournal)),
        Ending::Torn => {
            let next = NextFrame { position, sequence: frames.sequence() };
            Ok(Found { state, next, length: bytes.len(), version: frames.version() })
        }
        Ending::Foreign => Err(JournalError::Newer { path: path.to_owned(), position }),
        Ending::Damaged => Err(JournalError::Damaged { path: path.to_owned(), position }),
    }
}

/// The wall clock, in milliseconds since 1970; 0 if it stands before that.
pub(crate) fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
