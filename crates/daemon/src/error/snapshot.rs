//! Refusals of orders about snapshots.

use api::ErrorCode;

use crate::names::{self, InvalidName};
use crate::volumes::registry::Users;

/// Why an order about a snapshot is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error(
        "volume \"{0}\" is a snapshot, and does not change; name the volume, or clone it: sterna volume clone {0} NEW"
    )]
    OfSnapshot(String),
    #[error(
        "volume \"{0}\" is a snapshot, and stays at the host where it was taken; move a copy of it: sterna volume clone {0} NEW"
    )]
    Stays(String),
    #[error(
        "\"{label}\" cannot be the label of a snapshot of {volume}: {reason}. A label has letters, digits, '.', '_' and '-', begins \
         with a letter or a digit, and has {} characters at most with the name of this volume",
        names::label_bytes_max(volume)
    )]
    Label { volume: String, label: String, reason: InvalidName },
    #[error(
        "the name of volume \"{0}\" leaves no room for the label of a snapshot: both together have {max} characters at most; copy \
         it under a shorter name instead: sterna volume clone {0} NEW",
        max = names::NAME_BYTES_MAX
    )]
    NameTooLong(String),
    #[error(
        "volume \"{volume}\" is in use by {clients}, and a disk must not change below a client: stop the guest first"
    )]
    InUse { volume: String, clients: Users },
    #[error(
        "snapshot \"{snapshot}\" of volume \"{volume}\" cannot be used, so nothing was changed: {reason}. Bring its image back, or \
         choose another snapshot: sterna volume snapshots {volume}"
    )]
    Unusable { volume: String, snapshot: String, reason: String },
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
            Self::OfSnapshot(_)
            | Self::Stays(_)
            | Self::Label { .. }
            | Self::NameTooLong(_)
            | Self::NoVolumes
            | Self::TooManyVolumes(_)
            | Self::ReadOnly(_) => ErrorCode::InvalidRequest,
            Self::InUse { .. } => ErrorCode::VolumeInUse,
            Self::Unusable { .. } => ErrorCode::VolumeUnavailable,
            Self::TooMany { .. } => ErrorCode::QueueFull,
            Self::NotFound { .. } => ErrorCode::VolumeNotFound,
            Self::VmRuns(_) => ErrorCode::VolumeInUse,
            Self::Larger { .. } => ErrorCode::CannotShrink,
            Self::Needed { .. } => ErrorCode::VolumeBusy,
        }
    }
}
