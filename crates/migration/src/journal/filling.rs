//! Volumes that were handed over with blocks missing, as both hosts remember it.
//!
//! ```text
//!   source   Hollow + Released ─────────────────────────────────► Ended: the target has everything
//!   target   Hollow + TargetPrepared ─► Owned: being filled ─► Filled
//! ```
//! None of it is in the snapshot, but in records of its own behind it: a snapshot cannot grow.

use chronicle::StayId;
use serde::{Deserialize, Serialize};

use super::record::Record;
use super::side::Side;
use super::stage::Stage;
use super::state::{MigrationState, State};
use crate::filling::Manifest;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};

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
