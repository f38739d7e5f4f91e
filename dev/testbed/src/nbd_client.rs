//! A small NBD client for a trusted server on a unix socket: the guest's side of the demo and of the tests.
//!
//! ```text
//!   submit ─► outgoing bytes ─► send ──► server
//!      │                                   │
//!   in flight (operation, buffer) ◄─ recv ─┘ ─► completions
//!      └── connection broke: all of them are sent again, in the order of submission, on a new one
//! ```
//!
//! One thread drives a [`Client`] as an io_uring: `submit` queues requests, `complete` sends them and waits for answers. With
//! sixteen requests in flight, one `send` and one `recv` serve several requests. A thread for each direction would cost a wake-up
//! per request, on cores that the daemon under test needs. The client never sends while it holds answers back, so that neither
//! side can block the other.
//!
//! It speaks the fixed newstyle handshake with GO, simple and structured replies. It does not speak TLS, block
//! status or extended headers.

mod address;
mod error;
mod handshake;
mod in_flight;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::in_flight::InFlight;
use self::stream::Stream;

pub use self::address::Address;
pub use self::error::ClientError;

/// Time between two attempts to reconnect, shorter than any downtime to measure.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);
/// Interval at which a waiting client checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Options of a client.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The form of replies to negotiate.
    pub replies: ReplyStyle,
    /// How long to try to reconnect after a break. Zero means that a broken connection is final.
    pub reconnect_deadline: Duration,
    /// How long a request may wait for its answer, reconnects included.
    pub answer_deadline: Duration,
    /// Other addresses of the export. A broken connection is replaced by one to any of these, or to the first address. Only one
    /// server at a time may serve the export.
    pub elsewhere: Vec<Address>,
    /// The flag that ends any wait early.
    pub stop: StopFlag,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            replies: ReplyStyle::Structured,
            reconnect_deadline: Duration::from_secs(30),
            answer_deadline: Duration::from_secs(60),
            elsewhere: Vec::new(),
            stop: StopFlag::default(),
        }
    }
}

/// The form of replies that the client negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// Simple replies, which every server supports.
    Simple,
    /// Structured replies if the server supports them, as QEMU and libnbd negotiate.
    Structured,
}

/// A flag that stops another thread; clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Raises the flag. It stays raised.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the flag was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The server's description of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Size of the export in bytes.
    pub size: u64,
    /// Whether every write is refused.
    pub read_only: bool,
    /// Whether flush is offered.
    pub flush: bool,
    /// Whether FUA is offered.
    pub fua: bool,
    /// Whether trim is offered.
    pub trim: bool,
    /// Whether write-zeroes is offered.
    pub write_zeroes: bool,
    /// Requests must be multiples of this many bytes.
    pub block_size_min: u32,
    /// Requests of multiples of this many bytes work best.
    pub block_size_preferred: u32,
    /// The largest read or write, in bytes.
    pub payload_bytes_max: u32,
}

/// An operation of the server. Buffers come back with the [`Completion`].
#[derive(Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fills the whole of `buffer` from `offset` on.
    Read {
        /// First byte to read.
        offset: u64,
        /// Receives the data; its length is the number of bytes to read.
        buffer: Vec<u8>,
    },
    /// Writes the whole of `data` at `offset`.
    Write {
        /// First byte to write.
        offset: u64,
        /// The bytes to write.
        data: Vec<u8>,
        /// Whether the answer waits for durability.
        durability: WriteDurability,
    },
    /// Makes everything durable that was answered before.
    Flush,
    /// Discards the range. By the protocol its content is then undefined, by Sterna's contract zero.
    Trim {
        /// First byte to discard.
        offset: u64,
        /// Number of bytes to discard.
        length: u32,
    },
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// First byte to zero.
        offset: u64,
        /// Number of bytes to zero.
        length: u32,
    },
}

/// When a write may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteDurability {
    /// The answer comes as soon as reads see the write.
    Volatile,
    /// The answer comes once the write survives a power cut (FUA).
    Durable,
}

/// A request with its answer.
#[derive(Debug)]
pub struct Completion {
    /// The token that the caller gave at the submission.
    pub token: u64,
    /// The request, with its buffer (filled, for a successful read).
    pub operation: Operation,
    /// The server's result of the request.
    pub result: Result<(), Errno>,
    /// When the request was submitted for the first time.
    pub submitted: Instant,
    /// When its answer was complete.
    pub completed: Instant,
}

/// An error code as the server sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(i32::try_from(*.0).unwrap_or(i32::MAX)))]
pub struct Errno(pub u32);

/// A connection to one export that survives the server's restart.
#[derive(Debug)]
pub struct Client {
    address: Address,
    options: ClientOptions,
    export: Export,
    stream: Stream,
    in_flight: InFlight,
    reconnects: u64,
}

impl Client {
    /// Connects to the export.
    ///
    /// # Errors
    /// Those of connecting and of the handshake. The first connection is tried only once.
    pub fn connect(address: &Address, options: ClientOptions) -> Result<Self, ClientError> {
        let (socket, export) = handshake::connect(address, options.replies)?;
        let stream = Stream::new(socket, STOP_CHECK_INTERVAL)?;
        let address = address.clone();
        Ok(Self { address, options, export, stream, in_flight: InFlight::default(), reconnects: 0 })
    }

