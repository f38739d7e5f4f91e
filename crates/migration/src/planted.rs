//! Rules broken on purpose, to prove that the simulator notices such bugs.
//!
//! Only the feature `planted-bugs` compiles the switch. Without it [`broken`] is a constant `false`, and every planted bug is
//! dead code. A bug is chosen per thread, because a simulation runs on one thread.

mod names;

/// A rule that can be broken. The number is its hard case in `docs/failure-model.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// 1: a prepared target leaves by itself after a long wait.
    PreparedTargetLeaves,
    /// 1: a prepared target forgets its promise when its daemon restarts.
    PromiseForgotten,
    /// 2: PREPARED of an earlier attempt counts for the current one.
    StaleAttempt,
    /// 2: a restart of the source does not count the attempts of its former run, and assigns their numbers again.
    TryNotCounted,
    /// 2: a promise outlives the source's run that it was given to, and is repeated to the next run.
    PromiseOfAnotherIncarnation,
    /// 1: a source changes data after a promise without withdrawing the promise.
    PromiseNotWithdrawn,
    /// 2: a target learns that an attempt was not released before that is durable.
    AbortNotRecorded,
    /// 3: guests are admitted to a target's store before it has answered.
    OpenOnTrial,
    /// 4: a write to a block that is being copied goes to both stores by value.
    TwoCopiesInFlight,
    /// 4: a write to a block with a value in flight goes by value, too.
    TwoValuesInFlight,
    /// 4: overlapping writes go to both stores at the same time, which may reverse their order.
    OverlapsUnordered,
    /// 4: a chunk is sent while a value to it is still in flight.
    ChunkOvertakesValue,
    /// 1: a target flushes for an attempt that is over, and holds the source's changes for it.
    ConfirmedTooLate,
    /// 4: a volume changes hands while values are still in flight.
    ValuesInFlight,
    /// 5: a write into a hole ahead of the cursor does not join the missing set.
    HoleAhead,
    /// 6: a chunk is read while writes to it are still under way.
    WritesInFlight,
    /// 6: a round copies blocks that writes of the round before are still changing.
    RoundOvertakesWrites,
    /// 10: a write to a block that a round is copying is not recorded for the next one.
    EpochNotRecorded,
    /// 3: a strategy with rounds hands over while blocks of the last round are missing.
    LastRoundSkipped,
    /// 3: a volume is handed over without hot blocks whose copying was put off.
    HotBlocksLeftOut,
    /// 3: what guests wrote since the last round began is forgotten when a mirror follows rounds.
    OpenEpochForgotten,
    /// 3: what rounds have put off is forgotten when a mirror follows them.
    PutOffForgotten,
    /// 3: a policy reports the replica as equal while blocks are missing.
    MissingHandedOver,
    /// 8: the source is not flushed before the release.
    SourceCache,
    /// 9: an image that another branch of the history has left counts as the known copy.
    BranchMistaken,
    /// 10: a write during a copy joins the copy's missing set, but not the chronicle.
    ChronicleIsMissingSet,
    /// 11: a write is submitted before the mark of its region is durable.
    MarkNotAwaited,
    /// 10: a write beyond the size that a chronicle knows is made, but not recorded.
    BeyondTheEndUnrecorded,
    /// 10: the chronicle of an arriving volume has the size that the volume had when it left.
    StayOfFormerSize,
    /// A host that forwards clients offers them the size that the volume had when it left.
    FormerSizeOffered,
    /// 11: a restart reuses epoch numbers that were assigned before it.
    EpochReused,
    /// 11: a restart ignores epochs that are later than it expects.
    EpochsReservedLate,
    /// 30: a mark counts as durable because a file of an earlier residency had it.
    MarksOfAnEarlierStay,
    /// 31: a kept state is trusted although the image was changed while no daemon held it.
    TouchedImageTrusted,
    /// 31: a copy in another store of the host is continued although its image was changed meanwhile.
    TouchedCopyTrusted,
    /// 10: a copy in another store of the host is continued without the writes since its missing set was kept.
    CopyForgetsWrites,
    /// 32: forgetting a copy removes marks that another copy needs.
    ForgetAfterRefer,
    /// 12: a restarted daemon does not wait for the writes of the killed one.
    GhostWrites,
    /// 12: a change under way is made although its client has gone to another host.
    FenceNotChecked,
    /// 12: a client that has only read is not fenced off again before its first change.
    FencedOnceOnly,
    /// 13: writes that a failed flush of the target may have lost count as present.
    FailedFlushConfirmed,
    /// 13: writes that a failed flush of the source's store may have lost count as present in the image that it leaves.
    FailedFlushForgotten,
    /// 4: parts of a block are combined at each client's host, under claims that other hosts do not know.
    ClaimsAtEachHost,
    /// 13: writes that a restarted target had not made durable count as present.
    TargetRestart,
    /// 15: a discard reaches the target only as a hint.
    Discard,
    /// Design §5.22: a host keeps an access that has ended.
    AccessAfterTheRelationEnded,
    /// Design §5.22: a host at which a volume was attached keeps its access.
    AttachmentOutlivesItsEnd,
    /// Design §5.22: a host that may only read an attached volume changes it.
    ReadOnlyAttachmentWrites,
    /// 9: an incomplete copy is promoted.
    IncompletePromoted,
    /// Decision 0048: a worthless copy is deleted before its end is durable.
    DiscardedBeforeNoted,
    /// Decision 0046: a guest is paused before the permission for it is durable.
    PausedBeforeNoted,
    /// Decision 0046: a pause is forgotten before the guest was seen running.
    ForgottenBeforeRunning,
    /// Design §5.35: a leaving VM is compared with its description only when the order arrives.
    LookedAtOrderOnly,
    /// Design §5.35: a paused VM is handed over without another preflight check.
    NotLookedAtAfterStop,
    /// Design §5.35: a VM moves while a job other than its guest works on its disks.
    JobsPassedOver,
    /// Design §5.35: a pause by another party during the move is not noticed, and the VM runs at the target.
    PauseOfOthersPassedOver,
    /// Design §5.35: a pause by another party is not durable, and the next daemon resumes the VM.
    PauseOfOthersNotNoted,
    /// Design §5.35: a VM that stays is resumed although another party has paused it.
    PausedByOthersRuns,
    /// Design §5.35: a VM's small files move in the state of the order.
    FilesOfTheOrder,
    /// Design §5.35: a source that has lost the rest of a VM's memory does not report it, and its target waits for ever.
    LostMemoryUntold,
    /// Decision 0069: disks of a domain change sides before all of them have caught up.
    SidesChangedOneByOne,
    /// Decision 0069: the image that holds the disk of a shut-off domain is deleted.
    ReleasedImageDiscarded,
    /// Decision 0083: a domain in an unknown state counts as shut off.
    UnknownDomainIsOff,
    /// Decision 0083: a volume that the saved memory of a domain names is removed.
    SavedMemoryForgotten,
    /// Decision 0083: an overlay over a volume counts as another disk, so its volume is removed.
    OverlayIsElsewhere,
    /// Decision 0083: a volume that the disk uses from the next start of its domain on is removed.
    NextStartForgotten,
    /// Decision 0083: a volume that has gone to another host counts as given back.
    RemoteVolumeIsGivenBack,
    /// Decision 0083: the file of a disk is deleted although no copy was made there.
    AnyFileIsACopy,
    /// Decision 0083: a partial copy stays under the name of the disk.
    HalfCopyLeft,
    /// Decision 0083: a copy to which a disk was pivoted is deleted.
    PivotedCopyDiscarded,
    /// The failure of a migration could not be made durable, and the record is not tried again.
    EndNotRepeated,
    /// Law 39: a cancellation is answered before it is durable.
    CancelNotRecorded,
    /// Law 39: a restart continues a cancelled migration.
    CancelForgotten,
    /// Law 39: the journal accepts the handover of a cancelled migration.
    CancelOvertaken,
    /// 10: a VM's description goes to the other host before the VM's departure is durable.
    VmLeavesUnnoted,
    /// Volumes change hands before the hooks have run.
    HooksNotAwaited,
    /// Decision 0092: a target says that it has kept a stopped VM before that is durable.
    ColdVmKeptAfterAnswer,
    /// Decision 0092: the volumes of a stopped VM change hands although the target may not have kept the VM.
    ColdVmNotAskedAgain,
    /// Decision 0084: a hook is begun before its record is durable.
    HookBegunUnrecorded,
    /// Decision 0084: a process that never passed its gate counts as one that has run the program.
    GatedCountsAsRun,
    /// Decision 0084: the time that a hook waits behind its gate counts.
    HookTimedBehindGate,
    /// Decision 0084: the hook after a migration begins before the hook before it has ended.
    UndoWhileBeforeRuns,
    /// Decision 0084: two hooks of one VM run at a time.
    HooksOfOneVmTogether,
    /// Design §5.34: arrivals from other hosts take places of this host's own orders.
    PlacesCountedTogether,
    /// Design §5.34: a host's share is checked when an offer arrives, but taken later.
    ShareTakenLate,
    /// Design §5.34: a failed arrival keeps its part of its host's share.
    ShareNotGivenBack,
    /// Design §5.34: an arrival with a silent source waits for ever.
    SilentArrivalStays,
    /// 7: the presence of a block is recorded before its bytes are durable.
    PresentBeforeDurable,
    /// 7: fetched bytes are stored over a newer write of the guest.
    FillOverNewerWrite,
    /// 7: a restart takes present blocks for missing, and fetches them again.
    PresenceForgotten,
    /// 7: a write over a missing block is answered before a restart would know of it.
    WriteNotNoted,
    /// 7: guests' writes before a kill are not recorded by the next daemon's flush.
    NotedForgotten,
    /// 7: a block that a failed flush may have lost is recorded as present by the next flush.
    LostWriteRecorded,
    /// 17: a read of a missing block is admitted before an earlier write to it is complete.
    ReadPassesOverwriting,
    /// 7: the file of missing blocks grows beyond its reserved space.
    PresenceNeedsSpace,
    /// 7: noted blocks count as missing when the file of missing blocks is written anew.
    NotesLeftOut,
    /// 7: the source's image is retired before the target is complete.
    RetiredBeforeWhole,
    /// 6: the manifest holds the blocks that were missing before the gate closed.
    ManifestOlderThanGate,
    /// 7: a reservoir is deleted because its volume has not returned to it.
    ReservoirDiscarded,
    /// 9: an incomplete image is kept when its volume returns, as if it lacked only later writes.
    HollowImageKept,
    /// 9: a copy at a third host, reported by the volume's former host, counts as lacking only what it lacked then.
    ToldCopyForgetsWrites,
    /// Decision 0067: a volume of a restored journal is served before every other host has answered.
    RestoredUnasked,
    /// Decision 0078: a list of hosts that was lost, or is of another time, counts as complete.
    RestoredListLost,
    /// Decision 0078: a host that must be asked, but is not paired, counts as having nothing.
    RestoredHostRemoved,
    /// Decision 0078: the state of an image is ignored for an order while a host is silent.
    RestoredLookHidden,
    /// Decision 0078: a volume that had left before the backup counts as still away.
    RestoredDeparture,
    /// Decision 0078: a volume of a restored journal has the size that it had at the backup.
    RestoredSize,
    /// Decision 0067: a volume of a restored journal is served although another host has it.
    RestoredUnheard,
    /// Decision 0067: a host confirms volumes that it does not know, although its own journal was restored.
    RestoredVouches,
    /// Decision 0067: a volume of a restored journal is served although its image may be an old one that stayed.
    RestoredDoubt,
    /// Decision 0067: a volume of a restored journal is served from an incomplete migration target.
    RestoredHalfMade,
    /// Decision 0067: a volume of a restored journal is served although another store has the image that it moved to.
    RestoredRival,
    /// Decision 0067: a restored journal has copies deleted whose migrations' ends it has lost.
    RestoredDiscards,
    /// Decision 0067: a restored journal reuses numbers of migrations that it has lost.
    RestoredNumbersReused,
    /// Decision 0077: a destructive step does not ask for claims on the image.
    CustodyUnasked,
    /// Decision 0077: an image with unknown users counts as free.
    UnknownTakenForFree,
    /// Decision 0077: the backing images of served chains are not claimed.
    ChainUnclaimed,
    /// Decision 0077: an image that another host reads is not claimed, and is served again.
    ReservoirUnclaimed,
    /// Decision 0077: claims are compared by name, not by identity.
    ClaimsByNameAlone,
    /// Decision 0077: an image is changed without its lock.
    CustodyLockNotHeld,
    /// Decision 0077: the identity under a name is not compared again before the step.
    IdentityNotCompared,
    /// Decision 0077: missing blocks are read from a reservoir that was changed meanwhile.
    TouchedReservoirRead,
    /// Decision 0077: guests write to an image that a mark still calls half-made.
    MarkOutlivesOutcome,
    /// Decision 0085: a file that has taken the number of the image counts as the image.
    BirthNotCompared,
    /// Decision 0085: which image has which name is forgotten when the daemon is started again.
    ImagesForgottenAtStart,
    /// Decision 0085: what has the name of an image is changed as if it were the image.
    ExchangedTaken,
    /// Decision 0085: what has the name of a volume's image is served as if it were the image.
    ExchangedServed,
    /// Decision 0085: a target is promised although its name leads to another file.
    ExchangedPromised,
    /// Decision 0085: the daemon clears a file away by its name, of which it does not know that it is the one.
    UnrecordedClearedAway,
    /// Decision 0089: a departure is ended by order although its volume is returning into the image that it left.
    DepartedWhileReturning,
    /// Decision 0089: a volume that is taken back by order gets the generation that it has at the other host.
    DepartedGenerationReused,
    /// Decision 0089: a volume is taken back although the other host answers that it has it.
    OwnedThereTakenBack,
    /// Decision 0089: an incomplete volume is removed although no other host would serve it.
    RemovedNotTakenBack,
    /// Decision 0089: a source hears that a volume is complete although its missing blocks were given up.
    GivenUpIsWhole,
    /// Decision 0089: the removal of an incomplete volume forgets that its missing blocks were given up.
    RemovedForgetsGivenUp,
    /// 9: a copy that was handed back is promoted with the generation that its source has.
    HandedBackGenerationReused,
    /// 9: an incomplete copy is promoted by force, although its missing blocks may be those of another branch.
    HollowForced,
    /// 7: a ticket takes an incomplete copy over as if it had all blocks.
    TicketForgetsMissing,
    /// 7: a volume that was handed back still counts as incomplete at its target.
    FillingOutlivesHandBack,
    /// The place of a volume is forgotten before its departure has ended.
    ForgottenUnderWay,
    /// Law 39: a target that has promised accepts a cancellation, which has no effect.
    CancelledAfterPromise,
    /// A departure does not end when its volume has returned into the image that it left.
    DepartureOutlivesReturn,
    /// A source that has its volumes waits for a lost target for ever.
    ToldForEver,
    /// A restart does not continue a migration whose volumes were handed back.
    HandedBackNotResumed,
    /// Decision 0093: an incomplete copy waits for a removed host for ever.
    HollowWaitsForEver,
    /// Decision 0093: an image into which a volume has begun to return is served as if it were as the volume left it.
    MixedImageTakenBack,
    /// The lane of a volume that has left ends before its departure has.
    LaneEndsUnderWay,
    /// The lane of a volume that has left ends although clients use it.
    LaneEndsUnderClients,
    /// A migration that a restart cannot continue at once is not tried again.
    RetryForgotten,
    /// A recovery records the end of a migration before it deletes the worthless target.
    EndedBeforeDiscarded,
    /// A failed arrival leaves those of its images that it had made.
    ImagesNotUndone,
}

