//! Gives volumes their lanes: at the start, after their creation, and again when an obstacle is gone.

mod reopening;
pub(crate) mod reserve;
mod reverting;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use block::engine::EngineChoice;
use block::store::Opened;
use block::store::image::Patience;
use chronicle::{BlockSize, Kept, ReplicaOf, StayId};
use lane::peer::PeerChannel;
use lane::resuming::Rhythm;
use lane::{FillingStoreOrder, LaneHandle, LaneSettings, LaneStore, Listeners, Opening, Report, TimeLimits};
use migration::journal::{ExportAccess, MigrationState, Place, Stage, VolumeRecord};
use migration::{StayKey, VolumeId};

use crate::config::{Config, EngineSetting};
use crate::custody::Custody;
use crate::error::{RequestError, with_causes};
use crate::files::sockets::SocketFolder;
use crate::host::{Exports, Parts, PresentLimits, VolumeClaims, blocking};
use crate::hosts::Hosts;
use crate::images::opening;
use crate::journal::Journal;
use crate::migrations::history::Histories;
use crate::migrations::ownership::restoration::Restoring;
use crate::migrations::recovery;
use crate::migrations::registry::Migrations;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::peers::channel::{Kind, Subject};
use crate::standbys::permissions::Permissions;
use crate::stores::Stores;
use crate::take_over::{Clients, PassedClient};
use crate::vms::moving::VmMoves;
use crate::vms::proved::Finders;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::lane_control::LaneControl;
use crate::volumes::orders::create::random_number;
use crate::volumes::registry::{Service, Volumes};

/// The time between two attempts to serve a volume: its disk may be mounted meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How long a lane must have served before its end counts as a first one again.
const STEADY: Duration = Duration::from_secs(60);
/// The first pause before a lane whose thread has ended is started again. It doubles with each further end.
const RESTART_INTERVAL: Duration = Duration::from_millis(100);

/// How often in a row a volume's thread has ended.
#[derive(Default)]
struct Ends {
    in_a_row: u32,
}

impl Ends {
    /// Returns the pause before the next start of a lane that served for `served`.
    fn pause_after(&mut self, served: Duration) -> Duration {
        self.in_a_row = if served >= STEADY { 0 } else { self.in_a_row };
        let pause = RESTART_INTERVAL.saturating_mul(2_u32.saturating_pow(self.in_a_row));
        self.in_a_row += 1;
        pause.min(RETRY_INTERVAL)
    }
}

/// Gives volumes their lanes, for as long as they are served.
pub(crate) struct Serving {
    pub(crate) config: Arc<Config>,
    pub(crate) limits: Arc<PresentLimits>,
    pub(crate) journal: Journal,
    pub(crate) chronicles: Chronicles,
    pub(crate) custody: Custody,
    pub(crate) stores: Arc<Stores>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) histories: Arc<Histories>,
    pub(crate) sockets: Arc<SocketFolder>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    pub(crate) restoring: Arc<Restoring>,
    pub(crate) permissions: Arc<Permissions>,
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) finders: Arc<Finders>,
    pub(crate) exports: Arc<Exports>,
    pub(crate) claims: Arc<VolumeClaims>,
}

impl Serving {
    pub(crate) fn new(parts: &Parts, exports: &Arc<Exports>, claims: &Arc<VolumeClaims>) -> Arc<Self> {
        let Parts {
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            migrations,
            histories,
            sockets,
            hosts,
            peers,
            volume_hooks,
            restoring,
            permissions,
            moving,
            finders,
            ..
        } = parts.clone();
        Arc::new(Self {
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            migrations,
            histories,
            sockets,
            hosts,
            peers,
            volume_hooks,
            restoring,
            permissions,
            moving,
            finders,
            exports: Arc::clone(exports),
            claims: Arc::clone(claims),
        })
    }

    /// Begins to serve every volume of the journal; resolves when it is known which ones must wait.
    pub(crate) async fn serve_all(self: &Arc<Self>) {
        let volumes = self.journal.read(|state| {
            let records = state.volumes.iter().map(|(id, volume)| (volume.record.name.clone(), *id));
            records.collect::<Vec<_>>()
        });
        self.restoring.hold();
        self.permissions.hold_if_unsure(volumes.iter().cloned());
        for (name, volume) in volumes {
            self.volumes.add(&name, volume);
            self.serve_in_background(&name);
        }
        self.volumes.started().await;
    }

