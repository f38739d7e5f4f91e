//! The list of machines, and the file that keeps it.
//!
//! It is a file of its own, not part of the journal: which volumes there are and who owns them does not depend on it, people
//! may read and back it up, and a broken one keeps no volume from being served. It is replaced as a whole.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::whole_file;

/// Name of the file in the data folder.
const FILE: &str = "vms.json";
/// Version of its format.
const VERSION: u32 = 1;
/// Its largest size: hundreds of machines with the longest definitions.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The machines that there are.
pub(super) struct Catalogue {
    path: PathBuf,
    /// By name.
    records: Mutex<BTreeMap<String, Record>>,
}

/// What is remembered of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) name: String,
    /// As it was written.
    pub(super) definition: String,
    pub(super) standing: Standing,
    pub(super) fate: Fate,
    pub(super) added_unix_ms: u64,
    /// The socket of its monitor, if somebody else has started its QEMU: it is here while it leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) monitor: Option<PathBuf>,
}

/// Whether a machine is this host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    /// It is.
    Home,
    /// It comes from another host, and may yet stay there.
    Arriving,
    /// It goes to another host, and may yet stay here.
    Leaving,
}

impl Standing {
    /// What is done with a machine, as part of a sentence.
    pub(super) fn why(self) -> &'static str {
        match self {
            Self::Home => "is at home",
            Self::Arriving => "is on its way here",
            Self::Leaving => "is on its way to another host",
        }
    }
}

/// What has become of a machine's QEMU, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Fate {
    /// It has ended in order, or was never started.
    Stopped,
    /// It was started, and nobody has seen it end.
    Started,
    /// It has ended in another way.
    Crashed {
        /// What it said last.
        message: String,
    },
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CatalogueError {
    /// The system refused.
    #[error("the file {path} cannot be {done}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What was to be done with it.
        done: &'static str,
        /// What the system answered.
        source: io::Error,
    },
    /// It holds something else.
    #[error("the file {path} is no list of machines: restore it, or remove it and add the machines again")]
    Malformed {
        /// Which.
        path: PathBuf,
        /// Where it deviates.
        source: serde_json::Error,
    },
    /// It is from a newer version.
    #[error("the file {path} has version {version}; this program knows {VERSION}")]
    Version {
        /// Which.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    vms: Vec<Record>,
}

impl Catalogue {
    /// Reads the file, if there is one.
    pub(super) fn open(data_dir: &Path) -> Result<Self, CatalogueError> {
        let path = data_dir.join(FILE);
        let failed = |source| CatalogueError::Io { path: path.clone(), done: "read", source };
        let records = match whole_file::read(&path, FILE_BYTES_MAX).map_err(failed)? {
            None => BTreeMap::new(),
            Some(text) => {
                let content: Content = serde_json::from_slice(&text)
                    .map_err(|source| CatalogueError::Malformed { path: path.clone(), source })?;
                if content.version != VERSION {
                    return Err(CatalogueError::Version { path, version: content.version });
                }
                content.vms.into_iter().map(|record| (record.name.clone(), record)).collect()
            }
        };
        Ok(Self { path, records: Mutex::new(records) })
    }

    /// All records, by name.
    pub(super) fn records(&self) -> Vec<Record> {
        self.lock().values().cloned().collect()
    }

    /// Adds a record durably, or replaces the one of that name.
    pub(super) fn put(&self, record: &Record) -> Result<(), CatalogueError> {
        self.change(|records| drop(records.insert(record.name.clone(), record.clone())))
    }

    /// Deletes a record durably.
    pub(super) fn delete(&self, name: &str) -> Result<(), CatalogueError> {
        self.change(|records| drop(records.remove(name)))
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, Record>)) -> Result<(), CatalogueError> {
        let mut records = self.lock();
        let mut changed = records.clone();
        change(&mut changed);
        let failed = |source| CatalogueError::Io { path: self.path.clone(), done: "written", source };
        let content = Content { version: VERSION, vms: changed.values().cloned().collect() };
        let text = serde_json::to_vec_pretty(&content).map_err(|error| failed(error.into()))?;
        whole_file::replace(&self.path, &text).map_err(failed)?;
        *records = changed;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, fate: Fate) -> Record {
        let definition = "command = []".to_owned();
        Record {
            name: name.to_owned(),
            definition,
            standing: Standing::Home,
            fate,
            added_unix_ms: 7,
            monitor: None,
        }
    }

    #[test]
    fn machines_are_kept_changed_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::open(folder.path()).unwrap();
        catalogue.put(&record("a", Fate::Stopped)).unwrap();
        catalogue.put(&record("b", Fate::Started)).unwrap();
        let crashed = record("a", Fate::Crashed { message: "killed".to_owned() });
        catalogue.put(&crashed).unwrap();
        let again = Catalogue::open(folder.path()).unwrap();
        assert_eq!(again.records(), [crashed, record("b", Fate::Started)]);
        again.delete("a").unwrap();
        assert_eq!(Catalogue::open(folder.path()).unwrap().records(), [record("b", Fate::Started)]);
    }

    #[test]
    fn a_file_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &str| {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            Catalogue::open(folder.path()).err().unwrap()
        };
        assert!(matches!(check("{"), CatalogueError::Malformed { .. }));
        assert!(matches!(check(r#"{"version":2,"vms":[]}"#), CatalogueError::Version { .. }));
    }
}