impl Bug {
    /// The bugs that the simulator finds with its fleet.
    pub const ALL: &[Self] = &[
        Self::PreparedTargetLeaves,
        Self::PromiseForgotten,
        Self::StaleAttempt,
        Self::TryNotCounted,
        Self::PromiseOfAnotherIncarnation,
        Self::PromiseNotWithdrawn,
        Self::AbortNotRecorded,
        Self::OpenOnTrial,
        Self::TwoCopiesInFlight,
        Self::TwoValuesInFlight,
        Self::OverlapsUnordered,
        Self::ChunkOvertakesValue,
        Self::ConfirmedTooLate,
        Self::ValuesInFlight,
        Self::HoleAhead,
        Self::WritesInFlight,
        Self::RoundOvertakesWrites,
        Self::EpochNotRecorded,
        Self::LastRoundSkipped,
        Self::HotBlocksLeftOut,
        Self::OpenEpochForgotten,
        Self::PutOffForgotten,
        Self::MissingHandedOver,
        Self::SourceCache,
        Self::BranchMistaken,
        Self::ChronicleIsMissingSet,
        Self::MarkNotAwaited,
        Self::BeyondTheEndUnrecorded,
        Self::StayOfFormerSize,
        Self::FormerSizeOffered,
        Self::EpochReused,
        Self::EpochsReservedLate,
        Self::MarksOfAnEarlierStay,
        Self::TouchedImageTrusted,
        Self::TouchedCopyTrusted,
        Self::CopyForgetsWrites,
        Self::ForgetAfterRefer,
        Self::GhostWrites,
        Self::FenceNotChecked,
        Self::FencedOnceOnly,
        Self::FailedFlushConfirmed,
        Self::FailedFlushForgotten,
        Self::ClaimsAtEachHost,
        Self::TargetRestart,
        Self::Discard,
        Self::AccessAfterTheRelationEnded,
        Self::AttachmentOutlivesItsEnd,
        Self::ReadOnlyAttachmentWrites,
        Self::IncompletePromoted,
        Self::DiscardedBeforeNoted,
        Self::PausedBeforeNoted,
        Self::ForgottenBeforeRunning,
        Self::LookedAtOrderOnly,
        Self::NotLookedAtAfterStop,
        Self::JobsPassedOver,
        Self::PauseOfOthersPassedOver,
        Self::PauseOfOthersNotNoted,
        Self::PausedByOthersRuns,
        Self::FilesOfTheOrder,
        Self::LostMemoryUntold,
        Self::SidesChangedOneByOne,
        Self::ReleasedImageDiscarded,
        Self::UnknownDomainIsOff,
        Self::SavedMemoryForgotten,
        Self::OverlayIsElsewhere,
        Self::NextStartForgotten,
        Self::RemoteVolumeIsGivenBack,
        Self::AnyFileIsACopy,
        Self::HalfCopyLeft,
        Self::PivotedCopyDiscarded,
        Self::EndNotRepeated,
        Self::CancelNotRecorded,
        Self::CancelForgotten,
        Self::CancelOvertaken,
        Self::VmLeavesUnnoted,
        Self::HooksNotAwaited,
        Self::ColdVmKeptAfterAnswer,
        Self::ColdVmNotAskedAgain,
        Self::PresentBeforeDurable,
        Self::FillOverNewerWrite,
        Self::PresenceForgotten,
        Self::WriteNotNoted,
        Self::NotedForgotten,
        Self::LostWriteRecorded,
        Self::ReadPassesOverwriting,
        Self::PresenceNeedsSpace,
        Self::NotesLeftOut,
        Self::RetiredBeforeWhole,
        Self::ManifestOlderThanGate,
        Self::ReservoirDiscarded,
        Self::HollowImageKept,
        Self::ToldCopyForgetsWrites,
        Self::RetryForgotten,
        Self::EndedBeforeDiscarded,
        Self::ImagesNotUndone,
    ];

