//! Checks a configuration before a daemon starts with it: reports every fault in it, and in the files that it names on this host.
//! The check changes, locks and connects to nothing, so it may run beside the daemon. A finding need not keep a daemon from
//! starting: the daemon waits for a store whose disk is not mounted.

use std::fs::Metadata;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};

use crate::config::folders::Folders;
use crate::config::{Config, ConfigError, Overrides, RunsAs, StoreConfig};
use crate::error::{lines_with_causes, with_causes};

/// Where root's programs are searched.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"];

/// The result of a check.
#[derive(Debug)]
pub struct ConfigCheck {
    /// The file that was read; `None`: there is none, and the defaults were checked.
    pub file: Option<PathBuf>,
    /// The configuration that a daemon would use; `None`: it would not start.
    pub config: Option<Config>,
    /// The problems that were found.
    pub problems: Vec<ConfigProblem>,
}

/// A problem with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// The problem, with the key.
    pub problem: String,
    /// What to do about it.
    pub advice: String,
}

impl ConfigProblem {
    fn new(problem: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), advice: advice.into() }
    }
}

impl ConfigCheck {
    /// Checks what a daemon with these arguments would read.
    pub fn of(overrides: &Overrides, folders: &Folders) -> Self {
        let file = overrides.file(folders);
        let file = file.filter(|path| overrides.config_file.is_some() || path.exists()).map(Path::to_owned);
        match Config::load_whole(overrides, folders) {
            Ok(config) => Self { file, problems: look(&config), config: Some(config) },
            Err(faults) => {
                let problem =
                    |fault: &ConfigError| ConfigProblem::new(lines_with_causes(fault), advice(fault));
                Self { file, config: None, problems: faults.iter().map(problem).collect() }
            }
        }
    }
}

fn advice(fault: &ConfigError) -> String {
    let words = match fault {
        ConfigError::Read { .. } => "name a file that this user can read: sterna config check FILE",
        ConfigError::TooLarge { .. } => "name a configuration file; this file is not one",
        ConfigError::Syntax { .. } => "correct the line; docs/configuration.md shows a complete file",
        ConfigError::UnknownKey { .. } => "correct the key, or remove it",
        ConfigError::RelativePath { .. } | ConfigError::SharedFolder { .. } => "write the path from / on",
        ConfigError::OutOfRange { key, .. } => {
            return format!("write a number in this range, or leave {key} out: the default suits most hosts");
        }
        ConfigError::Hook { .. } => {
            "correct the path or the program, or remove the key: then no program runs"
        }
        ConfigError::Notify { .. } => "correct the key, or remove it: then that is not told",
        ConfigError::Allowed { .. } => "write the option as QEMU knows it",
        ConfigError::QemuUser { .. } | ConfigError::Socket { .. } => {
            "create the user or the group, or name an existing one"
        }
        ConfigError::Link { .. } => "name an address by which others reach this host",
        ConfigError::Web { .. } => {
            "write \"127.0.0.1:7424\", or remove the key: without it, the page is on the API's socket"
        }
        ConfigError::ApiTls { .. } => {
            "write an address of this host, or 0.0.0.0 or [::] for all, and a port; or remove the key: without it, the API is \
             only on its socket"
        }
        ConfigError::StoreName { .. } => "choose another name",
        ConfigError::Store { .. } => "correct the store, or remove it",
        ConfigError::Address(_) => "correct the key api, or remove it: clients find the default address",
        ConfigError::NoDataDir => "set the key data_dir",
    };
    words.to_owned()
}

