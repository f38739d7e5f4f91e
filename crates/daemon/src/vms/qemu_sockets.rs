//! Sockets that a QEMU makes which runs as a user of its own, and those that are made for it.
//!
//! ```text
//!   NAME.d/        0700, QEMU's: it listens at NAME.d/qmp, NAME.d/memory
//!      │ taken out: given another name in one step, then looked at
//!      ▼
//!   NAME.qmp, NAME.memory      in the daemon's folder, where nobody else changes anything
//! ```
//! **N.B.** The daemon, which is root, connects to nothing and changes nothing in a folder that QEMU may write to: what is there
//! may lead anywhere. A QEMU that runs as the daemon's user has no such folder, and makes its sockets where they stay.

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

/// Nobody but QEMU looks into its folder.
const FOLDER_MODE: u32 = 0o700;
/// What the folder of the VM whose monitor is `NAME.qmp` ends in.
const FOLDER: &str = "d";
/// How often a socket that is not there yet is looked for.
const INTERVAL: Duration = Duration::from_millis(10);

/// Makes the folder in which the QEMU of this monitor may make sockets, as that user; there is nothing in it.
///
/// # Errors
/// The system's.
pub(crate) fn make_folder(monitor: &Path, user: u32, group: u32) -> io::Result<()> {
    remove_folder(monitor)?;
    let folder = folder(monitor);
    DirBuilder::new().mode(FOLDER_MODE).create(&folder)?;
    chown(&folder, Some(user), Some(group))
}

/// Takes the folder of this monitor's QEMU away; that there is none is no error.
///
/// # Errors
/// The system's.
pub(crate) fn remove_folder(monitor: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder(monitor)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whom the QEMU of this monitor runs as; `None`: as the daemon, or it was started by somebody else.
pub(crate) fn user(monitor: &Path) -> Option<u32> {
    let found = std::fs::symlink_metadata(folder(monitor)).ok()?;
    found.is_dir().then(|| found.uid())
}

/// Where QEMU is to make the socket that is to be at `path`, beside its monitor.
pub(crate) fn place(path: &Path) -> PathBuf {
    match (user(path), path.extension()) {
        (Some(_), Some(name)) => folder(path).join(name),
        _ => path.to_owned(),
    }
}

/// Moves a socket from where QEMU has made it to `path`; one that is there already, or is made there, is left so.
///
/// # Errors
/// What QEMU has made is no socket, or not its own.
pub(crate) fn take_out(path: &Path) -> io::Result<()> {
    let Some(user) = user(path) else { return Ok(()) };
    match std::fs::rename(place(path), path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    // N.B. here, where it cannot be exchanged.
    let found = std::fs::symlink_metadata(path)?;
    if found.file_type().is_socket() && found.uid() == user {
        return Ok(());
    }
    std::fs::remove_file(path)?;
    Err(io::Error::other("QEMU has made something else than a socket"))
}

/// As [`take_out`], as soon as QEMU has made it.
///
/// # Errors
/// As there; that it did not until `deadline` was over.
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

/// A socket that the daemon listens at beside a QEMU's monitor. It goes when this is dropped.
#[derive(Debug)]
pub(crate) struct MadeSocket {
    folder: Folder,
    name: OsString,
    socket: Held,
}

impl Drop for MadeSocket {
    fn drop(&mut self) {
        // QEMU may have taken it away, and whoever owns the folder may have put something else there.
        let _ = self.folder.remove_held(&self.name, &self.socket);
    }
}

/// Listens at `path`, which is beside a QEMU's monitor, for that QEMU alone: `user`, if that is known. A socket that an earlier attempt
/// left there goes.
///
/// **N.B.** The monitor of a VM that somebody else has started is in a folder of others. All is done in the folder that the path led to
/// once, and to the socket that was made there.
///
/// # Errors
/// The system's; that something else than a socket is there.
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

/// Gives a socket that the daemon has made beside a QEMU's monitor to the user that the QEMU runs as.
///
/// **N.B.** A monitor that somebody else has made may be in a folder where QEMU puts something else in its place: what is given
/// away is looked at first, and then no other.
///
/// # Errors
/// The system's; that it is no socket.
pub(crate) fn give(path: &Path, user: u32) -> io::Result<()> {
    let found = held::find_entry(path)?;
    found.require_socket()?;
    if found.owner() == user { Ok(()) } else { found.give_user(user) }
}

/// The user that a process runs as; `None`: it has ended.
pub(crate) fn user_of_process(process: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // Real, then effective, which is whom the kernel asks for.
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
        // One that runs as the daemon.
        assert_eq!((user(&monitor), place(&monitor)), (None, monitor.clone()));
        take_out(&monitor).unwrap();
        make_folder(&monitor, 5, 6).unwrap();
        assert_eq!(user(&monitor), Some(5));
        let inside = place(&monitor);
        assert_eq!(inside, folder.path().join("web.1.d/qmp"));
        assert_eq!(place(&monitor.with_extension("memory")), folder.path().join("web.1.d/memory"));
        // It is not there yet.
        take_out(&monitor).unwrap();
        let _listener = UnixListener::bind(&inside).unwrap();
        give(&inside, 5).unwrap();
        take_out(&monitor).unwrap();
        UnixStream::connect(&monitor).unwrap();
        take_out(&monitor).unwrap();

        // Somebody else's socket, by its name or by another one.
        let other = folder.path().join("other");
        let _other = UnixListener::bind(&other).unwrap();
        std::os::unix::fs::symlink(&other, &inside).unwrap();
        assert!(take_out(&monitor).is_err() && !monitor.exists() && other.exists());
        std::fs::hard_link(&other, &inside).unwrap();
        assert!(take_out(&monitor).is_err() && !monitor.exists() && other.exists());
        assert!(give(folder.path(), 5).is_err());
        // For one that is to connect beside its monitor.
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
