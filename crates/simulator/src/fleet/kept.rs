//! What a host keeps of volumes that left it: images that a way home may begin with.
//!
//! It stands in for the files and records of the daemon's `replicas.rs`: an image is recorded durably when it has been kept,
//! the record goes before anything may be written to the image, and one that somebody has touched is not trusted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use chronicle::Generation;
use migration::{MigrationId, VolumeId};

/// The images that one host keeps, by volume: a later one takes the place of an earlier.
#[derive(Default)]
pub(super) struct KeptImages(RefCell<BTreeMap<VolumeId, KeptImage>>);

/// One image that was kept.
#[derive(Clone, Debug)]
pub(super) struct KeptImage {
    /// Where it is.
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
