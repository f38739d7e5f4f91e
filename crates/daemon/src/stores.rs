//! Stores: places for volumes. A folder holds any number of images, a block device or another server's export one volume at a
//! time. The content of a device or an export is unknown beforehand, and remains when a volume has left. So a migration to one
//! must write zeroes where the volume has holes.

mod disks;
mod folder;
mod read_only;
mod scheduler;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use block::Opened;
use block::filter::Impairment;
use migration::journal::{ImageFormat, ImageLocation, Place, ReservedContent, State};

use crate::config::{ImpairmentConfig, StoreConfig};
use crate::custody::Custody;
use crate::error::{RequestError, with_causes};
use crate::files::lock::LockError;

pub(crate) use folder::{Folder, image_name, is_unsettled_name, new_path, removed_path, space_at};
pub(crate) use read_only::is_read_only;
pub(crate) use scheduler::LateDisk;

#[derive(Debug)]
pub(crate) struct Stores {
    configured: BTreeMap<String, StoreConfig>,
    by_name: BTreeMap<String, Store>,
    impaired: BTreeMap<String, Impaired>,
    disks: disks::Disks,
    /// Stores that were added later. Other code holds references to stores for the life of the daemon, so none is ever removed.
    later: OnceLock<Box<Stores>>,
}

/// A store with intentional delays or faults.
struct Impaired {
    words: String,
    /// The filters, which all devices of the store share.
    filters: Impairment,
}

impl std::fmt::Debug for Impaired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

#[derive(Debug)]
pub(crate) struct Store {
    name: String,
    kind: StoreKind,
    /// Set while an operation claims a store that holds one volume.
    is_claimed: Arc<AtomicBool>,
}

/// The right to use a store for a volume; exclusive for a store that holds one.
#[derive(Debug)]
pub(crate) struct StoreClaim {
    /// `None` for a folder: any number of volumes fit.
    claimed: Option<Arc<AtomicBool>>,
}

#[derive(Debug)]
pub(crate) enum StoreKind {
    Folder {
        folder: Folder,
        /// The configured format of new images.
        format: Option<ImageFormat>,
    },
    /// A block device, or the export of another NBD server.
    Single(Place),
}

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreProblem {
    #[error("{0} does not exist; create it, or mount its disk")]
    Missing(PathBuf),
    #[error(
        "{0} is no folder; a device belongs into a store with device = …, a single image is served by: sterna volume add"
    )]
    NoFolder(PathBuf),
    #[error("the device {0} does not exist; activate it, or correct the configuration")]
    MissingDevice(PathBuf),
    #[error("{0} is no block device; a folder or a file in it belongs into a store with path = …")]
    NoDevice(PathBuf),
    #[error("{}", with_causes(.0))]
    Locked(#[from] LockError),
    #[error(
        "{0} takes no writes: it is read-only, or became so after an error; see the kernel's log (dmesg), repair it, and mount it again"
    )]
    ReadOnly(PathBuf),
    #[error("{path} cannot be examined: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub total: u64,
    /// The space that this process may still use.
    pub free: u64,
    /// Whether it takes no writes.
    pub is_read_only: bool,
}

/// The images in a folder that the journal does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unclaimed {
    /// The names of those that no program uses.
    pub(crate) unused: Vec<String>,
    /// The others, each with its users, as text.
    pub(crate) in_use: Vec<String>,
}

/// The content of a store that holds one volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Occupant {
    #[error("it holds the volume \"{0}\"; move or remove that first")]
    Volume(String),
    /// An operation that fills it.
    #[error("another operation is taking it; see: sterna volume list")]
    Operation,
    /// A volume that is on its way there.
    #[error("the migration {0} is filling it")]
    Migration(migration::MigrationId),
    /// The old copy of a volume, which was kept on request.
    #[error("it holds what migration {migration} kept of the volume \"{volume}\"")]
    Kept { volume: String, migration: migration::MigrationId },
}

