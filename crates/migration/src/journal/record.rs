//! The records of the journal. Their encoding is stored: variants are only ever appended, and [`super::VERSION`] grows
//! when that is not enough; a field more is not.

use chronicle::{BranchId, Generation};
use serde::{Deserialize, Serialize};

use super::filling::{Hollow, VolumeFilling};
use super::image::{ImageLocation, Place};
use super::origin::Origin;
use super::restored::{Restored, RestoredMore};
use super::side::{Promotion, Side};
use crate::identity::{Attempt, MigrationId, VolumeId};

/// One commit: records that become durable together, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Wall-clock time of the commit in milliseconds since 1970, for people; nothing is decided by it.
    pub at_unix_ms: u64,
    /// What became true, in order.
    pub records: Vec<Record>,
}

/// Something that has become true, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Everything up to here, folded: the first record of a compacted journal.
    Snapshot(Box<super::State>),
    /// A volume is served by this host from now on.
    VolumeAdded(VolumeRecord),
    /// A volume is no longer served by this host.
    VolumeRemoved {
        /// Which.
        volume: VolumeId,
    },
    /// A migration has begun; its target images may exist from now on.
    MigrationStarted {
        /// Its identity.
        migration: MigrationId,
        /// All its volumes: they move together or not at all.
        volumes: Vec<MigratingVolume>,
        /// What becomes of the source images afterwards.
        keep_source: bool,
        /// Which side of it this host is.
        side: Side,
    },
    /// The target side has everything, durably, and will keep it until it hears *released* or *aborted*.
    TargetPrepared {
        /// Of which migration.
        migration: MigrationId,
        /// In which try.
        attempt: Attempt,
    },
    /// The source side will never release in this try, nor in an earlier one.
    AttemptAborted {
        /// Of which migration.
        migration: MigrationId,
        /// The try.
        attempt: Attempt,
    },
    /// **N.B.** The commit point: the source serves no guest request of these volumes from its store any more. Between
    /// hosts they are no volumes of this host from here on, but [`super::Moved`].
    Released {
        /// Of which migration.
        migration: MigrationId,
        /// In which try.
        attempt: Attempt,
        /// The generation that each volume has at its new owner.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The target side owns the volumes. Between hosts: they are volumes of this host from here on.
    Owned {
        /// Of which migration.
        migration: MigrationId,
        /// In which try.
        attempt: Attempt,
        /// The generation that each volume has from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The volumes could not be started at the target, no guest write has passed there, and the source owns them
    /// again.
    HandedBack {
        /// Of which migration.
        migration: MigrationId,
        /// The generation that each volume has from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// Nothing of the migration is left to do.
    MigrationEnded {
        /// Its identity.
        migration: MigrationId,
        /// How it ended.
        outcome: Outcome,
        /// What it cost.
        summary: Summary,
    },
    /// A volume's image is about to grow, or has begun to: after a crash it is brought to this size.
    ResizeBegun {
        /// Which.
        volume: VolumeId,
        /// Its size in bytes afterwards.
        size_bytes: u64,
    },
    /// A volume has this size, and its image holds as many bytes. Also ends a resize that could not be done.
    Resized {
        /// Which.
        volume: VolumeId,
        /// Its size in bytes.
        size_bytes: u64,
    },
    /// Somebody said that nobody needs what a fenced place holds.
    ReservationLifted {
        /// The place.
        place: Place,
    },
    /// The target's host owns the volumes although it has not heard COMMIT: somebody promoted them.
    Promoted {
        /// Of which incoming migration.
        migration: MigrationId,
        /// In which try.
        attempt: Attempt,
        /// The generation that each volume has from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// What it was founded on.
        promotion: Promotion,
    },
    /// Somebody said that nobody need know any more where a volume went.
    MovedForgotten {
        /// Which.
        volume: VolumeId,
    },
    /// Whose the content of a volume was before Sterna served it; also of one that is about to arrive.
    OriginKnown {
        /// Which.
        volume: VolumeId,
        /// Whose.
        origin: Origin,
    },
    /// The target side will never own these volumes: its images are worthless from here on, and are deleted. **N.B.** Durable
    /// before the first of them is, so that a restart does not look for what nobody has.
    Discarding {
        /// Of which migration.
        migration: MigrationId,
        /// How it ends once they are gone.
        outcome: Outcome,
    },
    /// Blocks are left behind in a try at the handover. Together with *prepared*, or *released*, of that try.
    Hollow {
        /// Of which migration.
        migration: MigrationId,
        /// The try, and what is left behind.
        hollow: Hollow,
    },
    /// A volume is being filled: behind a snapshot.
    FillingKnown {
        /// Which.
        volume: VolumeId,
        /// From where.
        filling: Box<VolumeFilling>,
    },
    /// Nothing is missing any more of a volume that was being filled, durably.
    Filled {
        /// Which.
        volume: VolumeId,
    },
    /// What is missing of a volume that is being filled is given up: the host that had it is lost. Also behind a snapshot.
    MissingGivenUp {
        /// Which.
        volume: VolumeId,
    },
    /// The journal was put back from a backup, and nobody has said yet whose these volumes are: behind a snapshot.
    Restored(Box<Restored>),
    /// A volume of a journal that was put back is this host's. **N.B.** Durable before it is served.
    Reinstated {
        /// Which.
        volume: VolumeId,
        /// Its generation from now on.
        generation: Generation,
        /// A number that no migration has, or will have: that of the stay that begins with it.
        stay: MigrationId,
        /// The branch that it is from now on, if somebody has ordered it although other hosts had not confirmed it.
        branch: Option<BranchId>,
    },
    /// A volume of a journal that was put back is not this host's, and need not be known here.
    RestoredForgotten {
        /// Which.
        volume: VolumeId,
    },
    /// What is known besides of a journal that was put back: behind [`Record::Restored`].
    RestoredMore(Box<RestoredMore>),
    /// A volume that had left when the backup was made is still away: another host has said so.
    DepartureConfirmed {
        /// Which.
        volume: VolumeId,
    },
    /// Somebody has cancelled a migration, and is told so once this is durable: no handover follows. Also behind a snapshot.
    CancelOrdered {
        /// Which.
        migration: MigrationId,
    },
    /// A volume that has left has this size at its owner: what clients are offered that are led there.
    GrewElsewhere {
        /// Which.
        volume: VolumeId,
        /// Its size in bytes.
        size_bytes: u64,
    },
}

/// A volume as it was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Its identity.
    pub volume: VolumeId,
    /// The name that people and exports use; unique on a host.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes per block of its chronicle and of migrations.
    pub block_size_bytes: u32,
    /// Where its bytes are.
    pub image: ImageLocation,
    /// Grows by one at each handover.
    pub generation: Generation,
    /// How it is offered to clients.
    pub export: ExportSettings,
}

/// How a volume is offered to its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSettings {
    /// What clients may do.
    pub access: ExportAccess,
    /// Address and port, as text, where the volume is served over TCP besides its unix socket; `None`: nowhere.
    pub listen: Option<String>,
    /// Mode of its unix socket; `None`: that of the configuration.
    pub socket_mode: Option<u32>,
    /// User and group of its unix socket, `user:group`; `None`: those of the configuration.
    pub socket_owner: Option<String>,
    /// Connections at a time; `None`: what the configuration says.
    pub connections_max: Option<u32>,
}

