//! What a host does for one migration when its session demands it.

use std::future::{Future, ready};

use migration::journal::{FailureCode, Outcome, Record, Summary};
use migration::session::{Action, Answer, Event, Step, Undo, VmPlace};
use migration::{CommitFault, Failure, MigrationId};

use crate::ports::Journal;

/// What a host does for one migration. Methods with a default do nothing: a role implements them only if it needs them.
pub trait Work {
    /// Returns the migration's number at this host, once it has one.
    fn migration(&self) -> Option<MigrationId>;

    /// Makes *started* durable.
    fn record(&mut self) -> impl Future<Output = Result<(), CommitFault>>;

    /// Carries out a step other than [`Step::Record`].
    fn perform(&mut self, step: Step) -> impl Future<Output = Result<(), Failure>>;

    /// Undoes the earlier steps. Returns the images that could not be deleted, as text for the administrator; empty: none.
    fn undo(&mut self, undo: Undo) -> impl Future<Output = String>;

    /// Resolves when the migration's driver has ended it, or with `None` when the driver is gone.
    fn driver_ends(&mut self) -> impl Future<Output = Option<Outcome>>;

    /// Orders the driver to cancel the migration, if that is still possible.
    fn cancel(&mut self) -> impl Future<Output = ()>;

    /// Orders the driver to end the migration, because the VM stays at the source.
    fn keep_vm(&mut self) -> impl Future<Output = ()> {
        ready(())
    }

    /// Releases everything held for a driver.
    fn let_go(&mut self) -> impl Future<Output = ()> {
        ready(())
    }

    /// Learns that the session ends the migration itself.
    fn ends_without_driver(&mut self, _outcome: &Outcome) {}

    /// Serves the volumes that are here after the end, and releases the others.
    fn place_volumes(&mut self, _outcome: Outcome) -> impl Future<Output = ()> {
        ready(())
    }

    /// Records durably at which host the VM is.
    fn note(&mut self, _place: VmPlace) -> impl Future<Output = Result<(), String>> {
        ready(Ok(()))
    }

    /// Answers the client that ordered the migration.
    fn answer(&mut self, _answer: Answer) {}

    /// Informs watchers of the end.
    fn conclude(&mut self, outcome: Outcome) -> impl Future<Output = ()>;
}

pub(crate) async fn carry_out(work: &mut impl Work, journal: &impl Journal, action: Action) -> Option<Event> {
    match action {
        Action::Do(Step::Record) => Some(recorded(work.record().await)),
        Action::Do(step) => Some(Event::Done(step, work.perform(step).await)),
        Action::Recall => Some(Event::Recalled(journal.stage(work.migration()?))),
        Action::Abandon(outcome) => {
            let migration = work.migration()?;
            Some(Event::Abandoned(journal.commit_end(vec![Record::Discarding { migration, outcome }]).await))
        }
        Action::Undo(undo) => Some(Event::Undone { left_over: work.undo(undo).await }),
        Action::End(outcome) => {
            work.ends_without_driver(&outcome);
            let (migration, summary) = (work.migration()?, Summary::default());
            let ended = Record::MigrationEnded { migration, outcome, summary };
            Some(Event::Ended(journal.commit_end(vec![ended]).await))
        }
        Action::Note(place) => Some(Event::Noted(work.note(place).await)),
        Action::KeepVm => {
            work.keep_vm().await;
            None
        }
        Action::Cancel => {
            work.cancel().await;
            None
        }
        Action::LetGo => {
            work.let_go().await;
            None
        }
        Action::PlaceVolumes(outcome) => {
            work.place_volumes(outcome).await;
            None
        }
        Action::Answer(answer) => {
            work.answer(answer);
            None
        }
        Action::Conclude(outcome) => {
            work.conclude(outcome).await;
            None
        }
    }
}

pub(crate) fn recorded(committed: Result<(), CommitFault>) -> Event {
    match committed {
        Ok(()) => Event::Done(Step::Record, Ok(())),
        Err(fault @ CommitFault::NotWritten) => {
            let failure = Failure { code: FailureCode::Internal, detail: fault.to_string() };
            Event::Done(Step::Record, Err(failure))
        }
        Err(CommitFault::Unknown) => Event::Undecided,
    }
}
