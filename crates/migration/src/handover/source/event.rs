//! What the source's machine is told, and what it asks for.

use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::phase::Phase;
use crate::handover::target::FlushResult;
use crate::identity::{Attempt, CommitId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{FailureCode, Outcome, Record, Summary};
use crate::strategy::Tally;

/// What a source is told at its beginning.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// Identity of the migration.
    pub migration: MigrationId,
    /// The volumes and the generations that they have now.
    pub volumes: Vec<(VolumeId, Generation)>,
    /// How long the gates may be closed before the commit point; then the try is given up.
    pub switch_over_max: Duration,
    /// Where the target is.
    pub peer: Peer,
    /// Whether a VM goes along.
    pub moves: Moves,
}

/// What a migration moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moves {
    /// Volumes; whoever uses them goes on from there.
    #[default]
    Volumes,
    /// Volumes, and somebody has something to do before they change hands, such as to change routes: once, when they are
    /// copied, while whoever uses them works on.
    VolumesAfterHooks,
    /// Volumes, and the VM that uses them: it is brought to a stand before the gates close, and runs at the target
    /// after they have opened there (design §5.15).
    Vm,
}

/// Where the target of a migration is, seen from its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// On the same host: it answers, sooner or later.
    SameHost,
    /// On another host: it may never be heard again.
    OtherHost,
}

/// What happened at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// A volume's replica equals the volume.
    Synchronised(VolumeIndex),
    /// What a volume's replica lacks will have arrived soon after its gate is closed. Then the volume is synchronised.
    Converged(VolumeIndex),
    /// A volume's replica is neither equal to the volume nor near enough.
    Behind(VolumeIndex),
    /// Mirroring of a volume is suspended: what keeps it from being synchronised, for people.
    Suspended {
        /// Which volume.
        volume: VolumeIndex,
        /// Why.
        reason: &'static str,
    },
    /// The target knows durably what it lacks of a volume, and may be handed that without: said before *synchronised*.
    Told {
        /// Which volume.
        volume: VolumeIndex,
        /// What it lacks.
        manifest: Manifest,
    },
    /// A volume cannot be copied.
    VolumeFailed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for people.
        detail: String,
    },
    /// A volume's gate is closed, and no request is in flight below it.
    GateClosed {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
    },
    /// A request waits at a volume's gate, which was closed for a try.
    RequestHeld {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
    },
    /// A flush of a volume's store has ended that was asked for while its guest worked.
    Settled {
        /// Which volume.
        volume: VolumeIndex,
        /// Which of those flushes.
        settling: u32,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A flush of a volume's store behind its closed gate has ended.
    Flushed {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A commit has ended.
    Committed {
        /// Which.
        commit: CommitId,
        /// Whether the records are durable.
        result: Result<(), CommitFault>,
    },
    /// The target says something.
    Received(ToSource),
    /// The VM stands still at the source; its hypervisor has not done with it yet, and may ask for something of its disks.
    VmPaused,
    /// The VM stands still at the source and is loaded, still, at the target; or why it does not.
    VmStopped(Result<(), String>),
    /// What was to be done before the volumes change hands is done; or why they are to stay.
    HooksRun(Result<(), String>),
    /// Somebody has cancelled the migration, and the journal has taken that ([`crate::orders::cancel`]): it takes no release any more.
    Cancel,
    /// The source's images have been dealt with.
    Retired {
        /// What could not be deleted or renamed; empty if all was.
        left_over: String,
    },
}

/// What is to be done at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceAction {
    /// The phase has changed; for reports.
    Enter(Phase),
    /// Copy the memory of the VM, and bring it to a stand. Until then its disks are mirrored.
    StopVm,
    /// Do what is to be done before the volumes change hands. Until then they are mirrored.
    RunHooks,
    /// Hold a volume's requests, and say when none is in flight, and when one waits.
    CloseGate {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// Let a volume's requests go on, to the source.
    OpenGate(VolumeIndex),
    /// Flush a volume's store while its guest works, so that the flush behind the closed gate finds little to do.
    Settle {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        settling: u32,
    },
    /// Flush a volume's store; its gate is closed.
    Flush {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// Make records durable, all or none.
    Commit {
        /// For the answer.
        commit: CommitId,
        /// What has become true.
        records: Vec<Record>,
    },
    /// Tell the target.
    Send(ToTarget),
    /// Stop copying and mirroring all volumes; the guests go on at the source.
    StopCopying,
    /// Serve all volumes from the source's stores again, with these generations, after a hand-back.
    TakeBack(Vec<(VolumeId, Generation)>),
    /// Deal with the source's images.
    Retire,
    /// The migration has ended; the journal says so already.
    End {
        /// How.
        outcome: Outcome,
        /// What it cost.
        summary: Summary,
    },
}

/// What follows of volumes that have left with blocks missing, in units of a filling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Following {
    /// What was missing when they left.
    pub units_at_handover: u64,
    /// What is missing still, as the target said last; `None`: it has not said it since this source began, or went on.
    pub units_missing: Option<u64>,
}

/// What copying has cost so far, of all volumes; told by the caller before it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Bytes that the movers have written.
    pub bytes_copied: u64,
    /// Bytes of mirrored writes.
    pub bytes_mirrored: u64,
    /// Bytes that were zero.
    pub bytes_zero: u64,
    /// What the strategies have decided.
    pub tally: Tally,
}
