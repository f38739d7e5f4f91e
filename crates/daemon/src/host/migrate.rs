//! Beginning and cancelling migrations. What happens in between is the lane's.
//!
//! ```text
//!   checks ──► target reserved (empty) ──► started, durably ──► target as large as the volume ──► lane
//! ```
//! A crash leaves an empty file that no journal knows, or a migration that recovery ends: never somebody else's file
//! that is taken for a half-made target.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{MigrateVolume, Migration, MigrationHistory};
use block::ZeroMode;
use block::store::{Access, Image, ImageError};
use lane::{LaneHandle, MigrationOrder, MigrationTarget, Refused, Report, TargetContent};
use migration::journal::{
    FailureCode, ImageLocation, MigratingVolume, Outcome, Record, Summary, VolumeRecord,
};
use migration::{CommitFault, MigrationId};
use rustix::io::Errno;

use super::{Host, blocking};
use crate::error::RequestError;
use crate::fail_point::{self, Step};
use crate::history::Facts;
use crate::images;
use crate::migrations::parse_id;

impl Host {
    /// Begins to move a volume to another store.
    ///
    /// # Errors
    /// [`RequestError`]: the volume stays where it is, and nothing of the target is left.
    pub(crate) async fn migrate(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        if order.bandwidth_bytes_per_second == Some(0) {
            return Err(RequestError::Invalid("the bandwidth must be more than zero".to_owned()));
        }
        let (_claim, volume) = self.volumes.claim(&name)?;
        let record = self.record(volume, &name)?;
        if let Some(migration) = self.migrations.running_of(volume) {
            return Err(RequestError::AlreadyMigrating { volume: name, migration });
        }
        if record.image.store == order.to {
            return Err(RequestError::SameStore { volume: name, store: order.to });
        }
        self.stores.get(&order.to)?;
        let lane = self.volumes.lane(&name).await?;
        let target = self.reserve_target(&record, order.to.clone()).await?;
        let migration = self.record_start(&record, &target, &order).await?;
        self.migrations.track(migration, volume, u64::from(record.block_size_bytes));
        self.begin_history(migration, &record, &order);
        if let Err(error) = self.hand_to_lane(&lane, &record, migration, &target, &order).await {
            self.end_unbegun(migration, target.location, &error).await;
            return Err(error);
        }
        tracing::info!(volume = %name, %migration, target = %order.to, "migration begun");
        self.migrations.get(&self.journal, migration)
    }

    /// A migration with what was recorded of it.
    ///
    /// # Errors
    /// [`RequestError::MigrationNotFound`].
    pub(crate) async fn migration_history(
        self: Arc<Self>,
        migration: MigrationId,
    ) -> Result<MigrationHistory, RequestError> {
        blocking(move || {
            let shown = self.migrations.get(&self.journal, migration)?;
            let recording = self.histories.get(migration, shown.started_unix_ms);
            Ok(MigrationHistory { migration: shown, recording })
        })
        .await
    }

    fn begin_history(&self, migration: MigrationId, record: &VolumeRecord, order: &MigrateVolume) {
        let started = self.journal.read(|state| Some(state.migrations.get(&migration)?.started_unix_ms));
        let facts = Facts {
            started_unix_ms: started.unwrap_or_default(),
            size_bytes: record.size_bytes,
            bandwidth_bytes_per_second: order.bandwidth_bytes_per_second,
            mirror_wait_max: self.config.limits.mirror_wait_max,
        };
        self.histories.begin(migration, facts);
    }

    /// Asks for a migration to be cancelled.
    ///
    /// # Errors
    /// [`RequestError::MigrationNotFound`], [`RequestError::NotMigrating`], [`RequestError::TooLate`].
    pub(crate) async fn cancel_migration(self: Arc<Self>, id: String) -> Result<Migration, RequestError> {
        let migration = parse_id(&id)?;
        let found = self.journal.read(|state| {
            let state = state.migrations.get(&migration)?;
            Some((state.has_ended(), state.names.first().cloned().unwrap_or_default()))
        });
        let name = match found {
            None => return Err(RequestError::MigrationNotFound(id)),
            Some((true, _)) => return Err(RequestError::NotMigrating(migration)),
            Some((false, name)) => name,
        };
        match self.volumes.lane(&name).await?.cancel(migration).await {
            Ok(()) => self.migrations.get(&self.journal, migration),
            Err(Refused::TooLate(_)) => Err(RequestError::TooLate(migration)),
            // The lane has not got it yet, or has just ended it.
            Err(Refused::NotMigrating(_)) => Err(RequestError::VolumeBusy(name)),
            Err(refused) => {
                Err(RequestError::VolumeUnavailable { volume: name, reason: refused.to_string() })
            }
        }
    }

