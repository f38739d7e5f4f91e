//! The configuration of a daemon: a TOML file, overridden by the command line.
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
//! [api_tls]                                 # the API over TLS, for clients whose keys it knows: `sterna access`
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
//! users = "2100000000-2100065535"           # the users of VMs, one for each
//!
//! [web]                                     # the page for browsers, also on the API's socket; a loopback address
//! listen = "127.0.0.1:7424"
//!
//! [hooks]                                   # run on both sides when a VM or a volume moves
//! before = "/etc/sterna/before"             # if it fails, the VM stays
//! after = "/etc/sterna/after"
//! timeout_s = 30
//!
//! [standby]                                 # standbys of this host's volumes at other hosts
//! if_silent = "wait"                        # or "serve": without their word, after 15 s
//! verify = "off"                            # or "weekly": how often everything is compared with them
//!
//! [notify]                                  # problems, and migrations that failed, are told by themselves
//! program = "/etc/sterna/tell"              # runs for each notice
//! webhook = "https://example.net/hook"      # gets each by HTTP, signed with
//! secret_file = "/etc/sterna/notify.secret"
//!
//! [stores.fast]                             # none: one store `default`, in `images/` of the data folder
//! path = "/srv/fast"                        # or device = "/dev/vg/lv", or nbd = "nbd://host/export"
//! format = "raw"                            # of new images in a folder; or "qcow2"
//!
//! [stores.fast.delay]                       # for tests and demonstrations: slows the store down
//! write_us = 5000
//!
//! [stores.fast.fault]                       # for tests and demonstrations: makes the store fail
//! operations = ["write"]
//! after = 1000
//!
//! [limits]
//! mirror_wait_max_ms = 1000                 # longest that a migration may hold a guest's write
//! stop_wait_max_ms = 10000                  # longest that a stopping daemon waits for a volume's requests
//! chunks_in_flight = 8                      # how much a migration copies at once
//! chunk_bytes = 524288
//! impact_percent = 20                       # what guests of a disk may lose to migrations; 100: these do not give way
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
//! Every deviation is an error that names the key: a daemon that guesses might serve the wrong disk.

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
mod notify;
mod sockets;
mod standby;
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
use self::notify::FileNotify;
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
pub use notify::{NotifyConfig, NotifyFault, SecretProblem};
pub(crate) use notify::{program_problem, read_secret};
pub use sockets::{SocketAccess, SocketFault, SocketMode, SocketOwner};
pub use standby::{StandbyConfig, Verify};
pub use stores::{StoreConfig, StoreFault};
pub use web::{WebConfig, WebFault};

use crate::config::folders::Folders;

/// The name of the default store, used when none is configured.
pub const DEFAULT_STORE: &str = "default";
/// The folder of the volumes' sockets, beside the API's socket.
const VOLUME_SOCKETS_FOLDER: &str = "volumes";
/// The largest configuration file in bytes: thousands of stores fit, a disk image given by mistake does not.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The checked and complete configuration of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The absolute path of the folder with the journal.
    pub data_dir: PathBuf,
    /// The absolute path of the API's socket.
    pub api: Address,
    /// The absolute path of the folder with the volumes' sockets.
    pub volume_sockets_dir: PathBuf,
    /// The I/O engine of all lanes.
    pub engine: EngineSetting,
    /// Who may use the API.
    pub api_socket: SocketAccess,
    /// The address of the API over TLS.
    pub api_tls: ApiTlsConfig,
    /// Who may connect to volumes without settings of their own.
    pub volume_sockets: SocketAccess,
    /// The settings of volumes' NBD servers.
    pub nbd: NbdConfig,
    /// The addresses at which other hosts reach this one.
    pub hosts: HostsConfig,
    /// What VMs that come from other hosts may name.
    pub machines: MachinesConfig,
    /// The hooks for moves of VMs and volumes.
    pub hooks: HooksConfig,
    /// What concerns all standbys.
    pub standby: StandbyConfig,
    /// Where notices go.
    pub notify: NotifyConfig,
    /// The address of the page for browsers.
    pub web: WebConfig,
    /// The stores by name, at least one.
    pub stores: BTreeMap<String, StoreConfig>,
    /// Intentional delays and faults of stores, by store name.
    pub impairments: BTreeMap<String, ImpairmentConfig>,
    /// The limits that depend on the site.
    pub limits: Limits,
}