    /// Begins to serve a known volume, and retries until it is removed or the daemon stops.
    pub(crate) fn serve_in_background(self: &Arc<Self>, name: &str) {
        if let Some(attempt) = self.volumes.attempt(name) {
            self.keep_serving(name.to_owned(), attempt, None);
        }
    }

    /// Serves a volume, with `first` as its lane if there is one, until it is removed or has moved to another host,
    /// or until the daemon stops.
    pub(crate) fn keep_serving(
        self: &Arc<Self>,
        name: String,
        attempt: Arc<AtomicBool>,
        mut first: Option<LaneHandle>,
    ) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            // Guests connect to the socket at once, and wait there for the lane.
            let mut listener = None;
            let mut said = String::new();
            let mut ends = Ends::default();
            while !attempt.load(Ordering::SeqCst) {
                let tried = match first.take() {
                    Some(lane) => Ok(lane),
                    None => host.try_to_serve(&name, &attempt, &mut listener).await,
                };
                let pause = match tried {
                    Ok(lane) => {
                        let began = Instant::now();
                        host.volumes.set(&name, &attempt, Service::Serving(lane.clone()));
                        if attempt.load(Ordering::SeqCst) {
                            // The volume was removed while its lane started. Only this task has the lane.
                            lane.stop(host.limits.now().stop_wait_max).await;
                            return;
                        }
                        tokio::select! {
                            () = lane.ended() => {}
                            () = host.former_host_returns(&name) => {
                                tracing::info!(volume = %name, "the host that has its missing blocks is known again");
                                lane.stop(host.limits.now().stop_wait_max).await;
                                continue;
                            }
                        }
                        if attempt.load(Ordering::SeqCst) {
                            return;
                        }
                        if host.claims.record_named(&name).is_err() {
                            // It has moved to another host, and its last clients were lost with the thread.
                            tracing::error!(volume = %name, "the thread that forwarded its clients has ended because of a \
                                defect");
                            host.volumes.forget(&name, &attempt);
                            return;
                        }
                        host.lane_ended(&name, &attempt).await;
                        ends.pause_after(began.elapsed())
                    }
                    Err(error) => {
                        let reason = match error {
                            RequestError::VolumeUnavailable { reason, .. } => reason,
                            error => error.message(),
                        };
                        if reason != said {
                            tracing::error!(volume = %name, %reason, "the volume cannot be served");
                        }
                        said.clone_from(&reason);
                        host.volumes.set(&name, &attempt, Service::Failed(reason));
                        RETRY_INTERVAL
                    }
                };
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = host.given_up(&attempt) => return,
                }
            }
        });
    }

    /// Cleans up after a lane whose thread has ended by a defect: its migration ends as after a crash.
    async fn lane_ended(&self, name: &str, attempt: &Arc<AtomicBool>) {
        tracing::error!(volume = %name, "the volume's thread has ended because of a defect; restarting it");
        let reason = "its thread has ended because of a defect, and is being restarted".to_owned();
        self.volumes.set(name, attempt, Service::Failed(reason));
        let Ok(record) = self.claims.record_named(name) else { return };
        let ended = match recovery::run_of(&self.journal, &self.custody, record.volume).await {
            Ok(ended) => ended,
            Err(error) => {
                // It is served where the journal says it is, whether or not the migration has ended there.
                tracing::error!(volume = %name, %error, "an interrupted migration waits for the next start");
                return;
            }
        };
        for migration in ended {
            let recorded = self.journal.read(|state| state.migrations.get(&migration).cloned());
            if let Some(MigrationState { stage: Stage::Ended(outcome), summary, .. }) = recorded {
                self.histories.migration_ended(migration, &tokio::runtime::Handle::current());
                self.migrations.report(Report::Ended { migration, outcome, summary });
            }
        }
    }

    /// Serves a volume once: `image` is open, or is opened as soon as it is not locked.
    async fn try_to_serve(
        self: &Arc<Self>,
        name: &str,
        attempt: &Arc<AtomicBool>,
        listener: &mut Option<OwnedFd>,
    ) -> Result<LaneHandle, RequestError> {
        if listener.is_none() {
            let bound = self
                .sockets
                .bind_volume(name, &self.exports.socket_access(&self.claims.record_named(name)?.export)?);
            *listener = Some(bound.map_err(|error| unavailable(name, &error))?);
        }
        let volume = self.claims.record_named(name)?.volume;
        self.wait_for_permission(name, volume, attempt).await?;
        self.finish_resize(name, attempt).await?;
        let record = self.claims.record_named(name)?;
        let (host, given_up, opened) = (Arc::clone(self), Arc::clone(attempt), record.clone());
        let store = blocking(move || host.wait_for_image(&opened, None, &given_up)).await?;
        // N.B. It may have been locked for long, and a standby promoted meanwhile.
        self.wait_for_permission(name, volume, attempt).await?;
        if attempt.load(Ordering::SeqCst) {
            return Err(RequestError::VolumeNotFound(name.to_owned()));
        }
        let snapshot = self.snapshot_to_revert_to(&record).await?;
        // N.B. The port first: if it cannot be had, guests keep waiting at the unix socket, which is not passed on yet.
        let tcp = self.exports.listen_on_port(&record)?;
        let Some(unix) = listener.take() else {
            return Err(RequestError::Internal("a volume has no socket".to_owned()));
        };
        let listeners = Listeners::nbd(unix, tcp);
        let stay = self.stay_of(record.volume);
        let store = self.with_what_is_missing(&record, store).await?;
        let Some(snapshot) = snapshot else {
            return self.start_lane(&record, stay, store, listeners, Opening::Serving).await;
        };
        let lane = self.start_lane(&record, stay, store, listeners, Opening::Reverting).await?;
        self.revert(&record, &lane, snapshot, attempt).await?;
        Ok(lane)
    }

    /// Waits until no standby of a volume can have been promoted.
    async fn wait_for_permission(
        self: &Arc<Self>,
        name: &str,
        volume: VolumeId,
        attempt: &Arc<AtomicBool>,
    ) -> Result<(), RequestError> {
        let say = |reason: String| {
            tracing::warn!(volume = %name, %reason, "the volume waits");
            self.volumes.set(name, attempt, Service::Waiting(reason));
        };
        tokio::select! {
            () = self.permissions.permit(volume, say) => Ok(()),
            () = self.given_up(attempt) => Err(RequestError::VolumeNotFound(name.to_owned())),
        }
    }

    /// Returns a volume's store; for an incomplete volume with the way to its missing blocks. Errors:
    /// [`RequestError::VolumeUnavailable`]: the missing set is unknown, or the host that has the blocks is.
    pub(crate) async fn with_what_is_missing(
        &self,
        record: &VolumeRecord,
        store: Opened,
    ) -> Result<LaneStore, RequestError> {
        let filling = self.journal.read(|state| state.fillings.get(&record.volume).cloned());
        let Some(filling) = filling else { return Ok(LaneStore::Here(store)) };
        let key = StayKey { volume: record.volume, stay: filling.stay };
        let (chronicles, size_bytes) = (self.chronicles.clone(), record.size_bytes);
        let place = record.image.place.clone();
        let unknown = |why: String| RequestError::VolumeUnavailable {
            volume: record.name.clone(),
            reason: format!(
                "it is unknown which of its blocks are missing ({why}), so it cannot be served: blocks that were fetched again \
                 would overwrite newer writes. Restore that file; or give up what was written here, and continue with what host \
                 \"{0}\" had when the volume moved: there sterna volume promote {1} --force, then here sterna volume remove {1} \
                 --force",
                filling.peer_name, record.name
            ),
        };
        let read = tokio::task::spawn_blocking(move || chronicles.missing(key, size_bytes, &place)).await;
        let missing = match read {
            Ok(Ok(missing)) if missing.manifest == filling.manifest => missing,
            Ok(Ok(_)) => {
                return Err(unknown("the file that lists them is not that of the handover".to_owned()));
            }
            Ok(Err(error)) => return Err(unknown(with_causes(&error))),
            Err(error) => return Err(RequestError::Internal(error.to_string())),
        };
        let subject = Subject {
            kind: Kind::Reservoir,
            source: filling.peer,
            migration: filling.remote,
            volume: filling.index,
        };
        let reservoir = match self.hosts.session_with(filling.peer) {
            Ok(session) => self.peers.line(&session, subject),
            // It may have been removed since. **N.B.** What was written here is served, and what is missing waits for an order.
            Err(_) => PeerChannel::nowhere(),
        };
        let (index, is_given_up) = (filling.index, filling.is_given_up);
        let order = FillingStoreOrder { store, missing, reservoir, index, is_given_up };
        Ok(LaneStore::Filling(Box::new(order)))
    }

    /// Resolves when the host that has a volume's missing blocks is paired with this host again, if it is not now.
    async fn former_host_returns(&self, name: &str) {
        let filling = || {
            self.journal.read(|state| {
                let (volume, _) = state.volume_named(name)?;
                state.fillings.get(&volume).filter(|filling| !filling.is_given_up).map(|filling| filling.peer)
            })
        };
        let is_known = |peer| self.hosts.session_with(peer).is_ok();
        if filling().is_none_or(is_known) {
            return std::future::pending().await;
        }
        while !filling().is_some_and(is_known) {
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Returns the pacer of the disk that an image is on.
    pub(crate) async fn disk_of(self: &Arc<Self>, place: &Place) -> Result<Arc<pacer::Store>, RequestError> {
        let (host, place) = (Arc::clone(self), place.clone());
        blocking(move || Ok(host.stores.disk_of(&place))).await
    }

    pub(crate) async fn start_lane(
        self: &Arc<Self>,
        record: &VolumeRecord,
        stay: StayId,
        store: LaneStore,
        mut listeners: Listeners,
        opening: Opening,
    ) -> Result<LaneHandle, RequestError> {
        let block_size =
            BlockSize::new(record.block_size_bytes).map_err(|error| unavailable(&record.name, &error))?;
        let own_limit = record.export.connections_max.and_then(|limit| usize::try_from(limit).ok());
        let is_here = !matches!(store, LaneStore::Elsewhere { .. });
        let kept = if is_here { self.kept_chronicle(record, stay).await? } else { None };
        let settings = LaneSettings {
            volume: record.volume,
            name: record.name.clone(),
            block_size,
            generation: record.generation,
            stay,
            ended_copies: self.ended_copies(kept.as_ref()),
            kept: kept.map(Box::new),
            marks: None,
            limits: TimeLimits {
                mirror_wait_max: self.limits.now().mirror_wait_max,
                ..TimeLimits::default()
            },
            rhythm: Rhythm::default(),
            pacing: self.limits.now().mover.pacing(),
            disk: self.disk_of(&record.image.place).await?,
            impact: pacer::Impact::percent(self.limits.now().impact_percent),
            access: match record.export.access {
                ExportAccess::ReadWrite => lane::Access::ReadWrite,
                ExportAccess::ReadOnly => lane::Access::ReadOnly,
            },
            connections_max: own_limit.or(self.config.nbd.connections_max),
            life: random_number(),
            opening,
        };
        let engine = match self.config.engine {
            EngineSetting::Auto => EngineChoice::Auto,
            EngineSetting::IoUring => EngineChoice::Ring,
            EngineSetting::Threads => EngineChoice::Threads,
        };
        let control = LaneControl {
            volume: record.volume,
            journal: self.journal.clone(),
            migrations: Arc::clone(&self.migrations),
            histories: Arc::clone(&self.histories),
            chronicles: self.chronicles.clone(),
            data_dir: self.config.data_dir.clone(),
            custody: self.custody.clone(),
            moving: Arc::clone(&self.moving),
            volume_hooks: Arc::clone(&self.volume_hooks),
            peers: Arc::downgrade(&self.peers),
            runtime: tokio::runtime::Handle::current(),
        };
        listeners.nbd.passed = self.sockets.listening().claim_clients(record.volume);
        let name = record.name.clone();
        let (permissions, volume) = (Arc::clone(&self.permissions), record.volume);
        let needs_permission = !matches!(settings.opening, Opening::Waiting);
        let lane = blocking(move || {
            // N.B. Reading what is known of the volume may have taken long.
            if needs_permission && !permissions.may_begin(volume) {
                let reason =
                    "it has taken long to open; the hosts of its standbys are asked again".to_owned();
                return Err(RequestError::VolumeUnavailable { volume: name, reason });
            }
            let started = lane::start(settings, store, listeners, engine, || control.into_control());
            started.map_err(|error| unavailable(&name, &error))
        });
        lane.await
    }

    /// Returns the recorded chronicle of a residency, as far as a lane can trust it for the image.
    async fn kept_chronicle(
        &self,
        record: &VolumeRecord,
        stay: StayId,
    ) -> Result<Option<Kept>, RequestError> {
        let (chronicles, record) = (self.chronicles.clone(), record.clone());
        let key = StayKey { volume: record.volume, stay };
        blocking(move || {
            let believed = chronicles.open_stay(key, &record.image);
            believed.map_err(|error| unavailable(&record.name, &error))
        })
        .await
    }

    /// Returns those of the kept copies whose migrations have ended: a killed daemon had no time to forget them.
    fn ended_copies(&self, kept: Option<&Kept>) -> Vec<ReplicaOf> {
        let copies: Vec<_> = kept.iter().flat_map(|kept| kept.replicas.keys().copied()).collect();
        self.journal.read(|state| {
            let is_made = |migration: u64| state.unfinished().any(|(id, _)| id.0 == migration);
            let has_ended = |of: &ReplicaOf| match of {
                ReplicaOf::Migration(migration) => !is_made(*migration),
                ReplicaOf::Host { .. } => false,
            };
            copies.into_iter().filter(has_ended).collect()
        })
    }

    /// Returns the residency of a volume that is here, or its last one here.
    pub(crate) fn stay_of(&self, volume: VolumeId) -> StayId {
        self.journal.read(|state| {
            let here = state.volumes.get(&volume);
            let known = here.or_else(|| Some(&state.moved.get(&volume)?.volume));
            known.map_or(StayId::Made, |known| known.stay)
        })
    }

    /// Opens an image as soon as no other program has it locked, and reports which one has. Blocks.
    pub(crate) fn wait_for_image(
        &self,
        record: &VolumeRecord,
        grows_to: Option<u64>,
        attempt: &Arc<AtomicBool>,
    ) -> Result<Opened, RequestError> {
        let (name, place) = (&record.name, &record.image.place);
        let mut said = None;
        let finder = self.finders.of(name);
        let opened = opening::open(&self.custody, record, grows_to, &finder, |holder| {
            if attempt.load(Ordering::SeqCst) {
                return Patience::GiveUp;
            }
            if said.as_ref() != Some(holder) {
                tracing::warn!(volume = %name, image = %place, %holder, "waiting for the image");
                let reason = format!("its image is in use by {holder}; it is served as soon as that ends");
                self.volumes.set(name, attempt, Service::Waiting(reason));
                said = Some(holder.clone());
            }
            Patience::Wait
        });
        if said.is_some() && opened.is_ok() {
            tracing::info!(volume = %name, "the image is free");
        }
        opened.map(|opened| self.stores.impair(&record.image, opened))
    }

    async fn given_up(&self, attempt: &Arc<AtomicBool>) {
        loop {
            let changed = self.volumes.changed();
            if attempt.load(Ordering::SeqCst) {
                return;
            }
            changed.await;
        }
    }

    /// Flushes guests' writes while the guests run, so that the final flush is short.
    pub(crate) async fn settle_lanes(&self, deadline: Duration) {
        let settling = self.lanes().map(|(name, _, lane)| async move {
            if tokio::time::timeout(deadline, lane.settle()).await.is_err() {
                tracing::warn!(volume = %name, "the volume's store is slow: its clients will wait for it");
            }
        });
        futures_util::future::join_all(settling).await;
    }

    pub(crate) async fn stop_lanes(&self, deadline: Duration, clients: Clients) -> Vec<PassedClient> {
        let stops = self.lanes().map(|(name, volume, lane)| async move {
            let ended = async {
                match (clients, volume) {
                    (Clients::PassedOn, Some(volume)) => {
                        let passed = lane.pass(deadline).await.into_iter();
                        passed.map(|connection| PassedClient { volume, connection }).collect()
                    }
                    _ => {
                        lane.stop(deadline).await;
                        Vec::new()
                    }
                }
            };
            // A hanging store may keep the lane from answering; the lane abandons its requests before that.
            let ended = tokio::time::timeout(deadline * 2, ended).await;
            ended.unwrap_or_else(|_| {
                tracing::warn!(volume = %name, "the volume's requests do not end; they are abandoned");
                Vec::new()
            })
        });
        futures_util::future::join_all(stops).await.into_iter().flatten().collect()
    }

    fn lanes(&self) -> impl Iterator<Item = (String, Option<VolumeId>, LaneHandle)> + use<> {
        self.volumes.list().into_iter().filter_map(|(name, volume, service)| match service {
            Service::Serving(lane) | Service::Arriving(lane, _) => Some((name, volume, lane)),
            _ => None,
        })
    }
}

fn unavailable(volume: &str, error: &dyn std::error::Error) -> RequestError {
    RequestError::VolumeUnavailable { volume: volume.to_owned(), reason: with_causes(error) }
}
