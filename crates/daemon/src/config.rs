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
//! [api_tls]                                 # the API over TLS, for those whose keys it knows: `sterna access`
//! listen = "0.0.0.0:7425"
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
//! user = "sterna-qemu"                      # in whose groups QEMU runs
//! users = "2100000000-2100065535"           # as whom, one for each VM
//!
//! [web]                                     # the page for browsers, besides on the API's socket; a loopback address
//! listen = "127.0.0.1:7424"
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
//! [stores.fast.delay]                       # for tests and demonstrations: a store that is slower than it is
//! write_us = 5000
//!
//! [stores.fast.fault]                       # the same: one that fails
//! operations = ["write"]
//! after = 1000
//!
//! [limits]
//! mirror_wait_max_ms = 1000                 # longest that a migration may hold a guest's write
//! stop_wait_max_ms = 10000                  # longest that a stopping daemon waits for a volume's requests
//! chunks_in_flight = 8                      # how much a migration copies at once
//! chunk_bytes = 524288
//! migrations_per_host = 4                   # ordered here and under way at a time; more wait for their turn
//! migrations_per_store = 2                  # of these, that read from or write to one store
//! kept_images_per_volume = 8                # images that --keep-source left; the oldest go
//! kept_percent_of_store = 50                # of its size, for all of them
//! peer_migrations = 64                      # of one other host, on their way here at a time
//! peer_volumes = 4096                       # of these, and of those that it has brought
//! peer_space_bytes = 0                      # of the volumes on their way from one host; 0: what the stores have
//! arrival_silent_max_s = 600                # how long the source of an arrival may say nothing
//! arrival_away_max_s = 86400                # and how long it may be out of reach
//! ```
//!
//! Every deviation is an error that names the key: a daemon that guesses serves the wrong disk.

mod api_tls;
mod faults;
pub mod folders;
mod hooks;
mod hosts;
mod impairments;
mod keys;
mod limits;
mod machines;
mod nbd;
mod sockets;
mod stores;
mod web;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use api::{Address, AddressError};
use serde::Deserialize;

use self::api_tls::FileApiTls;
use self::faults::{all, both};
use self::hooks::FileHooks;
use self::hosts::FileHosts;
use self::limits::FileLimits;
use self::machines::FileMachines;
use self::nbd::FileNbd;
use self::sockets::FileSocket;
use self::stores::FileStore;
use self::web::FileWeb;
pub use api_tls::ApiTlsConfig;
pub use faults::Faults;
pub(crate) use hooks::TIMEOUT_S as HOOK_TIMEOUT_S;
pub use hooks::{HookProblem, HooksConfig};
pub use hosts::HostsConfig;
pub use impairments::{ImpairmentConfig, ImpairmentFault};
pub use keys::UnknownKey;
pub use limits::{KeptLimits, Limits, MoverLimits};
pub use machines::{MachinesConfig, QemuUser, RunsAs, VmUsers};
pub use nbd::{NbdConfig, TlsConfig, TlsPolicy};
pub use sockets::{SocketAccess, SocketFault, SocketMode, SocketOwner};
pub use stores::{StoreConfig, StoreFault};
pub use web::{WebConfig, WebFault};

use crate::config::folders::Folders;

