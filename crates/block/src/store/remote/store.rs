//! An export as a device: splits requests as the server demands, orders overlapping changes, and stops waiting at a deadline.
//!
//! ```text
//!   change ─► its own task: claim on the range ► room in the ledger ► link, until it is answered
//!     └────── waits for the task, at most `answer_deadline` for each command
//! ```
//!
//! An abandoned change continues while the server may be working on it, and keeps its claim: it cannot overtake a later write to
//! the same range. An abandoned change that was not sent yet is dropped.

mod growth;

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use futures_channel::oneshot;
use futures_util::future::{Either, select};
use futures_util::stream::{StreamExt, TryStreamExt, iter};
use nbd_protocol::{NbdUri, allocation, transmission_flag};
use rustix::io::Errno;

use super::image::RemoteImage;
use super::in_flight::Answer;
use super::link::{Fate, Link, pieces};
use super::request::{DESCRIBE_LENGTH_MAX, Request, ZERO_PAYLOAD_MAX, zero_length_max};
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{
    ALIGNMENT, BlockDevice, ByteRange, Durability, Extent, ExtentKind, Geometry, IoFuture, ZeroMode,
    push_extent,
};
use crate::engine::Engine;
use crate::error::IoError;
use crate::executor::Handle;
use crate::growth::{GrowingGeometry, Growth};
use crate::range_lock::{Claim, RangeLock};
use crate::store::image::Access;

const PIECES_IN_FLIGHT_MAX: usize = 8;

/// Extents described one by one; the rest is reported as data, which is always allowed. Bounds the memory of an answer, and
/// the number of queries.
const EXTENTS_MAX: usize = 65_536;

/// A device whose bytes are on an NBD server.
pub struct RemoteStore {
    uri: NbdUri,
    geometry: GrowingGeometry,
    engine: Rc<dyn Engine>,
    handle: Handle,
    answer_deadline: std::time::Duration,
    link: Rc<Link>,
    changes: RangeLock,
    zeroes: Cell<bool>,
}

impl RemoteStore {
    /// Makes a store that serves `image` through `engine`, by tasks of `handle`.
    pub fn new(image: RemoteImage, engine: Rc<dyn Engine>, handle: Handle) -> Self {
        let size = image.size();
        let RemoteImage { dialer, lines, .. } = image;
        let is_writable = dialer.access == Access::ReadWrite;
        let zeroes = transmission_flag::SEND_WRITE_ZEROES | transmission_flag::SEND_TRIM;
        let geometry = GrowingGeometry::new(Geometry {
            size,
            alignment: ALIGNMENT,
            read_only: !is_writable,
            discards: is_writable && lines.terms().has(zeroes),
        });
        let (uri, answer_deadline) = (dialer.uri.clone(), dialer.options.answer_deadline);
        let link = Link::start(*dialer, *lines, &handle, &engine);
        Self {
            uri,
            geometry,
            engine,
            handle,
            answer_deadline,
            link,
            changes: RangeLock::new(),
            zeroes: Cell::new(true),
        }
    }

    /// Returns the address of the export.
    pub fn uri(&self) -> &NbdUri {
        &self.uri
    }

