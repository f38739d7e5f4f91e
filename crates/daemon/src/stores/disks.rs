//! The pacers of this host's disks, one for each: what copies from or to a disk gives way to all of its guests.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use migration::journal::Place;

/// The kernel's descriptions of block devices, by number.
const DEVICES: &str = "/sys/dev/block";

#[derive(Debug, Default)]
pub(super) struct Disks {
    known: Mutex<BTreeMap<Disk, Arc<pacer::Store>>>,
}

/// The identity of a disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Disk {
    /// The number of a disk, or of a file system without one.
    Number(u64),
    /// Another server's export, or a path that cannot be examined: it has no number.
    Named(String),
}

impl Disks {
    /// Returns the pacer of the disk that an image is on. May block.
    pub(super) fn of(&self, place: &Place) -> Arc<pacer::Store> {
        let disk = disk_of(place);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(disk).or_default())
    }
}

fn disk_of(place: &Place) -> Disk {
    let path = match place {
        Place::File(path) | Place::Device(path) => path,
        Place::Nbd(uri) => return Disk::Named(uri.clone()),
    };
    // An image that is not there yet will be on the disk of its folder.
    let found =
        fs::metadata(path).or_else(|error| Path::new(path).parent().ok_or(error).and_then(fs::metadata));
    match found {
        Ok(found) => {
            let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
            Disk::Number(whole(Path::new(DEVICES), number).unwrap_or(number))
        }
        Err(_) => Disk::Named(path.clone()),
    }
}

/// Returns the number of the disk that a partition is on; `None` if this is no partition.
fn whole(devices: &Path, number: u64) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = fs::canonicalize(devices.join(format!("{major}:{minor}"))).ok()?;
    if !folder.join("partition").exists() {
        return None;
    }
    let of_disk = fs::read_to_string(folder.parent()?.join("dev")).ok()?;
    let (major, minor) = of_disk.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_one_disk_share_a_pacer_and_those_of_others_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| Place::File(folder.path().join(name).to_str().unwrap().to_owned());
        fs::write(folder.path().join("a"), "").unwrap();
        let disks = Disks::default();
        let there = disks.of(&file("a"));
        assert!(Arc::ptr_eq(&there, &disks.of(&file("not yet there"))));
        let export = Place::Nbd("nbd://host/export".to_owned());
        assert!(!Arc::ptr_eq(&there, &disks.of(&export)));
        assert!(!Arc::ptr_eq(&there, &disks.of(&Place::File("/proc/self/status".to_owned()))));
    }

    #[test]
    fn a_partition_counts_as_its_disk() {
        let devices = tempfile::tempdir().unwrap();
        let disk = devices.path().join("sda");
        fs::create_dir_all(disk.join("sda1")).unwrap();
        fs::write(disk.join("dev"), "8:0\n").unwrap();
        fs::write(disk.join("sda1/partition"), "1\n").unwrap();
        std::os::unix::fs::symlink(disk.join("sda1"), devices.path().join("8:1")).unwrap();
        std::os::unix::fs::symlink(&disk, devices.path().join("8:0")).unwrap();
        assert_eq!(whole(devices.path(), rustix::fs::makedev(8, 1)), Some(rustix::fs::makedev(8, 0)));
        assert_eq!(whole(devices.path(), rustix::fs::makedev(8, 0)), None);
    }
}