    /// Returns the server's description of the export.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Returns the number of requests without an answer.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the number of reconnects.
    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }

    /// Queues a request; `token` comes back with its completion. Nothing is sent before [`Client::complete`].
    ///
    /// # Errors
    /// [`ClientError::Request`] if it exceeds the export or the server's limit.
    pub fn submit(&mut self, operation: Operation, token: u64) -> Result<(), ClientError> {
        self.check(&operation)?;
        self.in_flight.add(operation, token, self.stream.outgoing());
        Ok(())
    }

    /// Sends queued requests, waits for at least one answer, and appends all arrived answers to `completions`.
    ///
    /// Returns at once if nothing is in flight. A broken connection is replaced meanwhile.
    ///
    /// # Errors
    /// Those of the connection, if it cannot be replaced. The client cannot be used afterwards.
    pub fn complete(&mut self, completions: &mut Vec<Completion>) -> Result<(), ClientError> {
        let before = completions.len();
        while completions.len() == before && self.in_flight.len() > 0 {
            match self.stream.exchange(&mut self.in_flight, completions) {
                Ok(()) => self.check_waiting()?,
                Err(error) if error.is_broken_connection() => self.reconnect(error)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Submits one request and waits for its answer; no other may be in flight.
    ///
    /// # Errors
    /// Those of [`Client::submit`] and [`Client::complete`], and [`ClientError::Answered`] if the server
    /// answers with an error.
    pub fn perform(&mut self, operation: Operation) -> Result<Operation, ClientError> {
        self.submit(operation, 0)?;
        let mut completions = Vec::new();
        self.complete(&mut completions)?;
        match completions.pop() {
            Some(Completion { operation, result: Ok(()), .. }) => Ok(operation),
            Some(Completion { result: Err(errno), .. }) => Err(ClientError::Answered(errno)),
            None => Err(ClientError::Closed),
        }
    }

    fn check(&self, operation: &Operation) -> Result<(), ClientError> {
        let (offset, length, length_max) = match operation {
            Operation::Read { offset, buffer } => {
                (*offset, buffer.len() as u64, self.export.payload_bytes_max)
            }
            Operation::Write { offset, data, .. } => {
                (*offset, data.len() as u64, self.export.payload_bytes_max)
            }
            Operation::Flush => return Ok(()),
            Operation::Trim { offset, length } | Operation::WriteZeroes { offset, length } => {
                (*offset, u64::from(*length), u32::MAX)
            }
        };
        let fits = offset.checked_add(length).is_some_and(|end| end <= self.export.size);
        if length == 0 || length > u64::from(length_max) || !fits {
            return Err(ClientError::Request { offset, length });
        }
        Ok(())
    }

    fn check_waiting(&self) -> Result<(), ClientError> {
        if self.options.stop.is_raised() {
            return Err(ClientError::Stopped);
        }
        // Checked only after a wait without answers, to save reading the clock for every answer.
        if self.stream.is_idle() && self.in_flight.oldest_wait() > self.options.answer_deadline {
            return Err(ClientError::NoAnswer { deadline: self.options.answer_deadline });
        }
        Ok(())
    }

    /// Makes a new connection and sends all requests in flight again.
    ///
    /// Requests in flight must not overlap. Then repeating one is harmless.
    fn reconnect(&mut self, mut cause: ClientError) -> Result<(), ClientError> {
        let deadline = self.options.reconnect_deadline;
        let give_up_at = Instant::now() + deadline;
        tracing::debug!(%cause, in_flight = self.in_flight.len(), "connection to the server lost");
        while Instant::now() < give_up_at {
            if self.options.stop.is_raised() {
                return Err(ClientError::Stopped);
            }
            for address in std::iter::once(&self.address).chain(&self.options.elsewhere) {
                match handshake::connect(address, self.options.replies) {
                    Ok((socket, export)) => return self.resume(socket, &export),
                    Err(error) if error.is_broken_connection() => cause = error,
                    // A server that is still starting may not know all its exports yet.
                    Err(error @ ClientError::Refused { .. }) => cause = error,
                    Err(error) => return Err(error),
                }
            }
            std::thread::sleep(RECONNECT_PAUSE);
        }
        Err(ClientError::Reconnect { deadline, source: Box::new(cause) })
    }

    fn resume(&mut self, socket: std::os::unix::net::UnixStream, export: &Export) -> Result<(), ClientError> {
        // The new part of a grown disk is not used.
        if export.size < self.export.size {
            return Err(ClientError::SizeChanged { before: self.export.size, after: export.size });
        }
        self.stream = Stream::new(socket, STOP_CHECK_INTERVAL)?;
        self.in_flight.send_again(self.stream.outgoing());
        self.reconnects += 1;
        tracing::debug!(in_flight = self.in_flight.len(), "connected to the server again");
        Ok(())
    }
}

impl Drop for Client {
    /// Disconnects in order, so that the server logs no lost client.
    fn drop(&mut self) {
        if self.in_flight.len() == 0 {
            self.stream.disconnect();
        }
    }
}
