//! The folder of a host, with its configuration, two stores, the daemon's data, sockets and log.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use api::Address;
use tempfile::TempDir;

/// The limits of a daemon whose migrations do not give way to guests.
const FULL_SPEED: &str = "[limits]\nimpact_percent = 100\n";
/// A configuration with this word has a pace of its own.
const PACE: &str = "impact_percent";

/// A temporary folder with two stores. It disappears with its owner.
#[derive(Debug)]
pub struct Folder {
    folder: TempDir,
    stores: [&'static str; 2],
    pace: Pace,
}

/// The pace of migrations without an ordered impact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// That of the daemon.
    Default,
    /// As fast as possible, unless the configuration mentions [`PACE`].
    Full,
}

impl Folder {
    /// Makes the folder in `parent`, with a configuration that names the two stores.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(parent: &Path, stores: [&'static str; 2]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("sterna-")
            .tempdir_in(parent)
            .with_context(|| format!("make a temporary folder in {}", parent.display()))?;
        let folder = Self { folder, stores, pace: Pace::Default };
        for store in stores {
            let path = folder.path(store);
            std::fs::create_dir(&path).with_context(|| format!("make the folder {}", path.display()))?;
        }
        folder.set_configuration("")?;
        Ok(folder)
    }

    /// Lets migrations run at full speed, unless a test configures `impact_percent`, or mentions it in a comment.
    ///
    /// # Errors
    /// If the configuration cannot be written.
    pub fn at_full_speed(self) -> anyhow::Result<Self> {
        let folder = Self { pace: Pace::Full, ..self };
        folder.configure("")?;
        Ok(folder)
    }

    /// Replaces the configuration by the folder's paths and these lines.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn set_configuration(&self, more: &str) -> anyhow::Result<()> {
        // TOML and JSON have the same escapes in strings.
        let text = |path: &Path| serde_json::Value::from(path.to_string_lossy());
        let store = |name: &str| format!("[stores.{name}]\npath = {}\n", text(&self.path(name)));
        let (data, api) = (text(&self.data()), serde_json::Value::from(self.address()?.to_string()));
        let stores = self.stores.map(store).concat();
        self.write(&format!("data_dir = {data}\napi = {api}\n{stores}{more}"))
    }

    /// Appends to the configuration, which a daemon reads when it starts.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn configure(&self, more: &str) -> anyhow::Result<()> {
        let present =
            std::fs::read_to_string(self.configuration()).context("read the daemon's configuration")?;
        // Another part of the configuration may have limits, and a table occurs once.
        let present = match self.pace {
            Pace::Full => present.strip_suffix(FULL_SPEED).unwrap_or(&present),
            Pace::Default => present.as_str(),
        };
        self.write(&format!("{present}{more}"))
    }

    fn write(&self, configuration: &str) -> anyhow::Result<()> {
        let configuration = match self.pace {
            Pace::Full => at_full_speed(configuration),
            Pace::Default => configuration.to_owned(),
        };
        std::fs::write(self.configuration(), configuration).context("write the daemon's configuration")
    }

    /// Returns a path in the folder. A store's path is its name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the path of the folder.
    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path of the daemon's configuration.
    pub fn configuration(&self) -> PathBuf {
        self.path("sterna.toml")
    }

    /// Returns the daemon's data folder, which the daemon makes.
    pub fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// Returns the path of the daemon's log.
    pub fn log(&self) -> PathBuf {
        self.path("daemon.log")
    }

    /// Returns the address of the daemon's API.
    ///
    /// # Errors
    /// If the folder's path is too long for a socket.
    pub fn address(&self) -> anyhow::Result<Address> {
        Ok(Address::unix(self.path("run/api.sock"))?)
    }

    /// Returns the names of the stores.
    pub fn stores(&self) -> [&'static str; 2] {
        self.stores
    }

    /// Removes the folder with everything in it.
    ///
    /// # Errors
    /// If something in it cannot be removed. Dropping the folder removes it too, without an error.
    pub fn remove(self) -> anyhow::Result<()> {
        let path = self.folder.path().to_owned();
        self.folder.close().with_context(|| format!("remove {}", path.display()))
    }
}

fn at_full_speed(configuration: &str) -> String {
    if configuration.contains(PACE) {
        configuration.to_owned()
    } else if configuration.contains("[limits]\n") {
        configuration.replacen("[limits]\n", FULL_SPEED, 1)
    } else {
        format!("{configuration}{FULL_SPEED}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_run_at_full_speed_unless_the_configuration_has_a_pace() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create(parent.path(), ["first", "second"]).unwrap().at_full_speed().unwrap();
        let shows = |expected: &str| {
            let configuration = std::fs::read_to_string(folder.configuration()).unwrap();
            assert!(configuration.ends_with(expected), "{configuration}");
            assert_eq!(configuration.matches("[limits]").count(), 1, "{configuration}");
        };
        shows(FULL_SPEED);
        folder.configure("[web]\n").unwrap();
        shows("[web]\n[limits]\nimpact_percent = 100\n");
        folder.configure("[limits]\nchunk_bytes = 4096\n").unwrap();
        shows("[web]\n[limits]\nimpact_percent = 100\nchunk_bytes = 4096\n");
        folder.set_configuration("[limits]\nimpact_percent = 5\n").unwrap();
        shows("[limits]\nimpact_percent = 5\n");
    }

    #[test]
    fn the_folder_holds_what_the_daemon_needs_and_disappears() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create(parent.path(), ["first", "second"]).unwrap();
        assert!(folder.path("first").is_dir() && folder.path("second").is_dir());
        folder.configure("[limits]\n").unwrap();
        let configuration = std::fs::read_to_string(folder.configuration()).unwrap();
        let expected = format!("[stores.second]\npath = {:?}\n[limits]\n", folder.path("second"));
        assert!(configuration.ends_with(&expected), "{configuration}");
        folder.remove().unwrap();
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
