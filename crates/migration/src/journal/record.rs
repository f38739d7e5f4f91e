//! The records of the journal. Their encoding is stored: variants may only be appended, and any other change, such as a new
//! field, raises [`super::VERSION`].

use chronicle::{BranchId, Generation};
use serde::{Deserialize, Serialize};

use super::attached::{AttachedVolume, GivenAttachment};
use super::filling::{Hollow, VolumeFilling};
use super::image::{ImageLocation, Place};
use super::origin::Origin;
use super::restored::{Restored, RestoredMore};
use super::side::{Promotion, Side};
use super::snapshots::SnapshotOf;
use crate::custody::KnownImage;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};

/// One commit: records that become durable together, with the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The wall-clock time of the commit in milliseconds since 1970, for the administrator; no decision depends on it.
    pub at_unix_ms: u64,
    /// The facts that became true, in order.
    pub records: Vec<Record>,
}

/// A fact that has become true, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The state up to here, folded; the first record of a compacted journal.
    Snapshot(Box<super::State>),
    /// This host serves a volume from now on.
    VolumeAdded(VolumeRecord),
    /// This host stops serving a volume.
    VolumeRemoved {
        /// The volume that is removed.
        volume: VolumeId,
    },
    /// A migration has begun; its target images may exist from now on.
    MigrationStarted {
        /// The identity of the migration.
        migration: MigrationId,
        /// All its volumes; they move together or not at all.
        volumes: Vec<MigratingVolume>,
        /// Whether the source images are kept afterwards.
        keep_source: bool,
        /// This host's side of the migration.
        side: Side,
    },
    /// The target side has everything, durably, and keeps it until *released* or *aborted*.
    TargetPrepared {
        /// The migration that is prepared.
        migration: MigrationId,
        /// The attempt that is prepared.
        attempt: Attempt,
    },
    /// The source side will never release in this attempt, nor in an earlier one.
    AttemptAborted {
        /// The migration of the attempt.
        migration: MigrationId,
        /// The attempt that is aborted.
        attempt: Attempt,
    },
    /// **N.B.** The commit point: the source serves no further request of these volumes from its store. Between hosts they stop
    /// being volumes of this host, and become [`super::Moved`].
    Released {
        /// The migration that is released.
        migration: MigrationId,
        /// The attempt that is released.
        attempt: Attempt,
        /// The generation of each volume at its new owner.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The target side owns the volumes. Between hosts they are volumes of this host from here on.
    Owned {
        /// The migration that brought them.
        migration: MigrationId,
        /// The attempt that was committed.
        attempt: Attempt,
        /// The generation of each volume from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The volumes could not be started at the target, and no guest write has passed there. The source owns them again.
    HandedBack {
        /// The migration that is handed back.
        migration: MigrationId,
        /// The generation of each volume from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// Nothing of the migration is left to do.
    MigrationEnded {
        /// The identity of the migration.
        migration: MigrationId,
        /// The outcome of the migration.
        outcome: Outcome,
        /// The cost of the migration.
        summary: Summary,
    },
    /// A volume's image is about to grow, or has begun to; a crash recovery completes the growth.
    ResizeBegun {
        /// The volume that grows.
        volume: VolumeId,
        /// The size in bytes after the growth.
        size_bytes: u64,
    },
    /// A volume has this size, and its image holds as many bytes. Also ends a failed resize.
    Resized {
        /// The volume that was resized.
        volume: VolumeId,
        /// The size in bytes.
        size_bytes: u64,
    },
    /// The administrator has declared the content of a fenced place unneeded.
    ReservationLifted {
        /// The place that was fenced.
        place: Place,
    },
    /// The administrator promoted the volumes: this host owns them without the other host's word. As the target it needs no
    /// COMMIT, as the source no hand-back.
    Promoted {
        /// The migration that is promoted.
        migration: MigrationId,
        /// The attempt that is promoted.
        attempt: Attempt,
        /// The generation of each volume from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// The basis of the promotion.
        promotion: Promotion,
    },
    /// The administrator has declared that the destination of a moved volume may be forgotten.
    MovedForgotten {
        /// The volume that had moved.
        volume: VolumeId,
    },
    /// The origin of a volume's content, perhaps of a volume that is about to arrive.
    OriginKnown {
        /// The volume with this origin.
        volume: VolumeId,
        /// The owner of its content before Sterna.
        origin: Origin,
    },
    /// The target side will never own these volumes: its images are worthless and are deleted. **N.B.** Durable before the
    /// first deletion, so that a restart does not look for missing images.
    Discarding {
        /// The migration whose target is deleted.
        migration: MigrationId,
        /// The outcome once the images are deleted.
        outcome: Outcome,
    },
    /// The volumes are handed over incomplete in an attempt. Committed together with its *prepared* or *released*.
    Hollow {
        /// The migration of the attempt.
        migration: MigrationId,
        /// The attempt, and the blocks missing in it.
        hollow: Hollow,
    },
    /// A volume is being filled; follows a snapshot.
    FillingKnown {
        /// The volume that is filled.
        volume: VolumeId,
        /// The source of its missing blocks.
        filling: Box<VolumeFilling>,
    },
    /// A volume that was being filled is complete, durably.
    Filled {
        /// The volume that is complete.
        volume: VolumeId,
    },
    /// The missing blocks of a volume being filled are given up, because the host that had them is lost. Also follows a snapshot.
    MissingGivenUp {
        /// The volume that stays incomplete.
        volume: VolumeId,
    },
    /// The journal was restored from a backup, and the owner of these volumes is not settled. Follows a snapshot.
    Restored(Box<Restored>),
    /// A volume of a restored journal is this host's. **N.B.** Durable before it is served.
    Reinstated {
        /// The volume that is reinstated.
        volume: VolumeId,
        /// Its generation from now on.
        generation: Generation,
        /// The number of the residency that begins; no migration ever has this number.
        stay: MigrationId,
        /// The branch that begins, if an administrator ordered it without the confirmation of other hosts.
        branch: Option<BranchId>,
    },
    /// A volume of a restored journal is not this host's, and may be forgotten here.
    RestoredForgotten {
        /// The volume that is forgotten.
        volume: VolumeId,
    },
    /// Further facts about a restored journal; follows [`Record::Restored`].
    RestoredMore(Box<RestoredMore>),
    /// Another host has confirmed that a volume which had left before the backup is still away.
    DepartureConfirmed {
        /// The volume that is away.
        volume: VolumeId,
    },
    /// A migration is cancelled: no handover follows. Durable before the administrator is answered. Also follows a snapshot.
    CancelOrdered {
        /// The migration that is cancelled.
        migration: MigrationId,
    },
    /// A volume that has left has this size at its owner; forwarded clients are offered this size.
    GrewElsewhere {
        /// The volume that has grown.
        volume: VolumeId,
        /// The size in bytes.
        size_bytes: u64,
    },
    /// The image that a name means: no other image under that name is taken for it, even after a
    /// restart. Follows a snapshot, too.
    ImageKnown {
        /// The name of the image.
        place: Place,
        /// The image's identity, and the purpose of its name.
        known: KnownImage,
    },
    /// Nothing that Sterna knows has this name.
    ImageForgotten {
        /// The name to be forgotten.
        place: Place,
    },
    /// Another host may use a volume for its own clients. Also follows a snapshot.
    AttachmentGiven {
        /// The volume that is attached there.
        volume: VolumeId,
        /// The host, and what it may do. Replaces an earlier record of that host.
        given: Box<GivenAttachment>,
    },
    /// The right of another host to use a volume has ended.
    AttachmentEnded {
        /// The volume that was attached there.
        volume: VolumeId,
        /// The host that it was attached at.
        host: HostId,
    },
    /// This host offers a volume of another host to clients. Also follows a snapshot.
    Attached(Box<AttachedVolume>),
    /// This host stops offering an attached volume.
    Detached {
        /// The volume that was attached here.
        volume: VolumeId,
    },
    /// A volume of this host is a snapshot. Committed together with its addition; also follows a snapshot of the state.
    SnapshotKnown {
        /// The volume that is a snapshot.
        volume: VolumeId,
        /// What it is a snapshot of.
        taken: Box<SnapshotOf>,
    },
    /// Volumes are to become equal to snapshots of them, all or none. **N.B.** Durable before the first change: none of them is served
    /// until it is reverted. Also follows a snapshot of the state.
    RevertBegun {
        /// The volumes, each with the volume that is its snapshot.
        reverts: Vec<(VolumeId, VolumeId)>,
    },
    /// A volume is equal to the snapshot, durably.
    Reverted {
        /// The volume that was reverted.
        volume: VolumeId,
    },
}

/// A volume as it was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The identity of the volume.
    pub volume: VolumeId,
    /// The name for users and exports; unique on a host.
    pub name: String,
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// The block size of its chronicle and of migrations, in bytes.
    pub block_size_bytes: u32,
    /// The location of its image.
    pub image: ImageLocation,
    /// The generation, which grows by one at each handover.
    pub generation: Generation,
    /// The settings of its export to clients.
    pub export: ExportSettings,
}

/// The settings of a volume's export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSettings {
    /// The access that clients have.
    pub access: ExportAccess,
    /// The address and port for TCP besides the unix socket; `None`: no TCP.
    pub listen: Option<String>,
    /// The mode of the unix socket; `None`: the configured default.
    pub socket_mode: Option<u32>,
    /// The owner of the unix socket, `user:group`; `None`: the configured default.
    pub socket_owner: Option<String>,
    /// The most connections at a time; `None`: the configured default.
    pub connections_max: Option<u32>,
}

