//! Examines a journal from outside: whether a daemon would start with it, and what it contains. Locks and changes nothing, and
//! makes nothing durable, so it may run beside the daemon.
//!
//! ```text
//!   file ──► bytes ──► decision (`file::fold`, as at a start) ─┐
//!                └───► entries, up to the first fault        ├──► examination ──► text, JSON, export
//!                          └──► state, folded                ─┘
//! ```
//! A file that is written meanwhile may be read with a gap where a commit was in flight. Then it is read again.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use migration::journal::{Entry, Frames, NamedHost, Side, Stage, State, VERSION};
use rustix::fs::OFlags;
use serde::Serialize;

use super::file::{FILE_BYTES_MAX, fold};
use super::{JOURNAL_FILE, JournalError, export};
use crate::error::with_causes;
use crate::hosts::listed;

/// How often a journal is read that changes during each read.
const READS_MAX: usize = 20;

/// The result of examining a journal.
#[derive(Debug, Serialize)]
pub struct JournalExamination {
    /// The path of the file.
    pub path: PathBuf,
    /// Whether a daemon would start with the journal.
    pub intact: bool,
    /// Why not, and what to do; `None`: it is intact. The other fields describe what comes before the fault.
    pub problem: Option<String>,
    /// The version of the encoding; `None`: it does not begin like a journal.
    pub version: Option<u8>,
    /// The size in bytes, including reserved space.
    pub size_bytes: u64,
    /// The number of entries: completely durable commits.
    pub entries: u64,
    /// The number of records in the entries.
    pub records: u64,
    /// When the last entry was written, in milliseconds since 1970.
    pub last_unix_ms: Option<u64>,
    /// The end of the last entry, in bytes from the beginning of the file.
    pub end_bytes: u64,
    /// The bytes behind the end, of a commit that was cut off or is in flight. It was not acknowledged.
    pub torn_bytes: u64,
    /// The volumes in the journal.
    pub volumes: Vec<JournalVolume>,
    /// The migrations that have not ended.
    pub migrations: Vec<JournalMigration>,
    /// The list of hosts beside it; `None`: there is none, or it cannot be read.
    #[serde(skip)]
    pub(super) hosts: Option<BTreeSet<NamedHost>>,
    #[serde(skip)]
    content: Vec<u8>,
    #[serde(skip)]
    found: Vec<Entry>,
    #[serde(skip)]
    state: State,
}

/// A volume in a journal.
#[derive(Debug, Serialize)]
pub struct JournalVolume {
    /// The name of the volume.
    pub name: String,
    /// The identity of the volume.
    pub id: String,
    /// Which host owns the volume.
    pub owner: JournalOwner,
    /// The other host that has the volume, or from which it comes or is being filled.
    pub host: Option<String>,
    /// How often the volume has changed hands, as far as this host knows.
    pub generation: u64,
    /// The size of the volume in bytes.
    pub size_bytes: u64,
    /// The store of its image; `None`: in no store, or at the other host.
    pub store: Option<String>,
    /// The place of its image; `None`: at the other host.
    pub image: Option<String>,
}

/// The owner of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum JournalOwner {
    /// This host owns the volume.
    Here,
    /// This host owns the volume, and another one still has missing blocks.
    BeingFilled,
    /// Another host owns the volume, which has moved there.
    Elsewhere,
    /// Another host owns the volume, which is on its way here.
    Arriving,
    /// The journal was restored, and no host has confirmed the owner.
    Unconfirmed,
}

/// A migration in a journal that has not ended.
#[derive(Debug, Serialize)]
pub struct JournalMigration {
    /// The identity of the migration.
    pub id: String,
    /// The stage of the migration.
    pub stage: &'static str,
    /// The other host; `None`: the target is a store of this host.
    pub host: Option<String>,
    /// Whether the volumes come from the other host.
    pub incoming: bool,
    /// The names of the volumes.
    pub volumes: Vec<String>,
    /// When the migration began, in milliseconds since 1970.
    pub started_unix_ms: u64,
}

impl JournalExamination {
    /// Examines the journal at `path`, which is the file or its data folder. May block.
    ///
    /// # Errors
    /// [`JournalError::Io`], [`JournalError::TooLarge`]: it cannot be read. A damaged journal is no error.
    pub fn of(path: &Path) -> Result<Self, JournalError> {
        let path = if path.is_dir() { path.join(JOURNAL_FILE) } else { path.to_owned() };
        let mut reads = 1;
        loop {
            let (bytes, before) = read(&path)?;
            let (mut found, fault) = Self::of_bytes(&path, &bytes);
            found.hosts = path.parent().and_then(|folder| listed(folder).ok());
            let looks_torn = matches!(fault, Some(JournalError::Damaged { .. } | JournalError::Codec { .. }));
            // The daemon writes one commit after the other, and the file is not read in one instant.
            if !looks_torn || reads == READS_MAX || before == read(&path)?.1 {
                return Ok(found);
            }
            reads += 1;
        }
    }

    /// Returns everything in the journal as JSON: each record, and the resulting state.
    pub fn export(&self) -> serde_json::Value {
        export::document(self, &self.content, &self.found, &self.state)
    }

    /// Examines the content of a journal; `path` is for messages.
    pub fn of_content(path: &Path, content: &[u8]) -> Self {
        Self::of_bytes(path, content).0
    }

