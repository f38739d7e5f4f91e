//! The plan of a migration, and its limits.

use std::rc::Rc;
use std::time::Duration;

use block::filter::FlushDebt;
use block::{BlockDevice, ZeroMode};
use chronicle::{Generation, ReplicaOf};
use migration::journal::ImageLocation;
use migration::source::{Moves, Peer};
use migration::strategy::Strategy;
use migration::target::SourcePatience;
use migration::{Budget, Carried, HostId, MigrationId, PacingSettings};

use super::participant::{IncomingGroup, OutgoingGroup};
use crate::filling::FillingStore;
use crate::peer::{PeerStore, PeerVolume, RpcChannel, Service};
use crate::reservoir::Reservoir;
use crate::shared_storage::{HeldLease, LeasedImage};
use crate::stack::Volume;

/// A migration between two stores of this host.
pub struct Plan {
    /// The migration's identity; the journal already has it as started.
    pub migration: MigrationId,
    /// The volumes, which move all or none.
    pub volumes: Vec<PlannedVolume>,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// The pace of copying, for each volume.
    pub pacing: PacingSettings,
    /// How it gives way to guests.
    pub gives_way: GivesWay,
    /// The time limits of the migration.
    pub limits: TimeLimits,
    /// The strategy that brings each replica up to date.
    pub strategy: Strategy,
    /// Whether hooks or a VM are part of the handover.
    pub moves: Moves,
}

/// How a copy gives way to guests, and to the rest of its migration.
#[derive(Clone, Debug, Default)]
pub struct GivesWay {
    /// The disks of this host that it reads and writes.
    pub disks: pacer::Stores,
    /// What guests of these disks may lose; `None`: it does not give way.
    pub impact: Option<pacer::Impact>,
    /// The limit of the whole migration; `None`: [`PacingSettings::bytes_per_second`] is this volume's alone.
    pub budget: Option<Budget>,
    /// When it is to end, on the lane's clock; guests may lose more for that. `None`: there is no such time.
    pub ends_by: Option<Duration>,
}

impl GivesWay {
    /// Makes the mover of a copying.
    pub(crate) fn mover(&self, now: Duration) -> pacer::Mover {
        pacer::Mover::new(now, self.disks.clone(), self.terms(pacer::MoverClass::Migration))
    }

    /// Makes the mover of blocks that follow after a handover.
    pub(crate) fn filler(&self) -> pacer::Mover {
        pacer::Mover::when_asked(self.disks.clone(), self.terms(pacer::MoverClass::Filling))
    }

    fn terms(&self, class: pacer::MoverClass) -> Option<pacer::Terms> {
        self.impact.map(|impact| pacer::Terms { class, impact })
    }
}

/// One volume of a local migration.
pub struct PlannedVolume {
    /// The volume on this lane.
    pub volume: Rc<Volume>,
    /// The target store, as large as the volume.
    pub target: Rc<dyn BlockDevice>,
    /// The content of that store before copying.
    pub target_content: TargetContent,
    /// How zeroes are written to the target.
    pub zeroes: ZeroMode,
    /// How chunks get to the target.
    pub chunks: Chunks,
    /// The copy that the target holds, if a restart continues with it: see [`Replica::known`].
    pub known: Option<(ReplicaOf, Generation)>,
    /// Counts carried over from an earlier daemon.
    pub carried: Carried,
    /// The volume's image at the source.
    pub source_image: ImageLocation,
    /// The volume's image at the target.
    pub target_image: ImageLocation,
}

/// The source's half of a migration.
pub struct SourcePlan {
    /// The migration's identity; the journal already has it as started.
    pub migration: MigrationId,
    /// The volumes, which move all or none.
    pub volumes: Vec<OutgoingVolume>,
    /// The further volumes, which have lanes of their own.
    pub group: OutgoingGroup,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// How each volume is copied.
    pub copying: CopySettings,
    /// The longest time that the gates may be closed before the commit point.
    pub switch_over_max: Duration,
    /// The location of the target's half.
    pub peer: Peer,
    /// Whether hooks or a VM are part of the handover.
    pub moves: Moves,
}

/// The settings for copying a volume.
#[derive(Clone)]
pub struct CopySettings {
    /// The pace of the copying.
    pub pacing: PacingSettings,
    /// How it gives way to guests.
    pub gives_way: GivesWay,
    /// The time limits of the copying.
    pub limits: TimeLimits,
    /// The strategy that brings each replica up to date.
    pub strategy: Strategy,
}

