//! Describes the host, its stores and its volumes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::{MissingRange, VolumeCreation, VolumeFilling, VolumeState, VolumeStatistics};
use block::ByteRange;
use lane::LaneStatus;
use migration::filling::UNIT_BYTES;
use migration::journal::{ExportAccess, MigrationState, Place, Side, State, VolumeRecord};
use migration::{VolumeId, promotion};
use tokio::sync::Semaphore;

use crate::custody::Custody;
use crate::error::RequestError;
use crate::files::sockets::{SocketFolder, volume_uri};
use crate::host::{Exports, Parts};
use crate::hosts::Hosts;
use crate::images;
use crate::journal::Journal;
use crate::migrations::registry::Migrations;
use crate::migrations::view::image_location;
use crate::stores::{Store, StoreKind, Stores, Unclaimed};
use crate::volumes::registry::{Service, Volumes};

/// How long a lane or a store may take to answer before its part of a description is left out. So one hanging disk does not
/// hide the rest of the host.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Describes volumes and stores.
pub(crate) struct VolumeViews {
    pub(crate) journal: Journal,
    pub(crate) custody: Custody,
    pub(crate) stores: Arc<Stores>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) sockets: Arc<SocketFolder>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) looks: Arc<Semaphore>,
    pub(crate) exports: Arc<Exports>,
}

impl VolumeViews {
    pub(crate) fn new(parts: &Parts, exports: &Arc<Exports>) -> Arc<Self> {
        let Parts { journal, custody, stores, volumes, migrations, sockets, hosts, looks, .. } =
            parts.clone();
        Arc::new(Self {
            journal,
            custody,
            stores,
            volumes,
            migrations,
            sockets,
            hosts,
            looks,
            exports: Arc::clone(exports),
        })
    }

    pub(crate) async fn describe_stores(self: &Arc<Self>) -> Vec<api::Store> {
        let names: Vec<String> = self.stores.iter().map(|store| store.name().to_owned()).collect();
        let stores = names.into_iter().map(|name| self.describe_store(name));
        futures_util::future::join_all(stores).await
    }

    pub(crate) async fn describe_volumes(&self) -> Vec<api::Volume> {
        let volumes = self.all_volumes().into_iter();
        futures_util::future::join_all(
            volumes.map(|(name, volume, service)| self.describe_one(name, volume, service)),
        )
        .await
    }

    /// Returns the served volumes, the complete copies that wait here without being served, and the volumes that left for a host
    /// which does not end that and that no lane waits for.
    pub(crate) fn all_volumes(&self) -> Vec<(String, Option<VolumeId>, Service)> {
        let mut volumes = self.volumes.list();
        let stranded = self.journal.read(|state| {
            let waiting = promotion::waiting(state).filter_map(|(waiting, recorded)| {
                let (_, source) = recorded.side.peer()?;
                let copies = recorded.names.iter().zip(&waiting.generations);
                let described = copies.map(|(name, (volume, _))| {
                    (name.clone(), Some(*volume), Service::Waiting(waiting.advice(name, source)))
                });
                Some(described.collect::<Vec<_>>())
            });
            let departed = promotion::departures(state).flat_map(|departed| {
                let described = departed.volumes.iter().map(|record| {
                    (record.name.clone(), Some(record.volume), Service::Waiting(departed.advice()))
                });
                described.collect::<Vec<_>>()
            });
            waiting.flatten().chain(departed).collect::<Vec<_>>()
        });
        for copy in stranded {
            if volumes.iter().all(|(name, _, _)| *name != copy.0) {
                volumes.push(copy);
            }
        }
        volumes.sort_by(|one, other| one.0.cmp(&other.0));
        volumes
    }

    fn snapshot_of(&self, volume: VolumeId) -> Option<api::SnapshotOf> {
        let taken = self.journal.read(|state| state.snapshots.get(&volume).cloned())?;
        Some(api::SnapshotOf {
            volume: taken.name,
            volume_id: taken.volume.to_string(),
            label: taken.label,
            taken_unix_ms: taken.taken_unix_ms,
            group: VolumeId(taken.group).to_string(),
        })
    }

    /// Describes one volume, or fails with [`RequestError::VolumeNotFound`].
    pub(crate) async fn describe_volume(&self, name: &str) -> Result<api::Volume, RequestError> {
        let found = self.all_volumes().into_iter().find(|(found, _, _)| found == name);
        let (name, volume, service) = found.ok_or_else(|| RequestError::VolumeNotFound(name.to_owned()))?;
        Ok(self.describe_one(name, volume, service).await)
    }

