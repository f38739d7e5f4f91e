//! Orders for migrations: begins them at once if there is room, or else in their turn.
//!
//! ```text
//!   ordered ─► checked ─► room ─► begun
//!                 │         └── none: metadata, durably ─► waits ─► its turn ─► begun │ ended: why it could not begin
//!                 └─ an error in it: found when it begins                  └─ withdrawn: cancelled
//! ```
//! A waiting migration has its final number. The journal holds it once it begins, or once it has ended without a beginning.

use std::sync::Arc;
use std::time::Duration;

use api::{ErrorCode, MigrateVolume, Migration};
use migration::journal::{
    FailureCode, ImageLocation, MigratingVolume, Outcome, Place, Record, Side, Summary, VolumeRecord,
};
use migration::queue::{Need, Turn, Withdrawal};
use migration::{MigrationId, VolumeId};

use crate::error::{RequestError, SnapshotError};
use crate::host::MigrationOrders;
use crate::journal::now_unix_ms;
use crate::migrations::metadata::Metadata;
use crate::migrations::queue::{Admission, WAITING_MAX, Wish};
use crate::migrations::registry::parse_id;
use crate::migrations::view::queued;

/// How long a migration waits to be tried again if its volume is busy when its turn comes.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

impl MigrationOrders {
    /// Returns the running migrations and the remembered ones, oldest first.
    pub(crate) fn list(&self) -> Vec<Migration> {
        self.migrations.list(&self.journal)
    }

    /// Describes one migration. Errors: [`RequestError::MigrationNotFound`].
    pub(crate) fn describe(&self, migration: MigrationId) -> Result<Migration, RequestError> {
        self.migrations.get(&self.journal, migration)
    }

    /// Describes one migration as soon as it differs from its revision `after`, or after `wait`.
    pub(crate) async fn watch(
        &self,
        migration: MigrationId,
        after: u64,
        wait: Duration,
    ) -> Result<Migration, RequestError> {
        self.migrations.watch(&self.journal, migration, after, wait).await
    }

    /// Begins to move a volume or a VM, or queues the order. After an error nothing of the target is left.
    pub(crate) async fn migrate(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        self.order_migration(name, order, None).await
    }

    /// Does the same as [`Self::migrate`]; `retry_of` is the migration that is repeated.
    pub(crate) async fn order_migration(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
        retry_of: Option<MigrationId>,
    ) -> Result<Migration, RequestError> {
        let metadata = Metadata {
            name: name.clone(),
            order: Some(order.clone()),
            ordered_unix_ms: now_unix_ms(),
            retry_of: retry_of.map(|id| id.0),
            ..Metadata::default()
        };
        for volume in std::iter::once(&name).chain(&order.together_with).chain(&self.volumes_of_vm(&name)) {
            self.claims.settled(volume).await;
        }
        check_times(&order, metadata.ordered_unix_ms)?;
        let of_vm = self.volumes_of_vm(&name);
        self.check_may_leave(std::iter::once(&name).chain(&order.together_with).chain(&of_vm), &order)?;
        // Beginning the migration gives the better error.
        let Ok(wish) = self.wish(&metadata, &order) else {
            return self.begin_unqueued(name, order).await;
        };
        let metadata =
            Metadata { volumes: wish.volumes.iter().map(VolumeId::to_string).collect(), ..metadata };
        // No migration gets a number while this is held.
        let starting = self.runner.starting_migration.lock().await;
        match self.queue.ask(&wish, || self.migrations.under_way(&self.journal)) {
            Turn::Now(admission) => {
                drop(starting);
                self.begin_admitted(wish, admission, metadata).await
            }
            Turn::Waits(migration) => Err(RequestError::AlreadyMigrating { volume: name, migration }),
            Turn::Later(_) => {
                self.check_patience(&wish)?;
                let id = MigrationId(self.runner.next_number());
                self.metadata_folder.put(id, metadata).await.map_err(|error| {
                    RequestError::storage("write the order into", &self.config.data_dir, &error)
                })?;
                let is_waiting = self.queue.join(id, numbered(wish, id));
                drop(starting);
                self.note_retry(retry_of, id).await;
                if !is_waiting {
                    return Err(RequestError::QueueFull { waiting: WAITING_MAX });
                }
                tracing::info!(%name, migration = %id, "migration waits for its turn");
                self.migrations.get(&self.journal, id)
            }
        }
    }

