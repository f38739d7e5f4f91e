//! Reads the attributes of a volume's image. Everything here blocks.
//!
//! ```text
//!            identity                      state
//!   file     inode, when it was made       size, mtime, ctime
//!   device   numbers, boot, disk sequence  writes and discards since the boot, as the kernel counts them
//!   export   -                             -      neither a server nor a device at the other end of a network reports any
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::UNIX_EPOCH;

use block::held;
use migration::journal::{ImageLocation, Place};
use migration::stay::Look;
use rustix::fs::OFlags;

use crate::images::far;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The indices of a device's statistics that grow with each change: writes, sectors written, discards, sectors discarded.
const CHANGES: [usize; 4] = [4, 6, 11, 13];

/// Returns the attributes of an image as they are on the disk; `None`: its place has none, or they cannot be read.
pub(crate) fn look(image: &ImageLocation) -> Option<Look> {
    let looked = match &image.place {
        Place::File(path) => file(Path::new(path)).map(Some),
        // This host's kernel counts only what this host has written.
        Place::Device(_) if far::starts_alone(&image.place) => Ok(None),
        Place::Device(path) => device(Path::new(path)),
        Place::Nbd(_) => Ok(None),
    };
    looked.unwrap_or_else(|error| {
        tracing::warn!(image = %image.place, %error, "cannot examine the image");
        None
    })
}

fn file(path: &Path) -> io::Result<Look> {
    // N.B. opening a pipe would block.
    let file = held::open_regular(path)?;
    // Otherwise its times are in memory only, and older ones return after a power cut.
    file.sync_all()?;
    let found = file.metadata()?;
    let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    let made = made.unwrap_or_default().as_nanos();
    let mtime = nanoseconds(found.mtime(), found.mtime_nsec());
    let ctime = nanoseconds(found.ctime(), found.ctime_nsec());
    Ok(Look {
        which: format!("file {} {made}", found.ino()).into(),
        state: format!("{} {mtime} {ctime}", found.size()).into(),
        changed_at: mtime,
        touched_at: Some(mtime.max(ctime)),
    })
}

fn device(path: &Path) -> io::Result<Option<Look>> {
    let device = held::find(path)?.open(OFlags::RDONLY | OFlags::NONBLOCK)?;
    device.sync_all()?;
    let number = device.metadata()?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let statistics = fs::read_to_string(folder.join("stat"))?;
    let counts: Vec<&str> = statistics.split_whitespace().collect();
    let changes: Option<Vec<&str>> = CHANGES.iter().map(|index| counts.get(*index).copied()).collect();
    // A partition has the disk's number.
    let sequence =
        ["diskseq", "../diskseq"].iter().find_map(|name| fs::read_to_string(folder.join(name)).ok());
    let boot = fs::read_to_string(BOOT_ID)?;
    let (Some(changes), Some(sequence)) = (changes, sequence) else { return Ok(None) };
    Ok(Some(Look {
        which: format!("device {major}:{minor} {} {}", boot.trim(), sequence.trim()).into(),
        state: changes.join(" ").into(),
        changed_at: 0,
        touched_at: None,
    }))
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &Path) -> Look {
        look(&ImageLocation::raw_file("s", path.to_str().unwrap())).unwrap()
    }

    #[test]
    fn a_file_that_was_changed_or_replaced_looks_another_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        fs::write(&path, b"old").unwrap();
        let before = at(&path);
        assert_eq!(at(&path), before);
        // The clock of a file system may stand still for some milliseconds.
        while at(&path) == before {
            fs::write(&path, b"nEw").unwrap();
        }
        assert_eq!(at(&path).which, before.which);
        let former = folder.path().join("former");
        fs::rename(&path, &former).unwrap();
        fs::copy(&former, &path).unwrap();
        assert_ne!(at(&path).which, before.which);
        assert_eq!(look(&ImageLocation::raw_file("s", "/nowhere/v.img")), None);
    }
}
