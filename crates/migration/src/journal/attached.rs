//! Volumes that are attached at hosts which never owned them (`sterna volume attach`).
//!
//! ```text
//!   the host that gives                        the host that is given
//!   AttachmentGiven ──► given ── requests ◄──  Attached ──► moved, always forwarded
//!        │ AttachmentEnded                          │ Detached, or the volume itself arrives
//!        ▼                                          ▼
//!     refused                                    forgotten, or the volume is owned
//! ```
//! At the host that is given, an attached volume is one that "has left": to the host that gave. So everything that holds for
//! volumes with forwarded clients holds for it: the lane, the arrival into that lane, the questions after a restored journal. The
//! number of the attachment is one of that host's migrations, and no migration ever has it. If the volume was there before, the
//! record of its departure stays, and the attachment only says that the volume is always forwarded.
//!
//! These facts are not in the snapshot, whose format cannot change. Their records follow it.

use std::collections::BTreeMap;

use chronicle::StayId;
use serde::{Deserialize, Serialize};

use super::record::{ExportAccess, Record, VolumeRecord};
use super::side::{Forwarding, Moved};
use super::state::{Inconsistent, State, VolumeState};
use crate::identity::{HostId, MigrationId, VolumeId};
use crate::planted::{Bug, broken};

/// The right of another host to use a volume, for its own clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenAttachment {
    /// The host that may use the volume.
    pub host: HostId,
    /// The name of that host, as configured here.
    pub host_name: String,
    /// What clients there may do.
    pub access: ExportAccess,
    /// Whether that host has confirmed that it offers the volume.
    pub is_confirmed: bool,
    /// Whether the volume has left for that host since. Its last requests may be under way until the volume is here again.
    pub has_gone_there: bool,
}

/// A volume that this host offers to clients, and that it did not own when it was attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedVolume {
    /// The volume as its clients see it here. It has no image at this host.
    pub record: VolumeRecord,
    /// The number of the attachment, or of the migration by which the volume has left.
    pub number: MigrationId,
    /// The host that has the volume, or leads to the host that has it.
    pub host: HostId,
    /// The name of that host, as configured here.
    pub host_name: String,
    /// Whether the volume was here before, and left by the migration `number`.
    pub has_left: bool,
}

impl State {
    /// Returns the attachment of a volume at this host; `None`: it is not attached here, or is owned.
    pub fn attachment_of(&self, volume: VolumeId) -> Option<&AttachedVolume> {
        let attached = self.attached.get(&volume)?;
        let moved = self.moved.get(&volume)?;
        (moved.migration == attached.number).then_some(attached)
    }

    /// Returns the attachments of a volume that this host has given to other hosts, without those that own it since.
    pub fn attachments_given(&self, volume: VolumeId) -> impl Iterator<Item = &GivenAttachment> {
        let given = self.given.get(&volume).into_iter().flat_map(BTreeMap::values);
        given.filter(|given| !given.has_gone_there)
    }

    /// Returns the volumes that are attached at a host by this one, and those that are attached here by it.
    pub fn attachments_with(&self, host: HostId) -> Vec<VolumeId> {
        let given =
            self.given.keys().filter(|volume| self.attachments_given(**volume).any(|to| to.host == host));
        let attached = self.attached.keys().filter(|volume| {
            self.attachment_of(**volume).is_some_and(|attached| attached.host == host && !attached.has_left)
        });
        given.chain(attached).copied().collect()
    }

    /// Applies *attached*: this host offers the volume to its clients.
    pub(super) fn attach(&mut self, at_unix_ms: u64, attached: &AttachedVolume) {
        let volume = attached.record.volume;
        // The record may follow a snapshot, and the volume may be here since, or have left since.
        let has_come = self.volumes.contains_key(&volume);
        match self.moved.get_mut(&volume) {
            Some(moved) if moved.migration == attached.number => moved.forwarding = Forwarding::Always,
            Some(_) => {}
            None if has_come => {}
            None => drop(self.moved.insert(volume, away(at_unix_ms, attached))),
        }
        self.next_migration = self.next_migration.max(attached.number.0 + 1);
        self.attached.insert(volume, attached.clone());
    }

