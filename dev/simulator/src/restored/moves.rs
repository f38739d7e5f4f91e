//! Migrations in the fleet with restored journals, one durable step at a time.
//!
//! ```text
//!   between stores   started ─ prepared ─ released ─ owned ─ source retired, ended
//!   between hosts    started at both ─ prepared there ─ released here ─ owned there ─ source retired, ended at both
//! ```
//! Each step uses the journals only, as a restart does: a restored journal leaves the other half waiting.

use migration::journal::{
    FailureCode, Forwarding, MigratingVolume, MigrationState, Outcome, Record, Side, Stage, Summary,
};
use migration::message::{ToSource, ToTarget};
use migration::{Attempt, MigrationId, VolumeId, recovery};

use super::Fleet;
use super::host::Image;

impl Fleet {
    pub(super) fn begin_between_stores(&mut self) {
        let Some((host, volume)) = self.draw_volume() else { return };
        let draw = self.random.index(4);
        let Some(target) = self.hosts[host].free_place(volume, draw) else { return };
        let source = self.hosts[host].state.volumes[&volume].record.image.clone();
        let Some(migration) = self.number(host) else { return };
        self.hosts[host]
            .images
            .insert(target.place.clone(), Image { volume, writes: 0, size_bytes: 0, is_half_made: true });
        let volumes = vec![MigratingVolume { volume, source, target }];
        self.say(|| format!("host {host}: {migration} of volume {volume} between stores"));
        let side = Side::OneHost;
        self.hosts[host].commit(vec![Record::MigrationStarted {
            migration,
            volumes,
            keep_source: false,
            side,
        }]);
    }

    pub(super) fn begin_between_hosts(&mut self) {
        let Some((from, volume)) = self.draw_volume() else { return };
        let to = self.random.index(self.hosts.len());
        let there = &self.hosts[to].state;
        let is_known = there.volumes.contains_key(&volume)
            || there.questioned(volume).is_some()
            || self.hosts[to].is_moving(volume);
        if to == from || !self.is_connected(from, to) || is_known {
            return;
        }
        let draw = self.random.index(4);
        let Some(target) = self.hosts[to].free_place(volume, draw) else { return };
        let (Some(migration), Some(there)) = (self.number(from), self.number(to)) else { return };
        let mut record = self.hosts[from].state.volumes[&volume].record.clone();
        let source = std::mem::replace(&mut record.image, target.clone());
        let volumes = vec![MigratingVolume { volume, source, target: target.clone() }];
        let outgoing = Side::Outgoing {
            peer: self.hosts[to].id,
            peer_name: to.to_string(),
            store: String::new(),
            forwarding: Forwarding::WhileConnected,
        };
        let incoming = Side::Incoming {
            peer: self.hosts[from].id,
            peer_name: from.to_string(),
            remote: migration,
            volumes: vec![record],
        };
        self.say(|| format!("host {from}: {migration} of volume {volume} to host {to}, {there} there"));
        let started = |migration, side| Record::MigrationStarted {
            migration,
            volumes: volumes.clone(),
            keep_source: false,
            side,
        };
        self.hosts[from].commit(vec![started(migration, outgoing)]);
        self.hosts[to].commit(vec![started(there, incoming)]);
        self.hosts[to]
            .images
            .insert(target.place, Image { volume, writes: 0, size_bytes: 0, is_half_made: true });
    }

    pub(super) fn advance(&mut self) {
        let host = self.random.index(self.hosts.len());
        let under_way: Vec<(MigrationId, MigrationState)> =
            self.hosts[host].state.unfinished().map(|(id, known)| (id, known.clone())).collect();
        if under_way.is_empty() {
            return;
        }
        let (id, known) = &under_way[self.random.index(under_way.len())];
        match &known.side {
            Side::OneHost => self.advance_between_stores(host, *id, known),
            Side::Incoming { remote, .. } => self.advance_target(host, *id, known, *remote),
            Side::Outgoing { .. } => self.advance_source(host, *id, known),
        }
    }

