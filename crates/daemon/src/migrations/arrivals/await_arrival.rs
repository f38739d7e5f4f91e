//! The lanes that wait for arriving volumes, and what happens to these lanes when the migration has ended.
//!
//! ```text
//!   lanes wait, their gates closed ──► orders: the first drives, the others take part ──► accepted
//!        … the source's and the target's half do the rest … ──► moved here: served │ otherwise: nothing is left
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use chronicle::{ReplicaOf, StayId};
use lane::{
    ArrivingStore, IncomingChannels, IncomingGroup, IncomingOrder, IncomingRole, LaneHandle, LaneStore,
    Opening,
};
use migration::filling::{PresenceFile, UnitMap};
use migration::journal::{MigrationState, Outcome, Record, Side, Stage, VolumeRecord};
use migration::source::Moves;
use migration::wire::LeftBehind;
use migration::{MigrationId, StayKey, VolumeId, VolumeIndex};
use transport::Session;

use crate::error::RequestError;
use crate::host::Arrivals;
use crate::migrations::arrivals::arrive::Arriving;
use crate::migrations::ownership::promote::exchanged::lost_image;
use crate::peers::channel::{Kind, Subject};
use crate::volumes::chronicles::PresenceError;
use crate::volumes::registry::{Claim, Service};

pub(crate) struct Arrival {
    pub(crate) migration: MigrationId,
    pub(crate) remote: MigrationId,
    /// The stage that the journal records, if a restart interrupted the migration; `None`: it begins.
    pub(crate) recorded: Option<Box<MigrationState>>,
    pub(crate) moves: Moves,
    /// Whether volumes may come with blocks missing.
    pub(crate) may_lack: bool,
}

/// A volume whose lane waits for it.
pub(crate) struct Awaited {
    pub(crate) record: VolumeRecord,
    left_behind: LeftBehind,
    pub(crate) lane: LaneHandle,
    /// The store that the volume comes to, unless the lane serves it already.
    store: Option<ArrivingStore>,
    claim: Claim,
    /// Set to end the attempts to serve the volume after it has arrived.
    attempt: Arc<AtomicBool>,
    /// Whether the lane that waits already forwards the volume's clients.
    is_home: bool,
}

impl Arrivals {
    /// Starts lanes that wait for the volumes, or uses those that forward their clients. After an error no lane waits.
    pub(crate) async fn await_volumes(
        self: &Arc<Self>,
        stay: StayId,
        arriving: Vec<Arriving>,
    ) -> Result<Vec<Awaited>, RequestError> {
        let mut awaited = Vec::new();
        for Arriving { record, left_behind, store, claim, home } in arriving {
            let started = match home {
                Some(lane) => {
                    self.runner.note_image(stay, &record).await;
                    Ok((lane, store, true))
                }
                None => {
                    let Some(store) = store else {
                        self.stop_waiting(awaited).await;
                        return Err(RequestError::VolumeBusy(record.name));
                    };
                    let started = self.start_waiting(&record, stay, LaneStore::Arriving(store)).await;
                    started.map(|lane| (lane, None, false))
                }
            };
            match started {
                Ok((lane, store, is_home)) => {
                    let attempt = Arc::default();
                    awaited.push(Awaited { record, left_behind, lane, store, claim, attempt, is_home });
                }
                Err(error) => {
                    self.stop_waiting(awaited).await;
                    return Err(error);
                }
            }
        }
        Ok(awaited)
    }

    /// Gives the lanes their orders: the first volume's lane drives the migration, the others take part.
    pub(crate) async fn let_come(
        &self,
        session: &Session,
        arrival: &Arrival,
        awaited: &mut [Awaited],
    ) -> Result<(), RequestError> {
        let records = awaited.iter().map(|volume| volume.record.clone()).collect();
        self.reserve_records(arrival, records).await?;
        let mut together = IncomingGroup::default();
        let mut roles = Vec::new();
        for volume in awaited.iter().skip(1) {
            let participation = together.add(volume.record.volume, volume.record.image.clone());
            roles.push((participation.index(), IncomingRole::Joins(participation)));
        }
        roles.push((VolumeIndex(0), IncomingRole::Drives(together)));
        for (index, role) in roles {
            let Some(volume) = awaited.get_mut(index.as_usize()) else { continue };
            let peer = crate::peers::host_id(session.peer());
            let record = &volume.record;
            let order = IncomingOrder {
                migration: arrival.migration,
                remote: arrival.remote,
                generation: record.generation,
                left_behind: match volume.left_behind {
                    LeftBehind::Nothing => None,
                    LeftBehind::Replica => {
                        Some(ReplicaOf::Host { host: peer.0, departure: arrival.remote.0 })
                    }
                },
                image: record.image.clone(),
                moves: arrival.moves,
                patience: self.limits.now().patience,
                recorded: arrival.recorded.clone(),
                missing: self.missing_of(arrival, record).await,
                takes_back: self.journal.read(|state| state.takes_back(arrival.migration)),
            };
            let line = |kind| {
                let subject = Subject { kind, source: peer, migration: arrival.remote, volume: index };
                self.peers.line(session, subject)
            };
            let reservoir = arrival.may_lack.then(|| line(Kind::Reservoir));
            let channels = IncomingChannels { source: line(Kind::Migration), reservoir };
            let come = volume.lane.come(order, volume.store.take(), channels, role).await;
            come.map_err(|refused| {
                let (volume, reason) = (record.name.clone(), refused.to_string());
                RequestError::VolumeUnavailable { volume, reason }
            })?;
        }
        for volume in awaited {
            let (lane, migration) = (volume.lane.clone(), arrival.migration);
            volume.attempt = volume.claim.arriving(volume.record.volume, lane, migration);
            tracing::info!(volume = %volume.record.name, %migration, "a volume arrives");
        }
        Ok(())
    }

