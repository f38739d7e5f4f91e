//! The missing units of volumes here: a file for each residency that began with some, and the thread that writes it.
//! [`migration::filling`] decides the format, what of it can be trusted, and when it is written anew. Entries that a guest's flush
//! waits for are synced; others only have to outlast the daemon.
//!
//! ```text
//!   KEY.presence          the file; its whole space is reserved
//!   KEY.presence.spare    as long: the next content is written here, and the names are exchanged
//!   KEY.presence.second   reserved by an offer, until the file is begun: its spare
//! ```
//! N.B. a guest's write waits for its entry, so no entry may need space that others could have taken.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use chronicle::BlockRange;
use lane::NotDurable;
use migration::StayKey;
use migration::filling::{LogEntry, LogFault, NO_START, PresenceFile, PresenceWrite, UnitMap, replay};
use migration::journal::Place;
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use rustix::io::Errno;

use super::files::Files;
use super::{Reply, answer, not_durable};
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;
use crate::images::far;

/// The longest file that is read: longer than a list of single units of the largest volume.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// The zeroes of one write.
const ZEROES_BYTES: usize = 1 << 20;
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
    /// `None`: it is to be opened, or does not exist.
    file: Option<File>,
    log: PresenceFile,
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
                    (key, self.begin(key, size_bytes, entry), reply)
                }
                PresenceWork::Add { key, size_bytes, entry, reply } => {
                    (key, self.add(key, size_bytes, entry, Sync::Durably), reply)
                }
                PresenceWork::Note { key, size_bytes, units, reply } => {
                    (key, self.note(key, size_bytes, units), reply)
                }
                PresenceWork::Forget { key, reply } => (key, self.forget(key), reply),
            };
            if let (Err(_), Some(open)) = (&result, self.open.get_mut(&key)) {
                // N.B. its content is unknown now, and is not read again: pages of a failed sync may be in memory only, or gone.
                open.log.failed();
            }
            answer(reply, result.map_err(|error: io::Error| -> NotDurable { not_durable(&error) }));
        }
    }

    fn names(&self, key: StayKey) -> Names {
        Names::of(&self.files, key)
    }

    fn begin(&mut self, key: StayKey, size_bytes: u64, entry: LogEntry) -> io::Result<()> {
        reserve_files(&self.names(key), size_bytes)?;
        let log = PresenceFile::begin(size_bytes, key.bytes(), self.boot()?);
        self.open.insert(key, OpenFile { file: None, log });
        self.add(key, size_bytes, entry, Sync::Durably)
    }

    fn add(&mut self, key: StayKey, size_bytes: u64, entry: LogEntry, sync: Sync) -> io::Result<()> {
        if !self.open.contains_key(&key) {
            let found = self.find(key, size_bytes)?;
            self.open.insert(key, found);
        }
        let names = self.names(key);
        let Some(open) = self.open.get_mut(&key) else { return Err(io::ErrorKind::NotFound.into()) };
        match open.log.add(entry).map_err(io::Error::other)? {
            PresenceWrite::Anew(bytes) => {
                open.file = Some(write_anew(&names, &bytes, PresenceFile::reserved(size_bytes))?);
                Ok(())
            }
            PresenceWrite::Append { at, bytes } => {
                let Some(file) = &open.file else { return Err(io::ErrorKind::NotFound.into()) };
                file.write_all_at(&bytes, at)?;
                match sync {
                    Sync::Durably => file.sync_data(),
                    Sync::InMemory => Ok(()),
                }
            }
        }
    }

    fn note(&mut self, key: StayKey, size_bytes: u64, runs: Vec<BlockRange>) -> io::Result<()> {
        let boot = self.boot()?;
        self.add(key, size_bytes, LogEntry::Noted { boot, runs }, Sync::InMemory)
    }

    fn boot(&mut self) -> io::Result<[u8; 16]> {
        match self.boot {
            Some(boot) => Ok(boot),
            None => Ok(*self.boot.insert(boot()?)),
        }
    }

    /// Reads the file of a former process; the first entry writes it anew.
    fn find(&mut self, key: StayKey, size_bytes: u64) -> io::Result<OpenFile> {
        let boot = self.boot()?;
        let bytes =
            whole_file::read(&self.names(key).file, FILE_BYTES_MAX)?.ok_or(io::ErrorKind::NotFound)?;
        let log = PresenceFile::found(&bytes, size_bytes, key.bytes(), boot).map_err(io::Error::other)?;
        Ok(OpenFile { file: None, log })
    }

    fn forget(&mut self, key: StayKey) -> io::Result<()> {
        self.open.remove(&key);
        let names = self.names(key);
        for path in [&names.spare, &names.second, &names.file] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        sync_folder_of(&names.file)
    }
}

