//! What a daemon is told at its start: a file in TOML, and what the command line says on top.
//!
//! ```toml
//! data_dir = "/var/lib/sterna"              # journal, and the default store
//! api = "unix:/run/sterna/sterna.sock"      # the volumes' sockets are in `volumes/` beside it
//! engine = "auto"                           # or "io_uring", "threads"
//!
//! [api_socket]                              # who may use the API; [volume_sockets]: who may connect to volumes
//! mode = "0660"
//! owner = "root:sterna"
//!
//! [nbd]                                     # where volumes have ports: `volume create --listen ADDRESS:PORT`
//! tls = { certificate = "/etc/sterna/server.pem", key = "/etc/sterna/server.key" }
//!
//! [hosts]                                   # where other hosts reach this one: `sterna host`
//! listen = ["0.0.0.0:7423"]
//! links = [{ address = "10.0.0.1:7423", speed_mbit = 10000 }]   # none: the addresses that are listened on
//! shared_folders = ["/mnt/rack3"]           # stores of other hosts, as they are mounted here: written to directly
//!
//! [machines]                                # what VMs from other hosts may name, besides what is harmless
//! allow = ["-netdev bridge"]                # options of QEMU
//! folders = ["/srv/firmware"]               # files below these
//! user = "sterna-qemu"                      # whom QEMU runs as
//!
//! [hooks]                                   # run on both sides when a VM or a volume moves
//! before = "/etc/sterna/before"             # if it fails, the VM stays
//! after = "/etc/sterna/after"
//! timeout_s = 30
//!
//! [stores.fast]                             # none: one store `default`, in `images/` of the data folder
//! path = "/srv/fast"                        # or device = "/dev/vg/lv", or nbd = "nbd://host/export"
//! format = "raw"                            # of new images in a folder; or "qcow2"
//!
//! [limits]
//! mirror_wait_max_ms = 1000                 # longest that a migration may hold a guest's write
//! stop_wait_max_ms = 10000                  # longest that a stopping daemon waits for a volume's requests
//! migrations_per_host = 4                   # under way at a time; more wait for their turn
//! migrations_per_store = 2                  # of these, that read from or write to one store
//! kept_images_per_volume = 8                # images that --keep-source left; the oldest go
//! kept_percent_of_store = 50                # of its size, for all of them
//! ```
//!
//! Every deviation is an error that names the key: a daemon that guesses serves the wrong disk.

pub mod folders;
mod hooks;
mod hosts;
mod keys;
mod machines;
mod nbd;
mod sockets;
mod stores;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{Address, AddressError};
use migration::queue::QueueLimits;
use serde::Deserialize;

use self::hooks::FileHooks;
use self::hosts::FileHosts;
use self::machines::FileMachines;
use self::nbd::FileNbd;
use self::sockets::FileSocket;
use self::stores::FileStore;
pub(crate) use hooks::TIMEOUT_S as HOOK_TIMEOUT_S;
pub use hooks::{HookProblem, HooksConfig};
pub use hosts::HostsConfig;
pub use keys::UnknownKey;
pub use machines::{MachinesConfig, QemuUser, RunsAs};
pub use nbd::{NbdConfig, TlsConfig, TlsPolicy};
pub use sockets::{SocketAccess, SocketFault, SocketMode, SocketOwner};
pub use stores::{StoreConfig, StoreFault};

use crate::config::folders::Folders;

/// Name of the store that there is when none is configured.
pub const DEFAULT_STORE: &str = "default";
/// Folder of the volumes' sockets beside the API's.
const VOLUME_SOCKETS_FOLDER: &str = "volumes";
/// Largest configuration file in bytes: thousands of stores fit, a disk image given by mistake does not.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Range of `mirror_wait_max_ms`. Below, a busy disk counts as hung; above, guests' file systems give up.
const MIRROR_WAIT_MS: std::ops::RangeInclusive<u64> = 10..=30_000;
/// Range of `stop_wait_max_ms`. Above, service managers kill.
const STOP_WAIT_MS: std::ops::RangeInclusive<u64> = 100..=80_000;