    /// Refuses to move snapshots to another host: they are of this one.
    pub(super) fn check_may_leave<'a>(
        &self,
        names: impl IntoIterator<Item = &'a String>,
        order: &MigrateVolume,
    ) -> Result<(), RequestError> {
        if self.claims.elsewhere(&order.to)?.is_none() {
            return Ok(());
        }
        match self.journal.read(|state| state.snapshot_among(names)) {
            Some(snapshot) => Err(SnapshotError::Stays(snapshot.clone()).into()),
            None => Ok(()),
        }
    }

    /// Queues what waited when the daemon ended, and begins migrations in their turn, until the daemon stops.
    pub(crate) async fn run_queue(self: &Arc<Self>) {
        for (id, metadata) in self.metadata_folder.waiting() {
            let Some(order) = metadata.order.clone() else { continue };
            let reason = match self.wish(&metadata, &order) {
                Ok(wish) if self.queue.join(id, numbered(wish.clone(), id)) => {
                    tracing::info!(name = %metadata.name, migration = %id, "migration waits for its turn, as before");
                    continue;
                }
                Ok(_) => RequestError::QueueFull { waiting: WAITING_MAX }.message(),
                Err(error) => error.message(),
            };
            tracing::warn!(migration = %id, name = %metadata.name, reason, "cannot begin a migration that waited");
            // N.B. The migration ends before any other one gets a number.
            self.end_hopeless(id, metadata, order, reason).await;
        }
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let mut turns = host.queue.turns();
            loop {
                turns.mark_unchanged();
                for (id, wish, admission) in host.queue.next(|| host.migrations.under_way(&host.journal)) {
                    let host = Arc::clone(&host);
                    tokio::spawn(async move { host.begin_in_turn(id, wish, admission).await });
                }
                tokio::select! {
                    // The queue lives as long as its host.
                    _ = turns.changed() => {}
                    () = host.queue.next_time() => {}
                    () = host.stopping.begins() => return,
                }
            }
        });
    }

    /// Ends a waiting migration; `None`: it does not wait. [`RequestError::VolumeBusy`]: its turn has just come.
    pub(crate) async fn withdraw(
        self: &Arc<Self>,
        migration: MigrationId,
    ) -> Result<Option<Migration>, RequestError> {
        match self.queue.withdraw(migration) {
            Withdrawal::Unknown => Ok(None),
            Withdrawal::Begins(wish) => Err(RequestError::VolumeBusy(wish.name)),
            Withdrawal::Withdrawn(wish) => {
                let ended = self.end_waiting(migration, &wish, Outcome::Cancelled).await;
                if let Err(error) = ended {
                    // Its end was not recorded: it stays in the queue, where users see it.
                    self.queue.join(migration, wish);
                    return Err(error);
                }
                tracing::info!(%migration, "migration cancelled before its turn");
                self.migrations.get(&self.journal, migration).map(Some)
            }
        }
    }

    /// Refuses operations on a migration that still waits, with [`RequestError::MigrationWaits`].
    pub(crate) fn require_begun(&self, migration: MigrationId) -> Result<(), RequestError> {
        if self.queue.has(migration) { Err(RequestError::MigrationWaits(migration)) } else { Ok(()) }
    }

    /// Begins a migration that the queue does not know, such as that of a libvirt domain.
    async fn begin_unqueued(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let adopted = self.vms.adoptions()?.get(&name);
        let disks = adopted.iter().flat_map(|adopted| &adopted.disks);
        let records: Vec<_> = disks.filter_map(|disk| self.claims.record_named(&disk.volume).ok()).collect();
        let (order, strategy_reason) = self.with_strategy(&name, &records, order).await;
        let begun = Arc::clone(&self).begin_migration(name, order).await?;
        let id = parse_id(&begun.id)?;
        if let Some(at) = self.journal.begun_unix_ms(id) {
            self.metadata_folder.note(id, at, |metadata| metadata.strategy_reason = strategy_reason).await;
        }
        self.migrations.get(&self.journal, id)
    }

    async fn begin_admitted(
        self: Arc<Self>,
        wish: Wish,
        admission: Admission,
        metadata: Metadata,
    ) -> Result<Migration, RequestError> {
        let (order, strategy_reason) =
            self.with_strategy(&wish.name, &self.records_of(&wish), wish.order).await;
        let metadata = Metadata { order: Some(order.clone()), strategy_reason, ..metadata };
        let begun = Arc::clone(&self).begin_migration(wish.name, order.clone()).await;
        if let Ok(begun) = &begun
            && let Ok(id) = parse_id(&begun.id)
        {
            self.file(id, metadata).await;
            tokio::spawn(Arc::clone(&self).note_forecast(id, order));
        }
        drop(admission);
        let begun = begun?;
        // Read again with its metadata.
        parse_id(&begun.id).and_then(|id| self.migrations.get(&self.journal, id))
    }

    /// Keeps the order, for `migration retry`.
    pub(crate) async fn file(&self, id: MigrationId, ordered: Metadata) {
        let Some(begun) = self.journal.begun_unix_ms(id) else { return };
        let retry_of = ordered.retry_of.map(MigrationId);
        let note = |metadata: &mut Metadata| {
            let Metadata { name, volumes, mut order, ordered_unix_ms, retry_of, strategy_reason, .. } =
                ordered;
            // Its limits may have been changed since it began.
            if let (Some(order), Some(begun)) = (&mut order, &metadata.order) {
                order.bandwidth_bytes_per_second = begun.bandwidth_bytes_per_second;
                order.impact_percent = begun.impact_percent;
            }
            let others = std::mem::take(metadata);
            *metadata =
                Metadata { name, volumes, order, ordered_unix_ms, retry_of, strategy_reason, ..others };
        };
        self.metadata_folder.note(id, begun, note).await;
        self.note_retry(retry_of, id).await;
    }

    /// Records in the repeated migration the number of the new one.
    async fn note_retry(&self, retry_of: Option<MigrationId>, id: MigrationId) {
        if let Some((old, begun)) = retry_of.and_then(|old| Some((old, self.journal.begun_unix_ms(old)?))) {
            self.metadata_folder.note(old, begun, |metadata| metadata.retried_as = Some(id.0)).await;
        }
    }

    async fn begin_in_turn(self: Arc<Self>, id: MigrationId, wish: Wish, admission: Admission) {
        let name = wish.name.clone();
        let order = self.choose_in_turn(id, &wish).await;
        let host = Arc::clone(&self);
        let begun = self.operations.run(host.begin_migration(name.clone(), order.clone())).await;
        let is_known = self.journal.begun_unix_ms(id).is_some();
        let is_begun = begun.is_ok();
        match begun {
            Ok(_) => tracing::info!(%name, migration = %id, "migration begun in its turn"),
            // The migration stays in the queue, and the next daemon begins it.
            Err(RequestError::ShuttingDown) => return,
            Err(error) if error.code() == ErrorCode::VolumeBusy && !is_known => {
                tokio::time::sleep(BUSY_PAUSE).await;
                self.queue.wait_again(id);
                return;
            }
            // Beginning it has recorded its end already.
            Err(_) if is_known => {}
            Err(error) => {
                let detail = format!("it could not begin when its turn came: {}", error.message());
                let outcome = Outcome::Failed { code: FailureCode::NotBegun, detail };
                if let Err(fault) = self.end_waiting(id, &wish, outcome).await {
                    tracing::error!(
                        migration = %id, reason = %fault.message(),
                        "cannot record the end of a queued migration; the next start tries again"
                    );
                }
            }
        }
        let metadata = self.metadata_folder.waiting().into_iter().find(|(waits, _)| *waits == id);
        if let Some((_, metadata)) = metadata {
            self.file(id, metadata).await;
        }
        if is_begun {
            tokio::spawn(Arc::clone(&self).note_forecast(id, order));
        }
        self.queue.leave(id);
        drop(admission);
    }

    /// Returns the order with its strategy, once that is durable: a restart continues the migration by the same one.
    async fn choose_in_turn(self: &Arc<Self>, id: MigrationId, wish: &Wish) -> MigrateVolume {
        let (order, strategy_reason) =
            self.with_strategy(&wish.name, &self.records_of(wish), wish.order.clone()).await;
        let known = self.metadata_folder.waiting().into_iter().find(|(waits, _)| *waits == id);
        let Some((_, known)) = known.filter(|_| !strategy_reason.is_empty()) else { return order };
        let metadata = Metadata { order: Some(order.clone()), strategy_reason, ..known };
        match self.metadata_folder.put(id, metadata).await {
            Ok(()) => order,
            Err(error) => {
                tracing::warn!(migration = %id, %error, "cannot keep the strategy that was chosen; it is mirrored");
                MigrateVolume { strategy: wish.order.strategy.begun(), ..order }
            }
        }
    }

    fn records_of(&self, wish: &Wish) -> Vec<VolumeRecord> {
        self.journal.read(|state| {
            let known = wish.volumes.iter().filter_map(|volume| state.volumes.get(volume));
            known.map(|known| known.record.clone()).collect()
        })
    }

    /// Records why a migration that waited when the last daemon ended cannot begin, so that `migration list` shows it.
    async fn end_hopeless(&self, id: MigrationId, metadata: Metadata, order: MigrateVolume, reason: String) {
        let known = self.journal.read(|state| {
            let known = state
                .volumes
                .values()
                .filter(|known| metadata.volumes.contains(&known.record.volume.to_string()));
            known.map(|known| known.record.clone()).collect::<Vec<_>>()
        });
        let wish = Wish {
            name: metadata.name.clone(),
            volumes: known.iter().map(|record| record.volume).collect(),
            need: Need::default(),
            copied_to: None,
            shown: Box::new(queued(
                &metadata.name,
                &known.first().map_or_else(|| ImageLocation::raw_file("", ""), |record| record.image.clone()),
                &order.to,
                &order,
                metadata.ordered_unix_ms,
            )),
            order,
        };
        let detail = format!("it could not stay in the queue after a restart of the daemon: {reason}");
        let outcome = Outcome::Failed { code: FailureCode::NotBegun, detail };
        if let Err(fault) = self.end_waiting(id, &wish, outcome).await {
            tracing::error!(
                migration = %id, reason = %fault.message(),
                "cannot record the end of a queued migration; the next start tries again"
            );
        }
    }

    /// Records the end of a migration that never began.
    async fn end_waiting(
        &self,
        migration: MigrationId,
        wish: &Wish,
        outcome: Outcome,
    ) -> Result<(), RequestError> {
        let records = self.records_of(wish);
        let target = |record: &VolumeRecord| ImageLocation {
            store: wish.shown.target.store.clone().unwrap_or_default(),
            // N.B. The path is empty, so that no existing file counts as a half-made copy.
            place: Place::File(String::new()),
            format: record.image.format,
        };
        let volumes = records.iter().map(|record| MigratingVolume {
            volume: record.volume,
            source: record.image.clone(),
            target: target(record),
        });
        let started = Record::MigrationStarted {
            migration,
            volumes: volumes.collect(),
            keep_source: wish.order.keep_source,
            side: Side::OneHost,
        };
        let summary = Summary::default();
        let ended = Record::MigrationEnded { migration, outcome, summary };
        self.journal.commit(vec![started, ended]).await?;
        let metadata = self.metadata_folder.waiting().into_iter().find(|(waits, _)| *waits == migration);
        if let Some((_, metadata)) = metadata {
            self.file(migration, metadata).await;
        }
        self.queue.turn();
        Ok(())
    }

    fn volumes_of_vm(&self, name: &str) -> Vec<String> {
        self.vms.get(name).map(|vm| vm.volumes.clone()).unwrap_or_default()
    }

    /// Returns what an order needs, as far as this is known at once.
    pub(crate) fn wish(&self, metadata: &Metadata, order: &MigrateVolume) -> Result<Wish, RequestError> {
        let names = match self.vms.get(&metadata.name) {
            Ok(vm) => vm.volumes.clone(),
            Err(_) => std::iter::once(&metadata.name).chain(&order.together_with).cloned().collect(),
        };
        let records: Vec<VolumeRecord> =
            names.iter().map(|name| self.claims.record_named(name)).collect::<Result<_, _>>()?;
        let first = records.first().ok_or_else(|| RequestError::VolumeNotFound(metadata.name.clone()))?;
        let target = match self.claims.elsewhere(&order.to)? {
            None => order.to.clone(),
            Some(elsewhere) if elsewhere.store.is_empty() => elsewhere.peer.name,
            Some(elsewhere) => format!("{}:{}", elsewhere.peer.name, elsewhere.store),
        };
        let moving: Vec<MigratingVolume> = records
            .iter()
            .map(|record| MigratingVolume {
                volume: record.volume,
                source: record.image.clone(),
                target: ImageLocation { store: target.clone(), ..record.image.clone() },
            })
            .collect();
        let shown = queued(&names.join(", "), &first.image, &target, order, metadata.ordered_unix_ms);
        Ok(Wish {
            name: metadata.name.clone(),
            order: order.clone(),
            volumes: moving.iter().map(|moving| moving.volume).collect(),
            need: Need::of(&moving),
            copied_to: self.claims.copied_to(order)?,
            shown: Box::new(Migration {
                retry_of: metadata.retry_of.map(|id| MigrationId(id).to_string()),
                ..shown
            }),
        })
    }

    /// Refuses at once what would certainly be refused in its turn.
    pub(crate) fn check_patience(&self, wish: &Wish) -> Result<(), RequestError> {
        if self.queue.is_full() {
            return Err(RequestError::QueueFull { waiting: WAITING_MAX });
        }
        for volume in &wish.volumes {
            if let Some(migration) = self.migrations.running_of(*volume) {
                return Err(RequestError::AlreadyMigrating { volume: wish.name.clone(), migration });
            }
        }
        if wish.shown.source.store.as_ref() == Some(&wish.order.to) {
            return Err(RequestError::SameStore { volume: wish.name.clone(), store: wish.order.to.clone() });
        }
        check_rate(wish.order.bandwidth_bytes_per_second)?;
        check_impact(wish.order.impact_percent)
    }
}

