//! Rules broken on purpose, so that the simulator can prove that it would see it.
//!
//! Only the feature `planted-bugs` compiles the switch; without it [`broken`] is a constant `false` and every planted
//! bug is dead code. A bug is chosen for a thread: a simulation runs on one.

/// A rule that can be broken; the number is the hard case that it stands for (`docs/failure-model.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// 1: a prepared target gives up by itself when it has waited for long.
    PreparedTargetLeaves,
    /// 1: a prepared target whose daemon is started again knows nothing of its promise.
    PromiseForgotten,
    /// 2: PREPARED of an earlier try is taken for the present one's.
    StaleAttempt,
    /// 2: a restart of the source does not count the tries of its former run, and gives their numbers again.
    TryNotCounted,
    /// 2: a promise outlives the run of the source that it was given to, and is answered again to the next.
    PromiseOfAnotherIncarnation,
    /// 1: what a source changes after a promise is changed although the promise stands.
    PromiseNotWithdrawn,
    /// 2: a target is told that a try was not released before that is durable.
    AbortNotRecorded,
    /// 3: guests are let through to a target's store before it is known whether that answers.
    OpenOnTrial,
    /// 4: a write to a block that is being copied goes to both stores by value.
    TwoCopiesInFlight,
    /// 4: a write to a block with a value in flight goes by value, too.
    TwoValuesInFlight,
    /// 4: writes that overlap go to both stores at the same time, which may turn their order round.
    OverlapsUnordered,
    /// 4: a chunk is sent although a value to it is still in flight.
    ChunkOvertakesValue,
    /// 4: a volume changes hands although values are still in flight.
    ValuesInFlight,
    /// 5: a write into a hole ahead of the cursor does not join the missing set.
    HoleAhead,
    /// 6: a chunk is read although writes to it are still under way.
    WritesInFlight,
    /// 6: a round copies what writes of the round before are still changing.
    RoundOvertakesWrites,
    /// 10: a write to what a round is copying is not recorded for the next one.
    EpochNotRecorded,
    /// 3: a strategy that copies in rounds hands over although blocks of the last one are missing.
    LastRoundSkipped,
    /// 3: a volume is handed over although blocks that were put off, because they are written again and again, have not been
    /// copied.
    HotBlocksLeftOut,
    /// 3: a policy says that the replica is equal although blocks are missing.
    MissingHandedOver,
    /// 8: the source is not flushed before it is released.
    SourceCache,
    /// 9: an image that another branch of the history has left is taken for the copy that is known.
    BranchMistaken,
    /// 10: what is written while a copy is made is in the copy's missing set, and not in the chronicle.
    ChronicleIsMissingSet,
    /// 11: a write is submitted before it is durable that its region may be written.
    MarkNotAwaited,
    /// 10: a write beyond what a chronicle knows of its volume is made, and recorded nowhere.
    BeyondTheEndUnrecorded,
    /// 10: the chronicle of a volume that comes is as large as the volume was when it left.
    StayOfFormerSize,
    /// A host that leads clients on offers them the size that the volume had when it left.
    FormerSizeOffered,
    /// 11: a restart goes on with epoch numbers that were given out before it.
    EpochReused,
    /// 11: a restart passes over epochs that are later than it expects.
    EpochsReservedLate,
    /// 30: a mark is thought to be durable because a file of an earlier stay had it.
    MarksOfAnEarlierStay,
    /// 31: what was kept is trusted although the image has changed while nobody held it.
    TouchedImageTrusted,
    /// 31: a copy in another store of the host is gone on with although somebody has changed its image meanwhile.
    TouchedCopyTrusted,
    /// 10: a copy in another store of the host is gone on with as if nothing had been written since what it lacks was kept.
    CopyForgetsWrites,
    /// 32: a copy that is forgotten takes marks with it that another one needs, which is or is being referred to.
    ForgetAfterRefer,
    /// 12: a restarted daemon does not wait for the writes of the killed one.
    GhostWrites,
    /// 12: a change that was under way when its client went to another host is made all the same.
    FenceNotChecked,
    /// 13: what a failed flush of the target may have lost is believed to be there.
    FailedFlushConfirmed,
    /// 13: what a failed flush of the source's own store may have lost is believed to be in the image that it leaves.
    FailedFlushForgotten,
    /// 4: parts of a block are put together at the host of each client, under claims that other hosts know nothing of.
    ClaimsAtEachHost,
    /// 13: what a restarted target had not made durable is believed to be there.
    TargetRestart,
    /// 15: a discard reaches the target as a hint only.
    Discard,
    /// Design §5.22: a host that was given access once keeps it when that has ended.
    AccessAfterTheRelationEnded,
    /// 9: a copy of which parts are missing is promoted.
    IncompletePromoted,
    /// Decision 0048: a copy that is worthless is deleted before it is durable that it is.
    DiscardedBeforeNoted,
    /// Decision 0046: a guest is paused before it is durable that it may be.
    PausedBeforeNoted,
    /// Decision 0046: that a guest was paused is forgotten before it was seen to run.
    ForgottenBeforeRunning,
    /// Design §5.35: a VM that leaves is compared with what is known of it when the order comes, and never again.
    LookedAtOrderOnly,
    /// Design §5.35: a VM that stands still is handed over without a look at what it has by then.
    NotLookedAtAfterStop,
    /// Design §5.35: a VM moves although something works on its disks beside its guest.
    JobsPassedOver,
    /// Design §5.35: that somebody else pauses a VM while it moves is not noticed, and it runs at the target.
    PauseOfOthersPassedOver,
    /// Design §5.35: that somebody else has paused a VM is not made durable, and the next daemon lets it run.
    PauseOfOthersNotNoted,
    /// Design §5.35: a VM that stays is let run although somebody else has paused it.
    PausedByOthersRuns,
    /// Design §5.35: a VM's small files go as they were when the order came.
    FilesOfTheOrder,
    /// Design §5.35: a source that has lost the rest of a VM's memory does not say so, and its target waits for ever.
    LostMemoryUntold,
    /// Decision 0069: disks of a domain change sides before all of them have caught up.
    SidesChangedOneByOne,
    /// Decision 0069: the image is thrown away that the disk of a domain that is shut off is in.
    ReleasedImageDiscarded,
    /// Decision 0083: a domain whose state is not recognised counts as shut off.
    UnknownDomainIsOff,
    /// Decision 0083: a volume is removed that the saved memory of a domain names.
    SavedMemoryForgotten,
    /// Decision 0083: an overlay over a volume counts as another disk, so its volume is removed.
    OverlayIsElsewhere,
    /// Decision 0083: a volume is removed that the disk is over at the next start of its domain.
    NextStartForgotten,
    /// Decision 0083: a volume that has gone to another host counts as given back.
    RemoteVolumeIsGivenBack,
    /// Decision 0083: the file of a disk is deleted although nobody made a copy there.
    AnyFileIsACopy,
    /// Decision 0083: half a copy stays under the name of the disk.
    HalfCopyLeft,
    /// Decision 0083: a copy is deleted that a disk was led over.
    PivotedCopyDiscarded,
    /// That a migration came to nothing could not be made durable, and nobody tries it again.
    EndNotRepeated,
    /// Law 39: that a migration is cancelled is answered before it is durable.
    CancelNotRecorded,
    /// Law 39: a restart goes on with a migration that was cancelled.
    CancelForgotten,
    /// Law 39: the journal takes the handover of a migration that was cancelled before.
    CancelOvertaken,
    /// 10: a VM's manifest goes to the other host before it is durable that the VM is leaving.
    VmLeavesUnnoted,
    /// Volumes change hands although what is to be run before that has not been run.
    HooksNotAwaited,
    /// Decision 0084: a hook is begun before it is durable that it is.
    HookBegunUnrecorded,
    /// Decision 0084: what is run after a migration is begun although what is run before it has not ended.
    UndoWhileBeforeRuns,
    /// Decision 0084: two hooks of one VM run at a time.
    HooksOfOneVmTogether,
    /// Design §5.34: what other hosts bring takes places of what is ordered here.
    PlacesCountedTogether,
    /// Design §5.34: what a host has of its share is looked at when an offer comes, and taken later.
    ShareTakenLate,
    /// Design §5.34: an arrival that came to nothing keeps its part of its host's share.
    ShareNotGivenBack,
    /// Design §5.34: an arrival whose source says nothing waits for ever.
    SilentArrivalStays,
    /// 7: that a block is present is recorded before its bytes are durable.
    PresentBeforeDurable,
    /// 7: what was fetched is stored although the guest has written there meanwhile.
    FillOverNewerWrite,
    /// 7: a restart takes blocks for missing that were present, and fetches them again.
    PresenceForgotten,
    /// 7: a write over a missing block is answered before a restart would know of it.
    WriteNotNoted,
    /// 7: what guests had written when a daemon was killed is not recorded by the next one's flush.
    NotedForgotten,
    /// 17: a read is let through to a missing block that a write has not reached yet.
    ReadPassesOverwriting,
    /// 7: the source's image is dealt with before the target has everything.
    RetiredBeforeWhole,
    /// 6: what is told to be missing is what was missing before the gate closed.
    ManifestOlderThanGate,
    /// 7: what another host reads is deleted, as its volume has not come back into it.
    ReservoirDiscarded,
    /// 9: an image that lacks blocks is kept when its volume goes back, as one that lacks only what is written from then on.
    HollowImageKept,
    /// 9: a copy at a third host, of which the volume's former host has told, is taken to lack only what it lacked then.
    ToldCopyForgetsWrites,
    /// Decision 0067: a volume of a journal that was put back is served before every other host has said what it knows.
    RestoredUnasked,
    /// Decision 0078: a list of hosts that was lost, or is of another time, counts as one that names every host.
    RestoredListLost,
    /// Decision 0078: a host that has to be asked, and is not paired any more, counts as one that has nothing.
    RestoredHostRemoved,
    /// Decision 0078: how an image looks does not count for an order as long as a host is silent.
    RestoredLookHidden,
    /// Decision 0078: a volume that had left when the backup was made is believed to be away still.
    RestoredDeparture,
    /// Decision 0078: a volume of a journal that was put back has the size that it had then.
    RestoredSize,
    /// Decision 0067: a volume of a journal that was put back is served although another host has it.
    RestoredUnheard,
    /// Decision 0067: the word of a host counts of what it does not know, although its own journal was put back.
    RestoredVouches,
    /// Decision 0067: a volume of a journal that was put back is served although its image may be an old one that stayed.
    RestoredDoubt,
    /// Decision 0067: a volume of a journal that was put back is served from an image that a migration has not completed.
    RestoredHalfMade,
    /// Decision 0067: a volume of a journal that was put back is served although another store has the image that it moved to.
    RestoredRival,
    /// Decision 0067: a journal that was put back has the copies of migrations deleted of which it has lost the end.
    RestoredDiscards,
    /// Decision 0067: a journal that was put back gives numbers of migrations again that it has lost.
    RestoredNumbersReused,
    /// Decision 0077: a destructive step does not ask who claims the image.
    CustodyUnasked,
    /// Decision 0077: an image of which nobody knows who uses it counts as free.
    UnknownTakenForFree,
    /// Decision 0077: what served chains stand on is not claimed.
    ChainUnclaimed,
    /// Decision 0077: an image that another host reads is not claimed: it is served again.
    ReservoirUnclaimed,
    /// Decision 0077: claims are compared by name, and not by what the name leads to.
    ClaimsByNameAlone,
    /// Decision 0077: an image is changed without its lock.
    CustodyLockNotHeld,
    /// Decision 0077: what a name leads to is not compared once more before the step.
    IdentityNotCompared,
    /// Decision 0077: what another host lacks is read from an image that somebody has changed meanwhile.
    TouchedReservoirRead,
    /// Decision 0077: guests write to an image that a mark still calls half-made.
    MarkOutlivesOutcome,
}