/// Checks the files and addresses that a valid configuration names.
fn look(config: &Config) -> Vec<ConfigProblem> {
    let sockets = config.api.path().parent().unwrap_or(Path::new("/"));
    let mut problems = Vec::new();
    problems.extend(can_be_made("data_dir", &config.data_dir));
    problems.extend(can_be_made("api", sockets));
    for (name, store) in &config.stores {
        // The daemon makes the default store.
        let is_made = store.folder().is_some_and(|folder| folder.starts_with(&config.data_dir));
        if !is_made || store.folder().is_some_and(Path::exists) {
            problems.extend(store_problem(name, store));
        }
    }
    if let Some(tls) = &config.nbd.tls
        && let Err(error) = lane::Credentials::load(&tls.files)
    {
        let advice =
            "correct the files that nbd.tls names; without nbd.tls volumes have ports without encryption";
        problems.push(ConfigProblem::new(format!("nbd.tls: {}", with_causes(&error)), advice));
    }
    let listen = config.hosts.listen.iter().map(|address| ("hosts.listen", address));
    let listen = listen.chain(config.web.listen.iter().map(|address| ("web.listen", address)));
    let listen = listen.chain(config.api_tls.listen.iter().map(|address| ("api_tls.listen", address)));
    problems.extend(listen.filter_map(|(key, address)| listen_problem(key, address)));
    // A shared folder may be mounted at any time. A folder for VMs' files must exist when a VM comes.
    problems.extend(config.machines.folders.iter().filter(|folder| !folder.is_dir()).map(|folder| {
        let problem = format!("machines.folders: there is no folder {}", folder.display());
        ConfigProblem::new(problem, "create it, mount its file system, or remove it from the list")
    }));
    if let RunsAs::Other(user) = &config.machines.runs_as
        && !PROGRAM_FOLDERS.iter().any(|folder| Path::new(folder).join("setpriv").exists())
    {
        let problem = format!("QEMU is to run as {user}, and there is no setpriv");
        problems.push(ConfigProblem::new(problem, "install util-linux"));
    }
    let queue = config.limits.queue;
    if queue.per_store > queue.per_host {
        let (store, host) = (queue.per_store, queue.per_host);
        let problem =
            format!("limits.migrations_per_store = {store} is more than migrations_per_host = {host}");
        problems
            .push(ConfigProblem::new(problem, "raise migrations_per_host, or lower migrations_per_store"));
    }
    problems
}

/// Returns the problem with a folder that the daemon makes if it does not exist.
fn can_be_made(key: &str, folder: &Path) -> Option<ConfigProblem> {
    let nearest = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    let at = format!("{key}: {}", folder.display());
    if !nearest.is_dir() {
        let problem = format!("{at} cannot be a folder: {} is not a folder", nearest.display());
        return Some(ConfigProblem::new(problem, "name another place"));
    }
    let error = may(nearest, Access::WRITE_OK | Access::EXEC_OK).err()?;
    let (problem, nearest) = (format!("{at} cannot be written by this user: {error}"), nearest.display());
    Some(ConfigProblem::new(
        problem,
        format!(
            "let the daemon's user write to {nearest}, run the check as that user, or name another folder"
        ),
    ))
}

fn store_problem(name: &str, store: &StoreConfig) -> Option<ConfigProblem> {
    let (key, path, kind): (_, _, fn(&Metadata) -> bool) = match store {
        StoreConfig::Folder { path, .. } => ("path", path, Metadata::is_dir),
        StoreConfig::Device { path } => ("device", path, |found| found.file_type().is_block_device()),
        // Opening the export shows whether the server answers.
        StoreConfig::Nbd { .. } => return None,
    };
    let at = format!("stores.{name}.{key}: {}", path.display());
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let advice = match store {
                StoreConfig::Folder { .. } => "create it, or mount its disk",
                _ => "activate it, or correct the path",
            };
            return Some(ConfigProblem::new(format!("{at} does not exist"), advice));
        }
        Err(error) => {
            let advice =
                "let the daemon's user pass through the folders above it, or run the check as that user";
            return Some(ConfigProblem::new(format!("{at} cannot be examined: {error}"), advice));
        }
    };
    if !kind(&found) {
        return Some(match store {
            StoreConfig::Folder { .. } => {
                let advice = "write device = … for a device; a single image is served by: sterna volume add";
                ConfigProblem::new(format!("{at} is no folder"), advice)
            }
            _ => ConfigProblem::new(
                format!("{at} is no block device"),
                "write path = … for a folder, or name the device",
            ),
        });
    }
    let error = may(path, Access::READ_OK | Access::WRITE_OK).err()?;
    let advice = "let the daemon's user write there, mount it for writing, or run the check as that user";
    Some(ConfigProblem::new(format!("{at} cannot be written by this user: {error}"), advice))
}

