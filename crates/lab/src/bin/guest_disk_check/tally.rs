//! What the VM has done and found, told ten times a second.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::say;

/// How often a line tells what has been done.
const TICK: Duration = Duration::from_millis(100);
/// More lines about what is wrong than this tell nothing new.
const ERRORS_TOLD_MAX: u64 = 16;
/// More latencies than this are not kept for a tick; no emulated VM does a tenth of it.
const LATENCIES_MAX: usize = 1 << 17;

/// What the workers have done, together.
pub(crate) struct Tally {
    stop: AtomicBool,
    requests: AtomicU64,
    errors: AtomicU64,
    times: Mutex<Times>,
}

/// The times between completions, and those that requests took, since the last tick.
struct Times {
    last: Instant,
    /// The longest time between two completions.
    longest: Duration,
    latencies_us: Vec<u32>,
}

impl Default for Tally {
    fn default() -> Self {
        let times = Times { last: Instant::now(), longest: Duration::ZERO, latencies_us: Vec::new() };
        Self {
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            times: Mutex::new(times),
        }
    }
}

impl Tally {
    /// Tells all who work to stop.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether they are to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A request that began then is answered.
    pub(crate) fn complete(&self, began: Instant) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        times.longest = times.longest.max(now - times.last);
        times.last = now;
        if times.latencies_us.len() < LATENCIES_MAX {
            times.latencies_us.push(u32::try_from((now - began).as_micros()).unwrap_or(u32::MAX));
        }
    }

    /// Something is not as it must be.
    pub(crate) fn wrong(&self, what: &str) {
        if self.errors.fetch_add(1, Ordering::Relaxed) < ERRORS_TOLD_MAX {
            say(&format!("wrong {what}"));
        }
    }

    /// How often something was wrong.
    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Tells every tenth of a second what has been done, until it is stopped.
    pub(crate) fn tick(&self) {
        let started = Instant::now();
        while !self.is_stopped() {
            std::thread::sleep(TICK);
            let requests = self.requests.load(Ordering::Relaxed);
            let (stall, p99_us) = self.take_times();
            let (stall_us, errors) = (stall.as_micros(), self.errors());
            let at_ms = started.elapsed().as_millis();
            say(&format!(
                "tick at_ms={at_ms} requests={requests} stall_us={stall_us} p99_us={p99_us} errors={errors}"
            ));
        }
    }

    /// The longest gap that ended since the last call, or the one that has not ended, if that is longer; and what 99 % of
    /// the requests took at most, 0 of none.
    fn take_times(&self) -> (Duration, u32) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let longest = std::mem::take(&mut times.longest).max(times.last.elapsed());
        let mut latencies_us = std::mem::take(&mut times.latencies_us);
        drop(times);
        let rank = latencies_us.len() * 99 / 100;
        let p99_us = match latencies_us.is_empty() {
            true => 0,
            false => *latencies_us.select_nth_unstable(rank).1,
        };
        (longest, p99_us)
    }
}