    /// Examines the bytes of a journal; also returns why a daemon would not start with it.
    fn of_bytes(path: &Path, bytes: &[u8]) -> (Self, Option<JournalError>) {
        let fault = fold(path, bytes).err();
        let (mut found, mut state, mut version, mut end) = (Vec::new(), State::default(), None, 0);
        if let Ok(mut frames) = Frames::new(bytes) {
            version = Some(VERSION);
            end = frames.position();
            while let Some(entry) = frames.next() {
                if state.apply(&entry).is_err() {
                    break;
                }
                end = frames.position();
                found.push(entry);
            }
        }
        let written = bytes.get(end..).unwrap_or_default().iter().rposition(|byte| *byte != 0);
        let torn = if fault.is_none() { written.map_or(0, |last| last + 1) } else { 0 };
        let examination = Self {
            path: path.to_owned(),
            intact: fault.is_none(),
            problem: fault.as_ref().map(|fault| with_causes(fault)),
            version,
            size_bytes: bytes.len() as u64,
            entries: found.len() as u64,
            records: found.iter().map(|entry| entry.records.len() as u64).sum(),
            last_unix_ms: found.last().map(|entry| entry.at_unix_ms),
            end_bytes: end as u64,
            torn_bytes: torn as u64,
            volumes: volumes(&state),
            migrations: migrations(&state),
            hosts: None,
            content: bytes.get(..end).unwrap_or_default().to_vec(),
            found,
            state,
        };
        (examination, fault)
    }
}

/// The attributes of a file.
type Look = (u64, i64, i64, u64);

fn read(path: &Path) -> Result<(Vec<u8>, Look), JournalError> {
    let failed = |source| JournalError::Io { path: path.to_owned(), operation: "read", source };
    // Opening a pipe would block.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is no file")));
    }
    if found.len() > FILE_BYTES_MAX {
        return Err(JournalError::TooLarge { path: path.to_owned(), bytes: found.len() });
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok((bytes, (found.ino(), found.mtime(), found.mtime_nsec(), found.len())))
}

pub(super) fn volumes(state: &State) -> Vec<JournalVolume> {
    let here = state.volumes.iter().map(|(id, known)| {
        let (record, filling) = (&known.record, state.fillings.get(id));
        JournalVolume {
            name: record.name.clone(),
            id: id.to_string(),
            owner: if filling.is_some() { JournalOwner::BeingFilled } else { JournalOwner::Here },
            host: filling.map(|filling| filling.peer_name.clone()),
            generation: record.generation.0,
            size_bytes: record.size_bytes,
            store: (!record.image.is_adopted()).then(|| record.image.store.clone()),
            image: Some(record.image.place.name().to_owned()),
        }
    });
    let moved = state.moved.iter().map(|(id, moved)| JournalVolume {
        name: moved.volume.record.name.clone(),
        id: id.to_string(),
        owner: match state.is_departure_in_question(*id) {
            true => JournalOwner::Unconfirmed,
            false => JournalOwner::Elsewhere,
        },
        host: Some(moved.host_name.clone()),
        generation: moved.generation.0,
        size_bytes: moved.volume.record.size_bytes,
        store: None,
        image: None,
    });
    let arriving = state.unfinished().flat_map(|(_, migration)| {
        let (peer, records) = match &migration.side {
            Side::Incoming { peer_name, volumes, .. } => (Some(peer_name), volumes.as_slice()),
            Side::OneHost | Side::Outgoing { .. } => (None, [].as_slice()),
        };
        let coming = records.iter().filter(|record| {
            !state.volumes.contains_key(&record.volume) && !state.moved.contains_key(&record.volume)
        });
        coming.map(move |record| JournalVolume {
            name: record.name.clone(),
            id: record.volume.to_string(),
            owner: JournalOwner::Arriving,
            host: peer.cloned(),
            generation: record.generation.0,
            size_bytes: record.size_bytes,
            store: Some(record.image.store.clone()),
            image: Some(record.image.place.name().to_owned()),
        })
    });
    let unconfirmed = state.restored_volumes().map(|(id, waiting)| {
        let record = &waiting.volume.record;
        JournalVolume {
            name: record.name.clone(),
            id: id.to_string(),
            owner: JournalOwner::Unconfirmed,
            host: None,
            generation: record.generation.0,
            size_bytes: record.size_bytes,
            store: (!record.image.is_adopted()).then(|| record.image.store.clone()),
            image: Some(record.image.place.name().to_owned()),
        }
    });
    let mut all: Vec<JournalVolume> = here.chain(moved).chain(arriving).chain(unconfirmed).collect();
    all.sort_by(|one, other| (&one.name, &one.id).cmp(&(&other.name, &other.id)));
    all
}

fn migrations(state: &State) -> Vec<JournalMigration> {
    let under_way = state.unfinished().map(|(id, known)| JournalMigration {
        id: id.to_string(),
        stage: stage_in_words(&known.stage),
        host: known.side.peer().map(|(_, name)| name.to_owned()),
        incoming: !known.side.has_source(),
        volumes: known.names.clone(),
        started_unix_ms: known.started_unix_ms,
    });
    under_way.collect()
}

pub(super) fn stage_in_words(stage: &Stage) -> &'static str {
    match stage {
        Stage::Copying => "copying",
        Stage::Prepared(_) => "prepared",
        Stage::Released(_) => "released",
        Stage::Owned(_) => "owned",
        Stage::HandedBack => "handed-back",
        Stage::Ended(_) => "ended",
        Stage::Discarding(_) => "discarding",
    }
}

#[cfg(test)]
mod tests;
