//! How many transfers one path carries at a time, by its measured rate.
//!
//! ```text
//!   Growing: one more ──► a window with all of them ──► the summed rate grew ──► one more
//!       ▲                                           └── it did not ──► Settled: one fewer
//!       └───────── the rate changed much, or a long time has passed ◄──────┘
//! ```
//! A transfer that is too many is not ended: it is not replaced.

use crate::planner::Moment;
use crate::planted::{Bug, broken};
use crate::workload::Path;
use std::time::Duration;

/// The time over which a rate is measured: several round trips and rounds of a disk's cache.
const WINDOW: Duration = Duration::from_secs(3);
/// One more transfer is worth its place if the sum grows by this factor. Below it lies the noise of links.
const GROWTH: f64 = 1.1;
/// A change of the rate beyond these factors means that the path itself has changed.
const CHANGED: (f64, f64) = (0.7, 1.4);
/// After this time another number is tried although the rate is the same.
const SETTLED_MAX: Duration = Duration::from_secs(30);

/// The measure of one path.
#[derive(Clone, Debug)]
pub(crate) struct Gauge {
    stated: Option<f64>,
    transfers_max: u32,
    allowed: u32,
    running: u32,
    /// Transfers that are held or stalled. They count for the administrator's limit.
    idle: u32,
    phase: Phase,
    /// The latest rate of a full window, in bytes a second.
    measured: Option<f64>,
    /// The highest rate of a window.
    peak: Option<f64>,
    /// Bytes that were sent over it, from the beginning.
    sent: u64,
    window: Window,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// The number is raised while the sum grows beyond this rate, which one transfer fewer had.
    Growing { before: f64 },
    /// The number suits this rate.
    Settled { since: Moment, rate: f64 },
}

/// The time that is being measured.
#[derive(Clone, Copy, Debug)]
struct Window {
    began: Moment,
    sent: u64,
    /// Whether as many transfers ran as are allowed, since it began.
    is_full: bool,
}

impl Gauge {
    pub(crate) fn new(path: Path) -> Self {
        Self {
            stated: path.rate.filter(|rate| rate.is_finite() && *rate > 0.0),
            transfers_max: path.transfers_max.max(1),
            allowed: 1,
            running: 0,
            idle: 0,
            phase: Phase::Growing { before: 0.0 },
            measured: None,
            peak: None,
            sent: 0,
            window: Window { began: Moment::ZERO, sent: 0, is_full: false },
        }
    }

    /// Returns whether another transfer may begin.
    pub(crate) fn has_place(&self) -> bool {
        broken(Bug::PlacesUnlimited) || self.may_resume() && !self.is_crowded()
    }

    /// Returns whether a transfer that is held may go on.
    pub(crate) fn may_resume(&self) -> bool {
        self.running < self.allowed
    }

    /// Returns how many transfers have to be held until another one may begin.
    pub(crate) fn excess(&self) -> usize {
        (self.running + 1).saturating_sub(self.allowed) as usize
    }

    /// Returns whether there are as many transfers as the administrator allows, those included that are held or stalled.
    pub(crate) fn is_crowded(&self) -> bool {
        self.running + self.idle >= self.transfers_max
    }

    pub(crate) fn running(&self) -> u32 {
        self.running
    }

    /// Returns the expected rate of all transfers together; `None`: unknown.
    pub(crate) fn rate(&self) -> Option<f64> {
        self.measured.or(self.stated)
    }

    /// Returns the highest rate that was measured or stated; `None`: unknown.
    pub(crate) fn rate_max(&self) -> Option<f64> {
        match (self.peak, self.stated) {
            (Some(peak), Some(stated)) => Some(peak.max(stated)),
            (one, other) => one.or(other),
        }
    }

    /// Notes that a transfer is held or stalled.
    pub(crate) fn pause(&mut self) {
        self.leave();
        self.idle += 1;
    }

    /// Notes that a transfer goes on that was held or stalled.
    pub(crate) fn resume(&mut self, now: Moment) {
        self.leave_idle();
        self.enter(now);
    }

    /// Notes that a transfer has ended that was held or stalled.
    pub(crate) fn leave_idle(&mut self) {
        self.idle = self.idle.saturating_sub(1);
    }

