//! Stores: where volumes can be. A folder holds any number of images, a block device or another server's export one
//! volume at a time.
//!
//! What is in a device or an export is not known beforehand, and stays when a volume has left: whoever takes one for a
//! target must write zeroes where the volume has holes.

mod folder;
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
pub(crate) use scheduler::LateDisk;

/// All stores of the host.
#[derive(Debug)]
pub(crate) struct Stores {
    configured: BTreeMap<String, StoreConfig>,
    by_name: BTreeMap<String, Store>,
    impaired: BTreeMap<String, Impaired>,
    /// Those that were added since. Whoever has a store has it for as long as the daemon lives, so none is ever taken away.
    later: OnceLock<Box<Stores>>,
}

/// A store that is slowed down or fails on purpose.
struct Impaired {
    /// How, for people.
    words: String,
    /// What does it; all devices of the store share it.
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
    /// Set while an operation takes a store that holds one volume.
    is_claimed: Arc<AtomicBool>,
}

/// The right to take a store for a volume; there is one at a time for a store that holds one.
#[derive(Debug)]
pub(crate) struct StoreClaim {
    /// `None` for a folder: any number of volumes fit.
    claimed: Option<Arc<AtomicBool>>,
}

/// What a store is.
#[derive(Debug)]
pub(crate) enum StoreKind {
    /// A folder of images.
    Folder {
        folder: Folder,
        /// Format of new images, if the configuration says one.
        format: Option<ImageFormat>,
    },
    /// A block device, or the export of another NBD server.
    Single(Place),
}

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreProblem {
    /// The folder is not there.
    #[error("{0} does not exist; create it, or mount its disk")]
    Missing(PathBuf),
    /// What was to be a folder is none.
    #[error(
        "{0} is no folder; a device belongs into a store with device = …, a single image is served by: sterna volume add"
    )]
    NoFolder(PathBuf),
    /// The device is not there.
    #[error("the device {0} does not exist; activate it, or correct the configuration")]
    MissingDevice(PathBuf),
    /// What was to be a device is none.
    #[error("{0} is no block device; a folder or a file in it belongs into a store with path = …")]
    NoDevice(PathBuf),
    /// The folder cannot be locked.
    #[error("{}", with_causes(.0))]
    Locked(#[from] LockError),
    /// The file system or the device cannot be asked for its space.
    #[error("{path} cannot be examined: {source}")]
    Unreadable {
        /// The folder or device.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
}

/// Space of a store, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub total: u64,
    /// What this process may still use.
    pub free: u64,
}

/// What a store that holds one volume holds.
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
    /// The old copy of a volume, which somebody wanted to keep.
    #[error("it holds what migration {migration} kept of the volume \"{volume}\"")]
    Kept {
        /// Name of the volume.
        volume: String,
        /// The migration that left it there.
        migration: migration::MigrationId,
    },
}

impl Stores {
    /// The stores of a configuration. One that is not there is no error: its disk may be mounted later.
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
        Self { configured: configured.clone(), by_name, impaired, later: OnceLock::new() }
    }

    /// Adds stores, of names that there are not.
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
            // It has been added to before.
            added = returned;
            let Some(later) = last.later.get() else { return };
            last = later;
        }
    }

    /// How they are configured.
    pub(crate) fn configured(&self) -> BTreeMap<String, StoreConfig> {
        let all = self.batches().flat_map(|stores| stores.configured.clone());
        all.collect()
    }

    /// What was configured at first, and what was added, one after the other.
    fn batches(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |stores| stores.later.get().map(Box::as_ref))
    }

    /// Lets some of them be slow, or fail, as the configuration says.
    pub(crate) fn with_impairments(mut self, configured: &BTreeMap<String, ImpairmentConfig>) -> Self {
        let impaired = configured.iter().map(|(name, config)| {
            (name.clone(), Impaired { words: config.to_string(), filters: config.filters() })
        });
        self.impaired = impaired.collect();
        self
    }

    /// How a store is slowed down or fails on purpose, for people; `None`: it is as it is.
    pub(crate) fn impairment(&self, store: &str) -> Option<&str> {
        self.impaired_named(store).map(|impaired| impaired.words.as_str())
    }

    fn impaired_named(&self, store: &str) -> Option<&Impaired> {
        self.batches().find_map(|stores| stores.impaired.get(store))
    }

    /// What was opened at `location`, as slow and as faulty as its store is to be.
    pub(crate) fn impair(&self, location: &ImageLocation, opened: Opened) -> Opened {
        opened.impaired(self.impaired_named(&location.store).map(|impaired| impaired.filters.clone()))
    }

    /// The stores, by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Store> {
        let all: BTreeMap<&String, &Store> = self.batches().flat_map(|stores| &stores.by_name).collect();
        all.into_values()
    }

    /// The store of that name, whether it can be used or not.
    ///
    /// # Errors
    /// [`RequestError::StoreNotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<&Store, RequestError> {
        self.batches()
            .find_map(|stores| stores.by_name.get(name))
            .ok_or_else(|| RequestError::StoreNotFound { name: name.to_owned(), known: self.known() })
    }

    /// The store of that name, or the only one.
    ///
    /// # Errors
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

    /// Name of the store that is this device or export.
    pub(crate) fn of_place(&self, place: &Place) -> Option<&str> {
        let is_it = |store: &&Store| matches!(&store.kind, StoreKind::Single(single) if single == place);
        self.iter().find(is_it).map(Store::name)
    }

    fn not_chosen(&self) -> RequestError {
        RequestError::StoreNotChosen { known: self.known() }
    }

    /// The names of all, for people.
    pub(crate) fn known(&self) -> String {
        self.iter().map(Store::name).collect::<Vec<_>>().join(", ")
    }
}

