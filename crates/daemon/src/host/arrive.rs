//! Volumes arrive from another host: their images are made, their lanes wait, and serve when they are this host's.
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
use lane::{
    ComingOrder, ComingRole, ComingTogether, LaneHandle, LaneStore, Listeners, Opening, TargetContent,
};
use migration::journal::{
    ExportSettings, FailureCode, ImageFormat, ImageLocation, MigratingVolume, MigrationState, Outcome,
    Record, Side, Summary, VolumeRecord,
};
use migration::source::Moves;
use migration::wire::{
    Acceptance, AcceptedVolume, Allocation, FormerContent, Held, LeftBehind, Offer, OfferedVolume, Refusal,
    RefusalCode,
};
use migration::{HostId, MigrationId, VolumeId, VolumeIndex};
use transport::Session;

use super::elsewhere::open_for_resuming;
use super::leave::refusal;
use super::reserve::{Reserved, Wanted};
use super::{Host, blocking};
use crate::error::{RequestError, with_causes};
use crate::images;
use crate::names;
use crate::opening;
use crate::peers::channel::{Kind, Subject, VOLUMES_MAX};
use crate::replicas::{self, is_replica};
use crate::volumes::{Claim, Service};

/// How long an offer waits for something else that is being done with the volume.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// How often it is looked meanwhile.
const BUSY_POLL: Duration = Duration::from_millis(50);

/// An arrival that is known to the journal.
struct Arrival {
    migration: MigrationId,
    remote: MigrationId,
    /// How far it had come when a restart interrupted it; `None`: it begins.
    recorded: Option<Box<MigrationState>>,
    /// The machine that comes along.
    machine: Option<String>,
}

/// A volume for which there is room.
struct Expected {
    record: VolumeRecord,
    /// Whether the source keeps a replica.
    left_behind: LeftBehind,
    reserved: Reserved,
    claim: Claim,
    /// The lane that forwards its clients, of a volume that comes home to them.
    home: Option<LaneHandle>,
}

/// A volume whose image is there.
struct Arriving {
    record: VolumeRecord,
    left_behind: LeftBehind,
    store: Opened,
    claim: Claim,
    home: Option<LaneHandle>,
}

