//! Whose a volume's content was before Sterna served it, and what becomes of its image when the volume is removed.
//!
//! A volume that was made here (`volume create`) is Sterna's to delete. One whose image was somebody's (`volume add`, an
//! adopted disk) stays theirs wherever it moves: its image in a store is the only current copy of what they had.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::Record;
use super::state::State;
use crate::identity::VolumeId;

/// Whose a volume's content was before Sterna served it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// Nobody has said: it came from a host, or is in a journal, of a version that does not know.
    #[default]
    Unknown,
    /// Sterna made its first image.
    Made,
    /// Its first image was somebody's, and was served in place.
    Given,
}

/// What somebody wants done with the image of a volume that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageWish {
    /// They have not said.
    Unsaid,
    /// It is to stay.
    Keep,
    /// It is to go, whosever it was.
    Delete,
}

/// What becomes of the image of a volume that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFate {
    /// It is deleted.
    Delete,
    /// It stays: somebody wants that, or there is nothing that could be deleted.
    Keep,
    /// It stays, because its content was somebody's before Sterna served it.
    KeepGiven,
    /// It stays, because nobody knows whose its content was.
    KeepUnknown,
}

impl ImageFate {
    /// What becomes of `image`, whose volume has this origin. A device, an export and a file that is served where it was
    /// stay in any case.
    pub fn of(image: &ImageLocation, origin: Origin, wish: ImageWish) -> Self {
        if image.place.outlasts_its_volume() {
            return Self::Keep;
        }
        if image.is_adopted() {
            return Self::KeepGiven;
        }
        match (wish, origin) {
            (ImageWish::Keep, _) => Self::Keep,
            (ImageWish::Delete, _) | (ImageWish::Unsaid, Origin::Made) => Self::Delete,
            (ImageWish::Unsaid, Origin::Given) => Self::KeepGiven,
            (ImageWish::Unsaid, Origin::Unknown) => Self::KeepUnknown,
        }
    }
}

impl State {
    /// Whose the volume's content was. What the journal does not say, a volume says that was never handed over: it is what
    /// it was when it was added.
    pub fn origin_of(&self, volume: VolumeId) -> Origin {
        if let Some(origin) = self.origins.get(&volume) {
            return *origin;
        }
        match self.volumes.get(&volume).map(|known| &known.record) {
            Some(record) if record.image.is_adopted() => Origin::Given,
            Some(record) if record.generation.0 == 0 => Origin::Made,
            _ => Origin::Unknown,
        }
    }

    /// All of it as the records that a journal begins with.
    pub fn snapshot(&self) -> Vec<Record> {
        let origins = self
            .origins
            .iter()
            .map(|(volume, origin)| Record::OriginKnown { volume: *volume, origin: *origin });
        let snapshot = std::iter::once(Record::Snapshot(Box::new(self.clone())));
        let others = self.filling_records().chain(self.order_records()).chain(self.restored_records());
        snapshot.chain(origins).chain(others).collect()
    }

    /// Takes what is said of a volume's origin. What was somebody's stays so, whoever says otherwise.
    pub(super) fn learn_origin(&mut self, volume: VolumeId, told: Origin) {
        let known = self.origins.entry(volume).or_default();
        if *known != Origin::Given && told != Origin::Unknown {
            *known = told;
        }
    }

    /// Forgets the origins of volumes that nothing here is about any more.
    pub(super) fn forget_origins(&mut self) {
        let moving: BTreeSet<VolumeId> =
            self.unfinished().flat_map(|(_, state)| &state.volumes).map(|moving| moving.volume).collect();
        let restored: BTreeSet<VolumeId> = self.in_question().map(|waiting| waiting.record.volume).collect();
        let (volumes, moved) = (&self.volumes, &self.moved);
        self.origins.retain(|volume, _| {
            let is_known = volumes.contains_key(volume) || moved.contains_key(volume);
            is_known || moving.contains(volume) || restored.contains(volume)
        });
    }
}