impl Store {
    /// Its name in the configuration.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn kind(&self) -> &StoreKind {
        &self.kind
    }

    /// Where the image of a volume would be; `format`: what the user asks for, `otherwise`: if nobody says.
    ///
    /// # Errors
    /// [`RequestError::Invalid`]: there can be none of this format, or its path is not UTF-8.
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
                    "store \"{store}\" is no folder: what is there is always raw; leave --format out"
                ))),
            },
        }
    }

    /// Checks that it is there, and that a folder is used by this daemon alone; may sleep.
    ///
    /// Whether a server answers is seen when its export is opened.
    ///
    /// # Errors
    /// [`StoreProblem`].
    pub(crate) fn check(&self) -> Result<(), StoreProblem> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.check(),
            StoreKind::Single(Place::Device(path)) => check_device(Path::new(path)),
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => Ok(()),
        }
    }

    /// As [`Store::check`], and names the store in the error.
    ///
    /// # Errors
    /// [`RequestError::StoreUnusable`].
    pub(crate) fn require(&self) -> Result<(), RequestError> {
        self.check().map_err(|problem| RequestError::StoreUnusable { name: self.name.clone(), problem })
    }

    /// Names of images in it that the journal knows nothing of: a folder's. May sleep.
    ///
    /// # Errors
    /// What the system answers.
    pub(crate) fn unknown_images(&self, state: &State) -> std::io::Result<Vec<String>> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.unknown_images(state),
            StoreKind::Single(_) => Ok(Vec::new()),
        }
    }

    /// Its space; may sleep. `None`: it does not say.
    ///
    /// # Errors
    /// [`StoreProblem`].
    pub(crate) fn space(&self) -> Result<Option<Space>, StoreProblem> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => folder.space().map(Some),
            StoreKind::Single(Place::Device(path)) => {
                let path = Path::new(path);
                check_device(path)?;
                let size = device_bytes(path);
                let size =
                    size.map_err(|source| StoreProblem::Unreadable { path: path.to_owned(), source })?;
                Ok(Some(Space { total: size, free: size }))
            }
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => Ok(None),
        }
    }

    /// Its disk, if guests wait there behind a copy; may sleep.
    pub(crate) fn late_disk(&self) -> Option<LateDisk> {
        match &self.kind {
            StoreKind::Folder { folder, .. } => LateDisk::below(folder.path()),
            StoreKind::Single(Place::Device(path)) => LateDisk::below(Path::new(path)),
            StoreKind::Single(Place::Nbd(_) | Place::File(_)) => None,
        }
    }

    /// Checks that so many bytes are free, in a folder.
    ///
    /// # Errors
    /// [`RequestError::NoSpace`], [`RequestError::StoreUnusable`].
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

    /// What keeps a store that holds one volume from taking another; never anything in a folder.
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

    /// Takes it for another volume, until the journal knows of that.
    ///
    /// # Errors
    /// [`RequestError::StoreOccupied`].
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

    /// Brings a folder in line with the journal, after a daemon that was killed.
    ///
    /// To be called before any volume is served, with the interrupted migrations ended.
    ///
    /// # Errors
    /// The folder cannot be read.
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

/// The journal and the API hold paths as text.
///
/// # Errors
/// [`RequestError::Invalid`].
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

/// Size of a block device in bytes.
fn device_bytes(path: &Path) -> std::io::Result<u64> {
    use std::io::Seek as _;
    std::fs::File::open(path)?.seek(std::io::SeekFrom::End(0))
}

#[cfg(test)]
mod tests;
