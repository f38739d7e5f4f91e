//! A migration to another store of this host: carries out the actions of its [session](migration::session).
//!
//! ```text
//!   MakeRoom    the target is checked and reserved, empty
//!   Record      started, durably, under a number of its own
//!   MakeImages  the target becomes as large as the volume
//!   Begin       the lane has both halves; after a restart: if the copy can be trusted (local/again.rs)
//! ```
//! A crash leaves an empty file that is in no journal, or a migration that the next start resumes or ends. It never makes
//! another file look like a half-made target. *Started* fences a device or an export before anything is written to it.

mod again;

use std::path::PathBuf;
use std::sync::Arc;

use ::host::Work;
use api::{MigrateVolume, Migration};
use lane::{Chunks, LaneHandle, MigrationOrder, MigrationTarget, Refused};
use migration::custody::Owner;
use migration::journal::{
    FailureCode, ImageFormat, ImageLocation, MigratingVolume, Outcome, Record, Side, VolumeRecord,
};
use migration::session::{Answer, MigrationSession, Role, Step, Undo};
use migration::source::Moves;
use migration::{CommitFault, Failure, MigrationId};
use tokio::sync::oneshot;

use crate::error::RequestError;
use crate::host::{Departures, blocking};
use crate::images::opening::Allocation;
use crate::images::sharing::{self, Within};
use crate::images::{self, opening};
use crate::migrations::departures::strategies::{choice, held_max, time_left};
use crate::migrations::orders::migrate::allocated_bytes;
use crate::migrations::sessions::{PATIENCE, Task};
use crate::migrations::view::image_format;
use crate::volumes::orders::chain;
use crate::volumes::serving::reserve::{Reserved, Wanted};

struct LocalMigration {
    departures: Arc<Departures>,
    task: Task,
    record: VolumeRecord,
    /// `None`: a restart resumes the migration, and no lane has it yet.
    lane: Option<LaneHandle>,
    order: MigrateVolume,
    /// The target's place, if a restart resumes the migration.
    resumed: Option<ImageLocation>,
    reserved: Option<Reserved>,
    /// The open target, until the lane has it.
    target: Option<MigrationTarget>,
    answer: Option<oneshot::Sender<Result<Migration, RequestError>>>,
}

impl Departures {
    /// Begins to move a volume to another store; returns when its lane copies it. After an error the volume stays in its store,
    /// and nothing of the target is left.
    pub(crate) async fn begin_local(
        self: &Arc<Self>,
        record: VolumeRecord,
        lane: LaneHandle,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let (answer, answered) = oneshot::channel();
        let (task, wishes) = Task::new(&self.runner, None);
        let answer = Some(answer);
        let lane = Some(lane);
        let (resumed, reserved, target) = (None, None, None);
        let departures = Arc::clone(self);
        let work =
            LocalMigration { departures, task, record, lane, order, resumed, reserved, target, answer };
        let session = MigrationSession::new(Role::Local, false, PATIENCE);
        tokio::spawn(self.runner.run_session(session, work, wishes));
        answered.await.unwrap_or(Err(RequestError::ShuttingDown))
    }

    /// Checks the target and reserves its place. A file is made like the volume's own.
    async fn reserve_target(
        self: &Arc<Self>,
        record: &VolumeRecord,
        order: &MigrateVolume,
    ) -> Result<Reserved, RequestError> {
        let wanted = self.wanted_here(record, order).await?;
        let copied = record.clone();
        let reserved = self.serving.reserve(wanted, move || allocated_bytes(&copied)).await?;
        let (file, source) = (reserved.file.as_ref(), record.image.place.file().map(PathBuf::from));
        if let (Some((path, file)), Some(source)) = (file, source) {
            let file = file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?;
            blocking(move || {
                images::dress(&file, &source);
                Ok(())
            })
            .await?;
        }
        Ok(reserved)
    }