    pub(crate) async fn describe_store(self: &Arc<Self>, name: String) -> api::Store {
        let sizes: Vec<u64> = self.journal.read(|state| {
            let here = state.volumes.values().filter(|volume| volume.record.image.store == name);
            here.map(|volume| volume.record.size_bytes).collect()
        });
        let host = Arc::clone(self);
        let asked = name.clone();
        let space = answer(&self.looks, move || {
            let store = host.stores.get(&asked)?;
            let space = store.space().map_err(|error| error.to_string());
            let is_read_only =
                space.as_ref().is_ok_and(|space| space.is_some_and(|space| space.is_read_only));
            let read_only = is_read_only.then(|| store.read_only_problem().to_string());
            let known = host.journal.read(State::clone);
            let mut unclaimed = store.unclaimed_images(&known).unwrap_or_default();
            if let StoreKind::Folder { folder, .. } = store.kind() {
                let is_given_up =
                    |image: &String| host.custody.given_up(&folder.path().join(image)).is_some();
                unclaimed.unused.retain(|image| !is_given_up(image));
            }
            Ok((space, read_only, unclaimed, store.late_disk()))
        });
        let found = self.stores.get(&name).ok();
        let (kind, path) = found.map(store_kind).unwrap_or_default();
        let occupant = found.and_then(|store| self.journal.read(|state| store.occupant(state)));
        let unseen = |why: String| (Err(why), None, Unclaimed::default(), None);
        let (space, read_only, unclaimed, late_disk) = match space.await {
            Some(Ok(seen)) => seen,
            Some(Err(error)) => unseen(RequestError::message(&error)),
            None => unseen("its disk does not answer".to_owned()),
        };
        let told = space.as_ref().ok().copied().flatten();
        let (bytes_total, bytes_free) = told.map_or((0, 0), |space| (space.total, space.free));
        api::Store {
            impairment: self.stores.impairment(&name).map(str::to_owned),
            name,
            kind,
            path,
            bytes_total,
            bytes_free: if occupant.is_some() { 0 } else { bytes_free },
            volumes: sizes.len(),
            bytes_provisioned: sizes.iter().fold(0, |sum, size| sum.saturating_add(*size)),
            occupied: occupant.map(|occupant| occupant.to_string()),
            problem: space.err().or(read_only),
            unknown_images: unclaimed.unused,
            images_in_use: unclaimed.in_use,
            advice: late_disk.map(|disk| disk.to_string()),
        }
    }

    /// Returns what can be done about an arriving volume, if its copy is complete.
    fn advice_of_arrival(&self, name: &str) -> Option<String> {
        self.journal.read(|state| {
            let (waiting, recorded) = promotion::waiting_named(state, name)?;
            Some(waiting.advice(name, recorded.side.peer()?.1))
        })
    }

    async fn describe_one(&self, name: String, volume: Option<VolumeId>, service: Service) -> api::Volume {
        let file = volume.and_then(|id| self.journal.read(|state| recorded(state, id, &service)));
        let file = file.and_then(|(record, _)| record.image.place.file().map(PathBuf::from));
        let (mut shown, _) = self.look_at(name, volume, service).await;
        // The local space of a volume at another host is of no interest.
        if let Some(path) = file.filter(|_| shown.state != VolumeState::Forwarding) {
            let allocated = answer(&self.looks, move || images::allocated_bytes(&path).ok());
            shown.allocated_bytes = allocated.await.flatten();
        }
        shown
    }

