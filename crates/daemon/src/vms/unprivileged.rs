//! Gives a QEMU with a user of its own access to its files, and to nothing else of the daemon.
//!
//! ```text
//!   data folder 0700, the daemon's
//!     vms/NAME 0711, the daemon's: QEMU's working directory, so that it needs no access to the folders above
//!       files/ 0711, the daemon's ─ each file QEMU's       own/, tpm/ 0700, QEMU's and all in them
//! ```

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown};
use std::path::Path;

use block::held::{self, Folder, Unfit};
use rustix::fs::FileType;

use super::{manifest, tpm};
use crate::config::QemuUser;

/// A user who may pass through a folder finds its files by name.
const PASSED_MODE: u32 = 0o711;
/// The bit that lets other users pass through a folder.
const OTHERS_PASS: u32 = 0o001;

/// Gives the files of a VM that does not run to its QEMU's user. May block.
pub(super) fn give_files(folder: &Path, user: &QemuUser) -> io::Result<()> {
    let files = manifest::files_folder(folder);
    for passed in [folder, &files] {
        if passed.is_dir() {
            std::fs::set_permissions(passed, Permissions::from_mode(PASSED_MODE))?;
        }
    }
    for file in entries(&files)? {
        lchown(file, Some(user.user), Some(user.group))?;
    }
    for given in [manifest::own_folder(folder), tpm::state(folder)] {
        give_all(&given, user)?;
    }
    Ok(())
}

/// Returns the folder that keeps QEMU from the sockets of its disks, if there is one, for a message.
pub(super) fn obstacle(sockets: &Path, user: &QemuUser) -> Option<String> {
    let keeps = |folder: &&Path| {
        let Ok(found) = std::fs::metadata(folder) else { return false };
        found.mode() & OTHERS_PASS == 0 && found.uid() != user.user && found.gid() != user.group
    };
    let folder = sockets.ancestors().filter(keeps).last()?.display();
    Some(format!("\"{user}\" cannot pass through {folder}: chmod o+x {folder}"))
}

/// Gives a folder with its content away, without following links. **N.B.** A leftover process of a former QEMU may exchange files
/// in the folder meanwhile. So each folder is held, and only what was checked is given away.
fn give_all(folder: &Path, user: &QemuUser) -> io::Result<()> {
    let held = match held::find_entry(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    give_entries(&Folder::open(folder)?, user)?;
    held.give(user.user, user.group)
}

fn give_entries(folder: &Folder, user: &QemuUser) -> io::Result<()> {
    for name in folder.names()? {
        let entry = folder.find(&name)?;
        if entry.kind() == FileType::Directory {
            give_entries(&folder.below(&entry)?, user)?;
        } else if entry.status().st_nlink != 1 && entry.owner() != user.user {
            return Err(Unfit::OtherNames { path: entry.path().to_owned() }.into());
        }
        entry.give(user.user, user.group)?;
    }
    Ok(())
}

/// Returns the content of a folder; nothing if there is none.
fn entries(folder: &Path) -> io::Result<Vec<std::path::PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        found => found?.map(|entry| Ok(entry?.path())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_former_qemu_has_put_into_its_folder_gives_it_nothing_of_root() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to give files away");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("own/below")).unwrap();
        std::fs::create_dir(path("roots")).unwrap();
        for name in ["own/below/log", "roots/file"] {
            std::fs::write(path(name), "").unwrap();
        }
        std::os::unix::fs::symlink(path("roots"), path("own/link")).unwrap();
        let user = QemuUser::of_numbers(24_005, 24_005);
        give_all(&path("own"), &user).unwrap();
        let owner = |name: &str| std::fs::symlink_metadata(path(name)).unwrap().uid();
        for name in ["own", "own/below", "own/below/log", "own/link"] {
            assert_eq!(owner(name), 24_005, "{name}");
        }
        assert_eq!((owner("roots"), owner("roots/file")), (0, 0));
        std::fs::hard_link(path("roots/file"), path("own/below/hard")).unwrap();
        assert!(give_all(&path("own"), &user).is_err());
        assert_eq!(owner("roots/file"), 0);
        give_all(&path("none"), &user).unwrap();
    }
}
