//! Disks whose scheduler makes guests wait behind a copy. Everything here blocks.
//! `mq-deadline` prefers large sequential requests until a small one has waited for `read_expire`: a copy at full speed starves
//! all other users of the disk (docs/performance.md). It is the kernel's default for disks with one queue.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// The kernel's descriptions of block devices, by number.
const DEVICES: &str = "/sys/dev/block";
/// The scheduler, as the kernel marks it in its list.
const MARKED: &str = "[mq-deadline]";
/// The default time in milliseconds for which it lets a read wait.
const READ_EXPIRE_MS: u32 = 500;
/// The deepest stack of devices that is followed (a logical volume, encrypted, on a RAID).
const LEVELS_MAX: u32 = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LateDisk {
    name: String,
    wait_ms: u32,
}

impl LateDisk {
    /// Returns the disk below a folder, a file or a device, if it has this scheduler; one of them, if there are several. A
    /// missing file will be on the disk of its folder.
    pub(crate) fn below(path: &Path) -> Option<Self> {
        let found =
            fs::metadata(path).or_else(|error| path.parent().ok_or(error).and_then(fs::metadata)).ok()?;
        let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        Self::of_device(&Path::new(DEVICES).join(format!("{major}:{minor}")), LEVELS_MAX)
    }

    /// Returns the same for a device that the kernel describes in `folder`.
    fn of_device(folder: &Path, levels: u32) -> Option<Self> {
        let folder = fs::canonicalize(folder).ok()?;
        // A partition is described in the folder of its disk, which has the queue.
        let disk = if folder.join("partition").exists() { folder.parent()? } else { &folder };
        let below = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
        let below: Vec<_> = below.map(|entry| entry.path()).collect();
        if !below.is_empty() {
            return below.iter().find_map(|device| Self::of_device(device, levels.checked_sub(1)?));
        }
        let queue = disk.join("queue");
        let is_so = fs::read_to_string(queue.join("scheduler")).ok()?.contains(MARKED);
        let wait = fs::read_to_string(queue.join("iosched/read_expire")).ok();
        let wait_ms = wait.and_then(|wait| wait.trim().parse().ok()).unwrap_or(READ_EXPIRE_MS);
        is_so.then_some(Self { name: disk.file_name()?.to_string_lossy().into_owned(), wait_ms })
    }
}

impl fmt::Display for LateDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, wait_ms } = self;
        write!(
            f,
            "guests' requests to the disk {name} may wait for {wait_ms} ms each behind a copy at full speed, because its \
             scheduler is mq-deadline: limit migrations with --bandwidth or, if the disk does not rotate, echo none > \
             /sys/block/{name}/queue/scheduler"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(devices: &Path, name: &str, scheduler: &str) {
        let queue = devices.join(name).join("queue");
        fs::create_dir_all(queue.join("iosched")).unwrap();
        fs::create_dir_all(devices.join(name).join("slaves")).unwrap();
        fs::write(queue.join("scheduler"), scheduler).unwrap();
    }

    #[test]
    fn disk_is_found_below_partitions_and_devices_that_stand_on_others() {
        let devices = tempfile::tempdir().unwrap();
        let devices = devices.path();
        disk(devices, "sda", "none [mq-deadline] bfq\n");
        fs::write(devices.join("sda/queue/iosched/read_expire"), "300\n").unwrap();
        fs::create_dir(devices.join("sda/sda1")).unwrap();
        fs::write(devices.join("sda/sda1/partition"), "1\n").unwrap();
        disk(devices, "sdb", "[none] mq-deadline\n");
        disk(devices, "dm-0", "none\n");
        for below in ["sdb", "sda/sda1"] {
            let link = devices.join("dm-0/slaves").join(below.rsplit('/').next().unwrap());
            std::os::unix::fs::symlink(devices.join(below), link).unwrap();
        }
        let found = |name: &str| LateDisk::of_device(&devices.join(name), LEVELS_MAX);
        let sda = Some(LateDisk { name: "sda".into(), wait_ms: 300 });
        assert_eq!([found("sda"), found("sda/sda1"), found("dm-0")], [sda.clone(), sda.clone(), sda]);
        assert_eq!([found("sdb"), found("none")], [None, None]);
        disk(devices, "vda", "[mq-deadline] none\n");
        assert_eq!(found("vda"), Some(LateDisk { name: "vda".into(), wait_ms: READ_EXPIRE_MS }));
    }

    #[test]
    fn devices_that_stand_on_each_other_end() {
        let devices = tempfile::tempdir().unwrap();
        disk(devices.path(), "dm-1", "[mq-deadline]\n");
        let link = devices.path().join("dm-1/slaves/dm-1");
        std::os::unix::fs::symlink(devices.path().join("dm-1"), link).unwrap();
        assert_eq!(LateDisk::of_device(&devices.path().join("dm-1"), LEVELS_MAX), None);
    }
}
