//! The demo's folder: two stores, the daemon's data, its log. It disappears with its owner.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use super::report::Bytes;

/// What the daemon's journal, its log and the file systems' own bookkeeping may take.
const RESERVE_BYTES: u64 = 64 << 20;

/// A temporary folder with two stores.
#[derive(Debug)]
pub(crate) struct DemoFolder {
    folder: TempDir,
}

impl DemoFolder {
    /// Names of the two stores: where the volume begins, and where it is moved to.
    pub(crate) const STORES: (&'static str, &'static str) = ("first", "second");

    /// Makes the folder below `parent`, or below the usual place for large temporary files.
    ///
    /// # Errors
    /// If the file system has not room for two whole copies of the disk; the message says how much is needed where.
    pub(crate) fn create(parent: Option<&Path>, disk_bytes: u64) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(usual_parent, Path::to_owned);
        let needed = disk_bytes.saturating_mul(2).saturating_add(RESERVE_BYTES);
        check_free_space(
            &parent,
            needed,
            "the demo",
            &format!("two copies of a {} disk", Bytes(disk_bytes)),
        )?;
        Self::create_in(&parent)
    }

    /// Makes the folder in `parent`, without asking how much room there is.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn create_in(parent: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("sterna-demo-")
            .tempdir_in(parent)
            .with_context(|| format!("make a temporary folder in {}", parent.display()))?;
        let folder = Self { folder };
        for path in [folder.source_store(), folder.target_store(), folder.data()] {
            std::fs::create_dir(&path).with_context(|| format!("make the folder {}", path.display()))?;
        }
        folder.configure("")?;
        Ok(folder)
    }

    /// Adds lines to the daemon's configuration.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(super) fn configure(&self, lines: &str) -> anyhow::Result<()> {
        std::fs::write(self.config(), self.config_text() + lines).context("write the daemon's configuration")
    }

    /// The folder itself.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The daemon's configuration.
    pub(crate) fn config(&self) -> PathBuf {
        self.path().join("sterna.toml")
    }

    /// The daemon's data folder.
    pub(crate) fn data(&self) -> PathBuf {
        self.path().join("data")
    }

    /// The socket of the daemon's API.
    pub(crate) fn api_socket(&self) -> PathBuf {
        self.path().join("api.sock")
    }

    /// What the daemon prints.
    pub(crate) fn log(&self) -> PathBuf {
        self.path().join("daemon.log")
    }

    /// Where the volume begins.
    pub(crate) fn source_store(&self) -> PathBuf {
        self.path().join(Self::STORES.0)
    }

    /// Where it is moved to.
    pub(crate) fn target_store(&self) -> PathBuf {
        self.path().join(Self::STORES.1)
    }

    /// Removes the folder.
    ///
    /// # Errors
    /// If something in it cannot be removed. Dropping the folder removes it too, without telling.
    pub(crate) fn remove(self) -> anyhow::Result<()> {
        let path = self.path().to_owned();
        self.folder.close().with_context(|| format!("remove {}", path.display()))
    }

    fn config_text(&self) -> String {
        let store = |name: &str, path: &Path| {
            // TOML and JSON write a string with the same escapes.
            let path = serde_json::Value::from(path.to_string_lossy());
            format!("[stores.{name}]\npath = {path}\n")
        };
        store(Self::STORES.0, &self.source_store()) + &store(Self::STORES.1, &self.target_store())
    }
}

/// The temporary folder, unless that is memory: then the one that survives a reboot, which is on a disk.
pub(crate) fn usual_parent() -> PathBuf {
    let usual = std::env::temp_dir();
    let on_disk = Path::new("/var/tmp");
    if is_memory(&usual) && on_disk.is_dir() && !is_memory(on_disk) { on_disk.to_owned() } else { usual }
}

fn is_memory(path: &Path) -> bool {
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    const RAMFS_MAGIC: rustix::fs::FsWord = 0x8584_58f6;
    // Where it cannot be told, creating the folder will say more.
    rustix::fs::statfs(path).is_ok_and(|file_system| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system.f_type))
}

/// Finds out whether `needed` bytes are free in `parent`. The message says that `who` needs them, and for what.
///
/// # Errors
/// If they are not, with the figures; if the file system does not say.
pub(crate) fn check_free_space(parent: &Path, needed: u64, who: &str, what: &str) -> anyhow::Result<()> {
    let file_system = rustix::fs::statvfs(parent)
        .with_context(|| format!("find out how much room there is in {}", parent.display()))?;
    let free = file_system.f_bavail.saturating_mul(file_system.f_frsize);
    if free < needed {
        bail!(
            "{who} needs {} in {} ({what}), but only {} are free: choose another folder or a smaller disk",
            Bytes(needed),
            parent.display(),
            Bytes(free)
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_does_not_fit_is_refused_with_the_figures() {
        let parent = tempfile::tempdir().unwrap();
        let error = DemoFolder::create(Some(parent.path()), 1 << 60).unwrap_err().to_string();
        assert!(error.contains(&parent.path().display().to_string()) && error.contains("TiB"), "{error}");
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing may be left behind");
    }

    #[test]
    fn the_folder_holds_what_the_daemon_needs_and_disappears() {
        let parent = tempfile::tempdir().unwrap();
        let folder = DemoFolder::create(Some(parent.path()), 1 << 20).unwrap();
        assert!(folder.source_store().is_dir() && folder.target_store().is_dir() && folder.data().is_dir());
        let config = std::fs::read_to_string(folder.config()).unwrap();
        let expected = format!("[stores.second]\npath = \"{}/second\"\n", folder.path().display());
        assert!(config.ends_with(&expected), "{config}");
        folder.remove().unwrap();
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
