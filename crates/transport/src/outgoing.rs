//! The sending state of a session: queues by priority, unacknowledged messages, and the peer's credit.
//!
//! ```text
//!   send() ─► queue per priority ─► take() by any connection ─► unacknowledged ─► acknowledge()
//!                                        ▲                            │ connection lost
//!                                        └──────── to be resent ◄─────┘
//! ```
//!
//! The connections of a session pull from here, so each carries what it can. The most urgent priority goes first, and the
//! messages of a lost connection before new ones. A message gets its number when it is first taken, and keeps it. The peer
//! delivers each number once, so sending one twice is always safe. This module does no I/O.
//!
//! A channel can be [boosted](PriorityBoost): its messages which are less urgent than memory go before memory. They keep their
//! priority and its credit: what the peer keeps for long must not use up the credit of a guest's requests.
//!
//! Guests' requests could fill a link permanently. They leave one part in [`OTHERS_SHARE`] of it to less urgent messages.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::credit::{CLASSES, class, cost_of};
use crate::frame::Acknowledgement;
use crate::large_messages::LargeMessages;
use crate::message::{ChannelId, Message, Order, PAYLOAD_BYTES_MAX, Priority, PriorityBoost};
use crate::sequence_set::SPAN_MAX;

/// Guests' requests owe the waiting, less urgent messages one byte in this many.
const OTHERS_SHARE: i64 = 8;
/// Limit of the debt: messages that did not wait have no claim to the time before.
const OWED_MAX: i64 = 64 << 10;
/// Limit of the advance: what was sent while no guest made a request is soon forgotten.
const ADVANCE_MAX: i64 = PAYLOAD_BYTES_MAX as i64;

/// Names a connection of a session: a random number that its dialler chose.
pub(crate) type ConnectionId = u64;

#[derive(Clone, Debug)]
pub(crate) enum Next {
    Begin(Taken),
    /// The next part of the message of this priority that it has begun.
    GoOn(Priority),
}

/// The channels of the messages that a connection has sent in part: one of each priority at most.
pub(crate) type UnderWay = [Option<ChannelId>; Priority::ALL.len()];

#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) number: u64,
    /// The ordered message before it, as in a frame; `None` if it has no place in an order.
    pub(crate) after: Option<u64>,
    pub(crate) message: Message,
    /// Whether this made the queue of its priority fall below the mark.
    pub(crate) drained: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    Of(Priority),
    Boosted,
}

impl Rank {
    /// The ranks before all others, the most urgent first.
    const URGENT: [Self; 2] = [Self::Of(Priority::Control), Self::Of(Priority::Pulled)];
    /// The other ranks, the most urgent first.
    const OTHERS: [Self; Priority::ALL.len() - 1] = [
        Self::Of(Priority::Synchronous),
        Self::Boosted,
        Self::Of(Priority::Memory),
        Self::Of(Priority::Asynchronous),
        Self::Of(Priority::Bulk),
    ];
}

pub(crate) struct Outgoing {
    queues: [VecDeque<Message>; Priority::ALL.len()],
    /// Messages not yet sent that go before memory, whatever their priority.
    boosted_queue: VecDeque<Message>,
    /// The channels whose less urgent messages belong there.
    boosted: HashSet<ChannelId>,
    /// Bytes not yet sent, by the messages' own priorities.
    queued_bytes: [u64; Priority::ALL.len()],
    /// Numbers of a lost connection; some may have been acknowledged since.
    resend: [VecDeque<u64>; Priority::ALL.len()],
    unacknowledged: BTreeMap<u64, Sent>,
    unacknowledged_bytes: u64,
    /// The next number; the first is 1.
    next_number: u64,
    /// Number of the last message of each ordered channel and priority, until it is acknowledged.
    last_ordered: HashMap<(ChannelId, Priority), u64>,
    /// Cost sent and granted since the beginning, by class.
    spent: [u64; CLASSES],
    granted: [u64; CLASSES],
    /// A queue that falls below this many bytes is reported as drained.
    low_water_bytes: u64,
    /// Bytes that guests' requests owe to less urgent messages; negative if those had more than their share.
    owed: i64,
    /// Connections that finish a less urgent message, because it was its turn.
    favoured: HashSet<ConnectionId>,
    large: LargeMessages,
}

struct Sent {
    message: Message,
    after: Option<u64>,
    /// The connection that carries it; `None` while it waits to be sent again.
    carrier: Option<ConnectionId>,
}

/// The error for an acknowledgement of frames that were never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an acknowledgement of frames that were never sent")]
pub(crate) struct NeverSent;

