//! Who owned a volume's content before Sterna served it, and what happens to its image when the volume is removed.
//!
//! Sterna may delete a volume that it created (`volume create`). A volume whose image existed before (`volume add`, an adopted
//! disk) stays the user's wherever it moves. Its image in a store is the only current copy.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::image::ImageLocation;
use super::record::Record;
use super::state::State;
use crate::identity::VolumeId;

/// The owner of a volume's content before Sterna served it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// The origin is not recorded.
    #[default]
    Unknown,
    /// Sterna created the volume's first image.
    Made,
    /// The first image existed before, and was served in place.
    Given,
}

/// The user's request for the image of a volume that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageWish {
    /// The user has not said.
    Unsaid,
    /// The image is to stay.
    Keep,
    /// The image is to be deleted, whatever its origin.
    Delete,
}

/// The decision on the image of a volume that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFate {
    /// The image is deleted.
    Delete,
    /// The image stays: by request, or because it cannot be deleted.
    Keep,
    /// The image stays, because its content existed before Sterna served it.
    KeepGiven,
    /// The image stays, because the origin of its content is unknown.
    KeepUnknown,
}

impl ImageFate {
    /// Decides what happens to `image`, whose volume has this origin. Devices, exports and files served in place always stay.
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
    /// Returns the origin of a volume's content. If the journal has no record, a volume that was never handed over has the
    /// origin of its image.
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

    /// Returns the whole state as the records that begin a journal.
    pub fn snapshot(&self) -> Vec<Record> {
        let origins = self
            .origins
            .iter()
            .map(|(volume, origin)| Record::OriginKnown { volume: *volume, origin: *origin });
        let snapshot = std::iter::once(Record::Snapshot(Box::new(self.clone())));
        let others = self.filling_records().chain(self.order_records()).chain(self.restored_records());
        let others = others.chain(self.image_records()).chain(self.attachment_records());
        let others = others.chain(self.snapshot_records());
        snapshot.chain(origins).chain(others).collect()
    }

    /// Notes the origin that was reported for a volume. The origin `Given` never changes, whatever is reported.
    pub(super) fn learn_origin(&mut self, volume: VolumeId, told: Origin) {
        let known = self.origins.entry(volume).or_default();
        if *known != Origin::Given && told != Origin::Unknown {
            *known = told;
        }
    }

    /// Forgets the origins of volumes that this host does not need to know.
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
