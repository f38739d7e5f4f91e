//! Clones: ranges of a file that become ranges of another file by sharing their blocks, without being read or written.
//!
//! ```text
//!   source  ├── blocks 7, 8, 9 ──┤          target  ├── blocks 7, 8, 9 ──┤   both refer to the same blocks on the disk;
//!                                                                            a later write to either gets blocks of its own
//! ```
//! btrfs and XFS can do that (FICLONERANGE), and so can NFS over them. What is cloned is what a read would return when the call
//! begins: these file systems write dirty pages of both ranges first, wait for direct I/O in flight, and hold off other writes
//! to both files meanwhile. So a clone needs no flush before it. It survives a power cut once the *target* has been flushed: that
//! makes the references durable, and empties the cache of the disk that both files are on.
//!
//! `copy_file_range` is not used for ranges of an image in use. Where a file system cannot clone, the kernel copies by way of the
//! page cache: that costs the disk as much as reading and writing, and the cache may keep what direct I/O has overwritten.

#![expect(unsafe_code, reason = "a range of a file is cloned by an ioctl that has no safe wrapper")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use chronicle::ByteRange;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The bytes that a trial clones: a multiple of every file system's block.
const TRIAL_BYTES: u64 = 64 << 10;

/// A file whose bytes are those of a device, at the same offsets.
#[derive(Clone, Debug)]
pub struct PlainFile(pub(crate) Arc<OwnedFd>);

impl PlainFile {
    /// Returns the number of pieces that the file consists of on its disk; what has not reached the disk yet is left out. Blocks.
    ///
    /// # Errors
    /// The system's error: not every file system says that.
    pub fn extents(&self) -> Result<u32, Errno> {
        let mut request = ExtentMap { length: u64::MAX, ..ExtentMap::default() };
        // SAFETY: the descriptor is open during the call, and the kernel reads and writes one `ExtentMap`: with room for no extents
        // it only counts them.
        let outcome = unsafe { libc::ioctl(self.0.as_raw_fd(), COUNT_EXTENTS, &raw mut request) };
        if outcome == 0 { Ok(request.mapped_extents) } else { Err(last_error()) }
    }
}

/// The kernel's `file_clone_range`.
#[repr(C)]
struct CloneRange {
    source: i64,
    source_offset: u64,
    length: u64,
    target_offset: u64,
}

/// The kernel's `fiemap`, without extents behind it.
#[repr(C)]
#[derive(Default)]
struct ExtentMap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// FS_IOC_FIEMAP: `_IOWR('f', 11, struct fiemap)`.
const COUNT_EXTENTS: libc::Ioctl = 0xc020_660b;

/// Why ranges of a file cannot be cloned into another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoClones {
    /// The files are on two file systems.
    #[error("the two images are on different file systems")]
    Apart,
    /// The file system has no reflinks.
    #[error("the file system cannot share blocks between files")]
    Unable,
    /// The files differ in an attribute that must be the same, as NOCOW of btrfs.
    #[error(
        "the file system refuses to share blocks between these two files; if one is NOCOW (lsattr), both must be"
    )]
    Unlike,
    /// Another error of the system.
    #[error("the file system cannot be asked: {}", std::io::Error::from_raw_os_error(.0.raw_os_error()))]
    Failed(Errno),
}

/// Makes a range of `to` the same as that of `from`, by sharing its blocks. Blocks; changes nothing if it fails.
///
/// The range begins and ends at multiples of the file system's block, or ends at the ends of both files.
///
/// # Errors
/// The system's error: EXDEV, EOPNOTSUPP and EINVAL say that it cannot; see [`NoClones::of`].
pub fn clone_range(to: BorrowedFd<'_>, from: BorrowedFd<'_>, range: ByteRange) -> Result<(), Errno> {
    if range.length == 0 {
        // The system would clone everything up to the end of the file.
        return Ok(());
    }
    let request = CloneRange {
        source: i64::from(from.as_raw_fd()),
        source_offset: range.offset,
        length: range.length,
        target_offset: range.offset,
    };
    rustix::io::retry_on_intr(|| {
        // SAFETY: both descriptors are open during the call, and the kernel only reads one `CloneRange`, which outlives it.
        let outcome = unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONERANGE, &raw const request) };
        match outcome {
            0 => Ok(()),
            _ => Err(last_error()),
        }
    })
}

/// Checks whether ranges of a file can be cloned into new files of a folder: tries it with a file that has no name, and that is
/// gone when this returns. Blocks.
///
/// # Errors
/// [`NoClones`].
pub fn try_clones(from: &File, folder: &Path) -> Result<(), NoClones> {
    let length = from.metadata().map_err(|error| NoClones::Failed(errno_of(&error)))?.len();
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let trial = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        // A file system without files that have no name has no reflinks either.
        Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL => NoClones::Unable,
        errno => NoClones::Failed(errno),
    })?;
    let range = ByteRange::new(0, length.min(TRIAL_BYTES));
    clone_range(trial.as_fd(), from.as_fd(), range).map_err(NoClones::of)
}

impl NoClones {
    /// Returns what an error of [`clone_range`] says.
    pub fn of(errno: Errno) -> Self {
        match errno {
            Errno::XDEV => Self::Apart,
            Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS | Errno::BADF => Self::Unable,
            Errno::INVAL => Self::Unlike,
            errno => Self::Failed(errno),
        }
    }
}

fn last_error() -> Errno {
    errno_of(&std::io::Error::last_os_error())
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    /// A file of memory has no file system that could clone: the answer must not be mistaken for a broken disk.
    #[test]
    fn what_cannot_be_cloned_says_why_and_changes_nothing() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        std::fs::write(&from, vec![7; 8192]).unwrap();
        std::fs::write(&to, vec![9; 8192]).unwrap();
        let from = File::open(from).unwrap();
        let to = File::options().read(true).write(true).open(to).unwrap();
        let errno = clone_range(to.as_fd(), from.as_fd(), ByteRange::new(0, 4096)).unwrap_err();
        assert_eq!(NoClones::of(errno), NoClones::Unable);
        let mut bytes = [0; 8192];
        to.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [9; 8192]);
        assert_eq!(try_clones(&from, folder.path()), Err(NoClones::Unable));
        // A folder of another file system.
        assert_eq!(try_clones(&from, &std::env::temp_dir()), Err(NoClones::Apart));
        assert!(matches!(try_clones(&from, Path::new("/dev/null")), Err(NoClones::Failed(_))));
    }

    #[test]
    fn the_pieces_of_a_file_are_counted() {
        let mut file = tempfile::tempfile().unwrap();
        let plain = |file: &File| PlainFile(Arc::new(file.try_clone().unwrap().into()));
        let Ok(0) = plain(&file).extents() else {
            return omission::kernel_lacks("a count of extents in the folder of temporary files");
        };
        std::io::Write::write_all(&mut file, &[7; 4096]).unwrap();
        file.write_all_at(&[7; 4096], 1 << 20).unwrap();
        file.sync_all().unwrap();
        assert_eq!(plain(&file).extents(), Ok(2));
    }

    #[test]
    fn an_empty_range_is_nothing_and_not_everything() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = File::create(folder.path().join("file")).unwrap();
        assert_eq!(clone_range(file.as_fd(), file.as_fd(), ByteRange::new(0, 0)), Ok(()));
    }
}
