//! Requests that wait for their answers, found by cookie, and the received parts of these.

use futures_channel::oneshot;
use nbd_protocol::reply::{Extent, decode_extents};
use nbd_protocol::{ReplyStyle, ReplyViolation as Violation};
use slab::Slab;

use super::request::Request;
use crate::buffer::Buffer;
use crate::change::Change;

/// Extents of one answer that are kept; the store asks again for the rest.
const EXTENTS_MAX: usize = 4096;
const EXTENT_LENGTH: usize = 8;

#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Data(Buffer),
    /// Extents from the start of the range on: at least one, none of them empty. They may end before or behind the range.
    Extents(Vec<Extent>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Refused(u32),
    /// The connection is gone; the request may or may not have been carried out.
    Lost,
}

pub(super) type AnswerSender = oneshot::Sender<Result<Answer, Failure>>;

pub(super) struct Completed {
    pub(super) sender: AnswerSender,
    pub(super) result: Result<Answer, Failure>,
    pub(super) change: Option<Change>,
}

#[derive(Default)]
pub(super) struct InFlight {
    pending: Slab<Pending>,
    /// Number of the next request; part of its cookie, so that a late answer is not mistaken for another's.
    next: u32,
}

struct Pending {
    cookie: u64,
    wanted: Wanted,
    change: Option<Change>,
    error: Option<u32>,
    sender: AnswerSender,
}

enum Wanted {
    Nothing,
    Data {
        /// `None` while it is lent out.
        buffer: Option<Buffer>,
        offset: u64,
        length: usize,
        /// Bytes that have arrived, or were announced.
        announced: usize,
    },
    Extents {
        context: u32,
        /// The received bytes, which may end within an extent.
        bytes: Vec<u8>,
        begun: bool,
    },
}

impl InFlight {
    /// Adds a request and returns its cookie. `buffer` of a read is as long as its range.
    pub(super) fn insert(
        &mut self,
        request: &Request,
        buffer: Option<Buffer>,
        context: Option<u32>,
        sender: AnswerSender,
    ) -> u64 {
        let (wanted, change) = match request {
            Request::Read(range) => {
                let length = range.length as usize;
                (Wanted::Data { buffer, offset: range.offset, length, announced: 0 }, None)
            }
            Request::Describe(_) => {
                let context = context.unwrap_or_default();
                (Wanted::Extents { context, bytes: Vec::new(), begun: false }, None)
            }
            Request::Flush => (Wanted::Nothing, None),
            Request::Change(change) => (Wanted::Nothing, Some(change.clone())),
        };
        let entry = self.pending.vacant_entry();
        let cookie = u64::from(self.next) << 32 | entry.key() as u64;
        self.next = self.next.wrapping_add(1);
        entry.insert(Pending { cookie, wanted, change, error: None, sender });
        cookie
    }

    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Notes an error. The rest of the answer is dropped, but must be valid.
    pub(super) fn fail(&mut self, cookie: u64, error: u32) -> Result<(), Violation> {
        if error == 0 {
            return Err("an error is none");
        }
        self.find(cookie)?.error.get_or_insert(error);
        Ok(())
    }

    /// Returns the length of the data behind a simple reply without an error: that of a read, or 0.
    pub(super) fn announce_all(&mut self, cookie: u64) -> Result<usize, Violation> {
        match &mut self.find(cookie)?.wanted {
            Wanted::Nothing => Ok(0),
            Wanted::Data { length, announced, .. } => {
                *announced = *length;
                Ok(*length)
            }
            Wanted::Extents { .. } => Err("a simple reply cannot tell of extents"),
        }
    }

    /// Verifies that `length` bytes at `offset` are part of the requested range; returns their place in it.
    pub(super) fn announce(&mut self, cookie: u64, offset: u64, length: u32) -> Result<usize, Violation> {
        let Wanted::Data { offset: first, length: wanted, announced, .. } = &mut self.find(cookie)?.wanted
        else {
            return Err("data comes for a request that asked for none");
        };
        let length = length as usize;
        let position = offset.checked_sub(*first).and_then(|position| usize::try_from(position).ok());
        let fits = |position: &usize| position.checked_add(length).is_some_and(|end| end <= *wanted);
        let position = position.filter(fits).ok_or("data comes for bytes that were not asked for")?;
        *announced += length;
        if *announced > *wanted {
            return Err("the same data comes twice");
        }
        Ok(position)
    }

    pub(super) fn announce_extents(&mut self, cookie: u64, context: u32) -> Result<(), Violation> {
        match &mut self.find(cookie)?.wanted {
            Wanted::Extents { context: wanted, begun, .. } if *wanted == context && !*begun => {
                *begun = true;
                Ok(())
            }
            Wanted::Extents { .. } => Err("extents come twice, or of a context that was not asked for"),
            _ => Err("extents come for a request that asked for none"),
        }
    }

    pub(super) fn data(
        &mut self,
        cookie: u64,
        position: usize,
        length: usize,
    ) -> Result<&mut [u8], Violation> {
        const LOST: Violation = "data comes for a request that asked for none";
        let Wanted::Data { buffer: Some(buffer), .. } = &mut self.find(cookie)?.wanted else {
            return Err(LOST);
        };
        let bytes = buffer.as_mut_slice().and_then(|bytes| bytes.get_mut(position..position + length));
        bytes.ok_or(LOST)
    }

    /// Lends the buffer of a read, to receive into it; [`InFlight::give_back`] returns it.
    pub(super) fn lend(&mut self, cookie: u64) -> Option<Buffer> {
        match &mut self.find(cookie).ok()?.wanted {
            Wanted::Data { buffer, .. } => buffer.take(),
            _ => None,
        }
    }

    pub(super) fn give_back(&mut self, cookie: u64, lent: Buffer) {
        if let Ok(Pending { wanted: Wanted::Data { buffer, .. }, .. }) = self.find(cookie) {
            *buffer = Some(lent);
        }
    }

    pub(super) fn extents(&mut self, cookie: u64, arrived: &[u8]) -> Result<(), Violation> {
        if let Wanted::Extents { bytes, .. } = &mut self.find(cookie)?.wanted {
            let room = EXTENTS_MAX * EXTENT_LENGTH - bytes.len();
            bytes.extend_from_slice(&arrived[..arrived.len().min(room)]);
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, cookie: u64) -> Result<Completed, Violation> {
        self.find(cookie)?;
        let Pending { wanted, change, error, sender, .. } = self.pending.remove(key_of(cookie));
        if let Some(error) = error {
            return Ok(Completed { sender, result: Err(Failure::Refused(error)), change: None });
        }
        let answer = match wanted {
            Wanted::Nothing => Answer::Done,
            Wanted::Data { buffer: Some(buffer), length, announced, .. } if announced == length => {
                Answer::Data(buffer)
            }
            Wanted::Data { .. } => return Err("a read is answered in part"),
            Wanted::Extents { bytes, .. } => Answer::Extents(decode_extents(&bytes, ReplyStyle::Structured)?),
        };
        Ok(Completed { sender, result: Ok(answer), change })
    }

    pub(super) fn lose_all(&mut self) -> Vec<AnswerSender> {
        self.pending.drain().map(|pending| pending.sender).collect()
    }

    fn find(&mut self, cookie: u64) -> Result<&mut Pending, Violation> {
        let pending = self.pending.get_mut(key_of(cookie)).filter(|pending| pending.cookie == cookie);
        pending.ok_or("an answer to a request that is not in flight")
    }
}

fn key_of(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}
