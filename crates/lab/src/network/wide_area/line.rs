//! One direction of a wide-area link, as a VM without clock or device: packets and the time go in, packets come out.
//!
//! ```text
//!   push ──► waiting ─────────► the wire ────► flying ─────────────► pop
//!            at most            one after      delay ± jitter
//!            queue_bytes_max    the other,
//!            (else refused)     by the rate    (or lost)
//! ```
//!
//! Nothing happens between calls: whoever owns a line asks [`Line::next`] when to come back. What is sent and what
//! arrives is reckoned by the times at which it would have happened, however late the call is.

use std::collections::VecDeque;
use std::time::Duration;

use super::conditions::{Conditions, Order};
use super::packet::Packet;
use crate::workload::random::Random;

/// Losses are given of so many packets.
const MILLION: u64 = 1_000_000;

/// One direction. Times count from any one moment.
#[derive(Debug)]
pub(super) struct Line {
    conditions: Conditions,
    random: Random,
    /// Not sent yet; the first is being sent.
    waiting: VecDeque<Packet>,
    /// Bytes of what waits.
    waiting_bytes: u64,
    /// When the sending of the first that waits has begun, or the last was over.
    free_at: Duration,
    /// Sent, with the time of arrival; the first arrives first.
    flying: VecDeque<(Duration, Packet)>,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It waits for the wire.
    Accepted,
    /// The queue is full, so that it is dropped.
    Refused,
}

impl Line {
    /// An idle line; `seed` decides which packets are lost, and how jitter falls.
    pub(super) fn new(conditions: Conditions, seed: u64) -> Self {
        Self {
            conditions,
            random: Random::new(seed),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            free_at: Duration::ZERO,
            flying: VecDeque::new(),
        }
    }

    /// A packet comes to the beginning.
    pub(super) fn push(&mut self, now: Duration, packet: Packet) -> Pushed {
        self.advance(now);
        let waiting_bytes = self.waiting_bytes.saturating_add(packet.wire_bytes());
        if self.waiting.is_empty() {
            self.free_at = self.free_at.max(now);
        } else if waiting_bytes > self.conditions.queue_bytes_max {
            return Pushed::Refused;
        }
        self.waiting_bytes = waiting_bytes;
        self.waiting.push_back(packet);
        Pushed::Accepted
    }

    /// Takes a packet that has arrived.
    pub(super) fn pop(&mut self, now: Duration) -> Option<Packet> {
        self.advance(now);
        let has_arrived = self.flying.front().is_some_and(|(arrival, _)| *arrival <= now);
        if has_arrived { self.flying.pop_front().map(|(_, packet)| packet) } else { None }
    }

    /// When there may be something to take; `None`: not before something is pushed.
    pub(super) fn next(&self) -> Option<Duration> {
        let flying = self.flying.front().map(|(arrival, _)| *arrival);
        let waiting = self.waiting.front().map(|packet| {
            let Conditions { round_trip, jitter, .. } = self.conditions;
            self.sent_at(packet) + (round_trip / 2).saturating_sub(jitter)
        });
        flying.into_iter().chain(waiting).min()
    }

    /// Goes on under other conditions: they hold for what is not sent yet, and what flies arrives as it would have.
    pub(super) fn change(&mut self, now: Duration, conditions: Conditions) {
        self.advance(now);
        self.conditions = conditions;
    }

    /// Loses everything that is under way.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.flying.clear();
    }

    /// Sends what has been sent by `now`.
    fn advance(&mut self, now: Duration) {
        while let Some(packet) = self.waiting.front() {
            let sent_at = self.sent_at(packet);
            if sent_at > now {
                return;
            }
            let Some(packet) = self.waiting.pop_front() else { return };
            self.free_at = sent_at;
            self.waiting_bytes -= packet.wire_bytes();
            self.fly(sent_at, packet);
        }
    }

    fn fly(&mut self, sent_at: Duration, packet: Packet) {
        let Conditions { round_trip, jitter, order, lost_per_million, .. } = self.conditions;
        if lost_per_million > 0 && self.random.below(MILLION) < u64::from(lost_per_million) {
            return;
        }
        // Without jitter no number is drawn: the losses of a seed do not depend on it.
        let jitter_ns = u64::try_from(jitter.as_nanos()).unwrap_or(u64::MAX / 4).min(u64::MAX / 4);
        let late = if jitter_ns > 0 { self.random.below(2 * jitter_ns + 1) } else { 0 };
        let arrival = (sent_at + round_trip / 2 + Duration::from_nanos(late)).saturating_sub(jitter);
        let arrival = arrival.max(sent_at);
        match order {
            Order::Kept => {
                let last = self.flying.back().map(|(arrival, _)| *arrival);
                self.flying.push_back((last.map_or(arrival, |last| last.max(arrival)), packet));
            }
            Order::ByArrival => {
                let place = self.flying.partition_point(|(other, _)| *other <= arrival);
                self.flying.insert(place, (arrival, packet));
            }
        }
    }

    /// When the first that waits will have been sent.
    fn sent_at(&self, first: &Packet) -> Duration {
        self.free_at + self.conditions.rate.time_of(first.wire_bytes())
    }
}

#[cfg(test)]
mod tests;
