//! The missing units of volumes here: a file for each residency that began with some, and the thread that writes it.
//! [`migration::filling`] decides the format, and what of it can be trusted. Entries that a guest's flush waits for are synced;
//! others only have to outlast the daemon.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use chronicle::BlockRange;
use lane::NotDurable;
use migration::StayKey;
use migration::filling::{LogEntry, LogFault, NO_START, UnitMap, encode_entry, header, replay};
use migration::journal::Place;

use super::files::Files;
use super::{Reply, answer, not_durable};
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;
use crate::images::far;

/// The longest file that is read: longer than a list of single units of the largest volume.
const FILE_BYTES_MAX: u64 = 4 << 30;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A task of the writing thread.
#[derive(Debug)]
pub(super) enum PresenceWork {
    /// An entry in a new file.
    Begin {
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
        reply: Reply,
    },
    Add {
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
        reply: Reply,
    },
    Note {
        key: StayKey,
        size_bytes: u64,
        units: Vec<BlockRange>,
        reply: Reply,
    },
    Forget {
        key: StayKey,
        reply: Reply,
    },
}

/// Why a volume's missing units are unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PresenceError {
    /// The file does not exist.
    #[error("there is no {0}")]
    Gone(PathBuf),
    #[error("{path} cannot be read: {error}")]
    Unreadable {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    /// Its content cannot be trusted.
    #[error("{path} cannot be relied on: {fault}")]
    Untrue {
        path: PathBuf,
        #[source]
        fault: LogFault,
    },
}

pub(super) struct PresenceWriter {
    files: Files,
    /// The present boot, once it was read.
    boot: Option<[u8; 16]>,
    open: BTreeMap<StayKey, OpenFile>,
}

struct OpenFile {
    file: File,
    /// The offset and the number of the next frame.
    position: u64,
    sequence: u64,
}

/// Reads the missing set of a residency whose image is at `place`.
pub(super) fn read(
    files: &Files,
    key: StayKey,
    size_bytes: u64,
    place: &Place,
) -> Result<UnitMap, PresenceError> {
    let path = files.presence_path(key);
    let bytes = match whole_file::read(&path, FILE_BYTES_MAX) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Err(PresenceError::Gone(path)),
        Err(error) => return Err(PresenceError::Unreadable { path, error }),
    };
    let boot = match far::starts_alone(place) {
        // N.B. the store may have lost acknowledged entries, and this host would not know.
        true => NO_START,
        false => boot().map_err(|error| PresenceError::Unreadable { path: BOOT_ID.into(), error })?,
    };
    match replay(&bytes, size_bytes, key.bytes(), boot) {
        Ok((missing, ..)) => Ok(missing),
        Err(fault) => Err(PresenceError::Untrue { path, fault }),
    }
}

/// Returns the present boot of the host. N.B. never guessed: units noted since the boot would be
/// fetched again, over guest writes.
fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string(BOOT_ID)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(boot) if digits.len() == 32 => Ok(boot.to_be_bytes()),
        _ => Err(io::Error::other(format!("{BOOT_ID} does not identify the current start of the host"))),
    }
}

impl PresenceWriter {
    pub(super) fn new(files: Files) -> Self {
        Self { files, boot: None, open: BTreeMap::new() }
    }

    pub(super) fn run(mut self, queue: &mpsc::Receiver<PresenceWork>) {
        while let Ok(work) = queue.recv() {
            let (key, result, reply) = match work {
                PresenceWork::Begin { key, size_bytes, entry, reply } => {
                    (key, self.begin(key, size_bytes, &entry), reply)
                }
                PresenceWork::Add { key, size_bytes, entry, reply } => {
                    (key, self.add(key, size_bytes, &entry).and_then(File::sync_data), reply)
                }
                PresenceWork::Note { key, size_bytes, units, reply } => {
                    (key, self.note(key, size_bytes, units), reply)
                }
                PresenceWork::Forget { key, reply } => (key, self.forget(key), reply),
            };
            if result.is_err() {
                // The content of the file is unknown now, so it is read again.
                self.open.remove(&key);
            }
            answer(reply, result.map_err(|error: io::Error| -> NotDurable { not_durable(&error) }));
        }
    }

    fn begin(&mut self, key: StayKey, size_bytes: u64, entry: &LogEntry) -> io::Result<()> {
        let path = self.files.presence_path(key);
        let mut bytes = header(size_bytes, key.bytes());
        encode(0, entry, &mut bytes)?;
        self.open.remove(&key);
        whole_file::replace(&path, &bytes)?;
        let open = OpenFile { file: open(&path)?, position: bytes.len() as u64, sequence: 1 };
        self.open.insert(key, open);
        Ok(())
    }

    fn add(&mut self, key: StayKey, size_bytes: u64, entry: &LogEntry) -> io::Result<&File> {
        if !self.open.contains_key(&key) {
            let known = self.reopen(key, size_bytes)?;
            self.open.insert(key, known);
        }
        let Some(known) = self.open.get_mut(&key) else { return Err(io::ErrorKind::NotFound.into()) };
        let mut bytes = Vec::new();
        encode(known.sequence, entry, &mut bytes)?;
        known.file.write_all_at(&bytes, known.position)?;
        known.position += bytes.len() as u64;
        known.sequence += 1;
        Ok(&known.file)
    }

    fn note(&mut self, key: StayKey, size_bytes: u64, runs: Vec<BlockRange>) -> io::Result<()> {
        let boot = self.boot()?;
        self.add(key, size_bytes, &LogEntry::Noted { boot, runs }).map(drop)
    }

    fn boot(&mut self) -> io::Result<[u8; 16]> {
        match self.boot {
            Some(boot) => Ok(boot),
            None => Ok(*self.boot.insert(boot()?)),
        }
    }

    fn reopen(&mut self, key: StayKey, size_bytes: u64) -> io::Result<OpenFile> {
        let boot = self.boot()?;
        let path = self.files.presence_path(key);
        let bytes = whole_file::read(&path, FILE_BYTES_MAX)?.ok_or(io::ErrorKind::NotFound)?;
        let replayed = replay(&bytes, size_bytes, key.bytes(), boot).map_err(io::Error::other)?;
        let (_, position, sequence) = replayed;
        // N.B. written again, as another file: data after a failed sync may be in memory only, and reads as if it were on the
        // disk. A torn tail is cut off too, so that later entries cannot be mistaken for it.
        whole_file::replace(&path, bytes.get(..position).unwrap_or(&bytes))?;
        Ok(OpenFile { file: open(&path)?, position: position as u64, sequence })
    }

    fn forget(&mut self, key: StayKey) -> io::Result<()> {
        self.open.remove(&key);
        let path = self.files.presence_path(key);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => sync_folder_of(&path),
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().write(true).mode(0o600).open(path)
}

fn encode(sequence: u64, entry: &LogEntry, bytes: &mut Vec<u8>) -> io::Result<()> {
    if encode_entry(sequence, entry, bytes) {
        return Ok(());
    }
    Err(io::Error::other("an entry of missing blocks is too large"))
}
