//! The records of volumes handed over incomplete, at both hosts.
//!
//! ```text
//!   source   Hollow + Released ─────────────────────────────────► Ended: the target is complete
//!                      └─► the volumes return into the images that they left ─► Ended: taken back
//!   target   Hollow + TargetPrepared ─► Owned: being filled ─► Filled
//!                                             └─► Moved, back to the host that has the missing blocks
//! ```
//! Until a volume is complete at its new owner, the former owner's image is a *reservoir*. The volume may return there in the
//! meantime. The reservoir has the blocks that the owner lacks, and the owner has the blocks that the reservoir lacks. So no
//! block is both read and written there. Once the return is recorded, the image is a mixture of two times. Nothing deletes it,
//! and it is owned only when all blocks have arrived.
//!
//! These records are not in the snapshot, whose format cannot change. They follow it as records of their own.

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

/// An attempt at a handover of incomplete volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hollow {
    /// The attempt that is handed over incomplete.
    pub attempt: Attempt,
    /// The blocks that each volume lacks in this attempt.
    pub manifests: Vec<(VolumeId, Manifest)>,
}

/// A volume of this host that is being filled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFilling {
    /// The host that has the missing blocks.
    pub peer: HostId,
    /// The name of that host, as configured here.
    pub peer_name: String,
    /// The number, at that host, of the migration by which the volume came.
    pub remote: MigrationId,
    /// The position of the volume in that migration.
    pub index: VolumeIndex,
    /// The residency that began with the migration.
    pub stay: StayId,
    /// The manifest of the blocks missing at the handover.
    pub manifest: Manifest,
    /// Whether the missing blocks are given up ([`Record::MissingGivenUp`], which follows this one's record).
    #[serde(skip)]
    pub is_given_up: bool,
}

/// The direction in which a VM is recorded as moving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The VM comes to this host.
    Here,
    /// The VM leaves this host.
    Elsewhere,
}

impl MigrationState {
    /// Returns the missing blocks of this attempt; `None` if it lacks none.
    pub fn hollow_in(&self, attempt: Attempt) -> Option<&Hollow> {
        self.hollow.as_ref().filter(|hollow| hollow.attempt == attempt)
    }

    /// Returns the missing blocks of the attempt that is promised, released or owned; `None` if it lacks none.
    pub fn hollow_now(&self) -> Option<&Hollow> {
        self.hollow_in(self.attempt())
    }

    /// Returns whether blocks are missing in the promised attempt, or were, if it was handed back.
    pub fn is_hollow(&self) -> bool {
        match self.stage {
            Stage::HandedBack => self.hollow.is_some(),
            _ => self.hollow_now().is_some(),
        }
    }

    /// Returns whether the volumes left incomplete, and `later` returns them to the same images.
    pub(crate) fn is_brought_back_by(&self, later: &Self) -> bool {
        let (peer, from) = (self.side.peer(), later.side.peer());
        let is_left = |place: &ImageLocation| self.volumes.iter().any(|left| left.source == *place);
        self.leaves_blocks()
            && matches!(later.side, Side::Incoming { .. })
            && peer.map(|(peer, _)| peer) == from.map(|(from, _)| from)
            && later.volumes.iter().any(|moving| is_left(&moving.target))
    }

    /// Returns whether the volumes have left this host, and their new owner lacks blocks.
    pub(crate) fn leaves_blocks(&self) -> bool {
        matches!((&self.side, &self.stage), (Side::Outgoing { .. }, Stage::Released(_)))
            && self.hollow_now().is_some()
    }

    fn index_of(&self, volume: VolumeId) -> Option<VolumeIndex> {
        let position = self.volumes.iter().position(|moving| moving.volume == volume)?;
        VolumeIndex::all(self.volumes.len()).nth(position)
    }
}

impl State {
    /// Returns the volumes being filled that came by the migration with the number `remote` at `peer`.
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

    /// Returns the volumes that came together with a volume being filled, itself included. They return together, including
    /// those that are complete.
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

    /// Returns the migration by which exactly these volumes left for `peer`, which reads its missing blocks here. `None` if
    /// there is none, or they are complete there.
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

    /// Returns the unfinished migration that returns the volumes which left by `leaving`, if any.
    pub fn taken_back_by(&self, leaving: MigrationId) -> Option<MigrationId> {
        let left = self.migrations.get(&leaving)?;
        let mut later = self.unfinished().filter(|(id, _)| *id > leaving);
        later.find(|(_, later)| left.is_brought_back_by(later)).map(|(id, _)| id)
    }

