//! Measures the stages of a ring's file operations, and the time of its thread.
//!
//! ```text
//!   asked for ──► submitted ──► completion seen ──► taken by its future
//!            queued         disk             handed-back
//! ```
//!
//! Off unless the log shows this module at the level `trace` when the ring is made. Then each step reads the clock, and the
//! histograms are logged once, when the ring is closed. Operations that wait for a peer are not measured. A completion is seen
//! when the thread returns to the ring: the time until then counts as `disk`.

use std::time::{Duration, Instant};

use tracing::Level;

use crate::latency::Latencies;

pub(super) struct Timing {
    operations: Vec<Option<Marks>>,
    queued: Vec<usize>,
    times: [Latencies; STAGES.len()],
}

#[derive(Clone, Copy)]
struct Marks {
    asked: Instant,
    submitted: Instant,
    completed: Instant,
}

#[derive(Clone, Copy)]
pub(super) enum Stage {
    /// From the request until the kernel is next entered.
    Queued,
    /// From then until the completion is seen.
    Disk,
    /// From then until the future takes the result.
    HandedBack,
    Asleep,
    Looking,
}

const STAGES: [(Stage, &str); 5] = [
    (Stage::Queued, "queued"),
    (Stage::Disk, "disk"),
    (Stage::HandedBack, "handed-back"),
    (Stage::Asleep, "asleep"),
    (Stage::Looking, "looking"),
];

impl Timing {
    pub(super) fn if_wanted() -> Option<Box<Self>> {
        tracing::enabled!(Level::TRACE).then(|| Box::new(Self::new()))
    }

    fn new() -> Self {
        Self {
            operations: Vec::new(),
            queued: Vec::new(),
            times: std::array::from_fn(|_| Latencies::default()),
        }
    }

    pub(super) fn asked(&mut self, key: usize, now: Instant) {
        if self.operations.len() <= key {
            self.operations.resize(key + 1, None);
        }
        self.operations[key] = Some(Marks { asked: now, submitted: now, completed: now });
        self.queued.push(key);
    }

    pub(super) fn submitted(&mut self, now: Instant) {
        for key in self.queued.drain(..) {
            if let Some(marks) = self.operations.get_mut(key).and_then(Option::as_mut) {
                marks.submitted = now;
            }
        }
    }

    pub(super) fn completed(&mut self, key: usize, now: Instant) {
        if let Some(marks) = self.operations.get_mut(key).and_then(Option::as_mut) {
            marks.completed = now;
        }
    }

    pub(super) fn taken(&mut self, key: usize, now: Instant) {
        let Some(marks) = self.operations.get_mut(key).and_then(Option::take) else { return };
        self.note(Stage::Queued, marks.submitted.saturating_duration_since(marks.asked));
        self.note(Stage::Disk, marks.completed.saturating_duration_since(marks.submitted));
        self.note(Stage::HandedBack, now.saturating_duration_since(marks.completed));
    }

    pub(super) fn forget(&mut self, key: usize) {
        if let Some(marks) = self.operations.get_mut(key) {
            *marks = None;
        }
    }

    pub(super) fn note(&mut self, stage: Stage, time: Duration) {
        self.times[stage as usize].add(time);
    }

    pub(super) fn log(&self) {
        if self.times[Stage::Disk as usize].count() == 0 {
            return;
        }
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        for ((_, stage), times) in STAGES.iter().zip(&self.times) {
            let quantile = |permille| us(times.quantile(permille).unwrap_or_default());
            let (count, sum_us) = (times.count(), us(times.sum()));
            let (median_us, p99_us) = (quantile(500), quantile(990));
            tracing::trace!(stage, count, sum_us, median_us, p99_us, "times of a ring");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    #[test]
    fn the_steps_of_an_operation_follow_each_other_and_what_is_dropped_does_not_count() {
        let begin = Instant::now();
        let mut timing = Timing::new();
        timing.asked(0, begin);
        timing.asked(3, begin + us(10));
        timing.submitted(begin + us(15));
        timing.asked(1, begin + us(20));
        timing.completed(3, begin + us(100));
        timing.taken(3, begin + us(107));
        timing.completed(0, begin + us(120));
        timing.forget(0);
        timing.taken(0, begin + us(130));
        timing.note(Stage::Asleep, us(40));
        let told = |stage: Stage| {
            let times = &timing.times[stage as usize];
            (times.count(), times.sum())
        };
        assert_eq!(told(Stage::Queued), (1, us(5)));
        assert_eq!(told(Stage::Disk), (1, us(85)));
        assert_eq!(told(Stage::HandedBack), (1, us(7)));
        assert_eq!(told(Stage::Asleep), (1, us(40)));
    }

    #[test]
    fn stages_are_named_in_their_order() {
        assert!(STAGES.iter().enumerate().all(|(index, (stage, _))| *stage as usize == index));
    }
}
