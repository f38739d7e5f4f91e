//! Finds out whether a store takes no writes: its file system or its device became read-only after an error, or was mounted so.
//!
//! ```text
//!   statvfs: ST_RDONLY ─┐
//!   mountinfo: ro, emergency_ro, shutdown ─┼──► read-only
//!   /sys/dev/block/…/ro (devices) ─────────┘
//! ```
//! ext4 of newer kernels keeps the flag of statvfs when it stops after an error, and says so only among its options.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatVfsMountFlags, StatxFlags};

const MOUNTS: &str = "/proc/self/mountinfo";
/// Options of file systems that take no more writes.
const STOPPED: [&str; 3] = ["ro", "emergency_ro", "shutdown"];

/// Returns whether the file system of `path` takes no writes. May block.
pub(crate) fn is_read_only(path: &Path) -> io::Result<bool> {
    if rustix::fs::statvfs(path)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(true);
    }
    let mount = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?;
    if !StatxFlags::from_bits_retain(mount.stx_mask).contains(StatxFlags::MNT_ID) {
        return Ok(false);
    }
    Ok(has_stopped(&std::fs::read_to_string(MOUNTS)?, mount.stx_mnt_id))
}

/// Returns whether a block device takes no writes.
pub(super) fn is_read_only_device(path: &Path) -> io::Result<bool> {
    let number = std::fs::metadata(path)?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let said = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"))?;
    Ok(said.trim_end() == "1")
}

/// Returns whether the list of mounts says that this one has stopped.
fn has_stopped(mounts: &str, mount: u64) -> bool {
    let options = |line: &str| {
        let (fields, of_it) = line.split_once(" - ")?;
        let is_it = fields.split(' ').next()?.parse() == Ok(mount);
        is_it.then(|| of_it.split(' ').nth(2).unwrap_or_default().to_owned())
    };
    let found = mounts.lines().find_map(options).unwrap_or_default();
    found.split(',').any(|option| STOPPED.contains(&option))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_has_stopped_says_so_among_its_options() {
        let mounts = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n\
            40 22 7:1 / /srv/ro\\040x rw,relatime shared:3 - ext4 /dev/loop1 rw,errors=remount-ro,emergency_ro\n\
            41 22 7:2 / /srv/b ro,relatime - xfs /dev/loop2 ro,attr2\n\
            42 22 7:3 / /srv/c rw - ext4 /dev/loop3 rw,errors=remount-ro\n";
        let stopped = |mount| has_stopped(mounts, mount);
        assert_eq!([22, 40, 41, 42, 43].map(stopped), [false, true, true, false, false]);
    }

    #[test]
    fn a_folder_that_can_be_written_to_is_not_read_only() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_read_only(folder.path()).unwrap());
        assert!(is_read_only(Path::new("/proc/sys")).is_ok());
    }
}
