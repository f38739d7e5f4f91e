//! Begins, changes and cancels migrations, and chooses the kind of migration for an order. The sessions (`local.rs`,
//! `outgoing.rs`, `incoming.rs`) and the lanes carry them out.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, Migration, MigrationHistory, Named, SetMigration};
use lane::{LaneHandle, Refused, Rest};
use migration::journal::{Side, VolumeRecord};
use migration::session::Event;
use migration::{MigrationId, orders, promotion};
use tokio::time::Instant;

use crate::error::RequestError;
use crate::host::{MigrationOrders, SessionRunner, blocking};
use crate::images;
use crate::migrations::departures::leave::Departing;
use crate::migrations::departures::strategies::{check_strategy, check_strategy_here};
use crate::migrations::metadata::Metadata;
use crate::migrations::orders::queued::{check_impact, check_rate};
use crate::migrations::registry::parse_id;
use crate::vms::orders::move_vm::not_to_a_store;

/// The longest that a change waits for a migration to begin: its first records may wait for a slow disk.
const BEGINS_IN: Duration = Duration::from_secs(10);
const BEGINS_LOOK: Duration = Duration::from_millis(20);

/// What can be changed of a migration that runs.
#[derive(Clone, Copy, Debug)]
enum Change {
    Rest(Rest),
    /// Bytes a second; `None`: no limit.
    Bandwidth(Option<u64>),
    /// The impact, as in [`MigrateVolume::impact_percent`]; `None`: the default.
    Impact(Option<u8>),
}

impl Change {
    /// Puts the change into what is kept for a restart, and returns what was there.
    fn swap(self, metadata: &mut Metadata) -> Self {
        match self {
            Self::Bandwidth(rate) => Self::Bandwidth(metadata.limit(rate)),
            Self::Impact(percent) => Self::Impact(metadata.swap_impact(percent)),
            Self::Rest(rest) => {
                let was_paused = std::mem::replace(&mut metadata.is_paused, rest == Rest::Pause);
                Self::Rest(if was_paused { Rest::Pause } else { Rest::Resume })
            }
        }
    }

    async fn give(
        self,
        runner: &SessionRunner,
        lane: &LaneHandle,
        migration: MigrationId,
    ) -> Result<(), Refused> {
        match self {
            Self::Impact(percent) => lane.set_impact(migration, runner.impact_of(percent)).await,
            Self::Rest(rest) => lane.rest(migration, rest).await,
            Self::Bandwidth(rate) => lane.set_bandwidth(migration, rate).await,
        }
    }
}

impl MigrationOrders {
    /// Begins to move a volume or a VM at once. After an error the volume stays in its store, and nothing of the target is left.
    pub(crate) async fn begin_migration(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        check_rate(order.bandwidth_bytes_per_second)?;
        check_impact(order.impact_percent)?;
        check_strategy(&order)?;
        self.names_together(&name, &order)?;
        if self.means_vm(&name, &order)? {
            return self.migrate_vm(name, order).await;
        }
        if let Some(adopted) = self.vms.adoptions()?.get(&name)
            && order.named != Named::Volume
            && self.claims.elsewhere(&order.to)?.is_some()
        {
            self.vm_orders.refuse_domain(&adopted)?;
            return self.migrate_adopted(adopted, order).await;
        }
        self.check_is_volume(&name, &order)?;
        check_has_no_memory(&name, &order)?;
        if !order.together_with.is_empty() {
            return self.migrate_together(name, order).await;
        }
        let (_claim, volume) = self.claims.claim_to_move(&name, &order).await?;
        let record = self.claims.record(volume, &name)?;
        if let Some(elsewhere) = self.claims.elsewhere(&order.to)? {
            let lane = self.volumes.lane(&name).await?;
            return self
                .departures
                .migrate_away(vec![Departing { record, lane }], elsewhere, order, None)
                .await;
        }
        check_strategy_here(&order)?;
        self.check_move_here(&record, &order)?;
        let lane = self.volumes.lane(&name).await?;
        self.departures.begin_local(record, lane, order).await
    }

    /// Refuses a name that no volume has, for orders that do not move a VM to another host. Errors:
    /// [`RequestError::NothingToMove`], [`RequestError::VolumeGone`]; [`RequestError::Invalid`]: it is a VM.
    pub(crate) fn check_is_volume(&self, name: &str, order: &MigrateVolume) -> Result<(), RequestError> {
        match self.claims.record_named(name) {
            Err(RequestError::VolumeNotFound(_)) => {}
            Err(RequestError::VolumeElsewhere { volume, host, migration })
                if self.volumes.service(name).is_none() =>
            {
                return Err(RequestError::VolumeGone { volume, host, migration });
            }
            // Claiming the volume gives the better error for everything else.
            _ => return Ok(()),
        }
        Err(match self.vms.adoptions()?.get(name) {
            None => RequestError::NothingToMove(name.to_owned()),
            Some(adopted) => {
                let disks = adopted.disks.iter().map(|disk| disk.volume.clone());
                not_to_a_store(&disks.collect::<Vec<_>>(), order)
            }
        })
    }

