//! Direct I/O: whether a file or device supports it, and with which alignment.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, OFlags, StatxFlags};

use crate::device::ALIGNMENT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demands {
    pub(super) io_alignment: u32,
    pub(super) memory_alignment: u32,
}

/// Turns direct I/O on if it is supported; `unless_told` is used if the system does not report its demands.
pub(super) fn turn_on(file: &OwnedFd, path: &Path, unless_told: Demands) -> Option<Demands> {
    let reason = match demands(file, unless_told) {
        Err(reason) => reason,
        Ok(demands) => {
            let turned_on = rustix::fs::fcntl_getfl(file)
                .and_then(|flags| rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT));
            match turned_on {
                Ok(()) => return Some(demands),
                Err(_) => "the file system refuses it",
            }
        }
    };
    tracing::info!(path = %path.display(), reason, "no direct I/O");
    None
}

fn demands(file: &OwnedFd, unless_told: Demands) -> Result<Demands, &'static str> {
    let wanted = StatxFlags::DIOALIGN;
    let demands = match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted) {
        Ok(told) if told.stx_mask & wanted.bits() != 0 => {
            Demands { io_alignment: told.stx_dio_offset_align, memory_alignment: told.stx_dio_mem_align }
        }
        _ => unless_told,
    };
    let Demands { io_alignment, memory_alignment } = demands;
    match (io_alignment, memory_alignment) {
        (0, _) | (_, 0) => Err("the file system has none"),
        (io, memory) if io > ALIGNMENT || memory > ALIGNMENT => Err("the file system wants larger blocks"),
        _ => Ok(demands),
    }
}
