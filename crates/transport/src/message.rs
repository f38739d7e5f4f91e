//! Messages, their priorities and channels, and the deliveries that a receiver gets.

use std::fmt;

use bytes::Bytes;

use crate::credit::Credit;

/// Limit of a head's bytes: a head describes a payload, and holds none.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Limit of a payload's bytes: the largest chunk that a mover copies at once.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// Names a stream of messages between two hosts. The callers define the number's meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(pub u64);

/// How urgent a message is: over all channels to a peer, the most urgent goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Control messages: few, small, and everything waits for them.
    Control,
    /// Blocks that a guest is waiting to read.
    Pulled,
    /// Guest writes that are acknowledged only once the peer has them.
    Synchronous,
    /// Memory of a guest.
    Memory,
    /// Guest writes that are acknowledged already.
    Asynchronous,
    /// Data that is copied in the background.
    Bulk,
}

impl Priority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 6] =
        [Self::Control, Self::Pulled, Self::Synchronous, Self::Memory, Self::Asynchronous, Self::Bulk];

    /// Returns its index in [`Priority::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// Whether a channel's messages are sent earlier than their priorities say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PriorityBoost {
    /// Its messages are as urgent as their priorities say.
    #[default]
    Off,
    /// Its messages below memory go before memory: a VM is paused until they have arrived.
    AboveMemory,
}

/// Whether messages of a channel may overtake each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// They may: each is delivered as soon as it has arrived.
    #[default]
    Any,
    /// They may not: ordered messages of one channel and one priority are delivered one after the other, as they were sent. A
    /// lost connection delays them more than others.
    AsSent,
}

/// One message to a peer, which has a head and a payload.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    channel: ChannelId,
    priority: Priority,
    order: Order,
    head: Bytes,
    payload: Bytes,
}

impl Message {
    /// Makes a message that others may overtake.
    ///
    /// # Errors
    ///
    /// The head has more than [`HEAD_BYTES_MAX`] or the payload more than [`PAYLOAD_BYTES_MAX`] bytes.
    pub fn new(
        channel: ChannelId,
        priority: Priority,
        head: impl Into<Bytes>,
        payload: impl Into<Bytes>,
    ) -> Result<Self, MessageTooLong> {
        let (head, payload) = (head.into(), payload.into());
        if head.len() > HEAD_BYTES_MAX || payload.len() > PAYLOAD_BYTES_MAX {
            return Err(MessageTooLong { head_bytes: head.len(), payload_bytes: payload.len() });
        }
        Ok(Self { channel, priority, order: Order::Any, head, payload })
    }

    /// Gives the message a place in its channel's order.
    #[must_use]
    pub fn ordered(self) -> Self {
        Self { order: Order::AsSent, ..self }
    }

    /// Returns the channel that it belongs to.
    #[must_use]
    pub fn channel(&self) -> ChannelId {
        self.channel
    }

    /// Returns how urgent it is.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Returns whether others of its channel may overtake it.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }

    /// Returns the head, whose meaning the callers define.
    #[must_use]
    pub fn head(&self) -> &Bytes {
        &self.head
    }

    /// Returns the bytes that it carries.
    #[must_use]
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Splits it into head and payload.
    #[must_use]
    pub fn into_parts(self) -> (Bytes, Bytes) {
        (self.head, self.payload)
    }

    /// Returns the length of head and payload together, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    /// Returns whether it carries no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Message")
            .field("channel", &self.channel.0)
            .field("priority", &self.priority)
            .field("order", &self.order)
            .field("head_bytes", &self.head.len())
            .field("payload_bytes", &self.payload.len())
            .finish()
    }
}

/// The error for a message beyond the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a message with a head of {head_bytes} and a payload of {payload_bytes} bytes is longer than {HEAD_BYTES_MAX} and \
     {PAYLOAD_BYTES_MAX}: send it in parts"
)]
pub struct MessageTooLong {
    /// Length of the head in bytes.
    pub head_bytes: usize,
    /// Length of the payload in bytes.
    pub payload_bytes: usize,
}

/// A message that has arrived.
///
/// **N.B.** It holds the peer's credit until it is dropped. Drop it when the store has taken the bytes, so that the peer sends no
/// faster than the store takes. The bytes themselves may outlive it.
#[derive(Debug)]
pub struct Delivery {
    /// The message that has arrived.
    pub message: Message,
    /// Returns the credit when it is dropped. Keep it when the message is taken apart.
    pub credit: Credit,
}
