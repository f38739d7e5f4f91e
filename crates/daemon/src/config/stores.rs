//! The stores of a configuration: `[stores.NAME]` is a folder, a block device, or the export of another NBD server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use migration::journal::{ImageFormat, Place};
use nbd_protocol::{NbdUri, UriError};
use serde::Deserialize;

use super::faults::{Faults, all, both};
use super::impairments::{self, FileDelay, FileFault, ImpairmentConfig, ImpairmentFault};
use super::{ConfigError, DEFAULT_STORE, require_absolute};

/// Folder of [`DEFAULT_STORE`] in the data folder.
const DEFAULT_STORE_FOLDER: &str = "images";

/// Where the images of a store are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreConfig {
    /// In a folder, any number of them.
    Folder {
        /// The folder; absolute.
        path: PathBuf,
        /// Format of the images that are made there; `None`: raw, or that of the image that is moved there.
        format: Option<ImageFormat>,
    },
    /// On a block device, one volume at a time.
    Device {
        /// The device; absolute.
        path: PathBuf,
    },
    /// In the export of an NBD server, one volume at a time.
    Nbd {
        /// The export.
        uri: NbdUri,
    },
}

/// Why a store is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreFault {
    /// Nothing says where it is.
    #[error(
        "it is nowhere; say one of: path = \"/FOLDER\", device = \"/dev/NAME\", nbd = \"nbd://HOST/EXPORT\""
    )]
    Nowhere,
    /// It is in several places.
    #[error("it has both {first} and {second}, and a store is one place; make two stores of it")]
    SeveralPlaces {
        /// One of the keys.
        first: &'static str,
        /// Another one.
        second: &'static str,
    },
    /// It has a format and is no folder.
    #[error("format is for folders; what is on a device or an NBD server is always raw")]
    FormatOfNoFolder,
    /// The export's address means nothing.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// It cannot be slowed down, or fail, as it is to.
    #[error(transparent)]
    Impairment(#[from] ImpairmentFault),
    /// Another store is at the same place.
    #[error("it is at the same place as the store \"{other}\": {place}")]
    SamePlace {
        /// The other one.
        other: String,
        /// Where.
        place: Place,
    },
}

impl StoreConfig {
    /// The folder, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder { path, .. } => Some(path),
            Self::Device { .. } | Self::Nbd { .. } => None,
        }
    }

    /// Where it is, as the journal names places.
    pub fn place(&self) -> Place {
        match self {
            Self::Folder { path, .. } => Place::File(path.display().to_string()),
            Self::Device { path } => Place::Device(path.display().to_string()),
            Self::Nbd { uri } => Place::Nbd(uri.to_string()),
        }
    }
}

/// A store as it is written.
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

/// The stores by name, and those of them that are slowed down or fail on purpose.
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
    // Two spellings of one folder are found when the stores are locked, those of a device when it is opened.
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
    /// The store of this name.
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
