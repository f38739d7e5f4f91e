//! The events and actions of the source's machine.

use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::phase::Phase;
use crate::handover::target::FlushResult;
use crate::identity::{Attempt, CommitId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{FailureCode, Outcome, Record, Summary};
use crate::planted::{Bug, broken};
use crate::strategy::Tally;

/// The settings of a source's machine.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// The identity of the migration.
    pub migration: MigrationId,
    /// The volumes, with their current generations.
    pub volumes: Vec<(VolumeId, Generation)>,
    /// How long the gates may be closed before the commit point; after that the attempt is given up.
    pub switch_over_max: Duration,
    /// Whether the target is on the same host.
    pub peer: Peer,
    /// Whether a VM moves with the volumes.
    pub moves: Moves,
}

/// What a migration moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moves {
    /// Volumes only; their clients continue by themselves.
    #[default]
    Volumes,
    /// Volumes, with hooks before the handover, for example to change routes. They run once, after the copying; clients work on.
    VolumesAfterHooks,
    /// Volumes and the VM that uses them. The VM is paused before the gates close, and runs at the target after they have
    /// opened there (design §5.15).
    Vm,
}

/// The place of a migration's target, seen from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// On the same host: an answer always comes, sooner or later.
    SameHost,
    /// On another host: an answer may never come.
    OtherHost,
}

impl Peer {
    /// Returns whether the source may stop repeating to a target that its copy is worthless. A target that comes back asks.
    pub(crate) fn is_told_enough(self, told_for: Duration) -> bool {
        self == Self::OtherHost && told_for >= super::TELL_MAX && !broken(Bug::ToldForEver)
    }
}

/// An event at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// A volume's replica equals the volume.
    Synchronised(VolumeIndex),
    /// The rest of a volume's replica will arrive soon after the gate closes. Then the volume is synchronised.
    Converged(VolumeIndex),
    /// A volume's replica is neither equal to the volume nor near enough.
    Behind(VolumeIndex),
    /// Mirroring of a volume is suspended, which keeps it from being synchronised.
    Suspended {
        /// The volume that is suspended.
        volume: VolumeIndex,
        /// The reason, for the administrator.
        reason: &'static str,
    },
    /// The target durably knows the missing blocks of a volume, which may be handed over without them. Precedes `Synchronised`.
    Told {
        /// The volume that is incomplete.
        volume: VolumeIndex,
        /// The manifest of its missing blocks.
        manifest: Manifest,
    },
    /// A volume cannot be copied.
    VolumeFailed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for the administrator.
        detail: String,
    },
    /// A volume's gate is closed, and no request is in flight below it.
    GateClosed {
        /// The volume whose gate is closed.
        volume: VolumeIndex,
        /// The attempt that closed the gate.
        attempt: Attempt,
    },
    /// A request waits at a volume's closed gate.
    RequestHeld {
        /// The volume whose gate holds the request.
        volume: VolumeIndex,
        /// The attempt that closed the gate.
        attempt: Attempt,
    },
    /// A flush of a volume's store, requested while its guest worked, has ended.
    Settled {
        /// The volume whose store was flushed.
        volume: VolumeIndex,
        /// The number of the flush.
        settling: u32,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A flush of a volume's store behind its closed gate has ended.
    Flushed {
        /// The volume whose store was flushed.
        volume: VolumeIndex,
        /// The attempt that requested the flush.
        attempt: Attempt,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A commit to the journal has ended.
    Committed {
        /// The number of the commit.
        commit: CommitId,
        /// Whether the records are durable.
        result: Result<(), CommitFault>,
    },
    /// A message from the target has arrived.
    Received(ToSource),
    /// The VM is paused at the source. Its hypervisor is still busy with it, and may send requests to its disks.
    VmPaused,
    /// The VM is paused at the source and loaded, paused, at the target. `Err` holds why this failed.
    VmStopped(Result<(), String>),
    /// The hooks before the handover have run. `Err` holds why the volumes must stay.
    HooksRun(Result<(), String>),
    /// The administrator has cancelled the migration, and the journal has recorded that ([`crate::orders::cancel`]). It refuses
    /// a release from then on.
    Cancel,
    /// The source's images have been deleted or kept.
    Retired {
        /// The images that could not be deleted or renamed; empty if there are none.
        left_over: String,
    },
}

/// An action for the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceAction {
    /// The phase has changed; for reports.
    Enter(Phase),
    /// Copy the memory of the VM, and pause the VM. Until then its disks are mirrored.
    StopVm,
    /// Run the hooks before the handover. Until they end the volumes are mirrored.
    RunHooks,
    /// Hold a volume's requests. Report when none is in flight, and when one waits.
    CloseGate {
        /// The volume whose gate closes.
        volume: VolumeIndex,
        /// The attempt to use in the answer.
        attempt: Attempt,
    },
    /// Admit a volume's requests again, to the source.
    OpenGate(VolumeIndex),
    /// Flush a volume's store while its guest works, so that the flush behind the closed gate is short.
    Settle {
        /// The volume whose store is flushed.
        volume: VolumeIndex,
        /// The number to use in the answer.
        settling: u32,
    },
    /// Flush a volume's store; its gate is closed.
    Flush {
        /// The volume whose store is flushed.
        volume: VolumeIndex,
        /// The attempt to use in the answer.
        attempt: Attempt,
    },
    /// Make records durable, all or none.
    Commit {
        /// The number to use in the answer.
        commit: CommitId,
        /// The records to make durable.
        records: Vec<Record>,
    },
    /// Send this message to the target.
    Send(ToTarget),
    /// Stop copying and mirroring all volumes; the guests resume at the source.
    StopCopying,
    /// Serve all volumes from the source's stores again, with these generations, after a hand-back.
    TakeBack(Vec<(VolumeId, Generation)>),
    /// Delete the source's images, or keep them under another name.
    Retire,
    /// Keep the source's images under another name, whatever was ordered. The answer is [`SourceEvent::Retired`] as well.
    KeepImages,
    /// The migration has ended; the journal has recorded that already.
    End {
        /// The outcome of the migration.
        outcome: Outcome,
        /// The cost of the migration.
        summary: Summary,
    },
}

/// The state of the filling after a handover of incomplete volumes, in units of a filling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Following {
    /// The units that were missing at the handover.
    pub units_at_handover: u64,
    /// The units still missing, by the target's last report; `None` without a report since this source began or resumed.
    pub units_missing: Option<u64>,
}

/// The cost of copying all volumes so far. The caller sets it before the migration ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// The bytes that the movers have written.
    pub bytes_copied: u64,
    /// The bytes of mirrored writes.
    pub bytes_mirrored: u64,
    /// The bytes that were zero.
    pub bytes_zero: u64,
    /// The bytes that share their blocks with the source.
    pub bytes_cloned: u64,
    /// The decisions of the strategies.
    pub tally: Tally,
}