/// Refuses a rate of zero, at which nothing would be copied.
pub(crate) fn check_rate(bytes_per_second: Option<u64>) -> Result<(), RequestError> {
    match bytes_per_second {
        Some(0) => Err(RequestError::Invalid("the bandwidth must be more than zero".to_owned())),
        _ => Ok(()),
    }
}

/// Refuses a deadline that cannot be met whatever is done.
pub(crate) fn check_times(order: &MigrateVolume, now_unix_ms: u64) -> Result<(), RequestError> {
    let begins = order.begin_unix_ms.map_or(now_unix_ms, |begins| begins.max(now_unix_ms));
    match order.deadline_unix_ms {
        Some(deadline) if deadline <= now_unix_ms => {
            Err(RequestError::Invalid("the deadline has passed; name a later one, or none".to_owned()))
        }
        Some(deadline) if deadline <= begins => Err(RequestError::Invalid(
            "the deadline comes before the ordered beginning; name a later one, or an earlier beginning"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Refuses an impact that is none.
pub(crate) fn check_impact(percent: Option<u8>) -> Result<(), RequestError> {
    match percent {
        None | Some(1..=90 | api::FULL_SPEED_PERCENT) => Ok(()),
        Some(_) => Err(RequestError::Invalid(
            "the impact is a percentage from 1 to 90 that guests may lose, or 100: copy at full speed"
                .to_owned(),
        )),
    }
}

fn numbered(mut wish: Wish, id: MigrationId) -> Wish {
    wish.shown.id = id.to_string();
    wish
}