    async fn in_time<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        match select(pin!(work), self.handle.sleep(self.answer_deadline)).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => {
                tracing::warn!(uri = %self.uri, operation, "a remote store does not answer");
                Err(IoError::os(operation, Errno::TIMEDOUT))
            }
        }
    }

    async fn flush_in_time(&self) -> Result<(), IoError> {
        self.in_time("flush", self.link.flush(&Fate::default())).await
    }

    async fn read_piece(&self, range: ByteRange, buffer: Buffer) -> Result<Buffer, IoError> {
        let request = Request::Read(range);
        let fate = Fate::default();
        match self.in_time("read", self.link.perform(&request, Some(buffer), &fate)).await? {
            Answer::Data(buffer) => Ok(buffer),
            _ => Err(IoError::os("read", Errno::IO)),
        }
    }

    async fn read_in_pieces(&self, offset: u64, mut buffer: Buffer) -> Result<Buffer, IoError> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        let target = buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?;
        let reads = pieces(range, u64::from(self.link.terms().payload_max)).map(|piece| async move {
            let read = self.read_piece(piece, self.engine.buffers().take(piece.length as usize)).await?;
            Ok::<_, IoError>((piece, read))
        });
        let mut reads = iter(reads).buffered(PIECES_IN_FLIGHT_MAX);
        while let Some((piece, read)) = reads.try_next().await? {
            let start = (piece.offset - offset) as usize;
            target[start..start + read.len()].copy_from_slice(read.as_slice());
        }
        Ok(buffer)
    }

    async fn write_in_pieces(
        &self,
        offset: u64,
        data: &Buffer,
        durability: Durability,
    ) -> Result<(), IoError> {
        let range = ByteRange::new(offset, data.len() as u64);
        let writes = pieces(range, u64::from(self.link.terms().payload_max)).map(|piece| {
            let data = data.slice((piece.offset - offset) as usize, piece.length as usize);
            self.make("write", Change::Write(piece.offset, data, durability))
        });
        iter(writes).buffer_unordered(PIECES_IN_FLIGHT_MAX).try_collect().await
    }

    async fn zero(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> Result<(), IoError> {
        self.geometry.check_write(range)?;
        self.zero_checked(range, mode, durability).await
    }

    async fn zero_checked(
        &self,
        range: ByteRange,
        mode: ZeroMode,
        durability: Durability,
    ) -> Result<(), IoError> {
        if range.length == 0 {
            return Ok(());
        }
        if self.zeroes.get() {
            let zeroes = pieces(range, zero_length_max(self.link.terms()))
                .map(|piece| self.make("zero", Change::Zero(piece, mode, durability)));
            let zeroed = iter(zeroes).buffer_unordered(PIECES_IN_FLIGHT_MAX).try_collect::<()>().await;
            match zeroed {
                Err(IoError::Os { errno: Errno::OPNOTSUPP, .. }) => {
                    tracing::debug!(uri = %self.uri, "the server cannot zero after all: zeroes are written");
                    self.zeroes.set(false);
                }
                result => return result,
            }
        }
        let zeroes = Buffer::zeroed(ZERO_PAYLOAD_MAX.min(self.link.terms().payload_max) as usize);
        let writes = pieces(range, zeroes.len() as u64).map(|piece| {
            let data = zeroes.slice(0, piece.length as usize);
            self.make("write", Change::Write(piece.offset, data, durability))
        });
        iter(writes).buffer_unordered(PIECES_IN_FLIGHT_MAX).try_collect().await
    }

    async fn make(&self, operation: &'static str, change: Change) -> Result<(), IoError> {
        let (link, changes) = (Rc::clone(&self.link), self.changes.clone());
        let fate = Fate::default();
        let seen = fate.clone();
        let work = async move {
            let _claimed = changes.claim(change.range(), Claim::Exclusive).await;
            link.room().await?;
            let durability = change.durability();
            link.perform(&Request::Change(change), None, &seen).await?;
            let is_durable = link.terms().has(transmission_flag::SEND_FUA);
            if durability == Durability::Durable && !is_durable {
                link.flush(&seen).await?;
            }
            Ok(())
        };
        let (mut sender, receiver) = oneshot::channel();
        self.handle.spawn(async move {
            let mut work = pin!(work);
            let done = poll_fn(|context| {
                if let Poll::Ready(result) = work.as_mut().poll(context) {
                    return Poll::Ready(Some(result));
                }
                let is_given_up = sender.poll_canceled(context).is_ready() && !fate.is_out();
                if is_given_up { Poll::Ready(None) } else { Poll::Pending }
            });
            if let Some(result) = done.await {
                let _ = sender.send(result);
            }
        });
        self.in_time(operation, async { receiver.await.map_err(|_| IoError::Closed)? }).await
    }

    async fn describe(&self, range: ByteRange) -> Result<Vec<Extent>, IoError> {
        let mut extents = Vec::new();
        let mut rest = range;
        while rest.length > 0 && extents.len() < EXTENTS_MAX {
            let question = ByteRange::new(rest.offset, rest.length.min(u64::from(DESCRIBE_LENGTH_MAX)));
            let request = Request::Describe(question);
            let fate = Fate::default();
            let told = match self.in_time("describe", self.link.perform(&request, None, &fate)).await {
                Ok(Answer::Extents(told)) => told,
                Ok(_) | Err(IoError::Unsupported) => break,
                Err(error) => return Err(error),
            };
            // Each extent covers something, so this ends.
            for nbd_protocol::reply::Extent { length, state } in told {
                let length = length.min(rest.length);
                push_extent(&mut extents, ByteRange::new(rest.offset, length), kind_of(state));
                rest = ByteRange::new(rest.offset + length, rest.length - length);
            }
        }
        push_extent(&mut extents, rest, ExtentKind::Data);
        Ok(extents)
    }
}

fn kind_of(state: u32) -> ExtentKind {
    match (state & allocation::HOLE != 0, state & allocation::ZERO != 0) {
        (true, true) => ExtentKind::Hole,
        (false, true) => ExtentKind::Zero,
        (_, false) => ExtentKind::Data,
    }
}

impl BlockDevice for RemoteStore {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let range = ByteRange::new(offset, buffer.len() as u64);
            self.geometry.check(range)?;
            if buffer.is_empty() {
                return Ok(buffer);
            }
            if !buffer.is_unique() {
                return Err(IoError::os("read", Errno::INVAL));
            }
            if range.length <= u64::from(self.link.terms().payload_max) {
                return self.read_piece(range, buffer).await;
            }
            self.read_in_pieces(offset, buffer).await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        match change {
            Change::Write(offset, data, durability) => Box::pin(async move {
                self.geometry.check_write(ByteRange::new(offset, data.len() as u64))?;
                let data = self.kept(data);
                self.write_in_pieces(offset, &data, durability).await
            }),
            // By zeroing: a trim frees space, but need not zero.
            Change::Discard(range) => Box::pin(self.zero(range, ZeroMode::MayUnmap, Durability::Volatile)),
            Change::Zero(range, mode, durability) => Box::pin(self.zero(range, mode, durability)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if self.geometry.get().read_only {
                return Ok(());
            }
            self.flush_in_time().await
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.geometry.check(range)?;
            self.describe(range).await
        })
    }

    fn growth(&self) -> Option<&dyn Growth> {
        Some(self)
    }
}

impl RemoteStore {
    /// Returns data to keep until the next flush: copies a small part of a large buffer.
    fn kept(&self, data: Buffer) -> Buffer {
        if data.is_empty() || data.memory_length() <= 2 * data.len().next_multiple_of(ALIGNMENT as usize) {
            return data;
        }
        let mut copy = self.engine.buffers().take(data.len());
        copy.fill_from(data.as_slice());
        copy
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        self.link.close();
    }
}
