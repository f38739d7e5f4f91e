//! Images of migrations within one host: reserved places, targets, and what may be left of them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use migration::journal::{ImageLocation, MigratingVolume};
use migration::stay::ImageRecord;

use crate::checker::journal::left_over;
use crate::checker::owner::Permission;
use crate::disk::{DiskSettings, Role};
use crate::fleet::host::SimHost;
use crate::scenario::MigrationPlan;

const STORES: [&str; 3] = ["a", "b", "c"];

#[derive(Default)]
pub(in crate::fleet) struct LocalImages {
    /// Reserved places of images that are not made yet: empty files, which a start does not look for.
    rooms: RefCell<BTreeSet<String>>,
    /// Images that were reported as left over, or kept on purpose.
    excused: RefCell<BTreeSet<String>>,
    notes: RefCell<BTreeMap<String, ImageRecord>>,
    made: Cell<u32>,
    pub(in crate::fleet) has_moved: Cell<bool>,
    pub(super) begun: Cell<usize>,
}

impl LocalImages {
    pub(super) fn excuse(&self, path: &str) {
        self.excused.borrow_mut().insert(path.to_owned());
    }

    pub(super) fn take(&self, moving: &[MigratingVolume]) {
        let paths = moving.iter().map(|moving| moving.target.place.name().to_owned());
        self.rooms.borrow_mut().extend(paths);
    }

    pub(super) fn give_back(&self, path: &str) -> bool {
        self.rooms.borrow_mut().remove(path)
    }

    pub(super) fn note(&self, path: &str, record: ImageRecord) {
        self.notes.borrow_mut().insert(path.to_owned(), record);
    }

    pub(super) fn note_of(&self, path: &str) -> Option<ImageRecord> {
        self.notes.borrow().get(path).cloned()
    }

    pub(super) fn notes(&self) -> BTreeMap<String, ImageRecord> {
        self.notes.borrow().clone()
    }

    pub(in crate::fleet) fn crash(&self) {
        self.rooms.take();
    }

    fn next(&self) -> u32 {
        self.made.replace(self.made.get() + 1)
    }
}

impl SimHost {
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
            // After a kill the volume may be in either.
            if let Some(key) = self.key_of_volume(index) {
                self.chronicles.note_image(key, disk.look());
            }
        }
    }

    /// Renames the image that a volume has left for another store, so that it is not found by its name.
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

    /// Checks that ended and interrupted migrations within this host have left only the volumes' images and reported ones.
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
