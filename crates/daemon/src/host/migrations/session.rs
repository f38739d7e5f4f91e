//! Runs sessions: one task for each migration carries out the decisions of [`MigrationSession`], one at a time.
//!
//! ```text
//!   MigrationSession ── Action ──► Work (outgoing.rs, incoming.rs, local.rs) ── Event ──► MigrationSession
//!      ▲                        └─ meanwhile: the driver's outcome
//!      └─ the time, and orders of users
//! ```

use std::collections::BTreeMap;
use std::future::pending;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::Migration;
use futures_util::future::select_all;
use lane::LaneHandle;
use migration::journal::{FailureCode, Outcome, Record, Stage, Summary};
use migration::session::{Action, Answer, Event, MigrationSession, Patience, Step, VmPlace};
use migration::{CommitFault, Failure, MigrationId, VolumeId};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::RequestError;
use crate::hooks::HookRunner;
use crate::host::Host;
use crate::migrations::registry::Settling;
use crate::vms::Standing;

pub(in crate::host) const PATIENCE: Patience = Patience {
    // The target makes an image in this time, possibly a thick one.
    offer_max: Duration::from_secs(60),
    resume_interval: Duration::from_secs(5),
    repeat_interval: Duration::from_secs(1),
};

/// Carries out the actions of a session.
pub(in crate::host) trait Work: Send {
    /// Carries out an action, and returns the resulting event.
    fn carry_out(&mut self, action: Action) -> impl Future<Output = Option<Event>> + Send;

    /// Resolves when the migration's driver has ended it, or is gone.
    fn driver_ends(&mut self) -> impl Future<Output = Event> + Send;
}

/// The channels by which orders for a migration reach its session.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<BTreeMap<MigrationId, UnboundedSender<Event>>>);

/// The state that all kinds of sessions share.
pub(in crate::host) struct Task {
    pub(in crate::host) host: Arc<Host>,
    /// The migration's number at this host, once it has one.
    pub(in crate::host) migration: Option<MigrationId>,
    pub(in crate::host) vm: Option<String>,
    pub(in crate::host) error: Option<RequestError>,
    wishes: UnboundedSender<Event>,
    /// Dropped after the first attempt to resume the migration.
    tried: Option<oneshot::Sender<()>>,
    /// The last reported reason why the migration cannot be resumed.
    said: String,
    /// Delays the report of the end until it is dropped.
    settling: Option<Settling>,
    hooks_after: Option<Arc<HookRunner>>,
}

impl Sessions {
    /// Sends an event to the session of a migration; returns whether there is a session.
    pub(in crate::host) fn tell(&self, migration: MigrationId, wish: Event) -> bool {
        self.lock().get(&migration).is_some_and(|session| session.send(wish).is_ok())
    }

