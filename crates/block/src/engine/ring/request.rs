//! One operation of the ring: the memory that it owns while the kernel works on it, its submission entry, and the next
//! step after a completion.
//!
//! ```text
//!   entry ──► kernel ──► advance ─┬─► Finished                      the caller gets it
//!     ▲                           ├─► Again        short transfer, EINTR: the rest is submitted
//!     └───────────────────────────┴─► AwaitReady   a non-blocking socket had nothing: poll it, then submit again
//! ```
//!
//! **Invariant:** everything an entry points to belongs to the [`Request`] (or to a box it owns), and the request is neither
//! dropped nor lent out before the entry's completion has arrived.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{squeue, types};
use rustix::io::Errno;

use super::entry::FileArgument;
use crate::buffer::{Buffer, BufferPool, PAGE};
use crate::device::{ByteRange, Durability};
use crate::engine::AllocateMode;
use crate::error::IoError;

/// Bytes of one transfer; the kernel cuts at 2 GiB less a page, this keeps the rest page-aligned.
const TRANSFER_MAX: usize = 1 << 30;

/// How often an operation is submitted again after EINTR or EAGAIN without progress.
const RETRIES_MAX: u32 = 64;

pub(super) struct Request {
    kind: Kind,
    file: Arc<OwnedFd>,
    done: usize,
    retries: u32,
    polling: bool,
}

enum Kind {
    Read { offset: u64, buffer: Buffer },
    Write { offset: u64, data: Buffer, durability: Durability },
    Sync,
    Allocate { mode: AllocateMode, range: ByteRange },
    Accept,
    Receive { buffer: Buffer },
    Send { pieces: Vec<Buffer>, length: usize, message: Option<Box<Message>> },
    Wakeup { count: Box<[u8; 8]> },
    Over,
}

struct Message {
    header: libc::msghdr,
    pieces: Vec<libc::iovec>,
}

pub(super) enum Outcome {
    Done,
    Filled(Buffer, usize),
    Connection(OwnedFd),
    /// Cancelled before anything was received or accepted; the buffer, if it had one.
    Cancelled(Option<Buffer>),
}

pub(super) enum Step {
    Finished(Result<Outcome, IoError>),
    Again,
}

#[derive(Clone, Copy)]
pub(super) enum FileReference {
    Descriptor,
    Slot(u32),
}

impl Request {
    pub(super) fn read(file: Arc<OwnedFd>, offset: u64, buffer: Buffer) -> Self {
        Self::new(file, Kind::Read { offset, buffer })
    }

    pub(super) fn write(file: Arc<OwnedFd>, offset: u64, data: Buffer, durability: Durability) -> Self {
        Self::new(file, Kind::Write { offset, data, durability })
    }

    pub(super) fn sync(file: Arc<OwnedFd>) -> Self {
        Self::new(file, Kind::Sync)
    }

