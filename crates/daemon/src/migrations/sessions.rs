//! The ports of sessions, and what all of them share. One task for each migration [runs](::host::run) its session.
//!
//! ```text
//!   MigrationSession ── Action ──► Work (outgoing.rs, incoming.rs, local.rs) ── Event ──► MigrationSession
//!      ▲                        └─ meanwhile: the driver's outcome
//!      └─ the time, and orders of users
//! ```

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::host::{Clock, Surroundings, Work};
use api::{MigrateVolume, Migration};
use chronicle::StayId;
use futures_channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures_util::future::select_all;
use lane::LaneHandle;
use migration::journal::{FailureCode, Outcome, Record, Stage, VolumeRecord};
use migration::session::{Answer, Event, MigrationSession, Patience, VmPlace};
use migration::{CommitFault, Failure, MigrationId, PacingSettings, StayKey, VolumeId};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::RequestError;
use crate::hooks::HookRunner;
use crate::host::{Parts, PresentLimits, Stopping, VmOrders, blocking};
use crate::journal::Journal;
use crate::migrations::history::{Facts, Histories};
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::orders::migrate::allocated_bytes;
use crate::migrations::queue::Queue;
use crate::migrations::registry::{Migrations, Settling};
use crate::vms::Standing;
use crate::vms::moving::VmMoves;
use crate::volumes::chronicles::Chronicles;

pub(crate) const PATIENCE: Patience = Patience {
    // The target makes an image in this time, possibly a thick one.
    offer_max: Duration::from_secs(60),
    resume_interval: Duration::from_secs(5),
    repeat_interval: Duration::from_secs(1),
};

/// The channels by which orders for a migration reach its session.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<BTreeMap<MigrationId, UnboundedSender<Event>>>);

/// The state that all kinds of sessions share.
pub(crate) struct Task {
    pub(crate) runner: Arc<SessionRunner>,
    /// The migration's number at this host, once it has one.
    pub(crate) migration: Option<MigrationId>,
    pub(crate) vm: Option<String>,
    pub(crate) error: Option<RequestError>,
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
    pub(crate) fn tell(&self, migration: MigrationId, wish: Event) -> bool {
        self.lock().get(&migration).is_some_and(|session| session.unbounded_send(wish).is_ok())
    }

