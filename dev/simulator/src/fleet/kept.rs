//! The kept images of volumes that left a host, for an incremental return.
//!
//! This stands in for the daemon's `replicas.rs`. A kept image is recorded durably. The record is deleted before the image may be
//! written. A touched image is not trusted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use chronicle::Generation;
use migration::journal::Moved;
use migration::{MigrationId, StayKey, VolumeId};

use super::host::SimHost;
use crate::checker::owner::{Permission, permission};
use crate::disk::{Medium, Role};

/// The kept images of one host, by volume: a later one replaces an earlier one.
#[derive(Default)]
pub(super) struct KeptImages(RefCell<BTreeMap<VolumeId, KeptImage>>);

#[derive(Clone, Debug)]
pub(super) struct KeptImage {
    pub(super) path: String,
    pub(super) departure: MigrationId,
    pub(super) generation: Generation,
    is_touched: bool,
}

impl KeptImages {
    /// Records an image; returns the one that it replaces.
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

    /// Takes the kept image of a returning volume, if it can be trusted, and deletes the record.
    pub(super) fn take(&self, volume: VolumeId) -> Option<KeptImage> {
        self.0.borrow_mut().remove(&volume).filter(|image| !image.is_touched)
    }

    pub(super) fn touch(&self) -> Option<String> {
        let mut images = self.0.borrow_mut();
        let image = images.values_mut().find(|image| !image.is_touched)?;
        image.is_touched = true;
        Some(image.path.clone())
    }
}

impl SimHost {
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

    /// Makes the kept image of a volume, if there is one, the target at `path`; returns its departure and generation.
    pub(super) fn take_kept(&self, volume: VolumeId, path: &str) -> Option<(MigrationId, Generation)> {
        let kept = self.kept.take(volume)?;
        let disk = self.images.borrow_mut().remove(&kept.path)?;
        disk.set_permission(self.journal().look(|state, _| permission(state, path)));
        self.images.borrow_mut().insert(path.to_owned(), disk);
        self.world.note("take", self.place.index() as u64, kept.generation.0);
        Some((kept.departure, kept.generation))
    }
}
