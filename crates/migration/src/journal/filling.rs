//! Volumes that were handed over with blocks missing, as both hosts remember it.
//!
//! ```text
//!   source   Hollow + Released ─────────────────────────────────► Ended: the target has everything
//!                      └─► the volumes come back into the images that they have left ─► Ended: taken back
//!   target   Hollow + TargetPrepared ─► Owned: being filled ─► Filled
//!                                             └─► Moved, back to where what is missing is
//! ```
//! Until a volume lacks nothing at its new owner, what its former owner has of it is a *reservoir*. It may come back there all the
//! while: what is missing at the owner is in the reservoir, and what the reservoir lacks is at the owner, so that what is read there
//! and what is written are never the same blocks. From the record that this has begun on the image is a mixture of two times. It is
//! deleted by nobody, and owned only once all of it has come.
//! None of it is in the snapshot, but in records of its own behind it: a snapshot cannot grow.

use chronicle::StayId;
use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::{Outcome, Record};
use super::side::Side;
use super::stage::Stage;
use super::state::{MigrationState, State};
use crate::filling::Manifest;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};
use crate::planted::{Bug, broken};

/// A try at a handover in which blocks are left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hollow {
    /// The try.
    pub attempt: Attempt,
    /// What each volume lacks then.
    pub manifests: Vec<(VolumeId, Manifest)>,
}

/// A volume of this host that is being filled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFilling {
    /// The host that has what is missing.
    pub peer: HostId,
    /// The name by which people know it here.
    pub peer_name: String,
    /// The migration by which the volume came, as that host numbers it.
    pub remote: MigrationId,
    /// Which of its volumes it is.
    pub index: VolumeIndex,
    /// The stay that began with it.
    pub stay: StayId,
    /// What was missing at the handover.
    pub manifest: Manifest,
    /// Whether what is missing is given up ([`Record::MissingGivenUp`], which follows its record).
    #[serde(skip)]
    pub is_given_up: bool,
}

/// Where a VM is noted to be on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It comes.
    Here,
    /// It leaves.
    Elsewhere,
}

impl MigrationState {
    /// What is left behind in this try; `None`: nothing.
    pub fn hollow_in(&self, attempt: Attempt) -> Option<&Hollow> {
        self.hollow.as_ref().filter(|hollow| hollow.attempt == attempt)
    }

    /// What is left behind in the try that is promised, released or owned; `None`: nothing.
    pub fn hollow_now(&self) -> Option<&Hollow> {
        self.hollow_in(self.attempt())
    }

    /// Tells whether blocks are left behind in the try that is promised, or was, if it was handed back.
    pub fn is_hollow(&self) -> bool {
        match self.stage {
            Stage::HandedBack => self.hollow.is_some(),
            _ => self.hollow_now().is_some(),
        }
    }

    /// Tells whether its volumes have left with blocks missing, and another migration brings them into the same images.
    fn is_brought_back_by(&self, later: &Self) -> bool {
        let (peer, from) = (self.side.peer(), later.side.peer());
        let is_left = |place: &ImageLocation| self.volumes.iter().any(|left| left.source == *place);
        self.leaves_blocks()
            && matches!(later.side, Side::Incoming { .. })
            && peer.map(|(peer, _)| peer) == from.map(|(from, _)| from)
            && later.volumes.iter().any(|moving| is_left(&moving.target))
    }

    /// Tells whether the volumes have left this host, and its new owner lacks blocks.
    fn leaves_blocks(&self) -> bool {
        matches!((&self.side, &self.stage), (Side::Outgoing { .. }, Stage::Released(_)))
            && self.hollow_now().is_some()
    }

    /// Which of its volumes one is.
    fn index_of(&self, volume: VolumeId) -> Option<VolumeIndex> {
        let position = self.volumes.iter().position(|moving| moving.volume == volume)?;
        VolumeIndex::all(self.volumes.len()).nth(position)
    }
}

impl State {
    /// Volumes that came by a migration from `peer`, where it has the number `remote`, and that are being filled.
    pub fn fillings_from(
        &self,
        peer: HostId,
        remote: MigrationId,
    ) -> impl Iterator<Item = (VolumeId, &VolumeFilling)> {
        let of_it = move |filling: &VolumeFilling| filling.peer == peer && filling.remote == remote;
        self.fillings
            .iter()
            .filter(move |(_, filling)| of_it(filling))
            .map(|(volume, filling)| (*volume, filling))
    }

