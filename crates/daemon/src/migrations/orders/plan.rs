//! A dry run: shows what a migration would do, and everything that is in its way. Nothing is begun, and nothing is left.
//!
//! ```text
//!   order ──► who moves ──► turn, volumes, VM ──┬─ a store here ──► its place
//!                                               └─ another host ──► ahead.rs, both sides
//!          ──► refusals, warnings, bytes, links, time
//! ```

mod read_only;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{
    ErrorDetail, Memory, MigrateVolume, MigrationPlan, PlannedLink, PlannedMachine, PlannedVolume, RateOrigin,
};
use block::held::ByName;
use block::store::qcow2::TopLayer;
use hypervisor::qemu::Qemu;
use migration::journal::{ImageFormat, VolumeRecord};
use migration::queue::Turn;
use migration::vm::cold::Form;
use migration::wire::Surveyed;
use transport::Session;

use crate::error::RequestError;
use crate::host::{MigrationOrders, blocking};
use crate::images::sharing::{self, WhyCopied, Within};
use crate::journal::now_unix_ms;
use crate::migrations::departures::ahead::{AheadVm, Thoroughness, milliseconds};
use crate::migrations::departures::strategies::{check_strategy, check_strategy_here};
use crate::migrations::metadata::Metadata;
use crate::migrations::orders::migrate::{allocated_bytes, check_has_no_memory};
use crate::migrations::orders::queued::{check_impact, check_rate, check_times};
use crate::migrations::orders::together::only_to_a_host;
use crate::migrations::queue::place_shown;
use crate::migrations::view::image_location;
use crate::stores::LateDisk;
use crate::vms::orders::adopted::connect_to_move;
use crate::vms::orders::cold::check_cold_order;
use crate::vms::orders::move_vm::{check_order, check_post_copy, downtime_max, no_volumes, not_to_a_store};
use crate::vms::{Adopted, Extent};
use crate::volumes::claims::Elsewhere;
use crate::volumes::claims::within::check_moves_whole;

/// The VM of a dry run.
enum Company {
    /// A VM that Sterna runs.
    Ours(Arc<Qemu>),
    /// A VM whose disks were adopted, and what of it would stay behind.
    Adopted(Arc<Qemu>, String),
    /// A stopped VM, which has no QEMU.
    Cold,
}

