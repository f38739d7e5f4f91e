//! A small NBD client for a trusted server on a unix socket: the guest's side of the demo and of the tests.
//!
//! ```text
//!   submit ─► outgoing bytes ─► send ──► server
//!      │                                   │
//!   in flight (operation, buffer) ◄─ recv ─┘ ─► completions
//!      └── connection broke: all of them are sent again, in the order of submission, on a new one
//! ```
//!
//! Whoever owns the [`Client`] drives it from one thread, as one drives an io_uring: `submit` queues, `complete`
//! sends what is queued and waits for answers. At sixteen requests in flight that is one `send` and one `recv` for
//! several requests; a thread for each direction would cost a wake-up per request, on cores that the daemon under
//! test needs. The client never sends while it holds answers back, so that neither side can block the other.
//!
//! It speaks the fixed newstyle handshake with GO, simple and structured replies. It does not speak TLS, block
//! status or extended headers.

mod address;
mod error;
mod handshake;
mod in_flight;
mod stream;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::in_flight::InFlight;
use self::stream::Stream;

pub use self::address::Address;
pub use self::error::ClientError;

/// How long between two attempts to connect again: short against any downtime worth measuring.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);
/// How often a client that waits looks whether it was told to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Which form of replies to ask for.
    pub replies: ReplyStyle,
    /// How long to try for a new connection when one breaks. Zero means that a broken connection is final.
    pub reconnect_deadline: Duration,
    /// How long a request may wait for its answer, reconnects included.
    pub answer_deadline: Duration,
    /// Where else the export may be: a broken connection is replaced by one to any of these addresses, or to the first
    /// one. Only one server at a time may answer for the export.
    pub elsewhere: Vec<Address>,
    /// Ends any wait early.
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

/// Which form of replies the client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// The oldest form, which every server has.
    Simple,
    /// Chunks, where the server has them: what QEMU and libnbd ask for.
    Structured,
}

/// Tells another thread to stop; clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Raises the flag. It stays raised.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Tells whether the flag was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the server says of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes.
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

impl Export {
    fn new(size: u64, flags: u16, sizes: Option<handshake::BlockSizes>) -> Self {
        let flag = |bit: u16| flags & (1 << bit) != 0;
        Self {
            size,
            read_only: flag(1),
            flush: flag(2),
            fua: flag(3),
            trim: flag(5),
            write_zeroes: flag(6),
            block_size_min: sizes.map_or(1, |sizes| sizes.minimum),
            block_size_preferred: sizes.map_or(4096, |sizes| sizes.preferred),
            payload_bytes_max: sizes.map_or(wire::PAYLOAD_BYTES_MAX, |sizes| sizes.payload_max),
        }
    }
}

/// What the server is asked to do. Buffers come back with the [`Completion`].
#[derive(Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fills the whole of `buffer` from `offset` on.
    Read {
        /// First byte to read.
        offset: u64,
        /// Receives the data; its length is what is read.
        buffer: Vec<u8>,
    },
    /// Writes the whole of `data` at `offset`.
    Write {
        /// First byte to write.
        offset: u64,
        /// What to write.
        data: Vec<u8>,
        /// When the answer may come.
        durability: WriteDurability,
    },
    /// Makes everything durable that was answered before.
    Flush,
    /// Gives the range back; by the protocol its content is undefined afterwards, by Sterna's contract zero.
    Trim {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
    },
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
    },
}

/// When a write may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteDurability {
    /// As soon as reads see it.
    Volatile,
    /// Once it survives a power cut (FUA).
    Durable,
}

/// An answered request.
#[derive(Debug)]
pub struct Completion {
    /// What the caller gave when submitting.
    pub token: u64,
    /// The request, with its buffer (filled, for a successful read).
    pub operation: Operation,
    /// What the server said.
    pub result: Result<(), Errno>,
    /// When the request was submitted for the first time.
    pub submitted: Instant,
    /// When its answer had arrived.
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
    /// Those of connecting and of the handshake. There is no second attempt here: only a connection that was good
    /// once is worth waiting for.
    pub fn connect(address: &Address, options: ClientOptions) -> Result<Self, ClientError> {
        let (socket, export) = handshake::connect(address, options.replies)?;
        let stream = Stream::new(socket, STOP_CHECK_INTERVAL)?;
        let address = address.clone();
        Ok(Self { address, options, export, stream, in_flight: InFlight::default(), reconnects: 0 })
    }

    /// What the server said of the export.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// How many requests wait for their answers.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// How often a broken connection was replaced.
    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }

    /// Queues a request; `token` comes back with its completion. Nothing is sent before [`Client::complete`].
    ///
    /// # Errors
    /// [`ClientError::Request`] if it lies outside the export or is longer than the server takes.
    pub fn submit(&mut self, operation: Operation, token: u64) -> Result<(), ClientError> {
        self.check(&operation)?;
        self.in_flight.add(operation, token, self.stream.outgoing());
        Ok(())
    }

    /// Sends what is queued, waits for at least one answer and appends all that have come to `completions`.
    ///
    /// Returns at once if nothing is in flight. A broken connection is replaced meanwhile.
    ///
    /// # Errors
    /// Those of the connection, once it cannot be replaced. The client is of no use afterwards.
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

    /// Does one request and waits for it; nothing else may be in flight.
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
        // Asked only after a wait without answers: on the way of every answer it would cost a look at the clock.
        if self.stream.is_idle() && self.in_flight.oldest_wait() > self.options.answer_deadline {
            return Err(ClientError::NoAnswer { deadline: self.options.answer_deadline });
        }
        Ok(())
    }

    /// Makes a new connection and sends again all that is in flight.
    ///
    /// No two requests of a careful caller overlap, so that doing one twice does no harm.
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
        // A disk that has grown is used as far as it was known.
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
    /// Says goodbye, so that the server need not log a client that vanished.
    fn drop(&mut self) {
        if self.in_flight.len() == 0 {
            self.stream.disconnect();
        }
    }
}