    pub(crate) fn has(&self, migration: MigrationId) -> bool {
        self.lock().contains_key(&migration)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<MigrationId, UnboundedSender<Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Task {
    /// Returns a task without a number, and the receiver of its session's events.
    pub(crate) fn new(runner: &Arc<SessionRunner>, vm: Option<String>) -> (Self, UnboundedReceiver<Event>) {
        let (wishes, heard) = unbounded();
        let task = Self {
            runner: Arc::clone(runner),
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
    pub(crate) fn resumes(&mut self, migration: MigrationId) -> oneshot::Receiver<()> {
        self.publish(migration);
        let (tried, is_tried) = oneshot::channel();
        self.tried = Some(tried);
        is_tried
    }

    /// Notes whether *started* is durable.
    pub(crate) fn recorded(
        &mut self,
        recorded: Result<MigrationId, CommitFault>,
        volumes: Vec<VolumeId>,
    ) -> Result<(), CommitFault> {
        match recorded {
            Ok(migration) => {
                self.publish(migration);
                self.runner.migrations.track(migration, volumes);
                Ok(())
            }
            Err(fault) => {
                self.error = Some(fault.into());
                Err(fault)
            }
        }
    }

    /// Notes the result of a step; the code is that of its failure.
    pub(crate) fn done(&mut self, done: Result<(), RequestError>, code: FailureCode) -> Result<(), Failure> {
        self.tried = None;
        if done.is_ok() {
            self.said.clear();
            self.obstructed(None);
        }
        done.map_err(|error| self.failed(code, error))
    }

    fn failed(&mut self, code: FailureCode, error: RequestError) -> Failure {
        let failure = Failure { code, detail: error.message() };
        self.error = Some(error);
        failure
    }

    /// Logs why the migration cannot be resumed, unless it was logged before.
    pub(crate) fn say(&mut self, error: &RequestError) {
        let reason = error.message();
        if self.said != reason {
            let migration = self.migration.map(|migration| migration.to_string());
            tracing::error!(migration, reason, "an interrupted migration cannot continue at the moment");
            self.obstructed(Some(reason.clone()));
        }
        self.said = reason;
    }

    fn obstructed(&self, obstacle: Option<String>) {
        if let Some(migration) = self.migration {
            self.runner.migrations.obstruct(migration, obstacle);
        }
    }

    /// With a VM, delays the report of the end until the VM's place is recorded.
    pub(crate) fn hold_back_the_end(&mut self) {
        if let (Some(migration), Some(_), None) = (self.migration, &self.vm, &self.settling) {
            self.settling = Some(self.runner.migrations.settle(migration));
        }
    }

    /// Records where the VM is, after its move has ended; until then the VM has `standing`.
    pub(crate) async fn note(&mut self, standing: Standing, place: VmPlace) -> Result<(), String> {
        let (Some(migration), Some(vm)) = (self.migration, &self.vm) else { return Ok(()) };
        if let Some(hooks) = self.runner.moving.forget(migration, place).await {
            self.hooks_after = Some(hooks);
        }
        let noted = self.runner.vm_orders.note_vm(vm, standing, place).await;
        if noted.is_err() {
            // Recording it may take long, and the VM's place is known.
            drop(self.settling.take());
        }
        noted.map_err(|error| error.to_string())
    }

    /// Ends the migration: reports the outcome and runs the hooks that follow it.
    pub(crate) fn conclude(&mut self, outcome: &Outcome) {
        if let Some(migration) = self.migration {
            self.runner.migrations.conclude(migration, outcome);
        }
        drop(self.settling.take());
        if let Some(hooks) = self.hooks_after.take() {
            let outcome = outcome.clone();
            // It may take long, and nothing waits for it.
            tokio::spawn(async move { hooks.after(&outcome).await });
        }
    }

    pub(crate) fn answer(&mut self, answer: Answer) -> Result<Migration, RequestError> {
        match (answer, self.error.take(), self.migration) {
            (Answer::Refused, Some(error), _) => Err(error),
            (_, _, Some(migration)) => self.runner.migrations.get(&self.runner.journal, migration),
            (_, _, None) => Err(RequestError::Internal("it has no number, and no reason".to_owned())),
        }
    }

    /// Resolves when the migration's driver has ended it, or with `None` when the first of its lanes ends.
    pub(crate) async fn driver_ends(&self, lanes: Vec<LaneHandle>) -> Option<Outcome> {
        let Some(migration) = self.migration else { return pending().await };
        if lanes.is_empty() {
            return None;
        }
        let ended = lanes.iter().map(|lane| Box::pin(lane.ended()));
        tokio::select! {
            biased;
            Some(outcome) = self.runner.migrations.outcome(migration) => Some(outcome),
            _ = select_all(ended) => None,
        }
    }

    /// Makes the migration visible to others.
    fn publish(&mut self, migration: MigrationId) {
        self.migration = Some(migration);
        self.runner.sessions.lock().insert(migration, self.wishes.clone());
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(migration) = self.migration {
            self.runner.sessions.lock().remove(&migration);
        }
    }
}

impl ::host::Journal for SessionRunner {
    fn stage(&self, migration: MigrationId) -> Option<Stage> {
        self.journal.read(|state| state.migrations.get(&migration).map(|known| known.stage.clone()))
    }

    async fn commit_end(&self, records: Vec<Record>) -> Result<(), CommitFault> {
        let ended = self.journal.commit(records).await;
        ended.inspect_err(|fault| {
            tracing::warn!(%fault, "cannot record the end of a migration yet; trying again");
        })
    }
}

/// The clock of a session, which begins with it.
struct SessionClock(Instant);

impl Clock for SessionClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, at: Duration) -> impl Future<Output = ()> {
        tokio::time::sleep_until(self.0 + at)
    }
}

/// Numbers, records and runs the sessions of migrations.
pub(crate) struct SessionRunner {
    pub(crate) limits: Arc<PresentLimits>,
    pub(crate) journal: Journal,
    pub(crate) chronicles: Chronicles,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) metadata_folder: Arc<MetadataFolder>,
    pub(crate) histories: Arc<Histories>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) stopping: Stopping,
    pub(crate) vm_orders: Arc<VmOrders>,
    /// Held from the choice of a migration's identity until it is in the journal.
    pub(crate) starting_migration: tokio::sync::Mutex<()>,
}