    /// Refuses an order that makes no sense for a move to a store of this host. Errors:
    /// [`RequestError::SameStore`], [`RequestError::Invalid`], [`RequestError::StoreNotFound`].
    pub(crate) fn check_move_here(
        &self,
        record: &VolumeRecord,
        order: &MigrateVolume,
    ) -> Result<(), RequestError> {
        if record.image.store == order.to {
            return Err(RequestError::SameStore { volume: record.name.clone(), store: order.to.clone() });
        }
        if order.serve_here {
            let text =
                "every client is served here after a move between stores of one host; leave --serve-here out";
            return Err(RequestError::Invalid(text.to_owned()));
        }
        self.stores.get(&order.to).map(drop)
    }

    /// Returns a migration with its recorded history. Errors: [`RequestError::MigrationNotFound`].
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

    /// Pauses or resumes a migration. Errors: those of [`Self::order_running`].
    pub(crate) async fn rest_migration(
        self: Arc<Self>,
        id: String,
        rest: Rest,
    ) -> Result<Migration, RequestError> {
        self.order_running(&id, Change::Rest(rest)).await
    }

    /// Changes the bandwidth limit of a migration, or its impact. Errors: [`RequestError::Invalid`], and those of [`Self::order_running`].
    pub(crate) async fn set_migration(
        self: Arc<Self>,
        id: String,
        SetMigration { bandwidth_bytes_per_second: rate, impact_percent }: SetMigration,
    ) -> Result<Migration, RequestError> {
        check_rate(rate.flatten())?;
        check_impact(impact_percent)?;
        let impact = impact_percent.map(|percent| Change::Impact(Some(percent)));
        let changes = rate.map(Change::Bandwidth).into_iter().chain(impact);
        let mut changed = None;
        for change in changes {
            changed = Some(self.order_running(&id, change).await?);
        }
        changed.ok_or_else(|| {
            RequestError::Invalid(
                "name what is to change: bandwidth_bytes_per_second, impact_percent, or both".to_owned(),
            )
        })
    }

    /// Changes how a migration runs, also one that is just beginning. Errors: [`RequestError::MigrationNotFound`],
    /// [`RequestError::NotMigrating`]; [`RequestError::Invalid`]: it is incoming, so its source alone can do that.
    async fn order_running(&self, id: &str, change: Change) -> Result<Migration, RequestError> {
        let begins_until = Instant::now() + BEGINS_IN;
        loop {
            let (migration, name) = self.running_named(id)?;
            let lane = self.volumes.lane(&name).await?;
            // N.B. Recorded before the lane changes: a change that was answered also holds after a restart.
            let before = self.order_durably(migration, |metadata| change.swap(metadata)).await?;
            let Err(refused) = change.give(&self.runner, &lane, migration).await else {
                tracing::info!(%migration, ?change, "a migration is changed");
                return self.migrations.get(&self.journal, migration);
            };
            // No lane has it yet, or it has just ended.
            self.order_durably(migration, |metadata| before.swap(metadata)).await?;
            if let Some(source) = self.source_of_incoming(migration) {
                let detail = format!("migration {migration} comes from host \"{source}\": change it there");
                return Err(RequestError::Invalid(detail));
            }
            if Instant::now() > begins_until {
                tracing::warn!(%migration, %refused, "the lane refuses to change a migration");
                return Err(RequestError::VolumeBusy(name));
            }
            tokio::time::sleep(BEGINS_LOOK).await;
        }
    }

    /// Makes an order for a running migration durable, before it is answered. After an error the old order holds.
    async fn order_durably<T: Send>(
        &self,
        migration: MigrationId,
        change: impl FnOnce(&mut Metadata) -> T + Send,
    ) -> Result<T, RequestError> {
        let begun = self.journal.begun_unix_ms(migration).ok_or(RequestError::NotMigrating(migration))?;
        self.metadata_folder
            .order(migration, begun, change)
            .await
            .map_err(|error| RequestError::storage("write the order into", &self.config.data_dir, &error))
    }

