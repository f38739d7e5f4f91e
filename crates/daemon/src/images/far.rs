//! Images that do not belong to this host alone: their server may restart without this host, and lose unflushed data then.
//!
//! ```text
//!   file                 this host's page cache, and its disk        nothing written is lost as long as the host runs
//!   device               this host's disk, unless a network is in    as above, or as an export
//!                        between: nbd, iSCSI, RBD, DRBD, NVMe-oF …
//!   export of a server   that server's                               lost when it restarts, which it does not report
//! ```

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use migration::journal::Place;

/// The kernel's list of block devices by their numbers.
const DEVICES: &str = "/sys/dev/block";
/// Parts of the kernel's paths of devices at the other end of a network.
const FAR: [&str; 6] = ["/block/nbd", "/session", "/rbd", "/block/drbd", "nvme-fabrics", "/fc_host"];
/// The deepest stack of devices that is followed.
const DEPTH_MAX: u32 = 16;

/// Returns whether the image's server may lose unflushed writes while this host runs. Unknown cases count as such. May block
/// for as long as the kernel takes to name a device.
pub(crate) fn starts_alone(place: &Place) -> bool {
    match place {
        Place::File(_) => false,
        Place::Nbd(_) => true,
        Place::Device(path) => is_far(Path::new(path)),
    }
}

fn is_far(path: &Path) -> bool {
    let Ok(number) = fs::metadata(path).map(|found| found.rdev()) else { return true };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    stands_far(&Path::new(DEVICES).join(format!("{major}:{minor}")), 0)
}

/// Returns the same for a device, as the kernel shows it, and for the devices below it.
fn stands_far(shown: &Path, depth: u32) -> bool {
    let Ok(path) = fs::canonicalize(shown) else { return true };
    if depth > DEPTH_MAX || FAR.iter().any(|far| path.to_string_lossy().contains(far)) {
        return true;
    }
    // A partition is on the same devices as its disk.
    let disk = if path.join("partition").exists() { path.join("..") } else { path };
    below(&disk).iter().any(|below| stands_far(below, depth + 1))
}

fn below(device: &Path) -> Vec<PathBuf> {
    let slaves = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    slaves.map(|slave| slave.path()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_server_starts_without_this_host_and_a_file_does_not() {
        assert!(!starts_alone(&Place::File("/a/v.img".to_owned())));
        assert!(starts_alone(&Place::Nbd("nbd://far/v".to_owned())));
        assert!(starts_alone(&Place::Device("/dev/there-is-none".to_owned())), "unknown is not no");
    }

    #[test]
    fn a_device_is_far_if_a_network_is_anywhere_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str, below: &[&str]| {
            let path = folder.path().join("devices/virtual/block").join(name);
            fs::create_dir_all(path.join("slaves")).unwrap();
            for name in below {
                symlink(
                    folder.path().join("devices/virtual/block").join(name),
                    path.join("slaves").join(name),
                )
                .unwrap();
            }
            path
        };
        let near = device("loop0", &[]);
        let far = device("nbd0", &[]);
        assert!(!stands_far(&near, 0) && stands_far(&far, 0));
        assert!(!stands_far(&device("dm-0", &["loop0"]), 0));
        assert!(stands_far(&device("dm-1", &["loop0", "nbd0"]), 0));
        let partition = near.join("loop0p1");
        fs::create_dir_all(&partition).unwrap();
        fs::write(partition.join("partition"), "1").unwrap();
        assert!(!stands_far(&partition, 0));
        // Devices that are on each other without end.
        let round = device("dm-2", &[]);
        symlink(&round, round.join("slaves/dm-2")).unwrap();
        assert!(stands_far(&round, 0));
    }
}
