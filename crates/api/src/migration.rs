//! Migrations: orders, progress and outcomes.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::forecast::Forecast;
use crate::pace::{Deadline, LimitedBy, Pace};
use crate::strategy::{Round, Strategy};
use crate::volume::{ImageFormat, ImageKind};

/// Moves a volume to another store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateVolume {
    /// Name of the target store, or `HOST:STORE` of another host; `HOST` alone: its only store.
    pub to: String,
    /// Limit of the copying in bytes a second, of all volumes and a VM's memory together, at least 1; `None`: no limit. Guest
    /// writes are not limited.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// What guests of the disks may lose to the copying, in percent of their throughput: 1 to 90, or 100: it does not give way to
    /// guests. `None`: the daemon's default. The target's host protects its own guests by its own default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub impact_percent: Option<u8>,
    /// Keeps the source's image afterwards, under another name.
    #[serde(default)]
    pub keep_source: bool,
    /// Format of the new image; `None`: the store's format, or else that of the present image.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// How much space the new image allocates at the start.
    #[serde(default)]
    pub allocation: Allocation,
    /// Gives the new qcow2 image the backing file of the present one, and copies only the present image's own
    /// data. Otherwise everything is copied.
    #[serde(default)]
    pub keep_chain: bool,
    /// Keeps serving the volume at this host as well, also to new clients. Otherwise only connected clients
    /// are forwarded, until they leave.
    #[serde(default)]
    pub serve_here: bool,
    /// Copies everything, even if the other host has kept an image of the volume.
    #[serde(default)]
    pub full: bool,
    /// Longest downtime of a VM, or longest hold of a volume's guests at the handover, in milliseconds. `None`: 300 for a VM and
    /// for rounds, 500 for other volumes.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// Whether blocks are written directly to the other host's store if this host can open it as well.
    #[serde(default)]
    pub shared_target: SharedTarget,
    /// Number of streams for a VM's memory, 1 to 16; `None`: chosen by the daemon. It is one if
    /// either hypervisor supports only one.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 16)]
    pub memory_streams: Option<u8>,
    /// When the VM may begin to run at the other host.
    #[serde(default)]
    pub memory: Memory,
    /// How volumes are copied while their guests write. Without it the daemon chooses.
    #[serde(default, skip_serializing_if = "Strategy::is_auto")]
    pub strategy: Strategy,
    /// The largest number of rounds with `three-phase`; `None`: 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// With `tracking`: a block that is written before a round has reached it is copied again by the
    /// next round. Only for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_incremental: bool,
    /// With `tracking`: if the rounds do not converge, the volume is mirrored from then on. Without it the migration fails. The
    /// daemon does so by itself if it has chosen `tracking`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub or_mirror: bool,
    /// With `tracking`, and with `mirror` to another host: copies blocks that guests write again and again like all others, and
    /// does not put them off. Only for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_hot_blocks: bool,
    /// Also if the host of a standby cannot note that the volumes leave. Until it has noted it, nobody may promote the standby there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standby_untold: bool,
    /// Names of further volumes that move in the same migration to another host: all of them, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub together_with: Vec<String>,
    /// Whether the name means a volume or a VM, if both have it.
    #[serde(default, skip_serializing_if = "Named::is_any")]
    pub named: Named,
    /// It begins at this time, in milliseconds since 1970, and waits in the queue until then. `None`: in its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begin_unix_ms: Option<u64>,
    /// It is to end by this time, in milliseconds since 1970. If it would end later, guests lose more than the ordered impact,
    /// as far as it must be. `None`: there is no such time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_unix_ms: Option<u64>,
}

/// The kind of object that a name means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Named {
    /// Either. If both exist, the VM for a move to another host, and the volume for a move to a store of this host.
    #[default]
    Any,
    /// The volume of this name.
    Volume,
    /// The VM of this name.
    Vm,
}

impl Named {
    fn is_any(&self) -> bool {
        *self == Self::Any
    }
}

/// Whether a store of another host may be written to directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SharedTarget {
    /// Directly if this host can open the store itself; then the link carries control messages only.
    #[default]
    Auto,
    /// Always over the link.
    Never,
}

/// When a moving VM may begin to run at the other host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// When all of its memory has arrived. Until then it can always resume at the source.
    #[default]
    PreCopy,
    /// Earlier, if it writes faster than its memory is sent; the rest follows. **N.B.** Until the last page has arrived, the loss
    /// of either host, or of the link between them, loses the VM's memory, but not its disks.
    PostCopy,
}

