//! A VM's software TPM: a swtpm beside its QEMU, with its state in the VM's folder.
//!
//! ```text
//!   socket made ─► swtpm has it ─► QEMU connects ─► … ─► QEMU ends ─► swtpm ends by itself, or is killed
//!                                      │ the VM moves
//!                                      └─ the state goes within QEMU's stream, to another swtpm that has none yet
//!   the VM is stopped, and moves: the state goes with the VM's description
//! ```
//! The state belongs to the VM like its memory: the other host gets it with the VM, and the folder here is deleted with the
//! rest of the VM. Two swtpms never use it at the same time, because no two QEMUs run.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, lchown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use block::held;
use rustix::fs::{FileType, OFlags};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::process::{self, Process};
use crate::config::QemuUser;
use crate::files::whole_file;
use crate::vms::qemu_sockets;

pub(super) const PROGRAM: &str = "swtpm";
const FOLDER: &str = "tpm";
/// Only the user that runs the daemon, and swtpm, may read it: it has the keys of the guest's disks.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// swtpm's file name of the permanent state.
const PERMANENT: &str = "tpm2-00.permall";
/// swtpm's lock of its state, which it leaves behind.
const LOCK: &str = ".lock";
/// The size limit of such a state. It has some kilobytes, and at most twice a TPM's 256 KiB of lasting memory.
pub(super) const PERMANENT_BYTES_MAX: u64 = 1 << 20;
/// How long swtpm may take to end after its QEMU. Killing it loses nothing: it writes the permanent state at every change.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the socket of a TPM, given the VM's monitor.
pub(super) fn socket(monitor: &Path) -> PathBuf {
    monitor.with_extension("tpm")
}

pub(super) fn log(folder: &Path) -> PathBuf {
    folder.join("tpm.log")
}

pub(super) fn state(folder: &Path) -> PathBuf {
    folder.join(FOLDER)
}

/// Starts the TPM of the VM in this folder, with its former state or as a new one. QEMU can connect when this returns, and the
/// TPM ends when QEMU does. `user` is that of swtpm and QEMU; `None`: the daemon's.
pub(super) async fn start(folder: &Path, socket: &Path, user: Option<&QemuUser>) -> io::Result<Child> {
    // A swtpm to which no QEMU ever connected has the state locked.
    if let Some(left_over) = Process::of_log(&log(folder)) {
        left_over.kill();
        left_over.ended().await;
    }
    let state = state(folder);
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&state)?;
    if let Some(user) = user {
        lchown(&state, Some(user.user), Some(user.group))?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // N.B. made here, not by swtpm, because QEMU does not wait for the socket.
    let listener = OwnedFd::from(UnixListener::bind(socket)?);
    let control = "type=unixio,fd=0";
    let command = match user {
        Some(user) => {
            qemu_sockets::give(socket, user.user)?;
            // It starts in the VM's folder, because it may not pass through the folders above.
            user.command(command(Path::new(""), control))
        }
        None => command(folder, control),
    };
    process::start_with(&command, folder, &log(folder), Stdio::from(listener))
}

/// Returns the command that starts the TPM of the VM in this folder without Sterna.
pub(super) fn command_alone(folder: &Path, socket: &Path) -> Vec<String> {
    let control = format!("type=unixio,path={}", socket.display());
    command(folder, &control).into_iter().chain(["--daemon".to_owned()]).collect()
}

pub(super) fn runs(folder: &Path) -> bool {
    Process::of_log(&log(folder)).is_some()
}

/// Resolves when the TPM of a VM whose QEMU has ended has ended too.
pub(super) async fn ended(folder: &Path, socket: &Path) {
    if let Some(process) = Process::of_log(&log(folder))
        && timeout(END_TIMEOUT, process.ended()).await.is_err()
    {
        tracing::warn!(process = process.id(), "a TPM does not end with its VM; it is killed");
        process.kill();
        process.ended().await;
    }
    let _ = std::fs::remove_file(socket);
}