    /// Notes that a transfer begins.
    pub(crate) fn enter(&mut self, now: Moment) {
        self.running += 1;
        // One that replaces another within a look leaves the window as it is.
        if self.running == self.allowed && !self.window.is_full {
            self.begin_window(now);
        }
    }

    /// Notes that a transfer has ended.
    pub(crate) fn leave(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    pub(crate) fn sent(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes);
    }

    /// Measures, and decides how many transfers may run. **N.B.** Transfers that have ended are replaced before this is called.
    pub(crate) fn look(&mut self, now: Moment) {
        if self.running < self.allowed {
            self.window.is_full = false;
        }
        let elapsed = now.saturating_sub(self.window.began);
        if elapsed < WINDOW {
            return;
        }
        let rate = self.sent.saturating_sub(self.window.sent) as f64 / elapsed.as_secs_f64();
        let was_full = self.window.is_full;
        self.begin_window(now);
        self.peak = Some(rate.max(self.peak.unwrap_or(0.0))).filter(|peak| *peak > 0.0);
        if was_full && rate > 0.0 {
            self.measured = Some(rate);
            self.judge(now, rate);
        } else if self.running > 0 && rate > self.measured.unwrap_or(0.0) {
            // Fewer transfers than allowed show what the path carries at least.
            self.measured = Some(rate);
        }
    }

    fn judge(&mut self, now: Moment, rate: f64) {
        match self.phase {
            Phase::Growing { before } if rate >= before * GROWTH => {
                self.phase = match self.allowed < self.transfers_max {
                    true => Phase::Growing { before: rate },
                    false => Phase::Settled { since: now, rate },
                };
                self.allow(now, self.allowed + 1);
            }
            Phase::Growing { before } => {
                self.phase = Phase::Settled { since: now, rate: rate.max(before) };
                self.allow(now, self.allowed - 1);
            }
            Phase::Settled { since, rate: known } => {
                let is_changed = rate < known * CHANGED.0 || rate > known * CHANGED.1;
                if is_changed || now.saturating_sub(since) >= SETTLED_MAX {
                    self.phase = Phase::Growing { before: rate };
                    self.allow(now, self.allowed + 1);
                }
            }
        }
    }

    fn allow(&mut self, now: Moment, number: u32) {
        self.allowed = number.clamp(1, self.transfers_max);
        self.begin_window(now);
    }

    fn begin_window(&mut self, now: Moment) {
        self.window = Window { began: now, sent: self.sent, is_full: self.running >= self.allowed };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a path of `capacity` whose single transfers reach `single`, always with as many transfers as it allows; returns how
    /// many it allowed at the end.
    fn allowed_after(seconds: u64, single: f64, capacity: impl Fn(u64) -> f64, transfers_max: u32) -> u32 {
        let mut gauge = Gauge::new(Path { rate: None, transfers_max });
        for second in 0..seconds {
            let now = Duration::from_secs(second);
            while gauge.has_place() {
                gauge.enter(now);
            }
            while gauge.running > gauge.allowed {
                gauge.leave();
            }
            gauge.sent((single * f64::from(gauge.running)).min(capacity(second)) as u64);
            gauge.look(now);
        }
        gauge.allowed
    }

    #[test]
    fn transfers_are_added_while_the_sum_grows() {
        // Four of 30 fill a path of 100; the fifth adds nothing.
        let allowed = allowed_after(28, 30e6, |_| 100e6, 100);
        assert!((3..=5).contains(&allowed), "{allowed}");
        // One fills the path.
        let allowed = allowed_after(20, 500e6, |_| 100e6, 100);
        assert!(allowed <= 2, "{allowed}");
    }

    #[test]
    fn the_administrators_limit_is_kept() {
        assert_eq!(allowed_after(60, 1e6, |_| 100e6, 3), 3);
    }

    #[test]
    fn a_path_that_becomes_faster_gets_more() {
        let grows = |second| if second < 40 { 30e6 } else { 120e6 };
        let before = allowed_after(38, 30e6, grows, 100);
        let after = allowed_after(90, 30e6, grows, 100);
        assert!(before <= 2 && after >= 3, "{before} {after}");
    }
}