impl Outgoing {
    pub(crate) fn new(low_water_bytes: u64) -> Self {
        Self {
            queues: Default::default(),
            boosted_queue: VecDeque::new(),
            boosted: HashSet::new(),
            queued_bytes: [0; Priority::ALL.len()],
            resend: Default::default(),
            unacknowledged: BTreeMap::new(),
            unacknowledged_bytes: 0,
            next_number: 1,
            last_ordered: HashMap::new(),
            spent: [0; CLASSES],
            granted: [0; CLASSES],
            low_water_bytes,
            owed: 0,
            favoured: HashSet::new(),
            large: LargeMessages::default(),
        }
    }

    pub(crate) fn push(&mut self, message: Message) {
        self.queued_bytes[message.priority().index()] += message.len() as u64;
        let queue = match self.rank(message.channel(), message.priority()) {
            Rank::Of(priority) => &mut self.queues[priority.index()],
            Rank::Boosted => &mut self.boosted_queue,
        };
        queue.push_back(message);
    }

    pub(crate) fn set_boost(&mut self, channel: ChannelId, boost: PriorityBoost) {
        match boost {
            // Messages in the boosted queue stay there: later ones must not overtake them.
            PriorityBoost::Off => drop(self.boosted.remove(&channel)),
            PriorityBoost::AboveMemory => {
                self.boosted.insert(channel);
                for priority in Priority::ALL.into_iter().filter(|priority| *priority > Priority::Memory) {
                    let queue = &mut self.queues[priority.index()];
                    let (boosted, usual) = queue.drain(..).partition(|message| message.channel() == channel);
                    *queue = usual;
                    self.boosted_queue.extend::<VecDeque<_>>(boosted);
                }
            }
        }
    }

    fn rank(&self, channel: ChannelId, priority: Priority) -> Rank {
        let is_boosted = priority > Priority::Memory && self.boosted.contains(&channel);
        if is_boosted { Rank::Boosted } else { Rank::Of(priority) }
    }

    pub(crate) fn queued_bytes(&self, priority: Priority) -> u64 {
        self.queued_bytes[priority.index()]
    }

    pub(crate) fn unacknowledged_bytes(&self) -> u64 {
        self.unacknowledged_bytes
    }

    /// Returns what a connection is to send: the most urgent of the queued and begun messages. Now and then a less urgent message
    /// goes before guests' requests.
    pub(crate) fn next(&mut self, connection: ConnectionId, begun: &UnderWay) -> Option<Next> {
        let [control, pulled] = Rank::URGENT;
        self.next_of(control, connection, begun)
            .or_else(|| self.next_in_turn(connection, begun))
            .or_else(|| self.next_of(pulled, connection, begun))
            .or_else(|| self.next_of_others(connection, begun))
    }

    /// Returns the less urgent message that goes before guests' requests, because they owe it that.
    fn next_in_turn(&mut self, connection: ConnectionId, begun: &UnderWay) -> Option<Next> {
        if self.favoured.remove(&connection) {
            let is_begun =
                |priority: &Priority| *priority > Priority::Pulled && begun[priority.index()].is_some();
            if let Some(priority) = Priority::ALL.into_iter().find(is_begun) {
                self.favoured.insert(connection);
                return Some(Next::GoOn(priority));
            }
        }
        let next = (self.owed > 0).then(|| self.next_of_others(connection, begun))??;
        self.favoured.insert(connection);
        Some(next)
    }

    fn next_of_others(&mut self, connection: ConnectionId, begun: &UnderWay) -> Option<Next> {
        Rank::OTHERS.into_iter().find_map(|rank| self.next_of(rank, connection, begun))
    }

    fn next_of(&mut self, rank: Rank, connection: ConnectionId, begun: &UnderWay) -> Option<Next> {
        let begun_of = |priority: &Priority| {
            begun[priority.index()].is_some_and(|channel| self.rank(channel, *priority) == rank)
        };
        if let Some(priority) = Priority::ALL.into_iter().find(begun_of) {
            return Some(Next::GoOn(priority));
        }
        match rank {
            Rank::Of(priority) => {
                let again = self.take_again(connection, priority);
                again.or_else(|| self.take_new(connection, rank)).map(Next::Begin)
            }
            Rank::Boosted => {
                let first = self.boosted_queue.front()?.priority();
                // Another channel's message is unfinished.
                let is_free = begun[first.index()].is_none();
                if is_free {
                    self.take_new(connection, rank).map(Next::Begin)
                } else {
                    Some(Next::GoOn(first))
                }
            }
        }
    }

