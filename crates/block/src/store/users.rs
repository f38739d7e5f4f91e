//! Finds the users of a file by its descriptor, before it is deleted or overwritten. May sleep.
//!
//! ```text
//!   locks         flock, and the bytes that QEMU locks      try_lock
//!   descriptors   /proc/PID/fd of every other process       users_of
//!   loop devices  the kernel holds a file without one       users_of
//! ```
//! A daemon that is not root cannot examine another user's process. That process cannot open the daemon's images either, unless
//! their owner permits it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::image::Access;
use super::lock::{self, Holder, Locked};
use super::loops::loop_devices;

/// Locks an open image as a served one is locked, without waiting; returns the holder if another process has it. The lock
/// ends with the description.
///
/// # Errors
/// The file system supports no locks.
pub fn try_hold(file: &OwnedFd, access: Access) -> io::Result<Option<Holder>> {
    match lock::try_lock(file, access)? {
        Locked::Yes => Ok(None),
        held => Ok(Some(lock::find_holder_of(&rustix::fs::fstat(file)?, held))),
    }
}

/// Returns whether this process has the file open by another descriptor.
///
/// # Errors
/// The system cannot tell.
pub fn is_ours(file: &OwnedFd) -> io::Result<bool> {
    let wanted = rustix::fs::fstat(file)?;
    let mut open = 0;
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let found = rustix::fs::stat(entry?.path());
        open += usize::from(found.is_ok_and(|found| lock::is_same(&found, &wanted)));
    }
    Ok(open > 1)
}

/// Returns the other programs that have the file open, and the loop devices on it.
///
/// # Errors
/// The system cannot tell: any process may have it open.
pub fn users_of(file: &OwnedFd) -> io::Result<Vec<String>> {
    let wanted = rustix::fs::fstat(file)?;
    let mut users = Vec::new();
    for process in other_processes()? {
        let process = process?;
        if has_open(process, &wanted)? {
            users.push(lock::holder(Some(process)).to_string());
        }
    }
    for device in loop_devices()? {
        if device.is_over(&wanted)? {
            users.push(device.to_string());
        }
    }
    Ok(users)
}

/// What the other programs that have the file open have open besides: links in `/proc` that lead to it, each with its program.
///
/// # Errors
/// The system does not tell.
pub fn open_beside(file: &OwnedFd) -> io::Result<Vec<(String, PathBuf)>> {
    let wanted = rustix::fs::fstat(file)?;
    let mut beside = Vec::new();
    for process in other_processes()? {
        let process = process?;
        let is_it = |path: &PathBuf| rustix::fs::stat(path).is_ok_and(|found| lock::is_same(&found, &wanted));
        let (same, others): (Vec<_>, Vec<_>) = descriptors_of(process)?.into_iter().partition(is_it);
        if !same.is_empty() {
            let holder = lock::holder(Some(process)).to_string();
            beside.extend(others.into_iter().map(|path| (holder.clone(), path)));
        }
    }
    Ok(beside)
}

/// The processes of this machine but this one.
fn other_processes() -> io::Result<impl Iterator<Item = io::Result<u32>>> {
    let ours = std::process::id();
    let numbers = std::fs::read_dir("/proc")?.filter_map(|entry| match entry {
        Ok(entry) => entry.file_name().to_str()?.parse::<u32>().ok().map(Ok),
        Err(error) => Some(Err(error)),
    });
    Ok(numbers.filter(move |number| number.as_ref().ok() != Some(&ours)))
}

fn has_open(process: u32, wanted: &rustix::fs::Stat) -> io::Result<bool> {
    let is_it = |path: &PathBuf| rustix::fs::stat(path).is_ok_and(|found| lock::is_same(&found, wanted));
    Ok(descriptors_of(process)?.iter().any(is_it))
}

/// The descriptors of a process: each thread may have a table of its own, and the first one may have ended before the others.
fn descriptors_of(process: u32) -> io::Result<Vec<PathBuf>> {
    let mut descriptors = Vec::new();
    for thread in entries_of(&format!("/proc/{process}/task"))? {
        descriptors.extend(entries_of(&format!("{}/fd", thread.display()))?);
    }
    Ok(descriptors)
}

/// Returns the entries of a process's folder; none if the process has ended, or is hidden from a user other than root.
fn entries_of(folder: &str) -> io::Result<Vec<PathBuf>> {
    let is_root = rustix::process::geteuid().is_root();
    let entries = std::fs::read_dir(folder).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
    });
    match entries {
        Err(error) if is_over(&error) || !is_root => Ok(Vec::new()),
        entries => entries,
    }
}

fn is_over(error: &io::Error) -> bool {
    const NO_PROCESS: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(NO_PROCESS)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_that_has_a_file_open_is_named_and_one_of_our_own_descriptors_is_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, b"bytes").unwrap();
        let file = OwnedFd::from(File::open(&path).unwrap());
        assert_eq!(users_of(&file).unwrap(), Vec::<String>::new());
        assert!(!is_ours(&file).unwrap());
        let other = File::open(&path).unwrap();
        assert!(is_ours(&file).unwrap());
        drop(other);
        // It reads nothing, and waits for its input to end.
        let mut stranger =
            Command::new("sleep").arg("600").stdin(File::open(&path).unwrap()).spawn().unwrap();
        let users = users_of(&file).unwrap();
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        assert!(users.len() == 1 && users[0].starts_with("sleep (process "), "{users:?}");
        assert_eq!(users_of(&file).unwrap(), Vec::<String>::new());
    }
}
