//! Volumes of a journal restored from a backup, whose owner is not settled yet (`crate::restoration`).
//!
//! ```text
//!   volumes ──restore──► restored ──Reinstated──► volumes, with a new residency
//!                                 └─RestoredForgotten──► nothing: the image is kept
//! ```
//! Meanwhile they are not volumes of this host, so nothing that follows the journal serves, moves or deletes them. A volume
//! that had left is in question as well ([`RestoredMore::departed`]), because it may have returned since the backup. These
//! records are not in the snapshot, whose format cannot change. They follow it.

use std::collections::BTreeSet;

use chronicle::{BranchId, Generation, StayId};
use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::{Outcome, Record, VolumeRecord};
use super::side::{Branch, Moved, Side};
use super::stage::Stage;
use super::state::{Inconsistent, MigrationState, State, VolumeState};
use crate::identity::{HostId, MigrationId, VolumeId};

/// The fact that this host's journal was restored from a backup, and the volumes that wait since then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The time of the backup's last commit, in milliseconds since 1970, for the administrator.
    pub backup_unix_ms: u64,
    /// The time of the restoration, in milliseconds since 1970, for the administrator.
    pub restored_unix_ms: u64,
    /// Migrations with lower numbers may have continued without this journal.
    pub numbers_from: u64,
    /// The volumes whose owner is not settled.
    pub volumes: Vec<RestoredVolume>,
    /// Further facts, in a record of their own. Without that record the list of hosts is unknown.
    #[serde(skip)]
    pub more: RestoredMore,
}

/// Further facts about a restored journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredMore {
    /// Whether this host's list names every host that may have taken a volume since the backup.
    pub list: HostList,
    /// The hosts that must be asked, listed or not.
    pub hosts: Vec<NamedHost>,
    /// The volumes that had left for other hosts, and may have returned since.
    pub departed: BTreeSet<VolumeId>,
    /// The volumes whose size at the loss is known, from the replaced journal.
    pub sized: BTreeSet<VolumeId>,
}

/// A host, with the name that users know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamedHost {
    /// The identity of the host.
    pub id: HostId,
    /// The name of the host, as configured here.
    pub name: String,
}

/// Whether the list of hosts is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostList {
    /// Every host paired since the backup is in the list, or in [`RestoredMore::hosts`].
    Complete,
    /// The list may be incomplete, for this reason.
    Unknown(Unlisted),
}

/// The reason why a list may be incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unlisted {
    /// There is no list at all.
    Missing,
    /// The list cannot be read.
    Unreadable,
    /// The list was restored or edited, or was begun after the backup of the journal.
    OfAnotherTime,
}

impl Default for HostList {
    fn default() -> Self {
        Self::Unknown(Unlisted::OfAnotherTime)
    }
}

/// A volume that may or may not be this host's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredVolume {
    /// The volume's state in the backup.
    pub volume: VolumeState,
    /// A reason why the answers of other hosts do not suffice; `None`: they do.
    pub doubt: Option<Doubt>,
}

/// A fact about a volume that no other host can know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Doubt {
    /// The image is a device or an export, which stays in place when its volume leaves for another store.
    Lasting,
    /// The volume was a complete copy that waited for its source.
    Copy {
        /// The host that is the source.
        peer: HostId,
        /// The name of that host, as configured here.
        peer_name: String,
    },
    /// The volume was moving between two stores of this host.
    BetweenStores {
        /// The other possible location of its image.
        other: ImageLocation,
    },
    /// The volume lacked blocks, and the set of missing blocks is lost.
    Hollow {
        /// The name of the host that had these blocks.
        peer_name: String,
    },
}

impl State {
    /// Returns the volumes of a restored journal whose owner is not settled.
    pub fn restored_volumes(&self) -> impl Iterator<Item = (VolumeId, &RestoredVolume)> {
        let volumes = self.restored.iter().flat_map(|restored| &restored.volumes);
        volumes.map(|waiting| (waiting.volume.record.volume, waiting))
    }

    /// Returns the volumes that had left before the backup, and may have returned since.
    pub fn departures_in_question(&self) -> impl Iterator<Item = &Moved> {
        let departed = self.restored.iter().flat_map(|restored| &restored.more.departed);
        departed.filter_map(|volume| self.moved.get(volume))
    }

    /// Returns whether a volume that had left may have returned since.
    pub fn is_departure_in_question(&self, volume: VolumeId) -> bool {
        self.departures_in_question().any(|moved| moved.volume.record.volume == volume)
    }

