//! Limits how much of a VM's memory is on its way to the other host, so that the link is full and the queue is short.
//!
//! ```text
//!   piece: let in ─► waits ─► link ─► taken by the hypervisor there       its delay
//!                                                                        the least of all delays is the link's own
//!   waited little ─► more is let in            waited long ─► less is
//! ```
//!
//! Data that is queued when the VM stops must arrive before the VM can run, so the queue is downtime. It also misleads the
//! hypervisor, which estimates the remaining time by how fast its stream is read: a wide window is read faster than the link
//! carries. So the window adapts to the delay of the pieces.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::stream::PIECE_BYTES;

/// The smallest window: eight milliseconds of 1 Gbit/s, four pieces.
pub(super) const BYTES_MIN: usize = 1 << 20;
/// The largest window: it fills 10 Gbit/s over 25 ms, or 1 Gbit/s over 250 ms.
const BYTES_MAX: usize = 32 << 20;
/// A queueing delay up to this leaves the link idle now and then, so the window grows.
const WAITS_LITTLE: Duration = Duration::from_millis(8);
/// A queueing delay above this is a noticeable part of the downtime, so the window shrinks.
const WAITS_LONG: Duration = Duration::from_millis(24);
/// The divisor of the taken bytes by which the window shrinks: it halves in about three times its own length.
const SHRINKING: usize = 4;

/// The data on its way in one stream.
#[derive(Debug)]
pub(super) struct Window {
    flow: Mutex<Flow>,
    room: Notify,
}

impl Window {
    pub(super) fn new() -> Self {
        Self { flow: Mutex::new(Flow::new()), room: Notify::new() }
    }

    /// Shares the limit among this many streams. **N.B.** Each has a window of its own: a hypervisor reads one stream only
    /// after another has come as far, so no stream may use up what another needs.
    pub(super) fn share(&self, streams: usize) {
        self.flow().share(streams.max(1));
    }

    /// Waits until a piece of this size may be sent, and counts it. One task at a time may wait.
    pub(super) async fn enter(&self, bytes: usize) {
        while !self.flow().enter(bytes, Instant::now()) {
            self.room.notified().await;
        }
    }

    /// Records bytes that the other host's hypervisor has taken, at most as many as were sent.
    pub(super) fn taken(&self, bytes: usize) {
        self.flow().taken(bytes, Instant::now());
        self.room.notify_one();
    }

    /// The flow stays consistent after a panic of another holder.
    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of a window, without waiting.
#[derive(Debug)]
struct Flow {
    /// The limit of what may be on its way.
    size: usize,
    /// The smallest and the largest window.
    bounds: (usize, usize),
    on_the_way: usize,
    /// Whether more would have been sent since the window was changed.
    was_full: bool,
    /// When each piece was sent that is not completely taken, and how much of it is left, the oldest first.
    pieces: VecDeque<(Instant, usize)>,
    /// The least time from sending a piece until it was taken; `None` before the first.
    least_delay: Option<Duration>,
}

impl Flow {
    fn new() -> Self {
        let bounds = (BYTES_MIN, BYTES_MAX);
        Self {
            size: BYTES_MIN,
            bounds,
            on_the_way: 0,
            was_full: false,
            pieces: VecDeque::new(),
            least_delay: None,
        }
    }

    fn share(&mut self, streams: usize) {
        self.bounds = ((BYTES_MIN / streams).max(PIECE_BYTES), BYTES_MAX / streams);
        self.size = (self.size / streams).clamp(self.bounds.0, self.bounds.1);
    }

    /// Admits a piece if there is room, or if nothing else is on its way.
    fn enter(&mut self, bytes: usize, now: Instant) -> bool {
        if self.on_the_way > 0 && self.on_the_way + bytes > self.size {
            self.was_full = true;
            return false;
        }
        self.on_the_way += bytes;
        self.pieces.push_back((now, bytes));
        true
    }

    fn taken(&mut self, bytes: usize, now: Instant) {
        let taken = bytes.min(self.on_the_way);
        self.on_the_way -= taken;
        let (mut left, mut sent) = (taken, None);
        while left > 0
            && let Some((sent_at, piece)) = self.pieces.front_mut()
        {
            let part = left.min(*piece);
            *piece -= part;
            left -= part;
            if *piece == 0 {
                sent = Some(*sent_at);
                self.pieces.pop_front();
            }
        }
        if let Some(sent_at) = sent {
            self.adapt(taken, now.saturating_duration_since(sent_at));
        }
    }