    /// Describes a volume without its allocated space, which its disk would have to tell. Also returns the status of its lane.
    pub(crate) async fn look_at(
        &self,
        name: String,
        volume: Option<VolumeId>,
        service: Service,
    ) -> (api::Volume, Option<LaneStatus>) {
        let recorded = volume.and_then(|id| self.journal.read(|state| recorded(state, id, &service)));
        let socket = self.sockets.volume_socket(&name);
        let mut shown = api::Volume {
            uri: volume_uri(&name, &socket),
            socket: socket.display().to_string(),
            tcp_uri: None,
            name,
            id: volume.map(|id| id.to_string()).unwrap_or_default(),
            size_bytes: 0,
            allocated_bytes: None,
            block_size_bytes: 0,
            store: None,
            host: None,
            image: String::new(),
            kind: api::ImageKind::File,
            format: api::ImageFormat::Raw,
            read_only: false,
            generation: 0,
            state: VolumeState::Creating,
            message: None,
            creation: None,
            migration: volume.and_then(|id| self.migrations.running_of(id)).map(|id| id.to_string()),
            added_unix_ms: 0,
            clients_elsewhere: Vec::new(),
            attachments: volume.map_or_else(Vec::new, |id| self.attachments_of(id)),
            attached_by: None,
            snapshot_of: volume.and_then(|id| self.snapshot_of(id)),
            filling: None,
            statistics: None,
        };
        let mut missing = None;
        if let Some((record, added_unix_ms)) = recorded {
            add_recorded(&mut shown, &record, added_unix_ms);
            shown.tcp_uri = self.exports.tcp_uri(&record);
            missing = self.exports.missing_address(&record);
        }
        let status = add_service(&mut shown, service).await;
        shown.filling = volume.and_then(|id| self.filling_of(id, status.as_ref()?));
        let elsewhere = status.as_ref().map(|status| self.hosts.clients_by_name(&status.clients_elsewhere));
        let clients = elsewhere.unwrap_or_default().into_iter();
        shown.clients_elsewhere =
            clients.map(|(host, clients)| api::ClientsElsewhere { host, clients }).collect();
        if let (VolumeState::Serving, None, Some(address)) = (shown.state, &shown.message, missing) {
            shown.message = Some(format!(
                "{address} is not an address of this host yet; clients of its unix socket are served"
            ));
        }
        if shown.state == VolumeState::Arriving
            && let Some(advice) = self.advice_of_arrival(&shown.name)
        {
            shown.message = Some(advice);
        }
        let moved = volume.and_then(|id| self.journal.read(|state| state.moved.get(&id).cloned()));
        if let (Some(moved), VolumeState::Serving) = (moved, shown.state) {
            add_recorded(&mut shown, &moved.volume.record, moved.volume.added_unix_ms);
            (shown.store, shown.image) = (None, String::new());
            shown.host = Some(moved.host_name.clone());
            shown.clients_elsewhere.retain(|led| led.host != moved.host_name);
            shown.generation = moved.generation.0;
            shown.state = VolumeState::Forwarding;
            shown.message = Some(format!("it is at host \"{}\" ({})", moved.host_name, moved.migration));
            let attached =
                self.journal.read(|state| state.attachment_of(moved.volume.record.volume).cloned());
            if let Some(attached) = attached {
                shown.message = Some(match attached.has_left {
                    true => format!(
                        "it is attached here; it is at host \"{}\", or went on from there",
                        moved.host_name
                    ),
                    false => {
                        format!("it is attached here; host \"{}\" has it, or leads to it", attached.host_name)
                    }
                });
                shown.attached_by = Some(attached.host_name);
            }
        }
        (shown, status)
    }
}

impl VolumeViews {
    /// Returns the hosts at which a volume is attached.
    fn attachments_of(&self, volume: VolumeId) -> Vec<api::Attachment> {
        self.journal.read(|state| {
            let given = state.attachments_given(volume).map(|given| api::Attachment {
                host: given.host_name.clone(),
                read_only: given.access == ExportAccess::ReadOnly,
                is_confirmed: given.is_confirmed,
            });
            given.collect()
        })
    }

    /// Returns the progress of a volume's missing blocks, as its lane reports it; `None`: it lacks none.
    fn filling_of(&self, volume: VolumeId, status: &LaneStatus) -> Option<VolumeFilling> {
        let progress = status.filling?;
        let known = self.journal.read(|state| state.fillings.get(&volume).cloned())?;
        let silence = || self.hosts.silence_of(known.peer).filter(|_| !progress.is_given_up);
        let bytes = |units: u64| units.saturating_mul(UNIT_BYTES);
        Some(VolumeFilling {
            host: known.peer_name.clone(),
            bytes_missing: bytes(progress.units_missing),
            bytes_at_handover: bytes(progress.units_at_handover),
            bytes_pulled: bytes(progress.units_pulled),
            bytes_pushed: bytes(progress.units_pushed),
            bytes_overwritten: bytes(progress.units_overwritten),
            bytes_unreadable: bytes(progress.units_unreadable),
            requests_waiting: progress.requests_waiting as u64,
            reads_refused: progress.reads_late,
            waits_for: silence().or_else(|| progress.waits_for.map(str::to_owned)),
            is_given_up: progress.is_given_up,
            ranges: status.missing.iter().map(missing_range).collect(),
        })
    }
}

fn missing_range(range: &ByteRange) -> MissingRange {
    MissingRange { offset_bytes: range.offset, length_bytes: range.length }
}