    /// Returns how the chunks of a move to another store of this host get there.
    async fn chunks(
        &self,
        from: &ImageLocation,
        to: &ImageLocation,
        allocation: Allocation,
    ) -> Result<Chunks, RequestError> {
        let (stores, from, to) = (self.stores.clone(), from.clone(), to.clone());
        blocking(move || Ok(sharing::chunks(&stores, &Within { from: &from, to: &to, allocation }))).await
    }

    /// Returns the image that a move to another store of this host needs. Fails if its chain cannot be kept.
    pub(crate) async fn wanted_here(
        self: &Arc<Self>,
        record: &VolumeRecord,
        order: &MigrateVolume,
    ) -> Result<Wanted, RequestError> {
        let chain = match order.keep_chain {
            false => None,
            true => {
                let (host, record, order) = (Arc::clone(self), record.clone(), order.clone());
                let kept = move || {
                    let finder = host.finders.of(&record.name);
                    chain::kept(&record, &order, host.stores.get(&order.to)?, &finder)
                };
                Some(blocking(kept).await?)
            }
        };
        let kept_format = chain.is_some().then_some(ImageFormat::Qcow2);
        Ok(Wanted {
            store: order.to.clone(),
            volume: record.name.clone(),
            format: order.format.map(image_format).or(kept_format),
            otherwise: record.image.format,
            allocation: order.allocation,
            size_bytes: record.size_bytes,
            chain,
        })
    }
}

impl Work for LocalMigration {
    fn migration(&self) -> Option<MigrationId> {
        self.task.migration
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let recorded = match &self.reserved {
            Some(reserved) => self.departures.record_local(&self.record, reserved, &self.order).await,
            None => Err(CommitFault::NotWritten),
        };
        if let Ok(migration) = recorded {
            self.departures.runner.begin_history(migration, self.record.size_bytes, &self.order);
        }
        self.task.recorded(recorded, vec![self.record.volume])
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let done = match step {
            Step::Begin if self.resumed.is_some() => return self.begin_again().await,
            Step::MakeRoom => self.make_room().await,
            Step::MakeImages => self.make_image().await,
            Step::Begin => self.begin().await,
            Step::Record | Step::Offer | Step::LetVmLeave | Step::ExamineVm => Ok(()),
        };
        let code = done.as_ref().err().map_or(FailureCode::Internal, cause);
        self.task.done(done, code)
    }

    /// Releases the target's place. Returns a message about a file that could not be deleted.
    async fn undo(&mut self, undo: Undo) -> String {
        self.target = None;
        let (file, target) = match self.reserved.take() {
            Some(reserved) => (reserved.file, Some(reserved.location)),
            None => (None, self.resumed.clone()),
        };
        match (undo, file, target) {
            (Undo::Room, Some((path, made)), _) => {
                // The reserved file is empty, and no journal names it.
                self.departures.custody.unreserve(&path, &made);
                String::new()
            }
            (Undo::Images, _, Some(target)) => {
                let Some(migration) = self.task.migration else { return String::new() };
                self.departures.histories.forget(migration);
                let (custody, owner) = (self.departures.custody.clone(), Owner::Migration(migration));
                let discarded = tokio::task::spawn_blocking(move || custody.discard(&target, &owner)).await;
                discarded.ok().and_then(Result::err).map(|fault| fault.to_string()).unwrap_or_default()
            }
            _ => String::new(),
        }
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        self.task.driver_ends(self.lane.iter().cloned().collect()).await
    }

    async fn cancel(&mut self) {
        if let (Some(lane), Some(migration)) = (&self.lane, self.task.migration) {
            // If it is too late, the requester learns that from the lane.
            let _ = lane.cancel(migration).await;
        }
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(waiting) = self.answer.take() {
            // The requester may be gone.
            let _ = waiting.send(self.task.answer(answer));
        }
    }

    async fn conclude(&mut self, outcome: Outcome) {
        self.task.conclude(&outcome);
        let is_interrupted = matches!(outcome, Outcome::Failed { code: FailureCode::DaemonStopped, .. });
        if let (true, Some(migration)) = (is_interrupted, self.task.migration) {
            self.departures.repeat(migration).await;
        }
    }
}

