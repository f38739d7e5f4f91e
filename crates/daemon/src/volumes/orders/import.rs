//! Makes volumes from unclaimed images in a store: the file gets the volume's name, and nothing is copied.
//!
//! ```text
//!   unclaimed, and complete ─► locked ─► still so ─► renamed, durably ─► the journal knows the volume ─► served
//! ```
//! A crash before the journal knows the volume leaves the file under its new name, and it can be imported again. Removing the
//! volume keeps the file, because its content is the user's.

use std::path::Path;
use std::sync::Arc;

use api::{FileRole, StoreFile};
use block::store::{Access, Opened};
use migration::CommitFault;
use migration::custody::{Owner, Step, Word};
use migration::journal::{ExportAccess, ExportSettings, ImageFormat, ImageLocation, Origin, Place, Record};

use super::create::{check_size, record};
use super::given;
use crate::error::{RequestError, StoreFileError, StoreFileObstacle};
use crate::host::{VolumeOrders, blocking};
use crate::images::opening::{self, at_once};
use crate::stores::{StoreKind, path_text};
use crate::volumes::claims::within::check_written_whole;
use crate::volumes::registry::Claim;

pub(crate) struct ImportedImage {
    pub(crate) store: String,
    pub(crate) file: String,
    /// `None`: the format is detected.
    pub(crate) format: Option<ImageFormat>,
    pub(crate) export: ExportSettings,
}

/// An image that has the volume's name, and that is locked.
struct Renamed {
    image: ImageLocation,
    size_bytes: u64,
    opened: Opened,
    before: std::path::PathBuf,
}

impl VolumeOrders {
    /// Makes the image in a store the volume `name`. After an error the file is as it was.
    pub(crate) async fn import_image(
        self: &Arc<Self>,
        claim: &Claim,
        name: &str,
        order: ImportedImage,
    ) -> Result<(), RequestError> {
        let (host, volume, export) = (Arc::clone(self), name.to_owned(), order.export.clone());
        let renamed = blocking(move || host.rename_for(&volume, order)).await?;
        let Renamed { image, size_bytes, opened, before } = renamed;
        let after = image.place.clone();
        let record = record(name, size_bytes, image, export);
        let origin = Record::OriginKnown { volume: record.volume, origin: Origin::Given };
        let known = self.known(&record.image.place, &opened)?;
        let added = vec![Record::VolumeAdded(record.clone()), origin].into_iter().chain(known).collect();
        let committed = self.journal.commit(added).await;
        let host = Arc::clone(self);
        blocking(move || {
            if let (Err(CommitFault::NotWritten), Some(after)) = (&committed, after.file().map(Path::new)) {
                host.undo_rename(after, &before);
            }
            // N.B. The image stays open and locked until the journal has it, so that no other program can lock it before.
            drop(opened);
            Ok(committed?)
        })
        .await?;
        claim.created(record.volume);
        Ok(())
    }

    /// Returns the path of a raw image in a store that belongs to nobody, for a standby. Blocks.
    pub(crate) fn image_for_standby(
        &self,
        store: &str,
        file: &str,
    ) -> Result<std::path::PathBuf, RequestError> {
        let path = self.path_in_store(store, file)?;
        let refused = |obstacle| StoreFileError { store: store.to_owned(), file: file.to_owned(), obstacle };
        self.look_at_file(&path).and_then(|found| importable(&found)).map_err(refused)?;
        let place = Place::File(path_text(&path)?);
        let format = given::format_in_place(&place, None)?;
        if format != ImageFormat::Raw {
            let other = "it is no raw image; convert it first: qemu-img convert -O raw".to_owned();
            return Err(refused(StoreFileObstacle::NoImage(other)).into());
        }
        let found = ImageLocation { store: store.to_owned(), place, format };
        self.custody.check(Step::ServeReadWrite, &Owner::Administrator(Word::Plain), &found)?;
        Ok(path)
    }