/// The I/O engine that lanes use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineSetting {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring; volumes are not served where the kernel refuses it.
    IoUring,
    /// Threads that block on each request.
    Threads,
}

/// The settings of the command line; `None`: not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The configuration file, which must exist if given.
    pub config_file: Option<PathBuf>,
    /// The folder with the journal.
    pub data_dir: Option<PathBuf>,
    /// The address of the API's socket.
    pub api: Option<Address>,
}

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {path} cannot be read")]
    Read {
        /// The path of the configuration file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file is too large for a configuration.
    #[error("the configuration file {path} has {bytes} bytes, at most {FILE_BYTES_MAX} are read")]
    TooLarge {
        /// The path of the configuration file.
        path: PathBuf,
        /// The size of the file.
        bytes: u64,
    },
    /// The file is not TOML, or a value has the wrong type.
    #[error("the configuration file {path} is not valid:\n{detail}")]
    Syntax {
        /// The path of the configuration file.
        path: PathBuf,
        /// Line, column and cause, on several lines.
        detail: String,
    },
    /// The file has an unknown key.
    #[error("{path}: {key}")]
    UnknownKey {
        /// The path of the configuration file.
        path: PathBuf,
        /// The key that is unknown.
        key: UnknownKey,
    },
    /// A path in the file is relative.
    #[error("{path}: {key} = \"{value}\" must be an absolute path")]
    RelativePath {
        /// The path of the configuration file.
        path: PathBuf,
        /// The key of the path.
        key: String,
        /// The relative path as written.
        value: PathBuf,
    },
    /// A number is out of its range.
    #[error("{path}: {key} = {value} must be between {least} and {most}")]
    OutOfRange {
        /// The path of the configuration file.
        path: PathBuf,
        /// The key of the number.
        key: &'static str,
        /// The number as written.
        value: u64,
        /// The smallest allowed value.
        least: u64,
        /// The largest allowed value.
        most: u64,
    },
    /// A hook cannot be run.
    #[error("{path}: {key} = \"{program}\": {problem}")]
    Hook {
        /// The path of the configuration file.
        path: PathBuf,
        /// The key of the hook.
        key: &'static str,
        /// The program as written.
        program: PathBuf,
        /// The problem with the program.
        problem: HookProblem,
    },
    /// Notices cannot be sent as configured.
    #[error("{path}: notify: {fault}")]
    Notify {
        /// The path of the configuration file.
        path: PathBuf,
        /// The problem with the settings.
        fault: NotifyFault,
    },
    /// An entry of `machines.allow` is not an option of QEMU.
    #[error(
        "{path}: machines.allow: \"{entry}\" is no option of QEMU; write \"-vnc\", or \"-netdev bridge\""
    )]
    Allowed {
        /// The path of the configuration file.
        path: PathBuf,
        /// The entry as written.
        entry: String,
    },
    /// QEMU cannot run as the configured user.
    #[error("{path}: machines.user: {fault}")]
    QemuUser {
        /// The path of the configuration file.
        path: PathBuf,
        /// The problem with the user.
        fault: SocketFault,
    },
    /// A link has no address that other hosts can call.
    #[error("{path}: hosts.links: \"{address}\" is no address that others can call; write HOST:PORT")]
    Link {
        /// The path of the configuration file.
        path: PathBuf,
        /// The address as written.
        address: String,
    },
    /// A folder of other hosts' stores has a relative path.
    #[error("{path}: hosts.shared_folders: {folder} is no absolute path")]
    SharedFolder {
        /// The path of the configuration file.
        path: PathBuf,
        /// The folder as written.
        folder: PathBuf,
    },
    /// A store has an invalid name.
    #[error("{path}: \"{name}\" cannot be the name of a store: {reason}")]
    StoreName {
        /// The path of the configuration file.
        path: PathBuf,
        /// The name as written.
        name: String,
        /// The problem with the name.
        reason: crate::names::InvalidName,
    },
    /// The settings of a store are invalid.
    #[error("{path}: stores.{name}: {fault}")]
    Store {
        /// The path of the configuration file.
        path: PathBuf,
        /// The name of the store.
        name: String,
        /// The problem with the store.
        fault: StoreFault,
    },
    /// A socket cannot have the configured mode or owner.
    #[error("{path}: {table}: {fault}")]
    Socket {
        /// The path of the configuration file.
        path: PathBuf,
        /// The table in the file.
        table: &'static str,
        /// The problem with the mode or the owner.
        fault: SocketFault,
    },
    /// The page cannot be served at the configured address.
    #[error("{path}: web.listen = \"{listen}\": {fault}")]
    Web {
        /// The path of the configuration file.
        path: PathBuf,
        /// The address as written.
        listen: String,
        /// The problem with the address.
        fault: WebFault,
    },
    /// The API cannot be served over TLS at the configured address.
    #[error(
        "{path}: api_tls.listen = \"{listen}\" is no address with a port; write for example \"0.0.0.0:7425\""
    )]
    ApiTls {
        /// The path of the configuration file.
        path: PathBuf,
        /// The address as written.
        listen: String,
    },
    /// The API's address cannot be used.
    #[error("the API cannot be served there")]
    Address(#[from] AddressError),
    /// The folder of the journal is not configured.
    #[error("there is no data folder: set HOME, or give --data-dir")]
    NoDataDir,
}

