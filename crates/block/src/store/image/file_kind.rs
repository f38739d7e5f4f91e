//! The part for regular files only: a size of their own, and holes.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};

use super::direct::{self, Demands};
use super::{Access, ImageError, Probed};
use crate::device::ALIGNMENT;
use crate::held::{self, Folder};

pub(super) fn probe(file: &OwnedFd, path: &Path, access: Access) -> Result<Probed, ImageError> {
    let stat = rustix::fs::fstat(file).map_err(|errno| ImageError::of("examine", path, errno.into()))?;
    // The kernel keeps file sizes below 2^63.
    let size = stat.st_size as u64;
    // The strictest demands, if the kernel or the file system does not report any.
    let strictest = Demands { io_alignment: ALIGNMENT, memory_alignment: ALIGNMENT };
    Ok(Probed {
        size,
        direct: direct::turn_on(file, path, strictest),
        gives_space_back: access == Access::ReadWrite && punches_holes(file, path, size),
    })
}

/// Tries to make a hole in a nameless file beside it, because the file itself must not look changed when its times are compared.
fn punches_holes(file: &OwnedFd, path: &Path, size: u64) -> bool {
    // N.B. without a nameless file the hole is made in the file itself, behind its end, where there is no data. That counts as a
    // change, and costs a full copy at the next migration.
    nameless_beside(file, path).map_or_else(
        || punches_hole_at(file, size.next_multiple_of(u64::from(ALIGNMENT))),
        |nameless| punches_hole_at(&nameless, 0),
    )
}

fn punches_hole_at(file: &OwnedFd, offset: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, offset, u64::from(ALIGNMENT)).is_ok()
}

fn nameless_beside(file: &OwnedFd, path: &Path) -> Option<OwnedFd> {
    let found = held::find(path).ok()?;
    let folder = Folder::open(found.path().parent()?).ok()?;
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let nameless = rustix::fs::openat(&folder, ".", flags, Mode::RUSR | Mode::WUSR).ok()?;
    let device = |file: &OwnedFd| rustix::fs::fstat(file).map(|stat| stat.st_dev);
    (device(file).ok()? == device(&nameless).ok()?).then_some(nameless)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_that_is_asked_does_not_look_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, [7; 4096]).unwrap();
        let times = || {
            let found = path.metadata().unwrap();
            (found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec())
        };
        let before = times();
        let later = folder.path().join("later");
        // The clock of a file system may stand still for some milliseconds.
        while later.metadata().map_or((0, 0), |found| (found.mtime(), found.mtime_nsec()))
            <= (before.0, before.1)
        {
            std::fs::write(&later, [7]).unwrap();
        }
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        probe(&opened.into(), &path, Access::ReadWrite).unwrap();
        assert_eq!(times(), before);
    }
}
