//! The list of VMs, and what is remembered of each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::files::listing::{Listed, Listing};

/// The VMs that there are.
pub(super) type Catalogue = Listing<Record>;

/// What is remembered of a VM.
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
    /// The number of the user that its QEMU runs as, once it was started as one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<u32>,
    /// It came paused by somebody else, and is to stay so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) stays_paused: bool,
}

/// Whether a VM is this host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    Home,
    /// It comes from another host, and may yet stay there.
    Arriving,
    /// It goes to another host, and may yet stay here.
    Leaving,
}

impl Standing {
    /// What is done with a VM, as part of a sentence.
    pub(super) fn why(self) -> &'static str {
        match self {
            Self::Home => "is at home",
            Self::Arriving => "is on its way here",
            Self::Leaving => "is on its way to another host",
        }
    }
}

/// What has become of a VM's QEMU, as far as it is known.
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
        };
        assert_eq!(Catalogue::open(folder.path()).unwrap().list(), [record]);
    }
}