    /// Adapts the window after a piece with this delay.
    fn adapt(&mut self, taken: usize, delay: Duration) {
        let least = self.least_delay.map_or(delay, |least| least.min(delay));
        self.least_delay = Some(least);
        let waited = delay - least;
        if waited > WAITS_LONG {
            self.size = (self.size - self.size.min(taken / SHRINKING)).max(self.bounds.0);
        } else if waited <= WAITS_LITTLE && self.was_full {
            self.size = (self.size + taken).min(self.bounds.1);
        }
        self.was_full = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 256 << 10;

    struct Link {
        flow: Flow,
        now: Instant,
        /// When the link has sent everything that was admitted.
        free_at: Instant,
        arrivals: VecDeque<Instant>,
    }

    impl Link {
        fn new() -> Self {
            let now = Instant::now();
            Self { flow: Flow::new(), now, free_at: now, arrivals: VecDeque::new() }
        }

        /// Carries this many bytes a second with this round trip, until `bytes` were taken; returns how long that took.
        fn carry(&mut self, bytes_per_second: usize, round_trip: Duration, bytes: usize) -> Duration {
            let (began, mut taken) = (self.now, 0);
            let piece = Duration::from_secs_f64(PIECE as f64 / bytes_per_second as f64);
            while taken < bytes {
                while self.flow.enter(PIECE, self.now) {
                    self.free_at = self.free_at.max(self.now) + piece;
                    self.arrivals.push_back(self.free_at + round_trip);
                }
                self.now = self.arrivals.pop_front().unwrap();
                self.flow.taken(PIECE, self.now);
                taken += PIECE;
            }
            self.now - began
        }
    }

    /// Checks how long the data on its way would take to arrive, and which share of the link was used.
    #[track_caller]
    fn check(megabits: usize, round_trip_ms: u64, drains_in_ms: f64, used: f64) {
        let (rate, round_trip) = (megabits * 125_000, Duration::from_millis(round_trip_ms));
        let mut link = Link::new();
        link.carry(rate, round_trip, rate * 2);
        let seconds = link.carry(rate, round_trip, rate * 4).as_secs_f64();
        let drains_ms = link.flow.size as f64 / rate as f64 * 1000.0 - round_trip_ms as f64;
        assert!(drains_ms < drains_in_ms, "{drains_ms} ms would be waited for");
        let part = 4.0 / seconds;
        assert!(part > used, "{part} of the link was used");
    }

    #[test]
    fn little_waits_and_the_link_is_used_near_and_far() {
        check(1000, 0, 30.0, 0.9);
        check(1000, 10, 30.0, 0.9);
        check(1000, 180, 100.0, 0.8);
        check(10_000, 1, 30.0, 0.9);
        check(100, 1, 100.0, 0.9);
    }

    #[test]
    fn a_window_that_was_wide_becomes_small_when_the_way_becomes_slow() {
        let mut link = Link::new();
        link.carry(1_250_000_000, Duration::from_millis(1), 1 << 30);
        let wide = link.flow.size;
        link.carry(12_500_000, Duration::from_millis(1), 256 << 20);
        assert!(link.flow.size < wide / 4, "{wide} became {}", link.flow.size);
    }

    #[test]
    fn streams_together_have_no_more_on_their_way_than_one_alone() {
        let mut flow = Flow::new();
        flow.share(4);
        let now = Instant::now();
        while flow.enter(PIECE, now) {}
        assert_eq!(flow.on_the_way, BYTES_MIN / 4);
        for _ in 0..1000 {
            flow.taken(PIECE, now);
            while flow.enter(PIECE, now) {}
        }
        assert_eq!(flow.on_the_way, BYTES_MAX / 4);
    }

    #[test]
    fn more_than_was_sent_is_not_believed() {
        let (mut flow, now) = (Flow::new(), Instant::now());
        assert!(flow.enter(BYTES_MIN, now));
        assert!(!flow.enter(1, now));
        flow.taken(usize::MAX, now);
        assert_eq!(flow.on_the_way, 0);
        assert!(flow.enter(BYTES_MAX, now), "a piece alone always passes");
        assert!(!flow.enter(1, now));
    }
}