    /// The volumes that came together with one that is filled here, itself included: they go back together, also those that lack nothing
    /// any more.
    pub fn came_with(&self, filling: &VolumeFilling) -> Vec<VolumeId> {
        let came = match filling.stay {
            StayId::Arrived(migration) => self.migrations.get(&MigrationId(migration)),
            StayId::Made => None,
        };
        match came {
            Some(came) => came.volumes.iter().map(|moving| moving.volume).collect(),
            None => self.fillings_from(filling.peer, filling.remote).map(|(volume, _)| volume).collect(),
        }
    }

    /// The migration by which these volumes, and no others, have left for `peer`, which reads here what they lack there; `None`: they
    /// have not, or lack nothing.
    pub fn reservoir_for(&self, peer: HostId, volumes: &[VolumeId]) -> Option<MigrationId> {
        let mut reservoirs = self.unfinished().filter(|(id, leaving)| {
            let is_of_peer = matches!(leaving.side, Side::Outgoing { peer: to, .. } if to == peer)
                && leaving.leaves_blocks();
            let left = |volume: &VolumeId| self.moved.get(volume).is_some_and(|moved| moved.migration == *id);
            is_of_peer
                && leaving.volumes.len() == volumes.len()
                && leaving
                    .volumes
                    .iter()
                    .all(|moving| volumes.contains(&moving.volume) && left(&moving.volume))
        });
        reservoirs.next().map(|(id, _)| id)
    }

    /// The migration that brings back what left by `leaving`, and is not over; `None`: nothing does.
    pub fn taken_back_by(&self, leaving: MigrationId) -> Option<MigrationId> {
        let left = self.migrations.get(&leaving)?;
        let mut later = self.unfinished().filter(|(id, _)| *id > leaving);
        later.find(|(_, later)| left.is_brought_back_by(later)).map(|(id, _)| id)
    }

    /// The migration that volumes which come by `migration` left by, if they come into the images that they have left then.
    pub fn takes_back(&self, migration: MigrationId) -> Option<MigrationId> {
        let brings = self.migrations.get(&migration)?;
        let mut left = self.unfinished().filter(|(id, _)| *id < migration);
        left.find(|(_, left)| left.is_brought_back_by(brings)).map(|(id, _)| id)
    }

    /// Tells whether volumes of these names are on their way, so that a VM which is noted to be on its way with them is seen to by their
    /// migration. Those that have left may be on their way back: that is another migration, and the VM's who is noted to come.
    pub fn is_under_way(&self, names: &[String], way: Way) -> bool {
        let is_it = |known: &MigrationState| match &known.side {
            Side::Incoming { .. } => way == Way::Here,
            Side::Outgoing { .. } => way == Way::Elsewhere,
            Side::OneHost => false,
        };
        self.unfinished()
            .any(|(_, known)| is_it(known) && known.names.iter().any(|name| names.contains(name)))
    }

