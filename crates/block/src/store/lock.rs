//! Prevents two processes from writing to one image.
//!
//! ```text
//!   flock             on the open file description that the ring uses: held until the last write in flight has
//!                     landed, even if the process was killed (design §5.9)
//!   bytes 100 + n     "I use permission n"        ┐ as QEMU does it, read locks on single bytes, so that QEMU
//!   bytes 200 + n     "no other may use n"       ┘ and qemu-img refuse an image that is served, and vice versa
//!   byte  300         Sterna's: the second description, by which the last partial block of an odd size is written
//! ```
//!
//! QEMU's permissions are bits of `BLK_PERM_*`; a byte is `base + bit number`. Both kinds of lock belong to the open file
//! description (`F_OFD_SETLK`), not to the process.

// UNSAFETY: rustix does not support F_OFD_SETLK and F_OFD_GETLK; `control` calls them through libc.
#![expect(unsafe_code, reason = "fcntl with a lock description has no safe wrapper")]

use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, FlockOperation};
use rustix::io::Errno;

use super::image::Access;

/// First byte of "I use this permission".
const USED_BASE: i64 = 100;
/// First byte of "no other may use this permission".
const UNSHARED_BASE: i64 = 200;
/// Bit numbers of QEMU's permissions.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Locked on the second description of an image; no other program uses it.
const TAIL_BYTE: i64 = 300;

/// The holder of an image's lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process; `None` if the system does not report it.
    pub process: Option<u32>,
    /// Its program; `None` if it is hidden, or the process has ended and only its last writes hold the image.
    pub program: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.program, self.process) {
            (Some(program), Some(process)) => write!(f, "{program} (process {process})"),
            (None, Some(process)) => {
                write!(f, "process {process}, which has ended; its last writes are still in flight")
            }
            (_, None) => write!(f, "another process"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locked {
    Yes,
    /// Another Sterna holds it, or a program that locks whole files.
    ByFlock,
    /// QEMU holds it, or another program that locks bytes as QEMU does.
    ByBytes,
}

/// Locks an image for `access`, without waiting. Closing the description releases all locks: on any result but `Yes` the caller
/// drops `file`. Fails with the system's error if the file system supports no locks.
pub(super) fn try_lock(file: &OwnedFd, access: Access) -> Result<Locked, Errno> {
    let operation = match access {
        Access::ReadWrite => FlockOperation::NonBlockingLockExclusive,
        Access::ReadOnly => FlockOperation::NonBlockingLockShared,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Locked::ByFlock),
        Err(errno) => return Err(errno),
    }
    match lock_against_qemu(file, access) {
        Err(errno @ (Errno::INVAL | Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS)) => {
            tracing::warn!(%errno, "the file system has no byte locks: QEMU will not see that the image is in use");
            Ok(Locked::Yes)
        }
        result => result,
    }
}

/// Locks the second description of an image that is already held. Fails with the system's error; `file` is then not used.
pub(super) fn try_lock_tail(file: &OwnedFd) -> Result<Locked, Errno> {
    match control(file, libc::F_OFD_SETLK, libc::F_WRLCK, TAIL_BYTE) {
        Ok(_) => Ok(Locked::Yes),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(Locked::ByBytes),
        Err(errno) => Err(errno),
    }
}

/// Finds the holder of the file at `path`, by the system's lists of locks and open files. Byte locks belong to no process: for
/// these it returns the first other process that has the file open.
pub(super) fn find_holder(path: &Path, held: Locked) -> Holder {
    let Ok(stat) = rustix::fs::stat(path) else { return holder(None) };
    find_holder_of(&stat, held)
}

pub(super) fn find_holder_of(stat: &rustix::fs::Stat, held: Locked) -> Holder {
    holder(match held {
        Locked::ByBytes => holder_by_open_files(stat),
        Locked::ByFlock | Locked::Yes => holder_by_locks(stat).or_else(|| holder_by_open_files(stat)),
    })
}

pub(super) fn holder(process: Option<u32>) -> Holder {
    let program = process.and_then(|process| std::fs::read_to_string(format!("/proc/{process}/comm")).ok());
    Holder { process, program: program.map(|name| name.trim_end().to_owned()) }
}

/// Claims the permissions first, then checks for conflicts: two processes that start at once cannot miss each other.
fn lock_against_qemu(file: &OwnedFd, access: Access) -> Result<Locked, Errno> {
    let used: &[i64] = match access {
        Access::ReadWrite => &[CONSISTENT_READ, WRITE],
        Access::ReadOnly => &[CONSISTENT_READ],
    };
    let unshared = [WRITE, RESIZE];
    for byte in bytes(USED_BASE, used).chain(bytes(UNSHARED_BASE, &unshared)) {
        match control(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => return Ok(Locked::ByBytes),
            Err(errno) => return Err(errno),
        }
    }
    for byte in bytes(USED_BASE, &unshared).chain(bytes(UNSHARED_BASE, used)) {
        if control(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte)? != libc::F_UNLCK {
            return Ok(Locked::ByBytes);
        }
    }
    Ok(Locked::Yes)
}

fn bytes(base: i64, permissions: &[i64]) -> impl Iterator<Item = i64> {
    permissions.iter().map(move |permission| base + permission)
}

/// Requests or queries a lock on one byte; returns the kind of lock in the kernel's answer.
fn control(file: &OwnedFd, command: i32, kind: i32, byte: i64) -> Result<i32, Errno> {
    // SAFETY: a lock description is plain integers; these commands require zero as process id.
    let mut description: libc::flock = unsafe { std::mem::zeroed() };
    description.l_type = kind as libc::c_short;
    description.l_whence = libc::SEEK_SET as libc::c_short;
    description.l_start = byte;
    description.l_len = 1;
    // SAFETY: the descriptor is open while `file` is borrowed, and these commands read and write one description.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut description) };
    if result == -1 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(i32::from(description.l_type))
}

/// Returns the process that took a `flock`; it may have ended since.
fn holder_by_locks(stat: &rustix::fs::Stat) -> Option<u32> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| holder_in(line, stat.st_dev, stat.st_ino))
}

