//! What a host keeps of volumes that left it: images that a way home may begin with.
//!
//! It stands in for the files and records of the daemon's `replicas.rs`: an image is recorded durably when it has been kept,
//! the record goes before anything may be written to the image, and one that somebody has touched is not trusted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use chronicle::Generation;
use migration::journal::Moved;
use migration::{MigrationId, StayKey, VolumeId};

use super::host::SimHost;
use crate::checker::owner::{Permission, permission};
use crate::disk::{Medium, Role};

/// The images that one host keeps, by volume: a later one takes the place of an earlier.
#[derive(Default)]
pub(super) struct KeptImages(RefCell<BTreeMap<VolumeId, KeptImage>>);

/// One image that was kept.
#[derive(Clone, Debug)]
pub(super) struct KeptImage {
    pub(super) path: String,
    /// The migration by which the volume left.
    pub(super) departure: MigrationId,
    /// The generation of the volume that it is.
    pub(super) generation: Generation,
    /// Somebody has written to it, or put another in its place.
    is_touched: bool,
}

impl KeptImages {
    /// Records an image; returns the one that it takes the place of.
    pub(super) fn record(
        &self,
        volume: VolumeId,
        path: &str,
        departure: MigrationId,
        generation: Generation,
    ) -> Option<KeptImage> {
        let image = KeptImage { path: path.to_owned(), departure, generation, is_touched: false };
        self.0.borrow_mut().insert(volume, image).filter(|former| former.path != path)
    }

    /// The image that a volume that comes home begins with, if there is one that can be trusted. It is recorded no more.
    pub(super) fn take(&self, volume: VolumeId) -> Option<KeptImage> {
        self.0.borrow_mut().remove(&volume).filter(|image| !image.is_touched)
    }

    /// Somebody touches an image; returns where it is.
    pub(super) fn touch(&self) -> Option<String> {
        let mut images = self.0.borrow_mut();
        let image = images.values_mut().find(|image| !image.is_touched)?;
        image.is_touched = true;
        Some(image.path.clone())
    }
}

impl SimHost {
    /// Keeps an image that a volume has left, under another name; done already is done.
    pub(super) fn keep_image(&self, path: &str) {
        let left = self.journal().look(|state, _| {
            let left = |moved: &&Moved| moved.volume.record.image.place.name() == path;
            state.moved.values().find(left).cloned()
        });
        let disk = self.images.borrow_mut().remove(path);
        let (Some(Moved { volume: left, migration, .. }), Some(disk)) = (left, disk) else { return };
        let record = &left.record;
        disk.set_role(Role::Bystander);
        disk.set_permission(Permission::Forbidden);
        let kept = format!("{path}.kept");
        disk.with_medium(Medium::let_go);
        self.images.borrow_mut().insert(kept.clone(), disk);
        if !self.chronicles.vouches(StayKey { volume: record.volume, stay: left.stay }) {
            return;
        }
        if let Some(former) = self.kept.record(record.volume, &kept, migration, record.generation) {
            self.images.borrow_mut().remove(&former.path);
        }
        self.world.note("keep", self.place.index() as u64, record.generation.0);
    }

    /// Makes the image that an earlier stay of a volume has left, if there is one, the target at `path`; says by which
    /// departure it was left, and of which generation it is.
    pub(super) fn take_kept(&self, volume: VolumeId, path: &str) -> Option<(MigrationId, Generation)> {
        let kept = self.kept.take(volume)?;
        let disk = self.images.borrow_mut().remove(&kept.path)?;
        disk.set_permission(self.journal().look(|state, _| permission(state, path)));
        self.images.borrow_mut().insert(path.to_owned(), disk);
        self.world.note("take", self.place.index() as u64, kept.generation.0);
        Some((kept.departure, kept.generation))
    }
}
