//! Counts guests' recent requests in windows of time: a migration's report begins with them.
//!
//! ```text
//!   requests end ──► the window that is open ──► closed when its time is over ──► the last few seconds are kept
//! ```
//! There is no timer: the first request that ends after a window closes it, or the caller that takes the windows. An idle volume
//! costs nothing.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use crate::stack::Counters;
use block::latency::{Buckets, Latencies};

/// Length of a window, unless a recorder takes them.
const WINDOW: Duration = crate::SAMPLE_INTERVAL;
const KEPT: Duration = crate::RECORDED_BEFORE;

/// Counts of guests' requests in one stretch of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// When it began, by the lane's clock.
    pub began: Duration,
    /// The length of the window.
    pub length: Duration,
    /// Reads that ended in it.
    pub reads: u64,
    /// Writes, discards and zeroing that ended in it.
    pub writes: u64,
    /// Flushes that ended in it.
    pub flushes: u64,
    /// Bytes of reads that succeeded.
    pub bytes_read: u64,
    /// Bytes of writes that succeeded.
    pub bytes_written: u64,
    /// Requests that failed in it.
    pub errors: u64,
    /// The latencies of its requests.
    pub latencies: Latencies,
}

pub(crate) struct Pulse {
    counters: Rc<Counters>,
    latencies: Buckets,
    began: Cell<Duration>,
    ends: Cell<Duration>,
    base: RefCell<Window>,
    past: RefCell<VecDeque<Window>>,
}

impl Pulse {
    pub(crate) fn new(now: Duration, counters: Rc<Counters>) -> Self {
        Self {
            counters,
            latencies: Buckets::default(),
            began: Cell::new(now),
            ends: Cell::new(now + WINDOW),
            base: RefCell::default(),
            past: RefCell::default(),
        }
    }

    /// Notes a request that has ended and that the counters do not include yet.
    pub(crate) fn note(&self, arrived: Duration, now: Duration) {
        if now >= self.ends.get() {
            self.close_due(now);
        }
        self.latencies.add(now.saturating_sub(arrived));
    }

    pub(crate) fn latencies(&self) -> Latencies {
        self.latencies.all()
    }

    /// Returns the windows of the last few seconds. From now on only [`Pulse::take`] closes windows.
    pub(crate) fn begin_taking(&self, now: Duration) -> Vec<Window> {
        if now >= self.ends.get() {
            self.close_due(now);
        }
        self.close(now);
        self.ends.set(Duration::MAX);
        self.forget(now);
        self.past.borrow().iter().cloned().collect()
    }

    pub(crate) fn take(&self, now: Duration) -> Window {
        let window = self.close(now);
        self.forget(now);
        window
    }

    pub(crate) fn end_taking(&self) {
        self.ends.set(self.began.get() + WINDOW);
    }

    #[cold]
    fn close_due(&self, now: Duration) {
        let ended = self.ends.get();
        self.close(ended);
        let windows = now.saturating_sub(ended).as_nanos() / WINDOW.as_nanos();
        if windows > 0 {
            // At most the kept time, so that it is dropped in time.
            let idle = WINDOW * u32::try_from(windows).unwrap_or(u32::MAX);
            let length = idle.min(KEPT);
            self.keep(Window { began: ended + (idle - length), length, ..Window::default() });
            self.began.set(ended + idle);
        }
        self.ends.set(self.began.get() + WINDOW);
        self.forget(now);
    }

    fn close(&self, at: Duration) -> Window {
        let counters = &self.counters;
        let totals = Window {
            reads: counters.reads.get(),
            writes: counters.writes.get(),
            flushes: counters.flushes.get(),
            bytes_read: counters.bytes_read.get(),
            bytes_written: counters.bytes_written.get(),
            errors: counters.errors.get(),
            ..Window::default()
        };
        let base = self.base.replace(totals.clone());
        let began = self.began.replace(at);
        let window = Window {
            began,
            length: at.saturating_sub(began),
            reads: totals.reads - base.reads,
            writes: totals.writes - base.writes,
            flushes: totals.flushes - base.flushes,
            bytes_read: totals.bytes_read - base.bytes_read,
            bytes_written: totals.bytes_written - base.bytes_written,
            errors: totals.errors - base.errors,
            latencies: self.latencies.take(),
        };
        self.keep(window.clone());
        window
    }

    fn keep(&self, window: Window) {
        if window.length > Duration::ZERO {
            self.past.borrow_mut().push_back(window);
        }
    }

    fn forget(&self, now: Duration) {
        let mut past = self.past.borrow_mut();
        let too_old = |window: &Window| window.began + window.length + KEPT <= now;
        while past.front().is_some_and(too_old) {
            past.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(10);

    fn play(pulse: &Pulse, first: Duration, last: Duration) {
        let mut now = first;
        while now < last {
            pulse.note(now - STEP.min(now), now);
            pulse.counters.reads.set(pulse.counters.reads.get() + 1);
            now += STEP;
        }
    }

    #[test]
    fn windows_hold_every_request_once_and_cover_the_time_without_gaps() {
        let pulse = Pulse::new(Duration::ZERO, Rc::default());
        play(&pulse, Duration::ZERO, Duration::from_secs(1));
        play(&pulse, Duration::from_secs(2), Duration::from_secs(3));
        let mut windows = pulse.begin_taking(Duration::from_secs(3));
        play(&pulse, Duration::from_secs(3), Duration::from_millis(3250));
        windows.push(pulse.take(Duration::from_millis(3250)));
        let mut end = Duration::ZERO;
        for window in &windows {
            assert_eq!(window.began, end);
            assert_eq!(window.latencies.count(), window.reads);
            end = window.began + window.length;
        }
        assert_eq!(end, Duration::from_millis(3250));
        assert_eq!(windows.iter().map(|window| window.reads).sum::<u64>(), 225);
        assert!(
            windows.iter().any(|window| window.reads == 0 && window.length >= Duration::from_millis(900))
        );
        pulse.end_taking();
        play(&pulse, Duration::from_millis(3250), Duration::from_secs(4));
        assert_eq!(pulse.past.borrow().back().map(|window| window.length), Some(WINDOW));
    }

    #[test]
    fn only_the_last_few_seconds_are_kept_however_long_nobody_asked() {
        let pulse = Pulse::new(Duration::ZERO, Rc::default());
        play(&pulse, Duration::ZERO, Duration::from_secs(60));
        let hour = Duration::from_secs(3600);
        let bound = (KEPT.as_nanos() / WINDOW.as_nanos()) as usize + 1;
        assert!(pulse.past.borrow().len() <= bound);
        play(&pulse, hour, hour + STEP);
        let windows = pulse.begin_taking(hour + STEP);
        assert!(windows.len() <= 2 && windows[0].began + KEPT + WINDOW >= hour, "{windows:?}");
    }
}
