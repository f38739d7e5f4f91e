//! What a host remembers of the tests of its standbys.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{BYTES_MAX, Book, remove};
use crate::files::whole_file;

/// A test of a standby: volumes of this host that are a clone of a recovery point.
///
/// It is durable before anything of the test is made, and stays as the memory of the last test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TestRecord {
    pub(crate) name: String,
    /// The recovery point that was ordered; `None`: the newest state.
    pub(crate) ordered_point: Option<String>,
    /// The recovery point of which it is a clone, once it is made.
    pub(crate) point: Option<String>,
    pub(crate) volumes: Vec<TestVolume>,
    pub(crate) vms: Vec<TestVm>,
    pub(crate) networks: TestNetworks,
    pub(crate) boot_check: Option<BootCheck>,
    pub(crate) begun_unix_ms: u64,
    /// When all of it was there.
    pub(crate) made_unix_ms: Option<u64>,
    /// When it ends at the latest.
    pub(crate) ends_unix_ms: u64,
    pub(crate) stage: Stage,
}

/// A volume of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TestVolume {
    /// Its identity, 32 hexadecimal digits: drawn for this test.
    pub(crate) volume: String,
    pub(crate) name: String,
    /// The name of the volume of which it is a clone.
    pub(crate) of: String,
}

/// A VM of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TestVm {
    pub(crate) name: String,
    /// The name of the VM that was described.
    pub(crate) of: String,
    /// The names of the logs of its consoles, once it is made.
    pub(crate) consoles: Vec<String>,
}

/// The networks of a test's VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TestNetworks {
    Apart,
    AsTheyAre,
}

/// What a test waits for on the consoles of its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootCheck {
    pub(crate) text: String,
    pub(crate) timeout_ms: u64,
    /// Whether the test ends with the check.
    pub(crate) ends_test: bool,
    /// What it has found; `None`: not yet.
    pub(crate) found: Option<Booted>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Booted {
    pub(crate) is_seen: bool,
    /// The time from the start of the VMs.
    pub(crate) after_ms: u64,
}

/// How far a test is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "kebab-case")]
pub(crate) enum Stage {
    /// Something of it may be there.
    Making,
    /// All of it is there.
    Running,
    /// All of it is being deleted.
    Ending { why: Why },
    /// Nothing of it is there.
    Ended { why: Why, at_unix_ms: u64 },
}

/// Why a test ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "because", rename_all = "kebab-case")]
pub(crate) enum Why {
    /// An administrator has ended it.
    Ordered,
    /// Its time is over.
    Over,
    /// The daemon ended while it was made.
    Interrupted,
    /// It could not be made.
    NotMade { reason: String },
    /// What it waited for has appeared on the console, and nothing else was ordered.
    Booted,
    /// That has not appeared in time.
    NotBooted,
    /// The store has become too full.
    NoRoom,
    /// The standby is promoted.
    Promoted,
    /// The standby is removed.
    Removed,
}

impl Book {
    /// Returns the test of a standby that is kept here; `None`: there was none.
    pub(crate) fn test(&self, id: &str) -> io::Result<Option<TestRecord>> {
        let bytes = whole_file::read(&self.test_path(id), BYTES_MAX)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    pub(crate) fn write_test(&self, id: &str, test: &TestRecord) -> io::Result<()> {
        whole_file::replace(&self.test_path(id), &serde_json::to_vec_pretty(test)?)
    }

    /// Forgets the test of a standby durably.
    pub(crate) fn forget_test(&self, id: &str) -> io::Result<()> {
        remove(&self.test_path(id))
    }

    fn test_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.test.json"))
    }
}