/// Returns a volume's record, and its time of creation. An arriving or waiting volume is shown as it will be.
fn recorded(state: &State, volume: VolumeId, service: &Service) -> Option<(VolumeRecord, u64)> {
    let coming = |arrival: &MigrationState| {
        let Side::Incoming { volumes, .. } = &arrival.side else { return None };
        let record = volumes.iter().find(|record| record.volume == volume)?;
        Some((record.clone(), arrival.started_unix_ms))
    };
    if let Service::Arriving(_, migration) = service {
        return coming(state.migrations.get(migration)?);
    }
    let known = state.volumes.get(&volume).map(|known| (known.record.clone(), known.added_unix_ms));
    let restored = || state.questioned(volume);
    let known = known.or_else(|| restored().map(|known| (known.record.clone(), known.added_unix_ms)));
    let left =
        || state.moved.get(&volume).map(|moved| (moved.volume.record.clone(), moved.volume.added_unix_ms));
    known.or_else(|| promotion::waiting(state).find_map(|(_, arrival)| coming(arrival))).or_else(left)
}

pub(crate) fn store_kind(store: &Store) -> (api::StoreKind, String) {
    match store.kind() {
        StoreKind::Folder { folder, .. } => (api::StoreKind::Folder, folder.path().display().to_string()),
        StoreKind::Single(Place::Nbd(uri)) => (api::StoreKind::Nbd, uri.clone()),
        StoreKind::Single(Place::Device(path) | Place::File(path)) => (api::StoreKind::Device, path.clone()),
    }
}

fn add_recorded(shown: &mut api::Volume, record: &VolumeRecord, added_unix_ms: u64) {
    let image = image_location(&record.image);
    (shown.store, shown.image) = (image.store, image.image);
    (shown.kind, shown.format) = (image.kind, image.format);
    shown.read_only = record.export.access == ExportAccess::ReadOnly;
    shown.size_bytes = record.size_bytes;
    shown.block_size_bytes = record.block_size_bytes;
    shown.generation = record.generation.0;
    shown.added_unix_ms = added_unix_ms;
}

/// Adds how a volume is served; returns the status of its lane.
async fn add_service(shown: &mut api::Volume, service: Service) -> Option<LaneStatus> {
    let mut told = None;
    (shown.state, shown.message) = match service {
        Service::Creating(creation) => {
            shown.creation = Some(VolumeCreation {
                bytes_done: creation.done(),
                bytes_total: creation.bytes_total.load(Ordering::Relaxed),
            });
            (VolumeState::Creating, None)
        }
        Service::Starting => (VolumeState::Waiting, Some("its image is being opened".to_owned())),
        Service::Waiting(reason) => (VolumeState::Waiting, Some(reason)),
        Service::Failed(reason) => (VolumeState::Failed, Some(reason)),
        Service::Unconfirmed(reason) => (VolumeState::Unconfirmed, Some(reason)),
        Service::Removing => (VolumeState::Removing, None),
        Service::Arriving(_, migration) => {
            (VolumeState::Arriving, Some(format!("it is arriving here ({migration})")))
        }
        Service::Serving(lane) => match tokio::time::timeout(ANSWER_MAX, lane.status()).await {
            Ok(Ok(status)) => {
                shown.statistics = Some(statistics(&status));
                told = Some(status);
                (VolumeState::Serving, None)
            }
            Ok(Err(refused)) => (VolumeState::Failed, Some(refused.to_string())),
            Err(_) => (VolumeState::Serving, Some("its thread does not answer".to_owned())),
        },
    };
    told
}

fn statistics(status: &LaneStatus) -> VolumeStatistics {
    VolumeStatistics {
        engine: status.engine.to_owned(),
        connections: status.connections,
        requests_in_flight: status.requests_in_flight,
        reads: status.reads,
        writes: status.writes,
        flushes: status.flushes,
        bytes_read: status.bytes_read,
        bytes_written: status.bytes_written,
        errors: status.errors,
        last_error: status.last_error.clone(),
    }
}

/// Runs a query on a helper thread; `None`: it takes too long, or too many queries hang already.
pub(crate) async fn answer<T: Send + 'static>(
    looks: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    answer_within(ANSWER_MAX, looks, work).await
}

/// Does the same with a time limit of the caller.
pub(crate) async fn answer_within<T: Send + 'static>(
    longest: Duration,
    looks: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let found = async {
        let permit = Arc::clone(looks).acquire_owned().await.ok()?;
        let look = tokio::task::spawn_blocking(move || {
            let found = work();
            drop(permit);
            found
        });
        look.await.ok()
    };
    tokio::time::timeout(longest, found).await.ok()?
}