/// Migrations under way at a time, if nobody says: the two that fill a pair of stores, and two more, so that one that
/// switches over or waits for a link leaves nothing idle. Each costs its guest a share of the disk for as long as it lasts:
/// as many at once are not faster, and all of them last longer.
const MIGRATIONS_PER_HOST_DEFAULT: u32 = 4;
/// Of these, those that use one store, if nobody says: one keeps a disk busy, a second one fills the pauses of the first. More
/// copyings make random requests of sequential ones.
const MIGRATIONS_PER_STORE_DEFAULT: u32 = 2;
/// Images of one volume that are kept, if nobody says: a volume that goes round between a few stores or hosts finds the latest of
/// each; more of them are only older.
const KEPT_IMAGES_PER_VOLUME_DEFAULT: u32 = 8;
/// Hundredths of a store that kept images may take, if nobody says: as much again is there for what is in use.
const KEPT_PERCENT_OF_STORE_DEFAULT: u32 = 50;
/// Range of numbers of migrations, and of kept images. Without any nothing could ever be moved; each has a thread and buffers.
const MIGRATIONS: std::ops::RangeInclusive<u64> = 1..=1000;

/// What a daemon is told, checked and complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the journal is; absolute.
    pub data_dir: PathBuf,
    /// Where the API is served; absolute.
    pub api: Address,
    /// Where the sockets of volumes are; absolute.
    pub volume_sockets_dir: PathBuf,
    /// The I/O engine of lanes.
    pub engine: EngineSetting,
    /// Who may use the API.
    pub api_socket: SocketAccess,
    /// Who may connect to volumes that nothing else is said about.
    pub volume_sockets: SocketAccess,
    /// How volumes are served over NBD.
    pub nbd: NbdConfig,
    /// Where other hosts reach this one.
    pub hosts: HostsConfig,
    /// What VMs that come from other hosts may name.
    pub machines: MachinesConfig,
    /// What is run when a VM changes its host.
    pub hooks: HooksConfig,
    /// The stores by name. At least one.
    pub stores: BTreeMap<String, StoreConfig>,
    /// Limits.
    pub limits: Limits,
}

/// Which I/O engine lanes use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineSetting {
    /// io_uring, or threads where it is refused.
    #[default]
    Auto,
    /// io_uring; a volume is not served where it is refused.
    IoUring,
    /// Threads.
    Threads,
}

/// Limits that depend on the site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest that a migration may hold a guest's write (design §5.7).
    pub mirror_wait_max: Duration,
    /// Longest that a stopping daemon waits for the requests of a volume.
    pub stop_wait_max: Duration,
    /// Migrations under way at a time; more wait for their turn.
    pub queue: QueueLimits,
    /// How much of what migrations left is kept.
    pub kept: KeptLimits,
}

/// How many of the images that migrations left are kept; beyond that the oldest go that nothing relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptLimits {
    /// Of one volume.
    pub images_per_volume: u32,
    /// In hundredths of a store's size: the space of all of them.
    pub percent_of_store: u32,
}

