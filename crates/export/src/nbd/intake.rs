//! Splits the byte stream of a client into requests, without I/O.
//!
//! ```text
//!            ┌──────────────────── Taken::Request, Taken::Refused ───────────────────┐
//!            ▼                                                                       │
//!   Header (0–31 bytes kept) ─► Admission ─► Payload (filled from read-ahead, ───────┤
//!            │        │      ▲      │          or straight from the socket)          │
//!            │        │      │      └─ Taken::NoRoom: retried later                  │
//!            │        └─► Contexts (12 bytes: range and context)                     │
//!            └─ refused, with payload ─► Skip ───────────────────────────────────────┘
//! ```
//!
//! Nothing is allocated before `admit` has granted room for it.

use block::{Buffer, BufferPool};

use crate::nbd::export::ReplyStyle;
use crate::nbd::transmission::{
    Command, HEADER_LENGTH_MAX, Refusal, RequestHeader, STATUS_PAYLOAD_LENGTH, Terms, Violation,
    brings_contexts, judge, narrow,
};

/// Position of a connection in its stream of requests.
#[derive(Default)]
pub struct Intake {
    stage: Stage,
    /// Used bytes of an incomplete request, except its payload.
    begun: Begun,
}

/// The bytes of a request before its payload, as they came.
#[derive(Clone, Copy)]
struct Begun {
    bytes: [u8; HEADER_LENGTH_MAX + STATUS_PAYLOAD_LENGTH],
    length: usize,
}

enum Stage {
    /// The next request: its first `length` bytes are in `bytes`.
    Header { bytes: [u8; HEADER_LENGTH_MAX], length: usize },
    /// The payload of a request for allocation arrives.
    Contexts { header: RequestHeader, bytes: [u8; STATUS_PAYLOAD_LENGTH], length: usize },
    /// A valid request waits until there is room for it.
    Admission { cookie: u64, command: Command },
    /// A write's payload arrives.
    Payload { cookie: u64, command: Command, payload: Buffer, filled: usize },
    /// The same, while the payload is lent by [`Intake::lend_payload`].
    Lent { cookie: u64, command: Command, filled: usize, length: usize },
    /// The payload of a refused write is dropped.
    Skip { cookie: u64, offset: u64, refusal: Refusal, remaining: usize },
}

/// The next item of the stream.
pub enum Taken {
    /// The input is used up.
    NeedBytes,
    /// `admit` has refused; the next call retries.
    NoRoom,
    /// A request to execute.
    Request {
        /// The cookie for the reply.
        cookie: u64,
        /// The command to carry out.
        command: Command,
        /// The data of a write, or memory for a read; else empty.
        buffer: Option<Buffer>,
    },
    /// A request to answer with an error.
    Refused {
        /// The cookie for the reply.
        cookie: u64,
        /// Offset of the request, which an extended reply repeats.
        offset: u64,
        /// The error to answer with.
        refusal: Refusal,
    },
}

impl Intake {
    /// Takes the next request off `input`, which is shortened by the used bytes.
    ///
    /// `admit` is called with the bytes of payload that a request needs from `pool`; if it grants them, it
    /// must have reserved them.
    ///
    /// # Errors
    /// [`Violation`]: the rest of the stream is meaningless.
    pub fn take(
        &mut self,
        input: &mut &[u8],
        terms: &Terms,
        pool: &BufferPool,
        mut admit: impl FnMut(usize) -> Admission,
    ) -> Result<Taken, Violation> {
        loop {
            match &mut self.stage {
                Stage::Header { bytes, length } => {
                    let needed = terms.offer.replies.request_length();
                    fill(&mut bytes[..needed], length, input);
                    if *length < needed {
                        return Ok(Taken::NeedBytes);
                    }
                    let header = RequestHeader::decode(bytes, terms.offer.replies)?;
                    self.begun.restart(&bytes[..needed]);
                    self.stage = if brings_contexts(&header, terms) {
                        Stage::Contexts { header, bytes: [0; STATUS_PAYLOAD_LENGTH], length: 0 }
                    } else {
                        Stage::judged(&header, judge(&header, terms))
                    };
                }
                Stage::Contexts { header, bytes, length } => {
                    fill(bytes, length, input);
                    if *length < STATUS_PAYLOAD_LENGTH {
                        return Ok(Taken::NeedBytes);
                    }
                    self.begun.add(bytes);
                    let header = RequestHeader { payload_length: 0, ..*header };
                    let judged = narrow(&header, *bytes).and_then(|header| judge(&header, terms));
                    self.stage = Stage::judged(&header, judged);
                }
                Stage::Admission { cookie, command } => {
                    let (cookie, command) = (*cookie, *command);
                    let length = command.payload_length();
                    if admit(length) == Admission::Refused {
                        return Ok(Taken::NoRoom);
                    }
                    if let Command::Write(..) = command {
                        self.stage =
                            Stage::Payload { cookie, command, payload: pool.take(length), filled: 0 };
                        continue;
                    }
                    self.stage = Stage::default();
                    let buffer = if let Command::Read(..) = command { Some(pool.take(length)) } else { None };
                    return Ok(Taken::Request { cookie, command, buffer });
                }
                Stage::Payload { payload, filled, .. } => {
                    // The payload has no other handle: it was taken above, or has been given back.
                    if let Some(target) = payload.as_mut_slice() {
                        fill(target, filled, input);
                    }
                    if *filled < payload.len() {
                        return Ok(Taken::NeedBytes);
                    }
                    if let Stage::Payload { cookie, command, payload, .. } = std::mem::take(&mut self.stage) {
                        return Ok(Taken::Request { cookie, command, buffer: Some(payload) });
                    }
                }
                Stage::Lent { .. } => return Ok(Taken::NeedBytes),
                Stage::Skip { cookie, offset, refusal, remaining } => {
                    let skipped = input.len().min(*remaining);
                    *input = &input[skipped..];
                    *remaining -= skipped;
                    if *remaining > 0 {
                        return Ok(Taken::NeedBytes);
                    }
                    let taken = Taken::Refused { cookie: *cookie, offset: *offset, refusal: *refusal };
                    self.stage = Stage::default();
                    return Ok(taken);
                }
            }
        }
    }