    /// The bugs of restored journals, for which the simulator has a fleet of its own.
    pub const OF_RESTORATION: &[Self] = &[
        Self::RestoredUnasked,
        Self::RestoredListLost,
        Self::RestoredHostRemoved,
        Self::RestoredLookHidden,
        Self::RestoredDeparture,
        Self::RestoredSize,
        Self::RestoredUnheard,
        Self::RestoredVouches,
        Self::RestoredDoubt,
        Self::RestoredHalfMade,
        Self::RestoredRival,
        Self::RestoredDiscards,
        Self::RestoredNumbersReused,
    ];

    /// The bugs of hooks and shares, for which the simulator has worlds of their own.
    pub const OF_SHARES: &[Self] = &[
        Self::HookBegunUnrecorded,
        Self::GatedCountsAsRun,
        Self::HookTimedBehindGate,
        Self::UndoWhileBeforeRuns,
        Self::HooksOfOneVmTogether,
        Self::PlacesCountedTogether,
        Self::ShareTakenLate,
        Self::ShareNotGivenBack,
        Self::SilentArrivalStays,
    ];

    /// The bugs of custody, for which the simulator has a fleet of its own.
    pub const OF_CUSTODY: &[Self] = &[
        Self::CustodyUnasked,
        Self::UnknownTakenForFree,
        Self::ChainUnclaimed,
        Self::ReservoirUnclaimed,
        Self::ClaimsByNameAlone,
        Self::CustodyLockNotHeld,
        Self::IdentityNotCompared,
        Self::TouchedReservoirRead,
        Self::MarkOutlivesOutcome,
        Self::BirthNotCompared,
        Self::ImagesForgottenAtStart,
        Self::ExchangedTaken,
        Self::ExchangedServed,
        Self::ExchangedPromised,
        Self::UnrecordedClearedAway,
    ];