/// A volume whose lane waits for it.
struct Awaited {
    record: VolumeRecord,
    left_behind: LeftBehind,
    lane: LaneHandle,
    /// Where it comes to, if that is not what the lane serves already.
    store: Option<Opened>,
    claim: Claim,
    is_home: bool,
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
        let known = self.journal.read(|state| Some(state.incoming(peer, remote)?.1.has_ended()));
        match known {
            Some(true) => {
                let detail = "the migration has ended here; begin another one".to_owned();
                Err(Refusal { code: RefusalCode::Over, detail })
            }
            // The answer was lost.
            Some(false) => {
                let volumes = offer
                    .volumes
                    .iter()
                    .map(|offered| accepted(offered.volume, TargetContent::Unknown, None));
                Ok(Acceptance { volumes: volumes.collect(), incarnation: 0 })
            }
            None => {
                let volumes = self.begin_arrival(session, peer, remote, offer).await;
                let volumes = volumes.map_err(|error| refusal(&error))?;
                Ok(Acceptance { volumes, incarnation: 0 })
            }
        }
    }

    async fn begin_arrival(
        self: &Arc<Self>,
        session: &Session,
        peer: HostId,
        remote: MigrationId,
        offer: Offer,
    ) -> Result<Vec<AcceptedVolume>, RequestError> {
        if !(1..=VOLUMES_MAX).contains(&offer.volumes.len()) {
            let text =
                format!("a migration has one volume to {VOLUMES_MAX}, this one {}", offer.volumes.len());
            return Err(RequestError::Invalid(text));
        }
        if let Some(machine) = &offer.machine {
            self.check_machine_name(&machine.name)?;
        }
        let mut expected = Vec::new();
        for offered in &offer.volumes {
            match self.make_room(&offer, offered).await {
                Ok(volume) => expected.push(volume),
                Err(error) => {
                    forget_room(&expected);
                    return Err(error);
                }
            }
        }
        let machine = offer.machine.map(|machine| machine.name);
        let arrival = self.record_arrival(peer, remote, machine, &expected).await?;
        let migration = arrival.migration;
        let locations = expected.iter().map(|volume| volume.reserved.location.clone()).collect();
        self.migrations.track(migration, expected.iter().map(|volume| volume.record.volume).collect());
        let begun = self.make_and_wait(session, arrival, expected).await;
        if let Err(error) = &begun {
            self.end_arrival(migration, locations, error).await;
        }
        begun
    }

    /// Checks that a volume may come, and takes its name and a place for its image.
    async fn make_room(
        self: &Arc<Self>,
        offer: &Offer,
        offered: &OfferedVolume,
    ) -> Result<Expected, RequestError> {
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
        // A volume that comes home is offered as it was before.
        let export = self.journal.read(|state| {
            let moved = state.moved.get(&offered.volume);
            moved.map_or_else(ExportSettings::default, |moved| moved.volume.record.export.clone())
        });
        let record = VolumeRecord {
            volume: offered.volume,
            name,
            size_bytes: offered.size_bytes,
            block_size_bytes: offered.block_size_bytes,
            image: reserved.location.clone(),
            generation: offered.generation,
            export,
        };
        Ok(Expected { record, left_behind: offered.left_behind, reserved, claim, home })
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
        machine: Option<String>,
        expected: &[Expected],
    ) -> Result<Arrival, RequestError> {
        let starting = self.starting_migration.lock().await;
        let migration = self.next_identity(None);
        let peer_name = self.hosts.name_of(peer);
        let moving = |Expected { record, reserved, .. }: &Expected| MigratingVolume {
            volume: record.volume,
            source: ImageLocation::raw_file(peer_name.clone(), String::new()),
            target: reserved.location.clone(),
        };
        let volumes = expected.iter().map(moving).collect();
        let records = expected.iter().map(|volume| volume.record.clone()).collect();
        let side = Side::Incoming { peer, peer_name, remote, volumes: records };
        let started = Record::MigrationStarted { migration, volumes, keep_source: false, side };
        let result = self.journal.commit(vec![started]).await;
        drop(starting);
        if let Err(fault) = result {
            if fault == migration::CommitFault::NotWritten {
                forget_room(expected);
            }
            return Err(fault.into());
        }
        Ok(Arrival { migration, remote, recorded: None, machine })
    }

    async fn make_and_wait(
        self: &Arc<Self>,
        session: &Session,
        arrival: Arrival,
        expected: Vec<Expected>,
    ) -> Result<Vec<AcceptedVolume>, RequestError> {
        let (mut answer, mut arriving) = (Vec::new(), Vec::new());
        for Expected { record, left_behind, reserved, claim, home } in expected {
            let (store, content, replica) = self.make_image(&record, &reserved).await?;
            answer.push(accepted(record.volume, content, replica));
            arriving.push(Arriving { record, left_behind, store, claim, home });
        }
        self.wait_for_volumes(session, arrival, arriving).await?;
        Ok(answer)
    }

    /// Makes a volume's image, or takes the one that an earlier stay has left; says what it holds, and of which generation.
    async fn make_image(
        &self,
        record: &VolumeRecord,
        reserved: &Reserved,
    ) -> Result<(Opened, TargetContent, Option<Generation>), RequestError> {
        if let Some((store, generation)) = self.take_replica(record, reserved).await? {
            return Ok((store, TargetContent::Unknown, Some(generation)));
        }
        let file = match &reserved.file {
            None => None,
            Some((path, file)) => {
                Some(file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?)
            }
        };
        let (image, size, allocation) = (reserved.location.clone(), record.size_bytes, reserved.allocation);
        let target =
            blocking(move || opening::make_target(&image, file.as_ref(), size, allocation, None)).await?;
        Ok((target.store, target.content, None))
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

    /// Lets lanes wait for the volumes, and sees to what comes of it.
    async fn wait_for_volumes(
        self: &Arc<Self>,
        session: &Session,
        arrival: Arrival,
        arriving: Vec<Arriving>,
    ) -> Result<(), RequestError> {
        let names: Vec<_> = arriving.iter().map(|volume| volume.record.name.clone()).collect();
        let mut awaited = Vec::new();
        for Arriving { record, left_behind, store, claim, home } in arriving {
            let started = match home {
                Some(lane) => Ok((lane, Some(store), true)),
                None => {
                    let started = self.start_waiting(&record, LaneStore::Here(store)).await;
                    started.map(|lane| (lane, None, false))
                }
            };
            match started {
                Ok((lane, store, is_home)) => {
                    awaited.push(Awaited { record, left_behind, lane, store, claim, is_home });
                }
                Err(error) => {
                    self.stop_waiting(awaited).await;
                    return Err(error);
                }
            }
        }
        if let Some(machine) = &arrival.machine {
            self.expect_machine(session, arrival.migration, arrival.remote, machine, names).await;
        }
        if let Err(error) = self.let_come(session, &arrival, &mut awaited).await {
            self.stop_waiting(awaited).await;
            return Err(error);
        }
        let migration = arrival.migration;
        if let Some(machine) = arrival.machine {
            let host = Arc::clone(self);
            tokio::spawn(async move {
                // None: the daemon stops, and the next one finds out.
                if let Some(outcome) = host.migrations.outcome(migration).await {
                    host.see_machine_in(migration, &machine, &outcome).await;
                }
            });
        }
        for Awaited { record, lane, claim, is_home, .. } in awaited {
            let attempt = claim.arriving(record.volume, lane.clone(), migration);
            tracing::info!(volume = %record.name, %migration, "a volume arrives");
            let host = Arc::clone(self);
            tokio::spawn(
                async move { host.see_arrival(migration, record, lane, claim, attempt, is_home).await },
            );
        }
        Ok(())
    }

    /// Gives lanes their orders: that of the first volume conducts the migration, the others follow it.
    async fn let_come(
        &self,
        session: &Session,
        arrival: &Arrival,
        awaited: &mut [Awaited],
    ) -> Result<(), RequestError> {
        let mut together = ComingTogether::default();
        let mut roles = Vec::new();
        for volume in awaited.iter().skip(1) {
            let membership = together.add(volume.record.image.clone());
            roles.push((membership.index(), ComingRole::Follows(membership)));
        }
        roles.push((VolumeIndex(0), ComingRole::Conducts(together)));
        for (index, role) in roles {
            let Some(volume) = awaited.get_mut(index.as_usize()) else { continue };
            let peer = crate::peers::host_id(session.peer());
            let record = &volume.record;
            let order = ComingOrder {
                migration: arrival.migration,
                remote: arrival.remote,
                generation: record.generation,
                left_behind: match volume.left_behind {
                    LeftBehind::Nothing => None,
                    LeftBehind::Replica => Some(ReplicaOf::Host(peer.0)),
                },
                image: record.image.clone(),
                moves: if arrival.machine.is_some() { Moves::Machine } else { Moves::Volumes },
                recorded: arrival.recorded.clone(),
            };
            let (kind, migration) = (Kind::Migration, arrival.remote);
            let line = self.peers.line(session, Subject { kind, source: peer, migration, volume: index });
            let come = volume.lane.come(order, volume.store.take(), line, role).await;
            come.map_err(|refused| {
                let (volume, reason) = (record.name.clone(), refused.to_string());
                RequestError::VolumeUnavailable { volume, reason }
            })?;
        }
        Ok(())
    }

    /// Ends lanes that were to wait for volumes that will not come.
    async fn stop_waiting(&self, awaited: Vec<Awaited>) {
        for volume in awaited.into_iter().filter(|volume| !volume.is_home) {
            volume.lane.stop(self.config.limits.stop_wait_max).await;
        }
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
        targets: Vec<ImageLocation>,
        error: &RequestError,
    ) {
        let mut detail = error.message();
        let discarded = tokio::task::spawn_blocking(move || {
            let faults = targets.iter().filter_map(|target| images::discard(target).err());
            faults.map(|fault| format!("; left over: {fault}")).collect::<String>()
        });
        detail.push_str(&discarded.await.unwrap_or_default());
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
        let session = self.hosts.session_with(peer)?;
        self.migrations.track(migration, volumes.iter().map(|record| record.volume).collect());
        let machine = self.machine_of_arrival(&recorded.names);
        let mut arriving = Vec::new();
        for record in volumes {
            let (claim, home) = self.claim_arrival(&record.name, record.volume)?;
            let store = open_for_resuming(&record).await?;
            // It is not in the journal; to remember for nobody costs little.
            let left_behind = LeftBehind::Replica;
            arriving.push(Arriving { record, left_behind, store, claim, home });
        }
        let recorded = Some(Box::new(recorded));
        let arrival = Arrival { migration, remote, recorded, machine };
        self.wait_for_volumes(&session, arrival, arriving).await
    }
}

/// Takes back what was taken for volumes that will not come: files that are empty, and in no journal.
fn forget_room(expected: &[Expected]) {
    for (path, _) in expected.iter().filter_map(|volume| volume.reserved.file.as_ref()) {
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "an empty file is left over");
        }
    }
}

fn accepted(volume: VolumeId, content: TargetContent, replica: Option<Generation>) -> AcceptedVolume {
    let elsewhere = match content {
        TargetContent::Zero => FormerContent::Zero,
        TargetContent::Unknown | TargetContent::Backing => FormerContent::Unknown,
    };
    let held = match replica {
        None => Held::Nothing,
        // Its generation says which it is: each owner counts epochs by itself.
        Some(generation) => Held::Copy { as_of: Epoch::default(), generation },
    };
    AcceptedVolume { volume, held, elsewhere }
}