    /// Returns the bytes of the incomplete request, from its first one. An intake that takes them again, and then the rest of the
    /// stream, is in the same state. Returns `None` while a payload is lent.
    ///
    /// The bytes of a dropped payload are replaced by as many zeroes.
    pub fn unfinished(&self, style: ReplyStyle) -> Option<Vec<u8>> {
        let begun = &self.begun.bytes[..self.begun.length];
        match &self.stage {
            Stage::Header { bytes, length } => Some(bytes[..*length].to_vec()),
            Stage::Contexts { bytes, length, .. } => Some([begun, &bytes[..*length]].concat()),
            Stage::Admission { .. } => Some(begun.to_vec()),
            Stage::Payload { payload, filled, .. } => {
                Some([begun, payload.as_slice().get(..*filled)?].concat())
            }
            Stage::Lent { .. } => None,
            Stage::Skip { remaining, .. } => {
                let header = RequestHeader::decode(self.begun.bytes.first_chunk()?, style).ok()?;
                let skipped = (header.payload_length as usize).checked_sub(*remaining)?;
                Some([begun, &vec![0; skipped]].concat())
            }
        }
    }

    /// Returns whether a part of a payload for which memory is held has not arrived.
    pub fn awaits_payload(&self) -> bool {
        matches!(self.stage, Stage::Payload { .. } | Stage::Lent { .. })
    }

    /// Lends the missing part of a payload to receive into, if it has at least `minimum` bytes.
    ///
    /// It must come back by [`Self::return_payload`].
    pub fn lend_payload(&mut self, minimum: usize) -> Option<Buffer> {
        match std::mem::take(&mut self.stage) {
            Stage::Payload { cookie, command, mut payload, filled } if payload.len() - filled >= minimum => {
                let length = payload.len();
                self.stage = Stage::Lent { cookie, command, filled, length };
                payload.move_window(filled, length - filled);
                Some(payload)
            }
            stage => {
                self.stage = stage;
                None
            }
        }
    }

    /// Takes back the buffer from [`Self::lend_payload`], with `received` more bytes at its start.
    pub fn return_payload(&mut self, mut payload: Buffer, received: usize) {
        if let Stage::Lent { cookie, command, filled, length } = self.stage {
            payload.move_window(0, length);
            let filled = (filled + received).min(length);
            self.stage = Stage::Payload { cookie, command, payload, filled };
        }
    }
}

/// Whether there is room for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// There is room, and it is reserved.
    Granted,
    /// There is no room at present.
    Refused,
}

impl Stage {
    fn judged(header: &RequestHeader, judged: Result<Command, Refusal>) -> Self {
        let RequestHeader { cookie, offset, .. } = *header;
        match judged {
            Ok(command) => Self::Admission { cookie, command },
            Err(refusal) => Self::Skip { cookie, offset, refusal, remaining: header.payload_length as usize },
        }
    }
}

impl Begun {
    fn restart(&mut self, bytes: &[u8]) {
        self.length = 0;
        self.add(bytes);
    }

    /// Adds bytes: callers add a header, and after it at most the one that names contexts.
    fn add(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        if let Some(room) = self.bytes.get_mut(self.length..end) {
            room.copy_from_slice(bytes);
            self.length = end;
        }
    }
}

impl Default for Begun {
    fn default() -> Self {
        Self { bytes: [0; HEADER_LENGTH_MAX + STATUS_PAYLOAD_LENGTH], length: 0 }
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::Header { bytes: [0; HEADER_LENGTH_MAX], length: 0 }
    }
}

/// Copies from `input` to `target` after its `filled` bytes, and takes the copied bytes off `input`.
fn fill(target: &mut [u8], filled: &mut usize, input: &mut &[u8]) {
    let count = input.len().min(target.len() - *filled);
    let (taken, rest) = input.split_at(count);
    target[*filled..*filled + count].copy_from_slice(taken);
    *filled += count;
    *input = rest;
}

#[cfg(test)]
mod tests;
