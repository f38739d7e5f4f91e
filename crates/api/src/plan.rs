//! The answer to a dry run: the effects and obstacles of a migration that is not begun.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorDetail;
use crate::forecast::Forecast;
use crate::migration::{ImageLocation, QueuePlace};
use crate::strategy::Strategy;

/// The expected effects of a migration, and its obstacles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationPlan {
    /// Name of the volume or the VM.
    pub name: String,
    /// Whether it would begin now or be queued; false if there are `refusals`.
    pub can_begin: bool,
    /// The obstacles, each with what to do about it.
    pub refusals: Vec<ErrorDetail>,
    /// Costs besides time, parts that would stay behind, and risks.
    pub warnings: Vec<String>,
    /// Name of the target host; `None`: this host.
    #[serde(default)]
    pub host: Option<String>,
    /// The volumes that would move, each with its target.
    pub volumes: Vec<PlannedVolume>,
    /// The VM that would move with the volumes.
    #[serde(default)]
    pub machine: Option<PlannedMachine>,
    /// Largest number of bytes of volumes and memory to copy, without guest writes meanwhile.
    pub bytes_max: u64,
    /// How it would be copied; `auto`: the daemon does not say.
    #[serde(default)]
    pub strategy: Strategy,
    /// Why the daemon would choose this strategy; empty: it is ordered.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub strategy_reason: String,
    /// The connections that would carry it; empty on one host.
    #[serde(default)]
    pub links: Vec<PlannedLink>,
    /// Expected rate in bytes a second; `None`: unknown.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// The origin of `bytes_per_second`.
    #[serde(default)]
    pub rate: Option<RateOrigin>,
    /// What to expect of it; `None`: no rate is known, or it begins with a kept image.
    #[serde(default)]
    pub forecast: Option<Forecast>,
    /// Its place in the queue; `None`: it would begin at once.
    #[serde(default)]
    pub queue: Option<QueuePlace>,
}

/// A volume that would move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVolume {
    /// Name of the volume.
    pub name: String,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// Allocated bytes of its image: the most that would be copied.
    pub held_bytes: u64,
    /// The image that it leaves.
    pub source: ImageLocation,
    /// Its image at the target; `None`: the migration would be refused, or the other host does not report it.
    #[serde(default)]
    pub target: Option<ImageLocation>,
    /// Free bytes at the target now; `None`: the store does not report it.
    #[serde(default)]
    pub free_bytes: Option<u64>,
    /// Whether the target has a kept image of the volume, so that only later writes would be sent.
    #[serde(default)]
    pub replica: bool,
    /// Whether this host can open the target's folder, so that blocks would be written there directly.
    #[serde(default)]
    pub shared: bool,
    /// Whether the new image would share its blocks with the old one, so that nothing is read or written.
    #[serde(default)]
    pub cloned: bool,
    /// Why it would be copied between two stores of this host, and not cloned; `None`: it would be cloned, or goes to another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_because: Option<String>,
}

/// A VM that would move with its volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlannedMachine {
    /// Name of the VM.
    pub name: String,
    /// Whether it is stopped; it then moves without memory, and stays stopped.
    #[serde(default)]
    pub stopped: bool,
    /// Its memory in bytes; `None`: its QEMU does not report it, or it is stopped.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Longest downtime that it may have, in milliseconds; `None`: it is stopped.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// Least downtime of an idle VM, by the measured round trip, in milliseconds.
    #[serde(default)]
    pub least_downtime_ms: Option<f64>,
}

/// A connection that would carry a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedLink {
    /// Address at this host.
    pub local: String,
    /// Address at the other host.
    pub remote: String,
    /// The latest round trip, in microseconds.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
    /// Its rate in bytes a second when it was last fully used.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
}

/// The origin of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RateOrigin {
    /// The bandwidth of the order.
    Ordered,
    /// The rate of the connections when they were last fully used.
    Measured,
    /// The speed of the links in the configuration.
    Stated,
}

impl RateOrigin {
    /// Returns the origin's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
            Self::Measured => "measured",
            Self::Stated => "stated",
        }
    }
}
