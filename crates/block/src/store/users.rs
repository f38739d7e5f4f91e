//! Finds the users of a file by its descriptor, before it is deleted or overwritten. May sleep.
//!
//! ```text
//!   locks         flock, and the bytes that QEMU locks      try_lock
//!   descriptors   /proc/PID/fd of every other process       users_of
//!   loop devices  the kernel holds a file without one       users_of
//! ```
//! A daemon that is not root cannot examine another user's process. That process cannot open the daemon's images either, unless
//! their owner permits it.

// UNSAFETY: rustix does not support LOOP_GET_STATUS64; `file_behind` calls it through libc.
#![expect(unsafe_code, reason = "the ioctl that names the file of a loop device has no safe wrapper")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use super::image::Access;
use super::lock::{self, Holder, Locked};

/// The request for a `loop_info64` of `linux/loop.h`, which begins with the device and the inode of the file.
const LOOP_GET_STATUS64: libc::Ioctl = 0x4C05;
const LOOP_STATUS_WORDS: usize = 29;
const BLOCK_DEVICES: &str = "/sys/block";

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
    users.extend(loops_over(Path::new(BLOCK_DEVICES), &wanted)?);
    Ok(users)
}

/// Returns the loop devices over the file at `path`, which the kernel writes to without any lock.
///
/// # Errors
/// The system cannot tell, or there is no such file.
pub fn loops_of(path: &Path) -> io::Result<Vec<String>> {
    loops_over(Path::new(BLOCK_DEVICES), &rustix::fs::stat(path)?)
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

fn loops_over(devices: &Path, wanted: &rustix::fs::Stat) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(devices) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("loop") {
            continue;
        }
        // A loop device without a file has no such entry.
        let Ok(path) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let device = format!("/dev/{name}");
        let named = rustix::fs::stat(path.trim_end_matches('\n'));
        let is_it = match named {
            Ok(behind) if lock::is_same(&behind, wanted) => true,
            // The path may be of another mount namespace, or lead to another file by now.
            named => match file_behind(&device) {
                Ok(behind) => behind == (wanted.st_dev, wanted.st_ino),
                Err(error) if named.is_ok() || is_of_another(&error) => false,
                Err(error) => return Err(error),
            },
        };
        if is_it {
            found.push(format!("the loop device {device}"));
        }
    }
    Ok(found)
}

/// Returns whether no file that answers can be behind the loop device: the system asks the file, and that one has another file
/// system, which is lost; or the device has let its file go by now.
fn is_of_another(error: &io::Error) -> bool {
    const LOST: [i32; 4] = [libc::ENOTCONN, libc::ESTALE, libc::EIO, libc::ETIMEDOUT];
    const LET_GO: [i32; 3] = [libc::ENXIO, libc::ENODEV, libc::ENOENT];
    error.raw_os_error().is_some_and(|number| LOST.contains(&number) || LET_GO.contains(&number))
}

/// The file that a loop device is over: the number of its file system, and its own there. Errors: those of the system.
pub fn file_behind(device: &str) -> io::Result<(u64, u64)> {
    let device = File::open(device)?;
    let mut status = [0_u64; LOOP_STATUS_WORDS];
    // SAFETY: the descriptor is open during the call, and the kernel writes one `loop_info64`, which is as large as `status`.
    let outcome = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, status.as_mut_ptr()) };
    match outcome {
        0 => Ok((status[0], status[1])),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_loop_device_over_a_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, b"bytes").unwrap();
        let file = OwnedFd::from(File::open(&path).unwrap());
        let wanted = rustix::fs::fstat(&file).unwrap();
        let device = folder.path().join("devices/loop7/loop");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("backing_file"), format!("{}\n", path.display())).unwrap();
        let devices = folder.path().join("devices");
        assert_eq!(loops_over(&devices, &wanted).unwrap(), ["the loop device /dev/loop7"]);
        let other = folder.path().join("other");
        std::fs::write(&other, b"bytes").unwrap();
        std::fs::write(device.join("backing_file"), format!("{}\n", other.display())).unwrap();
        assert_eq!(loops_over(&devices, &wanted).unwrap(), Vec::<String>::new());
    }
}
