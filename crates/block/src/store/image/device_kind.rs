//! The part for block devices only: sectors, uses by the system itself, and no holes that could be queried.
//!
//! This relies on Linux since 4.9, as the tests check: `fallocate` with `PUNCH_HOLE` zeroes the range by the device's own means,
//! and frees space if the device can. It fails (EOPNOTSUPP) rather than leave anything else than zeroes. With `ZERO_RANGE` it
//! always zeroes, by writing if need be. A discard that may leave old data (`BLKDISCARD`) is not used.

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::direct::{self, Demands};
use super::{Access, ImageError, Probed};
use crate::device::ALIGNMENT;
use crate::store::lock::{self, Locked};

/// A part of the system that uses a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceUser {
    /// A file system on it, or on one of its partitions, is mounted there.
    Mount(PathBuf),
    /// It is, or contains, swap space.
    Swap,
    /// Another device is built on it: its name, for example `dm-0` or `md127`.
    Device(String),
}

impl fmt::Display for DeviceUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount(place) => write!(f, "is mounted at {}", place.display()),
            Self::Swap => write!(f, "is in use as swap space"),
            Self::Device(name) => write!(f, "is in use by the device {name}"),
        }
    }
}

pub(super) fn probe(file: &OwnedFd, path: &Path, access: Access) -> Result<Probed, ImageError> {
    let fail = |errno: Errno| ImageError::of("examine", path, errno.into());
    let sector_bytes = rustix::fs::ioctl_blksszget(file).map_err(fail)?;
    if sector_bytes > ALIGNMENT {
        return Err(ImageError::SectorTooLarge { path: path.to_owned(), sector_bytes });
    }
    let stat = rustix::fs::fstat(file).map_err(fail)?;
    let attributes = Attributes::of(stat.st_rdev);
    if access == Access::ReadWrite && attributes.number("ro") == Some(1) {
        return Err(ImageError::ReadOnlyDevice { path: path.to_owned() });
    }
    let demands = Demands { io_alignment: sector_bytes, memory_alignment: ALIGNMENT };
    Ok(Probed {
        // The end of a device is its size, as `BLKGETSIZE64` would return. The position is not used.
        size: rustix::fs::seek(file, SeekFrom::End(0)).map_err(fail)?,
        direct: direct::turn_on(file, path, demands),
        gives_space_back: access == Access::ReadWrite && attributes.gives_space_back(),
    })
}

pub(super) fn why_not_opened(path: &Path, number: u64, error: std::io::Error) -> ImageError {
    match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => match user_of(number) {
            Some(user) => ImageError::DeviceInUse { path: path.to_owned(), user },
            // Another process has it, or the last writes of an ended one are still in flight.
            None => {
                ImageError::Locked { path: path.to_owned(), holder: lock::find_holder(path, Locked::ByFlock) }
            }
        },
        Some(Errno::ROFS) => ImageError::ReadOnlyDevice { path: path.to_owned() },
        Some(Errno::ACCESS) if Attributes::of(number).number("ro") == Some(1) => {
            ImageError::ReadOnlyDevice { path: path.to_owned() }
        }
        _ => ImageError::of("open", path, error),
    }
}

/// Returns the part of the system that uses a device or one of its partitions, if it can be named.
fn user_of(device: u64) -> Option<DeviceUser> {
    let parts: Vec<u64> = std::iter::once(device).chain(Attributes::of(device).partitions()).collect();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let is_ours = |device: u64| parts.contains(&device);
    let mounted = mounts.lines().filter_map(Mount::parse).find(|mount| {
        // Some file systems (btrfs) have a number of their own and name the device as their source.
        is_ours(mount.device) || number_of_device(&mount.source).is_some_and(is_ours)
    });
    if let Some(mount) = mounted {
        return Some(DeviceUser::Mount(mount.place));
    }
    if let Some(name) = parts.iter().find_map(|part| Attributes::of(*part).holder()) {
        return Some(DeviceUser::Device(name));
    }
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut swaps = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    swaps.any(|place| number_of_device(Path::new(place)).is_some_and(is_ours)).then_some(DeviceUser::Swap)
}

fn number_of_device(path: &Path) -> Option<u64> {
    let metadata = std::fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

struct Attributes {
    folder: PathBuf,
}

impl Attributes {
    fn of(device: u64) -> Self {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        Self { folder: format!("/sys/dev/block/{major}:{minor}").into() }
    }

    fn number(&self, name: &str) -> Option<u64> {
        std::fs::read_to_string(self.folder.join(name)).ok()?.trim().parse().ok()
    }

    /// Returns a value of the disk's queue; a partition uses its disk's.
    fn queue_number(&self, name: &str) -> u64 {
        let told = self.number(&format!("queue/{name}")).or_else(|| self.number(&format!("../queue/{name}")));
        told.unwrap_or(0)
    }

    /// Returns whether zeroing by the device's own means frees space: that is so on a device that supports discards.
    fn gives_space_back(&self) -> bool {
        self.queue_number("write_zeroes_max_bytes") > 0 && self.queue_number("discard_max_bytes") > 0
    }

    fn holder(&self) -> Option<String> {
        let mut holders = std::fs::read_dir(self.folder.join("holders")).ok()?.flatten();
        holders.find_map(|entry| entry.file_name().into_string().ok())
    }

    fn partitions(&self) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return Vec::new() };
        let partitions = entries.flatten().filter(|entry| entry.path().join("partition").exists());
        partitions
            .filter_map(|entry| parse_number(&std::fs::read_to_string(entry.path().join("dev")).ok()?))
            .collect()
    }
}

fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

struct Mount {
    device: u64,
    place: PathBuf,
    source: PathBuf,
}

impl Mount {
    /// Parses a line with any number of words before the dash: `43 27 7:0 / /mnt rw,relatime shared:1 - ext4 /dev/loop0 rw`.
    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(2);
        let (device, _root, place) = (parse_number(before.next()?)?, before.next()?, before.next()?);
        let source = after.split(' ').nth(1)?;
        Some(Self { device, place: unescape(place).into(), source: unescape(source).into() })
    }
}

fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (code, part.get(3..)) {
            (Some(code), Some(rest)) => {
                plain.push(char::from(code));
                plain.push_str(rest);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_read_with_its_optional_words_and_its_escapes() {
        for optional in ["", "shared:1 ", "shared:1 master:2 "] {
            let line = format!("43 27 7:5 / /mnt/my\\040disk rw,relatime {optional}- ext4 /dev/loop5 rw");
            let mount = Mount::parse(&line).unwrap();
            assert_eq!(mount.device, rustix::fs::makedev(7, 5));
            assert_eq!((mount.place, mount.source), ("/mnt/my disk".into(), "/dev/loop5".into()));
        }
    }

    #[test]
    fn garbage_is_no_mount() {
        for line in ["", "43 27", "43 27 7:5 / /mnt rw", "43 27 x:5 / /mnt rw - ext4 /dev/x rw", "a b 1:2 - "]
        {
            assert!(Mount::parse(line).is_none(), "{line}");
        }
        assert_eq!(unescape("a\\04"), "a\\04");
        assert_eq!(unescape("\\"), "\\");
    }
}