/// Makes the state of an unused TPM durable. May block.
pub(super) fn sync(folder: &Path) -> io::Result<()> {
    let state = state(folder);
    for entry in std::fs::read_dir(&state)? {
        // N.B. QEMU's user may have put anything there.
        let mut options = File::options();
        let file =
            options.read(true).custom_flags(OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits().cast_signed());
        file.open(entry?.path())?.sync_all()?;
    }
    let above = [state.as_path(), folder].into_iter().chain(folder.parent());
    above.map(File::open).try_for_each(|opened| opened?.sync_all())
}

/// Reads the state that a swtpm has left in a folder. May block.
pub(super) fn read_state(from: &Path) -> Result<Vec<u8>, (PathBuf, io::Error)> {
    let path = from.join(PERMANENT);
    let read = whole_file::read(&path, PERMANENT_BYTES_MAX);
    read.and_then(|content| content.ok_or_else(|| io::ErrorKind::NotFound.into()))
        .map_err(|error| (path, error))
}

/// Returns the state that the swtpm of a stopped VM has left in the VM's folder; `None`: it has never run. Fails if there is
/// anything else than that, because it may belong to the state. May block.
pub(super) fn left_state(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    let entries = match std::fs::read_dir(state(folder)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let mut left = None;
    for entry in entries {
        let entry = entry?;
        match entry.file_name().to_str() {
            Some(PERMANENT) => left = Some(entry.path()),
            Some(LOCK) => {}
            _ => {
                let unknown = format!("{} is not known to be part of its state", entry.path().display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, unknown));
            }
        }
    }
    let Some(path) = left else { return Ok(None) };
    // N.B. QEMU's user may have put anything there.
    let found = held::find_entry(&path)?;
    if found.kind() != FileType::RegularFile || found.status().st_nlink != 1 {
        let other = format!("{} is no file of its own", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, other));
    }
    whole_file::content(found.open(OFlags::RDONLY)?, PERMANENT_BYTES_MAX).map(Some)
}

/// Writes the initial state of a VM's TPM durably. May block.
pub(super) fn write_state(folder: &Path, content: &[u8]) -> io::Result<()> {
    let state = state(folder);
    DirBuilder::new().mode(FOLDER_MODE).create(&state)?;
    let path = state.join(PERMANENT);
    let mut file = File::options().write(true).create_new(true).mode(FILE_MODE).open(path)?;
    file.write_all(content)?;
    sync(folder)
}

/// Returns the version of this host's swtpm: major, minor. The error says why it cannot be used, and what to do.
pub(super) async fn version() -> Result<(u64, u64), String> {
    let asked = Command::new(PROGRAM).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let said = match timeout(VERSION_TIMEOUT, asked).await {
        Ok(Ok(output)) => words::clean(String::from_utf8_lossy(&output.stdout).trim()),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!(
                "there is no {PROGRAM} there, and the VM has a TPM: install it (Debian: swtpm), or put it on the daemon's path"
            ));
        }
        Ok(Err(error)) => return Err(format!("{PROGRAM} cannot be started there: {error}")),
        Err(_) => {
            return Err(format!("{PROGRAM} there did not answer within {} s", VERSION_TIMEOUT.as_secs()));
        }
    };
    read_version(&said).ok_or_else(|| format!("{PROGRAM} there does not say its version: {:?}", said.trim()))
}

/// Returns what this host lacks for a TPM whose source has this version of swtpm; `None`: nothing.
pub(super) async fn fault(of_source: Option<(u64, u64)>) -> Option<String> {
    let here = match version().await {
        Ok(here) => here,
        Err(reason) => return Some(reason),
    };
    let (major, minor) = of_source.filter(|of_source| *of_source > here)?;
    Some(format!(
        "{PROGRAM} there is {}.{}, older than the {major}.{minor} that keeps the VM's TPM: install the same version or a newer \
         one there",
        here.0, here.1
    ))
}

