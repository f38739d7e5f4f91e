//! One connection, which sends requests and decodes replies.
//!
//! ```text
//!            ┌────────── whole head here? ─────────┐
//!   Head ────┤ data follows ─► Payload (fill the read's buffer)┐
//!     ▲      └ none ─► note it, finish the request            │
//!     └────────────────────────────────────────────────────────┘
//! ```

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nbd_protocol::reply::HEAD_LENGTH_MAX;
use nbd_protocol::{ReplyBody, ReplyHead, ReplyStyle, RequestHeader, command};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::in_flight::InFlight;
use super::{ClientError, Completion};

/// Size of the receive buffer, enough for one `recv` to take a whole queue of replies.
const RECEIVE_BYTES: usize = 256 << 10;
const _: () = assert!(RECEIVE_BYTES > HEAD_LENGTH_MAX);

/// A connected socket with its outgoing and incoming bytes.
#[derive(Debug)]
pub(super) struct Stream {
    socket: UnixStream,
    outgoing: Vec<u8>,
    bytes_sent: usize,
    incoming: Box<[u8]>,
    /// The part of `incoming` that has arrived and is not decoded yet.
    arrived: std::ops::Range<usize>,
    state: ParserState,
    idle: bool,
    wait_max: Duration,
}

/// The decoder's state: the meaning of the next byte.
#[derive(Clone, Copy, Debug)]
enum ParserState {
    Head,
    /// Bytes of a read, from an offset of the export on; without one they are for people, who are not here.
    Payload {
        cookie: u64,
        offset: Option<u64>,
        bytes_left: usize,
        is_last: bool,
    },
}

impl Stream {
    /// Wraps a socket after its handshake. No wait is longer than `wait_max`.
    pub(super) fn new(socket: UnixStream, wait_max: Duration) -> Result<Self, ClientError> {
        // With a receive timeout a plain `recv` can wait, which saves a `poll` for each request.
        socket.set_read_timeout(Some(wait_max)).map_err(ClientError::Transfer)?;
        Ok(Self {
            socket,
            outgoing: Vec::new(),
            bytes_sent: 0,
            incoming: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            arrived: 0..0,
            state: ParserState::Head,
            idle: false,
            wait_max,
        })
    }