/// What the command line says; `None`: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The configuration file, which must exist then.
    pub config_file: Option<PathBuf>,
    /// The folder of the journal.
    pub data_dir: Option<PathBuf>,
    /// Where the API is served.
    pub api: Option<Address>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {path} cannot be read")]
    Read {
        /// Which.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The file is no configuration by its size.
    #[error("the configuration file {path} has {bytes} bytes, at most {FILE_BYTES_MAX} are read")]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The file is no TOML, or a value has the wrong type.
    #[error("the configuration file {path} is not valid:\n{detail}")]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Line, column and cause, on several lines.
        detail: String,
    },
    /// A key means nothing.
    #[error("{path}: {key}")]
    UnknownKey {
        /// Which file.
        path: PathBuf,
        /// Which key.
        key: UnknownKey,
    },
    /// A path is relative.
    #[error("{path}: {key} = \"{value}\" must be an absolute path")]
    RelativePath {
        /// Which file.
        path: PathBuf,
        /// Which key.
        key: String,
        /// Its value.
        value: PathBuf,
    },
    /// A number is out of its range.
    #[error("{path}: {key} = {value} must be between {least} and {most}")]
    OutOfRange {
        /// Which file.
        path: PathBuf,
        /// Which key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The smallest value allowed.
        least: u64,
        /// The largest value allowed.
        most: u64,
    },
    /// A hook cannot be run.
    #[error("{path}: {key} = \"{program}\": {problem}")]
    Hook {
        /// Which file.
        path: PathBuf,
        /// Which key.
        key: &'static str,
        /// Its value.
        program: PathBuf,
        /// What is wrong with it.
        problem: HookProblem,
    },
    /// What VMs may name is no option.
    #[error(
        "{path}: machines.allow: \"{entry}\" is no option of QEMU; write \"-vnc\", or \"-netdev bridge\""
    )]
    Allowed {
        /// Which file.
        path: PathBuf,
        /// What is written.
        entry: String,
    },
    /// QEMU cannot run as whom it is to run as.
    #[error("{path}: machines.user: {fault}")]
    QemuUser {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        fault: SocketFault,
    },
    /// A link is none that other hosts could call.
    #[error("{path}: hosts.links: \"{address}\" is no address that others can call; write HOST:PORT")]
    Link {
        /// Which file.
        path: PathBuf,
        /// What is written.
        address: String,
    },
    /// A folder of other hosts' stores is not named in full.
    #[error("{path}: hosts.shared_folders: {folder} is no absolute path")]
    SharedFolder {
        /// Which file.
        path: PathBuf,
        /// What is written.
        folder: PathBuf,
    },
    /// A store cannot have this name.
    #[error("{path}: \"{name}\" cannot be the name of a store: {reason}")]
    StoreName {
        /// Which file.
        path: PathBuf,
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: crate::names::InvalidName,
    },
    /// A store is none.
    #[error("{path}: stores.{name}: {fault}")]
    Store {
        /// Which file.
        path: PathBuf,
        /// Name of the store.
        name: String,
        /// What is wrong with it.
        fault: StoreFault,
    },
    /// A socket cannot be given to whom it is to be given.
    #[error("{path}: {table}: {fault}")]
    Socket {
        /// Which file.
        path: PathBuf,
        /// The table.
        table: &'static str,
        /// What is wrong with it.
        fault: SocketFault,
    },
    /// The API's address cannot be used.
    #[error("the API cannot be served there")]
    Address(#[from] AddressError),
    /// Nothing says where the journal is to be.
    #[error("there is no data folder: set HOME, or give --data-dir")]
    NoDataDir,
}