/// Whether an entry outlasts a loss of power.
#[derive(Clone, Copy)]
enum Sync {
    Durably,
    InMemory,
}

struct Names {
    file: PathBuf,
    spare: PathBuf,
    second: PathBuf,
}

impl Names {
    fn of(files: &Files, key: StayKey) -> Self {
        let file = files.presence_path(key);
        let with = |end: &str| {
            let mut name = file.as_os_str().to_owned();
            name.push(end);
            PathBuf::from(name)
        };
        Self { spare: with(".spare"), second: with(".second"), file }
    }
}

/// Reserves the space that the missing units of a residency may take, durably. Leaves nothing if there is too little.
pub(super) fn reserve(files: &Files, key: StayKey, size_bytes: u64) -> io::Result<()> {
    let names = Names::of(files, key);
    let reserved = reserve_files(&names, size_bytes);
    if reserved.is_err() {
        for path in [&names.spare, &names.second] {
            // Left over, it only keeps its space until the next start.
            let _ = std::fs::remove_file(path);
        }
    }
    reserved
}

/// Reserves the space of a spare, and of the file itself unless it exists.
fn reserve_files(names: &Names, size_bytes: u64) -> io::Result<()> {
    let reserved = PresenceFile::reserved(size_bytes);
    with_space(&names.spare, reserved)?.sync_all()?;
    if !names.file.try_exists()? {
        with_space(&names.second, reserved)?.sync_all()?;
    }
    sync_folder_of(&names.file)
}

/// Opens a file, and makes sure that writes within `bytes` need no space.
fn with_space(path: &Path, bytes: u64) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(file),
        // The file system reserves nothing in advance, so the space is written.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let length = file.metadata()?.len();
            zero(&file, length, bytes)?;
            Ok(file)
        }
        Err(error) => Err(error.into()),
    }
}

fn zero(file: &File, mut from: u64, to: u64) -> io::Result<()> {
    let zeroes = vec![0; ZEROES_BYTES];
    while from < to {
        let length = usize::try_from(to - from).unwrap_or(usize::MAX).min(ZEROES_BYTES);
        file.write_all_at(&zeroes[..length], from)?;
        from += length as u64;
    }
    Ok(())
}

/// Replaces the file durably: after a power cut there is the former content or this one. The former file becomes the spare.
fn write_anew(names: &Names, bytes: &[u8], reserved: u64) -> io::Result<File> {
    if !names.spare.try_exists()? {
        move_if_there(&names.second, &names.spare)?;
    }
    let file = with_space(&names.spare, reserved)?;
    file.write_all_at(bytes, 0)?;
    // N.B. The rest of the file is zeroed: older entries there would be mistaken for new ones.
    zero(&file, bytes.len() as u64, reserved)?;
    file.sync_all()?;
    match rustix::fs::renameat_with(CWD, &names.spare, CWD, &names.file, RenameFlags::EXCHANGE) {
        Ok(()) => {}
        // There is no file yet, or names cannot be exchanged here: then the next spare needs space.
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            std::fs::rename(&names.spare, &names.file)?;
        }
        Err(error) => return Err(error.into()),
    }
    sync_folder_of(&names.file)?;
    Ok(file)
}

fn move_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::rename(from, to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