impl SessionRunner {
    pub(crate) fn new(parts: &Parts, vm_orders: &Arc<VmOrders>) -> Arc<Self> {
        let vm_orders = Arc::clone(vm_orders);
        let Parts {
            sessions,
            moving,
            limits,
            journal,
            chronicles,
            migrations,
            queue,
            metadata_folder,
            histories,
            stopping,
            ..
        } = parts.clone();
        Arc::new(Self {
            sessions,
            moving,
            vm_orders,
            limits,
            journal,
            chronicles,
            migrations,
            queue,
            metadata_folder,
            histories,
            stopping,
            starting_migration: tokio::sync::Mutex::new(()),
        })
    }

    /// Runs a session in a task of its own, to its end or until the daemon stops.
    pub(crate) fn run_session<W>(
        self: &Arc<Self>,
        session: MigrationSession,
        work: W,
        wishes: UnboundedReceiver<Event>,
    ) -> impl Future<Output = ()> + use<W>
    where
        W: Work,
    {
        let (journal, clock) = (Arc::clone(self), SessionClock(Instant::now()));
        let host = Arc::clone(self);
        let stopping = async move { host.stopping.begins().await };
        ::host::run(Surroundings { journal, clock, stopping }, session, work, wishes)
    }

    pub(crate) fn begin_history(&self, migration: MigrationId, size_bytes: u64, order: &MigrateVolume) {
        let started = self.journal.read(|state| Some(state.migrations.get(&migration)?.started_unix_ms));
        let facts = Facts {
            started_unix_ms: started.unwrap_or_default(),
            size_bytes,
            bandwidth_bytes_per_second: order.bandwidth_bytes_per_second,
            mirror_wait_max: self.limits.now().mirror_wait_max,
            strategy: order.strategy.begun(),
        };
        self.histories.begin(migration, facts);
    }

    /// Returns the pace of a migration's copying.
    pub(crate) fn pacing(&self, order: &MigrateVolume) -> PacingSettings {
        let bytes_per_second = order.bandwidth_bytes_per_second;
        PacingSettings { bytes_per_second, ..self.limits.now().mover.pacing() }
    }

    /// Returns what guests may lose to a migration; `None`: it does not give way to them.
    pub(crate) fn impact(&self, order: &MigrateVolume) -> Option<pacer::Impact> {
        self.impact_of(order.impact_percent)
    }

    pub(crate) fn impact_of(&self, percent: Option<u8>) -> Option<pacer::Impact> {
        pacer::Impact::percent(percent.unwrap_or(self.limits.now().impact_percent))
    }

    /// Returns the number for a migration of this volume. The caller holds `starting_migration`.
    pub(crate) fn next_identity(&self, volume: Option<VolumeId>) -> MigrationId {
        let waited = volume.and_then(|volume| self.queue.of(volume));
        waited.unwrap_or_else(|| MigrationId(self.next_number()))
    }

    /// Keeps the order of a migration that has just begun, for a restart.
    pub(crate) async fn note_order(&self, id: MigrationId, order: &MigrateVolume) {
        let Some(begun) = self.journal.begun_unix_ms(id) else { return };
        self.metadata_folder.note(id, begun, |metadata| metadata.order = Some(order.clone())).await;
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.journal.read(|state| state.next_migration).max(self.queue.next_free())
    }

    /// Records that the volume may be in this image in the new residency. A lane that already runs does not check that itself.
    pub(crate) async fn note_image(&self, stay: StayId, record: &VolumeRecord) {
        let (chronicles, image) = (self.chronicles.clone(), record.image.clone());
        let key = StayKey { volume: record.volume, stay };
        if let Err(error) = tokio::task::spawn_blocking(move || chronicles.note_image(key, &image)).await {
            tracing::warn!(volume = %record.name, %error, "cannot record the state of its image");
        }
    }

    /// Records that the target begins with an old image, and how much the volumes hold, for the report.
    pub(crate) async fn note_held(&self, migration: MigrationId, records: Vec<VolumeRecord>) {
        let held = blocking(move || records.iter().map(allocated_bytes).sum::<Result<u64, _>>()).await;
        if let (Ok(held), Some(begun)) = (held, self.journal.begun_unix_ms(migration)) {
            self.metadata_folder.note(migration, begun, |metadata| metadata.held_bytes = Some(held)).await;
        }
    }
}