    /// Returns all volumes in question, as the backup has them.
    pub fn in_question(&self) -> impl Iterator<Item = &VolumeState> {
        let volumes = self.restored_volumes().map(|(_, waiting)| &waiting.volume);
        volumes.chain(self.departures_in_question().map(|moved| &moved.volume))
    }

    /// Returns the volume in question with this identity.
    pub fn questioned(&self, volume: VolumeId) -> Option<&VolumeState> {
        self.in_question().find(|known| known.record.volume == volume)
    }

    /// Returns the volume in question with this name.
    pub fn questioned_named(&self, name: &str) -> Option<(VolumeId, &VolumeState)> {
        let found = self.in_question().find(|known| known.record.name == name);
        found.map(|known| (known.record.volume, known))
    }

    /// Returns every possible volume of this host: served ones, and those in question. Their images are neither used for
    /// another volume nor cleaned up.
    pub fn claimed_records(&self) -> impl Iterator<Item = &VolumeRecord> {
        let waiting = self.in_question().map(|waiting| &waiting.record);
        self.volumes.values().map(|known| &known.record).chain(waiting)
    }

    /// Returns the restored volume with this identity.
    pub fn restored_volume(&self, volume: VolumeId) -> Option<&RestoredVolume> {
        self.restored_volumes().find(|(id, _)| *id == volume).map(|(_, waiting)| waiting)
    }

    /// Returns whether a migration of this host may have continued, or begun, during the time that this journal has lost.
    pub fn is_of_lost_time(&self, migration: MigrationId) -> bool {
        self.restored.as_ref().is_some_and(|restored| migration.0 < restored.numbers_from)
    }

    /// Returns whether the volumes of an incoming migration are this host's although the restored journal ended it: its copies
    /// waited for the source at that time, and were reinstated since.
    pub fn was_reinstated_from(&self, id: MigrationId, recorded: &MigrationState) -> bool {
        let Side::Incoming { volumes, .. } = &recorded.side else { return false };
        let has_come = |came: &VolumeRecord| {
            let here = self.volumes.get(&came.volume).map(|known| known.record.generation);
            let gone = self.moved.get(&came.volume).map(|gone| gone.generation);
            here.or(gone).is_some_and(|known| known > came.generation)
        };
        recorded.has_ended() && self.is_of_lost_time(id) && volumes.iter().all(has_come)
    }

    /// Returns the restoration as the records that follow a snapshot.
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

    /// Notes that a volume which had left is where the backup says.
    pub(super) fn confirm_departure(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        let is_known = self.take_departed(volume);
        is_known.then_some(()).ok_or(Inconsistent::UnknownVolume(volume))
    }

    /// Removes a departed volume from those in question; returns whether it was one.
    pub(super) fn take_departed(&mut self, volume: VolumeId) -> bool {
        self.restored.as_mut().is_some_and(|restored| restored.more.departed.remove(&volume))
    }

    /// Makes a volume this host's again, in a new residency. No state of an earlier residency is read.
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
        // Since the backup it may have come to another file of that name: the one that was examined is its image.
        self.images.remove(&known.record.image.place);
        if let Some(moved) = self.moved.remove(&volume) {
            self.end_taken_back(moved.migration);
        }
        self.volumes.insert(volume, known);
        self.next_migration = self.next_migration.max(stay.0 + 1);
        Ok(())
    }

    /// Ends an unfinished departure whose volume is this host's again.
    fn end_taken_back(&mut self, migration: MigrationId) {
        if let Some(left) = self.migrations.get_mut(&migration).filter(|left| !left.has_ended()) {
            left.stage = Stage::Ended(Outcome::TakenBack);
            left.ended_unix_ms = left.ended_unix_ms.or(Some(left.started_unix_ms));
            left.hollow = None;
        }
    }

    pub(super) fn forget_restored(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        self.take_restored(volume)?;
        self.forget_origins();
        self.forget_images();
        Ok(())
    }

    fn take_restored(&mut self, volume: VolumeId) -> Result<RestoredVolume, Inconsistent> {
        let unknown = Inconsistent::UnknownVolume(volume);
        let waiting = &mut self.restored.as_mut().ok_or(unknown.clone())?.volumes;
        let position = waiting.iter().position(|waiting| waiting.volume.record.volume == volume);
        Ok(waiting.remove(position.ok_or(unknown)?))
    }
}
