//! Ends a driver's wait from another thread, at the price of a system call only while the driver really waits.
//!
//! ```text
//!            prepare_wait                unpark (writes the eventfd)
//!   awake ─────────────────► waiting ─────────────────────────────────► notified
//!     ▲ ◄──────── resume ───────┘                                          │
//!     ├──────────────────────────────── resume ────────────────────────────┘
//!     └─── unpark (no system call) ──► notified ── prepare_wait refuses ──► resume
//! ```
//!
//! Most wake-ups come from the lane's own thread, while the driver hands out completions: these cost an atomic swap.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::executor::Unpark;

const AWAKE: u8 = 0;
const WAITING: u8 = 1;
const NOTIFIED: u8 = 2;

pub(super) struct Wakeup {
    state: AtomicU8,
    /// Blocking: a read on a ring waits for it, instead of failing with EAGAIN.
    eventfd: Arc<OwnedFd>,
}

impl Wakeup {
    pub(super) fn new() -> rustix::io::Result<Arc<Self>> {
        let eventfd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Arc::new(Self { state: AtomicU8::new(AWAKE), eventfd }))
    }

    pub(super) fn eventfd(&self) -> &Arc<OwnedFd> {
        &self.eventfd
    }

    /// Announces the driver's wait; `false` if it was unparked before and must not wait.
    pub(super) fn prepare_wait(&self) -> bool {
        self.state.compare_exchange(AWAKE, WAITING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends the announced wait, and clears a notification.
    ///
    /// **N.B.** The driver calls it after its wait *and* when its `park` ends. A waker in between has pushed a task before, and
    /// the executor checks its tasks before it parks again.
    pub(super) fn resume(&self) {
        self.state.store(AWAKE, Ordering::SeqCst);
    }
}

impl Unpark for Wakeup {
    fn unpark(&self) {
        if self.state.swap(NOTIFIED, Ordering::SeqCst) == WAITING {
            // It fails only if 2^64 - 2 wake-ups are pending, and then the driver wakes up anyway.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_pending(wakeup: &Wakeup) -> bool {
        let mut polled = [PollFd::new(&wakeup.eventfd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn a_wake_up_of_a_driver_that_is_awake_costs_no_system_call_and_prevents_the_next_wait() {
        let wakeup = Wakeup::new().unwrap();
        wakeup.unpark();
        assert!(!is_pending(&wakeup));
        assert!(!wakeup.prepare_wait());
        wakeup.resume();
        assert!(wakeup.prepare_wait());
    }

    #[test]
    fn a_waiting_driver_is_woken_once() {
        let wakeup = Wakeup::new().unwrap();
        assert!(wakeup.prepare_wait());
        wakeup.unpark();
        wakeup.unpark();
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&wakeup.eventfd, &mut count).unwrap(), 8);
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
