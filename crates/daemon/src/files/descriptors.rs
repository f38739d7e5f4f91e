//! The limit of the daemon's open files, sockets and devices, and whether another volume fits. It is checked before a volume is
//! made: refusing it is better than a volume that cannot be served.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::RequestError;

/// The descriptors of one volume: its image and backing files, its sockets, its ring, its clients, a migration's target.
const VOLUME_DESCRIPTORS: u64 = 24;
/// The descriptors that are reserved for everything else: the API's clients, other hosts, the journal, QEMU's monitors.
const KEPT_FREE: u64 = 64;

/// Raises this process's limit of open files to the allowed maximum.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        Ok(()) => {
            tracing::debug!(from = ?limit.current, to = ?limit.maximum, "the limit of open files is raised");
        }
        Err(error) => tracing::warn!(%error, "the limit of open files cannot be raised"),
    }
}

/// Refuses another volume if too few descriptors are left, with [`RequestError::TooManyFiles`]. May block.
pub(crate) fn require_for_volume() -> Result<(), RequestError> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // If they cannot be counted, the limit shows when they are needed.
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Ok(()) };
    let open = open.count() as u64;
    if is_enough(open, limit) { Ok(()) } else { Err(RequestError::TooManyFiles { open, limit }) }
}

fn is_enough(open: u64, limit: u64) -> bool {
    open.saturating_add(VOLUME_DESCRIPTORS + KEPT_FREE) <= limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_refused_before_descriptors_run_out() {
        assert!(is_enough(0, 1024));
        assert!(is_enough(1024 - VOLUME_DESCRIPTORS - KEPT_FREE, 1024));
        assert!(!is_enough(1024 - VOLUME_DESCRIPTORS - KEPT_FREE + 1, 1024));
        assert!(!is_enough(u64::MAX, 1024));
    }
}
