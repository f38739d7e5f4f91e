//! How much of a VM's memory may be on its way to the other host: as much as the way carries, and little that waits.
//!
//! ```text
//!   piece: let in ─► waits ─► link ─► taken by the hypervisor there       its delay
//!                                                                        the least of all delays is the way's own
//!   waited little ─► more is let in            waited long ─► less is
//! ```
//!
//! What waits when the VM is brought to a stand must arrive before it can go on, so it is downtime. It also misleads
//! the hypervisor, which reckons how long the rest will take by how fast its stream is read: a wide window reads faster
//! than the link carries. So the window follows the way, by the time that pieces take.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::stream::PIECE_BYTES;

/// The least that is let in: eight milliseconds of 1 Gbit/s, four pieces.
pub(super) const BYTES_MIN: usize = 1 << 20;
/// The most: what fills 10 Gbit/s over 25 ms, or 1 Gbit/s over 250 ms.
const BYTES_MAX: usize = 32 << 20;
/// Pieces that wait no longer than this leave the link idle now and then: more is let in.
const WAITS_LITTLE: Duration = Duration::from_millis(8);
/// Pieces that wait longer than this are a noticeable part of the downtime: less is let in.
const WAITS_LONG: Duration = Duration::from_millis(24);
/// By which part of what was taken the window becomes smaller: it halves in about three times its own length.
const SHRINKING: usize = 4;

/// What is on its way of one stream.
#[derive(Debug)]
pub(super) struct Window {
    flow: Mutex<Flow>,
    room: Notify,
}

impl Window {
    /// Nothing is on its way yet.
    pub(super) fn new() -> Self {
        Self { flow: Mutex::new(Flow::new()), room: Notify::new() }
    }

    /// Shares what may be on its way with other streams, so many in all.
    ///
    /// **N.B.** each has a window of its own: a hypervisor does not take one stream before another has come so far, so that
    /// none may fill what another needs.
    pub(super) fn share(&self, streams: usize) {
        self.flow().share(streams.max(1));
    }

    /// Waits until a piece of so many bytes may be sent, and counts it. One at a time may wait.
    pub(super) async fn enter(&self, bytes: usize) {
        while !self.flow().enter(bytes, Instant::now()) {
            self.room.notified().await;
        }
    }

    /// The other host says that its hypervisor has taken so many bytes: no more than were sent are believed.
    pub(super) fn taken(&self, bytes: usize) {
        self.flow().taken(bytes, Instant::now());
        self.room.notify_one();
    }

    /// A panic elsewhere leaves the way as it was.
    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same without anybody who waits.
#[derive(Debug)]
struct Flow {
    /// How much may be on its way.
    size: usize,
    /// The least and the most that it may be.
    bounds: (usize, usize),
    on_the_way: usize,
    /// Whether more would have been sent since the window was changed.
    was_full: bool,
    /// When each piece was sent that is not taken whole, and what is left of it, the oldest first.
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

    /// Lets a piece in if there is room, or nothing else is on its way.
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

    /// Changes the window after a piece that took so long.
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

    /// A link, and the way over it.
    struct Link {
        flow: Flow,
        now: Instant,
        /// When all that was let in has gone over it.
        free_at: Instant,
        arrivals: VecDeque<Instant>,
    }

    impl Link {
        fn new() -> Self {
            let now = Instant::now();
            Self { flow: Flow::new(), now, free_at: now, arrivals: VecDeque::new() }
        }

        /// Carries so many bytes a second over a way of so long, until `bytes` were taken; returns how long that took.
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

    /// How long what is on its way would take to arrive, and which part of the link was used.
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
