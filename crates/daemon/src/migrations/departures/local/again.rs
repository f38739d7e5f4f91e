//! Resumes a migration between stores of this host that was copying when its daemon or its lane ended.
//!
//! ```text
//!   the volume is served ──► its chronicle knows the copy? it is unchanged? ──► it is in use, durably ──► the lane
//!          │ not yet                     │ no ([`migration::stay::copy`])
//!          ▼                             ▼
//!   checked again later            it fails; after an orderly stop of the daemon it begins again
//! ```

use std::sync::Arc;
use std::time::Duration;

use lane::{MigrationOrder, Refused, Rest, ResumedMigration};
use migration::journal::{FailureCode, ImageLocation, MigrationState, VolumeRecord};
use migration::session::{MigrationSession, Role};
use migration::source::Moves;
use migration::stay::copy;
use migration::{Failure, MigrationId};

use super::{LocalMigration, cause};
use crate::error::RequestError;
use crate::host::{Departures, blocking};
use crate::images::opening;
use crate::journal::now_unix_ms;
use crate::migrations::departures::strategies::{choice_again, held_max, time_left};
use crate::migrations::metadata::Metadata;
use crate::migrations::sessions::{PATIENCE, Task};
use crate::volumes::chronicles::look;

/// Why a migration is not resumed.
enum Obstacle {
    /// Its copy cannot be trusted.
    Unbelieved(String),
    /// A store or volume is not available.
    Unavailable(RequestError),
}

impl From<RequestError> for Obstacle {
    fn from(error: RequestError) -> Self {
        Self::Unavailable(error)
    }
}

impl Departures {
    /// Resumes a migration between stores that a restart interrupted; returns after the first attempt.
    pub(crate) async fn resume_local(self: &Arc<Self>, migration: MigrationId, recorded: &MigrationState) {
        let (Some(moving), Some(name)) = (recorded.volumes.first(), recorded.names.first()) else { return };
        let record = match self.claims.record(moving.volume, name) {
            Ok(record) => record,
            Err(error) => {
                let reason = error.message();
                tracing::error!(%migration, reason, "the volume of an interrupted migration is gone");
                return;
            }
        };
        self.migrations.track_again(migration, std::iter::once(moving.volume));
        let (mut task, wishes) = Task::new(&self.runner, None);
        let is_tried = task.resumes(migration);
        let metadata = self.metadata_folder.of(migration, recorded.started_unix_ms).unwrap_or_default();
        let order = metadata.order.unwrap_or_else(|| api::MigrateVolume::to(moving.target.store.clone()));
        let resumed = Some(moving.target.clone());
        let (lane, reserved, target, answer) = (None, None, None, None);
        let departures = Arc::clone(self);
        let work =
            LocalMigration { departures, task, record, lane, order, resumed, reserved, target, answer };
        let session = MigrationSession::resume(Role::Local, false, PATIENCE).with_orders(recorded);
        tokio::spawn(self.runner.run_session(session, work, wishes));
        // A dropped sender means the same.
        let _ = is_tried.await;
    }

    /// Records how the image of a copy looks before it is written again.
    pub(crate) async fn note_copy_in_use(&self, migration: MigrationId, target: &ImageLocation) {
        let Some(begun) = self.journal.begun_unix_ms(migration) else { return };
        let target = target.clone();
        let found = tokio::task::spawn_blocking(move || look(&target)).await.ok().flatten();
        let run = self.chronicles.run();
        let note = |metadata: &mut Metadata| metadata.copy.image = found.map(|look| copy::in_use(look, run));
        self.metadata_folder.note(migration, begun, note).await;
    }
}

impl LocalMigration {
    /// Resumes the migration if its copy can be trusted.
    pub(crate) async fn begin_again(&mut self) -> Result<(), Failure> {
        match self.try_to_begin_again().await {
            Ok(()) => self.task.done(Ok(()), FailureCode::Internal),
            Err(Obstacle::Unavailable(error)) => {
                self.task.say(&error);
                let code = cause(&error);
                self.task.done(Err(error), code)
            }
            Err(Obstacle::Unbelieved(why)) => {
                let migration = self.task.migration.map(|migration| migration.to_string());
                tracing::warn!(migration, reason = why, "cannot continue an interrupted migration");
                let detail = format!(
                    "the daemon stopped before the handover; the volume stayed at the source, and its copy could not be used: \
                     {why}"
                );
                // N.B. a start waits for this.
                Err(Failure { code: FailureCode::DaemonStopped, detail })
            }
        }
    }

