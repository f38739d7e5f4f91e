//! What only regular files have: a size that is theirs, and holes.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::FallocateFlags;

use super::direct::{self, Demands};
use super::{Access, ImageError, Probed};
use crate::device::ALIGNMENT;

/// Asks a locked file what it can do.
pub(super) fn probe(file: &OwnedFd, path: &Path, access: Access) -> Result<Probed, ImageError> {
    let stat = rustix::fs::fstat(file).map_err(|errno| ImageError::of("examine", path, errno.into()))?;
    // The kernel keeps file sizes below 2^63.
    let size = stat.st_size as u64;
    // Where the kernel or the file system does not say: the strictest that there is.
    let strictest = Demands { io_alignment: ALIGNMENT, memory_alignment: ALIGNMENT };
    Ok(Probed {
        size,
        direct: direct::turn_on(file, path, strictest),
        gives_space_back: access == Access::ReadWrite && punches_holes(file, size),
    })
}

/// Asks by making a hole behind the end, where there is nothing to lose.
fn punches_holes(file: &OwnedFd, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let alignment = u64::from(ALIGNMENT);
    rustix::fs::fallocate(file, flags, size.next_multiple_of(alignment), alignment).is_ok()
}
