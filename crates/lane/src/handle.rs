//! The interface to a lane from other threads: messages, and the end of the thread.

mod orders;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, Opened, ZeroMode};
use futures_channel::{mpsc, oneshot};
use futures_util::FutureExt;
use futures_util::future::Shared;

use chronicle::{BlockRange, BlockSize, Generation, Kept, LayeredBitmap, MarkPolicy, ReplicaOf, StayId};
use migration::filling::UnitMap;
use migration::journal::{FailureCode, Promotion};
use migration::{Attempt, HostId, MigrationId, PacingSettings, Phase, VolumeId, VolumeIndex};

use crate::capture::Member;
use crate::chronicler::NotDurable;
use crate::driver::{
    Chunks, IncomingGroup, OutgoingGroup, SourceParticipation, TargetContent, TargetParticipation, TimeLimits,
};
use crate::duplicate::{CutLine, DuplicateOrder};
use crate::front_end::{Access, ClientsAtEnd, Encryption, PassedConnection};
use crate::peer::PeerChannel;
use crate::refused::Refused;
use crate::resuming::Rhythm;
use crate::revert::Reverted;
use crate::shared_storage::ArrivingStore;
use crate::status::LaneStatus;

pub use orders::{IncomingOrder, MigrationOrder, Opening, OutgoingOrder, ResumedMigration};

/// The settings of a lane and its volume.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    /// Identity of the volume on this lane.
    pub volume: VolumeId,
    /// Name of the volume and of its export.
    pub name: String,
    /// Bytes per block of its chronicle and of migrations.
    pub block_size: BlockSize,
    /// How often the volume has changed hands.
    pub generation: Generation,
    /// Its residency at this host. For a volume that is to arrive: the residency that begins then.
    pub stay: StayId,
    /// The trusted part of the kept chronicle; `None`: none, and no copy is known.
    pub kept: Option<Box<Kept>>,
    /// Copies of ended migrations, which are forgotten.
    pub ended_copies: Vec<ReplicaOf>,
    /// How precisely durable marks say where it was written; `None`: as its size demands.
    pub marks: Option<MarkPolicy>,
    /// The time limits of its migrations, unless an order has others.
    pub limits: TimeLimits,
    /// How often the missing set of a copy is kept.
    pub rhythm: Rhythm,
    /// The pace at which missing blocks are fetched.
    pub pacing: PacingSettings,
    /// The pacer of the disk that its store is on.
    pub disk: Arc<pacer::Store>,
    /// What guests of that disk may lose to blocks that follow after a handover; `None`: such blocks do not give way.
    pub impact: Option<pacer::Impact>,
    /// Whether clients may write.
    pub access: Access,
    /// The limit of connections; `None`: the default for a volume.
    pub connections_max: Option<usize>,
    /// A number that no other lane of any host ever has; its fencing tokens bear it ([`crate::fencing`]).
    pub life: u64,
    /// Whether clients are served at once.
    pub opening: Opening,
}

/// Whether a migration is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Pause: nothing is copied, and the volume is not handed over.
    Pause,
    /// Resume a paused migration.
    Resume,
}

/// What a target takes over without a COMMIT.
#[derive(Clone, Debug)]
pub struct Promoted {
    /// The attempt in which it is prepared.
    pub attempt: Attempt,
    /// The new generation of each volume.
    pub generations: Vec<(VolumeId, Generation)>,
    /// The grounds of the promotion.
    pub promotion: Promotion,
}

/// The store that a lane serves from.
pub enum LaneStore {
    /// A complete store of this host.
    Here(Opened),
    /// A store of this host that lacks blocks.
    Filling(Box<FillingStoreOrder>),
    /// A store that the volume is to arrive in.
    Arriving(ArrivingStore),
    /// A volume that another host owns.
    Elsewhere {
        /// The channel to the owner.
        channel: PeerChannel,
        /// The volume's size in bytes.
        size_bytes: u64,
    },
}

/// Where a volume's guests connect: the sockets of each front end ([`crate::front_end`]).
pub struct Listeners {
    /// The sockets for NBD.
    pub nbd: NbdListeners,
}

