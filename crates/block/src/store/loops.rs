//! The loop devices of this machine, and what they are over: the kernel reads and writes that without a lock.
//!
//! ```text
//!   /sys/block/loopN/{dev,ro,loop/backing_file}     which there are
//!   LOOP_GET_STATUS64                               the file or device below, by its numbers: names lead elsewhere meanwhile
//! ```

// UNSAFETY: rustix does not support LOOP_GET_STATUS64; `status` calls it through libc.
#![expect(unsafe_code, reason = "what is below a loop device is told by an ioctl that has no safe wrapper")]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, makedev};
use rustix::io::Errno;

use super::lock;

/// The request for a `loop_info64` of `linux/loop.h`, which begins with the device and the inode of the file, and the number of
/// the device if that file is one.
const LOOP_GET_STATUS64: libc::Ioctl = 0x4C05;
const LOOP_STATUS_WORDS: usize = 29;
const BLOCK_DEVICES: &str = "/sys/block";

/// A loop device with something below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// Its path below `/dev`.
    pub path: PathBuf,
    /// Its number as a device.
    pub number: u64,
    /// Whether the kernel refuses writes to it.
    pub is_read_only: bool,
    /// The path of the file below, when that was attached, as its mount namespace saw it.
    file: PathBuf,
}

/// What a loop device is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    /// A file: the number of its file system, and its own there.
    File {
        /// The number of its file system's device.
        device: u64,
        /// Its inode in that file system.
        inode: u64,
    },
    /// A block device with this number.
    Device(u64),
    /// A file of a file system that does not answer, or a file that the device has let go.
    Lost,
}

/// Returns the loop devices that have something below them.
///
/// # Errors
/// The system does not tell.
pub fn loop_devices() -> io::Result<Vec<LoopDevice>> {
    devices_in(Path::new(BLOCK_DEVICES))
}

fn devices_in(folder: &Path) -> io::Result<Vec<LoopDevice>> {
    let entries = match std::fs::read_dir(folder) {
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
        // It is free, or is let go at this moment.
        let Ok(file) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let Some(number) = read(&entry.path().join("dev")).as_deref().and_then(device_number) else {
            continue;
        };
        found.push(LoopDevice {
            path: Path::new("/dev").join(name),
            number,
            is_read_only: read(&entry.path().join("ro")).as_deref() == Some("1"),
            // A name may end in spaces.
            file: file.trim_end_matches('\n').into(),
        });
    }
    Ok(found)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

/// Parses the number of a device, as the system writes it: `7:1`.
pub fn device_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

impl LoopDevice {
    /// Returns what it is over.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn below(&self) -> io::Result<Below> {
        match status(&self.path) {
            Err(error) if is_lost(&error) => Ok(Below::Lost),
            // Another user's daemon may not open the device. A file that it cannot find either is none of its images.
            Err(error) => match rustix::fs::stat(&self.file) {
                Ok(stat) => Ok(below_of(&stat)),
                Err(_) if !rustix::process::geteuid().is_root() => Ok(Below::Lost),
                Err(_) => Err(error),
            },
            told => told,
        }
    }

    /// Returns whether a file system is mounted from it, or another device stands on it.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn is_held(&self) -> io::Result<bool> {
        match rustix::fs::open(&self.path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
            Ok(_) => Ok(false),
            Err(Errno::BUSY) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns whether it is over this file or device, which has just answered.
    pub(super) fn is_over(&self, wanted: &Stat) -> io::Result<bool> {
        // The path may be of another mount namespace, or lead to another file by now.
        let named = rustix::fs::stat(&self.file);
        if named.is_ok_and(|named| lock::is_same(&named, wanted)) {
            return Ok(true);
        }
        match self.below() {
            Ok(below) => Ok(below == below_of(wanted)),
            Err(_) if named.is_ok() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Display for LoopDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the loop device {}", self.path.display())
    }
}

fn below_of(stat: &Stat) -> Below {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Below::Device(stat.st_rdev),
        _ => Below::File { device: stat.st_dev, inode: stat.st_ino },
    }
}

/// Returns whether no file that answers can be below: the kernel asks the file, and its file system is lost; or the device has
/// let its file go by now.
fn is_lost(error: &io::Error) -> bool {
    const LOST: [i32; 4] = [libc::ENOTCONN, libc::ESTALE, libc::EIO, libc::ETIMEDOUT];
    const LET_GO: [i32; 3] = [libc::ENXIO, libc::ENODEV, libc::ENOENT];
    error.raw_os_error().is_some_and(|number| LOST.contains(&number) || LET_GO.contains(&number))
}

fn status(device: &Path) -> io::Result<Below> {
    let device = File::open(device)?;
    let mut status = [0_u64; LOOP_STATUS_WORDS];
    // SAFETY: the descriptor is open during the call, and the kernel writes one `loop_info64`, which is as large as `status`.
    let outcome = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, status.as_mut_ptr()) };
    match (outcome, status) {
        (0, [device, inode, 0, ..]) => Ok(Below::File { device, inode }),
        (0, [_, _, number, ..]) => Ok(Below::Device(number)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_devices_are_found_with_their_files_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, b"bytes").unwrap();
        let wanted = rustix::fs::stat(&path).unwrap();
        for (name, file) in [("loop7", Some(&path)), ("loop8", None), ("sda", Some(&path))] {
            let device = folder.path().join("block").join(name);
            std::fs::create_dir_all(device.join("loop")).unwrap();
            std::fs::write(device.join("dev"), "7:7\n").unwrap();
            std::fs::write(device.join("ro"), "1\n").unwrap();
            if let Some(file) = file {
                std::fs::write(device.join("loop/backing_file"), format!("{}\n", file.display())).unwrap();
            }
        }
        let [found] = &devices_in(&folder.path().join("block")).unwrap()[..] else { panic!() };
        assert_eq!((found.to_string().as_str(), found.number), ("the loop device /dev/loop7", makedev(7, 7)));
        assert!(found.is_read_only && found.is_over(&wanted).unwrap());
        let other = folder.path().join("other");
        std::fs::write(&other, b"bytes").unwrap();
        assert!(!found.is_over(&rustix::fs::stat(&other).unwrap()).unwrap());
        assert_eq!(devices_in(&folder.path().join("none")).unwrap(), []);
    }
}
