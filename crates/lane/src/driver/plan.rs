//! What a migration is to do, and within which limits.

use std::rc::Rc;
use std::time::Duration;

use block::filter::FlushDebt;
use block::{BlockDevice, ZeroMode};
use chronicle::{Generation, ReplicaOf};
use migration::journal::ImageLocation;
use migration::source::{Moves, Peer};
use migration::strategy::Strategy;
use migration::target::SourcePatience;
use migration::{Carried, HostId, MigrationId, PacingSettings};

use super::participant::{IncomingGroup, OutgoingGroup};
use crate::filling::FillingStore;
use crate::peer::{PeerStore, PeerVolume, RpcChannel, Service};
use crate::reservoir::Reservoir;
use crate::shared_storage::{HeldLease, LeasedImage};
use crate::stack::Volume;

/// A migration between two stores of this host: what is to be migrated, and within which limits.
pub struct Plan {
    /// Identity of the migration; already in the journal as started.
    pub migration: MigrationId,
    /// The volumes; all move, or none.
    pub volumes: Vec<PlannedVolume>,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// How much is copied at once, for each volume.
    pub pacing: PacingSettings,
    /// Time limits.
    pub limits: TimeLimits,
    /// How each replica is brought up to date.
    pub strategy: Strategy,
    /// Whether something is to be done before the volumes change hands.
    pub moves: Moves,
}

/// One volume of a plan.
pub struct PlannedVolume {
    /// The volume.
    pub volume: Rc<Volume>,
    /// The store it goes to: as large as the volume.
    pub target: Rc<dyn BlockDevice>,
    /// What that store holds now.
    pub target_content: TargetContent,
    /// How zeroes are written to it.
    pub zeroes: ZeroMode,
    /// The copy that it holds, if a restart goes on with that: see [`Replica::known`].
    pub known: Option<(ReplicaOf, Generation)>,
    /// What a daemon before this one had counted.
    pub carried: Carried,
    /// Where its bytes are now.
    pub source_image: ImageLocation,
    /// Where they will be.
    pub target_image: ImageLocation,
}

/// The source's half of a migration.
pub struct SourcePlan {
    /// Identity of the migration; already in the journal as started.
    pub migration: MigrationId,
    /// The volumes; all move, or none.
    pub volumes: Vec<OutgoingVolume>,
    /// Those that come after them, and are on lanes of their own.
    pub group: OutgoingGroup,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// How each volume is copied.
    pub copying: CopySettings,
    /// How long the gates may be closed before the commit point.
    pub switch_over_max: Duration,
    /// Where the target's half is.
    pub peer: Peer,
    /// Whether a VM goes along.
    pub moves: Moves,
}

/// How a volume is copied.
#[derive(Clone)]
pub struct CopySettings {
    /// How much is copied at once.
    pub pacing: PacingSettings,
    /// Time limits.
    pub limits: TimeLimits,
    /// How each replica is brought up to date.
    pub strategy: Strategy,
}

/// One volume of a source's half.
pub struct OutgoingVolume {
    /// The volume.
    pub volume: Rc<Volume>,
    /// The store it goes to, wherever that is.
    pub replica: Replica,
    /// Where its bytes are now.
    pub source_image: ImageLocation,
    /// What serves the clients that stay once the target owns the volume; `None`: the target's half has changed the
    /// very stack that they use.
    pub successor: Option<Rc<PeerVolume>>,
    /// The talk with the target's host about this volume; `None`: the target is on this host.
    pub channel: Option<Rc<RpcChannel>>,
    /// The host that it goes to; `None`: this one.
    pub to: Option<HostId>,
    /// What the replica is written through if this host can open the target's image itself; `None`: it cannot.
    pub lease: Option<Rc<HeldLease>>,
    /// What the target reads that it lacks; `None`: it is to lack nothing.
    pub reservoir: Option<Rc<Reservoir>>,
    /// What it lacks here, if it goes back to the host that has that; `None`: it lacks nothing.
    pub filling: Option<Rc<FillingStore>>,
}

