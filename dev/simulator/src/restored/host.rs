//! A host of the fleet with restored journals: its journal, and images that outlive it.

use std::collections::{BTreeMap, BTreeSet};

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, HostList, ImageFormat, ImageLocation, NamedHost, Place, Record, Stage, State,
    Unlisted, VolumeRecord,
};
use migration::restoration::{self, Look, Measured, Restoration, SizeUnknown, Surroundings, size_now};
use migration::{HostId, MigrationId, VolumeId};

const FOLDERS: [&str; 3] = ["a", "b", "c"];
const DEVICE: &str = "/dev/one";
pub(super) const DEVICE_BYTES: u64 = 64 << 20;
/// A volume's initial size, and its steps of growth.
pub(super) const SIZE_STEP: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) volume: VolumeId,
    pub(super) writes: u64,
    pub(super) size_bytes: u64,
    /// Whether it is marked as the target of an incomplete migration.
    pub(super) is_half_made: bool,
}

#[derive(Debug)]
pub(super) struct Backup {
    state: State,
    at_unix_ms: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct List {
    pub(super) paired: BTreeSet<HostId>,
    removed: Vec<(HostId, u64)>,
    /// The time since when it is complete.
    since_unix_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListFate {
    Kept,
    Lost,
    /// It is replaced by one of another time, which lacks hosts.
    OfAnotherTime,
}

#[derive(Debug)]
pub(super) struct SimHost {
    pub(super) id: HostId,
    pub(super) state: State,
    pub(super) images: BTreeMap<Place, Image>,
    pub(super) backups: Vec<Backup>,
    pub(super) restoration: Restoration,
    pub(super) has_device: bool,
    pub(super) list: List,
    /// Numbers of migrations and residencies here, with those that the journal has lost.
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
            has_device: number != 1,
            list: List::default(),
            numbers: BTreeSet::new(),
        }
    }

    pub(super) fn make(&mut self, volume: VolumeId) {
        let image = in_folder(FOLDERS[0], volume);
        self.images.insert(
            image.place.clone(),
            Image { volume, writes: 0, size_bytes: SIZE_STEP, is_half_made: false },
        );
        let record = VolumeRecord {
            volume,
            name: name_of(volume),
            size_bytes: SIZE_STEP,
            block_size_bytes: 4096,
            image,
            generation: Generation(0),
            export: ExportSettings::default(),
        };
        self.commit(vec![Record::VolumeAdded(record)]);
        self.back_up(0);
    }

    pub(super) fn back_up(&mut self, at_unix_ms: u64) {
        self.backups.push(Backup { state: self.state.clone(), at_unix_ms });
    }

    pub(super) fn remove_host(&mut self, host: HostId, at_unix_ms: u64) {
        if self.list.paired.remove(&host) {
            self.list.removed.push((host, at_unix_ms));
        }
    }

    pub(super) fn commit(&mut self, records: Vec<Record>) -> bool {
        let mut state = self.state.clone();
        let is_consistent = state.apply(&Entry { at_unix_ms: 0, records }).is_ok();
        if is_consistent {
            self.state = state;
        }
        is_consistent
    }

    pub(super) fn serves(&self, volume: VolumeId) -> bool {
        self.image_of(volume).is_some()
    }

    pub(super) fn image_of(&self, volume: VolumeId) -> Option<&Image> {
        self.images.get(&self.state.volumes.get(&volume)?.record.image.place)
    }

    pub(super) fn write(&mut self, volume: VolumeId, number: u64) {
        let place = self.state.volumes.get(&volume).map(|known| known.record.image.place.clone());
        if let Some(image) = place.and_then(|place| self.images.get_mut(&place)) {
            (image.volume, image.writes) = (volume, number);
        }
    }

    pub(super) fn grow(&mut self, volume: VolumeId, size_bytes: u64) {
        let place = self.state.volumes.get(&volume).map(|known| known.record.image.place.clone());
        if let Some(image) = place.and_then(|place| self.images.get_mut(&place)) {
            image.size_bytes = size_bytes;
        }
    }

    /// Returns the number of the next migration; `None` if it was used before.
    pub(super) fn next_number(&mut self) -> Option<MigrationId> {
        let number = MigrationId(self.state.next_migration);
        self.numbers.insert(number).then_some(number)
    }

