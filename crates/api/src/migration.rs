//! Migrations: how they are begun, and how far they are.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::volume::{ImageFormat, ImageKind};

/// Moves a volume to another store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateVolume {
    /// Name of the target store, or `HOST:STORE` of another host; `HOST` alone: its only store.
    pub to: String,
    /// Bytes a second that may be copied, at least 1; `None`: as fast as it goes. Guest writes are not slowed.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Keeps the source's image afterwards, under another name.
    #[serde(default)]
    pub keep_source: bool,
    /// Format of the new image; `None`: that of the store, or that of the image that is moved.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// How much of its space the new image takes at once.
    #[serde(default)]
    pub allocation: Allocation,
    /// Lets the new image, which is qcow2, stand on the same backing file as the present one: only what the present one
    /// has itself is copied. Otherwise the new image has everything.
    #[serde(default)]
    pub keep_chain: bool,
    /// Goes on serving the volume here, for good, from the other host's store; otherwise only clients that stay
    /// connected are served here, until they leave.
    #[serde(default)]
    pub serve_here: bool,
    /// Copies everything, also if the other host keeps an image of an earlier stay of the volume.
    #[serde(default)]
    pub full: bool,
    /// How long a VM may stand still, or, if a volume is tracked, its guests may be held at the handover, in milliseconds;
    /// `None`: 300, of a volume 500.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// Whether blocks are written straight to the other host's store where this host can open it, too.
    #[serde(default)]
    pub shared_target: SharedTarget,
    /// Streams that carry a VM's memory, 1 to 16; `None`: as many as are worth it. It is one where either hypervisor
    /// cannot do several.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 16)]
    pub memory_streams: Option<u8>,
    /// When a VM may run at the other host.
    #[serde(default)]
    pub memory: Memory,
    /// How volumes are copied while their guests write.
    #[serde(default, skip_serializing_if = "Strategy::is_mirror")]
    pub strategy: Strategy,
    /// Of [`Strategy::ThreePhase`]: how many rounds at most; none: 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Of [`Strategy::Tracking`]: has the next round copy also what was written before this round has come to it, and will copy
    /// it anyway; only for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_incremental: bool,
    /// Of [`Strategy::Tracking`], and of [`Strategy::Mirror`] to another host: copies blocks that guests write again and again as
    /// all others, rather than put them off; only for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_hot_blocks: bool,
    /// Names of more volumes that move in the same migration, to another host: all of them, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub together_with: Vec<String>,
    /// What the name is of, where a volume and a VM have the same.
    #[serde(default, skip_serializing_if = "Named::is_any")]
    pub named: Named,
}

/// What a name is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Named {
    /// Whatever has it; if both have, a VM goes to another host, and a volume to a store of this one.
    #[default]
    Any,
    /// A volume.
    Volume,
    /// A VM.
    Vm,
}

impl Named {
    fn is_any(&self) -> bool {
        *self == Self::Any
    }
}

/// Whether a store of another host is written to over the link only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SharedTarget {
    /// It is looked whether this host can open it itself; then the link carries control only.
    #[default]
    Auto,
    /// Over the link.
    Never,
}

/// How a volume is copied while its guests write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// In one pass; what guests write to what is copied already goes to both stores. It converges whatever they write.
    #[default]
    Mirror,
    /// In rounds: what guests write in one is copied in the next, and guests wait for no target. It gives up, saying why, if
    /// they write faster than can be copied.
    Tracking,
    /// At most `rounds` rounds, then the guest goes on at the other host, and what is missing there follows it: what it reads at
    /// once, the rest in the background. Only between hosts. It ends whatever guests write; until all of it is there, losing
    /// either host means losing the volume.
    ThreePhase,
    /// The same without rounds: the guest goes on at the other host at once.
    PostCopy,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Mirror, Self::Tracking, Self::ThreePhase, Self::PostCopy];

    /// Rounds of [`Strategy::ThreePhase`] at most, unless it is said.
    pub const ROUNDS_USUAL: u32 = 4;

    /// What handing over with blocks missing costs, for people who are about to order it.
    pub const LEAVES_BLOCKS_PRICE: &'static str = "the guest goes on at the other host before all of its disk is there: until the         rest has followed, it waits for what it reads and is not there yet whenever the link is away, and losing either host for         good means losing the disk";

    /// Tells whether volumes change hands with blocks missing.
    pub fn leaves_blocks(self) -> bool {
        matches!(self, Self::ThreePhase | Self::PostCopy)
    }

    /// Tells whether it is the one that daemons of all versions know.
    fn is_mirror(&self) -> bool {
        *self == Self::Mirror
    }

    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Tracking => "tracking",
            Self::ThreePhase => "three-phase",
            Self::PostCopy => "post-copy",
        }
    }
}

