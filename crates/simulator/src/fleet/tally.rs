//! What happens between hosts besides faults, and how many seeds have seen it: a campaign in which nobody ever promoted
//! anything, or came home to a kept image, proves nothing about that.

use std::fmt;

/// Something that a campaign between hosts is to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Volumes are another host's.
    Handover,
    /// Volumes have been at three hosts, or more often than that.
    Tour,
    /// Volumes are back at a host where they were before.
    Return,
    /// A volume returns to the image that was kept, and only what that lacks is copied.
    IncrementalReturn,
    /// Volumes are in another store of their host.
    Within,
    /// A restart goes on with what goes to another store.
    WithinResumed,
    /// A daemon was stopped in order while volumes went to another store.
    StopWithin,
    /// Somebody has changed the image of a copy in another store while its daemon was stopped.
    CopyTouched,
    /// The same as a return to a kept image, from a host where they had gone to another store.
    ReturnAfterWithin,
    /// The same from a host to which the volume had not gone from there: others have told it what is lacking there.
    ReturnFromFurther,
    /// Somebody has touched an image that was kept.
    ImageTouched,
    /// A daemon that has volumes was stopped in order.
    StopInOrder,
    /// A daemon that has volumes, and nothing to do, was killed.
    KillAtRest,
    /// The daemon of a source was killed soon after its migration had ended.
    KillAfterEnd,
    /// A daemon was killed soon after it was durable that it knows a copy no more.
    KillAfterForgetting,
    /// Somebody has changed a volume's own image while its daemon was stopped.
    OwnImageTouched,
    /// A data folder was full for a while.
    FolderFull,
    /// Volumes were given back after the commit point.
    HandBack,
    /// A ticket was redeemed.
    Ticket,
    /// A promotion was forced after the source had released: nobody else has the volumes.
    ForceInstead,
    /// A promotion was forced that opens a branch of the history.
    Branch,
    /// A copy that was handed back is promoted by force.
    HandedBackPromoted,
    /// A branch moves on while there is another.
    BranchMoves,
    /// A daemon is killed while there are two branches.
    BranchKill,
    /// Guests go on at the host that has their volumes.
    HomeMoves,
    /// Guests go to another host, and leave behind what was not answered.
    Wander,
    /// Power is cut at a host that has volumes.
    OwnerPowerCut,
    /// A host asks for what it was given once.
    Rogue,
    /// Volumes that lack blocks begin to go back to what has them.
    GoesBack,
    /// They are back, and what was missing need not follow.
    TakenBack,
    /// The VM goes along.
    GoesBackWithVm,
    /// A read of what another host did not give was refused, for a guest that is stopped by that.
    LateRead,
}

/// How often things have happened, in one simulation or, by seeds, in many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally([u64; EVENTS]);

const EVENTS: usize = Event::ALL.len();

impl Event {
    const ALL: [Self; 32] = [
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
            Self::GoesBack => "goes back to what it lacks",
            Self::GoesBackWithVm => "goes back with its VM",
            Self::TakenBack => "is back at what it lacked",
            Self::LateRead => "a read is refused, and its guest stopped",
        }
    }
}

impl Tally {
    /// It has happened once more.
    pub(crate) fn add(&mut self, event: Event) {
        self.0[event as usize] += 1;
    }

    /// How often it has happened.
    pub(crate) fn count(&self, event: Event) -> u64 {
        self.0[event as usize]
    }

    /// Adds a seed: what happened in it counts once.
    pub(crate) fn add_seed(&mut self, seed: &Self) {
        self.0.iter_mut().zip(seed.0).for_each(|(seeds, times)| *seeds += u64::from(times > 0));
    }

    /// Adds those of other seeds.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(seeds, others)| *seeds += others);
    }

    /// What fewer than `wanted` seeds have seen. A `hosts` of two cannot have everything.
    pub(crate) fn below(&self, wanted: u64, hosts: u8) -> Vec<(&'static str, u64)> {
        let takes_a_third =
            |event: &Event| matches!(event, Event::BranchMoves | Event::Rogue | Event::ReturnFromFurther);
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