    /// Updates the debt when `cost` of a priority is sent.
    fn account(&mut self, priority: Priority, cost: u64) {
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        self.owed = match priority {
            Priority::Control => self.owed,
            Priority::Pulled => self.owed.saturating_add(cost / OTHERS_SHARE).min(OWED_MAX),
            _ => self.owed.saturating_sub(cost).max(-ADVANCE_MAX),
        };
    }

    fn take_again(&mut self, connection: ConnectionId, priority: Priority) -> Option<Taken> {
        while let Some(number) = self.resend[priority.index()].pop_front() {
            if let Some(sent) = self.unacknowledged.get_mut(&number)
                && sent.carrier.is_none()
            {
                sent.carrier = Some(connection);
                let Sent { message, after, .. } = sent;
                return Some(Taken { number, after: *after, message: message.clone(), drained: false });
            }
        }
        None
    }

    fn take_new(&mut self, connection: ConnectionId, rank: Rank) -> Option<Taken> {
        let queue = match rank {
            Rank::Of(priority) => &mut self.queues[priority.index()],
            Rank::Boosted => &mut self.boosted_queue,
        };
        let first = queue.front()?;
        let (priority, cost) = (first.priority(), cost_of(first));
        let (place, class) = (priority.index(), class(priority));
        let lowest = self.unacknowledged.keys().next().copied().unwrap_or(self.next_number);
        if self.spent[class] + cost > self.granted[class] || self.next_number >= lowest + SPAN_MAX {
            return None;
        }
        let message = queue.pop_front()?;
        let number = self.next_number;
        self.next_number += 1;
        self.spent[class] += cost;
        self.account(priority, cost);
        let before = self.queued_bytes[place];
        self.queued_bytes[place] -= message.len() as u64;
        let drained = before >= self.low_water_bytes && self.queued_bytes[place] < self.low_water_bytes;
        let after = (message.order() == Order::AsSent)
            .then(|| self.last_ordered.insert((message.channel(), priority), number).unwrap_or(0));
        self.unacknowledged_bytes += message.len() as u64;
        let sent = Sent { message: message.clone(), after, carrier: Some(connection) };
        self.unacknowledged.insert(number, sent);
        Some(Taken { number, after, message, drained })
    }

    pub(crate) fn acknowledge(&mut self, news: &Acknowledgement) -> Result<(), NeverSent> {
        let last = news.ranges.last().map_or(0, |&(_, last)| last);
        if news.floor > self.next_number || last >= self.next_number {
            return Err(NeverSent);
        }
        while let Some(entry) = self.unacknowledged.first_entry().filter(|entry| *entry.key() < news.floor) {
            let (number, sent) = entry.remove_entry();
            self.forget(number, &sent);
        }
        for &(first, last) in &news.ranges {
            if first > last {
                return Err(NeverSent);
            }
            let numbers: Vec<u64> =
                self.unacknowledged.range(first..=last).map(|(number, _)| *number).collect();
            for number in numbers {
                if let Some(sent) = self.unacknowledged.remove(&number) {
                    self.forget(number, &sent);
                }
            }
        }
        for (granted, news) in self.granted.iter_mut().zip(news.granted) {
            // An older acknowledgement may come later, over another connection.
            *granted = news.max(*granted);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64, sent: &Sent) {
        self.unacknowledged_bytes -= sent.message.len() as u64;
        self.large.acknowledged(sent.message.len());
        if sent.after.is_some() {
            let key = (sent.message.channel(), sent.message.priority());
            if self.last_ordered.get(&key) == Some(&number) {
                self.last_ordered.remove(&key);
            }
        }
    }

    /// Notes that a connection was lost. Returns whether only small messages have passed since some connections.
    pub(crate) fn lost(&mut self, connection: ConnectionId) -> bool {
        let carried = self.unacknowledged.values().filter(|sent| sent.carrier == Some(connection));
        if let Some(largest) = carried.map(|sent| sent.message.len()).max() {
            self.large.lost(largest);
        }
        self.large.only_small_ones_pass()
    }

    /// Takes back the messages of a lost connection, for the other ones to send. Returns how many there were.
    pub(crate) fn take_back(&mut self, connection: ConnectionId) -> usize {
        self.favoured.remove(&connection);
        let lost = self.unacknowledged.iter_mut().filter(|(_, sent)| sent.carrier == Some(connection));
        let mut count = 0;
        for (number, sent) in lost {
            sent.carrier = None;
            self.resend[sent.message.priority().index()].push_back(*number);
            count += 1;
        }
        count
    }

    /// Forgets everything, for it belonged to another life of the peer.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.low_water_bytes);
    }
}

#[cfg(test)]
mod tests;