/// The access of a volume's clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExportAccess {
    /// Clients may read and write.
    #[default]
    ReadWrite,
    /// Clients may only read.
    ReadOnly,
}

/// One volume of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigratingVolume {
    /// The volume that moves.
    pub volume: VolumeId,
    /// The image that it is copied from.
    pub source: ImageLocation,
    /// The image that it is copied to.
    pub target: ImageLocation,
}

/// The outcome of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The volumes are at the target.
    Moved {
        /// The source images that could not be deleted or renamed, as text for the administrator; empty if there are none.
        left_over: String,
    },
    /// The administrator cancelled it; the volumes are at the source.
    Cancelled,
    /// The migration failed; the volumes are at the source.
    Failed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for the administrator.
        detail: String,
    },
    /// The volumes could not be started at the target and are at the source again.
    HandedBack {
        /// Why they could not be started.
        detail: String,
    },
    /// The administrator of the target's host cancelled it; the volumes are at the source.
    CancelledThere,
    /// The volumes were handed over incomplete, and returned before they were complete.
    TakenBack,
}

impl Outcome {
    /// Adds a report of images that could not be deleted; `left_over` is empty if there are none.
    pub fn with_left_over(mut self, left_over: &str) -> Self {
        if left_over.is_empty() {
            return self;
        }
        match &mut self {
            Self::Moved { left_over: told } => *told = left_over.to_owned(),
            Self::Failed { detail, .. } | Self::HandedBack { detail } => {
                *detail = format!("{detail}; left over: {left_over}");
            }
            Self::Cancelled | Self::CancelledThere | Self::TakenBack => {}
        }
        self
    }
}

