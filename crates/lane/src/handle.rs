//! How other threads talk to a lane: messages, and a thread to stop.

use std::os::fd::OwnedFd;
use std::time::Duration;

use block::{Opened, ZeroMode};
use futures_channel::{mpsc, oneshot};
use futures_util::FutureExt;
use futures_util::future::Shared;

use chronicle::{BlockSize, Generation, Kept, ReplicaOf, StayId};
use migration::filling::UnitMap;
use migration::journal::{FailureCode, ImageLocation, MigrationState, Promotion};
use migration::source::Moves;
use migration::strategy::Choice;
use migration::target::SourcePatience;
use migration::{Attempt, Carried, HostId, MigrationId, PacingSettings, VolumeId, VolumeIndex};

use crate::driver::{IncomingGroup, OutgoingGroup, SourceParticipation, TargetContent, TargetParticipation};
use crate::front_end::{Access, ClientsAtEnd, Encryption, PassedConnection};
use crate::peer::PeerChannel;
use crate::refused::Refused;
use crate::shared_storage::{ArrivingStore, SharedImage};
use crate::status::LaneStatus;

/// What a lane is to serve.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    /// Identity of the volume.
    pub volume: VolumeId,
    /// Name of the volume, and of its export.
    pub name: String,
    /// Bytes per block of its chronicle and of migrations.
    pub block_size: BlockSize,
    /// How often it has changed hands.
    pub generation: Generation,
    /// Its stay at this host; of one that is only to come, the stay that begins then.
    pub stay: StayId,
    /// What is believed of what was kept of that stay; `None`: nothing, and no copy of it is known.
    pub kept: Option<Box<Kept>>,
    /// Copies in it that nobody makes any more: what is known of them is forgotten.
    pub ended_copies: Vec<ReplicaOf>,
    /// How long a guest's write may be held because of a migration (design §5.7).
    pub mirror_wait_max: Duration,
    /// How much its migrations copy at once, those without a rate.
    pub pacing: PacingSettings,
    /// What clients may do.
    pub access: Access,
    /// Connections at a time; `None`: as many as suit a volume.
    pub connections_max: Option<usize>,
    /// This lane's alone, among those of all hosts and at all times: its fencing tokens are known by it ([`crate::fencing`]).
    pub life: u64,
    /// What clients get at first.
    pub opening: Opening,
}

/// What the clients of a lane get when it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Opening {
    /// They are served.
    #[default]
    Serving,
    /// They may connect, and what they ask for waits: whether the volume is this host's is still to be seen.
    Waiting,
}

/// Whether a migration rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Nothing is copied, and it is not handed over.
    Pause,
    /// It goes on.
    Resume,
}

/// What a target is to take over without a COMMIT.
#[derive(Clone, Debug)]
pub struct Promoted {
    /// In which try.
    pub attempt: Attempt,
    /// The generation that each volume has from then on.
    pub generations: Vec<(VolumeId, Generation)>,
    /// What it is founded on.
    pub promotion: Promotion,
}

/// What a lane serves.
pub enum LaneStore {
    /// A store of this host.
    Here(Opened),
    /// A store of this host that lacks blocks.
    Filling(Box<FillingStoreOrder>),
    /// A store that the volume is to come to.
    Arriving(ArrivingStore),
    /// The volume, of this size in bytes, at the host that owns it.
    Elsewhere {
        /// The way there.
        channel: PeerChannel,
        /// Its size.
        size_bytes: u64,
    },
}

/// Where the guests of a volume come: for each front end ([`crate::front_end`]) what it listens on.
pub struct Listeners {
    /// NBD's.
    pub nbd: NbdListeners,
}

/// Where NBD clients come: bound and listening stream sockets.
pub struct NbdListeners {
    /// The volume's unix socket.
    pub unix: OwnedFd,
    /// Its port, if it has one, and whether clients encrypt there.
    pub tcp: Option<(OwnedFd, Encryption)>,
    /// Clients that another lane has passed on ([`LaneHandle::pass`]).
    pub passed: Vec<PassedConnection>,
}

impl Listeners {
    /// Those of a volume that NBD clients alone come to, of whom nobody was passed on.
    pub fn nbd(unix: OwnedFd, tcp: Option<(OwnedFd, Encryption)>) -> Self {
        Self { nbd: NbdListeners { unix, tcp, passed: Vec::new() } }
    }
}

