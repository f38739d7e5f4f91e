//! The default places where a daemon and its clients look for files.
//!
//! | | root | other users |
//! | --- | --- | --- |
//! | configuration | `/etc/sterna/sterna.toml` | `$XDG_CONFIG_HOME/sterna/sterna.toml`, `~/.config/…` |
//! | data | `/var/lib/sterna` | `$XDG_DATA_HOME/sterna`, `~/.local/share/…` |
//! | runtime | `/run/sterna` | `$XDG_RUNTIME_DIR/sterna`, or `/tmp/sterna-UID` |
//!
//! The commands of a user without a daemon of their own use the system's daemon.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The runtime folder of the system's daemon.
const SYSTEM_RUNTIME: &str = "/run/sterna";
const API_SOCKET: &str = "sterna.sock";

/// The default folders of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folders {
    /// The configuration file, which need not exist. `None`: the user has no home.
    pub config_file: Option<PathBuf>,
    /// The folder of the journal and of the default store. `None`: the user has no home.
    pub data_dir: Option<PathBuf>,
    /// The folder of the sockets.
    pub runtime_dir: PathBuf,
}

impl Folders {
    /// Returns the folders of the user that runs this process.
    pub fn of_this_user() -> Self {
        Self::of(rustix::process::geteuid().as_raw(), |name| std::env::var_os(name))
    }

    /// Returns the API's socket of a daemon with these folders.
    pub fn api_socket(&self) -> PathBuf {
        self.runtime_dir.join(API_SOCKET)
    }

    /// Returns the API's socket for the commands of this user: that of their own daemon, if there is one, or that of the system's.
    pub fn commands_socket(&self) -> PathBuf {
        self.commands_socket_among(Path::exists)
    }

    fn commands_socket_among(&self, exists: impl Fn(&Path) -> bool) -> PathBuf {
        let (own, of_the_system) = (self.api_socket(), Path::new(SYSTEM_RUNTIME).join(API_SOCKET));
        if !exists(&own) && exists(&of_the_system) { of_the_system } else { own }
    }

    fn of(user: u32, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        if user == 0 {
            return Self {
                config_file: Some("/etc/sterna/sterna.toml".into()),
                data_dir: Some("/var/lib/sterna".into()),
                runtime_dir: SYSTEM_RUNTIME.into(),
            };
        }
        // The XDG specification requires relative paths to be ignored.
        let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let home = |folder: &str| absolute("HOME").map(|home| home.join(folder));
        let config = absolute("XDG_CONFIG_HOME").or_else(|| home(".config"));
        let data = absolute("XDG_DATA_HOME").or_else(|| home(".local/share"));
        let runtime = absolute("XDG_RUNTIME_DIR").map(|folder| folder.join("sterna"));
        Self {
            config_file: config.map(|folder| folder.join("sterna/sterna.toml")),
            data_dir: data.map(|folder| folder.join("sterna")),
            runtime_dir: runtime.unwrap_or_else(|| format!("/tmp/sterna-{user}").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Folders;

    fn check(user: u32, variables: &[(&str, &str)]) -> [String; 3] {
        let folders = Folders::of(user, |name| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into())
        });
        let text =
            |path: Option<std::path::PathBuf>| path.map_or("-".into(), |path| path.display().to_string());
        [text(folders.config_file), text(folders.data_dir), folders.runtime_dir.display().to_string()]
    }

    #[test]
    fn root_has_the_folders_of_the_system_whatever_its_environment_says() {
        let system = ["/etc/sterna/sterna.toml", "/var/lib/sterna", "/run/sterna"];
        assert_eq!(check(0, &[]), system);
        assert_eq!(check(0, &[("XDG_RUNTIME_DIR", "/run/user/0"), ("HOME", "/root")]), system);
    }

    #[test]
    fn users_have_the_xdg_folders() {
        let home = [("HOME", "/home/a"), ("XDG_RUNTIME_DIR", "/run/user/7")];
        let expected =
            ["/home/a/.config/sterna/sterna.toml", "/home/a/.local/share/sterna", "/run/user/7/sterna"];
        assert_eq!(check(7, &home), expected);
        let own = [("XDG_CONFIG_HOME", "/c"), ("XDG_DATA_HOME", "/d"), ("HOME", "/home/a")];
        assert_eq!(check(7, &own), ["/c/sterna/sterna.toml", "/d/sterna", "/tmp/sterna-7"]);
    }

    #[test]
    fn relative_and_missing_variables_are_ignored() {
        assert_eq!(check(7, &[("XDG_DATA_HOME", "data"), ("HOME", "home")]), ["-", "-", "/tmp/sterna-7"]);
    }

    #[test]
    fn commands_use_the_daemon_of_their_user_or_that_of_the_system() {
        let check = |user, there: &[&str]| {
            let folders = Folders::of(user, |_| None);
            let socket =
                folders.commands_socket_among(|path| there.iter().any(|known| path == Path::new(known)));
            socket.display().to_string()
        };
        let (own, system) = ("/tmp/sterna-7/sterna.sock", "/run/sterna/sterna.sock");
        assert_eq!(check(7, &[own, system]), own);
        assert_eq!(check(7, &[system]), system);
        assert_eq!(check(7, &[]), own, "nothing is there: it names the daemon that the user would start");
        assert_eq!(check(0, &[]), system);
    }
}