    /// Returns the attachment that has become a volume of this host, until the host that gave it is told.
    pub fn attachment_before(&self, volume: VolumeId) -> Option<&AttachedVolume> {
        self.attached.get(&volume).filter(|_| self.volumes.contains_key(&volume))
    }

    /// Applies *detached*. A volume that was here before is forwarded while clients are connected, as after any departure.
    pub(super) fn detach(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        let is_present = self.attachment_of(volume).is_some();
        let attached = self.attached.remove(&volume).ok_or(Inconsistent::UnknownVolume(volume))?;
        if !is_present {
            return Ok(());
        }
        if !attached.has_left {
            self.moved.remove(&volume);
            self.take_departed(volume);
        } else if let Some(moved) = self.moved.get_mut(&volume) {
            moved.forwarding = Forwarding::WhileConnected;
        }
        Ok(())
    }

    pub(super) fn give_attachment(&mut self, volume: VolumeId, given: &GivenAttachment) {
        self.given.entry(volume).or_default().insert(given.host, given.clone());
    }

    pub(super) fn end_attachment(&mut self, volume: VolumeId, host: HostId) {
        if broken(Bug::AttachmentOutlivesItsEnd) {
            return;
        }
        if let Some(given) = self.given.get_mut(&volume) {
            given.remove(&host);
        }
        self.given.retain(|_, hosts| !hosts.is_empty());
    }

    /// Notes that a volume has left for a host, or has not after all.
    pub(super) fn attachment_goes(&mut self, volume: VolumeId, host: HostId, has_gone_there: bool) {
        if let Some(given) = self.given.get_mut(&volume).and_then(|hosts| hosts.get_mut(&host)) {
            given.has_gone_there = has_gone_there;
        }
    }

    /// Ends the rights of hosts that have owned a volume since, because it is here again: they have others by its migrations.
    pub(super) fn attachments_return(&mut self, volume: VolumeId, from: HostId) {
        if let Some(given) = self.given.get_mut(&volume) {
            given.retain(|host, given| !given.has_gone_there && *host != from);
        }
        self.given.retain(|_, hosts| !hosts.is_empty());
    }

    /// Forgets attachments at this host whose volume is owned here, or has left by another way since.
    pub(super) fn forget_attached(&mut self) {
        let ended: Vec<_> = self
            .attached
            .iter()
            .filter(|(volume, attached)| {
                self.attachment_of(**volume).is_none() && !self.is_returning(**volume, attached.number)
            })
            .map(|(volume, _)| *volume)
            .collect();
        ended.iter().for_each(|volume| drop(self.attached.remove(volume)));
    }

    /// Returns whether a volume has arrived here in the place of an attachment, and may still be handed back.
    fn is_returning(&self, volume: VolumeId, number: MigrationId) -> bool {
        let mut returning = self.migrations.values().flat_map(|migration| &migration.returning);
        returning.any(|moved| moved.volume.record.volume == volume && moved.migration == number)
    }

    /// Returns the attachments as the records that follow a snapshot.
    pub(super) fn attachment_records(&self) -> impl Iterator<Item = Record> {
        let given = self.given.iter().flat_map(|(volume, hosts)| {
            let given = hosts.values().cloned();
            given.map(|given| Record::AttachmentGiven { volume: *volume, given: Box::new(given) })
        });
        let attached = self.attached.values().map(|attached| Record::Attached(Box::new(attached.clone())));
        given.chain(attached)
    }
}

/// Returns an attached volume as one that has left.
fn away(at_unix_ms: u64, attached: &AttachedVolume) -> Moved {
    let record = attached.record.clone();
    let generation = record.generation;
    let stay = StayId::Arrived(attached.number.0);
    Moved {
        volume: VolumeState { record, stay, added_unix_ms: at_unix_ms, resizing_to: None },
        migration: attached.number,
        host: attached.host,
        host_name: attached.host_name.clone(),
        generation,
        forwarding: Forwarding::Always,
        at_unix_ms,
    }
}