    /// Replaces its journal by a backup. `has_later`: the replaced journal can be read.
    pub(super) fn put_back(&mut self, backup: usize, at_unix_ms: u64, fate: ListFate, has_later: bool) {
        let Backup { state, at_unix_ms: backup_unix_ms } = &self.backups[backup];
        let since = restoration::since(state, *backup_unix_ms);
        let new = List { since_unix_ms: at_unix_ms, ..List::default() };
        let (list, known) = match fate {
            ListFate::Kept => {
                let is_of_then = self.list.since_unix_ms <= since;
                let unknown = HostList::Unknown(Unlisted::OfAnotherTime);
                (self.list.clone(), if is_of_then { HostList::Complete } else { unknown })
            }
            ListFate::Lost => (new, HostList::Unknown(Unlisted::Missing)),
            ListFate::OfAnotherTime => {
                let paired = self.list.paired.iter().skip(1).copied().collect();
                (List { paired, ..new }, HostList::Unknown(Unlisted::OfAnotherTime))
            }
        };
        let removed = list.removed.iter().filter(|(_, then)| *then >= since).map(|(host, _)| *host);
        let hosts = list.paired.iter().copied().chain(removed);
        let hosts = hosts.map(|id| NamedHost { id, name: String::new() }).collect();
        let later = self.state.volumes.iter().map(|(volume, known)| (*volume, known.record.size_bytes));
        let sizes = if has_later { later.collect() } else { BTreeMap::new() };
        let found = Surroundings {
            backup_unix_ms: *backup_unix_ms,
            at_unix_ms,
            list: known,
            hosts,
            sizes,
            ..Surroundings::default()
        };
        self.state = restoration::restore(state, &found);
        self.restoration = Restoration::default();
        self.list = list;
    }

    /// Returns the size of a waiting volume; `said`: the administrator's knowledge of it.
    pub(super) fn size_of(&self, volume: VolumeId, said: Option<u64>) -> Option<Result<u64, SizeUnknown>> {
        let known = self.state.questioned(volume)?;
        let image = self.images.get(&known.record.image.place)?;
        let measured = match known.record.image.place.outlasts_its_volume() {
            true => Measured::Room(DEVICE_BYTES),
            false => Measured::Volume(image.size_bytes),
        };
        let is_known =
            self.state.restored.as_ref().is_some_and(|restored| restored.more.sized.contains(&volume));
        Some(size_now(known.record.size_bytes, is_known, measured, said))
    }

    pub(super) fn look(&self, volume: VolumeId) -> Look {
        let Some(waiting) = self.state.questioned(volume) else { return Look::Missing };
        let own = &waiting.record.image.place;
        let Some(image) = self.images.get(own) else { return Look::Missing };
        if image.is_half_made {
            return Look::HalfMade;
        }
        let rivals = FOLDERS.iter().map(|store| in_folder(store, volume).place);
        let is_rival =
            |place: &Place| place != own && self.images.get(place).is_some_and(|image| !image.is_half_made);
        match rivals.into_iter().find(is_rival) {
            Some(rival) => Look::Rival(rival.name().to_owned()),
            None if self.has_device && own.name() != DEVICE => Look::NotAlone(DEVICE.to_owned()),
            None => Look::Fit,
        }
    }

    pub(super) fn free_place(&self, volume: VolumeId, draw: usize) -> Option<ImageLocation> {
        let device = ImageLocation {
            store: "device".to_owned(),
            place: Place::Device(DEVICE.to_owned()),
            format: ImageFormat::Raw,
        };
        let device = self.has_device.then_some(device);
        let places = FOLDERS.iter().map(|store| in_folder(store, volume)).chain(device);
        // A fenced device may be reused once an administrator has released it.
        let is_taken = |image: &ImageLocation| {
            let is_of = |known: &migration::journal::VolumeState| known.record.image.place == image.place;
            let is_awaited = |id: &VolumeId| *id != volume;
            self.state.volumes.iter().any(|(id, known)| is_of(known) && (is_awaited(id) || *id == volume))
                || self.state.in_question().any(is_of)
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

    pub(super) fn is_moving(&self, volume: VolumeId) -> bool {
        let mut moving = self.state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        moving.any(|moving| moving.volume == volume)
    }

    pub(super) fn is_between_stores(&self, volume: VolumeId) -> bool {
        self.state.unfinished().any(|(_, migration)| {
            migration.side.peer().is_none()
                && matches!(migration.stage, Stage::Prepared(_) | Stage::Released(_))
                && migration.volumes.iter().any(|moving| moving.volume == volume)
        })
    }
}

pub(super) fn in_folder(store: &str, volume: VolumeId) -> ImageLocation {
    ImageLocation::raw_file(store, format!("/{store}/{}.img", name_of(volume)))
}

pub(super) fn name_of(volume: VolumeId) -> String {
    format!("v{}", volume.0[0])
}
