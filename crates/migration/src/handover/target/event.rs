//! The events and actions of the target's machine.

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{Attempt, CommitId, VolumeId, VolumeIndex};
use crate::journal::{Outcome, Promotion, Record};

/// An event at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// A message from the source has arrived.
    Received(ToTarget),
    /// A flush of a volume's store has ended.
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
    /// A volume answers from the target's store; its gate is still closed.
    Started(VolumeIndex),
    /// A volume does not answer from the target's store.
    StartFailed {
        /// The volume that failed to start.
        volume: VolumeIndex,
        /// The reason of the failure.
        detail: String,
    },
    /// The VM that moved with the volumes runs.
    VmRuns,
    /// The VM that moved with the volumes does not run.
    VmFailed {
        /// The reason of the failure.
        detail: String,
        /// Whether the VM has written to its volumes here; then they cannot return.
        wrote: Wrote,
    },
    /// The source asks for a change of a replica that is promised, or about to be. The change waits until nothing is promised.
    ChangeHeld,
    /// The source's host is reachable again: the target asks for the outcome.
    LinkBack,
    /// The source's host cannot be reached.
    LinkLost,
    /// This host's administrator has cancelled the migration, and the journal has recorded that ([`crate::orders::cancel`]). It
    /// refuses a promise from then on.
    Cancel,
    /// The administrator orders a takeover without COMMIT. Only a target that is prepared in this attempt obeys.
    Promote {
        /// The attempt that the ticket names, or that is prepared.
        attempt: Attempt,
        /// The generation of each volume from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// The basis of the promotion: a ticket or force.
        promotion: Promotion,
    },
    /// All images have been deleted, as far as possible.
    Discarded {
        /// The images that could not be deleted; empty if all are gone.
        left_over: String,
    },
}

/// Whether a guest's write has passed a gate since the volumes were started here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// No write has passed: the copy is as the source released it.
    Nothing,
    /// One or more writes have passed.
    Something,
}

/// The result of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushResult {
    /// Everything that had been applied is durable.
    Durable,
    /// The flush failed: the state of earlier writes is unknown.
    Failed,
}

/// An action for the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction {
    /// Flush a volume's store.
    Flush {
        /// The volume whose store is flushed.
        volume: VolumeIndex,
        /// The attempt to use in the answer.
        attempt: Attempt,
    },
    /// Flush a volume's store, and check that the durable missing set has this manifest. A difference is a failed flush.
    FlushHollow {
        /// The volume whose store is flushed.
        volume: VolumeIndex,
        /// The attempt to use in the answer.
        attempt: Attempt,
        /// The manifest that is expected.
        manifest: Manifest,
    },
    /// Make records durable, all or none.
    Commit {
        /// The number to use in the answer.
        commit: CommitId,
        /// The records to make durable.
        records: Vec<Record>,
    },
    /// Send this message to the source.
    Send(ToSource),
    /// Switch a volume to the target's store and check that the store answers, before any guest is admitted.
    Start(VolumeIndex),
    /// Start an incomplete volume: its missing blocks are fetched from the source from here on.
    StartHollow(VolumeIndex),
    /// Admit a volume's writes.
    Open(VolumeIndex),
    /// Let the VM run that moved with the volumes; these are open.
    RunVm,
    /// Stop serving a volume.
    Close(VolumeIndex),
    /// Delete all images of the target.
    Discard,
    /// Nothing is left to do here; this host's journal has recorded that. Only with a journal of the target's own.
    End {
        /// The outcome of the migration.
        outcome: Outcome,
    },
}
