//! Assembles a connection's messages from their parts: at most one unfinished message of each priority.

use bytes::Bytes;

use super::{Malformed, Start};
use crate::compression;
use crate::message::{ChannelId, Message, Order, Priority};

/// Messages of which parts are missing. They end with their connection, for a message is resent as a whole.
#[derive(Default)]
pub(crate) struct Assembly {
    unfinished: [Option<Unfinished>; Priority::ALL.len()],
}

struct Unfinished {
    start: Start,
    head: Bytes,
    /// Received part of the payload; `None` for a message already delivered, whose bytes are only counted.
    payload: Option<Vec<u8>>,
    missing_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Keep,
    /// It has been delivered already: its bytes are dropped.
    Skip,
}

impl Assembly {
    /// Takes a message's first frame, and returns the message if it is complete. The caller has checked that there is credit for
    /// it: room for the whole payload is made here.
    pub(crate) fn first(
        &mut self,
        start: Start,
        head: &[u8],
        part: &[u8],
        begun: Begun,
    ) -> Result<Option<(Start, Message)>, Malformed> {
        let place = &mut self.unfinished[start.priority.index()];
        if place.is_some() {
            return Err(Malformed::Part);
        }
        let (head, payload) = match begun {
            Begun::Keep => (Bytes::copy_from_slice(head), Some(Vec::with_capacity(start.wire_bytes))),
            Begun::Skip => (Bytes::new(), None),
        };
        *place = Some(Unfinished { start, head, payload, missing_bytes: start.wire_bytes });
        self.add(start.priority, part)
    }

    pub(crate) fn next(&mut self, number: u64, part: &[u8]) -> Result<Option<(Start, Message)>, Malformed> {
        let unfinished =
            self.unfinished.iter().flatten().find(|unfinished| unfinished.start.number == number);
        let priority = unfinished.ok_or(Malformed::Part)?.start.priority;
        self.add(priority, part)
    }

    fn add(&mut self, priority: Priority, part: &[u8]) -> Result<Option<(Start, Message)>, Malformed> {
        let place = &mut self.unfinished[priority.index()];
        let Some(unfinished) = place else { return Err(Malformed::Part) };
        unfinished.missing_bytes =
            unfinished.missing_bytes.checked_sub(part.len()).ok_or(Malformed::Length)?;
        if let Some(payload) = &mut unfinished.payload {
            payload.extend_from_slice(part);
        }
        if unfinished.missing_bytes > 0 {
            return Ok(None);
        }
        let Some(Unfinished { start, head, payload: Some(payload), .. }) = place.take() else {
            return Ok(None);
        };
        let payload = compression::unpack(start.codec, payload, start.payload_bytes)?;
        let message = Message::new(ChannelId(start.channel), start.priority, head, payload);
        let message = message.map_err(|_| Malformed::Length)?;
        let order = if start.after.is_some() { Order::AsSent } else { Order::Any };
        Ok(Some((start, if order == Order::AsSent { message.ordered() } else { message })))
    }
}