/// What the clients of a volume may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExportAccess {
    /// Read and write.
    #[default]
    ReadWrite,
    /// Read only.
    ReadOnly,
}

/// One volume of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigratingVolume {
    /// Which.
    pub volume: VolumeId,
    /// The image that it is copied from.
    pub source: ImageLocation,
    /// The image that it is copied to.
    pub target: ImageLocation,
}

/// How a migration ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The volumes are at the target.
    Moved {
        /// What of the source could not be deleted or renamed, for people; empty if all was.
        left_over: String,
    },
    /// Somebody cancelled it; the volumes are at the source.
    Cancelled,
    /// It failed; the volumes are at the source.
    Failed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for people.
        detail: String,
    },
    /// The volumes could not be started at the target and are at the source again.
    HandedBack {
        /// Why.
        detail: String,
    },
    /// Somebody cancelled it at the target's host; the volumes are at the source.
    CancelledThere,
    /// The volumes were handed over with blocks missing, and came back to the source before these had followed.
    TakenBack,
}

impl Outcome {
    /// The same, and what people are told of images that could not be deleted; `left_over` is empty if all could.
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

/// Causes of a failed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FailureCode {
    /// The target's store is full.
    TargetFull,
    /// The target's store answers with errors.
    TargetFaulty,
    /// The target's store has made no progress for too long.
    TargetHung,
    /// Blocks of the source cannot be read.
    SourceUnreadable,
    /// The volumes could not be handed over in the number of tries allowed.
    HandoverRefused,
    /// The daemon stopped, or was killed, while the migration was under way.
    DaemonStopped,
    /// The core contradicted itself; a defect.
    Internal,
    /// The other host refused to take the volumes, or knows nothing of them.
    HostRefused,
    /// The copy at the other host was promoted by force while this one was the owner.
    PromotedElsewhere,
    /// The source gave the migration up; it knows why.
    GivenUp,
    /// The VM that uses the volumes could not be stopped and loaded at the target.
    VmStayed,
    /// It waited for its turn, and when that came it could not begin.
    NotBegun,
    /// What was to be done before the volumes change hands failed.
    HookFailed,
    /// Guests wrote faster than could be copied in rounds.
    NotConverging,
}

/// What a migration cost; durations in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// From its start to the last volume's new image being in use, or to its end.
    pub total_us: u64,
    /// Bytes written to the target by the mover.
    pub bytes_copied: u64,
    /// Bytes written to the target by mirrored guest writes.
    pub bytes_mirrored: u64,
    /// Bytes found to be zero or a hole, and not written.
    pub bytes_zero: u64,
    /// Number of tries at the handover.
    pub attempts: u32,
    /// Longest time that a gate was closed in the successful try: the sum of the five parts below.
    pub gate_closed_us: u64,
    /// Waiting for the guest requests in flight.
    pub drain_us: u64,
    /// Flushing both stores, and making the target's promise durable.
    pub prepare_us: u64,
    /// Making the release durable: the commit point.
    pub release_us: u64,
    /// Making the new ownership durable.
    pub own_us: u64,
    /// Changing the store below the gate, trying it, and opening the gate.
    pub start_us: u64,
}
