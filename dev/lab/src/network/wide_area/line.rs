//! One direction of a wide-area link, without clock or device: packets and the time go in, packets come out.
//!
//! ```text
//!   push ──► waiting ─────────► the wire ────► flying ─────────────► pop
//!            at most            one after      delay ± jitter
//!            queue_bytes_max    the other,
//!            (else refused)     by the rate    (or lost)
//! ```
//!
//! Nothing happens between calls: the owner of a line asks [`Line::next`] for the time of the next call. Packets are sent and
//! arrive at their exact times, however late the call is.

use std::collections::VecDeque;
use std::time::Duration;

use super::conditions::{Conditions, Order};
use super::packet::Packet;
use crate::workload::random::Random;

const MILLION: u64 = 1_000_000;

/// One direction of a link. Times count from a common but arbitrary moment.
#[derive(Debug)]
pub(super) struct Line {
    conditions: Conditions,
    random: Random,
    /// Packets to be sent; the first is on the wire.
    waiting: VecDeque<Packet>,
    waiting_bytes: u64,
    /// When the first waiting packet began to be sent, or the last one was sent.
    free_at: Duration,
    /// Sent packets with their times of arrival, the earliest first.
    flying: VecDeque<(Duration, Packet)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    Accepted,
    Refused,
}

impl Line {
    /// Returns an idle line; `seed` decides about losses and jitter.
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

    pub(super) fn pop(&mut self, now: Duration) -> Option<Packet> {
        self.advance(now);
        let has_arrived = self.flying.front().is_some_and(|(arrival, _)| *arrival <= now);
        if has_arrived { self.flying.pop_front().map(|(_, packet)| packet) } else { None }
    }

    /// Returns when there may be something to take; `None`: not before the next push.
    pub(super) fn next(&self) -> Option<Duration> {
        let flying = self.flying.front().map(|(arrival, _)| *arrival);
        let waiting = self.waiting.front().map(|packet| {
            let Conditions { round_trip, jitter, .. } = self.conditions;
            self.sent_at(packet) + (round_trip / 2).saturating_sub(jitter)
        });
        flying.into_iter().chain(waiting).min()
    }

    /// Changes the conditions of unsent packets. Sent packets arrive as before.
    pub(super) fn change(&mut self, now: Duration, conditions: Conditions) {
        self.advance(now);
        self.conditions = conditions;
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.flying.clear();
    }

    /// Moves packets that were sent by `now` from the queue to their flight.
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
        // No number is drawn without jitter: the losses of a seed do not depend on it.
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

    /// Returns when the first waiting packet will have been sent.
    fn sent_at(&self, first: &Packet) -> Duration {
        self.free_at + self.conditions.rate.time_of(first.wire_bytes())
    }
}

#[cfg(test)]
mod tests;
