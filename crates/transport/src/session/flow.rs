//! Counts the bytes of a connection in one direction, and its present rate.
//!
//! ```text
//!   add ──► total
//!             │ window of a second ─► the rate of the last whole one; of the one that runs if nothing has been added since
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Time over which a rate is measured: short enough to be current, long enough to be steady.
const WINDOW_MS: u64 = 1000;
/// A window shorter than this says nothing.
const WINDOW_MS_MIN: u64 = 100;

/// The bytes in one direction. The caller supplies the time, in milliseconds since the connection began.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    total: AtomicU64,
    /// Start of the window, read without the lock because every write needs it.
    began_ms: AtomicU64,
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    began_ms: u64,
    total: u64,
    /// Bytes per second in the window before; `None` in the first.
    before: Option<u64>,
}

impl Flow {
    pub(crate) fn add(&self, bytes: u64, now_ms: u64) {
        // N.B. first, so that bytes after a pause are counted in the window that begins with them.
        if now_ms.saturating_sub(self.began_ms.load(Ordering::Relaxed)) >= WINDOW_MS {
            self.begin_window(now_ms);
        }
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the present bytes per second; `None` while the connection is too new.
    pub(crate) fn per_second(&self, now_ms: u64) -> Option<u64> {
        let window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let span_ms = now_ms.saturating_sub(window.began_ms);
        let present = rate(self.total().saturating_sub(window.total), span_ms);
        match window.before {
            Some(before) if span_ms < WINDOW_MS => Some(before),
            None if span_ms < WINDOW_MS_MIN => None,
            _ => Some(present),
        }
    }

    fn begin_window(&self, now_ms: u64) {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let span_ms = now_ms.saturating_sub(window.began_ms);
        if span_ms < WINDOW_MS {
            // Another thread was faster.
            return;
        }
        let total = self.total();
        let before = Some(rate(total.saturating_sub(window.total), span_ms));
        *window = Window { began_ms: now_ms, total, before };
        self.began_ms.store(now_ms, Ordering::Relaxed);
    }
}

fn rate(bytes: u64, span_ms: u64) -> u64 {
    let rate = u128::from(bytes) * 1000 / u128::from(span_ms.max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::Flow;

    #[test]
    fn the_rate_is_that_of_the_last_second() {
        let flow = Flow::default();
        assert_eq!(flow.per_second(50), None);
        flow.add(1000, 100);
        assert_eq!(flow.per_second(200), Some(5000));
        for tenth in 2..40 {
            flow.add(1000, tenth * 100);
        }
        assert_eq!(flow.total(), 39_000);
        let rate = flow.per_second(3950).unwrap();
        assert!((9_000..=11_000).contains(&rate), "{rate}");
    }

    #[test]
    fn a_connection_that_has_fallen_silent_has_no_rate_and_a_new_burst_one_of_its_own() {
        let flow = Flow::default();
        for tenth in 0..20 {
            flow.add(1_000_000, tenth * 100);
        }
        assert!(flow.per_second(60_000).unwrap() < 200_000);
        flow.add(50, 60_000);
        for tenth in 601..615 {
            flow.add(50, tenth * 100);
        }
        assert!(flow.per_second(61_500).unwrap() < 1000);
        // A clock that stands still, or goes back, must not stop it.
        flow.add(1, 0);
        assert!(flow.per_second(0).is_some());
    }
}