impl MigrationOrders {
    /// Returns what a migration would do. Fails only if the named volume or VM does not exist.
    pub(crate) async fn plan_migration(
        self: Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<MigrationPlan, RequestError> {
        let elsewhere = self.claims.elsewhere(&order.to)?;
        let adopted = self.vms.adoptions()?.get(&name).filter(|_| elsewhere.is_some());
        let means_vm = self.means_vm(&name, &order)?;
        let ours = self.vms.get(&name).ok().filter(|_| adopted.is_none() && means_vm);
        let names = match (&ours, &adopted) {
            (Some(known), _) => known.volumes.clone(),
            (_, Some(adopted)) => adopted.disks.iter().map(|disk| disk.volume.clone()).collect(),
            (None, None) => {
                self.check_is_volume(&name, &order)?;
                self.names_together(&name, &order)?
            }
        };
        let records: Vec<VolumeRecord> =
            names.iter().map(|name| self.claims.record_named(name)).collect::<Result<_, _>>()?;
        let (order, strategy_reason) = self.with_strategy(&name, &records, order).await;
        let mut plan = sketch(&name, &records);
        (plan.strategy, plan.strategy_reason) = (order.strategy, strategy_reason);
        check_rate(order.bandwidth_bytes_per_second).unwrap_or_else(|error| plan.refuse(&error));
        check_impact(order.impact_percent).unwrap_or_else(|error| plan.refuse(&error));
        check_times(&order, now_unix_ms()).unwrap_or_else(|error| plan.refuse(&error));
        self.check_may_leave(&names, &order).unwrap_or_else(|error| plan.refuse(&error));
        check_strategy(&order).unwrap_or_else(|error| plan.refuse(&error));
        if ours.is_none() && adopted.is_none() {
            check_has_no_memory(&name, &order).unwrap_or_else(|error| plan.refuse(&error));
        }
        self.plan_turn(&name, &order, &mut plan);
        self.plan_volumes(&records, &mut plan).await;
        self.warn_of_chains(&records, &order, &mut plan).await;
        match elsewhere {
            None if ours.is_some() => plan.refuse(&not_to_a_store(&names, &order)),
            None if names.len() > 1 => plan.refuse(&only_to_a_host(&order)),
            None => {
                check_strategy_here(&order).unwrap_or_else(|error| plan.refuse(&error));
                self.plan_here(&records, &order, &mut plan).await;
            }
            Some(elsewhere) => {
                let company = match (ours.is_some(), adopted) {
                    (true, _) => self.plan_vm(&name, &mut plan).await,
                    (false, Some(adopted)) => self.plan_adopted(&adopted, &mut plan).await,
                    (false, None) => None,
                };
                let wants_company = ours.is_some() || company.is_some();
                self.plan_away(&records, elsewhere, &order, company, &mut plan).await;
                if wants_company && records.is_empty() {
                    plan.refuse(&no_volumes(&name));
                }
            }
        }
        self.warn_of_disks(&order, &mut plan).await;
        plan.estimate(&order);
        // The forecast knows how fast disks copy, and a clone copies nothing.
        if !plan.volumes.iter().any(|volume| volume.replica && !order.full || volume.cloned) {
            self.forecast_plan(&records, &order, &mut plan).await;
        }
        plan.can_begin = plan.refusals.is_empty();
        Ok(plan)
    }

    /// Adds to the plan whether the migration would have to wait.
    fn plan_turn(&self, name: &str, order: &MigrateVolume, plan: &mut MigrationPlan) {
        let metadata = Metadata { name: name.to_owned(), ..Metadata::default() };
        let Ok(wish) = self.wish(&metadata, order) else { return };
        match self.queue.outlook(&wish, || self.migrations.under_way(&self.journal)) {
            Turn::Now(()) => {}
            Turn::Waits(migration) => {
                plan.refuse(&RequestError::AlreadyMigrating { volume: name.to_owned(), migration });
            }
            Turn::Later(place) => {
                if let Err(error) = self.check_patience(&wish) {
                    plan.refuse(&error);
                }
                plan.queue = Some(place_shown(place));
            }
        }
    }

    /// Adds to the plan whether the volumes are available, and what they hold.
    async fn plan_volumes(self: &Arc<Self>, records: &[VolumeRecord], plan: &mut MigrationPlan) {
        for record in records {
            let (volume, name) = (record.volume, &record.name);
            self.claims.settled(name).await;
            let at_hand = match (self.migrations.running_of(volume), self.volumes.claim(name)) {
                (Some(migration), _) => {
                    Err(RequestError::AlreadyMigrating { volume: name.clone(), migration })
                }
                (None, Err(error)) => Err(error),
                // The claim is released at once.
                (None, Ok(claim)) => {
                    drop(claim);
                    self.volumes.lane(name).await.map(drop)
                }
            };
            at_hand.unwrap_or_else(|error| plan.refuse(&error));
            self.claims.refuse_suspended(name).unwrap_or_else(|error| plan.refuse(&error));
            check_moves_whole(record.clone()).await.unwrap_or_else(|error| plan.refuse(&error));
        }
        self.plan_read_only(records, plan).await;
        let held = self.departures.held_bytes(records).await;
        for (planned, held) in plan.volumes.iter_mut().zip(held) {
            planned.held_bytes = held;
        }
    }

    /// Warns of images with backing files: their copies have none.
    async fn warn_of_chains(
        &self,
        records: &[VolumeRecord],
        order: &MigrateVolume,
        plan: &mut MigrationPlan,
    ) {
        if order.keep_chain {
            return;
        }
        let records = records.to_vec();
        let chained = blocking(move || {
            let has_chain = |record: &&VolumeRecord| match (record.image.format, record.image.place.file()) {
                (ImageFormat::Qcow2, Some(path)) => {
                    TopLayer::of(Path::new(path), &ByName).is_ok_and(|top| top.backing.is_some())
                }
                _ => false,
            };
            Ok(records.iter().filter(has_chain).map(|record| record.name.clone()).collect::<Vec<_>>())
        });
        plan.warnings.extend(chained.await.unwrap_or_default().into_iter().map(|name| {
            format!(
                "the image of \"{name}\" has backing files: its visible content moves into one new image, with more bytes than \
                 are counted here"
            )
        }));
    }

    /// Warns that guests may wait behind a copy without a bandwidth limit.
    async fn warn_of_disks(&self, order: &MigrateVolume, plan: &mut MigrationPlan) {
        if order.bandwidth_bytes_per_second.is_some_and(|rate| rate > 0) {
            return;
        }
        let sources = plan.volumes.iter().map(|volume| &volume.source);
        let targets = plan.volumes.iter().filter_map(|volume| volume.target.as_ref());
        let here = sources.chain(targets.filter(|_| plan.host.is_none()));
        let here = here.filter(|image| image.kind != api::ImageKind::Nbd);
        let here: Vec<PathBuf> = here.map(|image| PathBuf::from(&image.image)).collect();
        let late = blocking(move || {
            let mut late: Vec<String> = Vec::new();
            for disk in here.iter().filter_map(|image| LateDisk::below(image)) {
                let said = disk.to_string();
                if !late.contains(&said) {
                    late.push(said);
                }
            }
            Ok(late)
        });
        plan.warnings.extend(late.await.unwrap_or_default());
    }

    async fn plan_vm(self: &Arc<Self>, name: &str, plan: &mut MigrationPlan) -> Option<Company> {
        let looked = async {
            drop(self.vms.operate(name)?);
            if self.vms.form(name)? == Form::Cold {
                return Ok(Company::Cold);
            }
            Ok::<_, RequestError>(Company::Ours(self.vms.qemu(name)?))
        };
        let company = looked.await.map_err(|error| plan.refuse(&error)).ok()?;
        if let Company::Ours(vm) = &company {
            // The other host is asked also if the VM cannot move yet: all obstacles are shown at once.
            let checked = match self.vms.adoptions() {
                Ok(known) => self.vm_orders.check_movable(name, vm, known.get(name).as_ref()).await,
                Err(error) => Err(error.into()),
            };
            checked.unwrap_or_else(|error| plan.refuse(&error));
            self.vm_orders.check_tpm(name).unwrap_or_else(|error| plan.refuse(&error));
        }
        Some(company)
    }

    async fn plan_adopted(self: &Arc<Self>, adopted: &Adopted, plan: &mut MigrationPlan) -> Option<Company> {
        let looked = async {
            self.vm_orders.refuse_domain(adopted)?;
            connect_to_move(adopted).await
        };
        let vm = looked.await.map_err(|error| plan.refuse(&error)).ok()?;
        let (derived, obstacles) = self.vm_orders.obstacles_here(adopted, &vm).await;
        obstacles.iter().for_each(|error| plan.refuse(error));
        let derived = derived?;
        plan.warnings.extend(derived.left_behind.iter().map(|what| format!("stays behind: {what}")));
        Some(Company::Adopted(Arc::new(vm), derived.text))
    }

    async fn plan_here(
        self: &Arc<Self>,
        records: &[VolumeRecord],
        order: &MigrateVolume,
        plan: &mut MigrationPlan,
    ) {
        for (record, planned) in records.iter().zip(0..) {
            let looked = async {
                self.check_move_here(record, order)?;
                let wanted = self.departures.wanted_here(record, order).await?;
                let (host, copied, from) = (Arc::clone(self), record.clone(), record.image.clone());
                blocking(move || {
                    let (claim, looked) = host.serving.look_at_place(&wanted, || allocated_bytes(&copied))?;
                    drop(claim);
                    let space = host.stores.get(&wanted.store)?.space().ok().flatten();
                    let (to, allocation) = (&looked.location, looked.allocation);
                    let within = Within { from: &from, to, allocation };
                    let way = sharing::find_out(&host.stores, &within);
                    Ok((looked.location, space.map(|space| space.free), way))
                })
                .await
            };
            match looked.await {
                Ok((location, free, way)) => {
                    plan.place(planned, image_location(&location), free);
                    plan.show_way(planned, way.err());
                }
                Err(error) => plan.refuse(&error),
            }
        }
        plan.warn_of_source(order);
    }

    async fn plan_away(
        self: &Arc<Self>,
        records: &[VolumeRecord],
        elsewhere: Elsewhere,
        order: &MigrateVolume,
        company: Option<Company>,
        plan: &mut MigrationPlan,
    ) {
        plan.host = Some(elsewhere.peer.name.clone());
        check_order_elsewhere(order).unwrap_or_else(|error| plan.refuse(&error));
        let session = match self.hosts.session(&elsewhere.peer) {
            Ok(session) => session,
            Err(error) => return plan.refuse(&error.into()),
        };
        if let Err(error) = self.departures.reach(&session, &elsewhere.peer).await {
            return plan.refuse(&error);
        }
        let vm = match company {
            None => None,
            Some(company) => self.plan_company(company, order, plan).await,
        };
        let thorough = Thoroughness::DryRun;
        let ahead =
            self.departures.look_ahead(&session, records, &elsewhere, order, vm.as_ref(), thorough).await;
        for refusal in &ahead.refusals {
            plan.refuse(refusal);
        }
        plan.warnings.extend(ahead.warnings);
        if let Some(vm) = &mut plan.machine {
            vm.least_downtime_ms = ahead.stand_min.map(milliseconds);
        }
        if let Some(surveyed) = &ahead.surveyed {
            plan.place_there(&elsewhere.peer.name, records, surveyed);
            self.departures.plan_sharing(&session, records, order, surveyed, plan).await;
        }
        plan.add_links(&session);
        self.plan_rate(&elsewhere, plan);
        plan.warn_of_source(order);
        self.warn_of_clients(records, plan).await;
    }

    /// Adds what the target host must know of the VM.
    async fn plan_company(
        self: &Arc<Self>,
        company: Company,
        order: &MigrateVolume,
        plan: &mut MigrationPlan,
    ) -> Option<AheadVm> {
        let name = plan.name.clone();
        let (vm, text) = match company {
            Company::Ours(vm) => (vm, None),
            Company::Adopted(vm, text) => (vm, Some(text)),
            Company::Cold => return self.plan_cold(name, order, plan).await,
        };
        let held = plan.volumes.iter().map(|volume| (volume.name.clone(), volume.held_bytes)).collect();
        plan.machine = Some(PlannedMachine {
            name: name.clone(),
            stopped: false,
            memory_bytes: vm.memory_bytes().await.ok(),
            max_downtime_ms: Some(u64::try_from(downtime_max(order).as_millis()).unwrap_or(u64::MAX)),
            least_downtime_ms: None,
        });
        check_order(order).unwrap_or_else(|error| plan.refuse(&error));
        if order.memory == Memory::PostCopy {
            // Whether the QEMU at the target supports it is checked there, with the VM's needs.
            check_post_copy(&name, &*vm).await.unwrap_or_else(|error| plan.refuse(&error));
            plan.warnings.push(Memory::POST_COPY_PRICE.to_owned());
        }
        let downtime_max = downtime_max(order);
        match self.vms.announcement(&name, text, &vm, order.memory, held).await {
            Ok(manifest) => Some(AheadVm { name, downtime_max: Some(downtime_max), manifest }),
            Err(error) => {
                plan.refuse(&error.into());
                None
            }
        }
    }

    /// Does the same for a stopped VM.
    async fn plan_cold(
        self: &Arc<Self>,
        name: String,
        order: &MigrateVolume,
        plan: &mut MigrationPlan,
    ) -> Option<AheadVm> {
        plan.machine = Some(PlannedMachine {
            name: name.clone(),
            stopped: true,
            memory_bytes: None,
            max_downtime_ms: None,
            least_downtime_ms: None,
        });
        for checked in [check_order(order), check_cold_order(&name, order)] {
            checked.unwrap_or_else(|error| plan.refuse(&error));
        }
        match self.vm_orders.describe_cold(&name, Extent::Needs).await {
            Ok(manifest) => Some(AheadVm { name, downtime_max: None, manifest }),
            Err(error) => {
                plan.refuse(&error);
                None
            }
        }
    }

    /// Adds the speed of the links: as measured, or as configured.
    fn plan_rate(&self, elsewhere: &Elsewhere, plan: &mut MigrationPlan) {
        let measured: Option<u64> = plan.links.iter().map(|link| link.bytes_per_second).sum();
        let stated = |links: &[transport::Link]| {
            let speeds: Option<u64> = links.iter().map(|link| link.speed_bits_per_second).sum();
            speeds.filter(|speed| *speed > 0)
        };
        let ends = [stated(&self.config.hosts.links), stated(&elsewhere.peer.links)];
        let stated = ends.into_iter().flatten().min().map(|bits| bits / 8);
        (plan.bytes_per_second, plan.rate) = match (measured.filter(|rate| *rate > 0), stated) {
            (Some(rate), _) => (Some(rate), Some(RateOrigin::Measured)),
            (None, Some(rate)) => (Some(rate), Some(RateOrigin::Stated)),
            (None, None) => (None, None),
        };
    }

    /// Warns that clients which stay connected are forwarded at a cost.
    async fn warn_of_clients(&self, records: &[VolumeRecord], plan: &mut MigrationPlan) {
        if plan.machine.is_some() {
            return;
        }
        let round_trip_us = plan.links.iter().filter_map(|link| link.round_trip_us).max();
        let Some(round_trip_us) = round_trip_us else { return };
        for record in records {
            let Ok(volume) = self.views.describe_volume(&record.name).await else { continue };
            let connections = volume.statistics.map_or(0, |statistics| statistics.connections);
            if connections > 0 {
                let (clients, are) = match connections {
                    1 => ("client", "stays connected here is"),
                    _ => ("clients", "stay connected here are"),
                };
                plan.warnings.push(format!(
                    "{connections} {clients} of \"{}\" that {are} served from the other host afterwards: each request takes \
                     {:.1} ms longer",
                    record.name,
                    round_trip_us as f64 / 1000.0
                ));
            }
        }
    }
}

/// Refuses options that moves between hosts do not have.
pub(crate) fn check_order_elsewhere(order: &MigrateVolume) -> Result<(), RequestError> {
    match order.keep_chain {
        false => Ok(()),
        true => {
            let text = "a chain cannot be kept at another host; leave --keep-chain out";
            Err(RequestError::Invalid(text.to_owned()))
        }
    }
}

fn sketch(name: &str, records: &[VolumeRecord]) -> MigrationPlan {
    let volume = |record: &VolumeRecord| PlannedVolume {
        name: record.name.clone(),
        size_bytes: record.size_bytes,
        held_bytes: record.size_bytes,
        source: image_location(&record.image),
        target: None,
        free_bytes: None,
        replica: false,
        shared: false,
        cloned: false,
        copied_because: None,
    };
    MigrationPlan {
        name: name.to_owned(),
        can_begin: false,
        refusals: Vec::new(),
        warnings: Vec::new(),
        host: None,
        volumes: records.iter().map(volume).collect(),
        machine: None,
        bytes_max: 0,
        strategy: api::Strategy::default(),
        strategy_reason: String::new(),
        links: Vec::new(),
        bytes_per_second: None,
        rate: None,
        forecast: None,
        queue: None,
    }
}

trait Draw {
    fn refuse(&mut self, error: &RequestError);
    fn place(&mut self, volume: usize, target: api::ImageLocation, free_bytes: Option<u64>);
    /// Shows that the volume would be cloned, or why it would be copied.
    fn show_way(&mut self, volume: usize, why_copied: Option<WhyCopied>);
    fn place_there(&mut self, host: &str, records: &[VolumeRecord], surveyed: &Surveyed);
    fn add_links(&mut self, session: &Session);
    fn warn_of_source(&mut self, order: &MigrateVolume);
    fn estimate(&mut self, order: &MigrateVolume);
}

impl Draw for MigrationPlan {
    fn refuse(&mut self, error: &RequestError) {
        let refusal = ErrorDetail { code: error.code(), message: error.message() };
        // Two checks may find the same problem.
        if !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    fn place(&mut self, volume: usize, target: api::ImageLocation, free_bytes: Option<u64>) {
        if let Some(planned) = self.volumes.get_mut(volume) {
            (planned.target, planned.free_bytes) = (Some(target), free_bytes);
        }
    }

    fn show_way(&mut self, volume: usize, why_copied: Option<WhyCopied>) {
        if let Some(planned) = self.volumes.get_mut(volume) {
            planned.cloned = why_copied.is_none();
            planned.copied_because = why_copied.map(|why| why.to_string());
        }
    }

    fn place_there(&mut self, host: &str, records: &[VolumeRecord], surveyed: &Surveyed) {
        for place in &surveyed.places {
            let found = records.iter().position(|record| record.volume == place.volume);
            let Some(planned) = found.and_then(|volume| self.volumes.get_mut(volume)) else { continue };
            planned.target = Some(api::ImageLocation {
                store: Some(format!("{host}:{}", place.store)),
                image: place.place.clone(),
                kind: match place.place.as_str() {
                    device if device.starts_with("/dev/") => api::ImageKind::Device,
                    file if file.starts_with('/') => api::ImageKind::File,
                    _ => api::ImageKind::Nbd,
                },
                format: match place.format {
                    ImageFormat::Raw => api::ImageFormat::Raw,
                    ImageFormat::Qcow2 => api::ImageFormat::Qcow2,
                },
            });
            planned.free_bytes = place.free_bytes;
            planned.replica = place.has_replica;
        }
    }

    fn add_links(&mut self, session: &Session) {
        let up = session.status().connections.into_iter().filter(|connection| connection.is_up);
        self.links = up
            .map(|connection| PlannedLink {
                local: connection.local,
                remote: connection.remote,
                round_trip_us: connection.round_trip.map(microseconds),
                bytes_per_second: connection.bytes_per_second,
            })
            .collect();
    }

    fn warn_of_source(&mut self, order: &MigrateVolume) {
        for volume in &self.volumes {
            let (name, image) = (&volume.name, &volume.source.image);
            match (volume.source.kind, order.keep_source) {
                (api::ImageKind::File, true) => self.warnings.push(format!(
                    "the old image of \"{name}\" is kept, and keeps {} bytes of its store",
                    volume.held_bytes
                )),
                (api::ImageKind::File, false) => {}
                _ => self.warnings.push(format!(
                    "{image} still holds the old copy of \"{name}\" afterwards, and is fenced"
                )),
            }
        }
    }

    fn estimate(&mut self, order: &MigrateVolume) {
        let copied = self.volumes.iter().filter(|volume| !volume.cloned);
        let volumes: u64 = copied.map(|volume| volume.held_bytes).sum();
        let memory = self.machine.as_ref().and_then(|vm| vm.memory_bytes).unwrap_or(0);
        self.bytes_max = volumes.saturating_add(memory);
        if let Some(ordered) = order.bandwidth_bytes_per_second.filter(|rate| *rate > 0)
            && self.bytes_per_second.is_none_or(|rate| ordered < rate)
        {
            (self.bytes_per_second, self.rate) = (Some(ordered), Some(RateOrigin::Ordered));
        }
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
