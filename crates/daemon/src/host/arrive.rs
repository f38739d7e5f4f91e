//! A volume arrives from another host: its image is made, its lane waits, and serves when the volume is this host's.
//!
//! ```text
//!   offered ──► checks, image reserved ──► started, durably ──► image ──► lane waits ──► accepted
//!        … the lane and the source's do the rest … ──► moved here: served │ otherwise: nothing is left
//! ```
//! A volume that comes home to clients whom it left here comes to the lane that has forwarded them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use block::store::Opened;
use chronicle::{Epoch, Generation, ReplicaOf};
use lane::{ComingOrder, LaneHandle, LaneStore, Listeners, Opening, TargetContent};
use migration::journal::{
    ExportSettings, FailureCode, ImageFormat, ImageLocation, MigratingVolume, MigrationState, Outcome,
    Record, Side, Summary, VolumeRecord,
};
use migration::source::Moves;
use migration::wire::{
    Acceptance, AcceptedVolume, Allocation, FormerContent, Held, LeftBehind, Offer, OfferedVolume, Refusal,
    RefusalCode,
};
use migration::{HostId, MigrationId, VolumeId};
use transport::Session;

use super::elsewhere::open_for_resuming;
use super::leave::refusal;
use super::reserve::{Reserved, Wanted};
use super::{Host, blocking};
use crate::error::{RequestError, with_causes};
use crate::images;
use crate::names;
use crate::opening;
use crate::peers::channel::{Kind, Subject};
use crate::replicas::{self, is_replica};
use crate::volumes::{Claim, Service};

/// How long an offer waits for something else that is being done with the volume.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// How often it is looked meanwhile.
const BUSY_POLL: Duration = Duration::from_millis(50);

/// An arrival that is known to the journal.
pub(super) struct Arrival {
    pub(super) migration: MigrationId,
    pub(super) remote: MigrationId,
    pub(super) record: VolumeRecord,
    /// Whether the source keeps a replica.
    pub(super) left_behind: LeftBehind,
    /// How far it had come when a restart interrupted it; `None`: it begins.
    pub(super) recorded: Option<Box<MigrationState>>,
    /// The machine that comes along.
    pub(super) machine: Option<String>,
}

impl Host {
    /// Takes a migration that another host offers; or says again that it has been taken.
    ///
    /// # Errors
    /// [`Refusal`]: nothing of it is here.
    pub(crate) async fn take_migration(
        self: &Arc<Self>,
        session: &Session,
        peer: HostId,
        remote: MigrationId,
        offer: Offer,
    ) -> Result<Acceptance, Refusal> {
        let [offered] = offer.volumes.as_slice() else {
            let detail = "this version takes one volume at a time".to_owned();
            return Err(Refusal { code: RefusalCode::Unsuitable, detail });
        };
        let known = self.journal.read(|state| Some(state.incoming(peer, remote)?.1.has_ended()));
        match known {
            Some(true) => {
                let detail = "the migration has ended here; begin another one".to_owned();
                Err(Refusal { code: RefusalCode::Over, detail })
            }
            // The answer was lost.
            Some(false) => Ok(acceptance(offered, TargetContent::Unknown, None)),
            None => {
                let taken = self.begin_arrival(session, peer, remote, &offer, offered.clone()).await;
                taken
                    .map(|(content, replica)| acceptance(offered, content, replica))
                    .map_err(|error| refusal(&error))
            }
        }
    }

    async fn begin_arrival(
        self: &Arc<Self>,
        session: &Session,
        peer: HostId,
        remote: MigrationId,
        offer: &Offer,
        offered: OfferedVolume,
    ) -> Result<(TargetContent, Option<Generation>), RequestError> {
        if let Some(machine) = &offer.machine {
            self.check_machine_name(&machine.name)?;
        }
        let name = offered.name.clone();
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        let (claim, home) = self.claim_when_free(&name, offered.volume).await?;
        let store = Some(offer.store.as_str()).filter(|store| !store.is_empty());
        let wanted = Wanted {
            store: self.stores.choose(store)?.name().to_owned(),
            volume: name.clone(),
            format: offer.format,
            otherwise: ImageFormat::Raw,
            allocation: match offer.allocation {
                Allocation::Thin => api::Allocation::Thin,
                Allocation::Thick => api::Allocation::Thick,
            },
            size_bytes: offered.size_bytes,
            chain: None,
        };
        // What of it is allocated, its source finds out while it copies; a store that fills up ends the migration.
        let reserved = self.reserve(wanted, || Ok(0)).await?;
        let mut arrival = self.record_arrival(peer, remote, offered, &reserved).await?;
        arrival.machine = offer.machine.as_ref().map(|machine| machine.name.clone());
        let (migration, location) = (arrival.migration, reserved.location.clone());
        self.migrations.track(migration, arrival.record.volume, u64::from(arrival.record.block_size_bytes));
        let begun = self.make_and_wait(session, arrival, &reserved, claim, home).await;
        if let Err(error) = &begun {
            self.end_arrival(migration, location, error).await;
        }
        begun
    }