/// A round of a volume that is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Round {
    /// Which volume of the migration, from 0.
    pub volume: u32,
    /// Blocks that were copied in it.
    pub blocks: u64,
    /// Bytes that were written to the target for them.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// Bytes of blocks that guests wrote meanwhile, which are left to the next round.
    pub dirtied: u64,
    /// Bytes of blocks that guests write again and again, which it has put off for a later round.
    #[serde(default)]
    pub put_off: u64,
}

/// When a VM that moves may run at the other host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// When all of its memory is there. Until then it can always go on where it was.
    #[default]
    PreCopy,
    /// Before that, if it writes faster than its memory is sent: the rest follows. **N.B.** from the switch-over until the last
    /// of it has come, the VM's memory is lost with either host, or with the link between them; its disks are not.
    PostCopy,
}

impl Memory {
    /// What [`Memory::PostCopy`] costs, for people who are about to order it.
    pub const POST_COPY_PRICE: &'static str = "if the machine writes faster than its memory is sent, it runs at the other host \
        before all of it is there: until the last of it has come, losing either host or the link for good means losing its \
        memory, as if its power had been cut, and so may ending either daemon just at the switch-over or just before the end; \
        its disks are whole";
}

/// The most streams that can be asked for.
pub const MEMORY_STREAMS_MAX: u8 = 16;

/// How much of its space a new image takes at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// None: it grows as it is written.
    #[default]
    Thin,
    /// All of it, before the migration begins; it is refused if there is not enough.
    Thick,
}

/// Changes a migration that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetMigration {
    /// How much may be copied, in bytes a second; `null`, which must be said: as fast as it goes.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required = true, minimum = 1)]
    pub bandwidth_bytes_per_second: Option<u64>,
}

/// Asks for a migration as soon as it has changed; sent as the query of a GET.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Watch {
    /// The [`Migration::change`] that the client has seen; the answer waits for a later one.
    #[serde(default)]
    pub after: Option<u64>,
    /// Milliseconds to wait at most; 0: answer at once. At most 30,000 ([`crate::WAIT_MAX_MS`]) are waited.
    #[serde(default)]
    pub wait_ms: u64,
}

/// A migration, under way or ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Its identity, for example `m7`.
    pub id: String,
    /// Name of the volume; it may be gone by now.
    pub volume: String,
    /// Where the volume was.
    pub source: ImageLocation,
    /// Where it goes.
    pub target: ImageLocation,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// How it is copied; `None`: it was not ordered here.
    #[serde(default)]
    pub strategy: Option<Strategy>,
    /// The rounds that have ended, if it is copied in rounds; those of a migration that ended before the daemon's start are in
    /// its history.
    #[serde(default)]
    pub rounds: Vec<Round>,
    /// How it stands.
    pub state: MigrationState,
    /// What is being done.
    pub phase: Phase,
    /// Part of the copying that is done, 0 to 1; never falls, and is 1 only when nothing is missing.
    pub fraction: f64,
    /// Bytes that the mover has written to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that went to the target as well.
    pub bytes_mirrored: u64,
    /// Bytes found to be zero, and not written.
    pub bytes_zero: u64,
    /// Bytes written to the target: copied and mirrored.
    pub bytes_moved: u64,
    /// Bytes that the target still misses; `None`: that is not known, as when the source of volumes that are filled was restarted.
    pub bytes_missing: Option<u64>,
    /// Bytes a second that were synchronised of late; 0 once it has ended.
    pub bytes_per_second: f64,
    /// Seconds since it began, or that it took.
    pub seconds: f64,
    /// Seconds until the copying ends; `None` while nothing is known.
    pub remaining_seconds: Option<RemainingSeconds>,
    /// Number of the current try at the handover, 0 before the first; the number of tries once it has ended.
    pub attempt: u32,
    /// What it waits for.
    pub waiting_for: Option<WaitingFor>,
    /// Why guest writes do not go to the target for the time being; `None` while they do.
    pub suspended: Option<String>,
    /// What `volume promote` at the other host accepts if this host is not heard there any more; `None` unless the
    /// volume is released to it and it has not answered.
    #[serde(default)]
    pub ticket: Option<String>,
    /// Its place in the queue; `None` unless it waits for its turn.
    #[serde(default)]
    pub queue: Option<QueuePlace>,
    /// Whether blocks go straight to a store that both hosts can open, and the link carries control only. `false` for as
    /// long as that is not proved, also between two stores of this host.
    #[serde(default)]
    pub shared: bool,
    /// What the other host had of the volume when it began; `None`: nothing, everything is sent.
    #[serde(default)]
    pub replica: Option<ReplicaUsed>,
    /// The migration that it does once more (`migration retry`), for example `m3`.
    #[serde(default)]
    pub retry_of: Option<String>,
    /// The latest migration that does it once more.
    #[serde(default)]
    pub retried_as: Option<String>,
    /// Whether a daemon that ended in order has interrupted it: the next one does it once more, and `retried_as` says by
    /// which number.
    #[serde(default)]
    pub goes_on: bool,
    /// The VM that goes along with the volume; `None` if none does, or this daemon knows no more of it.
    #[serde(default)]
    pub machine: Option<MachineMove>,
    /// How long the guest was held at the switch-over; `None` until that has happened.
    pub switch_over: Option<SwitchOver>,
    /// Cause of a failure, for programs: `target-full`, `target-faulty`, `target-hung`, `source-unreadable`,
    /// `handover-refused`, `daemon-stopped`, `host-refused`, `promoted-elsewhere`, `given-up`, `machine-stayed`,
    /// `not-begun`, `hook-failed`, `not-converging` or `internal`.
    pub failure: Option<String>,
    /// How it ended, and why, for people.
    pub message: Option<String>,
    /// Where the guest runs.
    pub guest: GuestLocation,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When it ended, in milliseconds since 1970; `None` while it is under way.
    pub ended_unix_ms: Option<u64>,
    /// Grows with every change; what [`Watch::after`] refers to. It begins anew when the daemon does.
    pub change: u64,
}