/// The sockets for NBD: bound, listening stream sockets.
pub struct NbdListeners {
    /// The volume's unix socket, listening.
    pub unix: OwnedFd,
    /// Its TCP port, if it has one, and whether clients encrypt there.
    pub tcp: Option<(OwnedFd, Encryption)>,
    /// Connections that another lane has handed over ([`LaneHandle::pass`]).
    pub passed: Vec<PassedConnection>,
}

impl Listeners {
    /// Makes listeners for NBD only, without adopted connections.
    pub fn nbd(unix: OwnedFd, tcp: Option<(OwnedFd, Encryption)>) -> Self {
        Self { nbd: NbdListeners { unix, tcp, passed: Vec::new() } }
    }
}

/// The channels to the other host for an arriving volume.
pub struct IncomingChannels {
    /// The channel to the source's half.
    pub source: PeerChannel,
    /// The channel to blocks that may be missing after the handover; `None`: the volume arrives complete.
    pub reservoir: Option<PeerChannel>,
}

/// A volume of this host that lacks blocks.
pub struct FillingStoreOrder {
    /// The volume's own store.
    pub store: Opened,
    /// The blocks that are missing.
    pub missing: UnitMap,
    /// The channel to the host that has the missing blocks.
    pub reservoir: PeerChannel,
    /// The volume's position in the migration by which it came.
    pub index: VolumeIndex,
    /// Whether the missing blocks were given up.
    pub is_given_up: bool,
}

/// The channels to the other host for a leaving volume.
pub struct OutgoingChannels {
    /// The channel to the target's half and its store.
    pub replica: PeerChannel,
    /// The channel to the volume's new owner, for remaining local clients; `None`: the lane forwards them already.
    pub owner: Option<PeerChannel>,
}

/// The part of a volume's lane in a migration to another host.
pub enum OutgoingRole {
    /// It drives the migration, of its own volume and these.
    Drives(OutgoingGroup),
    /// It follows the lane of the migration's first volume.
    Joins(SourceParticipation),
}

/// The part of a volume's lane in a migration from another host.
pub enum IncomingRole {
    /// It drives the migration, of its own volume and these.
    Drives(IncomingGroup),
    /// It follows the lane of the migration's first volume.
    Joins(TargetParticipation),
}

/// The store that a volume goes to.
pub struct MigrationTarget {
    /// The open store, as large as the volume.
    pub store: Opened,
    /// The present content of the store.
    pub content: TargetContent,
    /// How zeroes are written to it: as holes if the target is thin.
    pub zeroes: ZeroMode,
    /// How chunks get there.
    pub chunks: Chunks,
}

/// An order to show a volume's changes to a group.
#[derive(Clone, Debug)]
pub struct CaptureOrder {
    /// The volume's place in the group; `None`: nothing is shown any more.
    pub member: Option<Member>,
    /// The standby's copy, as the volume's chronicle knows it.
    pub of: ReplicaOf,
}

/// The role of a store in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreRole {
    /// It holds the volume now.
    Owner,
    /// The volume is moving to it.
    Target,
}

impl std::fmt::Display for StoreRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Owner => "the store of the volume",
            Self::Target => "the target of its migration",
        })
    }
}

/// The interface to a lane from any thread. A clone refers to the same lane. The lane ends abruptly with the last handle: end it
/// by [`LaneHandle::stop`]. Requests fail with [`Refused::Ended`] once the lane has ended.
#[derive(Clone)]
pub struct LaneHandle {
    commands: mpsc::UnboundedSender<Command>,
    ended: Shared<oneshot::Receiver<()>>,
}

/// The steps at which a migration's driver can be set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aside {
    /// The targets own incomplete volumes.
    Filling,
    /// The volumes are released, and no image is being deleted: the targets may own the volumes.
    Released,
}

impl Aside {
    pub(crate) fn is_at(self, phase: Phase) -> bool {
        match self {
            Self::Filling => phase == Phase::Filling,
            Self::Released => matches!(phase, Phase::Committing | Phase::Filling),
        }
    }
}