    /// As [`Host::claim_arrival`], a little later if something else is being done with the volume: what is left of it
    /// from an earlier stay may just be going.
    async fn claim_when_free(
        self: &Arc<Self>,
        name: &str,
        volume: VolumeId,
    ) -> Result<(Claim, Option<LaneHandle>), RequestError> {
        let deadline = Instant::now() + BUSY_MAX;
        loop {
            let changed = self.volumes.changed();
            match self.claim_arrival(name, volume) {
                Err(RequestError::VolumeBusy(_)) if Instant::now() < deadline => {
                    let _ = tokio::time::timeout(BUSY_POLL, changed).await;
                }
                result => return result,
            }
        }
    }

    /// Takes the volume's name: a new one, or that of the very volume, whose clients were left here.
    fn claim_arrival(
        self: &Arc<Self>,
        name: &str,
        volume: VolumeId,
    ) -> Result<(Claim, Option<LaneHandle>), RequestError> {
        match self.volumes.service(name) {
            None => Ok((self.volumes.claim_new(name)?.0, None)),
            Some(service) => {
                let (claim, known) = self.volumes.claim(name)?;
                let is_away = self.journal.read(|state| state.moved.contains_key(&volume));
                match service {
                    Service::Serving(lane) if known == volume && is_away => Ok((claim, Some(lane))),
                    _ => Err(RequestError::VolumeExists(name.to_owned())),
                }
            }
        }
    }

    async fn record_arrival(
        &self,
        peer: HostId,
        remote: MigrationId,
        offered: OfferedVolume,
        reserved: &Reserved,
    ) -> Result<Arrival, RequestError> {
        // A volume that comes home is offered as it was before.
        let export = self.journal.read(|state| {
            let moved = state.moved.get(&offered.volume);
            moved.map_or_else(ExportSettings::default, |moved| moved.volume.record.export.clone())
        });
        let left_behind = offered.left_behind;
        let record = VolumeRecord {
            volume: offered.volume,
            name: offered.name,
            size_bytes: offered.size_bytes,
            block_size_bytes: offered.block_size_bytes,
            image: reserved.location.clone(),
            generation: offered.generation,
            export,
        };
        let starting = self.starting_migration.lock().await;
        let migration = MigrationId(self.journal.read(|state| state.next_migration));
        let peer_name = self.hosts.name_of(peer);
        let source = ImageLocation::raw_file(peer_name.clone(), String::new());
        let target = reserved.location.clone();
        let volumes = vec![MigratingVolume { volume: record.volume, source, target }];
        let side = Side::Incoming { peer, peer_name, remote, volumes: vec![record.clone()] };
        let started = Record::MigrationStarted { migration, volumes, keep_source: false, side };
        let result = self.journal.commit(vec![started]).await;
        drop(starting);
        if let Err(fault) = result {
            if let (migration::CommitFault::NotWritten, Some((path, _))) = (fault, &reserved.file) {
                let _ = std::fs::remove_file(path);
            }
            return Err(fault.into());
        }
        Ok(Arrival { migration, remote, record, left_behind, recorded: None, machine: None })
    }

    async fn make_and_wait(
        self: &Arc<Self>,
        session: &Session,
        arrival: Arrival,
        reserved: &Reserved,
        claim: Claim,
        home: Option<LaneHandle>,
    ) -> Result<(TargetContent, Option<Generation>), RequestError> {
        if let Some((store, generation)) = self.take_replica(&arrival.record, reserved).await? {
            self.wait_for_volume(session, arrival, store, claim, home).await?;
            return Ok((TargetContent::Unknown, Some(generation)));
        }
        let file = match &reserved.file {
            None => None,
            Some((path, file)) => {
                Some(file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?)
            }
        };
        let (image, size, allocation) =
            (reserved.location.clone(), arrival.record.size_bytes, reserved.allocation);
        let target =
            blocking(move || opening::make_target(&image, file.as_ref(), size, allocation, None)).await?;
        let content = target.content;
        self.wait_for_volume(session, arrival, target.store, claim, home).await?;
        Ok((content, None))
    }

