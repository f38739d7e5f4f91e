//! Volumes that arrive have lanes that wait for them; what comes of that, and how it goes on after a restart.
//!
//! ```text
//!   lanes wait, their gates closed ──► orders: the first drives, the others take part ──► accepted
//!        … the source's and the target's half do the rest … ──► moved here: served │ otherwise: nothing is left
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use chronicle::{ReplicaOf, StayId};
use lane::{
    ArrivingStore, IncomingGroup, IncomingOrder, IncomingRole, LaneHandle, LaneStore, Listeners, Opening,
};
use migration::journal::{
    FailureCode, ImageLocation, MigrationState, Outcome, Record, Side, Stage, Summary, VolumeRecord,
};
use migration::source::Moves;
use migration::wire::LeftBehind;
use migration::{MigrationId, StayKey, VolumeIndex};
use transport::Session;

use super::Host;
use super::arrive::{Arrival, Arriving};
use super::move_vm::Expected;
use crate::error::{RequestError, with_causes};
use crate::hooks::Begun;
use crate::images;
use crate::peers::channel::{Kind, Subject};
use crate::volumes::{Claim, Service};

/// A volume whose lane waits for it.
struct Awaited {
    record: VolumeRecord,
    left_behind: LeftBehind,
    lane: LaneHandle,
    /// Where it comes to, if that is not what the lane serves already.
    store: Option<ArrivingStore>,
    claim: Claim,
    is_home: bool,
}

impl Host {
    /// Lets lanes wait for the volumes, and sees to what comes of it.
    pub(super) async fn wait_for_volumes(
        self: &Arc<Self>,
        session: &Session,
        arrival: Arrival,
        arriving: Vec<Arriving>,
    ) -> Result<(), RequestError> {
        let names: Vec<_> = arriving.iter().map(|volume| volume.record.name.clone()).collect();
        let mut awaited = Vec::new();
        let stay = StayId::Arrived(arrival.migration.0);
        for Arriving { record, left_behind, store, claim, home } in arriving {
            let started = match home {
                Some(lane) => {
                    self.note_image(stay, &record).await;
                    Ok((lane, Some(store), true))
                }
                None => {
                    let started = self.start_waiting(&record, stay, LaneStore::Arriving(store)).await;
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
        if let Some(vm) = &arrival.vm {
            let expected = match &arrival.recorded {
                None => Expected::Anew,
                // N.B. without a promise it comes to nothing, and it may be waiting for the volumes that would wait for it.
                Some(known) if known.stage == Stage::Copying => Expected::Again(None),
                Some(_) => {
                    let found = self.vms.found(vm).await;
                    // It may have been loaded just before the last daemon was killed.
                    let is_kept = self.vms.keep_tpm(vm).await.map_err(|error| {
                        tracing::warn!(vm = %vm, %error, "a VM that came does not run without its TPM");
                    });
                    Expected::Again(found.filter(|_| is_kept.is_ok()))
                }
            };
            self.expect_vm(session, (arrival.migration, arrival.remote), vm, names, expected);
        } else {
            let begun = if arrival.recorded.is_some() { Begun::Perhaps } else { Begun::No };
            self.prepare_hooks_in(arrival.migration, arrival.remote, session, begun);
        }
        if let Err(error) = self.let_come(session, &arrival, &mut awaited).await {
            self.stop_waiting(awaited).await;
            return Err(error);
        }
        let migration = arrival.migration;
        if let Some(vm) = arrival.vm {
            let (host, settling) = (Arc::clone(self), self.migrations.settle(migration));
            tokio::spawn(async move {
                // None: the daemon stops, and the next one finds out.
                if let Some(outcome) = host.migrations.outcome(migration).await {
                    host.see_vm_in(migration, &vm, &outcome, settling).await;
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

    /// Gives lanes their orders: that of the first volume drives the migration, the others take part.
    async fn let_come(
        &self,
        session: &Session,
        arrival: &Arrival,
        awaited: &mut [Awaited],
    ) -> Result<(), RequestError> {
        let mut together = IncomingGroup::default();
        let mut roles = Vec::new();
        for volume in awaited.iter().skip(1) {
            let participation = together.add(volume.record.image.clone());
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
                moves: if arrival.vm.is_some() { Moves::Vm } else { Moves::Volumes },
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
        stay: StayId,
        store: LaneStore,
    ) -> Result<LaneHandle, RequestError> {
        let access = self.socket_access(&record.export)?;
        let bound = self.sockets.bind_volume(&record.name, &access);
        let unix = bound.map_err(|error| RequestError::VolumeUnavailable {
            volume: record.name.clone(),
            reason: with_causes(&error),
        })?;
        let listeners = Listeners { unix, tcp: self.listen_on_port(record)? };
        self.start_lane(record, stay, store, listeners, Opening::Waiting).await
    }

    /// Remembers that a volume may be in this image in a stay that begins: a lane that is there already does not look.
    pub(super) async fn note_image(&self, stay: StayId, record: &VolumeRecord) {
        let (chronicles, image) = (self.chronicles.clone(), record.image.clone());
        let key = StayKey { volume: record.volume, stay };
        if let Err(error) = tokio::task::spawn_blocking(move || chronicles.note_image(key, &image)).await {
            tracing::warn!(volume = %record.name, %error, "how its image looks is not recorded");
        }
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

    /// Ends an arrival that no lane waits for, and of which nothing was promised.
    pub(super) async fn end_arrival(
        &self,
        migration: MigrationId,
        targets: Vec<ImageLocation>,
        error: &RequestError,
    ) {
        let outcome = Outcome::Failed { code: FailureCode::TargetFaulty, detail: error.message() };
        self.discard_arrival(migration, targets, outcome).await;
    }

    /// Deletes the images of an arrival that comes to nothing, and ends it.
    pub(super) async fn discard_arrival(
        &self,
        migration: MigrationId,
        targets: Vec<ImageLocation>,
        outcome: Outcome,
    ) {
        let discarded = tokio::task::spawn_blocking(move || {
            let faults = targets.iter().filter_map(|target| images::discard(target).err());
            faults.map(|fault| fault.to_string()).collect::<Vec<_>>().join("; ")
        });
        let outcome = outcome.with_left_over(&discarded.await.unwrap_or_default());
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
        let vm = self.vm_of_arrival(&recorded.names);
        let mut arriving = Vec::new();
        for record in volumes {
            let (claim, home) = self.claim_arrival(&record.name, record.volume)?;
            let store = self.reopen_arriving(&record, &recorded).await?;
            // It is not in the journal; to remember for nobody costs little.
            let left_behind = LeftBehind::Replica;
            arriving.push(Arriving { record, left_behind, store, claim, home });
        }
        let recorded = Some(Box::new(recorded));
        let arrival = Arrival { migration, remote, recorded, vm };
        self.wait_for_volumes(&session, arrival, arriving).await
    }
}