pub(crate) enum Command {
    Migrate {
        order: Box<MigrationOrder>,
        target: MigrationTarget,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Leave {
        order: Box<OutgoingOrder>,
        channels: OutgoingChannels,
        role: OutgoingRole,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Come {
        order: Box<IncomingOrder>,
        store: Option<ArrivingStore>,
        channels: IncomingChannels,
        role: IncomingRole,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    SetAside {
        migration: MigrationId,
        aside: Aside,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Attach {
        channel: PeerChannel,
        peer: HostId,
        own: HostId,
    },
    ServeReservoir {
        channel: PeerChannel,
        migration: MigrationId,
        index: VolumeIndex,
    },
    Cancel {
        migration: MigrationId,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Fail {
        migration: MigrationId,
        code: FailureCode,
        detail: String,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Rest {
        migration: MigrationId,
        rest: Rest,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Promote {
        migration: MigrationId,
        promoted: Box<Promoted>,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    ForgetCopy {
        of: ReplicaOf,
        answer: oneshot::Sender<()>,
    },
    GiveUpMissing {
        answer: oneshot::Sender<()>,
    },
    LimitWaits {
        to: Option<Duration>,
        answer: oneshot::Sender<()>,
    },
    SetBandwidth {
        migration: MigrationId,
        bytes_per_second: Option<u64>,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    SetImpact {
        migration: MigrationId,
        impact: Option<pacer::Impact>,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Duplicate(Box<(DuplicateOrder, MigrationTarget, CutLine)>, oneshot::Sender<Result<(), Refused>>),
    Revert(Opened, Arc<Reverted>, oneshot::Sender<Result<(), Refused>>),
    Grow {
        size: u64,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Status {
        answer: oneshot::Sender<LaneStatus>,
    },
    Written {
        answer: oneshot::Sender<forecast::Written>,
    },
    Capture {
        order: CaptureOrder,
        answer: oneshot::Sender<Result<Option<LayeredBitmap>, Refused>>,
    },
    ReadForStandby {
        blocks: BlockRange,
        answer: oneshot::Sender<Result<Buffer, Refused>>,
    },
    FlushForStandby {
        answer: oneshot::Sender<bool>,
    },
    ForgetForStandby {
        of: ReplicaOf,
        answer: oneshot::Sender<Result<(), NotDurable>>,
    },
    Settle {
        answer: oneshot::Sender<()>,
    },
    Stop {
        deadline: Duration,
        clients: ClientsAtEnd,
        answer: oneshot::Sender<Vec<PassedConnection>>,
    },
}

impl LaneHandle {
    pub(crate) fn new(commands: mpsc::UnboundedSender<Command>, ended: oneshot::Receiver<()>) -> Self {
        Self { commands, ended: ended.shared() }
    }

    /// Resolves when the lane's thread has ended, even by a panic.
    pub async fn ended(&self) {
        // Nothing is ever sent: the sender is dropped.
        let _ = self.ended.clone().await;
    }

    /// Begins a migration. [`crate::Report`]s report its progress.
    ///
    /// # Errors
    /// [`Refused`]; `target` is then closed and unchanged.
    pub async fn migrate(&self, order: MigrationOrder, target: MigrationTarget) -> Result<(), Refused> {
        self.ask(|answer| Command::Migrate { order: Box::new(order), target, answer }).await?
    }

    /// Begins or continues a migration to another host, or takes part in one that another volume's lane drives.
    /// [`crate::Report`]s report its progress.
    ///
    /// # Errors
    /// [`Refused`]; the channels then end, and the driver of the migration is informed.
    pub async fn leave(
        &self,
        order: OutgoingOrder,
        channels: OutgoingChannels,
        role: OutgoingRole,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Leave { order: Box::new(order), channels, role, answer }).await?
    }

    /// Takes part in, or continues, a migration from another host. `channel` leads to the source's half.
    ///
    /// `store` is for a lane that serves clients which the volume had left behind: the volume arrives in it. Without one the
    /// volume arrives in the lane's own store, and the lane [waits](Opening::Waiting).
    ///
    /// # Errors
    /// [`Refused`]; the channel then ends.
    pub async fn come(
        &self,
        order: IncomingOrder,
        store: Option<ArrivingStore>,
        channels: IncomingChannels,
        role: IncomingRole,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Come { order: Box::new(order), store, channels, role, answer }).await?
    }

    /// Lets the target of a migration read its missing blocks over `channel`; `index` is the volume's position in the migration.
    pub fn serve_reservoir(&self, channel: PeerChannel, migration: MigrationId, index: VolumeIndex) {
        // A lane that has ended serves no reservoir either.
        let _ = self.commands.unbounded_send(Command::ServeReservoir { channel, migration, index });
    }

    /// Lets the host `peer` use the volume over `channel`, for clients that it forwards to this host, which is `own`.
    pub fn attach(&self, channel: PeerChannel, peer: HostId, own: HostId) {
        // A lane that has ended serves no clients: what the channel brought is given back.
        let _ = self.commands.unbounded_send(Command::Attach { channel, peer, own });
    }

    /// Cancels a migration before its commit point. A [`crate::Report`] confirms the end.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::TooLate`], [`Refused::Ended`].
    pub async fn cancel(&self, migration: MigrationId) -> Result<(), Refused> {
        self.ask(|answer| Command::Cancel { migration, answer }).await?
    }

    /// Ends a migration at its source before its commit point, because something outside the lane failed.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::TooLate`], [`Refused::Ended`].
    pub async fn fail(
        &self,
        migration: MigrationId,
        code: FailureCode,
        detail: String,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Fail { migration, code, detail, answer }).await?
    }

    /// Pauses or resumes a migration.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`].
    pub async fn rest(&self, migration: MigrationId, rest: Rest) -> Result<(), Refused> {
        self.ask(|answer| Command::Rest { migration, rest, answer }).await?
    }

    /// Ends the driver of a migration that is at the step `aside`, or this volume's part in it. A target that owns incomplete
    /// volumes continues to read missing blocks here.
    ///
    /// # Errors
    /// [`Refused::TooLate`]: the migration is not at that step; [`Refused::Ended`].
    pub async fn set_aside(&self, migration: MigrationId, aside: Aside) -> Result<(), Refused> {
        self.ask(|answer| Command::SetAside { migration, aside, answer }).await?
    }

    /// Takes the volume over without a COMMIT, if it is prepared in the given attempt.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`]. The journal shows whether the order came in time.
    pub async fn promote(&self, migration: MigrationId, promoted: Promoted) -> Result<(), Refused> {
        self.ask(|answer| Command::Promote { migration, promoted: Box::new(promoted), answer }).await?
    }

    /// Changes a migration's limit in bytes a second; `None`: no limit.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`].
    pub async fn set_bandwidth(
        &self,
        migration: MigrationId,
        bytes_per_second: Option<u64>,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::SetBandwidth { migration, bytes_per_second, answer }).await?
    }

    /// Changes what guests of a migration's disks may lose; `None`: it does not give way.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`].
    pub async fn set_impact(
        &self,
        migration: MigrationId,
        impact: Option<pacer::Impact>,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::SetImpact { migration, impact, answer }).await?
    }

    /// Limits how long reads of missing blocks wait for a host that does not answer, before they fail; `None`: no limit, as at
    /// first. Has no effect on complete volumes.
    pub async fn limit_waits(&self, to: Option<Duration>) -> Result<(), Refused> {
        self.ask(|answer| Command::LimitWaits { to, answer }).await
    }

    /// Forgets a copy at another host which has been deleted, with its missing set.
    pub async fn forget_copy(&self, of: ReplicaOf) -> Result<(), Refused> {
        self.ask(|answer| Command::ForgetCopy { of, answer }).await
    }

    /// Gives up the missing blocks of a volume that is being filled: reads of them fail from then on.
    pub async fn give_up_missing(&self) -> Result<(), Refused> {
        self.ask(|answer| Command::GiveUpMissing { answer }).await
    }

    /// Makes the volume `size` bytes large, a multiple of 4096, while it is used; the target of its migration as well.
    ///
    /// New clients get the new size. The present size is a success.
    ///
    /// # Errors
    /// [`Refused`]; the volume then keeps its size. After [`Refused::NotRecorded`] with [`migration::CommitFault::Unknown`], the
    /// next start of its lane decides.
    pub async fn grow(&self, size: u64) -> Result<(), Refused> {
        self.ask(|answer| Command::Grow { size, answer }).await?
    }

    /// Returns the lane's present state.
    pub async fn status(&self) -> Result<LaneStatus, Refused> {
        self.ask(|answer| Command::Status { answer }).await
    }

    /// Returns what guests of the volume have written lately.
    pub async fn written(&self) -> Result<forecast::Written, Refused> {
        self.ask(|answer| Command::Written { answer }).await
    }

    /// Shows the volume's changes to a group, or to none any more. Resolves when every change is shown; returns what the volume's
    /// chronicle knows the standby to lack, `None`: nothing is known.
    ///
    /// # Errors
    /// [`Refused::Ended`]; [`Refused::NotHere`], [`Refused::Incomplete`], [`Refused::BlockSize`]: nothing is captured.
    pub async fn capture(&self, order: CaptureOrder) -> Result<Option<LayeredBitmap>, Refused> {
        self.ask(|answer| Command::Capture { order, answer }).await?
    }

    /// Reads blocks of the volume for its standby, as fast as the pacer of its disk allows.
    ///
    /// # Errors
    /// [`Refused::Ended`]; [`Refused::NotHere`]; [`Refused::Unread`].
    pub async fn read_for_standby(&self, blocks: BlockRange) -> Result<Buffer, Refused> {
        self.ask(|answer| Command::ReadForStandby { blocks, answer }).await?
    }

    /// Flushes the volume's store. Returns whether that succeeded.
    pub async fn flush_for_standby(&self) -> bool {
        self.ask(|answer| Command::FlushForStandby { answer }).await.unwrap_or(false)
    }

    /// Makes durable that the standby lacks only what its group has not forgotten ([`Group::unforgotten`]).
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may believe that the standby lacks more.
    ///
    /// [`Group::unforgotten`]: crate::capture::Group::unforgotten
    pub async fn forget_for_standby(&self, of: ReplicaOf) -> Result<(), NotDurable> {
        let asked = self.ask(|answer| Command::ForgetForStandby { of, answer }).await;
        asked.unwrap_or_else(|refused| Err(NotDurable { detail: refused.to_string() }))
    }

    /// Ends the lane: stops taking requests, waits at most `deadline` for those in flight, and flushes the store. A migration
    /// before its commit point is left for recovery, a later one is completed.
    pub async fn stop(&self, deadline: Duration) {
        let clients = ClientsAtEnd::Closed;
        let _ = self.ask(|answer| Command::Stop { deadline, clients, answer }).await;
        // By then its store is closed, and the image's state is recorded.
        self.ended().await;
    }

    /// Ends the lane as [`Self::stop`] does, and returns open connections that another lane can adopt. They wait from now on:
    /// call [`Self::settle`] first to keep that short.
    pub async fn pass(&self, deadline: Duration) -> Vec<PassedConnection> {
        let clients = ClientsAtEnd::PassedOn;
        let passed = self.ask(|answer| Command::Stop { deadline, clients, answer }).await;
        self.ended().await;
        passed.unwrap_or_default()
    }

    /// Flushes the store while guests work, so that little is left to flush at the lane's end. Does nothing for a
    /// volume of another host.
    pub async fn settle(&self) {
        let _ = self.ask(|answer| Command::Settle { answer }).await;
    }

    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Refused> {
        let (answer, answered) = oneshot::channel();
        self.commands.unbounded_send(command(answer)).map_err(|_| Refused::Ended)?;
        answered.await.map_err(|_| Refused::Ended)
    }
}
