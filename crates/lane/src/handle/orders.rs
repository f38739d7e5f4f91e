//! The orders of migrations that a lane carries out.

use std::sync::Arc;
use std::time::Duration;

use block::ZeroMode;
use chronicle::{Generation, ReplicaOf};
use migration::filling::UnitMap;
use migration::journal::{ImageLocation, MigrationState};
use migration::source::Moves;
use migration::strategy::Strategy;
use migration::target::SourcePatience;
use migration::{Budget, Carried, HostId, MigrationId, PacingSettings};

use super::Rest;
use crate::driver::TargetContent;
use crate::shared_storage::SharedImage;

/// A migration of one volume between two stores of this host.
#[derive(Clone, Debug)]
pub struct MigrationOrder {
    /// The migration's identity; the journal already has it as started.
    pub migration: MigrationId,
    /// The volume's image at the source.
    pub source: ImageLocation,
    /// The volume's image at the target.
    pub target: ImageLocation,
    /// The pacer of the disk that the target is on.
    pub target_disk: Arc<pacer::Store>,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// The pace of the copying, with its limit.
    pub pacing: PacingSettings,
    /// What guests of the disks may lose; `None`: the mover does not give way.
    pub impact: Option<pacer::Impact>,
    /// The time until it is to end, for which guests may lose more; `None`: it may take any time.
    pub time_left: Option<Duration>,
    /// The strategy that copies the volume.
    pub strategy: Strategy,
    /// The longest time that guests may be held at the handover.
    pub downtime_max: Duration,
    /// Whether hooks or a VM are part of the handover.
    pub moves: Moves,
    /// The state that a restart continues with; `None`: it begins.
    pub resumed: Option<Box<ResumedMigration>>,
}

/// A migration between two stores of this host whose copying a restart interrupted.
#[derive(Clone, Debug)]
pub struct ResumedMigration {
    /// The state in the journal.
    pub recorded: MigrationState,
    /// How long ago the migration began.
    pub spent: Duration,
    /// Counts of the earlier daemon.
    pub carried: Carried,
    /// Whether the migration is paused.
    pub rest: Rest,
}

/// A migration of one volume to another host.
#[derive(Clone, Debug)]
pub struct OutgoingOrder {
    /// The migration's identity; the journal already has it as started.
    pub migration: MigrationId,
    /// The host that the volume goes to.
    pub to: HostId,
    /// The volume's image at the source.
    pub source: ImageLocation,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// The limit of the whole migration.
    pub budget: Budget,
    /// The pace of the copying on one host, with its limit.
    pub pacing: PacingSettings,
    /// What guests of the disks may lose; `None`: the mover does not give way.
    pub impact: Option<pacer::Impact>,
    /// The time until it is to end, for which guests may lose more; `None`: it may take any time.
    pub time_left: Option<Duration>,
    /// The strategy that copies the volume.
    pub strategy: Strategy,
    /// The present content of the target's store.
    pub content: TargetContent,
    /// The copy of this generation that the target holds. If the chronicle knows it, only missing blocks are copied.
    pub known: Option<(ReplicaOf, Generation)>,
    /// How zeroes are written to the target.
    pub zeroes: ZeroMode,
    /// The target's image, if this host may be able to open it; `None`: blocks go over the link.
    pub shared: Option<SharedImage>,
    /// The longest time that the gates may be closed before the commit point, with round trips.
    pub switch_over_max: Duration,
    /// The round-trip time to the other host.
    pub round_trip: Duration,
    /// Whether a VM moves along.
    pub moves: Moves,
    /// Whether it begins paused, as before a restart.
    pub rest: Rest,
    /// The state in the journal when a restart interrupted it; `None`: it begins.
    pub recorded: Option<Box<MigrationState>>,
}

/// A migration of one volume from another host to this one.
#[derive(Clone, Debug)]
pub struct IncomingOrder {
    /// The migration's identity here; the journal already has it as started.
    pub migration: MigrationId,
    /// The migration's identity at its source.
    pub remote: MigrationId,
    /// The volume's generation at its source.
    pub generation: Generation,
    /// The replica of the present generation that stays at the source: writes after the handover are recorded for it.
    pub left_behind: Option<ReplicaOf>,
    /// The volume's image at the target.
    pub image: ImageLocation,
    /// Whether a VM moves along: it reads while it waits.
    pub moves: Moves,
    /// The longest silence of the source before anything is promised.
    pub patience: SourcePatience,
    /// The state in the journal when a restart interrupted it; `None`: it begins.
    pub recorded: Option<Box<MigrationState>>,
    /// The missing blocks as reported before a restart; `None`: none were reported, or the report is lost.
    pub missing: Option<Box<UnitMap>>,
    /// The migration by which the volume left, if its incomplete owner reads missing blocks from the store that
    /// it now returns to.
    pub takes_back: Option<MigrationId>,
}

/// What the clients of a lane get when it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Opening {
    /// Clients are served at once.
    #[default]
    Serving,
    /// Clients may connect, but their requests wait until this host is known to own the volume.
    Waiting,
    /// Clients may connect, but their requests wait until the volume is reverted ([`crate::LaneHandle::revert`]).
    Reverting,
}