/// The store that a volume goes to, as the source's half sees it.
#[derive(Clone)]
pub struct Replica {
    /// Takes what the mover copies: as large as the volume.
    pub bulk: Rc<dyn BlockDevice>,
    /// Takes guest writes by value: the same store, perhaps on a faster way.
    pub mirrored: Rc<dyn BlockDevice>,
    /// What that store holds now.
    pub content: TargetContent,
    /// The copy of the volume that it holds, of this generation, if the volume's chronicle knows that one: only what
    /// it lacks is copied then, and the rest counts as there.
    pub known: Option<(ReplicaOf, Generation)>,
    /// What a daemon before this one had counted of the copying.
    pub carried: Carried,
    /// How zeroes are written to it.
    pub zeroes: ZeroMode,
    /// What tells the target's half which blocks it will lack; `None`: it is to lack none.
    pub manifest: Option<Rc<PeerStore>>,
}

/// The target's half of a migration.
pub struct TargetPlan {
    /// Identity of the migration on this host.
    pub migration: MigrationId,
    /// The volumes; all come, or none.
    pub volumes: Vec<IncomingVolume>,
    /// Those that come after them, and are on lanes of their own.
    pub group: IncomingGroup,
    /// How long a store may take to answer the first read.
    pub trial_max: Duration,
    /// What lets a source on another host use the stores; `None`: the source is on this host.
    pub service: Option<Rc<Service>>,
    /// Whether a VM comes along.
    pub moves: Moves,
    /// How long a source on another host may say nothing; `None`: for ever.
    pub patience: Option<SourcePatience>,
}

/// One volume of a target's half.
pub struct IncomingVolume {
    /// The volume: that of the source on one host, one of its own with a closed gate between two.
    pub volume: Rc<Volume>,
    /// The store it comes to; what is copied to it goes by way of this.
    pub store: Rc<FlushDebt>,
    /// The same store, if the source's host may have its image to write to; `None`: it may not.
    pub leased: Option<Rc<LeasedImage>>,
    /// The same store, if the volume may come with blocks missing; `None`: it comes as a whole.
    pub filling: Option<Rc<FillingStore>>,
    /// Where its bytes will be.
    pub image: ImageLocation,
}

impl Plan {
    /// Cuts the plan into its halves.
    pub(super) fn halves(self) -> (SourcePlan, TargetPlan) {
        let (migration, trial_max) = (self.migration, self.limits.mirror_wait_max);
        let (leaving, coming) = self.volumes.into_iter().map(PlannedVolume::halves).unzip();
        let source = SourcePlan {
            migration,
            volumes: leaving,
            group: OutgoingGroup::default(),
            keep_source: self.keep_source,
            switch_over_max: self.limits.switch_over_max,
            copying: CopySettings { pacing: self.pacing, limits: self.limits, strategy: self.strategy },
            peer: Peer::SameHost,
            moves: self.moves,
        };
        let target = TargetPlan {
            migration,
            volumes: coming,
            group: IncomingGroup::default(),
            trial_max,
            service: None,
            moves: Moves::Volumes,
            patience: None,
        };
        (source, target)
    }
}

impl PlannedVolume {
    fn halves(self) -> (OutgoingVolume, IncomingVolume) {
        let target = FlushDebt::new(self.target);
        let coming = IncomingVolume {
            volume: Rc::clone(&self.volume),
            store: Rc::clone(&target),
            leased: None,
            filling: None,
            image: self.target_image,
        };
        let replica = Replica {
            bulk: Rc::clone(&target) as Rc<dyn BlockDevice>,
            mirrored: target,
            content: self.target_content,
            known: self.known,
            carried: self.carried,
            zeroes: self.zeroes,
            manifest: None,
        };
        let leaving = OutgoingVolume {
            volume: self.volume,
            replica,
            source_image: self.source_image,
            successor: None,
            channel: None,
            to: None,
            lease: None,
            reservoir: None,
            filling: None,
        };
        (leaving, coming)
    }
}

/// What a target store holds before anything is copied to it. Whoever made or opened it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetContent {
    /// It reads as zeroes: nothing is done where the volume has holes.
    Zero,
    /// It shows what the volume's own image stands on, and has nothing itself: only what that image has itself is copied.
    Backing,
    /// It may hold anything, as a device does that was used before: zeroes are written where the volume has holes.
    Unknown,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub mirror_wait_max: Duration,
    /// How long the gates may be closed before the commit point.
    pub switch_over_max: Duration,
    /// How long a target may leave a request unanswered before the migration fails.
    pub no_progress_max: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            mirror_wait_max: Duration::from_secs(1),
            switch_over_max: Duration::from_millis(500),
            no_progress_max: Duration::from_secs(300),
        }
    }
}