/// A place in the queue of migrations that wait for their turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueuePlace {
    /// Its place; 1 is the first.
    pub place: u64,
    /// How many wait.
    pub waiting: u64,
    /// What it waits for: a limit of the configuration, and what has reached it.
    pub reason: String,
}

/// An old image of the volume at the other host, with which a migration began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaUsed {
    /// Bytes that the volume held when it began: what would have been looked at otherwise.
    pub bytes_held: u64,
    /// Of these, those that the other host had already. Guest writes meanwhile make it less.
    pub bytes_spared: u64,
}

/// A VM that goes along with its volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineMove {
    /// How far its memory is; `None` before it is copied.
    pub memory: Option<MemoryMove>,
    /// How long it stood still; `None` until it runs at the target.
    pub downtime: Option<MachineDowntime>,
}

/// How far a VM's memory is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMove {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What must still be sent, as far as it is known, in bytes.
    pub remaining_bytes: u64,
    /// What was sent so far, in bytes: what the guest writes is sent again.
    pub sent_bytes: u64,
    /// Rounds over what the guest has written.
    pub rounds: u64,
    /// Bytes a second that the guest writes.
    pub dirty_bytes_per_second: u64,
    /// Bytes a second that are sent.
    pub bytes_per_second: u64,
    /// How much of their time is taken from the guest's processors, in percent, so that it writes less.
    pub throttle_percent: u8,
    /// Streams that carry it.
    #[serde(default = "one")]
    pub streams: u8,
    /// Whether the VM ran at the target before all of it was there (post-copy).
    #[serde(default)]
    pub post_copy: bool,
}

/// What older daemons, which do not say it, use.
fn one() -> u8 {
    1
}

/// How long a VM stood still, as its source saw it; the parts add up to the whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineDowntime {
    /// From its stand at the source until it was heard that it runs at the target, in milliseconds.
    pub total_ms: f64,
    /// The last of its memory and its devices: until it was loaded at the target.
    pub memory_ms: f64,
    /// Its disks' handover, and its first step at the target: the rest.
    pub handover_ms: f64,
}

/// An image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageLocation {
    /// Name of the store; `None` for an image that is served in place.
    pub store: Option<String>,
    /// Absolute path of the file or device, or the URI of the export.
    pub image: String,
    /// What it is.
    #[serde(default)]
    pub kind: ImageKind,
    /// How the volume's bytes lie in it.
    #[serde(default)]
    pub format: ImageFormat,
}

/// How a migration stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// It waits for its turn; nothing of it has begun.
    Queued,
    /// It is under way.
    Running,
    /// It is under way, and somebody has paused it: nothing is copied until it is resumed.
    Paused,
    /// The volume is at the target.
    Moved,
    /// It failed; [`Migration::guest`] says where the volume is.
    Failed,
    /// It was cancelled; the volume is at the source.
    Cancelled,
    /// The volume could not be started at the target and is at the source again.
    HandedBack,
}