    /// Makes the replica that an earlier stay of the volume left the target, if there is one that nobody has touched;
    /// also tells of which generation it is.
    ///
    /// # Errors
    /// [`RequestError`]. **N.B.** the target's file may hold anything then, and is of no use.
    async fn take_replica(
        &self,
        record: &VolumeRecord,
        reserved: &Reserved,
    ) -> Result<Option<(Opened, Generation)>, RequestError> {
        if reserved.allocation == opening::Allocation::Thick || !is_replica(&record.image) {
            return Ok(None);
        }
        let (data_dir, record) = (self.config.data_dir.clone(), record.clone());
        blocking(move || {
            let path = std::path::Path::new(record.image.place.name());
            let (volume, size) = (record.volume.to_string(), record.size_bytes);
            let failed = |error: std::io::Error| RequestError::storage("take the replica for", path, &error);
            let Some(generation) = replicas::take(&data_dir, &volume, size, path).map_err(failed)? else {
                return Ok(None);
            };
            let opened = opening::open(&record, None, opening::at_once)?;
            Ok(Some((opened, Generation(generation))))
        })
        .await
    }

    /// Lets a lane wait for the volume, and sees to what comes of it.
    pub(super) async fn wait_for_volume(
        self: &Arc<Self>,
        session: &Session,
        arrival: Arrival,
        store: Opened,
        claim: Claim,
        home: Option<LaneHandle>,
    ) -> Result<(), RequestError> {
        let record = &arrival.record;
        let (lane, store, is_home) = match home {
            Some(lane) => (lane, Some(store), true),
            None => (self.start_waiting(record, LaneStore::Here(store)).await?, None, false),
        };
        let subject = Subject {
            kind: Kind::Migration,
            source: crate::peers::host_id(session.peer()),
            migration: arrival.remote,
        };
        let order = ComingOrder {
            migration: arrival.migration,
            remote: arrival.remote,
            generation: record.generation,
            left_behind: match arrival.left_behind {
                LeftBehind::Nothing => None,
                LeftBehind::Replica => Some(ReplicaOf::Host(crate::peers::host_id(session.peer()).0)),
            },
            image: record.image.clone(),
            moves: if arrival.machine.is_some() { Moves::Machine } else { Moves::Volumes },
            recorded: arrival.recorded,
        };
        if let Some(machine) = &arrival.machine {
            let volumes = vec![record.name.clone()];
            self.expect_machine(session, arrival.migration, arrival.remote, machine, volumes).await;
        }
        let line = self.peers.line(session, subject);
        let come = lane.come(order, store, line).await;
        if let Err(refused) = come {
            if !is_home {
                lane.stop(self.config.limits.stop_wait_max).await;
            }
            let (volume, reason) = (record.name.clone(), refused.to_string());
            return Err(RequestError::VolumeUnavailable { volume, reason });
        }
        let attempt = claim.arriving(record.volume, lane.clone(), arrival.migration);
        tracing::info!(volume = %record.name, migration = %arrival.migration, "a volume arrives");
        if let Some(machine) = arrival.machine {
            let (host, migration) = (Arc::clone(self), arrival.migration);
            tokio::spawn(async move {
                // None: the daemon stops, and the next one finds out.
                if let Some(outcome) = host.migrations.outcome(migration).await {
                    host.see_machine_in(migration, &machine, &outcome).await;
                }
            });
        }
        let (host, migration, record) = (Arc::clone(self), arrival.migration, arrival.record);
        tokio::spawn(async move { host.see_arrival(migration, record, lane, claim, attempt, is_home).await });
        Ok(())
    }

    /// A lane whose clients wait.
    pub(super) async fn start_waiting(
        self: &Arc<Self>,
        record: &VolumeRecord,
        store: LaneStore,
    ) -> Result<LaneHandle, RequestError> {
        let access = self.socket_access(&record.export)?;
        let bound = self.sockets.bind_volume(&record.name, &access);
        let unix = bound.map_err(|error| RequestError::VolumeUnavailable {
            volume: record.name.clone(),
            reason: with_causes(&error),
        })?;
        let listeners = Listeners { unix, tcp: self.listen_on_port(record)? };
        self.start_lane(record, store, listeners, Opening::Waiting).await
    }

