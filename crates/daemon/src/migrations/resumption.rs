//! Volumes that went to another host: this host forwards their clients, and resumes that after a start. It forwards requests to
//! the owner until the last client has left, or for good if an order asked for that. A crash ends the connections of clients. The
//! next start forwards volumes that an order named and volumes that a local VM uses. After an orderly restart it also forwards
//! volumes with clients. For clients of other hosts it begins to forward at their first request.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use lane::{LaneHandle, Opening};
use migration::journal::{MigrationState, Moved, Side, State};
use migration::message::{ToSource, ToTarget};
use migration::{HostId, MigrationId, VolumeId, VolumeIndex, recovery};

use crate::error::RequestError;
use crate::files::sockets::SocketFolder;
use crate::host::{Arrivals, Departures, Exports, Parts, Serving, Stopping};
use crate::journal::Journal;
use crate::migrations::sessions::Sessions;
use crate::volumes::registry::{Service, Volumes};

/// The time between two attempts to resume an interrupted migration.
const RESUME_INTERVAL: Duration = Duration::from_secs(5);
/// How long a start waits for each thing that it resumes, so that a hanging hypervisor does not delay other volumes.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// How often a check for the volume's lane runs, besides notifications.
const LANE_POLL: Duration = Duration::from_millis(100);

/// Resumes interrupted migrations, and forwards the clients of volumes that have left.
pub(crate) struct Resumption {
    pub(crate) journal: Journal,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) sockets: Arc<SocketFolder>,
    pub(crate) stopping: Stopping,
    pub(crate) exports: Arc<Exports>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) arrivals: Arc<Arrivals>,
    pub(crate) departures: Arc<Departures>,
}

impl Resumption {
    pub(crate) fn new(
        parts: &Parts,
        exports: &Arc<Exports>,
        serving: &Arc<Serving>,
        arrivals: &Arc<Arrivals>,
        departures: &Arc<Departures>,
    ) -> Arc<Self> {
        let Parts { journal, volumes, sessions, sockets, stopping, .. } = parts.clone();
        Arc::new(Self {
            journal,
            volumes,
            sessions,
            sockets,
            stopping,
            exports: Arc::clone(exports),
            serving: Arc::clone(serving),
            arrivals: Arc::clone(arrivals),
            departures: Arc::clone(departures),
        })
    }

    /// Resumes what a start has found: interrupted migrations, and forwarding.
    pub(crate) async fn resume_interrupted(self: &Arc<Self>) {
        let (unfinished, moved) = self.journal.read(|state| {
            let unfinished: Vec<_> = state.unfinished().map(|(id, known)| (id, known.clone())).collect();
            (unfinished, state.moved.values().cloned().collect::<Vec<_>>())
        });
        // Before the arrivals: a returning volume goes to the lane that forwards its clients.
        for moved in moved {
            self.lead_to_departed(moved.volume.record.volume).await;
        }
        for (migration, recorded) in unfinished {
            if self.is_in_question(&recorded) {
                continue;
            }
            let host = Arc::clone(self);
            let resumed = async move {
                match recorded.side {
                    Side::Incoming { .. } => host.arrivals.resume_incoming(migration, &recorded).await,
                    Side::Outgoing { .. } => host.departures.resume_outgoing(migration, &recorded).await,
                    Side::OneHost => host.departures.resume_local(migration, &recorded).await,
                }
            };
            at_start(resumed, "an interrupted migration", &migration).await;
        }
    }

    /// Starts to forward the clients of a volume once another host has confirmed that it is still there.
    pub(crate) async fn lead_to_departed(self: &Arc<Self>, volume: VolumeId) {
        let moved = self.journal.read(|state| {
            state.moved.get(&volume).filter(|moved| self.begins_with_lane(state, moved)).cloned()
        });
        let Some(moved) = moved else { return };
        let name = moved.volume.record.name.clone();
        if let Err(error) = self.forward_and_see(moved).await {
            let reason = error.message();
            tracing::error!(volume = %name, reason, "cannot forward its clients yet; trying again");
            tokio::spawn(Arc::clone(self).forward_in_the_end(name, volume));
        }
    }

    /// Returns whether a migration waits until other hosts have answered what became of its volumes.
    fn is_in_question(&self, recorded: &MigrationState) -> bool {
        let mut volumes = recorded.volumes.iter();
        self.journal.read(|state| volumes.any(|moving| state.is_departure_in_question(moving.volume)))
    }

    /// Resumes the departure of a volume that other hosts have confirmed, if its owner still reads missing blocks here.
    pub(crate) async fn resume_confirmed(self: &Arc<Self>, volume: VolumeId) {
        let departure = self.journal.read(|state| {
            let migration = state.moved.get(&volume)?.migration;
            let recorded = state.migrations.get(&migration).filter(|recorded| !recorded.has_ended())?;
            Some((migration, recorded.clone()))
        });
        if let Some((migration, recorded)) = departure
            && !self.is_in_question(&recorded)
            && !self.sessions.has(migration)
        {
            self.departures.resume_outgoing(migration, &recorded).await;
        }
    }

