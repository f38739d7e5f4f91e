//! The journal's file: read as a whole at the start, replaced as a whole when it is compacted, and appended to in between. Its
//! space is zeroed beforehand, so that an append changes no metadata of the file system and costs one flush of the disk (44 µs
//! instead of 69 µs here). A failed append is wiped out again. Only if that fails too, it is unknown what a restart will find.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use migration::journal::{CodecError, Ending, Entry, Frames, HEADER, State, encode};
use rustix::fs::OFlags;

use super::JournalError;
use crate::fail_point::{self, Step};
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file::{Left, believe};

/// The size above which the journal is compacted as soon as no migration would have to wait for it.
pub(super) const COMPACT_BYTES: usize = 1 << 20;
/// The space behind a snapshot. The part above [`COMPACT_BYTES`] is for running migrations: thousands of commits.
const ROOM_BYTES: usize = 2 << 20;
/// The largest journal that is read: twice the largest snapshot and its space.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// What the writer needs of a file; tests use one that fails.
pub(super) trait Storage: Sized {
    /// Writes all of `bytes` at `position`, durably.
    fn write_at(&self, position: usize, bytes: &[u8]) -> io::Result<()>;

    fn capacity(&self) -> usize;

    /// Replaces the file by one that holds `state` alone, and returns where the next frame goes.
    fn replace(&self, state: &State) -> Result<(Self, NextFrame), ReplaceFault>;
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReplaceFault {
    /// The old file is unchanged.
    #[error("the old file stays in use")]
    Kept(#[source] io::Error),
    /// A crash may leave the old file or the new one, so neither may be written.
    #[error("whether the new file or the old one will be found after a crash is unknown")]
    Unknown(#[source] io::Error),
}

pub(super) struct JournalFile {
    file: File,
    path: PathBuf,
    capacity: usize,
    next: NextFrame,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextFrame {
    pub(super) position: usize,
    pub(super) sequence: u64,
}

pub(super) struct Found {
    pub(super) state: State,
    next: NextFrame,
    length: usize,
}

impl JournalFile {
    /// Replaces the file at `path` by one that holds `state` alone.
    pub(super) fn create(path: &Path, state: &State) -> Result<Self, ReplaceFault> {
        fail_point::before(Step::Compact);
        let new = path.with_extension("new");
        let file = Self::write_new(path, &new, state).map_err(ReplaceFault::Kept)?;
        std::fs::rename(&new, path).map_err(ReplaceFault::Kept)?;
        // N.B. until the folder is durable, a power cut may bring the old file back. So nothing is appended before that.
        sync_folder_of(path).map_err(ReplaceFault::Unknown)?;
        fail_point::after(Step::Compact);
        Ok(file)
    }

    /// Continues with the existing file, on a disk without room for a new one.
    pub(super) fn reopen(path: &Path, found: &Found) -> io::Result<Self> {
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
        // Opened again for synchronous writes: the bulk above needed a single flush.
        let file = OpenOptions::new().write(true).custom_flags(OFlags::DSYNC.bits() as i32).open(new)?;
        Ok(Self { file, path: path.to_owned(), capacity: bytes.len(), next })
    }

    /// Returns where this process writes its first frame.
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

/// Reads a journal, if there is one, after making it durable: the last commit of a killed daemon may be in the page cache only.
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

pub(super) fn fold(path: &Path, bytes: &[u8]) -> Result<Found, JournalError> {
    let codec = |source| JournalError::Codec { path: path.to_owned(), source };
    let mut frames = Frames::new(bytes).map_err(codec)?;
    let mut state = State::default();
    for entry in frames.by_ref() {
        state.apply(&entry).map_err(|source| JournalError::Inconsistent { path: path.to_owned(), source })?;
    }
    let position = frames.position();
    match frames.ending() {
        // A journal is put in place with a snapshot in it, so one without it is damaged, not torn.
        Ending::Torn if frames.sequence() == 0 => Err(codec(CodecError::NotAJournal)),
        Ending::Torn => {
            let next = NextFrame { position, sequence: frames.sequence() };
            Ok(Found { state, next, length: bytes.len() })
        }
        Ending::Foreign => Err(JournalError::Newer { path: path.to_owned(), position }),
        Ending::Damaged => Err(JournalError::Damaged { path: path.to_owned(), position }),
    }
}

/// Returns the wall clock in milliseconds since 1970; 0 if it is earlier.
pub(crate) fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