impl Memory {
    /// The warning about [`Memory::PostCopy`], printed before the migration begins.
    pub const POST_COPY_PRICE: &'static str = "if the machine writes faster than its memory is sent, it runs at the other host \
        before all of its memory is there: until the last page has arrived, losing either host or the link for good loses \
        its memory, as by a power cut, and so may killing either daemon just at the switch-over or just before the end; \
        its disks stay complete";
}

/// Largest number of memory streams that an order may have.
pub const MEMORY_STREAMS_MAX: u8 = 16;

/// How much space a new image allocates at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// None: the image grows as it is written.
    #[default]
    Thin,
    /// All of it, before the migration begins; the order is refused if the space is missing.
    Thick,
}

/// Asks for a migration as soon as it has changed; sent as the query of a GET.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Watch {
    /// The latest `change` that the client has seen; the answer waits for a later one.
    #[serde(default)]
    pub after: Option<u64>,
    /// Longest wait in milliseconds; 0: answer at once. Values above 30,000 count as 30,000.
    #[serde(default)]
    pub wait_ms: u64,
}

/// A migration, under way or ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Its identity at this host, for example `m7`.
    pub id: String,
    /// The volume or the VM that was ordered to move; empty: unknown, as for a migration that a former daemon has ended.
    #[serde(default)]
    pub name: String,
    /// Name of the volume, which may have been removed since; of several the names with commas between them.
    pub volume: String,
    /// The image that the volume leaves.
    pub source: ImageLocation,
    /// The image that the volume moves to.
    pub target: ImageLocation,
    /// Whether the source's image is kept afterwards.
    pub keep_source: bool,
    /// The strategy; `None`: the migration was ordered at another host, or waits and the daemon will choose.
    #[serde(default)]
    pub strategy: Option<Strategy>,
    /// Why the daemon chose the strategy; empty: it was ordered, or is not chosen yet.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub strategy_reason: String,
    /// The ended rounds, if it is copied in rounds. Rounds of a migration that ended before the daemon's start
    /// are only in its history.
    #[serde(default)]
    pub rounds: Vec<Round>,
    /// Whether rounds did not converge, and a mirror copied what was left. A daemon that has started since reports it in the history
    /// of the migration only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mirrored_instead: bool,
    /// Whether it is queued, running or paused, or its outcome.
    pub state: MigrationState,
    /// The present step of the migration.
    pub phase: Phase,
    /// Progress of the copying, 0 to 1. It never falls, and is 1 only when nothing is missing.
    pub fraction: f64,
    /// Bytes that the mover has written to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that were sent to the target as well.
    pub bytes_mirrored: u64,
    /// Bytes that were found to be zero, and not written.
    pub bytes_zero: u64,
    /// Bytes that share their blocks with the old image, and were neither read nor written.
    #[serde(default)]
    pub bytes_cloned: u64,
    /// Bytes written to the target: copied and mirrored.
    pub bytes_moved: u64,
    /// Bytes that the target still lacks; `None`: unknown, as after a restart of the source while a volume is filled.
    pub bytes_missing: Option<u64>,
    /// Present rate of synchronising, in bytes a second; 0 once the migration has ended.
    pub bytes_per_second: f64,
    /// Seconds since it began, or its whole duration once it has ended.
    pub seconds: f64,
    /// Seconds until the copying is expected to end; `None` while that is unknown.
    pub remaining_seconds: Option<RemainingSeconds>,
    /// Number of the present attempt at the handover, 0 before the first; the number of attempts once it has ended.
    pub attempt: u32,
    /// The reason of its present wait.
    pub waiting_for: Option<WaitingFor>,
    /// What its disks' pacers do; `None`: it does not give way to guests, or does not run.
    #[serde(default)]
    pub pace: Option<Pace>,
    /// What limits the copying at present; `None`: nothing is copied.
    #[serde(default)]
    pub limited_by: Option<LimitedBy>,
    /// Its deadline, and what that demands; `None`: it has none.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// What was expected of it when it began; `None`: nothing was known.
    #[serde(default)]
    pub forecast: Option<Forecast>,
    /// Why guest writes are not sent to the target at present; `None` while they are.
    pub suspended: Option<String>,
    /// The ticket for `volume promote` at the other host, in case this host is lost; `None` unless the volume is released to that
    /// host and it has not answered yet.
    #[serde(default)]
    pub ticket: Option<String>,
    /// Its place in the queue; `None` unless it is queued.
    #[serde(default)]
    pub queue: Option<QueuePlace>,
    /// Whether blocks are written directly to a store that both hosts can open, and the link carries only control messages.
    /// `false` until that is proved, and between two stores of this host.
    #[serde(default)]
    pub shared: bool,
    /// The kept image that the other host had of the volume; `None`: none, so everything is sent.
    #[serde(default)]
    pub replica: Option<ReplicaUsed>,
    /// The migration that this one repeats (`migration retry`), for example `m3`.
    #[serde(default)]
    pub retry_of: Option<String>,
    /// The latest migration that repeats this one.
    #[serde(default)]
    pub retried_as: Option<String>,
    /// Whether an orderly stop of the daemon has interrupted it. Then the next daemon repeats it,
    /// and `retried_as` has the number.
    #[serde(default)]
    pub goes_on: bool,
    /// The VM that moves with the volume; `None` if there is none, or this daemon has forgotten it.
    #[serde(default)]
    pub machine: Option<MachineMove>,
    /// How long the guest was held at the switch-over; `None` before that.
    pub switch_over: Option<SwitchOver>,
    /// Cause of a failure, for programs: `target-full`, `target-faulty`, `target-hung`, `source-unreadable`,
    /// `handover-refused`, `daemon-stopped`, `host-refused`, `promoted-elsewhere`, `given-up`, `machine-stayed`,
    /// `not-begun`, `hook-failed`, `not-converging` or `internal`.
    pub failure: Option<String>,
    /// The outcome with its reason, as text.
    pub message: Option<String>,
    /// Where the guest runs at present.
    pub guest: GuestLocation,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When it ended, in milliseconds since 1970; `None` while it is under way.
    pub ended_unix_ms: Option<u64>,
    /// Number of the latest change, for `after` of a later request. It begins anew with the daemon.
    pub change: u64,
}