    async fn try_to_begin_again(&mut self) -> Result<(), Obstacle> {
        let host = Arc::clone(&self.departures);
        let (Some(migration), Some(image)) = (self.task.migration, self.resumed.clone()) else {
            return Err(RequestError::Internal("a migration has no target".to_owned()).into());
        };
        let recorded = host.journal.read(|state| state.migrations.get(&migration).cloned());
        let Some(recorded) = recorded else {
            return Err(RequestError::MigrationNotFound(migration.to_string()).into());
        };
        let store = host.stores.get(&image.store).map_err(|error| Obstacle::Unbelieved(error.message()))?;
        store.require_writable()?;
        let name = self.record.name.clone();
        let lane = host.volumes.lane(&name).await?;
        // The volume may have grown since the order.
        self.record = host.claims.record(self.record.volume, &name)?;
        let unavailable = |refused: Refused| {
            let (volume, reason) = (name.clone(), refused.to_string());
            Obstacle::Unavailable(RequestError::VolumeUnavailable { volume, reason })
        };
        let status = lane.status().await.map_err(unavailable)?;
        let metadata = host.metadata_folder.of(migration, recorded.started_unix_ms).unwrap_or_default();
        let looked_at = image.clone();
        let found = blocking(move || Ok(look(&looked_at))).await?;
        let lives = host.chronicles.lives();
        let found = copy::Found {
            is_known: status.copies.contains(&migration),
            record: metadata.copy.image.as_ref(),
            look: found.as_ref(),
            lives: &lives,
        };
        copy::believe(found).map_err(|distrust| Obstacle::Unbelieved(distrust.to_string()))?;
        // If the daemon is killed, the volume may be in either image.
        let moved = VolumeRecord { image: image.clone(), ..self.record.clone() };
        host.runner.note_image(host.serving.stay_of(self.record.volume), &moved).await;
        host.note_copy_in_use(migration, &image).await;
        let (allocation, size) = (self.order.allocation, self.record.size_bytes);
        let opened = image.clone();
        let custody = host.custody.clone();
        let open = move || opening::open_target_again(&custody, &opened, size, allocation);
        let mut target = blocking(open).await?;
        target.store = host.stores.impair(&image, target.store);
        target.chunks = host.chunks(&self.record.image, &image, allocation.into()).await?;
        let target_disk = host.serving.disk_of(&image.place).await?;
        self.order = metadata.order.clone().unwrap_or_else(|| self.order.clone());
        let begun = recorded.started_unix_ms;
        let order = self.order_again(migration, &image, recorded, &metadata, &target_disk);
        lane.migrate(order, target).await.map_err(|refused| match refused {
            Refused::CopyUnknown(_) | Refused::SizeDiffers { .. } => {
                Obstacle::Unbelieved(refused.to_string())
            }
            refused => unavailable(refused),
        })?;
        tracing::info!(volume = %name, %migration, target = %self.order.to, "an interrupted migration continues");
        host.runner.begin_history(migration, self.record.size_bytes, &self.order);
        host.metadata_folder.note(migration, begun, |noted| noted.goes_on = false).await;
        self.lane = Some(lane);
        Ok(())
    }

    fn order_again(
        &self,
        migration: MigrationId,
        image: &ImageLocation,
        recorded: MigrationState,
        metadata: &Metadata,
        target_disk: &Arc<pacer::Store>,
    ) -> MigrationOrder {
        let spent = now_unix_ms().saturating_sub(recorded.started_unix_ms);
        let downtime_max = held_max(&self.order, Moves::Volumes);
        MigrationOrder {
            migration,
            source: self.record.image.clone(),
            target: image.clone(),
            target_disk: Arc::clone(target_disk),
            keep_source: recorded.keep_source,
            pacing: self.departures.runner.pacing(&self.order),
            impact: self.departures.runner.impact(&self.order),
            time_left: time_left(&self.order),
            strategy: choice_again(&self.order, &recorded).here(downtime_max / 2),
            downtime_max,
            moves: self.departures.migration_hooks.prepare_hooks_here(migration),
            resumed: Some(Box::new(ResumedMigration {
                recorded,
                spent: Duration::from_millis(spent),
                carried: metadata.copy.carried(),
                rest: if metadata.is_paused { Rest::Pause } else { Rest::Resume },
            })),
        }
    }
}
