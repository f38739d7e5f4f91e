//! The files of adopted disks: proved to be those that QEMU has open, held until they are served, and remembered.
//!
//! ```text
//!   adopt     hold the file at the path ─► QEMU has that very file open ─► remember it ─► the lane opens the held file
//!   restart   find the file at the path ─► its owner, and its number ───────────────────► the lane opens the found file
//! ```
//! The owner of the VM also owns the folder of its images, and can replace them at any moment, also while the daemon is down.
//! The daemon opens the file that was proved, or another file that this user could have opened.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::held::{self, ByName, Finder, Held, Reach, Unfit};
use serde::{Deserialize, Serialize};

use super::Vms;

/// A file of a disk, as it was while its QEMU had it open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProvedFile {
    /// Its path without any link.
    pub(crate) path: PathBuf,
    /// Its inode number. The number of the file system changes with a restart of the host.
    inode: u64,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) mode: u32,
}

impl ProvedFile {
    pub(crate) fn of(held: &Held) -> Self {
        let status = held.status();
        Self {
            path: held.path().to_owned(),
            inode: held.identity().inode,
            user: status.st_uid,
            group: status.st_gid,
            mode: status.st_mode & 0o7777,
        }
    }

    fn is(&self, found: &Held) -> bool {
        (self.inode, self.user) == (found.identity().inode, found.owner())
    }
}

type Files = BTreeMap<String, Vec<Arc<Held>>>;

/// The files of disks that are being adopted, by volume.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    held: Arc<Mutex<Files>>,
}

/// Holds the files of disks until it is dropped.
#[derive(Debug)]
pub(crate) struct Holding {
    held: Arc<Mutex<Files>>,
    volumes: Vec<String>,
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut held = lock(&self.held);
        self.volumes.iter().for_each(|volume| drop(held.remove(volume)));
    }
}

impl Proofs {
    /// Holds the files of volumes: nothing else is opened for these until the disks are served.
    pub(crate) fn hold(&self, files: impl Iterator<Item = (String, Vec<Arc<Held>>)>) -> Holding {
        let mut volumes = Vec::new();
        let mut held = lock(&self.held);
        for (volume, files) in files {
            volumes.push(volume.clone());
            held.insert(volume, files);
        }
        Holding { held: Arc::clone(&self.held), volumes }
    }

    /// Returns which files may be opened for a volume whose proved files are `files`.
    pub(crate) fn finder(&self, volume: &str, files: Vec<ProvedFile>) -> ProvedImages {
        ProvedImages { files, held: lock(&self.held).get(volume).cloned().unwrap_or_default() }
    }
}

fn lock(held: &Mutex<Files>) -> MutexGuard<'_, Files> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Finds the images of volumes among the files of adopted disks.
pub(crate) struct Finders {
    vms: Arc<Vms>,
    pub(crate) proofs: Proofs,
}

impl Finders {
    pub(crate) fn new(vms: &Arc<Vms>) -> Self {
        Self { vms: Arc::clone(vms), proofs: Proofs::default() }
    }

    /// Returns which files may be opened for a volume.
    pub(crate) fn of(&self, volume: &str) -> ProvedImages {
        // Without the list, a file found by its name passes the same checks except for its owner.
        let adopted = self.vms.adoptions().ok().and_then(|known| known.find(|adopted| adopted.uses(volume)));
        let proved = adopted.map(|adopted| adopted.proved(volume)).unwrap_or_default();
        self.proofs.finder(volume, proved)
    }
}

/// The files that may be opened for one volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProvedImages {
    /// The top first. Empty: nothing was proved, as for a volume that was never a disk of an adopted VM.
    files: Vec<ProvedFile>,
    held: Vec<Arc<Held>>,
}

impl Finder for ProvedImages {
    fn find(&self, path: &Path, above: Option<&Held>) -> io::Result<Held> {
        let found = held::find(path)?;
        let exchanged = || io::Error::from(Unfit::Exchanged { path: path.to_owned() });
        if let Some(held) = self.held.iter().find(|held| held.path() == found.path()) {
            if held.identity() != found.identity() {
                return Err(exchanged());
            }
            // Its owner may have given it a second name, but it is the same file.
            return held.try_clone();
        }
        match self.files.iter().find(|file| file.path == found.path()) {
            Some(file) if file.is(&found) => {
                found.require_image()?;
                Ok(found)
            }
            // Another file of the same user is accepted. A file of root may be there by another user's doing.
            Some(file) if above.is_none() && found.reach() == Reach::Others => {
                if file.user != found.owner() || held::is_own_user(file.user) {
                    return Err(exchanged());
                }
                ByName.find(path, above)
            }
            _ => ByName.find(path, above),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    const USER: u32 = 24_005;

    /// Makes a user's file in a folder of that user, and a file of root; `None`: this process cannot change owners.
    fn folder() -> Option<tempfile::TempDir> {
        if !rustix::process::geteuid().is_root() {
            omission::machine_lacks("root, to give files away");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["disk", "base", "other", "roots"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        for name in ["", "disk", "base", "other"] {
            chown(folder.path().join(name), Some(USER), Some(USER)).unwrap();
        }
        Some(folder)
    }

    #[test]
    fn what_was_proved_is_opened_as_long_as_it_is_held() {
        let Some(folder) = folder() else { return };
        let disk = folder.path().join("disk");
        let held = Arc::new(held::find(&disk).unwrap());
        let (proofs, file) = (Proofs::default(), ProvedFile::of(&held));
        let holding = proofs.hold(std::iter::once(("v".to_owned(), vec![Arc::clone(&held)])));
        let finder = proofs.finder("v", vec![file.clone()]);
        assert_eq!(finder.find(&disk, None).unwrap().identity(), held.identity());
        std::fs::rename(&disk, folder.path().join("away")).unwrap();
        assert!(finder.find(&disk, None).is_err());
        // Another file of the same user is also refused.
        std::fs::rename(folder.path().join("other"), &disk).unwrap();
        assert!(finder.find(&disk, None).is_err());
        drop(holding);
        assert!(proofs.finder("v", vec![file]).find(&disk, None).is_ok());
    }

    #[test]
    fn after_a_restart_only_what_its_owner_could_open_is_taken_for_a_disk() {
        let Some(folder) = folder() else { return };
        let path = |name: &str| folder.path().join(name);
        let file = ProvedFile::of(&held::find(&path("disk")).unwrap());
        let base = ProvedFile::of(&held::find(&path("base")).unwrap());
        let finder = ProvedImages { files: vec![file, base], held: Vec::new() };
        let top = finder.find(&path("disk"), None).unwrap();
        assert!(finder.find(&path("base"), Some(&top)).is_ok());
        // Root reads a backing file on behalf of the image's owner.
        std::fs::set_permissions(path("roots"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert!(finder.find(&path("roots"), Some(&top)).is_err());
        for exchange in ["link", "hard link", "root's"] {
            std::fs::remove_file(path("disk")).unwrap();
            match exchange {
                "link" => symlink(path("roots"), path("disk")).unwrap(),
                "hard link" => std::fs::hard_link(path("roots"), path("disk")).unwrap(),
                _ => std::fs::rename(path("roots"), path("disk")).unwrap(),
            }
            assert!(finder.find(&path("disk"), None).is_err(), "{exchange}");
        }
        std::fs::remove_file(path("disk")).unwrap();
        std::fs::rename(path("other"), path("disk")).unwrap();
        assert!(finder.find(&path("disk"), None).is_ok());
    }
}