/// Name of the store that there is when none is configured.
pub const DEFAULT_STORE: &str = "default";
/// Folder of the volumes' sockets beside the API's.
const VOLUME_SOCKETS_FOLDER: &str = "volumes";
/// Largest configuration file in bytes: thousands of stores fit, a disk image given by mistake does not.
const FILE_BYTES_MAX: u64 = 1 << 20;

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
    /// Where the API is served over TLS.
    pub api_tls: ApiTlsConfig,
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
    /// Where people's browsers find the page.
    pub web: WebConfig,
    /// The stores by name. At least one.
    pub stores: BTreeMap<String, StoreConfig>,
    /// What the requests to some of them suffer on purpose, by the store's name.
    pub impairments: BTreeMap<String, ImpairmentConfig>,
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
    /// The page cannot be served there.
    #[error("{path}: web.listen = \"{listen}\": {fault}")]
    Web {
        /// Which file.
        path: PathBuf,
        /// What is written.
        listen: String,
        /// What is wrong with it.
        fault: WebFault,
    },
    /// The API cannot be served there over TLS.
    #[error(
        "{path}: api_tls.listen = \"{listen}\" is no address with a port; write for example \"0.0.0.0:7425\""
    )]
    ApiTls {
        /// Which file.
        path: PathBuf,
        /// What is written.
        listen: String,
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
    /// The first of [`Config::load_whole`].
    pub fn load(overrides: &Overrides, folders: &Folders) -> Result<Self, ConfigError> {
        Self::load_whole(overrides, folders).map_err(Faults::into_first)
    }

    /// As [`Config::load`], to the end also when something is wrong.
    ///
    /// # Errors
    /// Every [`ConfigError`] that there is. Without an explicit file, a missing one is none.
    pub fn load_whole(overrides: &Overrides, folders: &Folders) -> Result<Self, Faults> {
        let explicit = overrides.config_file.as_deref();
        let Some(path) = overrides.file(folders) else {
            return Self::build(Path::new("(no file)"), File::default(), overrides, folders);
        };
        match read(path) {
            Ok(text) => {
                let config = Self::parse_whole(path, &text, overrides, folders)?;
                config.hooks.look(path)?;
                Ok(config)
            }
            Err(ConfigError::Read { source, .. })
                if explicit.is_none() && source.kind() == std::io::ErrorKind::NotFound =>
            {
                Self::build(path, File::default(), overrides, folders)
            }
            Err(error) => Err(error.into()),
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
        Self::parse_whole(path, text, overrides, folders).map_err(Faults::into_first)
    }

    fn parse_whole(
        path: &Path,
        text: &str,
        overrides: &Overrides,
        folders: &Folders,
    ) -> Result<Self, Faults> {
        let syntax = |error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            detail: error.to_string().trim_end().to_owned(),
        };
        let table = toml::de::DeTable::parse(text).map_err(syntax)?;
        let unknown = keys::unknown(text, table.get_ref());
        let unknown = unknown.into_iter().map(|key| ConfigError::UnknownKey { path: path.to_owned(), key });
        // Keys come first: of a misspelt key that was required, the misspelling is what is wrong.
        let known = all(unknown.map(Err::<(), _>));
        let built = match toml::from_str(text).map_err(syntax) {
            Ok(file) => Self::build(path, file, overrides, folders),
            Err(error) => Err(error.into()),
        };
        both(known, built).map(|(_, built)| built)
    }

    fn build(path: &Path, file: File, overrides: &Overrides, folders: &Folders) -> Result<Self, Faults> {
        let data_dir = data_dir(path, file.data_dir, overrides, folders);
        let api = api(path, file.api, overrides, folders);
        // Where it is matters only to the store that there is if none is written.
        let default_in = data_dir.as_deref().unwrap_or(Path::new("/"));
        let stores = stores::check(path, file.stores, default_in);
        let storage = both(both(data_dir, stores), file.limits.check(path));
        let sockets = both(
            file.api_socket.check(path, "api_socket"),
            file.volume_sockets.check(path, "volume_sockets"),
        );
        let ports = both(file.web.check(path), file.api_tls.check(path));
        let network = both(both(file.nbd.check(path), file.hosts.check(path)), ports);
        let vms = both(file.machines.check(path), file.hooks.check(path));
        let (((data_dir, (stores, impairments)), limits), rest) =
            both(storage, both(both(api, sockets), both(network, vms)))?;
        let ((api, (api_socket, volume_sockets)), (((nbd, hosts), (web, api_tls)), (machines, hooks))) = rest;
        let volume_sockets_dir =
            api.path().parent().unwrap_or_else(|| Path::new("/")).join(VOLUME_SOCKETS_FOLDER);
        Ok(Self {
            data_dir,
            api,
            volume_sockets_dir,
            engine: file.engine,
            api_socket,
            api_tls,
            volume_sockets,
            nbd,
            hosts,
            machines,
            hooks,
            web,
            stores,
            impairments,
            limits,
        })
    }
}

impl Overrides {
    /// The file that is read: the one that was named, else the one where such a user has it.
    pub fn file<'a>(&'a self, folders: &'a Folders) -> Option<&'a Path> {
        self.config_file.as_deref().or(folders.config_file.as_deref())
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
    api_tls: FileApiTls,
    volume_sockets: FileSocket,
    nbd: FileNbd,
    hosts: FileHosts,
    machines: FileMachines,
    hooks: FileHooks,
    web: FileWeb,
    stores: BTreeMap<String, FileStore>,
    limits: FileLimits,
}

fn data_dir(
    path: &Path,
    written: Option<PathBuf>,
    overrides: &Overrides,
    folders: &Folders,
) -> Result<PathBuf, ConfigError> {
    match (&overrides.data_dir, written, &folders.data_dir) {
        (Some(given), _, _) => Ok(absolute(given)),
        (None, Some(configured), _) => require_absolute(path, "data_dir", configured),
        (None, None, Some(default)) => Ok(default.clone()),
        (None, None, None) => Err(ConfigError::NoDataDir),
    }
}

fn api(
    path: &Path,
    written: Option<String>,
    overrides: &Overrides,
    folders: &Folders,
) -> Result<Address, ConfigError> {
    match (&overrides.api, written) {
        (Some(given), _) => Ok(Address::unix(absolute(given.path()))?),
        (None, Some(text)) => {
            let address: Address = text.parse()?;
            require_absolute(path, "api", address.path().to_owned())?;
            Ok(address)
        }
        (None, None) => Ok(Address::unix(folders.api_socket())?),
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