    pub(in crate::host) fn has(&self, migration: MigrationId) -> bool {
        self.lock().contains_key(&migration)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<MigrationId, UnboundedSender<Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Task {
    /// Returns a task without a number, and the receiver of its session's events.
    pub(in crate::host) fn new(host: &Arc<Host>, vm: Option<String>) -> (Self, UnboundedReceiver<Event>) {
        let (wishes, heard) = unbounded_channel();
        let task = Self {
            host: Arc::clone(host),
            migration: None,
            vm,
            error: None,
            wishes,
            tried: None,
            said: String::new(),
            settling: None,
            hooks_after: None,
        };
        (task, heard)
    }

    /// Makes this the task of a migration that a restart resumes. The receiver ends after the first attempt.
    pub(in crate::host) fn resumes(&mut self, migration: MigrationId) -> oneshot::Receiver<()> {
        self.publish(migration);
        let (tried, is_tried) = oneshot::channel();
        self.tried = Some(tried);
        is_tried
    }

    /// Notes whether *started* is durable.
    pub(in crate::host) fn recorded(
        &mut self,
        recorded: Result<MigrationId, CommitFault>,
        volumes: Vec<VolumeId>,
    ) -> Event {
        match recorded {
            Ok(migration) => {
                self.publish(migration);
                self.host.migrations.track(migration, volumes);
                Event::Done(Step::Record, Ok(()))
            }
            Err(fault) => {
                let failure = self.failed(FailureCode::Internal, fault.into());
                match fault {
                    CommitFault::Unknown => Event::Undecided,
                    CommitFault::NotWritten => Event::Done(Step::Record, Err(failure)),
                }
            }
        }
    }

    pub(in crate::host) fn done(
        &mut self,
        step: Step,
        done: Result<(), RequestError>,
        code: FailureCode,
    ) -> Event {
        self.tried = None;
        Event::Done(step, done.map_err(|error| self.failed(code, error)))
    }

    fn failed(&mut self, code: FailureCode, error: RequestError) -> Failure {
        let failure = Failure { code, detail: error.message() };
        self.error = Some(error);
        failure
    }

    /// Logs why the migration cannot be resumed, unless it was logged before.
    pub(in crate::host) fn say(&mut self, error: &RequestError) {
        let reason = error.message();
        if self.said != reason {
            let migration = self.migration.map(|migration| migration.to_string());
            tracing::error!(migration, reason, "an interrupted migration cannot continue at the moment");
        }
        self.said = reason;
    }

    /// With a VM, delays the report of the end until the VM's place is recorded.
    pub(in crate::host) fn hold_back_the_end(&mut self) {
        if let (Some(migration), Some(_), None) = (self.migration, &self.vm, &self.settling) {
            self.settling = Some(self.host.migrations.settle(migration));
        }
    }

    /// Records where the VM is, after its move has ended; until then the VM has `standing`.
    pub(in crate::host) async fn note(&mut self, standing: Standing, place: VmPlace) -> Event {
        let (Some(migration), Some(vm)) = (self.migration, &self.vm) else {
            return Event::Noted(Ok(()));
        };
        if let Some(hooks) = self.host.moving.forget(migration, place).await {
            self.hooks_after = Some(hooks);
        }
        let noted = self.host.note_vm(vm, standing, place).await;
        if noted.is_err() {
            // Recording it may take long, and the VM's place is known.
            drop(self.settling.take());
        }
        Event::Noted(noted.map_err(|error| error.to_string()))
    }

    /// Ends the migration: reports the outcome and runs the hooks that follow it.
    pub(in crate::host) fn conclude(&mut self, outcome: &Outcome) {
        if let Some(migration) = self.migration {
            self.host.migrations.conclude(migration, outcome);
        }
        drop(self.settling.take());
        if let Some(hooks) = self.hooks_after.take() {
            let outcome = outcome.clone();
            // It may take long, and nothing waits for it.
            tokio::spawn(async move { hooks.after(&outcome).await });
        }
    }

    pub(in crate::host) fn answer(&mut self, answer: Answer) -> Result<Migration, RequestError> {
        match (answer, self.error.take(), self.migration) {
            (Answer::Refused, Some(error), _) => Err(error),
            (_, _, Some(migration)) => self.host.migrations.get(&self.host.journal, migration),
            (_, _, None) => Err(RequestError::Internal("it has no number, and no reason".to_owned())),
        }
    }

    /// Makes the migration visible to others.
    fn publish(&mut self, migration: MigrationId) {
        self.migration = Some(migration);
        self.host.sessions.lock().insert(migration, self.wishes.clone());
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(migration) = self.migration {
            self.host.sessions.lock().remove(&migration);
        }
    }
}

impl Host {
    pub(in crate::host) fn stage_of(&self, migration: MigrationId) -> Option<Stage> {
        self.journal.read(|state| state.migrations.get(&migration).map(|known| known.stage.clone()))
    }

    /// Makes the end of a migration that has no driver durable.
    pub(in crate::host) async fn commit_end(
        &self,
        migration: MigrationId,
        outcome: &Outcome,
    ) -> Result<(), CommitFault> {
        let (outcome, summary) = (outcome.clone(), Summary::default());
        let ended = self.journal.commit(vec![Record::MigrationEnded { migration, outcome, summary }]).await;
        ended.inspect_err(|fault| {
            tracing::warn!(%migration, %fault, "cannot record the end of the migration yet; trying again");
        })
    }

    /// Makes durable that a migration's images are deleted here, for which *prepared* was not sent.
    pub(in crate::host) async fn commit_discarding(
        &self,
        migration: MigrationId,
        outcome: &Outcome,
    ) -> Result<(), CommitFault> {
        let outcome = outcome.clone();
        self.journal.commit(vec![Record::Discarding { migration, outcome }]).await
    }

    /// Resolves when a migration's driver has ended it, or when the first of its lanes ends.
    pub(in crate::host) async fn driver_ends(&self, migration: MigrationId, lanes: Vec<LaneHandle>) -> Event {
        if lanes.is_empty() {
            return Event::DriverLost;
        }
        let ended = lanes.iter().map(|lane| Box::pin(lane.ended()));
        tokio::select! {
            biased;
            Some(outcome) = self.migrations.outcome(migration) => Event::DriverEnded(outcome),
            _ = select_all(ended) => Event::DriverLost,
        }
    }
}

/// Runs a session to its end, or until the daemon stops. The next daemon finds its progress in the journal.
pub(in crate::host) async fn run(
    host: Arc<Host>,
    mut session: MigrationSession,
    mut work: impl Work,
    mut wishes: UnboundedReceiver<Event>,
) {
    let origin = Instant::now();
    let mut stopping = pin!(host.stopping());
    loop {
        let event = if let Some(action) = session.poll_action() {
            let step = match &action {
                Action::Do(step) => Some(*step),
                _ => None,
            };
            let mut done = pin!(work.carry_out(action));
            loop {
                tokio::select! {
                    biased;
                    event = &mut done => break event,
                    Some(wish) = wishes.recv() => session.handle_event(origin.elapsed(), wish),
                    () = due(origin, &session) => session.handle_timeout(origin.elapsed()),
                    () = &mut stopping, if step == Some(Step::Offer) => return,
                }
                if step.is_some() && session.doing() != step {
                    break None;
                }
            }
        } else if session.is_over() {
            return;
        } else {
            let is_under_way = session.is_under_way();
            tokio::select! {
                biased;
                event = work.driver_ends(), if is_under_way => Some(event),
                () = &mut stopping => return,
                Some(wish) = wishes.recv() => Some(wish),
                () = due(origin, &session) => {
                    session.handle_timeout(origin.elapsed());
                    None
                }
            }
        };
        if let Some(event) = event {
            session.handle_event(origin.elapsed(), event);
        }
    }
}

/// Resolves at the session's next deadline.
async fn due(origin: Instant, session: &MigrationSession) {
    match session.poll_timeout() {
        Some((at, _)) => tokio::time::sleep_until(origin + at).await,
        None => pending().await,
    }
}