    /// Waits for the end of an arrival, and does what follows from it.
    async fn see_arrival(
        self: Arc<Self>,
        migration: MigrationId,
        record: VolumeRecord,
        lane: LaneHandle,
        claim: Claim,
        attempt: Arc<AtomicBool>,
        is_home: bool,
    ) {
        let name = record.name.clone();
        let outcome = tokio::select! {
            outcome = self.migrations.outcome(migration) => outcome,
            () = lane.ended() => {
                // A defect, or the daemon stops and the next start goes on with it.
                claim.removed();
                self.resume_later(|recorded| recorded.volumes.iter().any(|moving| moving.volume == record.volume));
                return;
            }
        };
        if matches!(outcome, Some(Outcome::Moved { .. })) {
            tracing::info!(volume = %name, %migration, "the volume is this host's");
            // The numbers that it has used elsewhere are not known yet, so a restart begins above those of this life.
            let reserved = self.reserve_epochs(&record).await;
            if let Err(error) = reserved {
                tracing::warn!(volume = %name, reason = %error.message(), "its epochs could not be reserved");
            }
            if !is_home {
                self.volumes.set(&name, &attempt, Service::Serving(lane.clone()));
                self.keep_serving(name, attempt, Some(lane));
            }
            return;
        }
        if is_home {
            // Its clients are forwarded as before.
            return;
        }
        lane.stop(self.config.limits.stop_wait_max).await;
        let socket = self.sockets.volume_socket(&name);
        if let Err(error) = crate::sockets::remove(&socket) {
            tracing::warn!(path = %socket.display(), %error, "the socket of a volume that did not come is left over");
        }
        claim.removed();
    }

    /// Ends an arrival that no lane waits for.
    pub(super) async fn end_arrival(
        &self,
        migration: MigrationId,
        target: ImageLocation,
        error: &RequestError,
    ) {
        let mut detail = error.message();
        let discarded = tokio::task::spawn_blocking(move || images::discard(&target)).await;
        if let Ok(Err(fault)) = discarded {
            detail = format!("{detail}; left over: {fault}");
        }
        let outcome = Outcome::Failed { code: FailureCode::TargetFaulty, detail };
        let summary = Summary::default();
        let ended = Record::MigrationEnded { migration, outcome: outcome.clone(), summary };
        if let Err(fault) = self.journal.commit(vec![ended]).await {
            tracing::warn!(%migration, %fault, "that the migration has ended is left to the next start");
        }
        self.migrations.report(lane::Report::Ended { migration, outcome, summary });
    }

    /// Goes on with an arrival that a restart interrupted.
    ///
    /// # Errors
    /// [`RequestError`]: its image, or the host that it comes from, is not to be had.
    pub(super) async fn resume_arrival(
        self: &Arc<Self>,
        migration: MigrationId,
        recorded: MigrationState,
    ) -> Result<(), RequestError> {
        let Side::Incoming { peer, remote, volumes, .. } = recorded.side.clone() else { return Ok(()) };
        let Some(record) = volumes.into_iter().next() else { return Ok(()) };
        self.migrations.track(migration, record.volume, u64::from(record.block_size_bytes));
        let session = self.hosts.session_with(peer)?;
        let (claim, home) = self.claim_arrival(&record.name, record.volume)?;
        let store = open_for_resuming(&record).await?;
        // It is not in the journal; to remember for nobody costs little.
        let left_behind = LeftBehind::Replica;
        let machine = self.machine_of_arrival(std::slice::from_ref(&record.name));
        let recorded = Some(Box::new(recorded));
        let arrival = Arrival { migration, remote, record, left_behind, recorded, machine };
        self.wait_for_volume(&session, arrival, store, claim, home).await
    }
}

fn acceptance(offered: &OfferedVolume, content: TargetContent, replica: Option<Generation>) -> Acceptance {
    let elsewhere = match content {
        TargetContent::Zero => FormerContent::Zero,
        TargetContent::Unknown | TargetContent::Backing => FormerContent::Unknown,
    };
    let held = match replica {
        None => Held::Nothing,
        // Its generation says which it is: each owner counts epochs by itself.
        Some(generation) => Held::Copy { as_of: Epoch::default(), generation },
    };
    let volume = AcceptedVolume { volume: offered.volume, held, elsewhere };
    Acceptance { volumes: vec![volume], incarnation: 0 }
}