    /// Checks the target and makes its file, empty: from here on the name is ours.
    async fn reserve_target(
        self: &Arc<Self>,
        record: &VolumeRecord,
        to: String,
    ) -> Result<Reserved, RequestError> {
        let (host, record) = (Arc::clone(self), record.clone());
        blocking(move || {
            let store = host.stores.get(&to)?;
            store.require()?;
            let path = store.image_path(&record.name);
            if path.symlink_metadata().is_ok() {
                return Err(RequestError::TargetExists { path });
            }
            let source = Path::new(record.image.place.name());
            let allocated = images::allocated_bytes(source);
            store.require_space(
                allocated.map_err(|error| RequestError::storage("examine", source, &error))?,
            )?;
            let text = path.to_str().map(str::to_owned);
            let text =
                text.ok_or_else(|| RequestError::Invalid(format!("{} is not UTF-8", path.display())))?;
            match images::reserve(&path) {
                Ok(Some(file)) => Ok(Reserved { location: ImageLocation::raw_file(to, text), path, file }),
                Ok(None) => Err(RequestError::TargetExists { path }),
                Err(error) => Err(RequestError::storage("make", &path, &error)),
            }
        })
        .await
    }

    /// Makes the start durable; the target's file goes again if that fails for certain.
    async fn record_start(
        &self,
        record: &VolumeRecord,
        target: &Reserved,
        order: &MigrateVolume,
    ) -> Result<MigrationId, RequestError> {
        let starting = self.starting_migration.lock().await;
        let migration = MigrationId(self.journal.read(|state| state.next_migration));
        let moving = MigratingVolume {
            volume: record.volume,
            source: record.image.clone(),
            target: target.location.clone(),
        };
        let started =
            Record::MigrationStarted { migration, volumes: vec![moving], keep_source: order.keep_source };
        let result = self.journal.commit(vec![started]).await;
        drop(starting);
        if let Err(fault) = result {
            if fault == CommitFault::NotWritten {
                let _ = std::fs::remove_file(&target.path);
            }
            return Err(fault.into());
        }
        Ok(migration)
    }

    async fn hand_to_lane(
        &self,
        lane: &LaneHandle,
        record: &VolumeRecord,
        migration: MigrationId,
        reserved: &Reserved,
        order: &MigrateVolume,
    ) -> Result<(), RequestError> {
        let (path, size) = (reserved.path.clone(), record.size_bytes);
        let file = reserved.file.try_clone().map_err(|error| RequestError::storage("open", &path, &error))?;
        let image = blocking(move || make_target(&file, &path, size)).await?;
        let target =
            MigrationTarget { store: image.into(), content: TargetContent::Zero, zeroes: ZeroMode::MayUnmap };
        let lane_order = MigrationOrder {
            migration,
            source: record.image.clone(),
            target: reserved.location.clone(),
            keep_source: order.keep_source,
            bandwidth_bytes_per_second: order.bandwidth_bytes_per_second,
        };
        lane.migrate(lane_order, target).await.map_err(|refused| match refused {
            Refused::Migrating(migration) => {
                RequestError::AlreadyMigrating { volume: record.name.clone(), migration }
            }
            refused => {
                RequestError::VolumeUnavailable { volume: record.name.clone(), reason: refused.to_string() }
            }
        })
    }

    /// Ends a migration that the lane never got.
    async fn end_unbegun(&self, migration: MigrationId, target: ImageLocation, error: &RequestError) {
        let mut detail = error.message();
        let discarded = tokio::task::spawn_blocking(move || images::discard(&target)).await;
        if let Ok(Err(fault)) = discarded {
            detail = format!("{detail}; left over: {fault}");
        }
        let code = match error.code() {
            api::ErrorCode::NoSpace => FailureCode::TargetFull,
            api::ErrorCode::StorageFailed | api::ErrorCode::TargetTooSmall => FailureCode::TargetFaulty,
            _ => FailureCode::Internal,
        };
        let outcome = Outcome::Failed { code, detail };
        let summary = Summary::default();
        let ended = Record::MigrationEnded { migration, outcome: outcome.clone(), summary };
        if let Err(fault) = self.journal.commit(vec![ended]).await {
            tracing::warn!(%migration, %fault, "that the migration has ended is left to the next start");
        }
        self.migrations.report(Report::Ended { migration, outcome, summary });
        self.histories.forget(migration);
    }
}

/// The target's file, empty.
struct Reserved {
    location: ImageLocation,
    path: PathBuf,
    file: File,
}

/// Makes the reserved file as large as the volume and opens it as an image; sleeps.
fn make_target(file: &File, path: &Path, size: u64) -> Result<Image, RequestError> {
    fail_point::before(Step::CreateImage);
    let sized = file.set_len(size).and_then(|()| file.sync_all()).and_then(|()| images::sync_folder_of(path));
    sized.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::FBIG | Errno::INVAL) => RequestError::TargetTooSmall {
            place: path.display().to_string(),
            needed: size,
            detail: "no file can be as large there; choose a store on another file system".to_owned(),
        },
        Some(Errno::NOSPC | Errno::DQUOT) => ImageError::NoSpace { path: path.to_owned() }.into(),
        _ => RequestError::storage("set the size of", path, &error),
    })?;
    let image = Image::open(path, Access::ReadWrite)?;
    fail_point::after(Step::CreateImage);
    Ok(image)
}
