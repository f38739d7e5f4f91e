//! The VM's work and findings, printed ten times a second.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::say;

const TICK: Duration = Duration::from_millis(100);
/// More error lines than this say nothing new.
const ERRORS_TOLD_MAX: u64 = 16;
/// Latencies kept for a tick; no emulated VM makes a tenth of this number.
const LATENCIES_MAX: usize = 1 << 17;

pub(crate) struct Tally {
    stop: AtomicBool,
    requests: AtomicU64,
    errors: AtomicU64,
    times: Mutex<Times>,
}

/// Times between completions, and latencies, since the last tick.
struct Times {
    last: Instant,
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
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts a completed request that began at `began`.
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

    pub(crate) fn wrong(&self, what: &str) {
        if self.errors.fetch_add(1, Ordering::Relaxed) < ERRORS_TOLD_MAX {
            say(&format!("wrong {what}"));
        }
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

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

    /// Returns the longest gap between completions since the last call, an unfinished one included, and the 99th percentile
    /// of latencies; 0 without requests.
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
