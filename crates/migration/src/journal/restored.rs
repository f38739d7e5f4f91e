//! Volumes of a journal that was put back from a backup: nobody knows yet whose they are (`crate::restoration`).
//!
//! ```text
//!   volumes ──restore──► restored ──Reinstated──► volumes, with a stay of their own
//!                                 └─RestoredForgotten──► nothing: the image stays
//! ```
//! They are no volumes of this host meanwhile, so nothing that goes by the journal serves, moves or deletes them. A volume that had
//! left is in question as well ([`RestoredMore::departed`]): it may have come home since. None of it is in the snapshot, but in records
//! behind it: a snapshot cannot grow.

use std::collections::BTreeSet;

use chronicle::{BranchId, Generation, StayId};
use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::{Record, VolumeRecord};
use super::side::{Branch, Moved};
use super::state::{Inconsistent, State, VolumeState};
use crate::identity::{HostId, MigrationId, VolumeId};

/// That this host's journal was put back from a backup once, and what waits since then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// When the last commit was made that the backup has, in milliseconds since 1970; for people.
    pub backup_unix_ms: u64,
    /// When it was put back, in milliseconds since 1970; for people.
    pub restored_unix_ms: u64,
    /// Migrations with lower numbers may have gone on without this journal.
    pub numbers_from: u64,
    /// Volumes that nobody has said of whose they are.
    pub volumes: Vec<RestoredVolume>,
    /// What is known besides, in a record of its own. A journal that an earlier version put back has none: then the list of hosts is
    /// unknown.
    #[serde(skip)]
    pub more: RestoredMore,
}

/// What is known besides of a journal that was put back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredMore {
    /// Whether this host's list names every host that can have taken a volume since the backup.
    pub list: HostList,
    /// Hosts that have to be asked, whether or not the list names them.
    pub hosts: Vec<NamedHost>,
    /// Volumes among those that went to other hosts of which it is not known whether they are still away.
    pub departed: BTreeSet<VolumeId>,
    /// Volumes whose size at the loss is known, from the journal that was replaced.
    pub sized: BTreeSet<VolumeId>,
}

/// A host, as people know it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamedHost {
    /// Its identity.
    pub id: HostId,
    /// Its name here.
    pub name: String,
}

/// What is known of the list of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostList {
    /// Since before the backup every host that was paired is in the list, or among [`RestoredMore::hosts`].
    Complete,
    /// That is not known.
    Unknown(Unlisted),
}

/// Why it is not known whether a list names every host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unlisted {
    /// There is no list.
    Missing,
    /// The list cannot be read.
    Unreadable,
    /// The list was put back from a backup, was changed by hand, or began after the backup of the journal was made.
    OfAnotherTime,
}

impl Default for HostList {
    fn default() -> Self {
        Self::Unknown(Unlisted::OfAnotherTime)
    }
}

/// A volume of which it is not known whether it is this host's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredVolume {
    /// As the backup has it.
    pub volume: VolumeState,
    /// Why the words of other hosts are not enough; `None`: they are.
    pub doubt: Option<Doubt>,
}

/// What no other host can know of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Doubt {
    /// Its image is a device, or the export of a server: that stays where it is when a volume leaves it for another store.
    Lasting,
    /// It was a complete copy that waited for the word of its source.
    Copy {
        /// The source.
        peer: HostId,
        /// The name by which people know it here.
        peer_name: String,
    },
    /// It was on its way between two stores of this host.
    BetweenStores {
        /// Where its image may be as well.
        other: ImageLocation,
    },
    /// It lacked blocks, and which of them it still lacks is not known any more.
    Hollow {
        /// The name of the host that had them.
        peer_name: String,
    },
}

impl State {
    /// Volumes of a journal that was put back, of which nobody has said whose they are.
    pub fn restored_volumes(&self) -> impl Iterator<Item = (VolumeId, &RestoredVolume)> {
        let volumes = self.restored.iter().flat_map(|restored| &restored.volumes);
        volumes.map(|waiting| (waiting.volume.record.volume, waiting))
    }

    /// Volumes that had gone to another host when the backup was made, of which nobody has said whether they are still there.
    pub fn departures_in_question(&self) -> impl Iterator<Item = &Moved> {
        let departed = self.restored.iter().flat_map(|restored| &restored.more.departed);
        departed.filter_map(|volume| self.moved.get(volume))
    }

    /// Tells whether it is not known of a volume that left whether it is still away.
    pub fn is_departure_in_question(&self, volume: VolumeId) -> bool {
        self.departures_in_question().any(|moved| moved.volume.record.volume == volume)
    }

