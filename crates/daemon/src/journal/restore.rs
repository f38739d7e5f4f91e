//! Puts a journal back from a backup, without a daemon: what it says is not believed before other hosts have confirmed it
//! (`migration::restoration`).
//!
//! ```text
//!   an exported document │ a journal file │ a data folder ──read, as at a start──► State ──restore()──► journal of the data folder
//!                                                                  what was there ──► journal.before-restore-SECONDS
//! ```

use std::io;
use std::path::{Path, PathBuf};

use migration::journal::{Frames, State};
use migration::restoration;
use serde::Serialize;

use super::examine::{JournalVolume, volumes};
use super::file::{FILE_BYTES_MAX, JournalFile, ReplaceFault, fold, now_unix_ms};
use super::{JOURNAL_FILE, JournalError};
use crate::files::lock::{FolderLock, LockError};

/// What begins the name of a journal that was replaced.
const REPLACED: &str = "journal.before-restore-";
/// The field of an exported document that has the journal itself, in hexadecimal digits.
pub(super) const FIELD: &str = "journal";

/// Whether a journal that a daemon would go on with may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacing {
    /// It may not.
    Refused,
    /// It may: somebody has said so.
    Ordered,
}

/// What has been put back.
#[derive(Debug, Serialize)]
pub struct RestoredJournal {
    /// The journal.
    pub path: PathBuf,
    /// What it was put back from.
    pub from: PathBuf,
    /// When the last commit was made that this has, in milliseconds since 1970.
    pub backup_unix_ms: u64,
    /// The journal that was there before, under its new name; `None`: there was none.
    pub replaced: Option<PathBuf>,
    /// What it says of each volume.
    pub volumes: Vec<JournalVolume>,
}

/// Why a journal was not put back; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A daemon has the data folder, or it cannot be used.
    #[error("the data folder cannot be used")]
    DataFolder(#[source] LockError),
    /// There is nothing to put back.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The document has no journal in it.
    #[error(
        "{path} has no journal in it to put back: a document of `sterna journal export` from version 0.2 on has, and a journal file"
    )]
    Document {
        /// The document.
        path: PathBuf,
    },
    /// A journal that is intact would be replaced.
    #[error(
        "{path} is a journal that a daemon would go on with, and what it says later than the backup would be lost: if that is what you \
         want, say --replace"
    )]
    Intact {
        /// The journal.
        path: PathBuf,
    },
    /// A step failed.
    #[error("the journal {path} cannot be {operation}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a participle.
        operation: &'static str,
        /// What the system answered.
        source: io::Error,
    },
}

/// Puts the journal that is in `from` into the data folder; `from` may be the journal of that folder, which came from a backup as
/// a whole. It may sleep.
///
/// # Errors
/// [`RestoreError`]: the data folder is as it was.
pub fn restore_journal(
    data_dir: &Path,
    from: &Path,
    replacing: Replacing,
) -> Result<RestoredJournal, RestoreError> {
    let from = if from.is_dir() { from.join(JOURNAL_FILE) } else { from.to_owned() };
    let lock = FolderLock::acquire(data_dir).map_err(RestoreError::DataFolder)?;
    let (backup, backup_unix_ms) = read(&from)?;
    let path = data_dir.join(JOURNAL_FILE);
    let is_in_place = same_file(&from, &path);
    let there = std::fs::read(&path).ok();
    let says_something =
        |bytes: &Vec<u8>| fold(&path, bytes).is_ok_and(|found| found.state != State::default());
    if !is_in_place && replacing == Replacing::Refused && there.as_ref().is_some_and(says_something) {
        return Err(RestoreError::Intact { path });
    }
    let at_unix_ms = now_unix_ms();
    let replaced = match there {
        None => None,
        Some(_) => {
            let aside = data_dir.join(format!("{REPLACED}{}", at_unix_ms / 1000));
            let failed = |source| RestoreError::Io {
                path: path.clone(),
                operation: "kept under another name",
                source,
            };
            std::fs::hard_link(&path, &aside).map_err(failed)?;
            Some(aside)
        }
    };
    let state = restoration::restore(&backup, backup_unix_ms, at_unix_ms);
    let written = JournalFile::create(&path, &state).map_err(|fault| {
        let (ReplaceFault::Kept(source) | ReplaceFault::Unknown(source)) = fault;
        RestoreError::Io { path: path.clone(), operation: "written", source }
    });
    written?;
    drop(lock);
    Ok(RestoredJournal { path, from, backup_unix_ms, replaced, volumes: volumes(&state) })
}

/// What a backup says, and when it was made.
fn read(from: &Path) -> Result<(State, u64), RestoreError> {
    let failed = |source| JournalError::Io { path: from.to_owned(), operation: "read", source };
    let size = std::fs::metadata(from).map_err(failed)?.len();
    // A document has the journal twice over in digits, and once in words.
    if size > FILE_BYTES_MAX.saturating_mul(8) {
        return Err(JournalError::TooLarge { path: from.to_owned(), bytes: size }.into());
    }
    let content = std::fs::read(from).map_err(failed)?;
    let bytes = match content.first() {
        Some(b'{') => journal_of(&content).ok_or_else(|| RestoreError::Document { path: from.to_owned() })?,
        _ => content,
    };
    let found = fold(from, &bytes)?;
    let entries =
        Frames::new(&bytes).map_err(|source| JournalError::Codec { path: from.to_owned(), source })?;
    let last = entries.last().map_or(0, |entry| entry.at_unix_ms);
    Ok((found.state, last))
}

fn journal_of(document: &[u8]) -> Option<Vec<u8>> {
    let document: serde_json::Value = serde_json::from_slice(document).ok()?;
    let digits = document.get(FIELD)?.as_str()?;
    if !digits.is_ascii() || !digits.len().is_multiple_of(2) {
        return None;
    }
    let pairs = (0..digits.len()).step_by(2).map(|at| digits.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

/// A journal as an exported document has it.
pub(super) fn in_digits(journal: &[u8]) -> String {
    journal.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn same_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}
