//! The limit of the daemon's open files, sockets and devices, and whether another volume fits. It is checked before a volume is
//! made: refusing it is better than a volume that cannot be served.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::RequestError;

/// The descriptors of one volume: its image and backing files, its sockets, its ring, its clients, a migration's target.
const VOLUME_DESCRIPTORS: u64 = 24;
/// The descriptors of one standby beside its images: its folder, its spool, its undo file, and what is merged.
const STANDBY_DESCRIPTORS: u64 = 6;
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
    require(VOLUME_DESCRIPTORS)
}

/// Does the same for a standby of this number of volumes that is kept here. A volume's room stays free beside it.
pub(crate) fn require_for_standby(volumes: u64) -> Result<(), RequestError> {
    require(STANDBY_DESCRIPTORS.saturating_add(volumes).saturating_add(VOLUME_DESCRIPTORS))
}

fn require(needs: u64) -> Result<(), RequestError> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // If they cannot be counted, the limit shows when they are needed.
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Ok(()) };
    let open = open.count() as u64;
    if is_enough(open, needs, limit) { Ok(()) } else { Err(RequestError::TooManyFiles { open, limit }) }
}

fn is_enough(open: u64, needs: u64, limit: u64) -> bool {
    open.saturating_add(needs).saturating_add(KEPT_FREE) <= limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_refused_before_descriptors_run_out() {
        let is_enough = |open, limit| is_enough(open, VOLUME_DESCRIPTORS, limit);
        assert!(is_enough(0, 1024));
        assert!(is_enough(1024 - VOLUME_DESCRIPTORS - KEPT_FREE, 1024));
        assert!(!is_enough(1024 - VOLUME_DESCRIPTORS - KEPT_FREE + 1, 1024));
        assert!(!is_enough(u64::MAX, 1024));
        assert!(require_for_standby(1).is_ok());
        assert!(matches!(require_for_standby(u64::MAX), Err(RequestError::TooManyFiles { .. })));
    }
}
