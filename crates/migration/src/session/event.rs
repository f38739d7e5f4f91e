//! What a session is told, and what it asks for.

use crate::failure::{CommitFault, Failure};
use crate::journal::{Outcome, Stage};

/// Something that is done before a driver can have the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// What is asked for may be, and there is room for it: names and places are taken, which hold nothing yet.
    MakeRoom,
    /// *Started* is made durable.
    Record,
    /// The other host is asked to take the volumes, and does.
    Offer,
    /// It is made durable that the VM is leaving.
    LetVmLeave,
    /// The other host is asked whether it could run the VM, and can.
    ExamineVm,
    /// The target's images are made.
    MakeImages,
    /// Lanes get their orders: from now on a driver decides.
    Begin,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A step is done, or cannot be.
    Done(Step, Result<(), Failure>),
    /// *Started* may be in the journal, or not, and nothing can be said of it before a restart: for [`Step::Record`].
    Undecided,
    /// What the journal says of it, in answer to [`Action::Recall`]; `None`: it knows nothing of it any more.
    Recalled(Option<Stage>),
    /// The driver has ended it, durably.
    DriverEnded(Outcome),
    /// There is no driver any more, and it has not ended.
    DriverLost,
    /// *Discarding* is durable, or not.
    Abandoned(Result<(), CommitFault>),
    /// What was to be undone is, as far as it could be; what could not be deleted is named, for people.
    Undone {
        /// Empty if nothing is left.
        left_over: String,
    },
    /// *Ended* is durable, or not.
    Ended(Result<(), CommitFault>),
    /// Where the VM is is noted, durably, or could not be.
    Noted(Result<(), String>),
    /// What kept it from going on may be over.
    LookAgain,
    /// Somebody wishes that it ends.
    Cancel,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Do this, then say [`Event::Done`]. A step that is [not wanted any more](super::MigrationSession::doing) may be dropped.
    Do(Step),
    /// Look what the journal says of it, then say [`Event::Recalled`].
    Recall,
    /// Make *discarding* durable, then say [`Event::Abandoned`].
    Abandon(Outcome),
    /// Undo what was done, then say [`Event::Undone`].
    Undo(Undo),
    /// Have the driver end it: the VM stays, whose memory went with the process that carried it.
    KeepVm,
    /// Have the driver cancel it, if that is still possible.
    Cancel,
    /// Make *ended* durable, then say [`Event::Ended`].
    End(Outcome),
    /// No driver has it for the time being: let go of what is held for one.
    LetGo,
    /// It has ended, durably: serve the volumes that are here, and let go of the others.
    PlaceVolumes(Outcome),
    /// Note durably where the VM is, then say [`Event::Noted`].
    Note(VmPlace),
    /// Tell whoever asked for it. It is told once.
    Answer(Answer),
    /// It is over, and everything is in its place: tell whoever watches, and run what is to be run after it.
    Conclude(Outcome),
}

/// What becomes of what was done before a driver had the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// No journal knows of it: what was taken is given back.
    Room,
    /// The other host may have taken the volumes: it is told to let go of them.
    Offer,
    /// Images that nothing was promised of are deleted.
    Images,
}

/// Where a VM is, as its host notes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmPlace {
    /// Here, with its volumes.
    Here,
    /// At the other host, with its volumes.
    Elsewhere,
}

/// What whoever asked for a migration is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is under way: volumes are accepted, and copied.
    Begun,
    /// It came to nothing.
    Refused,
}
