//! Received state of a session: which numbers were delivered, which messages wait for their turn, how much more may come.
//!
//! It makes delivery exactly-once: a number is delivered the first time it is complete. Later copies are dropped, over whichever
//! connection they come. An ordered message waits for the one that it names as its predecessor. This module does no I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::credit::{CLASSES, class, cost, cost_of, shares};
use crate::frame::{Acknowledgement, Begun, RANGES_MAX, Start};
use crate::message::{Message, Priority};
use crate::sequence_set::{Inserted, SequenceSet};

/// Deliveries after which they are acknowledged at once; fewer wait for [`ACKNOWLEDGE_WITHIN`](crate::session).
const UNREPORTED_FRAMES_MAX: u64 = 64;

/// Divisor of the window: this much released credit is reported at once, so that the peer never waits for it.
const UNREPORTED_SHARE: u64 = 16;

pub(crate) struct Incoming {
    delivered: SequenceSet,
    /// Ordered messages that have arrived and whose delivery has not returned.
    pending: BTreeSet<u64>,
    /// The messages among them that wait, by the number they wait for.
    waiting: BTreeMap<u64, (u64, Message)>,
    window: [u64; CLASSES],
    /// Cost received and released since the beginning, by class.
    received: [u64; CLASSES],
    released: [u64; CLASSES],
    /// Deliveries and cost since the last report to the peer.
    unreported_frames: u64,
    unreported_cost: u64,
}

#[derive(Debug)]
pub(crate) enum Arrival {
    Deliver(Message),
    /// Deliver it, then call [`Incoming::passed`] with its number.
    DeliverOrdered(Message),
    /// Its predecessor is missing: do nothing yet.
    Waits,
    /// It has been delivered before: do nothing.
    Known,
}

/// How the peer broke the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// It sent more than it had credit for.
    #[error("it sent more than its credit")]
    Credit,
    /// It used numbers far beyond the acknowledged ones.
    #[error("it used frame numbers that are too large")]
    Span,
    /// It gave two messages the same place in an order.
    #[error("it gave two messages the same place in an order")]
    Order,
}

impl Incoming {
    pub(crate) fn new(window_bytes: u64) -> Self {
        Self {
            delivered: SequenceSet::new(),
            pending: BTreeSet::new(),
            waiting: BTreeMap::new(),
            window: shares(window_bytes),
            received: [0; CLASSES],
            released: [0; CLASSES],
            unreported_frames: 0,
            unreported_cost: 0,
        }
    }

    /// Checks a message by its first frame, before room is made for it.
    pub(crate) fn begin(&self, start: &Start) -> Result<Begun, Violation> {
        if self.is_known(start.number) {
            return Ok(Begun::Skip);
        }
        self.check_credit(start.priority, cost(start.head_bytes, start.payload_bytes))?;
        Ok(Begun::Keep)
    }

    pub(crate) fn arrive(
        &mut self,
        number: u64,
        after: Option<u64>,
        message: Message,
    ) -> Result<Arrival, Violation> {
        if self.is_known(number) {
            // The peer would not send it again if it knew.
            self.unreported_frames += 1;
            return Ok(Arrival::Known);
        }
        let cost = cost_of(&message);
        self.check_credit(message.priority(), cost)?;
        let arrival = match after {
            None => {
                if self.delivered.insert(number) == Inserted::OutOfSpan {
                    return Err(Violation::Span);
                }
                self.unreported_frames += 1;
                Arrival::Deliver(message)
            }
            Some(after) => {
                if !self.delivered.is_within_span(number) {
                    return Err(Violation::Span);
                }
                if after == 0 || self.delivered.contains(after) {
                    self.pending.insert(number);
                    Arrival::DeliverOrdered(message)
                } else {
                    if self.waiting.contains_key(&after) {
                        return Err(Violation::Order);
                    }
                    self.pending.insert(number);
                    self.received[class(message.priority())] += cost;
                    self.waiting.insert(after, (number, message));
                    return Ok(Arrival::Waits);
                }
            }
        };
        if let Arrival::Deliver(message) | Arrival::DeliverOrdered(message) = &arrival {
            self.received[class(message.priority())] += cost;
        }
        Ok(arrival)
    }

    /// Notes that an ordered message's delivery has returned. Returns the message that waits for it, if any.
    pub(crate) fn passed(&mut self, number: u64) -> Option<(u64, Message)> {
        self.pending.remove(&number);
        self.delivered.insert(number);
        self.unreported_frames += 1;
        self.waiting.remove(&number)
    }

    /// Returns the credit of a message that its receiver has dropped.
    pub(crate) fn release(&mut self, class: usize, cost: u64) {
        self.released[class] += cost;
        self.unreported_cost += cost;
    }

    /// Returns when a report to the peer is due: at once, soon, or not at all.
    pub(crate) fn report_due(&self) -> Due {
        let window: u64 = self.window.iter().sum();
        if self.unreported_frames >= UNREPORTED_FRAMES_MAX
            || self.unreported_cost >= window / UNREPORTED_SHARE
        {
            Due::Now
        } else if self.unreported_frames > 0 || self.unreported_cost > 0 {
            Due::Soon
        } else {
            Due::Never
        }
    }

    /// Returns the complete report for the peer, and counts it as sent.
    pub(crate) fn report(&mut self) -> Acknowledgement {
        (self.unreported_frames, self.unreported_cost) = (0, 0);
        self.state()
    }

    /// Counts the last report as not sent: its connection is lost.
    pub(crate) fn report_lost(&mut self) {
        self.unreported_frames += 1;
    }

    /// Returns the complete report for the peer.
    pub(crate) fn state(&self) -> Acknowledgement {
        let mut granted = self.released;
        granted.iter_mut().zip(self.window).for_each(|(granted, window)| *granted += window);
        Acknowledgement { floor: self.delivered.floor(), ranges: self.delivered.ranges(RANGES_MAX), granted }
    }

    fn is_known(&self, number: u64) -> bool {
        self.delivered.contains(number) || self.pending.contains(&number)
    }

    fn check_credit(&self, priority: Priority, cost: u64) -> Result<(), Violation> {
        let class = class(priority);
        let is_within = self.received[class] + cost <= self.released[class] + self.window[class];
        if is_within { Ok(()) } else { Err(Violation::Credit) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Now,
    Soon,
    Never,
}

#[cfg(test)]
mod tests;
