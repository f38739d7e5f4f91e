//! Whether this host takes anything new: a mark that an administrator sets for maintenance, and an evacuation that runs.
//!
//! ```text
//!   host drain ──► drained.json, durably ──► volumes, VMs and standbys that are new are refused, from here and from other hosts
//! ```
//! Everything that is here goes on. Moves between the stores of this host are nothing new.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::error::{EvacuationError, RequestError};
use crate::files::whole_file;

const FILE: &str = "drained.json";
const FILE_BYTES_MAX: u64 = 4096;
const VERSION: u32 = 1;

/// Whether this host takes anything new.
pub(crate) struct Draining {
    path: PathBuf,
    is_drained: AtomicBool,
    is_evacuating: AtomicBool,
    /// Why it is unknown whether an evacuation was under way.
    unknown_because: OnceLock<String>,
}

#[derive(Serialize, Deserialize)]
struct Mark {
    version: u32,
    drained: bool,
}

impl Draining {
    /// Reads the mark. A mark that cannot be read counts as set: unknown is not no.
    pub(crate) fn open(data_dir: &Path) -> Arc<Self> {
        let path = data_dir.join(FILE);
        let is_drained = match read(&path) {
            Ok(mark) => mark.is_some_and(|mark| mark.drained),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "it is unknown whether this host is drained, so it counts as such");
                true
            }
        };
        Arc::new(Self {
            path,
            is_drained: is_drained.into(),
            is_evacuating: false.into(),
            unknown_because: OnceLock::new(),
        })
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained.load(Ordering::Acquire)
    }

    pub(crate) fn is_evacuating(&self) -> bool {
        self.is_evacuating.load(Ordering::Acquire)
    }

    /// Refuses what is new. Errors: [`EvacuationError::Drained`], [`EvacuationError::Evacuating`].
    pub(crate) fn refuse_new(&self) -> Result<(), RequestError> {
        match (self.is_evacuating(), self.is_drained()) {
            (true, _) => Err(EvacuationError::Evacuating.into()),
            (false, true) => Err(EvacuationError::Drained.into()),
            (false, false) => Ok(()),
        }
    }

    /// Sets or removes the mark durably. May block. After an error the host is as it was.
    pub(crate) fn set_drained(&self, drained: bool) -> Result<(), RequestError> {
        let mark = serde_json::to_vec(&Mark { version: VERSION, drained }).map_err(std::io::Error::other);
        let written = mark.and_then(|mark| whole_file::replace(&self.path, &mark));
        written.map_err(|error| RequestError::storage("write", &self.path, &error))?;
        self.is_drained.store(drained, Ordering::Release);
        tracing::info!(drained, "whether this host takes anything new");
        Ok(())
    }

    /// Notes that it is unknown whether an evacuation was under way when the daemon began.
    pub(crate) fn note_unknown(&self, reason: String) {
        // There is one record.
        let _ = self.unknown_because.set(reason);
    }

    /// Returns why it is unknown whether an evacuation was under way; `None`: it is known.
    pub(crate) fn unknown_because(&self) -> Option<&str> {
        self.unknown_because.get().map(String::as_str)
    }

    pub(crate) fn set_evacuating(&self, evacuating: bool) {
        self.is_evacuating.store(evacuating, Ordering::Release);
    }
}

fn read(path: &Path) -> std::io::Result<Option<Mark>> {
    let Some(text) = whole_file::believe(path, FILE_BYTES_MAX)? else { return Ok(None) };
    let mark: Mark = serde_json::from_slice(&text)?;
    match mark.version {
        VERSION => Ok(Some(mark)),
        version => Err(std::io::Error::other(format!("it has version {version}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_outlives_the_daemon_and_a_damaged_one_counts() {
        let folder = tempfile::tempdir().unwrap();
        let draining = Draining::open(folder.path());
        draining.refuse_new().unwrap();
        draining.set_drained(true).unwrap();
        let refused = Draining::open(folder.path()).refuse_new().unwrap_err();
        assert_eq!(refused.code(), api::ErrorCode::HostDrained);
        draining.set_drained(false).unwrap();
        Draining::open(folder.path()).refuse_new().unwrap();
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert!(Draining::open(folder.path()).is_drained());
    }
}
