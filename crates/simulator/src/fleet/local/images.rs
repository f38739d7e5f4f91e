//! Images of migrations within one host: places that are taken, targets that are made there, and what may be left of them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use migration::journal::{ImageLocation, MigratingVolume};
use migration::stay::ImageRecord;

use crate::checker::journal::left_over;
use crate::checker::owner::Permission;
use crate::disk::{DiskSettings, Role};
use crate::fleet::host::SimHost;
use crate::scenario::MigrationPlan;

/// Names of the stores.
const STORES: [&str; 3] = ["a", "b", "c"];

/// What a host knows of migrations between its own stores.
#[derive(Default)]
pub(in crate::fleet) struct LocalImages {
    /// Places that are taken for images that are not made yet: empty files, which a start does not look for.
    rooms: RefCell<BTreeSet<String>>,
    /// Images that somebody was told of that they are left, or that were kept on purpose.
    excused: RefCell<BTreeSet<String>>,
    /// How images that are copied to looked when they were begun, gone on with, or left, as a file in the data folder has it.
    notes: RefCell<BTreeMap<String, ImageRecord>>,
    made: Cell<u32>,
    /// Volumes have gone to another store here.
    pub(in crate::fleet) has_moved: Cell<bool>,
    /// Migrations that were begun.
    pub(super) begun: Cell<usize>,
}

impl LocalImages {
    /// Somebody was told that the image could not be dealt with.
    pub(super) fn excuse(&self, path: &str) {
        self.excused.borrow_mut().insert(path.to_owned());
    }

    pub(super) fn take(&self, moving: &[MigratingVolume]) {
        let paths = moving.iter().map(|moving| moving.target.place.name().to_owned());
        self.rooms.borrow_mut().extend(paths);
    }

    /// Gives a place back; tells whether it was taken and empty.
    pub(super) fn give_back(&self, path: &str) -> bool {
        self.rooms.borrow_mut().remove(path)
    }

    /// Notes how an image that is copied to looks.
    pub(super) fn note(&self, path: &str, record: ImageRecord) {
        self.notes.borrow_mut().insert(path.to_owned(), record);
    }

    /// What was noted of an image.
    pub(super) fn note_of(&self, path: &str) -> Option<ImageRecord> {
        self.notes.borrow().get(path).cloned()
    }

    /// What was noted of all of them.
    pub(super) fn notes(&self) -> BTreeMap<String, ImageRecord> {
        self.notes.borrow().clone()
    }

    /// The daemon is gone, and what it has not told the journal of with it.
    pub(in crate::fleet) fn crash(&self) {
        self.rooms.take();
    }

    fn next(&self) -> u32 {
        self.made.replace(self.made.get() + 1)
    }
}

impl SimHost {
    /// Where all volumes of this host are to go: another store of it.
    pub(super) fn choose_store(&self) -> Vec<MigratingVolume> {
        let state = self.journal().acknowledged();
        let here = state.volumes.values().next().map_or("a", |volume| volume.record.image.store.as_str());
        let others: Vec<_> = STORES.into_iter().filter(|store| *store != here).collect();
        let store = self.random.borrow_mut().pick(&others);
        let moving = state.volumes.values().enumerate().map(|(index, volume)| {
            let path = format!("/{}/{store}/{index}.{}", self.place.letter(), self.local.next());
            let target = ImageLocation::raw_file(store, path);
            MigratingVolume { volume: volume.record.volume, source: volume.record.image.clone(), target }
        });
        moving.collect()
    }

    /// Makes the images of volumes that are to go there.
    pub(super) fn make_local_images(&self, moving: &[MigratingVolume], plan: &MigrationPlan) {
        for (index, moving) in moving.iter().enumerate() {
            let settings = {
                let mut random = self.random.borrow_mut();
                DiskSettings {
                    size_bytes: self.manner.geometries[index].size,
                    sector_bytes: random.pick(&[512, 4096]),
                    latency: plan.target_latency,
                    tail_percent: random.pick(&[0, 2, 10, 30]),
                }
            };
            let path = moving.target.place.name();
            self.local.give_back(path);
            let disk = self.new_image(path, settings);
            self.note_new_copy(path);
            // The volume may be in either when the daemon is killed.
            if let Some(key) = self.key_of_volume(index) {
                self.chronicles.note_image(key, disk.look());
            }
        }
    }

    /// Keeps the image that a volume has left for another of this host, so that nothing finds it by its name.
    pub(super) fn put_aside(&self, path: &str) {
        self.check_deletion(path);
        let image = self.images.borrow_mut().remove(path);
        if let Some(image) = image {
            image.set_permission(Permission::Forbidden);
            image.set_role(Role::Bystander);
            let aside = format!("{path}.aside");
            self.local.excuse(&aside);
            self.images.borrow_mut().insert(aside, image);
        }
    }

    /// Of migrations within this host that have ended, or were interrupted before this start, nothing is left but what their
    /// volumes are in and what somebody was told of.
    pub(in crate::fleet) fn check_left_over(&self) {
        let (images, rooms, excused) =
            (self.images.borrow(), self.local.rooms.borrow(), self.local.excused.borrow());
        let images = images.keys().map(String::as_str).collect();
        if let Some(wrong) = self.journal().look(|state, _| left_over(state, &images, &excused)) {
            self.world.violated("journal", || format!("{}: {wrong}", self.place));
        }
        if let Some(room) = rooms.iter().next() {
            let detail = || format!("{room} is taken, and nobody makes an image there");
            self.world.violated("journal", detail);
        }
    }
}
