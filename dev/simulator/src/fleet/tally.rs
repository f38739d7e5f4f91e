//! Counts events between hosts other than faults, and the seeds that have seen them: a campaign without a promotion, or a return
//! to a kept image, proves nothing about these.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Handover,
    /// Volumes have been at three hosts, or more.
    Tour,
    Return,
    /// A volume returns to a kept image, and only its missing blocks are copied.
    IncrementalReturn,
    Within,
    /// A restart continues a migration to another store.
    WithinResumed,
    StopWithin,
    /// A copy in another store was changed while its daemon was stopped.
    CopyTouched,
    /// An incremental return from a host where the volume had moved to another store.
    ReturnAfterWithin,
    /// An incremental return from a host to which the volume had come from a third one, which sent the missing set.
    ReturnFromFurther,
    ImageTouched,
    StopInOrder,
    /// An idle daemon that has volumes was killed.
    KillAtRest,
    KillAfterEnd,
    /// A daemon was killed as it asked another host to keep a stopped VM.
    KillAtQuestion,
    /// A daemon was killed soon after it had durably forgotten a copy.
    KillAfterForgetting,
    OwnImageTouched,
    FolderFull,
    HandBack,
    Ticket,
    /// A promotion was forced after the release: no other host has the volumes.
    ForceInstead,
    /// A forced promotion opens a branch of the history.
    Branch,
    HandedBackPromoted,
    BranchMoves,
    BranchKill,
    /// Guests continue at the host that has their volumes.
    HomeMoves,
    /// Guests change hosts, and leave unanswered requests behind.
    Wander,
    OwnerPowerCut,
    /// A host asks by an ended permission.
    Rogue,
    /// Volumes are attached at a host that never had them.
    Attached,
    /// The same, for reading.
    AttachedToRead,
    Detached,
    /// Incomplete volumes begin to return to their missing blocks.
    GoesBack,
    /// They are back, and need no more blocks.
    TakenBack,
    GoesBackWithVm,
    /// A read of a missing block failed because another host did not answer, for a guest that stops on errors.
    LateRead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tally([u64; EVENTS]);

impl Default for Tally {
    fn default() -> Self {
        Self([0; EVENTS])
    }
}

const EVENTS: usize = Event::ALL.len();

impl Event {
    const ALL: [Self; 36] = [
        Self::Handover,
        Self::Tour,
        Self::Return,
        Self::IncrementalReturn,
        Self::Within,
        Self::WithinResumed,
        Self::StopWithin,
        Self::CopyTouched,
        Self::ReturnAfterWithin,
        Self::ReturnFromFurther,
        Self::ImageTouched,
        Self::StopInOrder,
        Self::KillAtRest,
        Self::KillAfterEnd,
        Self::KillAtQuestion,
        Self::KillAfterForgetting,
        Self::OwnImageTouched,
        Self::FolderFull,
        Self::HandBack,
        Self::Ticket,
        Self::ForceInstead,
        Self::Branch,
        Self::HandedBackPromoted,
        Self::BranchMoves,
        Self::BranchKill,
        Self::HomeMoves,
        Self::Wander,
        Self::OwnerPowerCut,
        Self::Rogue,
        Self::Attached,
        Self::AttachedToRead,
        Self::Detached,
        Self::GoesBack,
        Self::TakenBack,
        Self::GoesBackWithVm,
        Self::LateRead,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Handover => "handed over",
            Self::Tour => "handed over three times or more",
            Self::Return => "back at a host",
            Self::IncrementalReturn => "back at a kept image, which was used",
            Self::Within => "moved to another store of the host",
            Self::WithinResumed => "the same, gone on with by a restart",
            Self::StopWithin => "a daemon is stopped in order meanwhile",
            Self::CopyTouched => "and the copy is changed",
            Self::ReturnAfterWithin => "back at a kept image after such a move",
            Self::ReturnFromFurther => "back at a kept image from a host further on",
            Self::ImageTouched => "kept image touched",
            Self::StopInOrder => "an owner's daemon is stopped in order",
            Self::KillAtRest => "an owner's daemon is killed at rest",
            Self::KillAfterEnd => "a source's daemon is killed after the end",
            Self::KillAtQuestion => "a daemon is killed as it asks to keep a stopped VM",
            Self::KillAfterForgetting => "a daemon is killed as it forgets a copy",
            Self::OwnImageTouched => "its image is changed meanwhile",
            Self::FolderFull => "data folder full for a while",
            Self::HandBack => "handed back",
            Self::Ticket => "promoted by ticket",
            Self::ForceInstead => "promoted by force for a ticket",
            Self::Branch => "promoted by force: two branches",
            Self::HandedBackPromoted => "promoted by force: handed back",
            Self::BranchMoves => "a branch of two moves on",
            Self::BranchKill => "a daemon is killed while there are two",
            Self::HomeMoves => "guests follow their volumes",
            Self::Wander => "guests go to another host by themselves",
            Self::OwnerPowerCut => "power cut under guests",
            Self::Rogue => "a host asks for what it was given once",
            Self::Attached => "volumes attached at a host that never had them",
            Self::AttachedToRead => "volumes attached for reading",
            Self::Detached => "volumes detached",
            Self::GoesBack => "goes back to what it lacks",
            Self::GoesBackWithVm => "goes back with its VM",
            Self::TakenBack => "is back at what it lacked",
            Self::LateRead => "a read is refused, and its guest stopped",
        }
    }
}

impl Tally {
    pub(crate) fn add(&mut self, event: Event) {
        self.0[event as usize] += 1;
    }

    pub(crate) fn count(&self, event: Event) -> u64 {
        self.0[event as usize]
    }

    /// Adds a seed: each of its events counts once.
    pub(crate) fn add_seed(&mut self, seed: &Self) {
        self.0.iter_mut().zip(seed.0).for_each(|(seeds, times)| *seeds += u64::from(times > 0));
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(seeds, others)| *seeds += others);
    }

    /// Returns the events that fewer than `wanted` seeds have seen. Two hosts cannot have all of them.
    pub(crate) fn below(&self, wanted: u64, hosts: u8) -> Vec<(&'static str, u64)> {
        let takes_a_third = |event: &Event| {
            matches!(
                event,
                Event::BranchMoves
                    | Event::Attached
                    | Event::AttachedToRead
                    | Event::Detached
                    | Event::Rogue
                    | Event::ReturnFromFurther
            )
        };
        let possible = |event: &Event| hosts > 2 || !takes_a_third(event);
        let seen = Event::ALL.into_iter().filter(possible).map(|event| (event.name(), self.count(event)));
        seen.filter(|(_, seeds)| *seeds < wanted).collect()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Event::ALL
            .into_iter()
            .try_for_each(|event| writeln!(f, "{:<40}{:>8} seeds", event.name(), self.count(event)))
    }
}