/// One volume of the source's half.
pub struct OutgoingVolume {
    /// The volume on this lane.
    pub volume: Rc<Volume>,
    /// The target store, local or remote.
    pub replica: Replica,
    /// The volume's image at the source.
    pub source_image: ImageLocation,
    /// Serves the remaining local clients once the target owns the volume; `None`: the target's half has changed the
    /// stack that they use.
    pub successor: Option<Rc<PeerVolume>>,
    /// The channel to the target host for this volume; `None`: the target is on this host.
    pub channel: Option<Rc<RpcChannel>>,
    /// The target host; `None`: this one.
    pub to: Option<HostId>,
    /// The lease of a target image that this host can open itself; `None`: it cannot.
    pub lease: Option<Rc<HeldLease>>,
    /// Serves the blocks that the target lacks after the handover; `None`: it will lack none.
    pub reservoir: Option<Rc<Reservoir>>,
    /// The blocks that this host itself lacks, if the volume returns to the host that has them; `None`: it lacks none.
    pub filling: Option<Rc<FillingStore>>,
}

impl OutgoingVolume {
    /// Makes one whose target is a store of this host.
    pub(crate) fn on_this_host(volume: Rc<Volume>, replica: Replica, source_image: ImageLocation) -> Self {
        Self {
            volume,
            replica,
            source_image,
            successor: None,
            channel: None,
            to: None,
            lease: None,
            reservoir: None,
            filling: None,
        }
    }
}

/// The target store of a volume, as the source's half sees it.
#[derive(Clone)]
pub struct Replica {
    /// Takes the mover's copies; as large as the volume.
    pub bulk: Rc<dyn BlockDevice>,
    /// Takes guest writes by value: the same store, perhaps by a faster path.
    pub mirrored: Rc<dyn BlockDevice>,
    /// The content of that store before copying.
    pub content: TargetContent,
    /// The copy of this generation that the target holds, if the chronicle knows it: then only missing blocks are copied.
    pub known: Option<(ReplicaOf, Generation)>,
    /// Counts of the copying carried over from an earlier daemon.
    pub carried: Carried,
    /// How zeroes are written to the target.
    pub zeroes: ZeroMode,
    /// How chunks get to the target.
    pub chunks: Chunks,
    /// Lets its chunks give way to guests at the target's host; `None`: the pacer of this host does that.
    pub guests_there: Option<Rc<PeerStore>>,
    /// Reports the missing blocks to the target's half; `None`: the target will lack none.
    pub manifest: Option<Rc<PeerStore>>,
}

/// The target's half of a migration.
pub struct TargetPlan {
    /// The migration's identity on this host.
    pub migration: MigrationId,
    /// The volumes, which arrive all or none.
    pub volumes: Vec<IncomingVolume>,
    /// The further volumes, which have lanes of their own.
    pub group: IncomingGroup,
    /// The longest time for a store to answer the first read.
    pub trial_max: Duration,
    /// Lets a source on another host use the stores; `None`: the source is on this host.
    pub service: Option<Rc<Service>>,
    /// Whether hooks or a VM are part of the handover.
    pub moves: Moves,
    /// The longest silence of a source on another host; `None`: without limit.
    pub patience: Option<SourcePatience>,
}

/// One volume of the target's half.
pub struct IncomingVolume {
    /// The volume: on one host the source's own, between hosts a new one with a closed gate.
    pub volume: Rc<Volume>,
    /// The target store, which takes the copied blocks.
    pub store: Rc<FlushDebt>,
    /// The same store, if the source's host may lease its image; `None`: it may not.
    pub leased: Option<Rc<LeasedImage>>,
    /// The same store, if the volume may arrive incomplete; `None`: it arrives complete.
    pub filling: Option<Rc<FillingStore>>,
    /// The volume's image at the target.
    pub image: ImageLocation,
}

impl Plan {
    pub(super) fn halves(self) -> (SourcePlan, TargetPlan) {
        let (migration, trial_max) = (self.migration, self.limits.mirror_wait_max);
        let (leaving, coming) = self.volumes.into_iter().map(PlannedVolume::halves).unzip();
        let source = SourcePlan {
            migration,
            volumes: leaving,
            group: OutgoingGroup::default(),
            keep_source: self.keep_source,
            switch_over_max: self.limits.switch_over_max,
            copying: CopySettings {
                pacing: self.pacing,
                gives_way: self.gives_way,
                limits: self.limits,
                strategy: self.strategy,
            },
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
            chunks: self.chunks,
            guests_there: None,
            manifest: None,
        };
        let leaving = OutgoingVolume::on_this_host(self.volume, replica, self.source_image);
        (leaving, coming)
    }
}

/// How the chunks of a copying get to the target's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Chunks {
    /// They are read and written.
    #[default]
    Copied,
    /// They share their blocks with the source, as long as the file system does that; what it refuses is read and written.
    Cloned,
}

/// The content of a target store before copying, known from how it was made or opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetContent {
    /// Reads as zeroes: holes of the volume need no action.
    Zero,
    /// Shows the backing file of the volume's image, and has no data itself: only the image's own data is copied.
    Backing,
    /// May hold any data, as a used device does: zeroes are written for the volume's holes.
    Unknown,
}

/// The time limits of a migration.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// The longest time that a guest's write is held, or waits for the target (design §5.7).
    pub mirror_wait_max: Duration,
    /// The longest time that the gates may be closed before the commit point.
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