    /// All of which nobody has said whose they are, as the backup has them.
    pub fn in_question(&self) -> impl Iterator<Item = &VolumeState> {
        let volumes = self.restored_volumes().map(|(_, waiting)| &waiting.volume);
        volumes.chain(self.departures_in_question().map(|moved| &moved.volume))
    }

    /// Of those the one of this identity.
    pub fn questioned(&self, volume: VolumeId) -> Option<&VolumeState> {
        self.in_question().find(|known| known.record.volume == volume)
    }

    /// Of those the one of this name.
    pub fn questioned_named(&self, name: &str) -> Option<(VolumeId, &VolumeState)> {
        let found = self.in_question().find(|known| known.record.name == name);
        found.map(|known| (known.record.volume, known))
    }

    /// All that may be a volume of this host: those that it serves, and those of which nobody has said whose they are. Their images
    /// are neither taken for another volume nor cleared away.
    pub fn claimed_records(&self) -> impl Iterator<Item = &VolumeRecord> {
        let waiting = self.in_question().map(|waiting| &waiting.record);
        self.volumes.values().map(|known| &known.record).chain(waiting)
    }

    /// The one of this identity.
    pub fn restored_volume(&self, volume: VolumeId) -> Option<&RestoredVolume> {
        self.restored_volumes().find(|(id, _)| *id == volume).map(|(_, waiting)| waiting)
    }

    /// Tells whether a migration of this host may have gone on, or have begun at all, in a time that this journal knows nothing of.
    pub fn is_of_lost_time(&self, migration: MigrationId) -> bool {
        self.restored.as_ref().is_some_and(|restored| migration.0 < restored.numbers_from)
    }

    /// As the records that follow a snapshot.
    pub(super) fn restored_records(&self) -> impl Iterator<Item = Record> {
        let restored = self.restored.clone().into_iter();
        restored.flat_map(|restored| {
            let more = Record::RestoredMore(Box::new(restored.more.clone()));
            [Record::Restored(Box::new(restored)), more]
        })
    }

    pub(super) fn learn_more_of_restored(&mut self, more: &RestoredMore) -> Result<(), Inconsistent> {
        let restored = self.restored.as_mut().ok_or(Inconsistent::NotRestored)?;
        restored.more = more.clone();
        Ok(())
    }

    /// A volume that left is where the backup says.
    pub(super) fn confirm_departure(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        let is_known = self.take_departed(volume);
        is_known.then_some(()).ok_or(Inconsistent::UnknownVolume(volume))
    }

    /// Nothing is asked any more of a volume that left; returns whether something was.
    pub(super) fn take_departed(&mut self, volume: VolumeId) -> bool {
        self.restored.as_mut().is_some_and(|restored| restored.more.departed.remove(&volume))
    }

    /// A volume is this host's again, in a stay that begins now: nothing that was kept of an earlier one is read.
    pub(super) fn reinstate(
        &mut self,
        volume: VolumeId,
        generation: Generation,
        stay: MigrationId,
        branch: Option<BranchId>,
    ) -> Result<(), Inconsistent> {
        let departed = self.moved.get(&volume).filter(|_| self.is_departure_in_question(volume));
        let mut known = match departed.map(|moved| moved.volume.clone()) {
            Some(departed) => departed,
            None => self.take_restored(volume)?.volume,
        };
        self.take_departed(volume);
        if let Some(id) = branch {
            let from = known.record.generation;
            self.branches.entry(volume).or_default().push(Branch { id, migration: stay, from });
        }
        known.record.generation = generation;
        known.stay = StayId::Arrived(stay.0);
        self.reservations.remove(&known.record.image.place);
        self.moved.remove(&volume);
        self.volumes.insert(volume, known);
        self.next_migration = self.next_migration.max(stay.0 + 1);
        Ok(())
    }

    /// Nobody needs to know any more whose a volume is.
    pub(super) fn forget_restored(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        self.take_restored(volume)?;
        self.forget_origins();
        Ok(())
    }

    fn take_restored(&mut self, volume: VolumeId) -> Result<RestoredVolume, Inconsistent> {
        let unknown = Inconsistent::UnknownVolume(volume);
        let waiting = &mut self.restored.as_mut().ok_or(unknown.clone())?.volumes;
        let position = waiting.iter().position(|waiting| waiting.volume.record.volume == volume);
        Ok(waiting.remove(position.ok_or(unknown)?))
    }
}
