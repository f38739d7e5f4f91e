//! How many bytes have gone over a connection in one direction, and how many go in a second at present.
//!
//! ```text
//!   add ──► total
//!             │ window of a second ─► the rate of the last whole one; of the one that runs if nothing has been added since
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How long a rate is measured for: short enough to be the present one, long enough to be steady.
const WINDOW_MS: u64 = 1000;
/// A window that has run for less says nothing.
const WINDOW_MS_MIN: u64 = 100;

/// What goes in one direction. The time is the caller's, in milliseconds since the connection began.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    total: AtomicU64,
    /// When the window began: looked at without the lock, for it is asked with every write.
    began_ms: AtomicU64,
    window: Mutex<Window>,
}

/// A span of time in which bytes are counted.
#[derive(Debug, Default)]
struct Window {
    began_ms: u64,
    /// The total when it began.
    total: u64,
    /// Bytes in a second in the window before; `None`: this is the first.
    before: Option<u64>,
}

impl Flow {
    /// So many bytes more have gone.
    pub(crate) fn add(&self, bytes: u64, now_ms: u64) {
        // N.B. first, so that bytes after a pause are counted in the window that begins with them.
        if now_ms.saturating_sub(self.began_ms.load(Ordering::Relaxed)) >= WINDOW_MS {
            self.begin_window(now_ms);
        }
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All bytes that have gone.
    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Bytes that go in a second at present; `None`: the connection is too new to say.
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
            // Somebody else was faster.
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
        // 1,000 bytes in each tenth of a second, from there on.
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
        // A clock that stands still, or goes back, is no reason to stop.
        flow.add(1, 0);
        assert!(flow.per_second(0).is_some());
    }
}
