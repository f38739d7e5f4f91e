//! The events and actions of a session.

use crate::failure::{CommitFault, Failure};
use crate::journal::{Outcome, Stage};

/// A step before a driver has the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Check that the order is permitted, and reserve room for it: names and places, still empty.
    MakeRoom,
    /// Make *started* durable in the journal.
    Record,
    /// Ask the other host to take the volumes, and await its consent.
    Offer,
    /// Make the departure of the VM durable.
    LetVmLeave,
    /// Ask the other host whether it can run the VM, and await its consent.
    ExamineVm,
    /// Make the target's images.
    MakeImages,
    /// Start the lanes: from now on a driver decides.
    Begin,
}

/// An event of a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A step is done, or has failed.
    Done(Step, Result<(), Failure>),
    /// *Started* may be in the journal, or not; only a restart will tell. For [`Step::Record`].
    Undecided,
    /// The stage in the journal, in answer to [`Action::Recall`]; `None` if the migration is not there.
    Recalled(Option<Stage>),
    /// The driver has ended the migration, durably.
    DriverEnded(Outcome),
    /// The driver is gone, and the migration has not ended.
    DriverLost,
    /// *Discarding* is durable, or could not be recorded.
    Abandoned(Result<(), CommitFault>),
    /// The undo is complete, as far as possible.
    Undone {
        /// The images that could not be deleted, as text for the administrator; empty if there are none.
        left_over: String,
    },
    /// *Ended* is durable, or could not be recorded.
    Ended(Result<(), CommitFault>),
    /// The place of the VM is durable, or could not be recorded.
    Noted(Result<(), String>),
    /// The obstacle to resuming may be gone.
    LookAgain,
    /// The administrator has cancelled the migration.
    Cancel,
}

/// An action for a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Do this step, then report [`Event::Done`]. A step that is [not current](super::MigrationSession::doing) may be dropped.
    Do(Step),
    /// Look the stage up in the journal, then report [`Event::Recalled`].
    Recall,
    /// Make *discarding* durable, then report [`Event::Abandoned`].
    Abandon(Outcome),
    /// Undo the earlier steps, then report [`Event::Undone`].
    Undo(Undo),
    /// Let the driver end the migration: the VM stays, because the process that sent its memory is gone.
    KeepVm,
    /// Let the driver cancel the migration, if that is still possible.
    Cancel,
    /// Make *ended* durable, then report [`Event::Ended`].
    End(Outcome),
    /// Release everything held for a driver: there is none for the time being.
    LetGo,
    /// The migration has ended, durably: serve the volumes that are here, and release the others.
    PlaceVolumes(Outcome),
    /// Make the place of the VM durable, then report [`Event::Noted`].
    Note(VmPlace),
    /// Answer the client that ordered the migration, once.
    Answer(Answer),
    /// The migration is over: inform watchers, and run the hook after it.
    Conclude(Outcome),
}

/// The way to undo the steps before a driver has the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// The journal does not have the migration: give the reserved room back.
    Room,
    /// The other host may have taken the volumes: tell it to release them.
    Offer,
    /// Delete images for which nothing was promised.
    Images,
}

/// The place of a VM, as its host records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmPlace {
    /// At this host, with its volumes.
    Here,
    /// At the other host, with its volumes.
    Elsewhere,
}

/// The answer to the client that ordered a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The migration is under way: its volumes are accepted and copied.
    Begun,
    /// The migration was refused, or failed.
    Refused,
}