    /// Returns the buffer for the bytes of requests.
    pub(super) fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outgoing
    }

    /// Returns whether nothing arrived in time in the last exchange.
    pub(super) fn is_idle(&self) -> bool {
        self.idle
    }

    /// Sends as much as possible, then waits for at most `wait_max` for bytes and decodes them.
    pub(super) fn exchange(
        &mut self,
        in_flight: &mut InFlight,
        completions: &mut Vec<Completion>,
    ) -> Result<(), ClientError> {
        self.send()?;
        if !self.outgoing.is_empty() && !self.wait_for_either_direction()? {
            return Ok(());
        }
        self.idle = !self.receive(in_flight)?;
        if self.idle {
            return Ok(());
        }
        self.decode(in_flight, completions, Instant::now())
    }

    /// Sends a disconnect request; errors are ignored.
    pub(super) fn disconnect(&mut self) {
        self.outgoing.clear();
        self.bytes_sent = 0;
        let (command, flags) = (command::DISC, 0);
        let goodbye = RequestHeader { flags, command, cookie: 0, offset: 0, length: 0, payload_length: 0 };
        self.outgoing.extend_from_slice(&goodbye.encode());
        if let Err(error) = self.send() {
            tracing::trace!(%error, "the server left before the goodbye");
        }
    }

    fn send(&mut self) -> Result<(), ClientError> {
        while self.bytes_sent < self.outgoing.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.socket, &self.outgoing[self.bytes_sent..], flags) {
                Ok(bytes) => self.bytes_sent += bytes,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(ClientError::Transfer(error.into())),
            }
        }
        self.outgoing.clear();
        self.bytes_sent = 0;
        Ok(())
    }

    /// Waits until the socket can be written or read, and returns whether it can be read.
    fn wait_for_either_direction(&mut self) -> Result<bool, ClientError> {
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::OUT)];
        let timeout = Timespec {
            tv_sec: i64::try_from(self.wait_max.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: self.wait_max.subsec_nanos().into(),
        };
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(ready) => {
                self.idle = ready == 0;
                // `recv` reports hang-ups and errors.
                Ok(!descriptors[0].revents().difference(PollFlags::OUT).is_empty())
            }
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(ClientError::Transfer(error.into())),
        }
    }

    /// Receives once, and returns whether anything arrived.
    fn receive(&mut self, in_flight: &mut InFlight) -> Result<bool, ClientError> {
        let received = match self.state {
            // The rest of a large read is received directly into its buffer.
            ParserState::Payload { cookie, offset: Some(offset), bytes_left, is_last }
                if self.arrived.is_empty() && bytes_left >= RECEIVE_BYTES / 2 =>
            {
                let waiting = in_flight.get_mut(cookie).ok_or(ClientError::Protocol(NOT_IN_FLIGHT))?;
                let part = waiting.peek(offset, bytes_left).map_err(ClientError::Protocol)?;
                let received = recv(&self.socket, part, RecvFlags::empty()).map(|(bytes, _)| bytes);
                if let Ok(bytes) = received {
                    waiting.receive(offset, bytes).map_err(ClientError::Protocol)?;
                    let (offset, bytes_left) = (Some(offset + bytes as u64), bytes_left - bytes);
                    self.state = ParserState::Payload { cookie, offset, bytes_left, is_last };
                }
                received
            }
            _ => {
                self.make_room();
                let room = &mut self.incoming[self.arrived.end..];
                let received = recv(&self.socket, room, RecvFlags::empty()).map(|(bytes, _)| bytes);
                self.arrived.end += received.unwrap_or(0);
                received
            }
        };
        match received {
            Ok(0) => Err(ClientError::Closed),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(ClientError::Transfer(error.into())),
        }
    }

    /// Moves undecoded bytes to the front. These are at most a head, because data is copied as it arrives.
    fn make_room(&mut self) {
        self.incoming.copy_within(self.arrived.clone(), 0);
        self.arrived = 0..self.arrived.len();
    }

    fn decode(
        &mut self,
        in_flight: &mut InFlight,
        completions: &mut Vec<Completion>,
        now: Instant,
    ) -> Result<(), ClientError> {
        loop {
            match self.state {
                ParserState::Head => {
                    let arrived = &self.incoming[self.arrived.clone()];
                    let decoded = ReplyHead::decode(arrived, ReplyStyle::Structured);
                    let Some((head, bytes)) = decoded.map_err(ClientError::Protocol)? else {
                        return Ok(());
                    };
                    self.arrived.start += bytes;
                    let (offset, bytes_left) = note(in_flight, &head).map_err(ClientError::Protocol)?;
                    let ReplyHead { cookie, is_last, .. } = head;
                    self.state = ParserState::Payload { cookie, offset, bytes_left, is_last };
                }
                ParserState::Payload { cookie, bytes_left: 0, is_last, .. } => {
                    if is_last {
                        completions.push(in_flight.finish(cookie, now).map_err(ClientError::Protocol)?);
                    }
                    self.state = ParserState::Head;
                }
                ParserState::Payload { cookie, offset, bytes_left, is_last } => {
                    let bytes = bytes_left.min(self.arrived.len());
                    if bytes == 0 {
                        return Ok(());
                    }
                    if let Some(offset) = offset {
                        let waiting =
                            in_flight.get_mut(cookie).ok_or(ClientError::Protocol(NOT_IN_FLIGHT))?;
                        let part = waiting.receive(offset, bytes).map_err(ClientError::Protocol)?;
                        part.copy_from_slice(&self.incoming[self.arrived.start..self.arrived.start + bytes]);
                    }
                    self.arrived.start += bytes;
                    let (offset, bytes_left) =
                        (offset.map(|offset| offset + bytes as u64), bytes_left - bytes);
                    self.state = ParserState::Payload { cookie, offset, bytes_left, is_last };
                }
            }
        }
    }
}

const NOT_IN_FLIGHT: &str = "a reply to a request that is not in flight";

/// Notes what a reply's head says, and returns where what follows belongs and how long it is.
fn note(in_flight: &mut InFlight, head: &ReplyHead) -> Result<(Option<u64>, usize), &'static str> {
    let waiting = in_flight.get_mut(head.cookie).ok_or(NOT_IN_FLIGHT)?;
    match head.body {
        ReplyBody::None => Ok((None, 0)),
        ReplyBody::Simple { error: 0 } => {
            Ok(waiting.read_range().map_or((None, 0), |(offset, length)| (Some(offset), length)))
        }
        ReplyBody::Simple { error } => {
            waiting.fail(error);
            Ok((None, 0))
        }
        ReplyBody::Error { error, rest } => {
            waiting.fail(error);
            Ok((None, rest as usize))
        }
        ReplyBody::Hole { offset, length } => {
            waiting.receive(offset, length as usize)?.fill(0);
            Ok((None, 0))
        }
        ReplyBody::Data { offset, length } => {
            // The range is checked before its data is awaited.
            waiting.peek(offset, length as usize)?;
            Ok((Some(offset), length as usize))
        }
        ReplyBody::Extents { .. } => Err("extents that were not asked for"),
    }
}