    /// Returns whether the volumes that left by `leaving` have ever begun to return into the images that they left: these hold
    /// blocks of two times from then on.
    pub fn has_begun_to_return(&self, leaving: MigrationId) -> bool {
        let left = self.migrations.get(&leaving);
        let mut later = self.migrations.range(leaving..).skip(1);
        left.is_some_and(|left| later.any(|(_, later)| left.is_brought_back_by(later)))
    }

    /// Returns the earlier migration by which the volumes of `migration` left, if they return to the images that they left.
    pub fn takes_back(&self, migration: MigrationId) -> Option<MigrationId> {
        let brings = self.migrations.get(&migration)?;
        let mut left = self.unfinished().filter(|(id, _)| *id < migration);
        left.find(|(_, left)| left.is_brought_back_by(brings)).map(|(id, _)| id)
    }

    /// Returns whether volumes of these names are moving in this direction. Their migration then handles a VM recorded as moving
    /// with them. A return is another migration, which belongs to a VM recorded as coming.
    pub fn is_under_way(&self, names: &[String], way: Way) -> bool {
        let is_it = |known: &MigrationState| match &known.side {
            Side::Incoming { .. } => way == Way::Here,
            Side::Outgoing { .. } => way == Way::Elsewhere,
            Side::OneHost => false,
        };
        self.unfinished()
            .any(|(_, known)| is_it(known) && known.names.iter().any(|name| names.contains(name)))
    }

    /// Returns the volumes of a migration that are left here as reservoirs once these records, which release them, are durable.
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

    /// Returns whether another host reads its missing blocks of a volume from the image at `place`. Such an image is never
    /// deleted after a failure.
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

    /// Returns whether the images that volumes leave are kept, if that was requested. An image that lacks blocks is not kept:
    /// these blocks never arrive in an image that its volume has left.
    pub fn keeps_source(&self, is_wanted: bool, mut volumes: impl Iterator<Item = VolumeId>) -> bool {
        is_wanted
            && (broken(Bug::HollowImageKept) || !volumes.any(|volume| self.fillings.contains_key(&volume)))
    }

    /// Ends the reservoir to which an ended migration returned its volumes, or the fillings of volumes that left by it.
    pub(super) fn end_reservoirs(&mut self, at_unix_ms: u64, migration: MigrationId) {
        let Some(state) = self.migrations.get(&migration) else { return };
        match state.side {
            Side::Incoming { .. } => {
                let Some(left) = self.takes_back(migration).and_then(|id| self.migrations.get_mut(&id))
                else {
                    return;
                };
                if broken(Bug::DepartureOutlivesReturn) {
                    return;
                }
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

    /// Begins to fill the incomplete volumes of an attempt, from which on they are owned here.
    pub(super) fn begin_fillings(&mut self, migration: MigrationId, attempt: Attempt) {
        let Some(state) = self.migrations.get(&migration) else { return };
        let Side::Incoming { peer, peer_name, remote, .. } = &state.side else { return };
        // Removes the entries of an earlier residency.
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

    /// Ends the fillings of a migration whose volumes return to their source.
    pub(super) fn end_fillings(&mut self, migration: MigrationId) {
        self.fillings.retain(|_, filling| filling.stay != StayId::Arrived(migration.0));
    }

    /// Forgets the missing blocks of ended migrations once their volumes are complete. Until then, answers
    /// to sources name the attempt.
    pub(super) fn forget_hollows(&mut self) {
        let fillings = &self.fillings;
        let is_filled = |id: u64| fillings.values().any(|filling| filling.stay == StayId::Arrived(id));
        for (id, state) in &mut self.migrations {
            if state.has_ended() && !is_filled(id.0) {
                state.hollow = None;
            }
        }
    }

    /// Returns the orders for unfinished migrations, as records that follow a snapshot.
    pub(super) fn order_records(&self) -> impl Iterator<Item = Record> {
        let cancelled = self.unfinished().filter(|(_, state)| state.is_cancelled);
        cancelled.map(|(migration, _)| Record::CancelOrdered { migration })
    }

    /// Returns incomplete attempts and fillings, as records that follow a snapshot.
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
