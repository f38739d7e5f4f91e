//! What the target's machine is told, and what it asks for.

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{Attempt, CommitId, VolumeId, VolumeIndex};
use crate::journal::{Outcome, Promotion, Record};

/// What happened at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// The source says something.
    Received(ToTarget),
    /// A flush of a volume's store has ended.
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
    /// A volume answers from the target's store; its gate lets nothing through yet.
    Started(VolumeIndex),
    /// A volume does not answer from the target's store.
    StartFailed {
        /// Which.
        volume: VolumeIndex,
        /// Why.
        detail: String,
    },
    /// The VM that came along runs.
    VmRuns,
    /// The VM that came along does not run.
    VmFailed {
        /// Why.
        detail: String,
        /// Whether it has written to its volumes here: then they cannot go back.
        wrote: Wrote,
    },
    /// The source asks for a change of a replica that is promised, or about to be. It is not made before nothing is promised
    /// any more.
    ChangeHeld,
    /// The source's host can be heard again: what became of the migration meanwhile is asked.
    LinkBack,
    /// The source's host cannot be reached.
    LinkLost,
    /// Somebody here has cancelled it, and the journal has taken that ([`crate::orders::cancel`]): it takes no promise any more.
    Cancel,
    /// Somebody has the target take the volumes over without COMMIT. Only a prepared target can, in that very try.
    Promote {
        /// The try that the ticket names, or that is prepared.
        attempt: Attempt,
        /// The generation that each volume has from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// What it is founded on.
        promotion: Promotion,
    },
    /// All images have been dealt with.
    Discarded {
        /// What could not be deleted; empty if all is gone.
        left_over: String,
    },
}

/// Whether a guest's write has passed a gate since the volumes were started here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// None has: what is here is what the source released.
    Nothing,
    /// At least one has.
    Something,
}

/// Whether a flush succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushResult {
    /// Everything that had been applied is durable.
    Durable,
    /// It failed; nothing is known.
    Failed,
}

/// What is to be done at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction {
    /// Flush a volume's store.
    Flush {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// The same, and see that what is known durably of what is missing is exactly this; otherwise the flush counts as failed.
    FlushHollow {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
        /// What is missing.
        manifest: Manifest,
    },
    /// Make records durable, all or none.
    Commit {
        /// For the answer.
        commit: CommitId,
        /// What has become true.
        records: Vec<Record>,
    },
    /// Tell the source.
    Send(ToSource),
    /// Put a volume onto the target's store and see whether that answers, before any guest is let through.
    Start(VolumeIndex),
    /// The same of a volume of which blocks are missing: they are fetched from its source from here on.
    StartHollow(VolumeIndex),
    /// Let a volume's writes through.
    Open(VolumeIndex),
    /// Let the VM that came along run; its volumes are open.
    RunVm,
    /// Serve nothing of a volume any more.
    Close(VolumeIndex),
    /// Delete all images.
    Discard,
    /// Nothing is left to do here; this host's journal says so already. Only with a journal of the target's own.
    End {
        /// How it ended.
        outcome: Outcome,
    },
}