fn listen_problem(key: &str, address: &SocketAddr) -> Option<ConfigProblem> {
    // At any port, because a running daemon may use the configured one.
    let error = TcpListener::bind(SocketAddr::new(address.ip(), 0)).err()?;
    let problem = format!("{key}: cannot listen on {} here: {error}", address.ip());
    Some(ConfigProblem::new(problem, "name an address of this host (ip address), or 0.0.0.0 or [::] for all"))
}

/// Returns whether this process's effective user has this access to a file.
fn may(path: &Path, access: Access) -> io::Result<()> {
    Ok(rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a configuration in a folder of its own, which is `DIR` in the text.
    fn check(text: &str) -> Vec<ConfigProblem> {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display().to_string();
        std::fs::create_dir(folder.path().join("store")).unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let path = folder.path().join("sterna.toml");
        std::fs::write(&path, text.replace("DIR", &at)).unwrap();
        let overrides = Overrides { config_file: Some(path), ..Overrides::default() };
        let folders = Folders {
            config_file: None,
            data_dir: Some(folder.path().join("data")),
            runtime_dir: folder.path().join("run"),
        };
        let found = ConfigCheck::of(&overrides, &folders);
        assert_eq!(folder.path().read_dir().unwrap().count(), 3, "nothing is made");
        let without_place = |problem: ConfigProblem| ConfigProblem {
            problem: problem.problem.replace(&at, "DIR"),
            ..problem
        };
        found.problems.into_iter().map(without_place).collect()
    }

    #[test]
    fn a_configuration_in_order_has_no_problems() {
        assert_eq!(check(""), []);
        assert_eq!(check("[stores.a]\npath = 'DIR/store'\n[hosts]\nlisten = ['127.0.0.1:7423']\n"), []);
    }

    #[test]
    fn every_fault_of_the_file_is_told_not_only_the_first() {
        let found = check(
            "engin = 'auto'\ndata_dir = 'data'\n[stores.a]\npth = '/a'\n[stores.b]\npath = 'b'\n\
             [limits]\nmirror_wait_max_ms = 5\nkept_percent_of_store = 101\n[api_socket]\nmode = '0777'\n",
        );
        let keys =
            ["engin\"", "stores.a.pth", "data_dir", "stores.a:", "stores.b.path", "mirror_wait_max_ms"];
        for key in keys.into_iter().chain(["kept_percent_of_store", "0777"]) {
            assert!(found.iter().any(|found| found.problem.contains(key)), "{key}: {found:#?}");
        }
        assert_eq!(found.len(), 8, "{found:#?}");
        assert!(found.iter().all(|found| !found.advice.is_empty()));
    }

    #[test]
    fn what_the_file_names_is_looked_at() {
        for (text, problem, advice) in [
            ("[stores.a]\npath = 'DIR/none'", "stores.a.path: DIR/none does not exist", "create it"),
            ("[stores.a]\npath = 'DIR/file'", "stores.a.path: DIR/file is no folder", "sterna volume add"),
            (
                "[stores.a]\npath = 'DIR/file/x'",
                "stores.a.path: DIR/file/x cannot be examined",
                "daemon's user",
            ),
            ("[stores.a]\ndevice = 'DIR/store'", "stores.a.device: DIR/store is no block device", "path = "),
            ("data_dir = 'DIR/file/x'", "data_dir: DIR/file/x cannot be a folder", "another place"),
            ("api = 'unix:DIR/file/x/api'", "api: DIR/file/x cannot be a folder", "another place"),
            ("[hosts]\nlisten = ['192.0.2.1:1']", "hosts.listen: cannot listen on 192.0.2.1", "0.0.0.0"),
            ("[machines]\nfolders = ['DIR/none']", "machines.folders: there is no folder DIR/none", "create"),
            ("[limits]\nmigrations_per_store = 9", "migrations_per_store = 9 is more than", "raise"),
            (
                "[nbd.tls]\ncertificate = 'DIR/none'\nkey = 'DIR/file'",
                "nbd.tls: ",
                "correct the files that nbd.tls names",
            ),
        ] {
            let found = check(text);
            let is_it =
                |found: &ConfigProblem| found.problem.contains(problem) && found.advice.contains(advice);
            assert!(found.len() == 1 && is_it(&found[0]), "{text}: {found:#?}");
        }
    }
}