/// A migration of one volume between two stores of this host.
#[derive(Clone, Debug)]
pub struct MigrationOrder {
    /// Its identity; already in the journal as started.
    pub migration: MigrationId,
    /// Where the volume is.
    pub source: ImageLocation,
    /// Where the volume goes.
    pub target: ImageLocation,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// Bytes a second that the mover may copy; `None`: as fast as it goes.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// How the volume is copied.
    pub strategy: Choice,
    /// How long guests may be held at the handover.
    pub downtime_max: Duration,
    /// Whether something is to be done before the volume changes hands.
    pub moves: Moves,
    /// With what a restart goes on; `None`: it begins.
    pub resumed: Option<Box<ResumedMigration>>,
}

/// A migration between two stores of this host that was being copied when its daemon ended.
#[derive(Clone, Debug)]
pub struct ResumedMigration {
    /// What the journal says of it.
    pub recorded: MigrationState,
    /// How long ago it began.
    pub spent: Duration,
    /// What was counted before.
    pub carried: Carried,
    /// Whether it rests.
    pub rest: Rest,
}

/// A migration of one volume to another host.
#[derive(Clone, Debug)]
pub struct OutgoingOrder {
    /// Its identity; already in the journal as started.
    pub migration: MigrationId,
    /// The host that the volume goes to.
    pub to: HostId,
    /// Where the volume is.
    pub source: ImageLocation,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// Bytes a second that the mover may copy; `None`: as fast as it goes.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// How the volume is copied.
    pub strategy: Choice,
    /// How long guests may be held at the handover, but for what the way to the other host takes.
    pub downtime_max: Duration,
    /// What the target's store holds now.
    pub content: TargetContent,
    /// The copy of the volume that it holds, of this generation; if the chronicle knows it, only what it lacks is copied.
    pub known: Option<(ReplicaOf, Generation)>,
    /// How zeroes are written to it.
    pub zeroes: ZeroMode,
    /// The image there as this host may be able to open it; `None`: blocks go over the link.
    pub shared: Option<SharedImage>,
    /// How long the gates may be closed before the commit point: round trips are in it.
    pub switch_over_max: Duration,
    /// How long the way to the other host and back is.
    pub round_trip: Duration,
    /// Whether a VM goes along.
    pub moves: Moves,
    /// Whether it rests from its beginning: it did before a restart.
    pub rest: Rest,
    /// How far it had come when a restart interrupted it; `None`: it begins.
    pub recorded: Option<Box<MigrationState>>,
}

/// A migration of one volume from another host to this one.
#[derive(Clone, Debug)]
pub struct IncomingOrder {
    /// Its number here; already in the journal as started.
    pub migration: MigrationId,
    /// Its number at its source.
    pub remote: MigrationId,
    /// The generation that the volume has at its source.
    pub generation: Generation,
    /// Who keeps a replica of the generation that it has now: what is written from the handover on is remembered for it.
    pub left_behind: Option<ReplicaOf>,
    /// Where the volume comes to.
    pub image: ImageLocation,
    /// Whether a VM comes along: it reads while it waits.
    pub moves: Moves,
    /// How long its source may say nothing before anything is promised.
    pub patience: SourcePatience,
    /// How far it had come when a restart interrupted it; `None`: it begins.
    pub recorded: Option<Box<MigrationState>>,
    /// What the volume lacks, by what was told before a restart; `None`: nothing was told, or nothing of that is left.
    pub missing: Option<Box<UnitMap>>,
    /// The migration by which it left, if its owner lacks blocks and reads them in the store that it comes to.
    pub takes_back: Option<MigrationId>,
}

/// The ways to the other host for a volume that comes.
pub struct IncomingChannels {
    /// To the source's half.
    pub source: PeerChannel,
    /// To what the volume may lack when it is handed over; `None`: it comes as a whole.
    pub reservoir: Option<PeerChannel>,
}

/// A volume of this host that lacks blocks.
pub struct FillingStoreOrder {
    /// Its store.
    pub store: Opened,
    /// What it lacks.
    pub missing: UnitMap,
    /// The way to what has that.
    pub reservoir: PeerChannel,
    /// Which volume of the migration it is, by which it came.
    pub index: VolumeIndex,
    /// Whether what is missing was given up.
    pub is_given_up: bool,
}