    /// The volumes of a migration that are left behind here with what its target lacks, once these records are durable, which release
    /// them.
    pub fn leaves_behind(&self, migration: MigrationId, records: &[Record]) -> Vec<VolumeId> {
        let Some(leaving) = self.migrations.get(&migration) else { return Vec::new() };
        let is_it =
            |record: &Record| matches!(record, Record::Hollow { migration: of, .. } if *of == migration);
        let is_hollow = leaving.hollow.is_some() || records.iter().any(is_it);
        match leaving.side {
            Side::Outgoing { .. } if is_hollow => {
                leaving.volumes.iter().map(|moving| moving.volume).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Tells whether another host reads in the image at `place` what it lacks of a volume: it is not deleted, whatever comes to nothing.
    pub fn is_reservoir(&self, place: &str) -> bool {
        let of_it = |id: &MigrationId, left: &MigrationState| {
            let away = |volume: &VolumeId| self.moved.get(volume).is_some_and(|moved| moved.migration == *id);
            left.leaves_blocks()
                && left
                    .volumes
                    .iter()
                    .any(|moving| moving.source.place.name() == place && away(&moving.volume))
        };
        self.unfinished().any(|(id, left)| of_it(&id, left)) && !broken(Bug::ReservoirDiscarded)
    }

    /// Whether the images that volumes leave are kept, if somebody wishes that: not if one of them lacks blocks, which come to no
    /// image that its volume has left.
    pub fn keeps_source(&self, is_wanted: bool, mut volumes: impl Iterator<Item = VolumeId>) -> bool {
        is_wanted
            && (broken(Bug::HollowImageKept) || !volumes.any(|volume| self.fillings.contains_key(&volume)))
    }

    /// A migration has ended, and its volumes are where it brought them. What was missing there need not follow any more.
    pub(super) fn end_reservoirs(&mut self, at_unix_ms: u64, migration: MigrationId) {
        let Some(state) = self.migrations.get(&migration) else { return };
        match state.side {
            Side::Incoming { .. } => {
                let Some(left) = self.takes_back(migration).and_then(|id| self.migrations.get_mut(&id))
                else {
                    return;
                };
                left.stage = Stage::Ended(Outcome::TakenBack);
                left.ended_unix_ms = Some(at_unix_ms);
                left.hollow = None;
            }
            Side::Outgoing { .. } => {
                let volumes: Vec<_> = state.volumes.iter().map(|moving| moving.volume).collect();
                self.fillings
                    .retain(|volume, _| !volumes.contains(volume) || self.volumes.contains_key(volume));
            }
            Side::OneHost => {}
        }
    }

    /// The volumes are owned here since this try; if blocks were left behind in it, they are being filled.
    pub(super) fn begin_fillings(&mut self, migration: MigrationId, attempt: Attempt) {
        let Some(state) = self.migrations.get(&migration) else { return };
        let Side::Incoming { peer, peer_name, remote, .. } = &state.side else { return };
        // What an earlier stay has left.
        self.fillings.retain(|volume, _| state.index_of(*volume).is_none());
        for (volume, manifest) in state.hollow_in(attempt).into_iter().flat_map(|hollow| &hollow.manifests) {
            let Some(index) = state.index_of(*volume) else { continue };
            let (peer_name, stay) = (peer_name.clone(), StayId::Arrived(migration.0));
            let filling = VolumeFilling {
                peer: *peer,
                peer_name,
                remote: *remote,
                index,
                stay,
                manifest: *manifest,
                is_given_up: false,
            };
            self.fillings.insert(*volume, filling);
        }
    }

    /// The volumes of a migration go back to where they came from: nothing of them is filled here any more.
    pub(super) fn end_fillings(&mut self, migration: MigrationId) {
        self.fillings.retain(|_, filling| filling.stay != StayId::Arrived(migration.0));
    }

    /// Of migrations that have ended it is known what they left behind until nothing of that is missing here: their sources are told
    /// of which try it was.
    pub(super) fn forget_hollows(&mut self) {
        let fillings = &self.fillings;
        let is_filled = |id: u64| fillings.values().any(|filling| filling.stay == StayId::Arrived(id));
        for (id, state) in &mut self.migrations {
            if state.has_ended() && !is_filled(id.0) {
                state.hollow = None;
            }
        }
    }

    /// What was ordered of migrations that have not ended, as the records that follow a snapshot.
    pub(super) fn order_records(&self) -> impl Iterator<Item = Record> {
        let cancelled = self.unfinished().filter(|(_, state)| state.is_cancelled);
        cancelled.map(|(migration, _)| Record::CancelOrdered { migration })
    }

    /// Both as the records that follow a snapshot.
    pub(super) fn filling_records(&self) -> impl Iterator<Item = Record> {
        let hollows = self.migrations.iter().filter_map(|(migration, state)| {
            let hollow = state.hollow.clone()?;
            Some(Record::Hollow { migration: *migration, hollow })
        });
        let fillings = self.fillings.iter().flat_map(|(volume, filling)| {
            let (volume, known) = (*volume, Box::new(filling.clone()));
            let given_up = filling.is_given_up.then_some(Record::MissingGivenUp { volume });
            [Record::FillingKnown { volume, filling: known }].into_iter().chain(given_up)
        });
        hollows.chain(fillings)
    }
}
