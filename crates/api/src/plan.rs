//! What a migration would do, without doing it: the answer to a dry run.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorDetail;
use crate::migration::{ImageLocation, QueuePlace};

/// What a migration would do, as far as it can be seen before it begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationPlan {
    /// The volume or the VM.
    pub name: String,
    /// Whether it would begin now, or wait for its turn; false if anything of `refusals` is in the way.
    pub can_begin: bool,
    /// Why it would be refused, each with what to do.
    pub refusals: Vec<ErrorDetail>,
    /// What it costs besides time, what would stay behind, and what may go wrong.
    pub warnings: Vec<String>,
    /// The other host; `None`: it stays at this one.
    #[serde(default)]
    pub host: Option<String>,
    /// What would move, each to where it would be.
    pub volumes: Vec<PlannedVolume>,
    /// The VM that would go along.
    #[serde(default)]
    pub machine: Option<PlannedMachine>,
    /// Bytes that would be copied at most, besides what guests write meanwhile: of volumes and of memory.
    pub bytes_max: u64,
    /// The connections that would carry it; none on one host.
    #[serde(default)]
    pub links: Vec<PlannedLink>,
    /// How fast it would be copied, in bytes a second; `None`: nobody knows.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Where `bytes_per_second` is from.
    #[serde(default)]
    pub rate: Option<RateOrigin>,
    /// How long the copying would take at that rate, in seconds.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Its place in the queue; `None`: it would begin at once.
    #[serde(default)]
    pub queue: Option<QueuePlace>,
}

/// A volume that would move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVolume {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Bytes of its image that hold something: what would be copied at most.
    pub held_bytes: u64,
    /// Where it is.
    pub source: ImageLocation,
    /// Where it would be; `None`: it is refused, or the other host does not say.
    #[serde(default)]
    pub target: Option<ImageLocation>,
    /// Bytes that are free there now; `None`: the store does not say.
    #[serde(default)]
    pub free_bytes: Option<u64>,
    /// Whether an image of an earlier stay is there, so that only what was written since would be sent.
    #[serde(default)]
    pub replica: bool,
    /// Whether this host has the target's folder as well, so that blocks would be written straight there.
    #[serde(default)]
    pub shared: bool,
}

/// A VM that would go along with its volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlannedMachine {
    /// Its name.
    pub name: String,
    /// Its memory in bytes; `None`: its QEMU does not say.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// How long it may stand still, in milliseconds.
    pub max_downtime_ms: u64,
    /// How long an idle one would stand still at least, by the round trip that was measured, in milliseconds.
    #[serde(default)]
    pub least_downtime_ms: Option<f64>,
}

/// A connection that would carry a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedLink {
    /// The end here.
    pub local: String,
    /// The end there.
    pub remote: String,
    /// The newest round trip in microseconds.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
    /// Bytes a second that it carried when it had enough to do last.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
}

/// Where a rate is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RateOrigin {
    /// What was ordered.
    Ordered,
    /// What the connections carried when they had enough to do last.
    Measured,
    /// What the configuration says of the links.
    Stated,
}

impl RateOrigin {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
            Self::Measured => "measured",
            Self::Stated => "stated",
        }
    }
}