impl Config {
    /// Reads the configuration: the command line, then the file, then the defaults of this user.
    ///
    /// # Errors
    /// [`ConfigError`]. Without an explicit file, a missing one is no error.
    pub fn load(overrides: &Overrides, folders: &Folders) -> Result<Self, ConfigError> {
        let explicit = overrides.config_file.as_deref();
        let Some(path) = explicit.or(folders.config_file.as_deref()) else {
            return Self::build(Path::new("(no file)"), File::default(), overrides, folders);
        };
        match read(path) {
            Ok(text) => {
                let config = Self::parse(path, &text, overrides, folders)?;
                config.hooks.look(path)?;
                Ok(config)
            }
            Err(ConfigError::Read { source, .. })
                if explicit.is_none() && source.kind() == std::io::ErrorKind::NotFound =>
            {
                Self::build(path, File::default(), overrides, folders)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a configuration of the text of a file; `path` is for messages. Reads nothing.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(
        path: &Path,
        text: &str,
        overrides: &Overrides,
        folders: &Folders,
    ) -> Result<Self, ConfigError> {
        Self::build(path, File::parse(path, text)?, overrides, folders)
    }

    fn build(path: &Path, file: File, overrides: &Overrides, folders: &Folders) -> Result<Self, ConfigError> {
        let data_dir = match (&overrides.data_dir, file.data_dir, &folders.data_dir) {
            (Some(given), _, _) => absolute(given),
            (None, Some(configured), _) => require_absolute(path, "data_dir", configured)?,
            (None, None, Some(default)) => default.clone(),
            (None, None, None) => return Err(ConfigError::NoDataDir),
        };
        let api = match (&overrides.api, file.api) {
            (Some(given), _) => Address::unix(absolute(given.path()))?,
            (None, Some(text)) => {
                let address: Address = text.parse()?;
                require_absolute(path, "api", address.path().to_owned())?;
                address
            }
            (None, None) => Address::unix(folders.api_socket())?,
        };
        let volume_sockets_dir =
            api.path().parent().unwrap_or_else(|| Path::new("/")).join(VOLUME_SOCKETS_FOLDER);
        let stores = stores::check(path, file.stores, &data_dir)?;
        let api_socket = file.api_socket.check(path, "api_socket")?;
        let volume_sockets = file.volume_sockets.check(path, "volume_sockets")?;
        let limits = Limits {
            mirror_wait_max: milliseconds(
                path,
                "limits.mirror_wait_max_ms",
                file.limits.mirror_wait_max_ms,
                &MIRROR_WAIT_MS,
            )?,
            stop_wait_max: milliseconds(
                path,
                "limits.stop_wait_max_ms",
                file.limits.stop_wait_max_ms,
                &STOP_WAIT_MS,
            )?,
            queue: QueueLimits {
                per_host: count(path, "limits.migrations_per_host", file.limits.migrations_per_host)?,
                per_store: count(path, "limits.migrations_per_store", file.limits.migrations_per_store)?,
            },
            kept: KeptLimits {
                images_per_volume: count(
                    path,
                    "limits.kept_images_per_volume",
                    file.limits.kept_images_per_volume,
                )?,
                percent_of_store: percent(
                    path,
                    "limits.kept_percent_of_store",
                    file.limits.kept_percent_of_store,
                )?,
            },
        };
        Ok(Self {
            data_dir,
            api,
            volume_sockets_dir,
            engine: file.engine,
            api_socket,
            volume_sockets,
            nbd: file.nbd.check(path)?,
            hosts: file.hosts.check(path)?,
            machines: file.machines.check(path)?,
            hooks: file.hooks.check(path)?,
            stores,
            limits,
        })
    }
}

impl EngineSetting {
    /// The word of the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

/// The file, as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    data_dir: Option<PathBuf>,
    api: Option<String>,
    engine: EngineSetting,
    api_socket: FileSocket,
    volume_sockets: FileSocket,
    nbd: FileNbd,
    hosts: FileHosts,
    machines: FileMachines,
    hooks: FileHooks,
    stores: BTreeMap<String, FileStore>,
    limits: FileLimits,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct FileLimits {
    mirror_wait_max_ms: u64,
    stop_wait_max_ms: u64,
    migrations_per_host: u64,
    migrations_per_store: u64,
    kept_images_per_volume: u64,
    kept_percent_of_store: u64,
}

impl Default for FileLimits {
    fn default() -> Self {
        Self {
            mirror_wait_max_ms: 1000,
            stop_wait_max_ms: 10_000,
            migrations_per_host: MIGRATIONS_PER_HOST_DEFAULT.into(),
            migrations_per_store: MIGRATIONS_PER_STORE_DEFAULT.into(),
            kept_images_per_volume: KEPT_IMAGES_PER_VOLUME_DEFAULT.into(),
            kept_percent_of_store: KEPT_PERCENT_OF_STORE_DEFAULT.into(),
        }
    }
}

impl File {
    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let syntax = |error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            detail: error.to_string().trim_end().to_owned(),
        };
        // Keys are checked first: of a misspelt key that was required, the misspelling is what is wrong.
        let table = toml::de::DeTable::parse(text).map_err(syntax)?;
        keys::check(text, table.get_ref())
            .map_err(|key| ConfigError::UnknownKey { path: path.to_owned(), key })?;
        toml::from_str(text).map_err(syntax)
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(ConfigError::TooLarge { path: path.to_owned(), bytes });
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn require_absolute(path: &Path, key: &str, value: PathBuf) -> Result<PathBuf, ConfigError> {
    if value.is_absolute() {
        return Ok(value);
    }
    Err(ConfigError::RelativePath { path: path.to_owned(), key: key.to_owned(), value })
}

/// A path of the command line is relative to where the command was given.
fn absolute(given: &Path) -> PathBuf {
    std::path::absolute(given).unwrap_or_else(|_| given.to_owned())
}

fn milliseconds(
    path: &Path,
    key: &'static str,
    value: u64,
    range: &std::ops::RangeInclusive<u64>,
) -> Result<Duration, ConfigError> {
    within(path, key, value, range).map(Duration::from_millis)
}

fn count(path: &Path, key: &'static str, value: u64) -> Result<u32, ConfigError> {
    // What is in the range fits.
    within(path, key, value, &MIGRATIONS).map(|value| u32::try_from(value).unwrap_or(u32::MAX))
}

fn percent(path: &Path, key: &'static str, value: u64) -> Result<u32, ConfigError> {
    // What is in the range fits.
    within(path, key, value, &(1..=100)).map(|value| u32::try_from(value).unwrap_or(u32::MAX))
}

fn within(
    path: &Path,
    key: &'static str,
    value: u64,
    range: &std::ops::RangeInclusive<u64>,
) -> Result<u64, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    let (least, most) = (*range.start(), *range.end());
    Err(ConfigError::OutOfRange { path: path.to_owned(), key, value, least, most })
}

#[cfg(test)]
mod tests;
