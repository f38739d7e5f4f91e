//! The demo's folders: their place, and whether there is room.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use testbed::Folder;

use super::report::Bytes;

/// Room for the daemon's journal, its log and the file systems' own records.
const RESERVE_BYTES: u64 = 64 << 20;
/// The two stores of a host: the first holds the volume before it moves to the second.
pub(crate) const STORES: [&str; 2] = ["first", "second"];

/// Makes the folder of a host below `parent`, or in the default place for large temporary files. Fails if the file system has no
/// room for two complete copies of the disk; the message names size and place.
pub(crate) fn create_folder(parent: Option<&Path>, disk_bytes: u64) -> anyhow::Result<Folder> {
    let parent = parent.map_or_else(usual_parent, Path::to_owned);
    let needed = disk_bytes.saturating_mul(2).saturating_add(RESERVE_BYTES);
    check_free_space(&parent, needed, "the demo", &format!("two copies of a {} disk", Bytes(disk_bytes)))?;
    Folder::create(&parent, STORES)
}

/// Returns the temporary folder; if that is in memory, the one that survives a reboot, which is on a disk.
pub(crate) fn usual_parent() -> PathBuf {
    let usual = std::env::temp_dir();
    let on_disk = Path::new("/var/tmp");
    if is_memory(&usual) && on_disk.is_dir() && !is_memory(on_disk) { on_disk.to_owned() } else { usual }
}

fn is_memory(path: &Path) -> bool {
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    const RAMFS_MAGIC: rustix::fs::FsWord = 0x8584_58f6;
    // If this is unknown, creating the folder will say more.
    rustix::fs::statfs(path).is_ok_and(|file_system| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system.f_type))
}

/// Checks that `needed` bytes are free in `parent`. The error says that `who` needs them for `what`.
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
        let error = create_folder(Some(parent.path()), 1 << 60).unwrap_err().to_string();
        assert!(error.contains(&parent.path().display().to_string()) && error.contains("TiB"), "{error}");
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing may be left behind");
    }
}