impl Config {
    /// Reads the configuration: the command line, then the file, then the defaults of this user.
    ///
    /// # Errors
    /// The first fault that [`Config::load_whole`] finds.
    pub fn load(overrides: &Overrides, folders: &Folders) -> Result<Self, ConfigError> {
        Self::load_whole(overrides, folders).map_err(Faults::into_first)
    }

    /// Does the same as [`Config::load`], and continues after faults.
    ///
    /// # Errors
    /// Every [`ConfigError`] of the configuration. A missing file is a fault only if it was named.
    pub fn load_whole(overrides: &Overrides, folders: &Folders) -> Result<Self, Faults> {
        let explicit = overrides.config_file.as_deref();
        let Some(path) = overrides.file(folders) else {
            return Self::build(Path::new("(no file)"), File::default(), overrides, folders);
        };
        match read(path) {
            Ok(text) => {
                let config = Self::parse_whole(path, &text, overrides, folders)?;
                both(config.hooks.look(path), config.notify.look(path))?;
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

    /// Parses the text of a configuration file; `path` is for messages. Reads no file.
    ///
    /// # Errors
    /// [`ConfigError`]: the text is no valid configuration.
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
        // Unknown keys come first: if a required key is misspelt, the misspelling is the fault.
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
        // The path of the data folder matters only to the default store.
        let default_in = data_dir.as_deref().unwrap_or(Path::new("/"));
        let stores = stores::check(path, file.stores, default_in);
        let storage = both(both(data_dir, stores), file.limits.check(path));
        let sockets = both(
            file.api_socket.check(path, "api_socket"),
            file.volume_sockets.check(path, "volume_sockets"),
        );
        let ports = both(file.web.check(path), file.api_tls.check(path));
        let network = both(both(file.nbd.check(path), file.hosts.check(path)), ports);
        let vms = both(file.machines.check(path), both(file.hooks.check(path), file.notify.check(path)));
        let (((data_dir, (stores, impairments)), limits), rest) =
            both(storage, both(both(api, sockets), both(network, vms)))?;
        let (
            (api, (api_socket, volume_sockets)),
            (((nbd, hosts), (web, api_tls)), (machines, (hooks, notify))),
        ) = rest;
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
            standby: file.standby,
            notify,
            web,
            stores,
            impairments,
            limits,
        })
    }
}

impl Overrides {
    /// Returns the configuration file: the named one, or else the default one of this user.
    pub fn file<'a>(&'a self, folders: &'a Folders) -> Option<&'a Path> {
        self.config_file.as_deref().or(folders.config_file.as_deref())
    }
}

impl EngineSetting {
    /// Returns the engine's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

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
    standby: StandbyConfig,
    notify: FileNotify,
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

/// Resolves a path of the command line against the working directory.
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