impl Stores {
    /// Returns the stores of a configuration. A missing one is no error: its disk may be mounted later.
    pub(crate) fn new(configured: &BTreeMap<String, StoreConfig>) -> Self {
        let stores = configured.iter().map(|(name, config)| {
            let kind = match config {
                StoreConfig::Folder { path, format } => {
                    StoreKind::Folder { folder: Folder::new(path.clone()), format: *format }
                }
                StoreConfig::Device { .. } | StoreConfig::Nbd { .. } => StoreKind::Single(config.place()),
            };
            (name.clone(), Store { name: name.clone(), kind, is_claimed: Arc::default() })
        });
        let (by_name, impaired) = (stores.collect(), BTreeMap::new());
        Self {
            configured: configured.clone(),
            by_name,
            impaired,
            disks: disks::Disks::default(),
            later: OnceLock::new(),
        }
    }

    pub(crate) fn add(
        &self,
        configured: &BTreeMap<String, StoreConfig>,
        impairments: &BTreeMap<String, ImpairmentConfig>,
    ) {
        let impaired = impairments.iter().filter(|(name, _)| configured.contains_key(*name));
        let impaired = impaired.map(|(name, config)| (name.clone(), config.clone())).collect();
        let mut added = Box::new(Self::new(configured).with_impairments(&impaired));
        let mut last = self;
        while let Err(returned) = last.later.set(added) {
            // A later batch was added at the same time.
            added = returned;
            let Some(later) = last.later.get() else { return };
            last = later;
        }
    }

    pub(crate) fn configured(&self) -> BTreeMap<String, StoreConfig> {
        let all = self.batches().flat_map(|stores| stores.configured.clone());
        all.collect()
    }

    /// Returns the first stores, and each batch that was added.
    fn batches(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |stores| stores.later.get().map(Box::as_ref))
    }

    /// Adds the configured delays and faults.
    pub(crate) fn with_impairments(mut self, configured: &BTreeMap<String, ImpairmentConfig>) -> Self {
        let impaired = configured.iter().map(|(name, config)| {
            (name.clone(), Impaired { words: config.to_string(), filters: config.filters() })
        });
        self.impaired = impaired.collect();
        self
    }

    /// Describes the delays and faults of a store; `None`: it has none.
    pub(crate) fn impairment(&self, store: &str) -> Option<&str> {
        self.impaired_named(store).map(|impaired| impaired.words.as_str())
    }

    fn impaired_named(&self, store: &str) -> Option<&Impaired> {
        self.batches().find_map(|stores| stores.impaired.get(store))
    }

    /// Adds the delays and faults of its store to an opened image.
    pub(crate) fn impair(&self, location: &ImageLocation, opened: Opened) -> Opened {
        opened.impaired(self.impaired_named(&location.store).map(|impaired| impaired.filters.clone()))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Store> {
        let all: BTreeMap<&String, &Store> = self.batches().flat_map(|stores| &stores.by_name).collect();
        all.into_values()
    }

    /// Returns the pacer of the disk that an image is on. May block.
    pub(crate) fn disk_of(&self, place: &Place) -> Arc<pacer::Store> {
        self.disks.of(place)
    }

    /// Returns the store with this name, usable or not; fails with [`RequestError::StoreNotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<&Store, RequestError> {
        self.batches()
            .find_map(|stores| stores.by_name.get(name))
            .ok_or_else(|| RequestError::StoreNotFound { name: name.to_owned(), known: self.known() })
    }

    /// Returns the store with this name, or the only one. Errors:
    /// [`RequestError::StoreNotFound`], [`RequestError::StoreNotChosen`].
    pub(crate) fn choose(&self, name: Option<&str>) -> Result<&Store, RequestError> {
        let Some(name) = name else {
            let mut all = self.iter();
            return match (all.next(), all.next()) {
                (Some(only), None) => Ok(only),
                _ => Err(self.not_chosen()),
            };
        };
        self.get(name)
    }

    /// Returns the name of the store that is this device or export.
    pub(crate) fn of_place(&self, place: &Place) -> Option<&str> {
        let is_it = |store: &&Store| matches!(&store.kind, StoreKind::Single(single) if single == place);
        self.iter().find(is_it).map(Store::name)
    }

    fn not_chosen(&self) -> RequestError {
        RequestError::StoreNotChosen { known: self.known() }
    }

    /// Returns the names of all stores, for messages.
    pub(crate) fn known(&self) -> String {
        self.iter().map(Store::name).collect::<Vec<_>>().join(", ")
    }
}