/// The ways to the other host for a volume that leaves.
pub struct OutgoingChannels {
    /// To the target's half, and to the store there.
    pub replica: PeerChannel,
    /// To the volume at its new owner, for the clients that stay here; `None`: the lane leads them there already.
    pub owner: Option<PeerChannel>,
}

/// What a volume's lane is to a migration to another host.
pub enum OutgoingRole {
    /// It drives the migration, of these volumes besides its own.
    Drives(OutgoingGroup),
    /// It follows the lane of the migration's first volume.
    Joins(SourceParticipation),
}

/// What a volume's lane is to a migration from another host.
pub enum IncomingRole {
    /// It drives the migration, of these volumes besides its own.
    Drives(IncomingGroup),
    /// It follows the lane of the migration's first volume.
    Joins(TargetParticipation),
}

/// The store that a volume goes to.
pub struct MigrationTarget {
    /// The store: open, and as large as the volume.
    pub store: Opened,
    /// What it holds now.
    pub content: TargetContent,
    /// How zeroes are written to it: those of a thin target become holes.
    pub zeroes: ZeroMode,
}

/// What a store is to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreRole {
    /// It holds the volume.
    Owner,
    /// The volume is on its way there.
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

/// Talks to a lane from any thread. A clone is another handle to the same lane; the lane ends with the last one, in
/// disorder: [`LaneHandle::stop`] is the way to end it.
#[derive(Clone)]
pub struct LaneHandle {
    commands: mpsc::UnboundedSender<Command>,
    /// Resolves when the lane's thread has ended.
    ended: Shared<oneshot::Receiver<()>>,
}

