//! Takes replies as they arrive, in pieces of any length, and completes the requests that they answer. Sans-IO.
//!
//! ```text
//!   Head ──► simple, chunk without data ──────────────────────────────┐
//!    ▲ └───► Payload { data of a read │ extents │ error messages } ───┤
//!    └──────────────────── more chunks follow, or the request is done ┘
//! ```
//!
//! A server's words never cause an allocation: data goes into the request's own buffer only.

use nbd_protocol::{ReplyBody as Body, ReplyHead as Head, ReplyStyle, ReplyViolation as Violation};

use super::in_flight::{Completed, InFlight};
use crate::buffer::Buffer;

/// Data of at least this many bytes is received into its buffer directly, instead of being copied.
const DIRECT_LENGTH_MIN: usize = 32 << 10;

pub(super) struct Receiver {
    state: ReceiverState,
    structured: bool,
}

#[derive(Clone, Copy)]
enum ReceiverState {
    Head,
    Payload { cookie: u64, sink: Sink, left: usize, is_last: bool },
}

#[derive(Clone, Copy)]
enum Sink {
    Data {
        position: usize,
    },
    Extents,
    /// An error message, which is dropped.
    Nobody,
}

/// A part of a read's buffer that is received into.
pub(super) struct Loan {
    pub(super) buffer: Buffer,
    cookie: u64,
    whole: (usize, usize),
}

impl Receiver {
    pub(super) fn new(structured: bool) -> Self {
        Self { state: ReceiverState::Head, structured }
    }

    /// Takes all of `bytes` but the start of an incomplete head; returns how many were taken. Fails with [`Violation`]: the
    /// connection has become unusable.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        in_flight: &mut InFlight,
        completed: &mut Vec<Completed>,
    ) -> Result<usize, Violation> {
        let mut taken = 0;
        loop {
            match self.state {
                ReceiverState::Head => {
                    let Some((head, length)) = Head::decode(&bytes[taken..], ReplyStyle::Structured)? else {
                        return Ok(taken);
                    };
                    taken += length;
                    self.state = self.enter(&head, in_flight)?;
                }
                ReceiverState::Payload { cookie, left: 0, is_last, .. } => {
                    if is_last {
                        completed.push(in_flight.finish(cookie)?);
                    }
                    self.state = ReceiverState::Head;
                }
                ReceiverState::Payload { cookie, sink, left, is_last } => {
                    let arrived = &bytes[taken..];
                    let arrived = &arrived[..arrived.len().min(left)];
                    if arrived.is_empty() {
                        return Ok(taken);
                    }
                    match sink {
                        Sink::Data { position } => {
                            in_flight.data(cookie, position, arrived.len())?.copy_from_slice(arrived);
                        }
                        Sink::Extents => in_flight.extents(cookie, arrived)?,
                        Sink::Nobody => {}
                    }
                    taken += arrived.len();
                    let sink = sink.behind(arrived.len());
                    self.state = ReceiverState::Payload { cookie, sink, left: left - arrived.len(), is_last };
                }
            }
        }
    }

    /// Lends the memory for the next bytes of the stream, if they are many.
    pub(super) fn lend(&self, in_flight: &mut InFlight) -> Option<Loan> {
        match self.state {
            ReceiverState::Payload { cookie, sink: Sink::Data { position }, left, .. }
                if left >= DIRECT_LENGTH_MIN =>
            {
                let mut buffer = in_flight.lend(cookie)?;
                let whole = (buffer.window_start(), buffer.len());
                buffer.move_window(whole.0 + position, left);
                Some(Loan { buffer, cookie, whole })
            }
            _ => None,
        }
    }

    pub(super) fn give_back(&mut self, mut loan: Loan, length: usize, in_flight: &mut InFlight) {
        loan.buffer.move_window(loan.whole.0, loan.whole.1);
        in_flight.give_back(loan.cookie, loan.buffer);
        if let ReceiverState::Payload { cookie, sink, left, is_last } = self.state {
            self.state =
                ReceiverState::Payload { cookie, sink: sink.behind(length), left: left - length, is_last };
        }
    }

    fn enter(&self, head: &Head, in_flight: &mut InFlight) -> Result<ReceiverState, Violation> {
        let Head { cookie, body, is_last } = *head;
        if !self.structured && !matches!(body, Body::Simple { .. }) {
            return Err("a chunk comes though none were agreed on");
        }
        let (sink, left) = match body {
            Body::Simple { error: 0 } => {
                let length = in_flight.announce_all(cookie)?;
                if self.structured && length > 0 {
                    return Err("a read is answered by a simple reply though chunks were agreed on");
                }
                (Sink::Data { position: 0 }, length)
            }
            Body::Simple { error } => {
                in_flight.fail(cookie, error)?;
                (Sink::Nobody, 0)
            }
            Body::None => (Sink::Nobody, 0),
            Body::Data { offset, length } => {
                let position = in_flight.announce(cookie, offset, length)?;
                (Sink::Data { position }, length as usize)
            }
            Body::Hole { offset, length } => {
                let position = in_flight.announce(cookie, offset, length)?;
                in_flight.data(cookie, position, length as usize)?.fill(0);
                (Sink::Nobody, 0)
            }
            Body::Extents { context, length } => {
                in_flight.announce_extents(cookie, context)?;
                (Sink::Extents, length as usize)
            }
            Body::Error { error, rest } => {
                in_flight.fail(cookie, error)?;
                (Sink::Nobody, rest as usize)
            }
        };
        Ok(ReceiverState::Payload { cookie, sink, left, is_last })
    }
}

impl Sink {
    fn behind(self, length: usize) -> Self {
        match self {
            Self::Data { position } => Self::Data { position: position + length },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests;