    /// Reserves the space for the records of missing blocks. **N.B.** before the volumes come: later a guest's write would wait for
    /// room in the data folder.
    async fn reserve_records(
        &self,
        arrival: &Arrival,
        volumes: Vec<VolumeRecord>,
    ) -> Result<(), RequestError> {
        if !arrival.may_lack || arrival.recorded.is_some() {
            return Ok(());
        }
        for record in volumes {
            let key = StayKey { volume: record.volume, stay: StayId::Arrived(arrival.migration.0) };
            let (chronicles, size_bytes) = (self.chronicles.clone(), record.size_bytes);
            let reserve = move || chronicles.reserve_presence(key, size_bytes);
            let reserved = tokio::task::spawn_blocking(reserve).await.map_err(std::io::Error::other);
            reserved.flatten().map_err(|error| RequestError::NoRoomForRecords {
                volume: record.name.clone(),
                needed: 2 * PresenceFile::reserved(size_bytes),
                reason: error.to_string(),
            })?;
        }
        Ok(())
    }

    /// Returns the missing set that was durable before a restart; `None`: there is none, and the source sends it again unless
    /// it has released the volume.
    async fn missing_of(&self, arrival: &Arrival, record: &VolumeRecord) -> Option<Box<UnitMap>> {
        if !arrival.may_lack || arrival.recorded.is_none() {
            return None;
        }
        let key = StayKey { volume: record.volume, stay: StayId::Arrived(arrival.migration.0) };
        let (chronicles, size_bytes) = (self.chronicles.clone(), record.size_bytes);
        let place = record.image.place.clone();
        let read = tokio::task::spawn_blocking(move || chronicles.missing(key, size_bytes, &place)).await;
        match read.ok()? {
            Ok(missing) => Some(Box::new(missing)),
            Err(PresenceError::Gone(_)) => None,
            Err(error) => {
                tracing::warn!(volume = %record.name, %error, "the missing-set updates of the volume must be repeated");
                None
            }
        }
    }

    /// Stops lanes that were to wait for volumes which will not come.
    pub(crate) async fn stop_waiting(&self, awaited: Vec<Awaited>) {
        for volume in awaited.into_iter().filter(|volume| !volume.is_home) {
            volume.lane.stop(self.limits.now().stop_wait_max).await;
        }
    }

    pub(crate) async fn start_waiting(
        self: &Arc<Self>,
        record: &VolumeRecord,
        stay: StayId,
        store: LaneStore,
    ) -> Result<LaneHandle, RequestError> {
        let listeners = self.exports.listeners(record)?;
        self.serving.start_lane(record, stay, store, listeners, Opening::Waiting).await
    }

    /// Serves a volume that has arrived, or removes what waited for it.
    pub(crate) async fn place_arrival(
        self: &Arc<Self>,
        migration: MigrationId,
        awaited: Awaited,
        outcome: &Outcome,
    ) {
        let Awaited { record, lane, claim, attempt, is_home, .. } = awaited;
        let name = record.name;
        if matches!(outcome, Outcome::Moved { .. }) {
            tracing::info!(volume = %name, %migration, "the volume is this host's");
            self.end_attachment(record.volume).await;
            if !is_home {
                self.volumes.set(&name, &attempt, Service::Serving(lane.clone()));
                self.serving.keep_serving(name, attempt, Some(lane));
            }
            return;
        }
        if is_home {
            // Its clients are forwarded as before.
            return;
        }
        lane.stop(self.limits.now().stop_wait_max).await;
        let socket = self.sockets.volume_socket(&name);
        if let Err(error) = self.sockets.forget_volume(&name) {
            tracing::warn!(path = %socket.display(), %error, "the socket of a volume that did not arrive is left over");
        }
        claim.removed();
    }

    /// Tells the host that had attached a volume here that the attachment has ended: the volume is this host's.
    async fn end_attachment(&self, volume: VolumeId) {
        let Some(host) = self.journal.read(|state| state.attachment_before(volume).map(|before| before.host))
        else {
            return;
        };
        if let Ok(session) = self.hosts.session_with(host) {
            self.peers.give_attachment_up(&session, volume);
        }
        // If this is not recorded, the next attachment of the volume here replaces the old one.
        if let Err(error) = self.journal.commit(vec![Record::Detached { volume }]).await {
            tracing::warn!(%volume, %error, "cannot record that an attachment has become a volume of this host");
        }
    }

    /// Releases volumes whose lanes have ended their wait, or must start again.
    pub(crate) async fn let_go_of(&self, awaited: Vec<Awaited>) {
        for volume in awaited {
            if !volume.is_home {
                volume.lane.stop(self.limits.now().stop_wait_max).await;
            }
            volume.claim.removed();
        }
    }

    /// Opens the images of an arrival that is resumed after a restart.
    pub(crate) async fn reopen_arrivals(
        self: &Arc<Self>,
        recorded: &MigrationState,
    ) -> Result<Vec<Arriving>, RequestError> {
        let Side::Incoming { volumes, .. } = recorded.side.clone() else { return Ok(Vec::new()) };
        let mut arriving = Vec::new();
        for record in volumes {
            let (claim, home) = self.claim_arrival(&record.name, record.volume)?;
            let store = self.reopen_arriving(&record, recorded).await;
            let store = match recorded.stage {
                Stage::Prepared(_) | Stage::HandedBack => {
                    store.map_err(|error| lost_image(&record, error))?
                }
                _ => store?,
            };
            // The journal does not hold this. Remembering an unneeded replica costs little.
            let left_behind = LeftBehind::Replica;
            arriving.push(Arriving { record, left_behind, store: Some(store), claim, home });
        }
        Ok(arriving)
    }
}