/// A place in the queue of migrations that wait for their turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueuePlace {
    /// Its place in the queue, where 1 is the first.
    pub place: u64,
    /// Number of migrations in the queue.
    pub waiting: u64,
    /// The limit of the configuration that it waits for, with the migrations that have reached it.
    pub reason: String,
    /// When it begins, in milliseconds since 1970, if it waits for that time; otherwise `None`.
    #[serde(default)]
    pub begins_unix_ms: Option<u64>,
}

/// A kept image of the volume at the other host, which the migration reuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaUsed {
    /// Allocated bytes of the volume at the beginning: what would have been copied otherwise.
    pub bytes_held: u64,
    /// Of these, the bytes that the other host had already. Guest writes during the migration reduce them.
    pub bytes_spared: u64,
}

/// A VM that moves with its volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineMove {
    /// Progress of its memory; `None` before the memory is copied.
    pub memory: Option<MemoryMove>,
    /// The downtime of the VM; `None` until it runs at the target.
    pub downtime: Option<MachineDowntime>,
}

/// Progress of the copying of a VM's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMove {
    /// Size of the memory in bytes.
    pub total_bytes: u64,
    /// Bytes that must still be sent, as far as it is known.
    pub remaining_bytes: u64,
    /// Bytes sent so far; pages that the guest writes are sent again.
    pub sent_bytes: u64,
    /// Number of rounds over pages that the guest has written.
    pub rounds: u64,
    /// Rate at which the guest writes memory, in bytes a second.
    pub dirty_bytes_per_second: u64,
    /// Rate at which memory is sent, in bytes a second.
    pub bytes_per_second: u64,
    /// By how much the guest's processors are slowed down, in percent, so that the guest writes less.
    pub throttle_percent: u8,
    /// Number of streams that carry it.
    pub streams: u8,
    /// Whether the VM runs at the target before all of its memory has arrived (post-copy).
    #[serde(default)]
    pub post_copy: bool,
}

/// Downtime of a VM, measured at the source. The parts add up to the total.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineDowntime {
    /// From the pause at the source until the target has reported that the VM runs, in milliseconds.
    pub total_ms: f64,
    /// Time until the last memory and the devices were loaded at the target, in milliseconds.
    pub memory_ms: f64,
    /// The rest: the handover of its disks and its first step at the target, in milliseconds.
    pub handover_ms: f64,
}

