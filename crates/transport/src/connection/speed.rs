//! Measures how fast a link is while it has enough to send.
//!
//! Only bytes sent back to back say anything about the link: a slow heartbeat may have waited for either processor. The median of
//! several measurements counts, so one stall in the middle of a transfer has no effect.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes sent back to back after which the speed is measured.
const MEASURED_BYTES: usize = 1 << 20;

/// Fewer bytes are enough when they took this long, as they do on a slow link.
const MEASURED_TIME: Duration = Duration::from_millis(100);

/// Fewer bytes than this say nothing, however long they took.
const MEASURED_BYTES_MIN: usize = 64 << 10;

/// Measurements of which the median counts: two stalls among them change nothing.
const MEASUREMENTS: usize = 5;

/// With fewer measurements than this the fastest counts, for a stall only makes one slower.
const MEASUREMENTS_MIN: usize = 3;

/// Measures the speed of one connection. The caller supplies the time.
#[derive(Debug, Default)]
pub(super) struct Speed {
    burst: Option<Burst>,
    measured: VecDeque<Measurement>,
}

#[derive(Debug)]
struct Burst {
    since: Instant,
    bytes: usize,
    /// Time since then that was spent waiting for the link.
    waited: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measurement {
    pub(super) bytes_per_second: f64,
    pub(super) link_ns_per_byte: f64,
}

impl Speed {
    pub(super) fn busy(&mut self, now: Instant) {
        self.burst.get_or_insert(Burst { since: now, bytes: 0, waited: Duration::ZERO });
    }

    /// Notes that there is nothing to send: the time that passes says nothing about the link.
    pub(super) fn idle(&mut self) {
        self.burst = None;
    }

    /// Notes that `bytes` were handed to the link, from `begun` to `now`. Returns the link's usual speed whenever it
    /// has been measured anew.
    ///
    /// The link still sends while this side packs. If this side waited for it during a good part of the time, the link was
    /// never idle: it carried all bytes in all of the time. Otherwise only the waiting time counts.
    pub(super) fn sent(&mut self, bytes: usize, begun: Instant, now: Instant) -> Option<Measurement> {
        self.busy(begun);
        let burst = self.burst.as_mut()?;
        burst.bytes += bytes;
        burst.waited += now.saturating_duration_since(begun);
        let all = now.saturating_duration_since(burst.since);
        let is_enough =
            burst.bytes >= MEASURED_BYTES || (all >= MEASURED_TIME && burst.bytes >= MEASURED_BYTES_MIN);
        if !is_enough {
            return None;
        }
        let took = if burst.waited * 4 > all { all } else { burst.waited };
        let measurement = Measurement {
            bytes_per_second: burst.bytes as f64 / all.as_secs_f64().max(1e-9),
            link_ns_per_byte: took.as_nanos() as f64 / burst.bytes as f64,
        };
        self.burst = Some(Burst { since: now, bytes: 0, waited: Duration::ZERO });
        if self.measured.len() == MEASUREMENTS {
            self.measured.pop_front();
        }
        self.measured.push_back(measurement);
        Some(self.usual(measurement))
    }

    fn usual(&self, latest: Measurement) -> Measurement {
        let middle = |figure: fn(&Measurement) -> f64| {
            let mut figures: Vec<f64> = self.measured.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            let place = if figures.len() < MEASUREMENTS_MIN { 0 } else { figures.len() / 2 };
            figures.get(place).copied()
        };
        let slowness = middle(|measured| 1.0 / measured.bytes_per_second);
        Measurement {
            bytes_per_second: slowness.map_or(latest.bytes_per_second, |slowness| 1.0 / slowness),
            link_ns_per_byte: middle(|measured| measured.link_ns_per_byte).unwrap_or(latest.link_ns_per_byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: usize = 64 << 10;
    const STALL: Duration = Duration::from_secs(15);

    /// A connection in simulated time, over a link that takes one millisecond for 64 KiB: 65.536 MB/s.
    struct Connection {
        speed: Speed,
        now: Instant,
        known: Option<f64>,
    }

    impl Connection {
        fn new() -> Self {
            Self { speed: Speed::default(), now: Instant::now(), known: None }
        }

        fn send(&mut self, bytes: usize, took: Duration) {
            let begun = self.now;
            self.now += took;
            let measured = self.speed.sent(bytes, begun, self.now);
            self.known = measured.map(|measured| measured.bytes_per_second).or(self.known);
        }

        /// Sends parts back to back, of which the last takes `last`, and then is idle.
        fn transfer(&mut self, parts: usize, last: Duration) {
            self.speed.busy(self.now);
            for part in 1..=parts {
                self.send(PART, if part == parts { last } else { Duration::from_millis(1) });
            }
            self.speed.idle();
        }

        fn check(&self, expected: f64) {
            let known = self.known.unwrap();
            assert!((known / expected - 1.0).abs() < 0.01, "{known} instead of {expected}");
        }
    }

    const USUAL: f64 = 65_536_000.0;

    #[test]
    fn heartbeats_say_nothing_about_a_link_however_long_they_take() {
        let mut connection = Connection::new();
        for _ in 0..100 {
            connection.send(22, STALL);
            connection.speed.idle();
        }
        assert_eq!(connection.known, None);
        connection.transfer(16, Duration::from_millis(1));
        connection.send(22, STALL);
        connection.check(USUAL);
    }

    #[test]
    fn a_stall_in_the_middle_of_a_transfer_does_not_change_what_is_known() {
        let mut connection = Connection::new();
        connection.transfer(48, Duration::from_millis(1));
        connection.check(USUAL);
        for _ in 0..2 {
            connection.transfer(16, STALL);
            connection.check(USUAL);
        }
        connection.transfer(64, Duration::from_millis(1));
        connection.check(USUAL);
    }

    #[test]
    fn a_stall_in_the_very_first_transfer_is_made_up_for_by_the_next_one() {
        let mut connection = Connection::new();
        connection.transfer(16, STALL);
        connection.transfer(16, Duration::from_millis(1));
        connection.check(USUAL);
    }

    #[test]
    fn a_link_that_has_become_slow_is_known_to_be_slow_after_three_transfers() {
        let mut connection = Connection::new();
        connection.transfer(80, Duration::from_millis(1));
        for _ in 0..3 {
            connection.transfer(16, Duration::from_secs(1));
        }
        connection.check(f64::from(1 << 20) / 1.015);
    }

    #[test]
    fn a_slow_link_is_measured_by_less() {
        let mut connection = Connection::new();
        connection.speed.busy(connection.now);
        for _ in 0..8 {
            connection.send(16 << 10, Duration::from_millis(125));
        }
        connection.check(131_072.0);
    }
}