    /// Retries to forward the clients of a volume until its host is known and its socket can be made.
    async fn forward_in_the_end(self: Arc<Self>, name: String, volume: VolumeId) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(RESUME_INTERVAL) => {}
                () = self.stopping.begins() => return,
            }
            let moved = self.journal.read(|state| state.moved.get(&volume).cloned());
            // It has returned, or is to be forgotten.
            let Some(moved) = moved.filter(|moved| self.is_departure_over(moved)) else { return };
            let Ok((claim, _)) = self.volumes.claim_new(&name) else {
                match self.volumes.service(&name) {
                    // A remote host's clients have asked for it meanwhile, or the name belongs to another volume.
                    Some(Service::Serving(_)) => return,
                    _ => continue,
                }
            };
            if self.forward_and_see(moved).await.is_ok() {
                drop(claim);
                tracing::info!(volume = %name, "its clients are forwarded");
                return;
            }
        }
    }

    /// Forwards local clients to a volume at another host, until the last of them has left.
    pub(crate) async fn forward_and_see(self: &Arc<Self>, moved: Moved) -> Result<(), RequestError> {
        let (name, volume) = (moved.volume.record.name.clone(), moved.volume.record.volume);
        self.forward(moved).await?;
        if let Some(Service::Serving(lane)) = self.volumes.service(&name) {
            tokio::spawn(Arc::clone(&self.departures).see_departure(name, volume, lane));
        }
        Ok(())
    }

    /// Returns this host's answer as the source of a migration that no lane has.
    pub(crate) fn answer_as_source(
        &self,
        peer: HostId,
        migration: MigrationId,
        message: &ToSource,
    ) -> Option<ToTarget> {
        self.journal.read(|state| recovery::answer_as_source(state, peer, migration, message))
    }

    /// Returns this host's answers as the target of a migration that no lane has, in order.
    pub(crate) fn answers_as_target(
        &self,
        peer: HostId,
        remote: MigrationId,
        message: &ToTarget,
    ) -> Vec<ToSource> {
        self.journal.read(|state| recovery::answers_as_target(state, peer, remote, message))
    }

    /// Returns how many units are missing of volumes that came by a migration; `None`: none, or a lane cannot say it.
    pub(crate) async fn units_missing(&self, peer: HostId, remote: MigrationId) -> Option<u64> {
        let lacking: Vec<_> = self.journal.read(|state| {
            let names = state.fillings_from(peer, remote).map(|(volume, _)| state.volumes.get(&volume));
            names.map(|known| known.map(|known| known.record.name.clone())).collect()
        });
        if lacking.is_empty() {
            return None;
        }
        let mut units = 0;
        for name in lacking {
            let Some(Service::Serving(lane)) = self.volumes.service(&name?) else { return None };
            units += lane.status().await.ok()?.filling?.units_missing;
        }
        // Units that came and are not recorded may have to come again.
        Some(units.max(1))
    }

    /// Stops recording writes for a migration's source host, because that host keeps no copy of the volumes.
    pub(crate) async fn forget_copies_of(&self, peer: HostId, remote: MigrationId) {
        let copies = self.journal.read(|state| {
            let copies = recovery::nothing_kept_of(state, peer, remote).into_iter();
            let named = copies.filter_map(|(id, of)| Some((state.volumes.get(&id)?.record.name.clone(), of)));
            named.collect::<Vec<_>>()
        });
        for (name, of) in copies {
            if let Some(Service::Serving(lane)) = self.volumes.service(&name) {
                // A lane that ends records nothing.
                let _ = lane.forget_copy(of).await;
            }
        }
    }

    /// Returns the lane with the reservoir of a volume, given by its position; `None`: there is none at the moment.
    pub(crate) async fn lane_of_reservoir(
        self: &Arc<Self>,
        migration: MigrationId,
        index: VolumeIndex,
    ) -> Option<LaneHandle> {
        let name = self.journal.read(|state| {
            let recorded = state.migrations.get(&migration).filter(|recorded| !recorded.has_ended())?;
            recorded.names.get(index.as_usize()).cloned()
        })?;
        match self.volumes.service(&name) {
            Some(Service::Serving(lane)) => Some(lane),
            // The target asks again soon: a start may not have opened it yet.
            _ => None,
        }
    }

    /// Returns the lane for another host's clients of a volume. For a volume that is here or arriving it is the volume's own
    /// lane; for a departed one it is a lane that forwards. `None`: this host does not know the volume.
    /// Waits until the volume is served. Clients of this host cannot connect during that time either.
    pub(crate) async fn lane_of(self: &Arc<Self>, volume: VolumeId) -> Option<LaneHandle> {
        loop {
            let changed = self.volumes.changed();
            let (name, moved) = self.journal.read(|state| {
                let moved = state.moved.get(&volume).cloned();
                let here = state.volumes.get(&volume).map(|here| here.record.name.clone());
                Some((here.or_else(|| Some(moved.as_ref()?.volume.record.name.clone()))?, moved))
            })?;
            match (self.volumes.service(&name), moved) {
                // The journal may record the arrival before this process learns of it.
                (Some(Service::Serving(lane) | Service::Arriving(lane, _)), _) => return Some(lane),
                (None, Some(moved)) if self.is_departure_over(&moved) => {
                    return self.forward_on_demand(moved).await;
                }
                _ => {}
            }
            tokio::select! {
                _ = tokio::time::timeout(LANE_POLL, changed) => {}
                () = self.stopping.begins() => return None,
            }
        }
    }

    /// Starts to forward clients of another host to a volume that has moved on from here, because they do not know that yet.
    async fn forward_on_demand(self: &Arc<Self>, moved: Moved) -> Option<LaneHandle> {
        let name = moved.volume.record.name.clone();
        let (claim, _) = self.volumes.claim_new(&name).ok()?;
        if let Err(error) = self.forward_and_see(moved).await {
            tracing::error!(volume = %name, reason = %error.message(), "cannot forward another host's clients to the volume");
            return None;
        }
        drop(claim);
        let Some(Service::Serving(lane)) = self.volumes.service(&name) else { return None };
        Some(lane)
    }

    /// Returns whether a start makes a lane for a departed volume, depending on its clients.
    pub(crate) fn begins_with_lane(&self, state: &State, moved: &Moved) -> bool {
        let record = &moved.volume.record;
        // Since the journal was restored no host has confirmed that the volume is still there.
        if state.is_departure_in_question(record.volume) {
            return false;
        }
        let has_clients = self.sockets.listening().has_clients_of(record.volume);
        state.begins_with_lane(moved, has_clients, self.departures.has_vm_on(&record.name))
    }

    fn is_departure_over(&self, moved: &Moved) -> bool {
        self.journal.read(|state| state.is_departure_over(moved))
    }

    /// Starts a lane that forwards clients to a volume at another host.
    async fn forward(self: &Arc<Self>, moved: Moved) -> Result<(), RequestError> {
        let store = self.serving.store_elsewhere(&moved)?;
        let (record, stay) = (moved.volume.record, moved.volume.stay);
        let listeners = self.exports.listeners(&record)?;
        let lane = self.serving.start_lane(&record, stay, store, listeners, Opening::Serving).await?;
        self.volumes.add(&record.name, record.volume);
        if let Some(attempt) = self.volumes.attempt(&record.name) {
            self.volumes.set(&record.name, &attempt, Service::Serving(lane.clone()));
            self.serving.keep_serving(record.name, attempt, Some(lane));
        }
        Ok(())
    }

    /// Closes connections that an earlier daemon left for volumes that are not served here, once it is known which these are.
    pub(crate) fn close_unknown_clients(&self) {
        let (by_name, by_id) = self.journal.read(|state| {
            let moved = state.moved.values().filter(|moved| self.begins_with_lane(state, moved));
            let records = state.volumes.values().map(|volume| &volume.record);
            let records = records.chain(moved.map(|moved| &moved.volume.record));
            let (mut by_name, mut by_id) = (BTreeSet::new(), BTreeSet::new());
            for record in records {
                by_name.insert(record.name.clone());
                by_id.insert(record.volume);
            }
            // Volumes on their way here have lanes already, or will.
            for (_, migration) in state.unfinished() {
                by_name.extend(migration.names.iter().cloned());
                by_id.extend(migration.volumes.iter().map(|moving| moving.volume));
            }
            (by_name, by_id)
        });
        let listening = self.sockets.listening();
        let closed = listening.close_clients(|volume| by_id.contains(&volume));
        if closed > 0 {
            tracing::warn!(
                clients = closed,
                "closed connections of clients to volumes that have left this host"
            );
        }
        let is_known = |name: &String| by_name.contains(name) || self.volumes.service(name).is_some();
        for name in listening.unclaimed().into_iter().filter(|name| !is_known(name)) {
            tracing::info!(volume = %name, "closed a socket of the previous daemon, because its volume is not here");
            if let Err(error) = self.sockets.forget_volume(&name) {
                tracing::warn!(volume = %name, %error, "a socket is left over");
            }
        }
    }
}

/// Runs work at the start; if it takes long, the start continues without waiting for it.
pub(crate) async fn at_start(
    work: impl Future<Output = ()> + Send + 'static,
    what: &str,
    which: &(dyn std::fmt::Display + Sync),
) {
    let task = tokio::spawn(work);
    if tokio::time::timeout(START_PATIENCE, task).await.is_err() {
        tracing::warn!(%which, "the start continues, and handles {what} as soon as it can");
    }
}
