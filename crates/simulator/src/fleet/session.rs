//! The sessions of one of several hosts: who may wish what of them, and what they make durable.

use std::rc::Rc;

use futures_channel::mpsc;
use migration::journal::{Outcome, Record, Stage};
use migration::session::{Event, MigrationSession};
use migration::{CommitFault, Failure, MigrationId};

use super::host::SimHost;
use crate::session::{Work, ended, perhaps_fails, run};

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
        let has_driver = self
            .with_serving(|serving| serving.source.borrow().is_some() || serving.local.borrow().is_some());
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
        self.journal().commit(ended(migration, outcome)).await
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
        perhaps_fails(&mut self.random.borrow_mut(), percent, what)
    }
}
