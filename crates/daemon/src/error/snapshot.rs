//! Refusals of orders about snapshots.

use api::ErrorCode;

/// Why an order about a snapshot is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error(
        "volume \"{0}\" is a snapshot, and does not change; name the volume, or clone it: sterna volume clone {0} NEW"
    )]
    OfSnapshot(String),
    #[error("name one volume at least, each once")]
    NoVolumes,
    #[error("an order is for {0} volumes at most, because their guests are held together")]
    TooManyVolumes(usize),
    #[error(
        "volume \"{volume}\" has {most} snapshots, and no more; remove some first: sterna volume snapshots {volume}, sterna volume \
         remove SNAPSHOT"
    )]
    TooMany { volume: String, most: usize },
    #[error("volume \"{volume}\" has no snapshot \"{snapshot}\" here; see: sterna volume snapshots {volume}")]
    NotFound { volume: String, snapshot: String },
    #[error(
        "VM \"{0}\" runs, and a disk must not change below its guest; stop it first (sterna vm stop {0}), or power it off in \
         libvirt or QEMU if Sterna did not start it"
    )]
    VmRuns(String),
    #[error("volume \"{0}\" is served read-only, and cannot be reverted")]
    ReadOnly(String),
    #[error(
        "volume \"{volume}\" is smaller than its snapshot \"{snapshot}\", and volumes do not shrink; copy the snapshot instead: \
         sterna volume clone {snapshot} NEW"
    )]
    Larger { volume: String, snapshot: String },
    #[error(
        "volume \"{volume}\" is being reverted to snapshot \"{snapshot}\", which is needed for that; wait until it is served, or \
         revert it to another one: sterna volume revert {volume} SNAPSHOT"
    )]
    Needed { volume: String, snapshot: String },
}

impl SnapshotError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::OfSnapshot(_) | Self::NoVolumes | Self::TooManyVolumes(_) | Self::ReadOnly(_) => {
                ErrorCode::InvalidRequest
            }
            Self::TooMany { .. } => ErrorCode::QueueFull,
            Self::NotFound { .. } => ErrorCode::VolumeNotFound,
            Self::VmRuns(_) => ErrorCode::VolumeInUse,
            Self::Larger { .. } => ErrorCode::CannotShrink,
            Self::Needed { .. } => ErrorCode::VolumeBusy,
        }
    }
}
