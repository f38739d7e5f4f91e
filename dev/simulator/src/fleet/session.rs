//! The ports of a host's sessions in virtual time; orders to them, and checks of their ends.

use std::future::{Future, pending};
use std::rc::Rc;
use std::time::Duration;

use ::host::{Clock, Journal, Surroundings, Work};
use block::Handle;
use futures_channel::{mpsc, oneshot};
use migration::journal::{FailureCode, Outcome, Record, Side, Stage};
use migration::orders;
use migration::session::{Event, MigrationSession, Patience};
use migration::{CommitFault, Failure, MigrationId};

use super::host::SimHost;
use crate::world::Stop;

/// The patience of hosts: what takes minutes in reality takes seconds here.
pub(super) const PATIENCE: Patience = Patience {
    offer_max: Duration::from_secs(6),
    resume_interval: Duration::from_millis(30),
    repeat_interval: Duration::from_millis(30),
};

/// The percentage of confirmed cancellations at which the daemon is killed at once.
const KILLED_PERCENT: u64 = 10;
/// The percentage of handovers that an administrator cancels at the last moment.
const CANCELLED_FIRST_PERCENT: u64 = 3;

/// The end of a driver; `None` if it was ended early.
pub(super) type Ends = oneshot::Receiver<Option<Outcome>>;

pub(super) async fn driver_ends(ends: &mut Option<Ends>) -> Option<Outcome> {
    match ends {
        Some(ends) => match ends.await {
            Ok(outcome) => outcome,
            Err(_) => pending().await,
        },
        None => None,
    }
}

struct SimClock(Handle);

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep_until(&self, at: Duration) -> impl Future<Output = ()> {
        self.0.sleep_until(at)
    }
}

impl Journal for SimHost {
    fn stage(&self, id: MigrationId) -> Option<Stage> {
        self.journal().look(|state, _| state.migrations.get(&id).map(|known| known.stage.clone()))
    }

    async fn commit_end(&self, records: Vec<Record>) -> Result<(), CommitFault> {
        self.journal().commit(records).await
    }
}

impl SimHost {
    pub(super) fn run_session(self: &Rc<Self>, session: MigrationSession, work: impl Work + 'static) {
        let (wishes, heard) = mpsc::unbounded();
        let number = self.with_serving(|serving| {
            serving.sessions_begun += 1;
            serving.sessions.insert(serving.sessions_begun, wishes);
            serving.sessions_begun
        });
        let me = Rc::clone(self);
        // N.B. a stop in order lets a session go on until the executor ends, as long as its requests may.
        let (clock, stopping) = (SimClock(self.handle.clone()), pending());
        let surroundings = Surroundings { journal: Rc::clone(self), clock, stopping };
        self.handle.spawn(async move {
            ::host::run(surroundings, session, work, heard).await;
            if let Some(number) = number {
                me.with_serving(|serving| serving.sessions.remove(&number));
            }
        });
    }

    pub(super) fn wish_to_cancel(self: &Rc<Self>) -> bool {
        self.cancel_those(|side| !matches!(side, Side::Incoming { .. }))
    }

    pub(super) fn cancel_incoming(self: &Rc<Self>) -> bool {
        self.cancel_those(|side| matches!(side, Side::Incoming { .. }))
    }

    /// As in a daemon: the cancellation is answered when it is durable, and then passed to the migration.
    fn cancel_those(self: &Rc<Self>, is_meant: impl Fn(&Side) -> bool) -> bool {
        if self.serving.borrow().is_none() {
            return false;
        }
        let orders: Vec<_> = self.journal().look(|state, _| {
            let meant = state.unfinished().filter(|(_, known)| is_meant(&known.side));
            meant.filter_map(|(id, _)| Some((id, orders::cancel(state, id).ok()?))).collect()
        });
        let is_early = !orders.is_empty();
        for (id, records) in orders {
            let committed = (!records.is_empty()).then(|| self.journal().commit(records));
            let me = Rc::clone(self);
            self.handle.spawn(async move {
                let is_durable = match committed {
                    Some(committed) => committed.await.is_ok(),
                    None => true,
                };
                if is_durable {
                    me.cancelled.borrow_mut().insert(id, me.incarnation());
                    if !me.is_killed_at_an_answer() {
                        me.tell_of_cancel(id);
                    }
                }
            });
        }
        is_early
    }

    fn is_killed_at_an_answer(&self) -> bool {
        let Some(fleet) = self.fleet() else { return false };
        let is_killed = fleet.orders.borrow_mut().percent(KILLED_PERCENT);
        if is_killed {
            fleet.crash(self.place, Stop::Kill);
        }
        is_killed
    }

    /// Draws whether an administrator cancels a migration just before these records hand it over.
    pub(super) fn perhaps_cancel_first(self: &Rc<Self>, records: &[Record]) {
        let (leaves, comes) = (
            records.iter().any(|record| matches!(record, Record::Released { .. })),
            records.iter().any(|record| matches!(record, Record::TargetPrepared { .. })),
        );
        let is_drawn = || {
            let fleet = self.fleet();
            fleet.is_some_and(|fleet| fleet.orders.borrow_mut().percent(CANCELLED_FIRST_PERCENT))
        };
        // Too late is as good.
        let _ = (leaves && is_drawn() && self.wish_to_cancel())
            || (comes && is_drawn() && self.cancel_incoming());
    }

    fn tell_of_cancel(&self, id: MigrationId) {
        let comes = self.journal().look(|state, _| {
            let known = state.migrations.get(&id);
            known.is_some_and(|known| matches!(known.side, Side::Incoming { .. }))
        });
        let has_driver = if comes { self.cancel_arrival() } else { self.cancel_driver() };
        if !has_driver {
            self.with_serving(|serving| {
                serving.sessions.values().for_each(|session| drop(session.unbounded_send(Event::Cancel)));
            });
        }
    }

    pub(super) fn check_concluded(&self, id: MigrationId) {
        let stage = self.stage(id);
        self.check_cancelled(id);
        if !matches!(stage, Some(Stage::Ended(_))) {
            let detail = || format!("{}: nobody sees to {id} any more, and it is {stage:?}", self.place);
            self.world.violated("journal", detail);
        }
    }

    pub(super) fn check_cancelled(&self, id: MigrationId) {
        let has_moved = matches!(self.stage(id), Some(Stage::Ended(Outcome::Moved { .. })));
        if has_moved && self.cancelled.borrow().contains_key(&id) {
            let detail =
                || format!("{}: it was answered that {id} is cancelled, and it has moved", self.place);
            self.world.violated("orders", detail);
        }
    }

    /// Checks that a later daemon does not hand over a migration whose cancellation was confirmed.
    pub(super) fn check_goes_on(&self, id: MigrationId) {
        let cancelled_by = self.cancelled.borrow().get(&id).copied();
        if cancelled_by.is_some_and(|daemon| daemon < self.incarnation()) {
            let place = self.place;
            let detail =
                || format!("{place}: the gates close for {id}, and a daemon before has cancelled it");
            self.world.violated("orders", detail);
        }
    }

    /// Returns whether this host is the source of a migration to another one.
    pub(super) fn sends(&self, id: MigrationId) -> bool {
        self.journal().look(|state, _| {
            state.migrations.get(&id).is_some_and(|known| matches!(known.side, Side::Outgoing { .. }))
        })
    }

    pub(super) fn perhaps_fails(&self, percent: u64, what: &str) -> Result<(), Failure> {
        match self.random.borrow_mut().percent(percent) {
            true => Err(Failure { code: FailureCode::Internal, detail: what.to_owned() }),
            false => Ok(()),
        }
    }
}
