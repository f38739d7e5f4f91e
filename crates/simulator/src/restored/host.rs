//! A host of the fleet whose journals are put back: its journal, and images that outlive it.

use std::collections::{BTreeMap, BTreeSet};

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, ImageFormat, ImageLocation, Place, Record, Stage, State, VolumeRecord,
};
use migration::restoration::{self, Look, Restoration};
use migration::{HostId, MigrationId, VolumeId};

/// Stores with folders, by name.
const FOLDERS: [&str; 3] = ["a", "b", "c"];

/// An image.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// Whose bytes are in it.
    pub(super) volume: VolumeId,
    /// Up to which write.
    pub(super) writes: u64,
    /// Whether it is marked as the target of a migration that has not completed it.
    pub(super) is_half_made: bool,
}

/// A host.
#[derive(Debug)]
pub(super) struct SimHost {
    pub(super) id: HostId,
    pub(super) state: State,
    pub(super) images: BTreeMap<Place, Image>,
    pub(super) backups: Vec<State>,
    pub(super) restoration: Restoration,
    /// Numbers that migrations and stays had here, also those that the journal has lost.
    pub(super) numbers: BTreeSet<MigrationId>,
}

impl SimHost {
    pub(super) fn new(number: usize) -> Self {
        Self {
            id: HostId([number as u8 + 1; 32]),
            state: State::default(),
            images: BTreeMap::new(),
            backups: Vec::new(),
            restoration: Restoration::default(),
            numbers: BTreeSet::new(),
        }
    }

    /// Makes a volume here.
    pub(super) fn make(&mut self, volume: VolumeId) {
        let image = in_folder(FOLDERS[0], volume);
        self.images.insert(image.place.clone(), Image { volume, writes: 0, is_half_made: false });
        let record = VolumeRecord {
            volume,
            name: name_of(volume),
            size_bytes: 1 << 20,
            block_size_bytes: 4096,
            image,
            generation: Generation(0),
            export: ExportSettings::default(),
        };
        self.commit(vec![Record::VolumeAdded(record)]);
        self.backups.push(self.state.clone());
    }

    /// Makes records durable; what does not follow from what is true is refused, as the journal does.
    pub(super) fn commit(&mut self, records: Vec<Record>) -> bool {
        let mut state = self.state.clone();
        let is_consistent = state.apply(&Entry { at_unix_ms: 0, records }).is_ok();
        if is_consistent {
            self.state = state;
        }
        is_consistent
    }

    /// Tells whether guests reach the volume's image here.
    pub(super) fn serves(&self, volume: VolumeId) -> bool {
        self.image_of(volume).is_some()
    }

    /// The image that a volume of this host has, if it can be opened.
    pub(super) fn image_of(&self, volume: VolumeId) -> Option<&Image> {
        self.images.get(&self.state.volumes.get(&volume)?.record.image.place)
    }

    pub(super) fn write(&mut self, volume: VolumeId, number: u64) {
        let place = self.state.volumes.get(&volume).map(|known| known.record.image.place.clone());
        if let Some(image) = place.and_then(|place| self.images.get_mut(&place)) {
            *image = Image { volume, writes: number, is_half_made: image.is_half_made };
        }
    }

    /// The number that the next migration gets; `None`: one had it already.
    pub(super) fn next_number(&mut self) -> Option<MigrationId> {
        let number = MigrationId(self.state.next_migration);
        self.numbers.insert(number).then_some(number)
    }

    /// Its journal is one of its backups from now on.
    pub(super) fn put_back(&mut self, backup: usize, at_unix_ms: u64) {
        self.state = restoration::restore(&self.backups[backup], 0, at_unix_ms);
        self.restoration = Restoration::default();
    }

    /// How the image of a volume that waits looks.
    pub(super) fn look(&self, volume: VolumeId) -> Look {
        let Some(waiting) = self.state.restored_volume(volume) else { return Look::Missing };
        let own = &waiting.volume.record.image.place;
        let Some(image) = self.images.get(own) else { return Look::Missing };
        if image.is_half_made {
            return Look::HalfMade;
        }
        let rivals = FOLDERS.iter().map(|store| in_folder(store, volume).place);
        let is_rival =
            |place: &Place| place != own && self.images.get(place).is_some_and(|image| !image.is_half_made);
        match rivals.into_iter().find(is_rival) {
            Some(rival) => Look::Rival(rival.name().to_owned()),
            None => Look::Fit,
        }
    }

    /// A place here where a volume's image could be, other than where it is.
    pub(super) fn free_place(&self, volume: VolumeId, draw: usize) -> Option<ImageLocation> {
        let device = ImageLocation {
            store: "device".to_owned(),
            place: Place::Device("/dev/one".to_owned()),
            format: ImageFormat::Raw,
        };
        let places = FOLDERS.iter().map(|store| in_folder(store, volume)).chain([device]);
        // A device that was fenced may be taken once somebody has said that nobody needs what is on it.
        let is_taken = |image: &ImageLocation| {
            let is_of = |known: &migration::journal::VolumeState| known.record.image.place == image.place;
            let is_awaited = |id: &VolumeId| *id != volume;
            self.state.volumes.iter().any(|(id, known)| is_of(known) && (is_awaited(id) || *id == volume))
                || self.state.restored_volumes().any(|(_, waiting)| is_of(&waiting.volume))
                || self.state.unfinished().any(|(_, migration)| {
                    migration.volumes.iter().any(|moving| {
                        moving.target.place == image.place || moving.source.place == image.place
                    })
                })
                || (image.place.file().is_some() && self.images.contains_key(&image.place))
        };
        let free: Vec<ImageLocation> = places.filter(|image| !is_taken(image)).collect();
        (!free.is_empty()).then(|| free[draw % free.len()].clone())
    }

    /// Tells whether a migration of this host has a volume of its own under way.
    pub(super) fn is_moving(&self, volume: VolumeId) -> bool {
        let mut moving = self.state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        moving.any(|moving| moving.volume == volume)
    }

    /// Tells whether a volume is between two stores past the point where its gate has closed.
    pub(super) fn is_between_stores(&self, volume: VolumeId) -> bool {
        self.state.unfinished().any(|(_, migration)| {
            migration.side.peer().is_none()
                && matches!(migration.stage, Stage::Prepared(_) | Stage::Released(_))
                && migration.volumes.iter().any(|moving| moving.volume == volume)
        })
    }
}

/// Where the image of a volume is in a folder: it is named after the volume.
pub(super) fn in_folder(store: &str, volume: VolumeId) -> ImageLocation {
    ImageLocation::raw_file(store, format!("/{store}/{}.img", name_of(volume)))
}

pub(super) fn name_of(volume: VolumeId) -> String {
    format!("v{}", volume.0[0])
}
