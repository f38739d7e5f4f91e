//! What the QEMU of a VM finds that runs as a user of its own: its files, and nothing else of the daemon.
//!
//! ```text
//!   data folder 0700, the daemon's
//!     vms/NAME 0711, the daemon's: where QEMU is started, so that it needs no way through what is above
//!       files/ 0711, the daemon's ─ each file QEMU's       own/, tpm/ 0700, QEMU's and all in them
//! ```

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown};
use std::path::Path;

use super::{manifest, tpm};
use crate::config::QemuUser;

/// Who may pass through a folder finds what is in it by name.
const PASSED_MODE: u32 = 0o711;
/// A folder is passed through by others.
const OTHERS_PASS: u32 = 0o001;

/// Gives the files of a VM, which does not run, to the user that its QEMU is to run as. It may sleep.
///
/// # Errors
/// The system's.
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

/// The folder that keeps QEMU from the sockets of its disks, if there is one, in words for people.
pub(super) fn obstacle(sockets: &Path, user: &QemuUser) -> Option<String> {
    let keeps = |folder: &&Path| {
        let Ok(found) = std::fs::metadata(folder) else { return false };
        found.mode() & OTHERS_PASS == 0 && found.uid() != user.user && found.gid() != user.group
    };
    let folder = sockets.ancestors().filter(keeps).last()?.display();
    Some(format!("\"{user}\" cannot pass through {folder}: chmod o+x {folder}"))
}

/// Gives a folder with all that is in it; links are not followed.
fn give_all(folder: &Path, user: &QemuUser) -> io::Result<()> {
    for entry in entries(folder)? {
        if entry.symlink_metadata()?.is_dir() {
            give_all(&entry, user)?;
        } else {
            lchown(entry, Some(user.user), Some(user.group))?;
        }
    }
    match lchown(folder, Some(user.user), Some(user.group)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What is in a folder; nothing if there is none.
fn entries(folder: &Path) -> io::Result<Vec<std::path::PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        found => found?.map(|entry| Ok(entry?.path())).collect(),
    }
}