/// What a lane is asked for.
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
    Grow {
        size: u64,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Status {
        answer: oneshot::Sender<LaneStatus>,
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

    /// Resolves when the lane's thread has ended, in whatever way: also by a panic, of which nothing else tells.
    pub async fn ended(&self) {
        // Nothing is ever sent: the sender is dropped.
        let _ = self.ended.clone().await;
    }

    /// Begins a migration. How it goes is told by [`crate::Report`]s.
    ///
    /// # Errors
    /// [`Refused`]; `target` is closed and unchanged then.
    pub async fn migrate(&self, order: MigrationOrder, target: MigrationTarget) -> Result<(), Refused> {
        self.ask(|answer| Command::Migrate { order: Box::new(order), target, answer }).await?
    }

    /// Begins a migration to another host, or goes on with one, or takes part in one that another volume's lane drives.
    /// How it goes is told by [`crate::Report`]s.
    ///
    /// # Errors
    /// [`Refused`]; the channels are ended, and whoever drives the migration is told.
    pub async fn leave(
        &self,
        order: OutgoingOrder,
        channels: OutgoingChannels,
        role: OutgoingRole,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Leave { order: Box::new(order), channels, role, answer }).await?
    }

    /// Takes part in a migration from another host, or goes on with one: `channel` leads to the source's half.
    ///
    /// The volume comes to `store`: of a lane that serves clients whom the volume had left behind. Without one it comes
    /// to the lane's own store, and the lane [waits](Opening::Waiting).
    ///
    /// # Errors
    /// [`Refused`]; the channel is ended.
    pub async fn come(
        &self,
        order: IncomingOrder,
        store: Option<ArrivingStore>,
        channels: IncomingChannels,
        role: IncomingRole,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Come { order: Box::new(order), store, channels, role, answer }).await?
    }

    /// Lets the target of a migration read, over `channel`, what it lacks of the volume, which has this position among those of the
    /// migration.
    pub fn serve_reservoir(&self, channel: PeerChannel, migration: MigrationId, index: VolumeIndex) {
        // As with [`LaneHandle::attach`].
        let _ = self.commands.unbounded_send(Command::ServeReservoir { channel, migration, index });
    }

    /// Lets another host, `peer` of this one, which is `own`, use the volume for clients that it leads here, over `channel`.
    pub fn attach(&self, channel: PeerChannel, peer: HostId, own: HostId) {
        // A lane that has ended serves nobody: what has come over the channel is given back.
        let _ = self.commands.unbounded_send(Command::Attach { channel, peer, own });
    }

    /// Ends a migration before its commit point. That it has ended is told by a [`crate::Report`].
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::TooLate`], [`Refused::Ended`].
    pub async fn cancel(&self, migration: MigrationId) -> Result<(), Refused> {
        self.ask(|answer| Command::Cancel { migration, answer }).await?
    }

    /// Ends a migration of this source before its commit point because something of it failed that the lane knows nothing of.
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

    /// Lets a migration rest, or go on.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`].
    pub async fn rest(&self, migration: MigrationId, rest: Rest) -> Result<(), Refused> {
        self.ask(|answer| Command::Rest { migration, rest, answer }).await?
    }

    /// Ends the driver of a migration whose volumes are their target's and lack blocks there, or the part that the volume takes in it.
    /// What is missing goes on to be read here.
    ///
    /// # Errors
    /// [`Refused::TooLate`]: it is not that far, or further; [`Refused::Ended`].
    pub async fn set_aside(&self, migration: MigrationId) -> Result<(), Refused> {
        self.ask(|answer| Command::SetAside { migration, answer }).await?
    }

    /// Takes the volume over without a COMMIT: only what is prepared, in the try that is named.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`], [`Refused::Ended`]. Whether it came in time, the journal says.
    pub async fn promote(&self, migration: MigrationId, promoted: Promoted) -> Result<(), Refused> {
        self.ask(|answer| Command::Promote { migration, promoted: Box::new(promoted), answer }).await?
    }

    /// Changes how much a migration may copy, in bytes a second; `None`: as fast as it goes.
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

    /// Has reads of what is missing of a volume that is being filled wait so long at most for a host that does not answer, and then get
    /// an error; `None`: for however long, as in the beginning. It changes nothing for other volumes.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub async fn limit_waits(&self, to: Option<Duration>) -> Result<(), Refused> {
        self.ask(|answer| Command::LimitWaits { to, answer }).await
    }

    /// Forgets what a copy elsewhere lacks, which nobody has any more.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub async fn forget_copy(&self, of: ReplicaOf) -> Result<(), Refused> {
        self.ask(|answer| Command::ForgetCopy { of, answer }).await
    }

    /// Gives up what is missing of a volume that is being filled: whoever reads that gets an error from now on.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub async fn give_up_missing(&self) -> Result<(), Refused> {
        self.ask(|answer| Command::GiveUpMissing { answer }).await
    }

    /// Makes the volume `size` bytes large, a multiple of 4096, while it is used; its migration's target, too.
    ///
    /// Whoever connects from then on is told the new size. The size that it has already is a success.
    ///
    /// # Errors
    /// [`Refused`]; the volume has the size that it had then. If that is [`Refused::NotRecorded`] with
    /// [`migration::CommitFault::Unknown`], the next start of its lane decides.
    pub async fn grow(&self, size: u64) -> Result<(), Refused> {
        self.ask(|answer| Command::Grow { size, answer }).await?
    }

    /// What the lane is doing.
    ///
    /// # Errors
    /// [`Refused::Ended`].
    pub async fn status(&self) -> Result<LaneStatus, Refused> {
        self.ask(|answer| Command::Status { answer }).await
    }

    /// Ends the lane: no request is taken on any more, those in flight end (at most `deadline` from now), the store
    /// is flushed. A migration before its commit point stays as it is, for recovery; one past it is completed.
    pub async fn stop(&self, deadline: Duration) {
        // A lane that has ended already needs no stopping.
        let clients = ClientsAtEnd::Closed;
        let _ = self.ask(|answer| Command::Stop { deadline, clients, answer }).await;
        // Its store is closed, and how that looks is recorded.
        self.ended().await;
    }

    /// Ends the lane as [`Self::stop`] does, and leaves connections open that another lane can go on with, which it returns.
    /// They wait from now on: [`Self::settle`] first keeps that short.
    pub async fn pass(&self, deadline: Duration) -> Vec<PassedConnection> {
        let clients = ClientsAtEnd::PassedOn;
        let passed = self.ask(|answer| Command::Stop { deadline, clients, answer }).await;
        self.ended().await;
        passed.unwrap_or_default()
    }

    /// Flushes the store while guests work, so that little is left to flush when the lane ends. What is another host's is left to
    /// that.
    pub async fn settle(&self) {
        // A lane that has ended has nothing to flush.
        let _ = self.ask(|answer| Command::Settle { answer }).await;
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Refused> {
        let (answer, answered) = oneshot::channel();
        self.commands.unbounded_send(command(answer)).map_err(|_| Refused::Ended)?;
        answered.await.map_err(|_| Refused::Ended)
    }
}