/// Returns the process in a line of `/proc/locks`, if the line is about this file. Locks of an open file description have -1 for
/// the process. A line: `7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`.
fn holder_in(line: &str, device: u64, inode: u64) -> Option<u32> {
    let mut words = line.split_whitespace().skip(1).filter(|word| *word != "->");
    let (_kind, _advisory, _mode) = (words.next()?, words.next()?, words.next()?);
    let process = words.next()?.parse().ok()?;
    let mut place = words.next()?.split(':');
    let major = u32::from_str_radix(place.next()?, 16).ok()?;
    let minor = u32::from_str_radix(place.next()?, 16).ok()?;
    let is_same = rustix::fs::makedev(major, minor) == device && place.next()?.parse() == Ok(inode);
    is_same.then_some(process)
}

/// Returns the first other process that has the file open, as far as this process may see.
fn holder_by_open_files(stat: &rustix::fs::Stat) -> Option<u32> {
    let ours = std::process::id();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut others = processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|process: &u32| *process != ours);
    others.find(|process| {
        let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return false };
        files.flatten().any(|file| rustix::fs::stat(file.path()).is_ok_and(|open| is_same(&open, stat)))
    })
}

/// Returns whether two names refer to one file, or to one block device, which may have several.
pub(super) fn is_same(one: &rustix::fs::Stat, other: &rustix::fs::Stat) -> bool {
    let is_device = |stat: &rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
        || (is_device(one) && is_device(other) && one.st_rdev == other.st_rdev)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_about_this_file_names_its_holder() {
        let device = rustix::fs::makedev(0xfe, 0);
        let line = "7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF";
        assert_eq!(holder_in(line, device, 5678), Some(1234));
        assert_eq!(holder_in(line, device, 5679), None);
        assert_eq!(holder_in("9: OFDLCK ADVISORY  READ -1 fe:00:5678 100 101", device, 5678), None);
        for garbage in
            ["", "7:", "7: FLOCK ADVISORY WRITE x fe:00:1", "7: FLOCK ADVISORY WRITE 1 fe:zz:1 0 EOF"]
        {
            assert_eq!(holder_in(garbage, device, 1), None, "{garbage:?}");
        }
    }

    #[test]
    fn a_holder_is_told_as_far_as_it_is_known() {
        let told = |process, program: Option<&str>| {
            Holder { process, program: program.map(str::to_owned) }.to_string()
        };
        assert_eq!(told(Some(7), Some("qemu-img")), "qemu-img (process 7)");
        assert!(told(Some(7), None).contains("has ended"));
        assert_eq!(told(None, None), "another process");
    }
}