    pub(super) fn allocate(file: Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> Self {
        Self::new(file, Kind::Allocate { mode, range })
    }

    pub(super) fn accept(file: Arc<OwnedFd>) -> Self {
        Self::new(file, Kind::Accept)
    }

    pub(super) fn receive(file: Arc<OwnedFd>, buffer: Buffer) -> Self {
        Self::new(file, Kind::Receive { buffer })
    }

    pub(super) fn send_rest(file: Arc<OwnedFd>, pieces: Vec<Buffer>, sent: usize) -> Self {
        let length = pieces.iter().map(Buffer::len).sum();
        Self { done: sent, ..Self::new(file, Kind::Send { pieces, length, message: None }) }
    }

    pub(super) fn wakeup(file: Arc<OwnedFd>) -> Self {
        Self::new(file, Kind::Wakeup { count: Box::new([0; 8]) })
    }

    fn new(file: Arc<OwnedFd>, kind: Kind) -> Self {
        Self { kind, file, done: 0, retries: 0, polling: false }
    }

    pub(super) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Returns whether it may wait for a peer for ever, so that it must be cancelled when its future is dropped.
    pub(super) fn waits_for_peer(&self) -> bool {
        matches!(self.kind, Kind::Accept | Kind::Receive { .. } | Kind::Send { .. } | Kind::Wakeup { .. })
    }

    pub(super) fn cancelled(self) -> Outcome {
        Outcome::of_cancelled(self.kind)
    }

    /// Makes the submission entry of the remaining work. Fails with [`IoError::Os`] with EINVAL if a buffer that is to
    /// be filled is shared.
    pub(super) fn entry(
        &mut self,
        reference: FileReference,
        registered: &BufferPool,
    ) -> Result<squeue::Entry, IoError> {
        match reference {
            FileReference::Descriptor => self.entry_of(types::Fd(self.file.as_raw_fd()), registered),
            FileReference::Slot(slot) => self.entry_of(types::Fixed(slot), registered),
        }
    }

    fn entry_of<F: FileArgument>(
        &mut self,
        file: F,
        registered: &BufferPool,
    ) -> Result<squeue::Entry, IoError> {
        let done = self.done;
        if self.polling {
            let events = if matches!(self.kind, Kind::Send { .. }) { libc::POLLOUT } else { libc::POLLIN };
            return Ok(file.poll(u32::from(events.unsigned_abs())));
        }
        let entry = match &mut self.kind {
            Kind::Read { offset, buffer } => {
                let index = buffer.registration_in(registered);
                let rest = exclusive(buffer, "read")?.get_mut(done..).unwrap_or_default();
                file.read(rest.as_mut_ptr(), transfer_length(rest.len()), *offset + done as u64, index)
            }
            Kind::Write { offset, data, durability } => {
                let index = data.registration_in(registered);
                let rest = &data.as_slice()[done..];
                let flags = if *durability == Durability::Durable { libc::RWF_DSYNC } else { 0 };
                file.write(rest.as_ptr(), transfer_length(rest.len()), *offset + done as u64, index, flags)
            }
            Kind::Sync => file.sync(),
            Kind::Allocate { mode, range } => file.allocate(*mode, *range),
            Kind::Accept => file.accept(),
            Kind::Receive { buffer } => {
                let window = exclusive(buffer, "receive")?;
                file.receive(window.as_mut_ptr(), transfer_length(window.len()))
            }
            Kind::Send { pieces, message, .. } => match pieces.as_slice() {
                [piece] => {
                    let rest = &piece.as_slice()[done..];
                    file.send(rest.as_ptr(), transfer_length(rest.len()))
                }
                _ => file.send_message(&raw const message.get_or_insert_default().fill(pieces, done).header),
            },
            Kind::Wakeup { count } => file.read(count.as_mut_ptr(), 8, 0, None),
            Kind::Over => return Err(IoError::Closed),
        };
        Ok(entry)
    }

    pub(super) fn advance(&mut self, result: i32) -> Step {
        let result = match u32::try_from(result) {
            Ok(count) => Ok(count),
            Err(_) => Err(Errno::from_raw_os_error(-result)),
        };
        if self.polling {
            // Whatever the poll saw, the operation itself returns the error.
            self.polling = false;
            if !matches!(result, Err(Errno::CANCELED)) {
                return Step::Again;
            }
        }
        match result {
            Ok(count) => self.advance_by(count),
            Err(Errno::CANCELED) if matches!(self.kind, Kind::Receive { .. } | Kind::Accept) => {
                let kind = std::mem::replace(&mut self.kind, Kind::Over);
                Step::Finished(Ok(Outcome::of_cancelled(kind)))
            }
            Err(Errno::INTR) => self.retry(Errno::INTR),
            Err(Errno::AGAIN) => {
                self.polling = self.waits_for_peer();
                self.retry(Errno::AGAIN)
            }
            Err(errno) => self.fail(errno),
        }
    }

    fn advance_by(&mut self, count: u32) -> Step {
        let moved = count as usize;
        let (length, is_file) = match &self.kind {
            Kind::Sync | Kind::Allocate { .. } | Kind::Wakeup { .. } | Kind::Over => {
                return Step::Finished(Ok(Outcome::Done));
            }
            Kind::Accept => {
                // A descriptor is never negative, so it fits in `u32`.
                // SAFETY: the kernel has just made this descriptor for this completion, which is handled once.
                let connection = unsafe { OwnedFd::from_raw_fd(count.cast_signed()) };
                return Step::Finished(Ok(Outcome::Connection(connection)));
            }
            Kind::Receive { .. } => return self.give_back(moved),
            Kind::Read { buffer, .. } => (buffer.len(), true),
            Kind::Write { data, .. } => (data.len(), true),
            Kind::Send { length, .. } => (*length, false),
        };
        if moved == 0 {
            // A file that ends early, or a device that takes no more, never changes by waiting.
            return self.fail(if is_file { Errno::IO } else { Errno::PIPE });
        }
        self.retries = 0;
        self.done = if is_file { continue_from(self.done, moved, length) } else { self.done + moved };
        if self.done < length { Step::Again } else { self.give_back(length) }
    }

    fn give_back(&mut self, length: usize) -> Step {
        Step::Finished(Ok(match std::mem::replace(&mut self.kind, Kind::Over) {
            Kind::Read { buffer, .. } | Kind::Receive { buffer } => Outcome::Filled(buffer, length),
            _ => Outcome::Done,
        }))
    }

    fn retry(&mut self, errno: Errno) -> Step {
        self.retries += 1;
        if self.retries > RETRIES_MAX { self.fail(errno) } else { Step::Again }
    }

    fn fail(&self, errno: Errno) -> Step {
        let operation = match &self.kind {
            Kind::Read { .. } => "read",
            Kind::Write { .. } => "write",
            Kind::Sync => "flush",
            Kind::Allocate { mode: AllocateMode::PunchHole, .. } => "punch a hole",
            Kind::Allocate { mode: AllocateMode::ZeroRange, .. } => "zero a range",
            Kind::Accept => "accept",
            Kind::Receive { .. } => "receive",
            Kind::Send { .. } => "send",
            Kind::Wakeup { .. } => "wake up",
            Kind::Over => "repeat",
        };
        Step::Finished(Err(IoError::os(operation, errno)))
    }
}

impl Outcome {
    fn of_cancelled(kind: Kind) -> Self {
        Self::Cancelled(if let Kind::Receive { buffer } = kind { Some(buffer) } else { None })
    }
}

fn exclusive<'buffer>(
    buffer: &'buffer mut Buffer,
    operation: &'static str,
) -> Result<&'buffer mut [u8], IoError> {
    buffer.as_mut_slice().ok_or(IoError::os(operation, Errno::INVAL))
}

