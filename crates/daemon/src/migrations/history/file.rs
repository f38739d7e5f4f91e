//! Histories as files: one for each migration, `m7.json`; only the latest are kept.
//! A file is replaced as a whole, so that a reader never sees half of one. It is not flushed, because its loss does no harm.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use migration::MigrationId;
use serde::{Deserialize, Serialize};

/// How many files are kept; at the largest size they take some 20 MB.
const FILES_MAX: usize = 100;
/// The largest file that is read, in bytes: many times the largest that is written.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The version of the format; files of other versions are ignored.
const FORMAT: u32 = 1;

#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

/// The content of a file. The recording has the form of the API, which only gains fields.
#[derive(Serialize, Deserialize)]
struct Stored<R> {
    format: u32,
    /// When the migration began: a new journal reuses identities.
    started_unix_ms: u64,
    recording: R,
}

impl Folder {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Writes a migration's file and deletes the oldest surplus files. Failures are logged.
    pub(crate) fn write(&self, migration: MigrationId, started_unix_ms: u64, recording: &api::Recording) {
        let stored = Stored { format: FORMAT, started_unix_ms, recording };
        let written = serde_json::to_vec(&stored).map_err(io::Error::from).and_then(|bytes| {
            fs::create_dir_all(&self.path)?;
            let (path, new) = (self.file(migration), self.path.join(format!("{migration}.new")));
            fs::write(&new, bytes)?;
            fs::rename(&new, path)?;
            self.prune()
        });
        if let Err(error) = written {
            tracing::warn!(%migration, folder = %self.path.display(), %error, "a history cannot be kept");
        }
    }

    /// Reads a migration's file; `None` if there is none that can be read.
    pub(crate) fn read(&self, migration: MigrationId, started_unix_ms: u64) -> Option<api::Recording> {
        let path = self.file(migration);
        match read_file(&path) {
            Ok(stored) if stored.format == FORMAT && stored.started_unix_ms == started_unix_ms => {
                Some(stored.recording)
            }
            Ok(_) => None,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %error, "a history cannot be read");
                }
                None
            }
        }
    }

    /// Returns the migrations that have files; none if the folder cannot be read.
    pub(crate) fn list(&self) -> BTreeSet<MigrationId> {
        self.numbers().unwrap_or_default()
    }

    fn file(&self, migration: MigrationId) -> PathBuf {
        self.path.join(format!("{migration}.json"))
    }

    fn prune(&self) -> io::Result<()> {
        let kept = self.numbers()?;
        let too_many = kept.len().saturating_sub(FILES_MAX);
        kept.iter().take(too_many).try_for_each(|migration| fs::remove_file(self.file(*migration)))
    }

    fn numbers(&self) -> io::Result<BTreeSet<MigrationId>> {
        let mut kept = BTreeSet::new();
        for entry in fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix('m')?.strip_suffix(".json"));
            kept.extend(number.and_then(|number| number.parse().ok()).map(MigrationId));
        }
        Ok(kept)
    }
}

fn read_file(path: &Path) -> io::Result<Stored<api::Recording>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}
