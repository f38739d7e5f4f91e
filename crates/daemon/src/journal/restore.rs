//! Restores a journal from a backup, without a daemon. Its volumes are not trusted before other
//! hosts have confirmed them (`migration::restoration`).
//!
//! ```text
//!   an exported document │ a journal file │ a data folder ──read, as at a start──► State ──restore()──► journal of the data folder
//!                                                                  the former journal ──► journal.before-restore-SECONDS
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use migration::journal::{Frames, HostList, NamedHost, State};
use migration::restoration::{self, KnownBy, Surroundings};
use migration::{HostId, VolumeId};
use serde::Serialize;

use super::examine::{JournalVolume, volumes};
use super::file::{FILE_BYTES_MAX, JournalFile, ReplaceFault, fold, now_unix_ms};
use super::{JOURNAL_FILE, JournalError};
use crate::files::folder_entries::with_suffix;
use crate::files::lock::{FolderLock, LockError};
use crate::hosts::hosts_since;

/// The prefix of the name of a replaced journal.
const REPLACED: &str = "journal.before-restore-";
/// How many names are tried for it.
const ASIDE_MAX: u32 = 100;
/// The field of an exported document with the journal itself, in hexadecimal.
pub(super) const FIELD: &str = "journal";
/// The field of an exported document with the list of hosts.
pub(super) const HOSTS: &str = "hosts";

/// Whether an intact journal may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacing {
    /// An intact journal stays.
    Refused,
    /// An intact journal is replaced, as ordered.
    Ordered,
}

/// What the administrator says about the list of hosts in the data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostsSaid {
    /// Nothing: the history of the list decides.
    Nothing,
    /// The list names every other host that can have a volume of this one.
    Complete,
}

/// The result of a restore.
#[derive(Debug, Serialize)]
pub struct RestoredJournal {
    /// The path of the journal.
    pub path: PathBuf,
    /// The path of the backup.
    pub from: PathBuf,
    /// When the last restored commit was made, in milliseconds since 1970.
    pub backup_unix_ms: u64,
    /// The former journal under its new name; `None`: there was none.
    pub replaced: Option<PathBuf>,
    /// The volumes in the restored journal.
    pub volumes: Vec<JournalVolume>,
    /// Whether all hosts that have to be asked are known.
    pub hosts_known: bool,
    /// The known hosts that have to be asked.
    pub hosts: Vec<HostToAsk>,
}

/// A host that has to be asked about the volumes of a restored journal.
#[derive(Debug, Serialize)]
pub struct HostToAsk {
    /// The name of the host here.
    pub name: String,
    /// The identity of the host.
    pub id: String,
}

/// Why a journal was not restored; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A daemon has locked the data folder, or it cannot be used.
    #[error("the data folder cannot be used")]
    DataFolder(#[source] LockError),
    /// The backup has no valid journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The document does not contain a journal.
    #[error(
        "{path} holds no journal: give a document of `sterna journal export` of version 0.2 or later, or a journal file"
    )]
    Document {
        /// The path of the document.
        path: PathBuf,
    },
    /// An intact journal would be replaced.
    #[error(
        "{path} is a usable journal, and its records after the backup would be lost; to replace it anyway: --replace"
    )]
    Intact {
        /// The path of the journal.
        path: PathBuf,
    },
    /// A step of the restore failed.
    #[error("the journal {path} cannot be {operation}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The failed operation, as a participle.
        operation: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

