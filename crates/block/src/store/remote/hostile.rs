//! Access for tests that choose a server's bytes: the sans-IO parts of this module, without a socket.
//!
//! ```text
//!   bytes ─► negotiate ─► terms, or the error
//!   bytes ─► Listener: receiver over requests that are in flight ─► answers, or the violation
//! ```
//! The product does not use this. The whole store can be tested with such a server by its public interface.

use std::io::{self, Read, Write};

use futures_channel::oneshot;
use nbd_protocol::NbdUri;
use nbd_protocol::reply::HEAD_LENGTH_MAX;

use super::error::RemoteError;
use super::handshake;
use super::in_flight::{Answer, Failure, InFlight};
use super::receiver::Receiver;
use super::request::Request;
use super::terms::Terms;
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{ALIGNMENT, ByteRange, Durability, ZeroMode};
use crate::store::image::Access;

/// Bytes of the longest read in flight: data of this length is received directly into its buffer.
const LONG_READ: u64 = 64 << 10;
const CONTEXT: u32 = 1;

/// Negotiates with a server that sends these bytes, whatever it is asked, and then closes; returns the size of its export.
///
/// # Errors
/// [`RemoteError`]: that of the negotiation, or of the terms.
///
/// # Panics
/// If terms were accepted that a store cannot keep.
pub fn negotiate(bytes: &[u8]) -> Result<u64, RemoteError> {
    let uri = NbdUri::unix("/server", "disk");
    let offer = handshake::negotiate(&mut Recorded { bytes }, &uri)?;
    let terms = Terms::new(&uri, &offer, Access::ReadWrite)?;
    assert!(terms.size <= i64::MAX as u64 && terms.size.is_multiple_of(terms.minimum_block_size.into()));
    assert!(terms.payload_max >= ALIGNMENT && terms.payload_max.is_multiple_of(ALIGNMENT));
    assert!(ALIGNMENT.is_multiple_of(terms.minimum_block_size), "{terms:?}");
    Ok(terms.size)
}

/// Receives replies while requests of every kind are in flight; repeats an answered request.
///
/// Cookies have the number of the request in their upper half and its place, from 0 to 5, in their lower half.
pub struct Listener {
    receiver: Receiver,
    in_flight: InFlight,
    waiting: Vec<(Request, oneshot::Receiver<Result<Answer, Failure>>)>,
    answers: usize,
}

impl Listener {
    /// Submits the requests. `style` is the negotiated form of replies.
    pub fn new(style: ReplyStyle) -> Self {
        let write = Change::Write(0, Buffer::zeroed(ALIGNMENT as usize), Durability::Durable);
        let zeroes = Change::Zero(ByteRange::new(0, LONG_READ), ZeroMode::MayUnmap, Durability::Volatile);
        let requests = [
            Request::Read(ByteRange::new(u64::from(ALIGNMENT), 512)),
            Request::Read(ByteRange::new(1 << 33, LONG_READ)),
            Request::Describe(ByteRange::new(0, 1 << 30)),
            Request::Flush,
            Request::Change(write),
            Request::Change(zeroes),
        ];
        let receiver = Receiver::new(style == ReplyStyle::Chunks);
        let mut listener = Self { receiver, in_flight: InFlight::default(), waiting: Vec::new(), answers: 0 };
        for request in requests {
            listener.ask(request);
        }
        listener
    }

    /// Receives the server's bytes, in pieces of at most `piece` bytes, until they end or violate the protocol; returns
    /// the number of answers.
    ///
    /// # Panics
    /// If an answer does not fit its request, or usable bytes are kept back.
    pub fn hear(mut self, mut bytes: &[u8], piece: usize) -> usize {
        let mut kept = Vec::new();
        while !bytes.is_empty() {
            let loan = if kept.is_empty() { self.receiver.lend(&mut self.in_flight) } else { None };
            let mut completed = Vec::new();
            let heard = if let Some(mut loan) = loan {
                let length = loan.buffer.len().min(piece).min(bytes.len());
                let (arrived, rest) = bytes.split_at(length);
                bytes = rest;
                if let Some(room) = loan.buffer.as_mut_slice() {
                    room[..length].copy_from_slice(arrived);
                }
                self.receiver.give_back(loan, length, &mut self.in_flight);
                self.receiver.take(&[], &mut self.in_flight, &mut completed)
            } else {
                let (arrived, rest) = bytes.split_at(bytes.len().min(piece));
                bytes = rest;
                kept.extend_from_slice(arrived);
                self.receiver.take(&kept, &mut self.in_flight, &mut completed)
            };
            for answered in completed {
                // A receiver dropped before would be an abandoned request.
                let _ = answered.sender.send(answered.result);
            }
            self.ask_again();
            let Ok(taken) = heard else { break };
            kept.drain(..taken);
            assert!(kept.len() < HEAD_LENGTH_MAX, "{} bytes are more than the start of a head", kept.len());
        }
        let lost = self.in_flight.lose_all().len();
        assert_eq!(lost, self.waiting.len(), "a request is answered once, or lost");
        self.answers
    }

    fn ask(&mut self, request: Request) {
        let buffer = match &request {
            Request::Read(range) => Some(Buffer::zeroed(range.length as usize)),
            _ => None,
        };
        let (sender, receiver) = oneshot::channel();
        self.in_flight.insert(&request, buffer, Some(CONTEXT), sender);
        self.waiting.push((request, receiver));
    }

    fn ask_again(&mut self) {
        let mut again = Vec::new();
        self.waiting.retain_mut(|(request, receiver)| match receiver.try_recv() {
            Ok(Some(result)) => {
                if let Ok(answer) = result {
                    check_answer(request, &answer);
                }
                again.push(request.clone());
                false
            }
            // A violation ends its request: the sender is gone with the connection.
            Ok(None) => true,
            Err(oneshot::Canceled) => false,
        });
        self.answers += again.len();
        for request in again {
            self.ask(request);
        }
    }
}

/// The form of a server's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// One reply to a request.
    Simple,
    /// Any number of chunks to a request.
    Chunks,
}

fn check_answer(request: &Request, answer: &Answer) {
    let fits = match (request, answer) {
        (Request::Read(range), Answer::Data(buffer)) => buffer.len() as u64 == range.length,
        (Request::Describe(_), Answer::Extents(extents)) => {
            !extents.is_empty() && extents.iter().all(|extent| extent.length > 0)
        }
        (Request::Flush | Request::Change(..), Answer::Done) => true,
        _ => false,
    };
    assert!(fits, "{request:?} is answered by {answer:?}");
}

struct Recorded<'a> {
    bytes: &'a [u8],
}

impl Read for Recorded<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(room)
    }
}

impl Write for Recorded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