    fn advance_between_stores(&mut self, host: usize, id: MigrationId, known: &MigrationState) {
        let (moving, cancels) = (&known.volumes[0], self.random.percent(15));
        let (attempt, volume) = (Attempt(1), moving.volume);
        self.say(|| format!("host {host}: {id} goes on from {:?}", known.stage));
        match &known.stage {
            Stage::Copying if cancels => {
                self.hosts[host].images.remove(&moving.target.place);
                self.hosts[host].commit(vec![ended(id, cancelled())]);
            }
            Stage::Copying => {
                self.copy((host, &moving.source.place), (host, &moving.target.place));
                self.hosts[host].commit(vec![Record::TargetPrepared { migration: id, attempt }]);
            }
            Stage::Prepared(_) => {
                let generations =
                    vec![(volume, self.hosts[host].state.volumes[&volume].record.generation.next())];
                self.hosts[host].commit(vec![Record::Released { migration: id, attempt, generations }]);
            }
            Stage::Released(_) => {
                let generations =
                    vec![(volume, self.hosts[host].state.volumes[&volume].record.generation.next())];
                self.hosts[host].commit(vec![Record::Owned { migration: id, attempt, generations }]);
                self.complete(host, &moving.target.place);
                // N.B. the device itself does not show that it has the volume. A journal that is lost with the daemon between
                // these two steps looks like one that never existed (docs/failure-model.md).
                if moving.target.place.outlasts_its_volume() {
                    self.retire(host, &moving.source.place);
                }
            }
            _ => {
                self.retire(host, &moving.source.place);
                self.hosts[host].commit(vec![ended(id, moved())]);
            }
        }
    }

    fn advance_target(&mut self, host: usize, id: MigrationId, known: &MigrationState, remote: MigrationId) {
        let Some(source) = self.peer_of(known).filter(|source| self.is_connected(host, *source)) else {
            return;
        };
        let there = self.hosts[source].state.outgoing(self.hosts[host].id, remote).cloned();
        let moving = &known.volumes[0];
        let stage_there = there.as_ref().map(|there| there.stage.clone());
        match (&known.stage, stage_there) {
            (Stage::Copying, Some(Stage::Copying)) => {
                let Some(there) = there else { return };
                self.copy((source, &there.volumes[0].source.place), (host, &moving.target.place));
                self.hosts[host].commit(vec![Record::TargetPrepared { migration: id, attempt: Attempt(1) }]);
            }
            // Its source has ended it, or is another one by now: the copy is worthless.
            (Stage::Copying, Some(Stage::Ended(_)) | None) => self.discard(host, id, known),
            (Stage::Prepared(attempt), _) => {
                let asked = ToSource::Query(*attempt);
                let answer = match there.as_ref().map(|there| &there.stage) {
                    Some(Stage::Released(released)) if released == attempt => {
                        let generations = recovery::next_of_incoming(known);
                        Some(ToTarget::Commit { attempt: *attempt, generations })
                    }
                    Some(Stage::Copying | Stage::Released(_)) => None,
                    _ => recovery::answer_as_source(
                        &self.hosts[source].state,
                        self.hosts[host].id,
                        remote,
                        &asked,
                    ),
                };
                match answer {
                    Some(ToTarget::Commit { attempt, generations }) => {
                        self.say(|| format!("host {host}: {id} is owned"));
                        self.hosts[host].commit(vec![Record::Owned { migration: id, attempt, generations }]);
                        self.complete(host, &moving.target.place);
                    }
                    Some(ToTarget::Discard) => self.discard(host, id, known),
                    _ => {}
                }
            }
            (Stage::Owned(_), _) => {
                self.hosts[host].commit(vec![ended(id, moved())]);
            }
            _ => {}
        }
    }

