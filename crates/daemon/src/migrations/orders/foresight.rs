//! Forecasts: what to expect of a migration before it begins, and what the ended ones have shown.
//!
//! ```text
//!   dry run ─► foresee: images, guests' writes, what is known of the way ─► the copying run ahead ─► plan
//!   begun ───► the same, kept with its order ─► ended ─► how far it was off ─► what is known of the way
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, Migration, MigrationPlan, Strategy};
use forecast::{Advice, Facts, Question, Window, Written, advise};
use lane::Chunks;
use migration::MigrationId;
use migration::journal::{MigrationState, Side, VolumeRecord};
use migration::source::Moves;

use crate::host::MigrationOrders;
use crate::images::sharing::{self, Within};
use crate::migrations::departures::leave::round_trip;
use crate::migrations::departures::strategies::{choice, held_max};
use crate::migrations::forecasts::{Way, forecast_shown, shown_by};
use crate::migrations::metadata::Metadata;
use crate::migrations::rate_probe;

/// What is known of a migration besides its volumes and its order.
struct Outlook {
    way: Way,
    held_bytes: u64,
    memory_bytes: u64,
    round_trip: Option<Duration>,
    /// A rate that was measured or stated, in bytes a second.
    rate: Option<f64>,
    /// An image and a folder to be probed if no rate is known.
    probed: Option<(PathBuf, PathBuf)>,
}

impl MigrationOrders {
    /// Returns the order with the strategy that these volumes are moved by, and the reason if the daemon has chosen it. `name` is
    /// the volume or the VM of the order.
    pub(super) async fn with_strategy(
        self: &Arc<Self>,
        name: &str,
        records: &[VolumeRecord],
        order: MigrateVolume,
    ) -> (MigrateVolume, String) {
        if order.strategy != Strategy::Auto {
            return (order, String::new());
        }
        let leaves_host = self.claims.elsewhere(&order.to).ok().flatten().is_some();
        let in_rounds = MigrateVolume { strategy: Strategy::Tracking, ..order.clone() };
        let (written, outlook) = match leaves_host {
            true => (self.written(records).await, self.outlook(name, records, &order).await),
            false => (Written::default(), Outlook::of(self.way(records, &order))),
        };
        let question = question(&written, &in_rounds, &outlook);
        let (route, limit) = (self.forecasts.of(&outlook.way), limit(&order));
        let chosen = tokio::task::spawn_blocking(move || {
            let rate = route.rate().or(outlook.rate);
            let capped = rate.map(|rate| limit.map_or(rate, |limit| rate.min(limit)));
            let facts = Facts {
                leaves_host,
                written: written.bytes_per_second(),
                rate: capped,
                downtime_max: question.downtime_max,
            };
            advise(&facts, || route.forecast(&question, rate, limit))
        });
        let Ok((advice, reason)) = chosen.await else {
            return (MigrateVolume { strategy: order.strategy.begun(), ..order }, String::new());
        };
        let strategy = match advice {
            Advice::Mirror => Strategy::Mirror,
            Advice::Tracking => Strategy::Tracking,
        };
        // A forecast may be wrong, and guests may change what they do.
        let or_mirror = strategy == Strategy::Tracking;
        (MigrateVolume { strategy, or_mirror, ..order }, reason)
    }

    /// Adds to a dry run what to expect.
    pub(super) async fn forecast_plan(
        self: &Arc<Self>,
        records: &[VolumeRecord],
        order: &MigrateVolume,
        plan: &mut MigrationPlan,
    ) {
        let held_bytes = plan.volumes.iter().map(|volume| volume.held_bytes).sum();
        let round_trip = plan.links.iter().filter_map(|link| link.round_trip_us).max();
        let target = plan.volumes.first().and_then(|volume| volume.target.as_ref());
        let folder = target.filter(|target| target.kind == api::ImageKind::File && plan.host.is_none());
        let folder = folder.and_then(|target| Path::new(&target.image).parent());
        let image = records.first().and_then(|record| record.image.place.file());
        let outlook = Outlook {
            way: self.way(records, order),
            held_bytes,
            memory_bytes: plan.machine.as_ref().and_then(|vm| vm.memory_bytes).unwrap_or_default(),
            round_trip: plan.host.as_ref().map(|_| Duration::from_micros(round_trip.unwrap_or_default())),
            rate: plan.bytes_per_second.filter(|_| plan.host.is_some()).map(|rate| rate as f64),
            probed: image.map(PathBuf::from).zip(folder.map(PathBuf::from)),
        };
        plan.forecast = self.foresee(self.written(records).await, order, outlook).await;
        if let Some(forecast) = plan.forecast.filter(|forecast| forecast.ends_percent < 90) {
            plan.warnings.push(format!(
                "it may not end: guests write nearly as fast as it copies, or faster ({} of 100 runs ended); the strategy mirror always ends",
                forecast.ends_percent
            ));
        }
    }

    /// Keeps with a migration that has just begun what is expected of it.
    pub(super) async fn note_forecast(self: Arc<Self>, migration: MigrationId, order: MigrateVolume) {
        let known = self.journal.read(|state| state.migrations.get(&migration).cloned());
        let Some(known) = known else { return };
        if self.is_cloned(&known, &order).await {
            return;
        }
        let records: Vec<VolumeRecord> =
            known.names.iter().filter_map(|name| self.claims.record_named(name).ok()).collect();
        let name = known.names.first().map_or("", String::as_str);
        let outlook = self.outlook(name, &records, &order).await;
        let written = self.written(&records).await;
        let load = written.bytes_per_second();
        let forecast = self.foresee(written, &order, outlook).await;
        let note = |metadata: &mut Metadata| {
            (metadata.forecast, metadata.load_bytes_per_second) = (forecast, load);
        };
        self.metadata_folder.note(migration, known.started_unix_ms, note).await;
    }

