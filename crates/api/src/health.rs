//! Whether a daemon is alive, and its problems.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The answer of a daemon that is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Number of the daemon's process.
    pub pid: u32,
    /// When it began to serve, in milliseconds since 1970.
    pub started_unix_ms: u64,
}

/// The problems of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    /// Whether there are no problems.
    pub ready: bool,
    /// Everything that the daemon should do and does not.
    pub problems: Vec<Problem>,
    /// Conditions that need attention, but leave the daemon ready.
    #[serde(default)]
    pub warnings: Vec<Problem>,
}

/// Something that a daemon should do and does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The part of the daemon with the problem.
    pub part: Part,
    /// Name of the volume, VM, store or host, or number of the migration; `None` for other parts.
    #[serde(default)]
    pub name: Option<String>,
    /// The problem with its reason, as text.
    pub message: String,
}

/// A part of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The daemon itself: it is stopping.
    Daemon,
    /// The journal: the latest commit is not durable.
    Journal,
    /// A volume: it is not served.
    Volume,
    /// The endpoint for other hosts: they cannot reach this one.
    Hosts,
    /// The API over TLS: no client can connect.
    Access,
    /// A migration: it waits, or makes no progress.
    Migration,
    /// A VM: its guest does not work.
    Vm,
    /// A standby of this host's volumes: it is too old, or its volumes are at two hosts.
    Standby,
    /// A store: it cannot be used, or is nearly full.
    Store,
    /// The folder with the journal: it is nearly full.
    DataFolder,
}

impl Part {
    /// Returns the part's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Journal => "journal",
            Self::Volume => "volume",
            Self::Hosts => "hosts",
            Self::Access => "access",
            Self::Migration => "migration",
            Self::Vm => "vm",
            Self::Standby => "standby",
            Self::Store => "store",
            Self::DataFolder => "data-folder",
        }
    }
}
