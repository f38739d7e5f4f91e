//! Snapshots of volumes, and volumes that are being reverted to one.
//!
//! ```text
//!   VolumeAdded + SnapshotKnown ──► a read-only volume that knows what it is of ── VolumeRemoved ──► gone
//!   RevertBegun ──► the volume is not served, the snapshot is not removed ── Reverted ──► served
//! ```
//! These facts are not in the snapshot of the state, whose format cannot change. Their records follow it.

use serde::{Deserialize, Serialize};

use super::record::Record;
use super::state::State;
use crate::identity::VolumeId;

/// What a volume is a snapshot of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotOf {
    /// The volume, which may have left or be gone.
    pub volume: VolumeId,
    /// The name of that volume when the snapshot was taken.
    pub name: String,
    /// The label of the snapshot.
    pub label: String,
    /// When it was ordered, in milliseconds since 1970; for the administrator.
    pub taken_unix_ms: u64,
    /// The same for all snapshots that were cut off at one instant.
    pub group: [u8; 16],
}

impl State {
    /// Returns the snapshots of a volume that are volumes of this host.
    pub fn snapshots_of(&self, volume: VolumeId) -> impl Iterator<Item = (VolumeId, &SnapshotOf)> {
        let snapshots = self.snapshots.iter().map(|(id, taken)| (*id, taken));
        snapshots.filter(move |(id, taken)| taken.volume == volume && self.volumes.contains_key(id))
    }

    /// Returns the first of these names that is a snapshot's.
    pub fn snapshot_among<'a>(&self, names: impl IntoIterator<Item = &'a String>) -> Option<&'a String> {
        let is_snapshot =
            |name: &&String| self.volume_named(name).is_some_and(|(id, _)| self.snapshots.contains_key(&id));
        names.into_iter().find(is_snapshot)
    }

    /// Returns the volume that is being reverted to this snapshot.
    pub fn reverting_to(&self, snapshot: VolumeId) -> Option<VolumeId> {
        self.reverts.iter().find(|(_, to)| **to == snapshot).map(|(volume, _)| *volume)
    }

    /// Applies *revert begun*. The volumes may be unconfirmed, if the journal was restored.
    pub(super) fn begin_reverts(&mut self, reverts: &[(VolumeId, VolumeId)]) {
        self.reverts.extend(reverts.iter().copied());
    }

    /// Forgets what concerns a volume that is removed.
    pub(super) fn forget_snapshot(&mut self, volume: VolumeId) {
        self.snapshots.remove(&volume);
        self.reverts.remove(&volume);
    }

    /// Returns snapshots and reverts as the records that follow a snapshot of the state. A snapshot that has left this host is one
    /// again if it returns.
    pub(super) fn snapshot_records(&self) -> impl Iterator<Item = Record> {
        let known = self
            .snapshots
            .iter()
            .map(|(volume, taken)| Record::SnapshotKnown { volume: *volume, taken: Box::new(taken.clone()) });
        let reverts: Vec<_> = self.reverts.iter().map(|(volume, snapshot)| (*volume, *snapshot)).collect();
        known.chain((!reverts.is_empty()).then_some(Record::RevertBegun { reverts }))
    }
}
