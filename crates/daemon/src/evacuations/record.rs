//! What is durable of an evacuation: the order, and what has become of each workload so far.
//!
//! ```text
//!   evacuation.json   {"version": 1, "order": …, "workloads": [ … ]}    replaced as a whole with each step
//! ```
//! The record gives no right and proves no ownership: the journal says where volumes are. After a restart it is compared with that.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::files::whole_file;

pub(super) const FILE: &str = "evacuation.json";
/// The largest size of the file: tens of thousands of workloads.
const FILE_BYTES_MAX: u64 = 32 << 20;
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u32,
    pub(super) order: Order,
    pub(super) started_unix_ms: u64,
    /// `None`: it runs.
    pub(super) ended_unix_ms: Option<u64>,
    pub(super) is_aborted: bool,
    pub(super) workloads: Vec<Entry>,
}

/// What was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Order {
    /// The targets, as `HOST` or `HOST:STORE`.
    pub(super) to: Vec<String>,
    pub(super) deadline_unix_ms: Option<u64>,
    pub(super) stop_rest: bool,
}

/// A workload of the evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) volumes: Vec<String>,
    pub(super) priority: u8,
    /// Whether it is a VM that ran.
    pub(super) is_running: bool,
    pub(super) bytes: u64,
    pub(super) state: State,
    /// Where it is or goes to, as `HOST:STORE`.
    pub(super) target: Option<String>,
    pub(super) origin: Option<String>,
    pub(super) is_post_copy: bool,
    /// Its migration, as `m7`.
    pub(super) migration: Option<String>,
    /// Whether its migration is paused for a higher one.
    #[serde(default)]
    pub(super) is_held: bool,
    pub(super) reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    Vm,
    Volume,
}

/// What has become of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    Waiting,
    /// Its migration is ordered, or about to be.
    Moving,
    Stopping,
    Left,
    Stopped,
    Stays,
}

impl State {
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Left | Self::Stopped | Self::Stays)
    }
}

impl Record {
    pub(super) fn new(order: Order, started_unix_ms: u64) -> Self {
        Self {
            version: VERSION,
            order,
            started_unix_ms,
            ended_unix_ms: None,
            is_aborted: false,
            workloads: Vec::new(),
        }
    }

    /// Reads the file; `None`: there is none. May block.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let Some(text) = whole_file::believe(path, FILE_BYTES_MAX)? else { return Ok(None) };
        let record: Self = serde_json::from_slice(&text)?;
        match record.version {
            VERSION => Ok(Some(record)),
            version => {
                Err(io::Error::other(format!("it has version {version}, and this program knows {VERSION}")))
            }
        }
    }

    /// Writes the file durably. May block.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        whole_file::replace(path, &serde_json::to_vec(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_damaged_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        assert_eq!(Record::read(&path).unwrap(), None);
        let order = Order { to: vec!["b:fast".to_owned()], deadline_unix_ms: Some(7), stop_rest: true };
        let mut record = Record::new(order, 5);
        record.workloads.push(Entry {
            name: "web1".to_owned(),
            kind: Kind::Vm,
            volumes: vec!["web1-0".to_owned()],
            priority: 60,
            is_running: true,
            bytes: 100,
            state: State::Moving,
            target: Some("b:fast".to_owned()),
            origin: None,
            is_post_copy: false,
            migration: Some("m3".to_owned()),
            is_held: true,
            reason: None,
        });
        record.write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap(), Some(record));
        std::fs::write(&path, "{\"version\":1}").unwrap();
        Record::read(&path).unwrap_err();
    }
}