    /// Returns whether the chunks of a migration are cloned: what is known of its way is how fast the disks are.
    async fn is_cloned(&self, known: &MigrationState, order: &MigrateVolume) -> bool {
        let (Side::OneHost, Some(moving)) = (&known.side, known.volumes.first().cloned()) else {
            return false;
        };
        let (stores, allocation) = (Arc::clone(&self.stores), order.allocation.into());
        let chunks = move || {
            sharing::chunks(&stores, &Within { from: &moving.source, to: &moving.target, allocation })
        };
        tokio::task::spawn_blocking(chunks).await.is_ok_and(|chunks| chunks == Chunks::Cloned)
    }

    /// Returns what is known of a migration that begins at once.
    async fn outlook(&self, name: &str, records: &[VolumeRecord], order: &MigrateVolume) -> Outlook {
        let memory_bytes = match self.vms.qemu(name).ok() {
            Some(vm) => vm.memory_bytes().await.unwrap_or_default(),
            None => 0,
        };
        let elsewhere = self.claims.elsewhere(&order.to).ok().flatten();
        let session = elsewhere.and_then(|elsewhere| self.hosts.session(&elsewhere.peer).ok());
        Outlook {
            held_bytes: self.departures.held_bytes(records).await.into_iter().sum(),
            memory_bytes,
            round_trip: session.as_ref().map(round_trip),
            rate: session
                .and_then(|session| {
                    session.status().connections.iter().map(|link| link.bytes_per_second).sum::<Option<u64>>()
                })
                .map(|rate| rate as f64)
                .filter(|rate| *rate > 0.0),
            ..Outlook::of(self.way(records, order))
        }
    }

    /// Learns from a migration that has ended.
    pub(super) async fn learn_from(
        self: &Arc<Self>,
        migration: MigrationId,
        known: &MigrationState,
        ended: &Migration,
    ) {
        if ended.bytes_cloned > 0 {
            let note = |metadata: &mut Metadata| metadata.copy.bytes_cloned = ended.bytes_cloned;
            self.metadata_folder.note(migration, known.started_unix_ms, note).await;
        }
        let metadata = self.metadata_folder.of(migration, known.started_unix_ms);
        let Some(metadata) = metadata else { return };
        let Some(order) = metadata.order else { return };
        let was_limited = order.bandwidth_bytes_per_second.is_some() || order.deadline_unix_ms.is_some();
        let Some(sample) = shown_by(ended, metadata.load_bytes_per_second, was_limited) else { return };
        let from = ended.source.store.as_deref().unwrap_or_default();
        let way = Way::new(from, &order.to, self.runner.impact(&order).is_some());
        let forecasts = Arc::clone(&self.forecasts);
        // A failure to keep it is logged there.
        let _ = tokio::task::spawn_blocking(move || forecasts.learn(&way, sample)).await;
    }

    fn way(&self, records: &[VolumeRecord], order: &MigrateVolume) -> Way {
        let from = records.first().map_or("", |record| record.image.store.as_str());
        Way::new(from, &order.to, self.runner.impact(order).is_some())
    }

    async fn foresee(
        self: &Arc<Self>,
        written: Written,
        order: &MigrateVolume,
        outlook: Outlook,
    ) -> Option<api::Forecast> {
        let question = question(&written, order, &outlook);
        let (route, limit) = (self.forecasts.of(&outlook.way), limit(order));
        let forecast = move || {
            let is_new = route.rate().is_none() && outlook.rate.is_none();
            let probed = outlook
                .probed
                .filter(|_| is_new)
                .and_then(|(image, folder)| rate_probe::rate(&image, &folder));
            let rate = outlook.rate.or(probed).or(limit);
            let forecast = route.forecast(&question, rate, limit)?;
            Some(forecast_shown(&forecast, probed.is_some()))
        };
        tokio::task::spawn_blocking(forecast).await.ok().flatten()
    }

    /// Returns what the guests of these volumes wrote lately, together.
    async fn written(&self, records: &[VolumeRecord]) -> Written {
        let mut all = Written::default();
        for record in records {
            let Ok(lane) = self.volumes.lane(&record.name).await else { continue };
            let Ok(written) = lane.written().await else { continue };
            for (sum, window) in all.windows.iter_mut().zip(written.windows) {
                *sum = Window {
                    seconds: sum.seconds.max(window.seconds),
                    distinct_bytes: sum.distinct_bytes + window.distinct_bytes,
                    bytes: sum.bytes + window.bytes,
                    writes: sum.writes + window.writes,
                };
            }
        }
        all
    }
}

impl Outlook {
    /// Knows the way only.
    fn of(way: Way) -> Self {
        Self { way, held_bytes: 0, memory_bytes: 0, round_trip: None, rate: None, probed: None }
    }
}

fn question(written: &Written, order: &MigrateVolume, outlook: &Outlook) -> Question {
    let moves = if outlook.memory_bytes > 0 { Moves::Vm } else { Moves::Volumes };
    Question {
        held_bytes: outlook.held_bytes,
        written: *written,
        choice: choice(order),
        round_trip: outlook.round_trip,
        downtime_max: held_max(order, moves),
        memory_bytes: outlook.memory_bytes,
    }
}

fn limit(order: &MigrateVolume) -> Option<f64> {
    order.bandwidth_bytes_per_second.map(|limit| limit as f64)
}
