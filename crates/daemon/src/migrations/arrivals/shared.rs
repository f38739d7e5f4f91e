//! Images that both hosts of a migration can open: which the target may lease out, and which the source can find.
//!
//! ```text
//!   target: image made ──► token put beside it ──► named in the acceptance
//!   source: looks in its folders for it ──► noted in the metadata ──► the lane tries, and reports the way of the blocks
//! ```
//! The lanes prove what was found ([`lane::shared_storage`]). Blocks of every other image go over the link.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::device::ALIGNMENT;
use block::store::image::Caching;
use block::store::{Image, Opened};
use lane::shared_storage::Secret;
use lane::{ArrivingStore, Leasable, Promise, SharedImage};
use migration::journal::{ImageLocation, MigrationState, Stage, VolumeRecord};
use migration::wire::{Beside, Sharing};
use migration::{MigrationId, VolumeId};

use crate::error::RequestError;
use crate::host::{Arrivals, blocking};
use crate::migrations::metadata::SharedNote;
use crate::stores::{StoreKind, image_name};
use crate::volumes::views::answer;

/// A place where this host may have another host's image.
pub(crate) struct Found {
    pub(crate) volume: VolumeId,
    pub(crate) image: SharedImage,
}

impl Arrivals {
    /// Makes a target that may be leased to the source's host, if that host wants it and the image allows it. Also returns what
    /// that host must look for.
    pub(crate) async fn offer_lease(
        &self,
        record: &VolumeRecord,
        store: Opened,
        sharing: Sharing,
    ) -> (ArrivingStore, Option<Beside>) {
        let image = match (sharing, store) {
            (Sharing::Wanted, Opened::File(image)) if is_lendable(&record.image, &image) => image,
            (_, store) => return (ArrivingStore::Own(store), None),
        };
        let path = image.path().to_owned();
        let file = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let held = Arc::clone(image.held());
        let offered = blocking(move || {
            SharedImage::offer(&path, &*held)
                .map_err(|error| RequestError::storage("put a token beside", &path, &error))
        });
        match (offered.await, file) {
            (Ok(shared), Some(file)) => {
                let beside = Beside { file, token: shared.token.0 };
                let leasable =
                    Leasable { size_bytes: image.size(), image: Some(image), shared, promise: Promise::None };
                (ArrivingStore::Leasable(Box::new(leasable)), Some(beside))
            }
            (offered, _) => {
                if let Err(error) = offered {
                    tracing::warn!(volume = %record.name, reason = %error.message(), "its image is not leased");
                }
                (ArrivingStore::Own(image.into()), None)
            }
        }
    }

    /// Reopens the target of a migration that a restart interrupted. The source may hold a lease of it at this moment.
    pub(crate) async fn reopen_arriving(
        &self,
        record: &VolumeRecord,
        recorded: &MigrationState,
    ) -> Result<ArrivingStore, RequestError> {
        if self.journal.read(|state| state.is_reservoir(record.image.place.name())) {
            return Ok(ArrivingStore::Own(self.serving.open_for_resuming(record).await?));
        }
        let (path, size_bytes) = (record.image.place.file().map(PathBuf::from), record.size_bytes);
        let shared = blocking(move || {
            let Some(path) = path else { return Ok(None) };
            let is_there = std::fs::metadata(&path).is_ok_and(|found| found.len() == size_bytes);
            Ok(SharedImage::find(&path).ok().flatten().filter(|_| is_there))
        });
        let Some(shared) = shared.await? else {
            return Ok(ArrivingStore::Own(self.serving.open_for_resuming(record).await?));
        };
        let (image, promise) = match recorded.stage {
            // The source has it open, or will ask for it.
            Stage::Copying => (None, Promise::None),
            // N.B. a lease is taken over only if the image is locked here.
            _ => match self.serving.open_for_resuming(record).await? {
                Opened::File(image) => (Some(image), Promise::Given),
                other => return Ok(ArrivingStore::Own(other)),
            },
        };
        Ok(ArrivingStore::Leasable(Box::new(Leasable { image, shared, size_bytes, promise })))
    }

    /// Looks for a folder of this host in which the other host has made an image for the volume `name`.
    pub(crate) async fn find_shared(
        &self,
        volume: VolumeId,
        name: &str,
        beside: Option<&Beside>,
    ) -> Option<Found> {
        let Beside { file, token } = beside?;
        // The peer's name is looked up only in folders of this host.
        if image_name(file).is_none_or(|(found, _)| found != name) {
            return None;
        }
        let stores = self.stores.iter().filter_map(|store| match store.kind() {
            StoreKind::Folder { folder, .. } => Some(folder.path().to_owned()),
            StoreKind::Single(_) => None,
        });
        let folders = stores.chain(self.config.hosts.shared_folders.iter().cloned());
        let images = folders.map(|folder| SharedImage::named(folder.join(file), Secret(*token)));
        for image in images.collect::<Vec<_>>() {
            let look = image.clone();
            // A server that does not answer must not cause a long wait.
            if answer(&self.looks, move || look.is_there()).await == Some(true) {
                return Some(Found { volume, image });
            }
        }
        None
    }

    /// Records which images were found: after a restart this daemon continues with them.
    pub(crate) async fn note_shared(&self, migration: MigrationId, found: &[Found]) {
        let note = |found: &Found| {
            let path = found.image.path.to_str()?.to_owned();
            Some(SharedNote { volume: found.volume.to_string(), path, is_used: None })
        };
        let notes: Vec<_> = found.iter().filter_map(note).collect();
        if let (false, Some(begun)) = (notes.is_empty(), self.journal.begun_unix_ms(migration)) {
            self.metadata_folder.note(migration, begun, |metadata| metadata.shared = notes).await;
        }
    }

    /// Returns the image that was found for a volume before a restart. The lane proves again that it is the right one.
    pub(crate) async fn find_shared_again(
        self: &Arc<Self>,
        migration: MigrationId,
        volume: VolumeId,
    ) -> Option<SharedImage> {
        let metadata = self.metadata_folder.of(migration, self.journal.begun_unix_ms(migration)?)?;
        let volume = volume.to_string();
        let noted = metadata.shared.into_iter().find(|noted| noted.volume == volume)?;
        if noted.is_used == Some(false) {
            return None;
        }
        answer(&self.looks, move || SharedImage::find(Path::new(&noted.path)).ok().flatten()).await?
    }
}

/// Returns whether an image can be leased: its size must be whole blocks of direct I/O, or its end could not be read meanwhile.
fn is_lendable(location: &ImageLocation, image: &Image) -> bool {
    location.place.file().is_some()
        && image.caching() == Caching::Direct
        && image.size().is_multiple_of(u64::from(ALIGNMENT))
}
