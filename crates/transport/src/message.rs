//! What is sent: messages, their priorities and channels, and what the receiver gets of them.

use std::fmt;

use bytes::Bytes;

use crate::credit::Credit;

/// Bytes that a head may have: it is for what describes a payload, not for payload.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Bytes that a payload may have: the largest chunk that a mover copies at once.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// Names one of the streams of messages between two hosts. What the number means is the callers' affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(pub u64);

/// How urgent a message is: whatever is more urgent goes first, over all channels to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Words of a protocol: few, small, and everything waits for them.
    Control,
    /// Blocks that a guest is waiting for to read.
    Pulled,
    /// Guest writes that are acknowledged only once the peer has them.
    Synchronous,
    /// A guest's memory.
    Memory,
    /// Guest writes that are acknowledged already.
    Asynchronous,
    /// What is copied in the background.
    Bulk,
}

impl Priority {
    /// All of them, the most urgent first.
    pub const ALL: [Self; 6] =
        [Self::Control, Self::Pulled, Self::Synchronous, Self::Memory, Self::Asynchronous, Self::Bulk];

    /// Its place in [`Priority::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// How much of a hurry a channel is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PriorityBoost {
    /// Its messages are as urgent as their priorities say.
    #[default]
    Off,
    /// Those that are less urgent than memory go before it: a VM stands still until they have arrived.
    AboveMemory,
}

/// Whether messages of a channel may overtake each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// They may: each is delivered as soon as it is there.
    #[default]
    Any,
    /// They may not: ordered messages of one channel and one priority are delivered one after the other, as they were
    /// sent. A lost connection delays them more than others.
    AsSent,
}

/// One message to a peer: what it is about, and bytes.
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

    /// The channel it belongs to.
    #[must_use]
    pub fn channel(&self) -> ChannelId {
        self.channel
    }

    /// How urgent it is.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Whether others of its channel may overtake it.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }

    /// What it says of itself; its meaning is the callers' affair.
    #[must_use]
    pub fn head(&self) -> &Bytes {
        &self.head
    }

    /// The bytes it carries.
    #[must_use]
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Takes it apart: head and payload.
    #[must_use]
    pub fn into_parts(self) -> (Bytes, Bytes) {
        (self.head, self.payload)
    }

    /// Bytes that its head and payload have together.
    #[must_use]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    /// Whether it carries no bytes at all.
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

/// Says that a message does not fit into the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a message with a head of {head_bytes} and a payload of {payload_bytes} bytes is longer than {HEAD_BYTES_MAX} and \
     {PAYLOAD_BYTES_MAX}: send it in parts"
)]
pub struct MessageTooLong {
    /// Bytes of the head.
    pub head_bytes: usize,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

/// A message that has arrived.
///
/// **N.B.** The peer's credit for it is held until this is dropped: drop it when the store has taken the bytes, so that
/// the peer sends no faster than the store takes. The bytes themselves may outlive it.
#[derive(Debug)]
pub struct Delivery {
    /// What has arrived.
    pub message: Message,
    /// What returns the credit when it is dropped. Keep it when the message is taken apart.
    pub credit: Credit,
}
