//! Notices: what a host tells its administrators by itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Part;

/// What a host tells. It is the body of a webhook, and the standard input of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Notice {
    /// Its identity: a notice that is sent twice has the same one.
    pub id: String,
    /// When it was noticed, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Name of the host that tells it.
    pub host: String,
    /// What has happened.
    pub event: NoticeEvent,
    /// How much it matters.
    pub level: NoticeLevel,
    /// The part of the daemon that it is about.
    pub part: Part,
    /// Name of the volume, VM, standby, store or host, or number of the migration; `None` for other parts.
    #[serde(default)]
    pub name: Option<String>,
    /// The same in words.
    pub message: String,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NoticeEvent {
    /// A problem has begun, and lasts.
    Begun,
    /// That problem has ended.
    Ended,
    /// Something has happened that does not last, such as the failure of a migration.
    Happened,
    /// An administrator has ordered a notice to see whether notices arrive.
    Test,
}

/// How much a notice matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NoticeLevel {
    /// The daemon does not do all that it is to do.
    Problem,
    /// It does, but somebody should look.
    Warning,
}

/// A program or webhook that notices go to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NoticeDestination {
    /// The path of the program, or the address of the webhook.
    pub to: String,
    /// Number of notices that wait for it.
    pub waiting: u64,
    /// Number of notices that it never got since the daemon's start: they were too many, or a day old.
    pub lost: u64,
    /// When it last took one, in milliseconds since 1970; `None`: not since the daemon's start.
    #[serde(default)]
    pub delivered_unix_ms: Option<u64>,
    /// Why it does not take the present one; `None`: it does, or there is none.
    #[serde(default)]
    pub fault: Option<String>,
}

impl NoticeEvent {
    /// Returns the event's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Ended => "ended",
            Self::Happened => "happened",
            Self::Test => "test",
        }
    }
}

impl NoticeLevel {
    /// Returns the level's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
        }
    }
}
