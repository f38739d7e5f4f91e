//! Measures where the time of a connection's requests is spent.
//!
//! ```text
//!   received ──► accepted ──► finished ──► given to a send ──► sent
//!            intake       device       outbox             send
//! ```
//!
//! It is off unless the log shows this module at the level `trace` when a client begins to use an export. Then it reads the clock
//! for each step, and logs the histograms once, at the connection's end. `device` includes the wait for the disk and the wait for
//! entering the ring; the ring itself can separate the two (`block::engine::ring::timing`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use block::latency::Latencies;
use tracing::Level;

pub(super) struct Timeline {
    /// When the bytes of the next request were received.
    received: Instant,
    /// Times of the requests being executed, by their slots in the request set.
    executing: Vec<Option<Marks>>,
    executing_count: usize,
    waiting: VecDeque<Option<Marks>>,
    sending: Vec<Option<Marks>>,
    send_began: Instant,
    /// Since when the device is idle; `None` while it is busy.
    device_idle_since: Option<Instant>,
    /// Since when the client has had all its replies; `None` while it has not.
    answered_since: Option<Instant>,
    times: [Latencies; STAGES.len()],
}

#[derive(Clone, Copy)]
struct Marks {
    received: Instant,
    taken: Instant,
    finished: Instant,
}

#[derive(Clone, Copy)]
enum Stage {
    Intake,
    Device,
    Outbox,
    Send,
    Whole,
    DeviceIdle,
    ClientIdle,
}

/// All stages in the order of [`Stage`], with their names in the log.
///
/// `whole` is from received to sent. `device-idle` is time without a request below the export, `client-idle` time without an
/// unanswered one; neither is part of a request.
const STAGES: [(Stage, &str); 7] = [
    (Stage::Intake, "intake"),
    (Stage::Device, "device"),
    (Stage::Outbox, "outbox"),
    (Stage::Send, "send"),
    (Stage::Whole, "whole"),
    (Stage::DeviceIdle, "device-idle"),
    (Stage::ClientIdle, "client-idle"),
];

impl Timeline {
    pub(super) fn if_wanted() -> Option<Box<Self>> {
        tracing::enabled!(Level::TRACE).then(|| Box::new(Self::new(Instant::now())))
    }

    fn new(now: Instant) -> Self {
        Self {
            received: now,
            executing: Vec::new(),
            executing_count: 0,
            waiting: VecDeque::new(),
            sending: Vec::new(),
            send_began: now,
            device_idle_since: None,
            answered_since: None,
            times: std::array::from_fn(|_| Latencies::default()),
        }
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.received = now;
    }

    /// Notes that a request has been accepted, into this slot of the request set.
    pub(super) fn taken(&mut self, slot: usize, now: Instant) {
        if let Some(since) = self.device_idle_since.take() {
            self.note(Stage::DeviceIdle, now - since);
        }
        self.end_client_idle();
        if self.executing.len() <= slot {
            self.executing.resize(slot + 1, None);
        }
        self.executing_count += 1;
        self.executing[slot] = Some(Marks { received: self.received, taken: now, finished: now });
    }

    /// Notes that the request in this slot has finished, and that its reply waits to be sent.
    pub(super) fn finished(&mut self, slot: usize, now: Instant) {
        let marks = self.executing.get_mut(slot).and_then(Option::take);
        self.waiting.push_back(marks.map(|marks| Marks { finished: now, ..marks }));
        self.executing_count = self.executing_count.saturating_sub(1);
        if self.executing_count == 0 {
            self.device_idle_since = Some(now);
        }
    }

    /// Notes that a request has been refused, and that its reply waits to be sent; it is in no histogram.
    pub(super) fn refused(&mut self) {
        self.end_client_idle();
        self.waiting.push_back(None);
    }

    /// Notes that the oldest `replies` that wait are given to a send.
    pub(super) fn send_begins(&mut self, replies: usize, now: Instant) {
        self.send_began = now;
        self.sending.extend(self.waiting.drain(..replies.min(self.waiting.len())));
    }

    pub(super) fn sent(&mut self, now: Instant) {
        for marks in std::mem::take(&mut self.sending).into_iter().flatten() {
            self.note(Stage::Intake, marks.taken.saturating_duration_since(marks.received));
            self.note(Stage::Device, marks.finished.saturating_duration_since(marks.taken));
            self.note(Stage::Outbox, self.send_began.saturating_duration_since(marks.finished));
            self.note(Stage::Send, now.saturating_duration_since(self.send_began));
            self.note(Stage::Whole, now.saturating_duration_since(marks.received));
        }
        if self.executing_count == 0 && self.waiting.is_empty() {
            self.answered_since = Some(now);
        }
    }

    pub(super) fn log(&self, export: &str) {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        for ((_, stage), times) in STAGES.iter().zip(&self.times) {
            let quantile = |permille| us(times.quantile(permille).unwrap_or_default());
            let (count, sum_us) = (times.count(), us(times.sum()));
            let (median_us, p99_us) = (quantile(500), quantile(990));
            tracing::trace!(export, stage, count, sum_us, median_us, p99_us, "time line");
        }
    }

    /// Ends the client's idle time when the bytes of its next request come, not when they are decoded.
    fn end_client_idle(&mut self) {
        if let Some(since) = self.answered_since.take() {
            self.note(Stage::ClientIdle, self.received.saturating_duration_since(since));
        }
    }

    fn note(&mut self, stage: Stage, time: Duration) {
        self.times[stage as usize].add(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    #[test]
    fn the_parts_of_a_request_add_up_and_rests_lie_between_requests() {
        let begin = Instant::now();
        let mut timeline = Timeline::new(begin);
        timeline.received(begin);
        timeline.taken(0, begin + us(10));
        timeline.taken(1, begin + us(10));
        timeline.refused();
        timeline.finished(1, begin + us(110));
        timeline.finished(0, begin + us(130));
        timeline.send_begins(3, begin + us(150));
        timeline.sent(begin + us(155));
        timeline.received(begin + us(200));
        timeline.taken(0, begin + us(230));
        let told = |stage: Stage| {
            let times = &timeline.times[stage as usize];
            (times.count(), times.sum())
        };
        assert_eq!(told(Stage::Intake), (2, us(20)));
        assert_eq!(told(Stage::Device), (2, us(220)));
        assert_eq!(told(Stage::Outbox), (2, us(60)));
        assert_eq!(told(Stage::Send), (2, us(10)));
        assert_eq!(told(Stage::Whole), (2, us(310)));
        assert_eq!(told(Stage::DeviceIdle), (1, us(100)));
        assert_eq!(told(Stage::ClientIdle), (1, us(45)));
    }

    #[test]
    fn stages_are_named_in_their_order() {
        assert!(STAGES.iter().enumerate().all(|(index, (stage, _))| *stage as usize == index));
    }
}
