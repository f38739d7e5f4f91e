//! Snapshots of volumes, and the orders about them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a volume is a snapshot of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotOf {
    /// The name of the volume when the snapshot was taken.
    pub volume: String,
    /// The identity of the volume, which may have left or be gone.
    pub volume_id: String,
    /// The label of the snapshot.
    pub label: String,
    /// When it was ordered, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// The same for all snapshots of one instant.
    pub group: String,
}

/// An order to take snapshots of volumes at one instant. Each is a read-only volume `VOLUME@LABEL`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// The names of the volumes; empty with `vm`.
    #[serde(default)]
    pub volumes: Vec<String>,
    /// The VM all of whose volumes it is about.
    #[serde(default)]
    pub vm: Option<String>,
    /// The label, of the characters of a volume's name; `None`: the time in UTC.
    #[serde(default)]
    pub label: Option<String>,
    /// Name of the store, a folder; `None`: that of each volume.
    #[serde(default)]
    pub store: Option<String>,
}

/// An order to revert volumes to snapshots of them, all or none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevertVolumes {
    /// The names of the volumes; empty with `vm`.
    #[serde(default)]
    pub volumes: Vec<String>,
    /// The VM all of whose volumes it is about.
    #[serde(default)]
    pub vm: Option<String>,
    /// The label of the snapshots; for one volume also the name of its snapshot.
    pub snapshot: String,
    /// Whether a snapshot of the present state is taken first.
    #[serde(default)]
    pub keep_current: bool,
}
