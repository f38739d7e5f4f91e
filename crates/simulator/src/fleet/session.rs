//! Runs sessions, as the daemon does: what [`MigrationSession`] decides is carried out, one thing at a time.

use std::future::pending;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::Handle;
use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use migration::journal::{FailureCode, Outcome, Record, Stage, Summary};
use migration::session::{Action, Event, MigrationSession, Patience, Step};
use migration::{CommitFault, Failure, MigrationId};

use super::host::SimHost;

/// How patient hosts are: what takes minutes elsewhere is over in seconds here.
pub(super) const PATIENCE: Patience = Patience {
    offer_max: Duration::from_secs(6),
    resume_interval: Duration::from_millis(30),
    repeat_interval: Duration::from_millis(30),
};

/// What a session's actions are carried out by.
pub(super) trait Work {
    /// Does it, and says what has come of it.
    async fn carry_out(&mut self, action: Action) -> Option<Event>;

    /// Resolves when the migration's driver has ended it.
    async fn driver_ends(&mut self) -> Event;
}

impl SimHost {
    /// Runs a session until it is over, or the daemon goes.
    pub(super) fn run_session(self: &Rc<Self>, session: MigrationSession, work: impl Work + 'static) {
        let (wishes, heard) = mpsc::unbounded();
        let number = self.with_serving(|serving| {
            serving.sessions_begun += 1;
            serving.sessions.insert(serving.sessions_begun, wishes);
            serving.sessions_begun
        });
        let (me, handle) = (Rc::clone(self), self.handle.clone());
        self.handle.spawn(async move {
            run(&handle, session, work, heard).await;
            if let Some(number) = number {
                me.with_serving(|serving| serving.sessions.remove(&number));
            }
        });
    }

    /// Somebody wishes that what is under way here ends.
    pub(super) fn wish_to_cancel(&self) -> bool {
        let has_driver = self.with_serving(|serving| serving.source.borrow().is_some());
        if has_driver == Some(true) {
            return self.cancel_driver();
        }
        let told = self.with_serving(|serving| {
            serving.sessions.values().filter(|session| session.unbounded_send(Event::Cancel).is_ok()).count()
        });
        told.is_some_and(|told| told > 0)
    }

    /// How far the journal says that a migration is.
    pub(super) fn stage_of(&self, id: MigrationId) -> Option<Stage> {
        self.journal().look(|state, _| state.migrations.get(&id).map(|known| known.stage.clone()))
    }

    /// Makes durable that a migration has ended that no driver has.
    pub(super) async fn commit_end(
        &self,
        migration: MigrationId,
        outcome: Outcome,
    ) -> Result<(), CommitFault> {
        let ended = Record::MigrationEnded { migration, outcome, summary: Summary::default() };
        self.journal().commit(vec![ended]).await
    }

    /// Makes durable that a migration's images are deleted here.
    pub(super) async fn commit_discarding(
        &self,
        migration: MigrationId,
        outcome: Outcome,
    ) -> Result<(), CommitFault> {
        self.journal().commit(vec![Record::Discarding { migration, outcome }]).await
    }

    /// Nobody sees to a migration any more: its end is durable.
    pub(super) fn check_concluded(&self, id: MigrationId) {
        let stage = self.stage_of(id);
        if !matches!(stage, Some(Stage::Ended(_))) {
            let detail = || format!("{}: nobody sees to {id} any more, and it is {stage:?}", self.place);
            self.world.violated("journal", detail);
        }
    }

    /// Fails in so many of a hundred cases.
    pub(super) fn perhaps_fails(&self, percent: u64, what: &str) -> Result<(), Failure> {
        match self.random.borrow_mut().percent(percent) {
            true => Err(Failure { code: FailureCode::Internal, detail: what.to_owned() }),
            false => Ok(()),
        }
    }
}

/// What has come of making *started* durable.
pub(super) fn recorded(committed: Result<(), CommitFault>) -> Event {
    match committed {
        Ok(()) => Event::Done(Step::Record, Ok(())),
        Err(CommitFault::NotWritten) => {
            let detail = "the journal took nothing".to_owned();
            Event::Done(Step::Record, Err(Failure { code: FailureCode::Internal, detail }))
        }
        Err(CommitFault::Unknown) => Event::Undecided,
    }
}

/// Resolves when a driver has ended what it had; at once if there is none.
pub(super) async fn driver_ends(ends: &mut Option<oneshot::Receiver<Outcome>>) -> Event {
    match ends {
        Some(ends) => match ends.await {
            Ok(outcome) => Event::DriverEnded(outcome),
            // The daemon goes.
            Err(_) => pending().await,
        },
        None => Event::DriverLost,
    }
}

async fn run(
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

/// Resolves with a wish, or with nothing when it is `due`.
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
            // The daemon is about to go.
            None => pending().await,
        }
    };
    match select(pin!(wish), pin!(is_due)).await {
        Either::Left((wish, _)) => Some(wish),
        Either::Right(((), _)) => None,
    }
}