impl Bug {
    /// All of them that the simulator meets with its fleet. No seed has noticed [`Self::CancelForgotten`], [`Self::CancelOvertaken`] and
    /// [`Self::NotedForgotten`] yet: they are not among these.
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
        Self::ValuesInFlight,
        Self::HoleAhead,
        Self::WritesInFlight,
        Self::RoundOvertakesWrites,
        Self::EpochNotRecorded,
        Self::LastRoundSkipped,
        Self::HotBlocksLeftOut,
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
        Self::FailedFlushConfirmed,
        Self::FailedFlushForgotten,
        Self::ClaimsAtEachHost,
        Self::TargetRestart,
        Self::Discard,
        Self::AccessAfterTheRelationEnded,
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
        Self::VmLeavesUnnoted,
        Self::HooksNotAwaited,
        Self::PresentBeforeDurable,
        Self::FillOverNewerWrite,
        Self::PresenceForgotten,
        Self::WriteNotNoted,
        Self::ReadPassesOverwriting,
        Self::RetiredBeforeWhole,
        Self::ManifestOlderThanGate,
        Self::ReservoirDiscarded,
        Self::HollowImageKept,
        Self::ToldCopyForgetsWrites,
    ];

    /// Those of journals that are put back, which the simulator meets in a fleet of its own.
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

    /// Those of hooks and of shares, which the simulator meets in worlds of their own.
    pub const OF_SHARES: &[Self] = &[
        Self::HookBegunUnrecorded,
        Self::UndoWhileBeforeRuns,
        Self::HooksOfOneVmTogether,
        Self::PlacesCountedTogether,
        Self::ShareTakenLate,
        Self::ShareNotGivenBack,
        Self::SilentArrivalStays,
    ];

    /// Those of what is done to images, which the simulator meets in a fleet of its own.
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
    ];

    /// All there are.
    pub fn all() -> impl Iterator<Item = Self> {
        let small = Self::OF_SHARES.iter().chain(Self::OF_CUSTODY);
        Self::ALL.iter().chain(Self::OF_RESTORATION).chain(small).copied()
    }

    /// The name by which the simulator's command line knows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreparedTargetLeaves => "prepared-target-leaves",
            Self::PromiseForgotten => "promise-forgotten",
            Self::StaleAttempt => "stale-attempt",
            Self::TryNotCounted => "try-not-counted",
            Self::PromiseOfAnotherIncarnation => "promise-of-another-incarnation",
            Self::PromiseNotWithdrawn => "promise-not-withdrawn",
            Self::AbortNotRecorded => "abort-not-recorded",
            Self::OpenOnTrial => "open-on-trial",
            Self::TwoCopiesInFlight => "two-copies-in-flight",
            Self::TwoValuesInFlight => "two-values-in-flight",
            Self::OverlapsUnordered => "overlaps-unordered",
            Self::ChunkOvertakesValue => "chunk-overtakes-value",
            Self::ValuesInFlight => "values-in-flight",
            Self::HoleAhead => "hole-ahead",
            Self::WritesInFlight => "writes-in-flight",
            Self::RoundOvertakesWrites => "round-overtakes-writes",
            Self::EpochNotRecorded => "epoch-not-recorded",
            Self::LastRoundSkipped => "last-round-skipped",
            Self::HotBlocksLeftOut => "hot-blocks-left-out",
            Self::MissingHandedOver => "missing-handed-over",
            Self::SourceCache => "source-cache",
            Self::BranchMistaken => "branch-mistaken",
            Self::ChronicleIsMissingSet => "chronicle-is-missing-set",
            Self::MarkNotAwaited => "mark-not-awaited",
            Self::BeyondTheEndUnrecorded => "beyond-the-end-unrecorded",
            Self::StayOfFormerSize => "stay-of-former-size",
            Self::FormerSizeOffered => "former-size-offered",
            Self::EpochReused => "epoch-reused",
            Self::EpochsReservedLate => "epochs-reserved-late",
            Self::MarksOfAnEarlierStay => "marks-of-an-earlier-stay",
            Self::TouchedImageTrusted => "touched-image-trusted",
            Self::TouchedCopyTrusted => "touched-copy-trusted",
            Self::CopyForgetsWrites => "copy-forgets-writes",
            Self::ForgetAfterRefer => "forget-after-refer",
            Self::GhostWrites => "ghost-writes",
            Self::FenceNotChecked => "fence-not-checked",
            Self::FailedFlushConfirmed => "failed-flush-confirmed",
            Self::FailedFlushForgotten => "failed-flush-forgotten",
            Self::ClaimsAtEachHost => "claims-at-each-host",
            Self::TargetRestart => "target-restart",
            Self::Discard => "discard",
            Self::AccessAfterTheRelationEnded => "access-after-the-relation-ended",
            Self::IncompletePromoted => "incomplete-promoted",
            Self::DiscardedBeforeNoted => "discarded-before-noted",
            Self::PausedBeforeNoted => "paused-before-noted",
            Self::ForgottenBeforeRunning => "forgotten-before-running",
            Self::LookedAtOrderOnly => "looked-at-order-only",
            Self::NotLookedAtAfterStop => "not-looked-at-after-stop",
            Self::JobsPassedOver => "jobs-passed-over",
            Self::PauseOfOthersPassedOver => "pause-of-others-passed-over",
            Self::PauseOfOthersNotNoted => "pause-of-others-not-noted",
            Self::PausedByOthersRuns => "paused-by-others-runs",
            Self::FilesOfTheOrder => "files-of-the-order",
            Self::LostMemoryUntold => "lost-memory-untold",
            Self::SidesChangedOneByOne => "sides-changed-one-by-one",
            Self::ReleasedImageDiscarded => "released-image-discarded",
            Self::UnknownDomainIsOff => "unknown-domain-is-off",
            Self::SavedMemoryForgotten => "saved-memory-forgotten",
            Self::OverlayIsElsewhere => "overlay-is-elsewhere",
            Self::NextStartForgotten => "next-start-forgotten",
            Self::RemoteVolumeIsGivenBack => "remote-volume-is-given-back",
            Self::AnyFileIsACopy => "any-file-is-a-copy",
            Self::HalfCopyLeft => "half-copy-left",
            Self::PivotedCopyDiscarded => "pivoted-copy-discarded",
            Self::EndNotRepeated => "end-not-repeated",
            Self::CancelNotRecorded => "cancel-not-recorded",
            Self::CancelForgotten => "cancel-forgotten",
            Self::CancelOvertaken => "cancel-overtaken",
            Self::VmLeavesUnnoted => "vm-leaves-unnoted",
            Self::HooksNotAwaited => "hooks-not-awaited",
            Self::HookBegunUnrecorded => "hook-begun-unrecorded",
            Self::UndoWhileBeforeRuns => "undo-while-before-runs",
            Self::HooksOfOneVmTogether => "hooks-of-one-vm-together",
            Self::PlacesCountedTogether => "places-counted-together",
            Self::ShareTakenLate => "share-taken-late",
            Self::ShareNotGivenBack => "share-not-given-back",
            Self::SilentArrivalStays => "silent-arrival-stays",
            Self::PresentBeforeDurable => "present-before-durable",
            Self::FillOverNewerWrite => "fill-over-newer-write",
            Self::PresenceForgotten => "presence-forgotten",
            Self::WriteNotNoted => "write-not-noted",
            Self::NotedForgotten => "noted-forgotten",
            Self::ReadPassesOverwriting => "read-passes-overwriting",
            Self::RetiredBeforeWhole => "retired-before-whole",
            Self::ManifestOlderThanGate => "manifest-older-than-gate",
            Self::ReservoirDiscarded => "reservoir-discarded",
            Self::HollowImageKept => "hollow-image-kept",
            Self::ToldCopyForgetsWrites => "told-copy-forgets-writes",
            Self::RestoredUnasked => "restored-unasked",
            Self::RestoredListLost => "restored-list-lost",
            Self::RestoredHostRemoved => "restored-host-removed",
            Self::RestoredLookHidden => "restored-look-hidden",
            Self::RestoredDeparture => "restored-departure",
            Self::RestoredSize => "restored-size",
            Self::RestoredUnheard => "restored-unheard",
            Self::RestoredVouches => "restored-vouches",
            Self::RestoredDoubt => "restored-doubt",
            Self::RestoredHalfMade => "restored-half-made",
            Self::RestoredRival => "restored-rival",
            Self::RestoredDiscards => "restored-discards",
            Self::RestoredNumbersReused => "restored-numbers-reused",
            Self::CustodyUnasked => "custody-unasked",
            Self::UnknownTakenForFree => "unknown-taken-for-free",
            Self::ChainUnclaimed => "chain-unclaimed",
            Self::ReservoirUnclaimed => "reservoir-unclaimed",
            Self::ClaimsByNameAlone => "claims-by-name-alone",
            Self::CustodyLockNotHeld => "custody-lock-not-held",
            Self::IdentityNotCompared => "identity-not-compared",
            Self::TouchedReservoirRead => "touched-reservoir-read",
            Self::MarkOutlivesOutcome => "mark-outlives-outcome",
        }
    }
}

#[cfg(feature = "planted-bugs")]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static BROKEN: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Breaks one rule, or none, on this thread from now on.
    pub fn plant(bug: Option<Bug>) {
        BROKEN.set(bug);
    }

    /// Tells whether this rule is broken on this thread.
    pub fn broken(bug: Bug) -> bool {
        BROKEN.get() == Some(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
mod switch {
    use super::Bug;

    /// Tells whether this rule is broken: never, in this build.
    pub const fn broken(_: Bug) -> bool {
        false
    }
}

pub use switch::*;