/// Returns where a short transfer continues: at a page if that is progress, because direct I/O needs aligned offsets. Repeating
/// a part is harmless.
fn continue_from(done: usize, moved: usize, length: usize) -> usize {
    let reached = done + moved;
    let aligned = reached - reached % PAGE;
    if reached < length && aligned > done { aligned } else { reached }
}

fn transfer_length(length: usize) -> u32 {
    length.min(TRANSFER_MAX) as u32
}

impl Message {
    fn fill(&mut self, pieces: &[Buffer], mut skipped: usize) -> &Self {
        self.pieces.clear();
        for piece in pieces {
            let rest = piece.as_slice().get(skipped..).unwrap_or_default();
            skipped = skipped.saturating_sub(piece.len());
            if !rest.is_empty() {
                self.pieces
                    .push(libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() });
            }
        }
        self.header.msg_iov = self.pieces.as_mut_ptr();
        self.header.msg_iovlen = self.pieces.len() as _;
        self
    }
}

impl Default for Message {
    fn default() -> Self {
        // SAFETY: a message header is plain integers and pointers; all zero means: no name, no pieces, no control data. Its
        // padding differs by libc, so it cannot be written as a literal.
        Self { header: unsafe { std::mem::zeroed() }, pieces: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_direct_transfer_goes_on_at_a_page_and_always_makes_progress() {
        assert_eq!(continue_from(0, 5000, 20_000), 4096);
        assert_eq!(continue_from(4096, 4096, 20_000), 8192);
        assert_eq!(continue_from(4096, 100, 20_000), 4196, "less than a page further: no page to go back to");
        assert_eq!(continue_from(16_384, 3616, 20_000), 20_000, "the end is the end");
    }

    #[test]
    fn a_message_describes_exactly_what_was_not_sent() {
        let pieces = [Buffer::copy_of(b"abc"), Buffer::copy_of(b""), Buffer::copy_of(b"defg")];
        let mut message = Message::default();
        for (sent, lengths) in [(0, vec![3, 4]), (2, vec![1, 4]), (3, vec![4]), (5, vec![2])] {
            message.fill(&pieces, sent);
            let described: Vec<_> = message.pieces.iter().map(|piece| piece.iov_len).collect();
            assert_eq!(described, lengths, "after {sent} bytes");
        }
    }

    #[test]
    fn a_request_that_never_gets_anywhere_fails_in_the_end() {
        let file = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let mut request = Request::sync(file);
        let interrupted = -Errno::INTR.raw_os_error();
        let failed = (0..=RETRIES_MAX).find_map(|_| match request.advance(interrupted) {
            Step::Again => None,
            Step::Finished(result) => Some(result.err()),
        });
        assert_eq!(failed, Some(Some(IoError::os("flush", Errno::INTR))));
    }
}