/// Restores the journal in `from` into the data folder; `from` may be the journal of that folder, which was restored
/// as a whole. May block.
///
/// # Errors
/// [`RestoreError`]: the data folder is unchanged.
pub fn restore_journal(
    data_dir: &Path,
    from: &Path,
    replacing: Replacing,
    said: HostsSaid,
) -> Result<RestoredJournal, RestoreError> {
    let from = if from.is_dir() { from.join(JOURNAL_FILE) } else { from.to_owned() };
    let lock = FolderLock::acquire(data_dir).map_err(RestoreError::DataFolder)?;
    let Backup { state: backup, at_unix_ms: backup_unix_ms, hosts: exported } = read(&from)?;
    let path = data_dir.join(JOURNAL_FILE);
    let is_in_place = same_file(&from, &path);
    let there = std::fs::read(&path).ok();
    let says_something =
        |bytes: &Vec<u8>| fold(&path, bytes).is_ok_and(|found| found.state != State::default());
    if !is_in_place && replacing == Replacing::Refused && there.as_ref().is_some_and(says_something) {
        return Err(RestoreError::Intact { path });
    }
    let at_unix_ms = now_unix_ms();
    let sizes =
        there.as_ref().filter(|_| !is_in_place).map_or_else(BTreeMap::new, |bytes| sizes(&path, bytes));
    let replaced = match there {
        None => None,
        Some(_) => {
            let failed = |source| RestoreError::Io {
                path: path.clone(),
                operation: "kept under another name",
                source,
            };
            Some(
                keep_aside(&path, &data_dir.join(format!("{REPLACED}{}", at_unix_ms / 1000)))
                    .map_err(failed)?,
            )
        }
    };
    let (list, mut hosts) = hosts_since(data_dir, restoration::since(&backup, backup_unix_ms));
    let (list, known_by) = match said {
        HostsSaid::Complete => (HostList::Complete, KnownBy::People),
        // A folder that was restored as a whole has the list of that time.
        HostsSaid::Nothing if is_in_place => (HostList::default(), KnownBy::Look),
        HostsSaid::Nothing => (list, KnownBy::Look),
    };
    if said == HostsSaid::Nothing {
        exported.into_iter().for_each(|host| name(&mut hosts, host));
    }
    let found = Surroundings { backup_unix_ms, at_unix_ms, list, known_by, hosts, sizes };
    let state = restoration::restore(&backup, &found);
    let written = JournalFile::create(&path, &state).map_err(|fault| {
        let (ReplaceFault::Kept(source) | ReplaceFault::Unknown(source)) = fault;
        RestoreError::Io { path: path.clone(), operation: "written", source }
    });
    written?;
    drop(lock);
    let named = state.restored.iter().flat_map(|restored| &restored.more.hosts);
    let hosts = named.map(|host| HostToAsk { name: host.name.clone(), id: host.id.to_string() }).collect();
    let more = state.restored.as_ref().map(|restored| &restored.more);
    let hosts_known = more.is_some_and(|more| more.list == HostList::Complete);
    Ok(RestoredJournal { path, from, backup_unix_ms, replaced, volumes: volumes(&state), hosts_known, hosts })
}

/// Gives a file a second name: `aside`, or that with a number if another restore in the same second has used it.
fn keep_aside(path: &Path, aside: &Path) -> io::Result<PathBuf> {
    for number in 0..ASIDE_MAX {
        let name = if number == 0 { aside.to_owned() } else { with_suffix(aside, &format!("-{number}")) };
        match std::fs::hard_link(path, &name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            linked => return linked.map(|()| name),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Adds a host unless its identity is in the set.
fn name(hosts: &mut BTreeSet<NamedHost>, host: NamedHost) {
    if !hosts.iter().any(|known| known.id == host.id) {
        hosts.insert(host);
    }
}

/// Returns the sizes of this host's volumes in the replaced journal, if it is intact.
fn sizes(path: &Path, bytes: &[u8]) -> BTreeMap<VolumeId, u64> {
    let later = fold(path, bytes).map(|found| found.state).unwrap_or_default();
    later.volumes.iter().map(|(volume, known)| (*volume, known.record.size_bytes)).collect()
}

struct Backup {
    state: State,
    at_unix_ms: u64,
    /// The list of hosts of that time, as far as it was exported.
    hosts: Vec<NamedHost>,
}

fn read(from: &Path) -> Result<Backup, RestoreError> {
    let failed = |source| JournalError::Io { path: from.to_owned(), operation: "read", source };
    let size = std::fs::metadata(from).map_err(failed)?.len();
    // A document has the journal in hexadecimal, which doubles its size, and once as text.
    if size > FILE_BYTES_MAX.saturating_mul(8) {
        return Err(JournalError::TooLarge { path: from.to_owned(), bytes: size }.into());
    }
    let content = std::fs::read(from).map_err(failed)?;
    let (bytes, hosts) = match content.first() {
        Some(b'{') => document(&content).ok_or_else(|| RestoreError::Document { path: from.to_owned() })?,
        _ => (content, Vec::new()),
    };
    let found = fold(from, &bytes)?;
    let entries =
        Frames::new(&bytes).map_err(|source| JournalError::Codec { path: from.to_owned(), source })?;
    let last = entries.last().map_or(0, |entry| entry.at_unix_ms);
    Ok(Backup { state: found.state, at_unix_ms: last, hosts })
}

/// Returns the journal in an exported document, and the hosts that it names.
fn document(document: &[u8]) -> Option<(Vec<u8>, Vec<NamedHost>)> {
    let document: serde_json::Value = serde_json::from_slice(document).ok()?;
    let host = |host: &serde_json::Value| {
        let id = from_digits(host.get("id")?.as_str()?)?;
        Some(NamedHost { id: HostId(id.try_into().ok()?), name: host.get("name")?.as_str()?.to_owned() })
    };
    let hosts = document.get(HOSTS).and_then(|hosts| hosts.as_array());
    let hosts = hosts.into_iter().flatten().filter_map(host).collect();
    Some((from_digits(document.get(FIELD)?.as_str()?)?, hosts))
}

fn from_digits(digits: &str) -> Option<Vec<u8>> {
    if !digits.is_ascii() || !digits.len().is_multiple_of(2) {
        return None;
    }
    let pairs = (0..digits.len()).step_by(2).map(|at| digits.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

/// Returns a journal in the form of an exported document.
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
