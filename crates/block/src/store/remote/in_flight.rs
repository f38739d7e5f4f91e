//! Requests that wait for their answers, found by cookie, and what has arrived of those.

use futures_channel::oneshot;
use slab::Slab;

use super::reply::Violation;
use super::request::Request;
use crate::buffer::Buffer;
use crate::change::Change;

/// Extents of one answer that are kept; for what they do not cover the store asks again.
const EXTENTS_MAX: usize = 4096;
/// Bytes of an extent on the wire.
const EXTENT_LENGTH: usize = 8;

/// What a request was answered.
#[derive(Debug)]
pub(super) enum Answer {
    Done,
    /// What was read: as much as was asked for.
    Data(Buffer),
    /// Extents from the start of the range on: at least one, none of them empty. They may end before or behind it.
    Extents(Vec<Extent>),
}

/// An extent as it stands on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) length: u32,
    pub(super) state: u32,
}

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server answered with this error.
    Refused(u32),
    /// The connection is gone; whether the request was carried out is not known.
    Lost,
}

/// How an answer reaches those who asked.
pub(super) type AnswerSender = oneshot::Sender<Result<Answer, Failure>>;

/// A request whose answer is there.
pub(super) struct Completed {
    pub(super) sender: AnswerSender,
    /// What to tell them.
    pub(super) result: Result<Answer, Failure>,
    /// What was changed, if it was.
    pub(super) change: Option<Change>,
}

/// The requests of one connection.
#[derive(Default)]
pub(super) struct InFlight {
    pending: Slab<Pending>,
    /// Number of the next request; part of its cookie, so that a late answer is not taken for another's.
    next: u32,
}

struct Pending {
    cookie: u64,
    wanted: Wanted,
    change: Option<Change>,
    /// The first error that was told; `None`: none yet.
    error: Option<u32>,
    sender: AnswerSender,
}

enum Wanted {
    Nothing,
    Data {
        /// `None` while it is lent out.
        buffer: Option<Buffer>,
        /// First byte asked for.
        offset: u64,
        length: usize,
        /// Bytes that have come, or were announced and are on their way.
        announced: usize,
    },
    Extents {
        /// Number of the context.
        context: u32,
        /// What has come, whole extents or not.
        bytes: Vec<u8>,
        /// Whether the server has begun.
        begun: bool,
    },
}

impl InFlight {
    /// Takes a request on and returns its cookie. A read gets `buffer`, which is as long as its range.
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
        // Never more than a few hundred entries.
        let cookie = u64::from(self.next) << 32 | entry.key() as u64;
        self.next = self.next.wrapping_add(1);
        entry.insert(Pending { cookie, wanted, change, error: None, sender });
        cookie
    }

    /// Requests without an answer.
    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Notes an error. What else comes of the answer is not wanted, but must be in order.
    pub(super) fn fail(&mut self, cookie: u64, error: u32) -> Result<(), Violation> {
        if error == 0 {
            return Err("an error is none");
        }
        self.find(cookie)?.error.get_or_insert(error);
        Ok(())
    }

    /// The range that a simple reply without an error is followed by: that of a read, or nothing.
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

    /// Makes sure that `length` bytes at `offset` are a part of what was asked for; returns where in it they go.
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

    /// Makes sure that extents of `context` were asked for.
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

    /// Where data that was announced goes.
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

    /// Lends out the buffer of a read, to receive into it; it comes back by [`InFlight::give_back`].
    pub(super) fn lend(&mut self, cookie: u64) -> Option<Buffer> {
        match &mut self.find(cookie).ok()?.wanted {
            Wanted::Data { buffer, .. } => buffer.take(),
            _ => None,
        }
    }

    /// Takes back what was lent.
    pub(super) fn give_back(&mut self, cookie: u64, lent: Buffer) {
        if let Ok(Pending { wanted: Wanted::Data { buffer, .. }, .. }) = self.find(cookie) {
            *buffer = Some(lent);
        }
    }

    /// Keeps bytes of extents that were announced, as many as are wanted.
    pub(super) fn extents(&mut self, cookie: u64, arrived: &[u8]) -> Result<(), Violation> {
        if let Wanted::Extents { bytes, .. } = &mut self.find(cookie)?.wanted {
            let room = EXTENTS_MAX * EXTENT_LENGTH - bytes.len();
            bytes.extend_from_slice(&arrived[..arrived.len().min(room)]);
        }
        Ok(())
    }

    /// Ends a request whose answer is there as a whole.
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
            Wanted::Extents { bytes, .. } => Answer::Extents(decode_extents(&bytes)?),
        };
        Ok(Completed { sender, result: Ok(answer), change })
    }

    /// Ends every request without an answer.
    pub(super) fn lose_all(&mut self) -> Vec<AnswerSender> {
        self.pending.drain().map(|pending| pending.sender).collect()
    }

    fn find(&mut self, cookie: u64) -> Result<&mut Pending, Violation> {
        let pending = self.pending.get_mut(key_of(cookie)).filter(|pending| pending.cookie == cookie);
        pending.ok_or("an answer comes to a request that is not in flight")
    }
}

/// Place of a request in the table.
fn key_of(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}

fn decode_extents(bytes: &[u8]) -> Result<Vec<Extent>, Violation> {
    let (whole, _) = bytes.as_chunks::<EXTENT_LENGTH>();
    let extents = whole.iter().map(|[l0, l1, l2, l3, s0, s1, s2, s3]| Extent {
        length: u32::from_be_bytes([*l0, *l1, *l2, *l3]),
        state: u32::from_be_bytes([*s0, *s1, *s2, *s3]),
    });
    let extents: Vec<Extent> = extents.collect();
    if extents.is_empty() || extents.iter().any(|extent| extent.length == 0) {
        return Err("an extent is empty, or there is none");
    }
    Ok(extents)
}
