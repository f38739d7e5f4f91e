//! Sockets that a QEMU with a user of its own makes, and sockets that are made for it.
//!
//! ```text
//!   NAME.d/        0700, QEMU's: it listens at NAME.d/qmp, NAME.d/memory
//!      │ moved out: renamed in one step, then checked
//!      ▼
//!   NAME.qmp, NAME.memory      in the daemon's folder, where no other user changes anything
//! ```
//! **N.B.** The daemon, which is root, connects to nothing and changes nothing in a folder that QEMU may write to: links there
//! may lead anywhere. A QEMU with the daemon's user has no such folder, and makes its sockets in their final place.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::held::{self, Folder, Held, Unfit};
use rustix::process::geteuid;
use tokio::time::{Instant, sleep};

/// The mode of a folder that only QEMU may use.
const FOLDER_MODE: u32 = 0o700;
/// The extension of the folder of the VM whose monitor is `NAME.qmp`.
const FOLDER: &str = "d";
const INTERVAL: Duration = Duration::from_millis(10);

pub(crate) fn make_folder(monitor: &Path, user: u32, group: u32) -> io::Result<()> {
    remove_folder(monitor)?;
    let folder = folder(monitor);
    DirBuilder::new().mode(FOLDER_MODE).create(&folder)?;
    chown(&folder, Some(user), Some(group))
}