/// The cause of a failed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FailureCode {
    /// The target's store is full.
    TargetFull,
    /// The target's store answers with errors.
    TargetFaulty,
    /// The target's store has made no progress for too long.
    TargetHung,
    /// Some blocks of the source cannot be read.
    SourceUnreadable,
    /// The volumes could not be handed over within the limit of attempts.
    HandoverRefused,
    /// The daemon stopped, or was killed, during the migration.
    DaemonStopped,
    /// The core contradicted itself; this is a defect.
    Internal,
    /// The other host refused to take the volumes, or does not know them.
    HostRefused,
    /// The copy at the other host was promoted by force while this one was the owner.
    PromotedElsewhere,
    /// The source gave the migration up; it has recorded the reason.
    GivenUp,
    /// The VM that uses the volumes could not be stopped and loaded at the target.
    VmStayed,
    /// The migration waited in the queue, and could not begin at its turn.
    NotBegun,
    /// A hook before the handover failed.
    HookFailed,
    /// Guests wrote faster than the rounds could copy.
    NotConverging,
}

/// The cost of a migration; durations in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// The time from the start until every volume's new image was in use, or until the end.
    pub total_us: u64,
    /// The bytes written to the target by the mover.
    pub bytes_copied: u64,
    /// The bytes written to the target by mirrored guest writes.
    pub bytes_mirrored: u64,
    /// The bytes that were zero or a hole, and were not written.
    pub bytes_zero: u64,
    /// The number of attempts at the handover.
    pub attempts: u32,
    /// The longest time that a gate was closed in the successful attempt: the sum of the five parts below.
    pub gate_closed_us: u64,
    /// The wait for guest requests in flight.
    pub drain_us: u64,
    /// The flush of both stores, and the target's durable promise.
    pub prepare_us: u64,
    /// The commit of the release: the commit point.
    pub release_us: u64,
    /// The commit of the new ownership.
    pub own_us: u64,
    /// The switch of the store below the gate, its test, and the opening of the gate.
    pub start_us: u64,
}