fn command(folder: &Path, control: &str) -> Vec<String> {
    let state = format!("dir={},mode=0600", state(folder).display());
    let words = [PROGRAM, "socket", "--tpm2", "--tpmstate", &state, "--ctrl", control, "--terminate"];
    words.map(str::to_owned).to_vec()
}

fn read_version(said: &str) -> Option<(u64, u64)> {
    let (_, version) = said.lines().next()?.split_once(" version ")?;
    let mut numbers = version.split(|sign: char| !sign.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read() {
        let said = "TPM emulator version 0.7.1, Copyright (c) 2014-2021 IBM Corp.\n";
        assert_eq!(read_version(said), Some((0, 7)));
        assert_eq!(read_version("TPM emulator version 1.10-rc2\n"), Some((1, 10)));
        for other in ["", "usage", "x version ", "x version 3"] {
            assert_eq!(read_version(other), None, "{other}");
        }
    }

    #[test]
    fn a_state_is_read_and_written_where_swtpm_looks_for_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_state(folder.path()).unwrap_err().1.kind(), io::ErrorKind::NotFound);
        write_state(folder.path(), b"keys").unwrap();
        assert_eq!(read_state(&state(folder.path())).unwrap(), b"keys");
        assert!(write_state(folder.path(), b"others").is_err(), "it is there");
        sync(folder.path()).unwrap();
    }

    #[test]
    fn what_a_stopped_tpm_has_left_is_its_state_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| state(folder.path()).join(name);
        assert_eq!(left_state(folder.path()).unwrap(), None);
        write_state(folder.path(), b"keys").unwrap();
        std::fs::write(path(LOCK), "").unwrap();
        assert_eq!(left_state(folder.path()).unwrap(), Some(b"keys".to_vec()));
        std::fs::write(path("tpm2-00.volatilestate"), "more").unwrap();
        assert!(left_state(folder.path()).unwrap_err().to_string().contains("volatilestate"));
        std::fs::remove_file(path("tpm2-00.volatilestate")).unwrap();
        let large = File::options().write(true).open(path(PERMANENT)).unwrap();
        large.set_len(PERMANENT_BYTES_MAX + 1).unwrap();
        assert_eq!(left_state(folder.path()).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        // Its QEMU may have put a link to another file there.
        std::fs::rename(path(PERMANENT), folder.path().join("secret")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("secret"), path(PERMANENT)).unwrap();
        assert!(left_state(folder.path()).unwrap_err().to_string().contains("no file of its own"));
        std::fs::remove_file(path(PERMANENT)).unwrap();
        std::fs::hard_link(folder.path().join("secret"), path(PERMANENT)).unwrap();
        assert!(left_state(folder.path()).is_err());
        std::fs::remove_file(path(PERMANENT)).unwrap();
        assert_eq!(left_state(folder.path()).unwrap(), None);
    }

    #[tokio::test]
    async fn a_tpm_ends_with_whoever_uses_it_and_is_killed_when_nobody_does() {
        if std::process::Command::new(PROGRAM).arg("--version").output().is_err() {
            return omission::machine_lacks(PROGRAM);
        }
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let mut first = start(folder.path(), &socket, None).await.unwrap();
        assert!(runs(folder.path()));
        // A second TPM in its place, because no QEMU was connected.
        let mut second = start(folder.path(), &socket, None).await.unwrap();
        assert!(!first.wait().await.unwrap().success());
        drop(std::os::unix::net::UnixStream::connect(&socket).unwrap());
        ended(folder.path(), &socket).await;
        second.wait().await.unwrap();
        assert!(!runs(folder.path()) && !socket.exists());
        assert_eq!(fault(None).await, None);
        assert!(fault(Some((u64::MAX, 0))).await.unwrap().contains("older"));
    }
}
