//! The list of VMs, with the record of each.

use std::path::PathBuf;

use migration::vm::cold::Form;
use migration::vm::suspend;
use serde::{Deserialize, Serialize};

use super::preferences::Preferences;
use super::suspended::Saved;
use crate::files::listing::{Listed, Listing};
use crate::journal::now_unix_ms;

pub(super) type Catalogue = Listing<Record>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) definition: String,
    pub(super) standing: Standing,
    pub(super) fate: Fate,
    pub(super) added_unix_ms: u64,
    /// The socket of its monitor, if Sterna did not start its QEMU: such a VM is listed while it leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) monitor: Option<PathBuf>,
    /// The user ID of its QEMU, once the VM was started with a user of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<u32>,
    /// Whether its user had paused it before it came, so that it stays paused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) stays_paused: bool,
    /// Whether it is moving without a hypervisor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_cold: bool,
    #[serde(flatten)]
    pub(super) preferences: Preferences,
    /// The boot of the host in which it was last started, stopped or added: that boot need not start it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) settled_boot: Option<String>,
}

impl Record {
    /// Returns the record of a VM that arrives from another host.
    pub(super) fn arriving(name: &str, definition: &str, form: Form, preferences: Preferences) -> Self {
        Self {
            name: name.to_owned(),
            definition: definition.to_owned(),
            standing: Standing::Arriving,
            fate: Fate::Stopped,
            added_unix_ms: now_unix_ms(),
            monitor: None,
            user: None,
            stays_paused: false,
            is_cold: form == Form::Cold,
            preferences,
            settled_boot: None,
        }
    }
}

/// Whether a VM belongs to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    Home,
    /// It comes from another host, and may still stay there.
    Arriving,
    /// It leaves for another host, and may still stay here.
    Leaving,
}

impl Standing {
    /// Returns why the VM is busy, as part of a sentence.
    pub(super) fn why(self) -> &'static str {
        match self {
            Self::Home => "is at home",
            Self::Arriving => "is on its way here",
            Self::Leaving => "is on its way to another host",
        }
    }
}

/// The last known state of a VM's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Fate {
    /// It has ended in order, or was never started.
    Stopped,
    /// It was started, and no daemon has seen its end.
    Started,
    /// It has ended unexpectedly.
    Crashed { message: String },
    /// It was suspended, and has to end.
    Saved { memory: Saved },
    /// It was suspended, and has ended.
    Suspended { memory: Saved },
    /// It was suspended, and a new one may be loading its memory.
    Restoring { memory: Saved },
}

impl Fate {
    /// Returns what this says about a file with the VM's memory.
    pub(super) fn suspension(&self) -> suspend::Record {
        match self {
            Self::Stopped | Self::Started | Self::Crashed { .. } => suspend::Record::Nothing,
            Self::Saved { .. } => suspend::Record::Saved,
            Self::Suspended { .. } => suspend::Record::Suspended,
            Self::Restoring { .. } => suspend::Record::Restoring,
        }
    }

    /// Returns the memory in a file; `None`: there is none.
    pub(super) fn saved(&self) -> Option<&Saved> {
        match self {
            Self::Stopped | Self::Started | Self::Crashed { .. } => None,
            Self::Saved { memory } | Self::Suspended { memory } | Self::Restoring { memory } => Some(memory),
        }
    }
}

impl Listed for Record {
    const FILE: &'static str = "vms.json";
    const VERSION: u32 = 1;
    const KEY: &'static str = "vms";
    const OTHERWISE: &'static str = "no list of VMs: restore it, or remove it and add the VMs again";

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_version_wrote_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let written = r#"{"version":1,"vms":[{"name":"a","definition":"command = []","standing":"home",
            "fate":{"kind":"crashed","message":"killed"},"added_unix_ms":7}]}"#;
        std::fs::write(folder.path().join(Record::FILE), written).unwrap();
        let record = Record {
            name: "a".to_owned(),
            definition: "command = []".to_owned(),
            standing: Standing::Home,
            fate: Fate::Crashed { message: "killed".to_owned() },
            added_unix_ms: 7,
            monitor: None,
            user: None,
            stays_paused: false,
            is_cold: false,
            preferences: Preferences::default(),
            settled_boot: None,
        };
        assert_eq!(Catalogue::open(folder.path()).unwrap().list(), [record]);
    }
}
