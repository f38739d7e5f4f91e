//! The stores of a configuration: `[stores.NAME]` is a folder, a block device, or the export of another NBD server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use migration::journal::{ImageFormat, Place};
use nbd_protocol::{NbdUri, UriError};
use serde::Deserialize;

use super::faults::{Faults, all, both};
use super::impairments::{self, FileDelay, FileFault, ImpairmentConfig, ImpairmentFault};
use super::{ConfigError, DEFAULT_STORE, require_absolute};

const DEFAULT_STORE_FOLDER: &str = "images";

/// The place of a store's images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreConfig {
    /// A folder with any number of images.
    Folder {
        /// The absolute path of the folder.
        path: PathBuf,
        /// The format of new images; `None`: raw, or the format of the image that is moved there.
        format: Option<ImageFormat>,
    },
    /// A block device with one volume.
    Device {
        /// The absolute path of the device.
        path: PathBuf,
    },
    /// The export of an NBD server with one volume.
    Nbd {
        /// The address of the export.
        uri: NbdUri,
    },
}

/// Why a store is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreFault {
    /// The store has no place.
    #[error(
        "it has no place; set one of: path = \"/FOLDER\", device = \"/dev/NAME\", nbd = \"nbd://HOST/EXPORT\""
    )]
    Nowhere,
    /// The store has several places.
    #[error("it has both {first} and {second}, and a store has one place; make two stores of it")]
    SeveralPlaces {
        /// The first of the keys.
        first: &'static str,
        /// Another one of the keys.
        second: &'static str,
    },
    /// It has a format and is not a folder.
    #[error("format is for folders; the image on a device or an NBD server is always raw")]
    FormatOfNoFolder,
    /// The export's address is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// Its intended delays or faults are invalid.
    #[error(transparent)]
    Impairment(#[from] ImpairmentFault),
    /// Another store has the same place.
    #[error("it is at the same place as the store \"{other}\": {place}")]
    SamePlace {
        /// The name of the other store.
        other: String,
        /// The place of both stores.
        place: Place,
    },
}

impl StoreConfig {
    /// Returns the folder, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder { path, .. } => Some(path),
            Self::Device { .. } | Self::Nbd { .. } => None,
        }
    }

    /// Returns the place in the form of the journal.
    pub fn place(&self) -> Place {
        match self {
            Self::Folder { path, .. } => Place::File(path.display().to_string()),
            Self::Device { path } => Place::Device(path.display().to_string()),
            Self::Nbd { uri } => Place::Nbd(uri.to_string()),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileStore {
    path: Option<PathBuf>,
    device: Option<PathBuf>,
    nbd: Option<String>,
    format: Option<FileFormat>,
    delay: Option<FileDelay>,
    fault: Option<FileFault>,
}

/// The stores by name, and the impairments of some of them.
pub(super) type CheckedStores = (BTreeMap<String, StoreConfig>, BTreeMap<String, ImpairmentConfig>);

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FileFormat {
    Raw,
    Qcow2,
}

/// Checks the stores of the file at `path`; without any there is one in the data folder.
pub(super) fn check(
    path: &Path,
    configured: BTreeMap<String, FileStore>,
    data_dir: &Path,
) -> Result<CheckedStores, Faults> {
    if configured.is_empty() {
        let default = StoreConfig::Folder { path: data_dir.join(DEFAULT_STORE_FOLDER), format: None };
        return Ok((BTreeMap::from([(DEFAULT_STORE.to_owned(), default)]), BTreeMap::new()));
    }
    let checked = configured.into_iter().map(|(name, written)| written.named(path, name));
    let (mut stores, mut impairments) = (BTreeMap::new(), BTreeMap::new());
    for (name, store, impairment) in all(checked)? {
        impairments.extend(impairment.map(|impairment| (name.clone(), impairment)));
        stores.insert(name, store);
    }
    // Locking the stores finds two spellings of one folder, and opening finds those of a device.
    let alone = stores.iter().map(|(name, store)| {
        let is_other = |(other, _): &(&String, &StoreConfig)| *other < name;
        let mut others = stores.iter().filter(is_other);
        let place = store.place();
        match others.find(|(_, other)| other.place() == place) {
            None => Ok(()),
            Some((other, _)) => {
                let fault = StoreFault::SamePlace { other: other.clone(), place };
                Err(ConfigError::Store { path: path.to_owned(), name: name.clone(), fault })
            }
        }
    });
    all(alone)?;
    Ok((stores, impairments))
}

impl FileStore {
    fn named(
        mut self,
        path: &Path,
        name: String,
    ) -> Result<(String, StoreConfig, Option<ImpairmentConfig>), Faults> {
        if let Err(reason) = crate::names::check(&name) {
            return Err(ConfigError::StoreName { path: path.to_owned(), name, reason }.into());
        }
        let refused = |fault| ConfigError::Store { path: path.to_owned(), name: name.clone(), fault };
        let impairment = impairments::check(self.delay.take(), self.fault.take());
        let impairment = impairment.map_err(|fault| refused(fault.into()));
        let store = self.check(path, &name).and_then(|store| store.map_err(refused));
        let (store, impairment) = both(store, impairment)?;
        Ok((name, store, impairment))
    }

    fn check(self, path: &Path, name: &str) -> Result<Result<StoreConfig, StoreFault>, ConfigError> {
        let written =
            [("path", self.path.is_some()), ("device", self.device.is_some()), ("nbd", self.nbd.is_some())];
        let mut keys = written.iter().filter(|(_, is_there)| *is_there).map(|(key, _)| *key);
        if let (Some(first), Some(second)) = (keys.next(), keys.next()) {
            return Ok(Err(StoreFault::SeveralPlaces { first, second }));
        }
        let is_folder = self.path.is_some();
        if self.format.is_some() && !is_folder {
            return Ok(Err(StoreFault::FormatOfNoFolder));
        }
        let store = match (self.path, self.device, self.nbd) {
            (Some(folder), _, _) => {
                let format = self.format.map(|format| match format {
                    FileFormat::Raw => ImageFormat::Raw,
                    FileFormat::Qcow2 => ImageFormat::Qcow2,
                });
                StoreConfig::Folder {
                    path: require_absolute(path, &format!("stores.{name}.path"), folder)?,
                    format,
                }
            }
            (None, Some(device), _) => StoreConfig::Device {
                path: require_absolute(path, &format!("stores.{name}.device"), device)?,
            },
            (None, None, Some(uri)) => match uri.parse() {
                Ok(uri) => StoreConfig::Nbd { uri },
                Err(error) => return Ok(Err(StoreFault::Uri(error))),
            },
            (None, None, None) => return Ok(Err(StoreFault::Nowhere)),
        };
        Ok(Ok(store))
    }
}
