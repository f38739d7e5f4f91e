//! Descriptors that the process was started with: sockets that a service manager has kept.

// UNSAFETY: the environment names descriptors by number, and only that says who owns them.
#![expect(unsafe_code, reason = "the service manager names the passed descriptors by number")]

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

const FIRST: RawFd = 3;

static TAKEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// Takes over a descriptor that the process was started with; `None` if it was taken before, or is not open.
///
/// Call this only for descriptors that the environment names (`LISTEN_FDS`). They were open when the process began, so its own
/// descriptors have other numbers.
pub fn take(number: RawFd) -> Option<OwnedFd> {
    let is_open = std::fs::exists(format!("/proc/self/fd/{number}")).unwrap_or(false);
    if number < FIRST || !is_open || !TAKEN.lock().unwrap_or_else(PoisonError::into_inner).insert(number) {
        return None;
    }
    // SAFETY: it is open, no standard stream, and given out once. It was open before the process opened anything, as the caller
    // promises: nothing else in it has this number.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;

    use super::take;

    #[test]
    fn a_descriptor_is_given_out_once() {
        let number = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert!(take(number).is_some());
        assert!(take(number).is_none(), "it is closed, and it had an owner");
        assert!(take(0).is_none() && take(-1).is_none() && take(1 << 20).is_none());
    }
}