    /// The bugs that orders at any moment, and hosts that are lost for good, bring to light.
    pub const OF_ORDERS: &[Self] = &[
        Self::DepartedWhileReturning,
        Self::DepartedGenerationReused,
        Self::OwnedThereTakenBack,
        Self::RemovedNotTakenBack,
        Self::GivenUpIsWhole,
        Self::RemovedForgetsGivenUp,
        Self::HandedBackGenerationReused,
        Self::HollowForced,
        Self::TicketForgetsMissing,
        Self::FillingOutlivesHandBack,
        Self::ForgottenUnderWay,
        Self::CancelledAfterPromise,
        Self::DepartureOutlivesReturn,
        Self::ToldForEver,
        Self::HandedBackNotResumed,
        Self::HollowWaitsForEver,
        Self::MixedImageTakenBack,
        Self::LaneEndsUnderWay,
        Self::LaneEndsUnderClients,
    ];

    /// Returns every bug of these lists.
    pub fn all() -> impl Iterator<Item = Self> {
        let small = Self::OF_SHARES.iter().chain(Self::OF_CUSTODY).chain(Self::OF_ORDERS);
        Self::ALL.iter().chain(Self::OF_RESTORATION).chain(small).copied()
    }
}

#[cfg(feature = "planted-bugs")]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static BROKEN: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Breaks this rule, or none, on this thread from now on.
    pub fn plant(bug: Option<Bug>) {
        BROKEN.set(bug);
    }

    /// Returns whether this rule is broken on this thread.
    pub fn broken(bug: Bug) -> bool {
        BROKEN.get() == Some(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
mod switch {
    use super::Bug;

    /// Returns whether this rule is broken: never, in this build.
    pub const fn broken(_: Bug) -> bool {
        false
    }
}

pub use switch::*;