/// Removes the folder of this monitor's QEMU, if there is one.
pub(crate) fn remove_folder(monitor: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder(monitor)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the user of this monitor's QEMU; `None`: the daemon's user, or Sterna did not start the QEMU.
pub(crate) fn user(monitor: &Path) -> Option<u32> {
    let found = std::fs::symlink_metadata(folder(monitor)).ok()?;
    found.is_dir().then(|| found.uid())
}

/// Returns where QEMU is to make the socket whose final place is `path`, beside its monitor.
pub(crate) fn place(path: &Path) -> PathBuf {
    match (user(path), path.extension()) {
        (Some(_), Some(name)) => folder(path).join(name),
        _ => path.to_owned(),
    }
}

/// Moves a socket from where QEMU has made it to `path`, unless one is there. Fails if it is not QEMU's own socket.
pub(crate) fn take_out(path: &Path) -> io::Result<()> {
    let Some(user) = user(path) else { return Ok(()) };
    match std::fs::rename(place(path), path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    // N.B. The socket is checked only here: QEMU's user cannot exchange it in this folder.
    let found = std::fs::symlink_metadata(path)?;
    if found.file_type().is_socket() && found.uid() == user {
        return Ok(());
    }
    std::fs::remove_file(path)?;
    Err(io::Error::other("QEMU has made something other than a socket"))
}

/// Does the same as [`take_out`], as soon as QEMU has made the socket; fails after `deadline`.
pub(crate) async fn take_out_within(path: &Path, deadline: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        take_out(path)?;
        if user(path).is_none() || path.symlink_metadata().is_ok() {
            return Ok(());
        }
        if begun.elapsed() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sleep(INTERVAL).await;
    }
}

/// A socket that the daemon listens at beside a QEMU's monitor. Dropping this deletes it.
#[derive(Debug)]
pub(crate) struct MadeSocket {
    folder: Folder,
    name: OsString,
    socket: Held,
}

impl Drop for MadeSocket {
    fn drop(&mut self) {
        // QEMU may have deleted it, and the folder's owner may have put something else there.
        let _ = self.folder.remove_held(&self.name, &self.socket);
    }
}

/// Listens at `path`, beside a QEMU's monitor, for that QEMU's `user` alone, if it is known. Deletes a socket that an earlier
/// attempt left there. Fails if something else than a socket is there. **N.B.** The monitor of an adopted VM is in a folder that
/// others own. So everything is done in the folder to which the path led once, and to the socket that was made there.
pub(crate) fn listen_beside(path: &Path, user: Option<u32>) -> io::Result<(UnixListener, MadeSocket)> {
    let (folder, name) = Folder::of(path)?;
    match folder.find(&name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(left) => {
            left.require_socket()?;
            if left.owner() != geteuid().as_raw() && Some(left.owner()) != user {
                return Err(io::Error::other("another user has made a socket there"));
            }
            folder.remove_held(&name, &left)?;
        }
    }
    let listener = UnixListener::bind(folder.own_link().join(&name))?;
    let socket = folder.find(&name)?;
    socket.require_socket()?;
    if socket.owner() != geteuid().as_raw() || socket.status().st_nlink != 1 {
        return Err(Unfit::Exchanged { path: path.to_owned() }.into());
    }
    if let Some(user) = user.filter(|user| *user != socket.owner()) {
        socket.give_user(user)?;
    }
    Ok((listener, MadeSocket { folder, name, socket }))
}

/// Gives a socket that the daemon has made beside a QEMU's monitor to QEMU's user. Fails if it is not a socket.
/// **N.B.** An adopted VM's monitor may be in a folder where QEMU can exchange the file. So the socket is opened and checked
/// first, and only that one is given away.
pub(crate) fn give(path: &Path, user: u32) -> io::Result<()> {
    let found = held::find_entry(path)?;
    found.require_socket()?;
    if found.owner() == user { Ok(()) } else { found.give_user(user) }
}

/// Returns the effective user of a process; `None`: it has ended.
pub(crate) fn user_of_process(process: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // The second is the effective user, by which the kernel checks rights.
    users.split_whitespace().nth(1)?.parse().ok()
}

fn folder(path: &Path) -> PathBuf {
    path.with_extension(FOLDER)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_qemu_has_made_is_taken_out_of_its_folder_if_it_is_a_socket_of_its_own() {
        if !geteuid().is_root() {
            return omission::machine_lacks("root, to give a folder away");
        }
        let folder = tempfile::tempdir().unwrap();
        let monitor = folder.path().join("web.1.qmp");
        // A QEMU with the daemon's user.
        assert_eq!((user(&monitor), place(&monitor)), (None, monitor.clone()));
        take_out(&monitor).unwrap();
        make_folder(&monitor, 5, 6).unwrap();
        assert_eq!(user(&monitor), Some(5));
        let inside = place(&monitor);
        assert_eq!(inside, folder.path().join("web.1.d/qmp"));
        assert_eq!(place(&monitor.with_extension("memory")), folder.path().join("web.1.d/memory"));
        // It does not exist yet.
        take_out(&monitor).unwrap();
        let _listener = UnixListener::bind(&inside).unwrap();
        give(&inside, 5).unwrap();
        take_out(&monitor).unwrap();
        UnixStream::connect(&monitor).unwrap();
        take_out(&monitor).unwrap();

        // Another user's socket, under its name or another one.
        let other = folder.path().join("other");
        let _other = UnixListener::bind(&other).unwrap();
        std::os::unix::fs::symlink(&other, &inside).unwrap();
        assert!(take_out(&monitor).is_err() && !monitor.exists() && other.exists());
        std::fs::hard_link(&other, &inside).unwrap();
        assert!(take_out(&monitor).is_err() && !monitor.exists() && other.exists());
        assert!(give(folder.path(), 5).is_err());
        // A QEMU connects to it beside its monitor.
        let (_listener, made) = listen_beside(&other.with_extension("memory"), Some(5)).unwrap();
        let found = std::fs::metadata(other.with_extension("memory")).unwrap();
        assert!(found.file_type().is_socket() && found.uid() == 5);
        assert!(listen_beside(&other.with_extension("memory"), Some(6)).is_err(), "another user's");
        drop(listen_beside(&other.with_extension("memory"), Some(5)).unwrap());
        drop(made);
        std::fs::write(other.with_extension("memory"), "").unwrap();
        assert!(listen_beside(&other.with_extension("memory"), None).is_err(), "no socket");
        remove_folder(&monitor).unwrap();
        remove_folder(&monitor).unwrap();
        assert_eq!(user(&monitor), None);
    }
}
