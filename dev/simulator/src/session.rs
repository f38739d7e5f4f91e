//! Runs sessions as the daemon does: carries out the actions of [`MigrationSession`], one at a time.

use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use block::Handle;
use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use migration::journal::{FailureCode, Outcome, Record, Summary};
use migration::session::{Action, Event, MigrationSession, Patience, Step};
use migration::{CommitFault, Failure, MigrationId};

use crate::random::Random;

/// The patience of hosts: what takes minutes in reality takes seconds here.
pub(crate) const PATIENCE: Patience = Patience {
    offer_max: Duration::from_secs(6),
    resume_interval: Duration::from_millis(30),
    repeat_interval: Duration::from_millis(30),
};

pub(crate) trait Work {
    async fn carry_out(&mut self, action: Action) -> Option<Event>;

    async fn driver_ends(&mut self) -> Event;
}

pub(crate) fn recorded(committed: Result<(), CommitFault>) -> Event {
    match committed {
        Ok(()) => Event::Done(Step::Record, Ok(())),
        Err(CommitFault::NotWritten) => {
            let detail = "the journal took nothing".to_owned();
            Event::Done(Step::Record, Err(Failure { code: FailureCode::Internal, detail }))
        }
        Err(CommitFault::Unknown) => Event::Undecided,
    }
}

pub(crate) fn perhaps_fails(random: &mut Random, percent: u64, what: &str) -> Result<(), Failure> {
    match random.percent(percent) {
        true => Err(Failure { code: FailureCode::Internal, detail: what.to_owned() }),
        false => Ok(()),
    }
}

pub(crate) fn ended(migration: MigrationId, outcome: Outcome) -> Vec<Record> {
    vec![Record::MigrationEnded { migration, outcome, summary: Summary::default() }]
}

/// The end of a driver; `None` if it was ended early.
pub(crate) type Ends = oneshot::Receiver<Option<Outcome>>;

pub(crate) async fn driver_ends(ends: &mut Option<Ends>) -> Event {
    match ends {
        Some(ends) => match ends.await {
            Ok(Some(outcome)) => Event::DriverEnded(outcome),
            Ok(None) => Event::DriverLost,
            Err(_) => pending().await,
        },
        None => Event::DriverLost,
    }
}

pub(crate) async fn run(
    handle: &Handle,
    mut session: MigrationSession,
    mut work: impl Work,
    mut wishes: mpsc::UnboundedReceiver<Event>,
) {
    loop {
        let event = if let Some(action) = session.poll_action() {
            let step = match &action {
                Action::Do(step) => Some(*step),
                _ => None,
            };
            let mut done = pin!(work.carry_out(action));
            loop {
                let due = session.poll_timeout().map(|(due, _)| due);
                match select(&mut done, pin!(told(handle, due, &mut wishes))).await {
                    Either::Left((event, _)) => break event,
                    Either::Right((Some(wish), _)) => session.handle_event(handle.now(), wish),
                    Either::Right((None, _)) => session.handle_timeout(handle.now()),
                }
                if step.is_some() && session.doing() != step {
                    break None;
                }
            }
        } else if session.is_over() {
            return;
        } else {
            let (is_under_way, due) = (session.is_under_way(), session.poll_timeout().map(|(due, _)| due));
            let ends = async { if is_under_way { work.driver_ends().await } else { pending().await } };
            match select(pin!(ends), pin!(told(handle, due, &mut wishes))).await {
                Either::Left((event, _)) => Some(event),
                Either::Right((Some(wish), _)) => Some(wish),
                Either::Right((None, _)) => {
                    session.handle_timeout(handle.now());
                    None
                }
            }
        };
        if let Some(event) = event {
            session.handle_event(handle.now(), event);
        }
    }
}

async fn told(
    handle: &Handle,
    due: Option<Duration>,
    wishes: &mut mpsc::UnboundedReceiver<Event>,
) -> Option<Event> {
    let is_due = async {
        match due {
            Some(due) => handle.sleep_until(due).await,
            None => pending().await,
        }
    };
    let wish = async {
        match wishes.next().await {
            Some(wish) => wish,
            None => pending().await,
        }
    };
    match select(pin!(wish), pin!(is_due)).await {
        Either::Left((wish, _)) => Some(wish),
        Either::Right(((), _)) => None,
    }
}