/// What a migration is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// It waits for its turn.
    Queued,
    /// Blocks are copied and writes mirrored; the guest works.
    Copying,
    /// The memory of the VM that goes along is copied, while its disks are kept equal; the guest works until the end.
    Memory,
    /// Guest requests in flight come to their end; new ones wait.
    Closing,
    /// Both stores are flushed; new requests wait.
    Preparing,
    /// The release is being made durable; new requests wait.
    Releasing,
    /// The target takes over; new requests wait.
    Committing,
    /// The guest works at the target, which still fetches what was left behind here; not before it has all of it the source's
    /// image is dealt with.
    Filling,
    /// The guest works at the target; the source's image is dealt with.
    Retiring,
    /// The target could not start and gives the volume back.
    TakingBack,
    /// The guest works at the source; the target's image is deleted.
    Discarding,
    /// Nothing is left to do.
    Ended,
}

/// When the copying is expected to end, counted from now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RemainingSeconds {
    /// At the earliest.
    pub earliest: f64,
    /// At the latest.
    pub latest: f64,
}

/// Something that is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingFor {
    /// What.
    pub reason: String,
    /// Milliseconds before something else is done; none: it waits as long as it takes.
    pub remaining_ms: Option<u64>,
}

/// How long the guest was held at the switch-over, in milliseconds. The parts add up to the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SwitchOver {
    /// From the first request that was held to the opening of the gate.
    pub gate_closed_ms: f64,
    /// Waiting for the guest requests in flight.
    pub drain_ms: f64,
    /// Flushing both stores, and making the target's promise durable.
    pub prepare_ms: f64,
    /// Making the release durable: the commit point.
    pub release_ms: f64,
    /// Making the new ownership durable.
    pub own_ms: f64,
    /// Changing the store below the gate, trying it, and opening the gate.
    pub start_ms: f64,
}

/// Where the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// On the source's image.
    Source,
    /// On the target's image.
    Target,
    /// The journal could not be written at the commit point: a restart of the daemon will tell.
    Unknown,
}

impl MigrateVolume {
    /// Moves a volume to a store, with nothing special asked for.
    pub fn to(store: impl Into<String>) -> Self {
        Self {
            to: store.into(),
            bandwidth_bytes_per_second: None,
            keep_source: false,
            format: None,
            allocation: Allocation::Thin,
            keep_chain: false,
            serve_here: false,
            full: false,
            max_downtime_ms: None,
            shared_target: SharedTarget::Auto,
            memory_streams: None,
            memory: Memory::default(),
            strategy: Strategy::default(),
            rounds: None,
            not_incremental: false,
            ignore_hot_blocks: false,
            together_with: Vec::new(),
            named: Named::Any,
        }
    }
}

impl MigrationState {
    /// Tells whether nothing will happen any more.
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Queued | Self::Running | Self::Paused)
    }

    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Moved => "moved",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::HandedBack => "handed-back",
        }
    }
}

impl Phase {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Copying => "copying",
            Self::Memory => "memory",
            Self::Closing => "closing",
            Self::Preparing => "preparing",
            Self::Releasing => "releasing",
            Self::Committing => "committing",
            Self::Filling => "filling",
            Self::Retiring => "retiring",
            Self::TakingBack => "taking-back",
            Self::Discarding => "discarding",
            Self::Ended => "ended",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MigrateVolume, MigrationState, Phase, Strategy};

    #[test]
    fn an_order_without_a_strategy_of_its_own_is_said_as_daemons_of_before_understand_it() {
        let said = |order| serde_json::to_string::<MigrateVolume>(&order).unwrap();
        let order = MigrateVolume::to("b");
        assert!(!said(order.clone()).contains("strategy") && !said(order.clone()).contains("incremental"));
        assert!(!said(order.clone()).contains("hot_blocks"));
        let tracked = said(MigrateVolume { strategy: Strategy::Tracking, not_incremental: true, ..order });
        assert!(
            tracked.contains("\"strategy\":\"tracking\"") && tracked.contains("\"not_incremental\":true")
        );
    }

    #[test]
    fn words_for_people_are_those_of_the_json() {
        use MigrationState::{Cancelled, Failed, HandedBack, Moved, Paused, Queued, Running};
        for state in [Queued, Running, Paused, Moved, Failed, Cancelled, HandedBack] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for strategy in [Strategy::Mirror, Strategy::Tracking] {
            assert_eq!(serde_json::to_value(strategy).unwrap(), strategy.name());
        }
        for phase in [Phase::Queued, Phase::Copying, Phase::TakingBack, Phase::Ended] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