    fn source_of_incoming(&self, migration: MigrationId) -> Option<String> {
        self.journal.read(|state| match &state.migrations.get(&migration)?.side {
            Side::Incoming { peer_name, .. } => Some(peer_name.clone()),
            Side::OneHost | Side::Outgoing { .. } => None,
        })
    }

    fn running_named(&self, id: &str) -> Result<(MigrationId, String), RequestError> {
        let migration = parse_id(id)?;
        self.require_begun(migration)?;
        let found = self.journal.read(|state| {
            let state = state.migrations.get(&migration)?;
            Some((state.has_ended(), state.names.first().cloned().unwrap_or_default()))
        });
        match found {
            None => Err(RequestError::MigrationNotFound(id.to_owned())),
            Some((true, _)) => Err(RequestError::NotMigrating(migration)),
            Some((false, name)) => Ok((migration, name)),
        }
    }

    /// Cancels a migration: after the answer nothing is handed over, also if this daemon is killed. Errors:
    /// [`RequestError::MigrationNotFound`], [`RequestError::NotMigrating`], [`RequestError::TooLate`].
    pub(crate) async fn cancel_migration(self: Arc<Self>, id: String) -> Result<Migration, RequestError> {
        if let Some(cancelled) = self.withdraw(parse_id(&id)?).await? {
            return Ok(cancelled);
        }
        let (migration, name) = self.running_named(&id)?;
        self.record_cancel(migration).await?;
        // N.B. The cancellation is durable: the lane that has the migration, or will have it, ends it.
        if let Ok(lane) = self.volumes.lane_of_migration(&name).await
            && lane.cancel(migration).await.is_ok()
        {
            return self.migrations.get(&self.journal, migration);
        }
        // No lane has it yet, or a lane has just ended it.
        self.sessions.tell(migration, Event::Cancel);
        self.migrations.get(&self.journal, migration)
    }

    /// Makes a cancellation durable: the journal then accepts no handover of this migration. Errors: [`RequestError::TooLate`]:
    /// it is handed over, or may be. [`RequestError::Journal`].
    pub(crate) async fn record_cancel(&self, migration: MigrationId) -> Result<(), RequestError> {
        let records = self.journal.read(|state| orders::cancel(state, migration));
        let records = records.map_err(|_| self.too_late(migration))?;
        if !records.is_empty()
            && let Err(fault) = self.journal.commit(records).await
        {
            // The handover may have been committed at this moment.
            let now = self.journal.read(|state| orders::cancel(state, migration));
            return Err(now.map_or_else(|_| self.too_late(migration), |_| fault.into()));
        }
        Ok(())
    }

    /// Returns whether a name means a VM of this host. If a volume has the same name, a move to a local store means the volume,
    /// because VMs do not move between stores. Fails if no target has the given name.
    pub(crate) fn means_vm(&self, name: &str, order: &MigrateVolume) -> Result<bool, RequestError> {
        match order.named {
            Named::Volume => return Ok(false),
            Named::Vm => return self.vms.get(name).map(|_| true).map_err(RequestError::from),
            Named::Any => {}
        }
        let is_volume = self.volumes.service(name).is_some();
        Ok(self.vms.get(name).is_ok() && (!is_volume || self.claims.elsewhere(&order.to)?.is_some()))
    }

    /// Returns why a migration cannot be cancelled: it is handed over, and perhaps an order ends it.
    pub(crate) fn too_late(&self, migration: MigrationId) -> RequestError {
        match self.journal.read(|state| promotion::departed(state, migration)) {
            Some(departed) => RequestError::TooLateLeft { migration, advice: departed.advice() },
            None => RequestError::TooLate(migration),
        }
    }
}

/// Refuses options for a VM's memory in an order for a volume.
pub(crate) fn check_has_no_memory(name: &str, order: &MigrateVolume) -> Result<(), RequestError> {
    if order.memory == api::Memory::PreCopy && order.memory_streams.is_none() {
        return Ok(());
    }
    let text = format!("\"{name}\" is a volume, and has no memory: leave --memory and --memory-streams out");
    Err(RequestError::Invalid(text))
}

/// Returns about how many bytes a copy of the volume needs; 0: unknown.
pub(crate) fn allocated_bytes(record: &VolumeRecord) -> Result<u64, RequestError> {
    let Some(path) = record.image.place.file().map(Path::new) else { return Ok(0) };
    // A qcow2 image's backing files are not counted: the lane has them open, and other images may share them.
    let allocated =
        images::allocated_bytes(path).map_err(|error| RequestError::storage("examine", path, &error))?;
    Ok(allocated.min(record.size_bytes))
}