impl LocalMigration {
    async fn make_room(&mut self) -> Result<(), RequestError> {
        let host = Arc::clone(&self.departures);
        self.reserved = Some(host.reserve_target(&self.record, &self.order).await?);
        Ok(())
    }

    async fn make_image(&mut self) -> Result<(), RequestError> {
        let Some(reserved) = &self.reserved else { return Ok(()) };
        let file = match &reserved.file {
            None => None,
            Some((path, file)) => {
                Some(file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?)
            }
        };
        let (image, allocation) = (reserved.location.clone(), reserved.allocation);
        let (size, chain) = (self.record.size_bytes, reserved.chain.clone());
        let custody = self.departures.custody.clone();
        let make =
            move || opening::make_target(&custody, &image, file.as_ref(), size, allocation, chain.as_ref());
        let mut target = blocking(make).await?;
        target.store = self.departures.stores.impair(&reserved.location, target.store);
        target.chunks = self.departures.chunks(&self.record.image, &reserved.location, allocation).await?;
        self.target = Some(target);
        // If the daemon is killed, the volume may be in either image.
        let moved = VolumeRecord { image: reserved.location.clone(), ..self.record.clone() };
        let host = &self.departures;
        host.runner.note_image(host.serving.stay_of(self.record.volume), &moved).await;
        if let Some(migration) = self.task.migration {
            host.note_copy_in_use(migration, &reserved.location).await;
        }
        Ok(())
    }

    async fn begin(&mut self) -> Result<(), RequestError> {
        let name = self.record.name.clone();
        let (Some(migration), Some(reserved), Some(target), Some(lane)) =
            (self.task.migration, &self.reserved, self.target.take(), &self.lane)
        else {
            return Err(RequestError::Internal("a migration has no target".to_owned()));
        };
        let downtime_max = held_max(&self.order, Moves::Volumes);
        let order = MigrationOrder {
            migration,
            source: self.record.image.clone(),
            target: reserved.location.clone(),
            target_disk: self.departures.serving.disk_of(&reserved.location.place).await?,
            keep_source: self.order.keep_source,
            pacing: self.departures.runner.pacing(&self.order),
            impact: self.departures.runner.impact(&self.order),
            time_left: time_left(&self.order),
            strategy: choice(&self.order).here(downtime_max / 2),
            downtime_max,
            moves: self.departures.migration_hooks.prepare_hooks_here(migration),
            resumed: None,
        };
        lane.migrate(order, target).await.map_err(|refused| match refused {
            Refused::Migrating(migration) => {
                RequestError::AlreadyMigrating { volume: name.clone(), migration }
            }
            refused => RequestError::VolumeUnavailable { volume: name.clone(), reason: refused.to_string() },
        })?;
        tracing::info!(volume = %name, %migration, target = %self.order.to, "migration begun");
        // From here on the journal holds the target's place. A restart resumes with the existing file.
        self.resumed = self.reserved.take().map(|reserved| reserved.location);
        Ok(())
    }
}

impl Departures {
    /// Makes durable that a volume moves to another store, under a new migration number.
    async fn record_local(
        &self,
        record: &VolumeRecord,
        target: &Reserved,
        order: &MigrateVolume,
    ) -> Result<MigrationId, CommitFault> {
        let starting = self.runner.starting_migration.lock().await;
        let migration = self.runner.next_identity(Some(record.volume));
        let moving = MigratingVolume {
            volume: record.volume,
            source: record.image.clone(),
            target: target.location.clone(),
        };
        let started = Record::MigrationStarted {
            migration,
            volumes: vec![moving],
            keep_source: order.keep_source,
            side: Side::OneHost,
        };
        let recorded = self.journal.commit(vec![started]).await;
        drop(starting);
        recorded.map(|()| migration)
    }
}

fn cause(error: &RequestError) -> FailureCode {
    match error.code() {
        api::ErrorCode::NoSpace => FailureCode::TargetFull,
        api::ErrorCode::StorageFailed | api::ErrorCode::TargetTooSmall => FailureCode::TargetFaulty,
        _ => FailureCode::Internal,
    }
}