impl Store {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn kind(&self) -> &StoreKind {
        &self.kind
    }

    /// Returns the place of a volume's image; `format` is the requested format, `otherwise` the default.
    /// [`RequestError::Invalid`]: the store does not support the format, or the path is not UTF-8.
    pub(crate) fn image_of(
        &self,
        volume: &str,
        format: Option<ImageFormat>,
        otherwise: ImageFormat,
    ) -> Result<ImageLocation, RequestError> {
        let store = self.name.clone();
        match &self.kind {
            StoreKind::Folder { folder, format: configured } => {
                let format = format.or(*configured).unwrap_or(otherwise);
                let path = folder.image_path(volume, format);
                Ok(ImageLocation { store, place: Place::File(path_text(&path)?), format })
            }
            StoreKind::Single(place) => match format.unwrap_or(ImageFormat::Raw) {
                ImageFormat::Raw => {
                    Ok(ImageLocation { store, place: place.clone(), format: ImageFormat::Raw })
                }
                ImageFormat::Qcow2 => Err(RequestError::Invalid(format!(
                    "store \"{store}\" is no folder: its image is always raw; leave --format out"
                ))),
            },
        }
    }

    /// Checks that the store exists, and that only this daemon uses a folder. May block.
    pub(crate) fn check(&self) -> Result<(), StoreProblem> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.check(),
            StoreKind::Single(Place::Device(path)) => check_device(Path::new(path)),
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => Ok(()),
        }
    }

    /// Does the same as [`Store::check`], with the store's name in the error.
    pub(crate) fn require(&self) -> Result<(), RequestError> {
        self.check().map_err(|problem| RequestError::StoreUnusable { name: self.name.clone(), problem })
    }

    /// Does the same as [`Store::require`], and checks that the store takes writes.
    pub(crate) fn require_writable(&self) -> Result<(), RequestError> {
        self.require()?;
        let unusable = |problem| RequestError::StoreUnusable { name: self.name.clone(), problem };
        match self.space().map_err(unusable)? {
            Some(space) if space.is_read_only => Err(unusable(self.read_only_problem())),
            _ => Ok(()),
        }
    }

    /// Returns the problem of a store that takes no writes.
    pub(crate) fn read_only_problem(&self) -> StoreProblem {
        StoreProblem::ReadOnly(match &self.kind {
            StoreKind::Folder { folder, .. } => folder.path().to_owned(),
            StoreKind::Single(place) => place.name().into(),
        })
    }

    /// Returns the images in a folder that the journal does not have. May block.
    pub(crate) fn unclaimed_images(&self, state: &State) -> std::io::Result<Unclaimed> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.unclaimed_images(state),
            StoreKind::Single(_) => Ok(Unclaimed::default()),
        }
    }

    /// Returns the store's space; `None`: it reports none. May block.
    pub(crate) fn space(&self) -> Result<Option<Space>, StoreProblem> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.space().map(Some),
            StoreKind::Single(Place::Device(path)) => {
                let path = Path::new(path);
                check_device(path)?;
                let unreadable = |source| StoreProblem::Unreadable { path: path.to_owned(), source };
                let size = device_bytes(path).map_err(unreadable)?;
                let is_read_only = read_only::is_read_only_device(path).map_err(unreadable)?;
                Ok(Some(Space { total: size, free: size, is_read_only }))
            }
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => Ok(None),
        }
    }

    /// Returns the store's disk, if guests wait there behind a copy. May block.
    pub(crate) fn late_disk(&self) -> Option<LateDisk> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => LateDisk::below(folder.path()),
            StoreKind::Single(Place::Device(path)) => LateDisk::below(Path::new(path)),
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => None,
        }
    }

    /// Checks that this many bytes are free, in a folder. Errors: [`RequestError::NoSpace`], [`RequestError::StoreUnusable`].
    pub(crate) fn require_space(&self, needed: u64) -> Result<(), RequestError> {
        let StoreKind::Folder { folder, .. } = &self.kind else { return Ok(()) };
        let space = folder.space();
        let space =
            space.map_err(|problem| RequestError::StoreUnusable { name: self.name.clone(), problem })?;
        if space.free < needed {
            return Err(RequestError::NoSpace { store: self.name.clone(), free: space.free, needed });
        }
        Ok(())
    }

    /// Returns what keeps a store that holds one volume from accepting another; `None` for a folder.
    pub(crate) fn occupant(&self, state: &State) -> Option<Occupant> {
        let StoreKind::Single(place) = &self.kind else { return None };
        let is_here = |image: &ImageLocation| image.store == self.name || image.place == *place;
        let volume = state.claimed_records().find(|record| is_here(&record.image));
        if let Some(volume) = volume {
            return Some(Occupant::Volume(volume.name.clone()));
        }
        let filling = state
            .unfinished()
            .find(|(_, migration)| migration.volumes.iter().any(|moving| is_here(&moving.target)));
        if let Some((migration, _)) = filling {
            return Some(Occupant::Migration(migration));
        }
        let fence = state.reservations.get(place).filter(|fence| fence.content == ReservedContent::Kept)?;
        Some(Occupant::Kept { volume: fence.volume.clone(), migration: fence.migration })
    }

    /// Claims the store for another volume, until the journal has that volume. Fails with [`RequestError::StoreOccupied`].
    pub(crate) fn claim(&self, state: &State) -> Result<StoreClaim, RequestError> {
        if matches!(self.kind, StoreKind::Folder { .. }) {
            return Ok(StoreClaim { claimed: None });
        }
        let occupied = |occupant| RequestError::StoreOccupied { name: self.name.clone(), occupant };
        if self.is_claimed.swap(true, Ordering::SeqCst) {
            return Err(occupied(Occupant::Operation));
        }
        let claim = StoreClaim { claimed: Some(Arc::clone(&self.is_claimed)) };
        match self.occupant(state) {
            None => Ok(claim),
            Some(occupant) => Err(occupied(occupant)),
        }
    }

    /// Makes a folder consistent with the journal, after a daemon was killed. Call this before any volume is served, after the
    /// interrupted migrations have ended. Fails if the folder cannot be read.
    pub(crate) fn settle(&self, custody: &Custody, state: &State) -> std::io::Result<()> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.settle(&self.name, custody, state),
            StoreKind::Single(_) => Ok(()),
        }
    }
}

impl Drop for StoreClaim {
    fn drop(&mut self) {
        if let Some(claimed) = &self.claimed {
            claimed.store(false, Ordering::SeqCst);
        }
    }
}

/// Converts a path to text, because the journal and the API hold paths as text. Fails with [`RequestError::Invalid`].
pub(crate) fn path_text(path: &Path) -> Result<String, RequestError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| RequestError::Invalid(format!("the path {} is not UTF-8", path.display())))
}

fn check_device(path: &Path) -> Result<(), StoreProblem> {
    use std::os::unix::fs::FileTypeExt as _;
    match std::fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => Ok(()),
        Ok(_) => Err(StoreProblem::NoDevice(path.to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(StoreProblem::MissingDevice(path.to_owned()))
        }
        Err(source) => Err(StoreProblem::Unreadable { path: path.to_owned(), source }),
    }
}

fn device_bytes(path: &Path) -> std::io::Result<u64> {
    use std::io::Seek as _;
    std::fs::File::open(path)?.seek(std::io::SeekFrom::End(0))
}

#[cfg(test)]
mod tests;