    /// Checks that the raw image at a path below a store's folder belongs to nobody. Blocks.
    pub(crate) fn may_become_a_standbys(
        &self,
        store: &str,
        file: &str,
        path: &Path,
    ) -> Result<(), RequestError> {
        let refused =
            |obstacle| StoreFileError { store: store.to_owned(), file: words::clean(file), obstacle };
        let found = self.look_at_file(path).map_err(refused)?;
        match found.role {
            // A raw image looks like any file.
            FileRole::Other => {}
            _ => importable(&found).map_err(refused)?,
        }
        let (place, format) = (Place::File(path_text(path)?), ImageFormat::Raw);
        let found = ImageLocation { store: store.to_owned(), place, format };
        Ok(self.custody.check(Step::ServeReadWrite, &Owner::Administrator(Word::Plain), &found)?)
    }

    /// Locks the image, and renames it to the volume's name. Blocks.
    fn rename_for(&self, volume: &str, order: ImportedImage) -> Result<Renamed, RequestError> {
        let ImportedImage { store, file, format, export } = order;
        let before = self.path_in_store(&store, &file)?;
        let refused = |obstacle| StoreFileError { store: store.clone(), file: file.clone(), obstacle };
        let look = || self.look_at_file(&before).and_then(|found| importable(&found)).map_err(refused);
        look()?;
        let place = Place::File(path_text(&before)?);
        let format = given::format_in_place(&place, format)?;
        let access = match export.access {
            ExportAccess::ReadWrite => Access::ReadWrite,
            ExportAccess::ReadOnly => Access::ReadOnly,
        };
        let found = ImageLocation { store: store.clone(), place, format };
        let by_name = Owner::Administrator(Word::Plain);
        let step = match access {
            Access::ReadWrite => Step::ServeReadWrite,
            Access::ReadOnly => Step::ServeReadOnly,
        };
        self.custody.check(step, &by_name, &found)?;
        if access == Access::ReadWrite {
            check_written_whole(&found)?;
        }
        let opened = opening::open_whole(&found, access, at_once)?;
        check_size(&found, opened.size())?;
        // The file may have changed before it was locked.
        look()?;
        let StoreKind::Folder { folder, .. } = self.stores.get(&store)?.kind() else {
            return Err(refused(StoreFileObstacle::NoFolder).into());
        };
        let after = folder.image_path(volume, format);
        let image = ImageLocation { place: Place::File(path_text(&after)?), ..found };
        if after != before {
            self.custody.rename(&before, &after, &by_name).map_err(|error| match error.is_taken() {
                true => RequestError::TargetExists { path: after.clone() },
                false => error.into(),
            })?;
        }
        Ok(Renamed { image, size_bytes: opened.size(), opened, before })
    }

    fn undo_rename(&self, after: &Path, before: &Path) {
        if after != before
            && let Err(error) = self.custody.rename(after, before, &Owner::Housekeeping)
        {
            tracing::warn!(path = %after.display(), %error, "an image that did not become a volume keeps its new name");
        }
    }
}

/// Checks that a file may become a volume.
fn importable(found: &StoreFile) -> Result<(), StoreFileObstacle> {
    let volume = || found.volume.clone().unwrap_or_default();
    let migration = || found.migration.clone().unwrap_or_default();
    let note = || found.note.clone().unwrap_or_default();
    match found.role {
        FileRole::Unclaimed => Ok(()),
        // An unrelated file is accepted if the user names it.
        FileRole::Other if found.format.is_some() => Ok(()),
        FileRole::Other => Err(StoreFileObstacle::NoImage(note())),
        FileRole::Volume => Err(StoreFileObstacle::OfVolume(volume())),
        FileRole::Target => Err(StoreFileObstacle::OfMigration(migration())),
        FileRole::Backing => Err(StoreFileObstacle::Backing(note())),
        FileRole::HalfMade => Err(StoreFileObstacle::HalfMade),
        FileRole::Unsettled => Err(StoreFileObstacle::Unsettled),
        FileRole::Replica | FileRole::StaleReplica => {
            Err(StoreFileObstacle::Replica { volume: volume(), migration: migration() })
        }
    }
}