/// An image and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageLocation {
    /// Name of the store; `None` for an image that is served in place.
    pub store: Option<String>,
    /// Absolute path of the file or device, or the URI of the export.
    pub image: String,
    /// Whether it is a file, a device or an export.
    #[serde(default)]
    pub kind: ImageKind,
    /// The format of the volume's content.
    #[serde(default)]
    pub format: ImageFormat,
}

/// The state of a migration: under way, or its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// It waits in the queue, and has not begun.
    Queued,
    /// It is under way, and not paused.
    Running,
    /// It is under way and paused: nothing is copied until it is resumed.
    Paused,
    /// The volume is at the target.
    Moved,
    /// It failed; `guest` says where the volume is.
    Failed,
    /// It was cancelled; the volume is at the source.
    Cancelled,
    /// The volume could not be started at the target and is at the source again.
    HandedBack,
}

/// The step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// It waits in the queue for its turn.
    Queued,
    /// Blocks are copied and writes mirrored; the guest works.
    Copying,
    /// The VM's memory is copied, while its disks are kept synchronised; the guest works until the end.
    Memory,
    /// Guest requests in flight are completed; new requests wait.
    Closing,
    /// Both stores are flushed; new requests wait.
    Preparing,
    /// The release is made durable; new requests wait.
    Releasing,
    /// The target takes over; new requests wait.
    Committing,
    /// The guest works at the target, which fetches missing blocks. The source's image is kept until the volume is complete.
    Filling,
    /// The guest works at the target; the source's image is deleted or renamed.
    Retiring,
    /// The target could not start, and hands the volume back.
    TakingBack,
    /// The guest works at the source; the target's image is deleted.
    Discarding,
    /// The migration has ended, and nothing is left to do.
    Ended,
}

/// Expected time until the copying ends, counted from now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RemainingSeconds {
    /// Earliest expected end, in seconds.
    pub earliest: f64,
    /// Latest expected end, in seconds.
    pub latest: f64,
}

/// The reason why a migration waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingFor {
    /// The reason as text.
    pub reason: String,
    /// Milliseconds until the wait is given up; `None`: it has no limit.
    pub remaining_ms: Option<u64>,
}

/// How long the guest was held at the switch-over, in milliseconds. The parts add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SwitchOver {
    /// Total time, from the first held request to the opening of the gate.
    pub gate_closed_ms: f64,
    /// Time until the guest requests in flight had ended.
    pub drain_ms: f64,
    /// Time to flush both stores and to make *prepared* durable at the target.
    pub prepare_ms: f64,
    /// Time to make the release durable: the commit point.
    pub release_ms: f64,
    /// Time to make the new ownership durable.
    pub own_ms: f64,
    /// Time to change the store below the gate, try a read, and open the gate.
    pub start_ms: f64,
}

/// The side at which the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// On the source's image.
    Source,
    /// On the target's image.
    Target,
    /// Unknown, because the journal could not be written at the commit point. A restart of the daemon decides it.
    Unknown,
}

impl MigrateVolume {
    /// Returns an order that moves a volume to a store, with all defaults.
    pub fn to(store: impl Into<String>) -> Self {
        Self {
            to: store.into(),
            bandwidth_bytes_per_second: None,
            impact_percent: None,
            keep_source: false,
            format: None,
            allocation: Allocation::Thin,
            keep_chain: false,
            serve_here: false,
            full: false,
            standby_untold: false,
            max_downtime_ms: None,
            shared_target: SharedTarget::Auto,
            memory_streams: None,
            memory: Memory::default(),
            strategy: Strategy::default(),
            rounds: None,
            not_incremental: false,
            or_mirror: false,
            ignore_hot_blocks: false,
            together_with: Vec::new(),
            named: Named::Any,
            begin_unix_ms: None,
            deadline_unix_ms: None,
        }
    }
}

impl MigrationState {
    /// Returns whether the migration has ended.
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Queued | Self::Running | Self::Paused)
    }

    /// Returns the state's word in JSON.
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
    /// Returns the phase's word in JSON.
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
        for strategy in [Strategy::Auto, Strategy::Mirror, Strategy::Tracking] {
            assert_eq!(serde_json::to_value(strategy).unwrap(), strategy.name());
        }
        for phase in [Phase::Queued, Phase::Copying, Phase::TakingBack, Phase::Ended] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