    fn advance_source(&mut self, host: usize, id: MigrationId, known: &MigrationState) {
        let Some(target) = self.peer_of(known).filter(|target| self.is_connected(host, *target)) else {
            return;
        };
        let there = self.hosts[target].state.incoming(self.hosts[host].id, id);
        let stage_there = there.map(|(_, there)| there.stage.clone());
        let (moving, attempt) = (&known.volumes[0], Attempt(1));
        match (&known.stage, stage_there) {
            (Stage::Copying, Some(Stage::Copying)) if self.random.percent(15) => {
                self.hosts[host].commit(vec![ended(id, cancelled())]);
            }
            (Stage::Copying, Some(Stage::Prepared(_))) => {
                let generation = self.hosts[host].state.volumes[&moving.volume].record.generation.next();
                let generations = vec![(moving.volume, generation)];
                self.say(|| format!("host {host}: {id} is released"));
                self.hosts[host].commit(vec![Record::Released { migration: id, attempt, generations }]);
                self.released.insert((host, id));
            }
            // The target's host does not know it, or has ended it.
            (Stage::Copying, Some(Stage::Ended(_)) | None) => {
                let outcome = Outcome::Failed { code: FailureCode::HostRefused, detail: String::new() };
                self.hosts[host].commit(vec![ended(id, outcome)]);
            }
            (Stage::Released(_), Some(Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }))) => {
                // Some images cannot be deleted, and are left over.
                if !self.random.percent(20) {
                    self.retire(host, &moving.source.place);
                }
                self.hosts[host].commit(vec![ended(id, moved())]);
            }
            _ => {}
        }
    }

    pub(super) fn is_gate_closed(&self, host: usize, volume: VolumeId) -> bool {
        let here = &self.hosts[host];
        let is_promised = here.state.unfinished().any(|(id, known)| {
            let target = self.peer_of(known).map(|target| &self.hosts[target].state);
            let there = target.and_then(|target| target.incoming(here.id, id));
            known.volumes.iter().any(|moving| moving.volume == volume)
                && there.is_some_and(|(_, there)| matches!(there.stage, Stage::Prepared(_)))
        });
        is_promised || here.is_between_stores(volume)
    }

    fn draw_volume(&mut self) -> Option<(usize, VolumeId)> {
        let host = self.random.index(self.hosts.len());
        let here = &self.hosts[host];
        let idle =
            here.state.volumes.keys().filter(|volume| here.serves(**volume) && !here.is_moving(**volume));
        let idle: Vec<VolumeId> = idle.copied().collect();
        (!idle.is_empty()).then(|| (host, idle[self.random.index(idle.len())]))
    }

    fn number(&mut self, host: usize) -> Option<MigrationId> {
        let number = self.hosts[host].next_number();
        if number.is_none() {
            self.violated(|| format!("host {host} gives the number of a migration again"));
        }
        number
    }

    fn peer_of(&self, known: &MigrationState) -> Option<usize> {
        let (peer, _) = known.side.peer()?;
        self.hosts.iter().position(|host| host.id == peer)
    }

    fn copy(&mut self, from: (usize, &migration::journal::Place), to: (usize, &migration::journal::Place)) {
        let content =
            self.hosts[from.0].images.get(from.1).map(|image| (image.volume, image.writes, image.size_bytes));
        if let (Some(content), Some(image)) = (content, self.hosts[to.0].images.get_mut(to.1)) {
            (image.volume, image.writes, image.size_bytes) = content;
        }
    }

    fn complete(&mut self, host: usize, place: &migration::journal::Place) {
        if let Some(image) = self.hosts[host].images.get_mut(place) {
            image.is_half_made = false;
        }
    }

    fn retire(&mut self, host: usize, place: &migration::journal::Place) {
        if !place.outlasts_its_volume() {
            self.hosts[host].images.remove(place);
        }
    }

    fn discard(&mut self, host: usize, id: MigrationId, known: &MigrationState) {
        self.say(|| format!("host {host}: {id} is discarded"));
        let moving = &known.volumes[0];
        self.hosts[host].images.remove(&moving.target.place);
        self.hosts[host].commit(vec![ended(id, cancelled())]);
        // N.B. from *released* on the copy is the volume, whatever its source's journal says.
        let source = self.peer_of(known);
        let is_promised = matches!(known.stage, Stage::Prepared(_));
        let Side::Incoming { remote, .. } = known.side else { return };
        if is_promised && source.is_some_and(|source| self.released.contains(&(source, remote))) {
            self.violated(|| format!("host {host} deletes what {remote} has released to it"));
        }
    }
}

fn ended(migration: MigrationId, outcome: Outcome) -> Record {
    Record::MigrationEnded { migration, outcome, summary: Summary::default() }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

fn cancelled() -> Outcome {
    Outcome::Cancelled
}
