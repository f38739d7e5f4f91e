//! Whether a daemon is alive, and whether it does all that it is to do.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A daemon that is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Its process.
    pub pid: u32,
    /// When it began to serve, in milliseconds since 1970.
    pub started_unix_ms: u64,
}

/// Whether a daemon does all that it is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    /// Whether it does: nothing is in the way.
    pub ready: bool,
    /// What is in the way.
    pub problems: Vec<Problem>,
    /// What somebody should look at: it is in the way of nothing yet, or of what other hosts bring.
    #[serde(default)]
    pub warnings: Vec<Problem>,
}

/// Something that a daemon is to do and does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What has it.
    pub part: Part,
    /// Name of the volume, or number of the migration; `None` of what there is one of.
    #[serde(default)]
    pub name: Option<String>,
    /// What it is, for people.
    pub message: String,
}

/// A part of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The daemon itself: it is stopping.
    Daemon,
    /// The journal: what was to be durable last is not.
    Journal,
    /// A volume: it is not served.
    Volume,
    /// The endpoint for other hosts: they cannot reach this one.
    Hosts,
    /// The API over TLS: nobody is let in.
    Access,
    /// A migration: it waits, or nothing comes of it.
    Migration,
}

impl Part {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Journal => "journal",
            Self::Volume => "volume",
            Self::Hosts => "hosts",
            Self::Access => "access",
            Self::Migration => "migration",
        }
    }
}
