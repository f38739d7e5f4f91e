//! The sessions of a host's migrations: orders to them, and their records.

use std::rc::Rc;

use futures_channel::mpsc;
use migration::journal::{Outcome, Record, Side, Stage};
use migration::orders;
use migration::session::{Event, MigrationSession};
use migration::{CommitFault, Failure, MigrationId};

use super::host::SimHost;
use crate::session::{Work, ended, perhaps_fails, run};
use crate::world::Stop;

/// The percentage of confirmed cancellations at which the daemon is killed at once.
const KILLED_PERCENT: u64 = 10;
/// The percentage of handovers that an administrator cancels at the last moment.
const CANCELLED_FIRST_PERCENT: u64 = 3;

impl SimHost {
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

    pub(super) fn stage_of(&self, id: MigrationId) -> Option<Stage> {
        self.journal().look(|state, _| state.migrations.get(&id).map(|known| known.stage.clone()))
    }

    pub(super) async fn commit_end(
        &self,
        migration: MigrationId,
        outcome: Outcome,
    ) -> Result<(), CommitFault> {
        self.journal().commit(ended(migration, outcome)).await
    }

    pub(super) async fn commit_discarding(
        &self,
        migration: MigrationId,
        outcome: Outcome,
    ) -> Result<(), CommitFault> {
        self.journal().commit(vec![Record::Discarding { migration, outcome }]).await
    }

    pub(super) fn check_concluded(&self, id: MigrationId) {
        let stage = self.stage_of(id);
        self.check_cancelled(id);
        if !matches!(stage, Some(Stage::Ended(_))) {
            let detail = || format!("{}: nobody sees to {id} any more, and it is {stage:?}", self.place);
            self.world.violated("journal", detail);
        }
    }

    pub(super) fn check_cancelled(&self, id: MigrationId) {
        let has_moved = matches!(self.stage_of(id), Some(Stage::Ended(Outcome::Moved { .. })));
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

    pub(super) fn perhaps_fails(&self, percent: u64, what: &str) -> Result<(), Failure> {
        perhaps_fails(&mut self.random.borrow_mut(), percent, what)
    }
}
