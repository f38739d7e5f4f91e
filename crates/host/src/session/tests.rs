//! A session that runs on a world of a few cells: no executor, no time that passes.

use std::cell::RefCell;
use std::future::{pending, ready};
use std::rc::Rc;

use futures_channel::mpsc::unbounded;
use futures_util::FutureExt;
use migration::journal::{FailureCode, Outcome, Record, Stage};
use migration::session::{Answer, Patience, Role, Undo};
use migration::{CommitFault, Failure, MigrationId};

use super::*;

const PATIENCE: Patience = Patience {
    offer_max: Duration::from_secs(60),
    resume_interval: Duration::from_secs(5),
    repeat_interval: Duration::from_secs(1),
};

/// What happened, in order.
type Account = Rc<RefCell<Vec<String>>>;

struct World(Account);

struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> impl Future<Output = ()> {
        pending()
    }
}

impl Journal for World {
    fn stage(&self, _: MigrationId) -> Option<Stage> {
        Some(Stage::Copying)
    }

    fn commit_end(&self, records: Vec<Record>) -> impl Future<Output = Result<(), CommitFault>> {
        self.0.borrow_mut().push(format!("commit {records:?}"));
        ready(Ok(()))
    }
}

/// Work in which one step never ends.
struct Hangs {
    at: Step,
    account: Account,
}

impl Work for Hangs {
    fn migration(&self) -> Option<MigrationId> {
        Some(MigrationId(7))
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        self.account.borrow_mut().push("record".to_owned());
        Ok(())
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        self.account.borrow_mut().push(format!("{step:?}"));
        if step == self.at { pending().await } else { Ok(()) }
    }

    async fn undo(&mut self, undo: Undo) -> String {
        self.account.borrow_mut().push(format!("undo {undo:?}"));
        String::new()
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        pending().await
    }

    async fn cancel(&mut self) {}

    fn answer(&mut self, answer: Answer) {
        self.account.borrow_mut().push(format!("answer {answer:?}"));
    }

    async fn conclude(&mut self, outcome: Outcome) {
        self.account.borrow_mut().push(format!("over {outcome:?}"));
    }
}

/// Runs a session as far as it goes; returns whether it is over, and what happened.
fn run_it(at: Step, wishes: &[Event], stopping: impl Future<Output = ()>) -> (bool, Vec<String>) {
    let account = Account::default();
    let (wish, heard) = unbounded();
    wishes.iter().for_each(|event| wish.unbounded_send(event.clone()).unwrap());
    let (journal, clock) = (Rc::new(World(Rc::clone(&account))), Still);
    let session = MigrationSession::new(Role::Source, false, PATIENCE);
    let work = Hangs { at, account: Rc::clone(&account) };
    let is_over =
        run(Surroundings { journal, clock, stopping }, session, work, heard).now_or_never().is_some();
    (is_over, account.take())
}

#[test]
fn an_offer_does_not_keep_a_host_from_stopping() {
    let (is_over, account) = run_it(Step::Offer, &[], ready(()));
    assert!(is_over, "{account:?}");
    assert_eq!(account, ["record", "Offer"]);
}

#[test]
fn another_step_is_carried_out_to_its_end_when_the_host_stops() {
    let (is_over, account) = run_it(Step::Begin, &[], ready(()));
    assert!(!is_over, "{account:?}");
    assert_eq!(account, ["record", "Offer", "Begin"]);
}

#[test]
fn a_cancelled_offer_is_dropped_undone_and_ended() {
    let (is_over, account) = run_it(Step::Offer, &[Event::Cancel], pending());
    assert!(is_over, "{account:?}");
    let at = |begins: &str| account.iter().position(|line| line.starts_with(begins)).unwrap();
    let order = ["Offer", "undo Offer", "commit [MigrationEnded", "over Cancelled"].map(at);
    assert!(order.is_sorted(), "{account:?}");
    // The client that ordered it is answered, too.
    at("answer Refused");
}

#[test]
fn a_record_that_may_be_durable_ends_the_session_and_is_left_to_the_next_start() {
    assert_eq!(crate::work::recorded(Err(CommitFault::Unknown)), Event::Undecided);
    let not_written = crate::work::recorded(Err(CommitFault::NotWritten));
    let is_internal = |failure: &Failure| failure.code == FailureCode::Internal;
    assert!(matches!(not_written, Event::Done(Step::Record, Err(failure)) if is_internal(&failure)));
}
