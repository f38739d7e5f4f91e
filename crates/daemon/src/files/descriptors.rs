//! How many files, sockets and devices the daemon may have open, and whether that is enough for another volume.
//!
//! A volume that is made, but cannot be served, is worse than one that is refused: so it is counted before.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::RequestError;

/// Descriptors of one volume: its image and what that stands on, its sockets, its ring, its clients, a migration's target.
const VOLUME_DESCRIPTORS: u64 = 24;
/// Descriptors that are kept free for everything else: the API's clients, other hosts, the journal, QEMU's monitors.
const KEPT_FREE: u64 = 64;

/// Lets this process open as many files as it may give itself.
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

/// Refuses another volume if the descriptors that it needs are not left; may sleep.
///
/// # Errors
/// [`RequestError::TooManyFiles`].
pub(crate) fn require_for_volume() -> Result<(), RequestError> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // Whoever cannot see them cannot count them: it is met when they are needed.
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
