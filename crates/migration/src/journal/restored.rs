//! Volumes of a journal that was put back from a backup: nobody knows yet whose they are (`crate::restoration`).
//!
//! ```text
//!   volumes ──restore──► restored ──Reinstated──► volumes, with a stay of their own
//!                                 └─RestoredForgotten──► nothing: the image stays
//! ```
//! They are no volumes of this host meanwhile, so nothing that goes by the journal serves, moves or deletes them. None of it is in
//! the snapshot, but in a record behind it: a snapshot cannot grow.

use chronicle::{BranchId, Generation, StayId};
use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::{Record, VolumeRecord};
use super::side::Branch;
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

    /// All that may be a volume of this host: those that it serves, and those of which nobody has said whose they are. Their images
    /// are neither taken for another volume nor cleared away.
    pub fn claimed_records(&self) -> impl Iterator<Item = &VolumeRecord> {
        let waiting = self.restored_volumes().map(|(_, waiting)| &waiting.volume.record);
        self.volumes.values().map(|known| &known.record).chain(waiting)
    }

    /// The one of this identity.
    pub fn restored_volume(&self, volume: VolumeId) -> Option<&RestoredVolume> {
        self.restored_volumes().find(|(id, _)| *id == volume).map(|(_, waiting)| waiting)
    }

    /// The one of this name.
    pub fn restored_named(&self, name: &str) -> Option<(VolumeId, &RestoredVolume)> {
        self.restored_volumes().find(|(_, waiting)| waiting.volume.record.name == name)
    }

    /// Tells whether a migration of this host may have gone on, or have begun at all, in a time that this journal knows nothing of.
    pub fn is_of_lost_time(&self, migration: MigrationId) -> bool {
        self.restored.as_ref().is_some_and(|restored| migration.0 < restored.numbers_from)
    }

    /// As the record that follows a snapshot.
    pub(super) fn restored_record(&self) -> Option<Record> {
        self.restored.clone().map(|restored| Record::Restored(Box::new(restored)))
    }

    /// A volume is this host's again, in a stay that begins now: nothing that was kept of an earlier one is read.
    pub(super) fn reinstate(
        &mut self,
        volume: VolumeId,
        generation: Generation,
        stay: MigrationId,
        branch: Option<BranchId>,
    ) -> Result<(), Inconsistent> {
        let mut known = self.take_restored(volume)?.volume;
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
