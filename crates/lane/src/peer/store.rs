//! A store of another host as a device, for copying a volume there.
//!
//! Its requests wait as long as the channel is broken; the core limits a guest's wait for a replica to `mirror_wait_max` (design
//! §5.7). When the peer has restarted, its calls fail, because the core must know what was lost. The core limits how much is in
//! flight.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use block::device::{check_range, check_write, push_extent};
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, ExtentKind, Geometry, IoError, IoFuture,
    ZeroMode,
};
use bytes::Bytes;
use chronicle::LayeredBitmap;
use futures_util::future::{join_all, try_join_all};
use migration::filling::encode_runs;

use super::head::{Address, Answered, GivenWay, Kind, Operation};
use super::{Answer, PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel};

/// A block device of another host.
pub struct PeerStore {
    channel: Rc<RpcChannel>,
    address: Address,
    geometry: Geometry,
    priority: RequestPriority,
}

impl PeerStore {
    /// Makes a device for this address at the other end of the channel, with this geometry.
    pub fn new(
        channel: Rc<RpcChannel>,
        address: Address,
        geometry: Geometry,
        priority: RequestPriority,
    ) -> Self {
        Self { channel, address, geometry, priority }
    }

    fn questions(&self, change: Change) -> (ByteRange, Vec<(Operation, Bytes)>) {
        match change {
            Change::Write(offset, data, durability) => {
                let durable = durability == Durability::Durable;
                let piece = |(start, length)| {
                    let operation = Operation::Write { offset: offset + start as u64, durable };
                    (operation, Bytes::from_owner(Payload(data.slice(start, length))))
                };
                (ByteRange::new(offset, data.len() as u64), pieces(data.len()).map(piece).collect())
            }
            Change::Discard(range) => {
                let operation = Operation::Discard { offset: range.offset, length: range.length };
                (range, vec![(operation, Bytes::new())])
            }
            Change::Zero(range, mode, durability) => {
                let ByteRange { offset, length } = range;
                let keep_allocated = mode == ZeroMode::KeepAllocated;
                let durable = durability == Durability::Durable;
                let operation = Operation::WriteZeroes { offset, length, keep_allocated, durable };
                (range, vec![(operation, Bytes::new())])
            }
        }
    }

    /// Lets requests without a payload precede queued data.
    fn priority_of(&self, payload: &Bytes) -> RequestPriority {
        if payload.is_empty() { self.priority.min(RequestPriority::Mirrored) } else { self.priority }
    }

    fn call(
        &self,
        priority: RequestPriority,
        operation: Operation,
        payload: Bytes,
    ) -> impl Future<Output = Result<Answer, IoError>> + use<> {
        let question = Question { address: self.address, operation, fence: None };
        self.channel.call(priority, question, payload, None)
    }

    async fn make(&self, change: Change) -> Result<(), IoError> {
        let (range, questions) = self.questions(change);
        check_write(&self.geometry, range)?;
        let call = |(operation, payload): (Operation, Bytes)| {
            self.call(self.priority_of(&payload), operation, payload)
        };
        // All calls are awaited: a call in flight must not count as ended.
        let made = join_all(questions.into_iter().map(call)).await;
        made.into_iter().try_for_each(|made| made.map(drop))
    }

    pub(crate) async fn tell_missing(&self, missing: &LayeredBitmap, is_base: bool) -> Result<(), IoError> {
        let pieces = encode_runs(missing.runs(), PAYLOAD_BYTES_MAX);
        let last = pieces.len().saturating_sub(1);
        for (index, piece) in pieces.into_iter().enumerate() {
            // N.B. in sequence: the last one says that the set is complete.
            let operation = Operation::Missing { is_base: is_base && index == 0, is_last: index == last };
            self.call(RequestPriority::Mirrored, operation, piece.into()).await?;
        }
        Ok(())
    }

    /// Orders what guests of the replica's disk may lose to chunks, and returns what that does; `None`: chunks do not give way.
    ///
    /// # Errors
    /// [`IoError`]: the other host cannot be asked, or its replica is gone.
    pub async fn give_way(&self, impact: Option<pacer::Impact>) -> Result<GivenWay, IoError> {
        let impact_percent = impact.map_or(0, pacer::Impact::in_percent);
        let operation = Operation::GiveWay { impact_percent };
        match self.call(RequestPriority::Control, operation, Bytes::new()).await?.answered {
            Answered::GivenWay(given_way) => Ok(given_way),
            _ => Err(nonsense()),
        }
    }

    async fn done(&self, operation: Operation) -> Result<(), IoError> {
        let priority = self.priority_of(&Bytes::new());
        self.call(priority, operation, Bytes::new()).await.map(drop)
    }

    async fn read_piece(&self, offset: u64, length: usize) -> Result<Answer, IoError> {
        let asked = Operation::Read { offset, length: u32::try_from(length).unwrap_or(u32::MAX) };
        let answer = self.call(self.priority, asked, Bytes::new()).await?;
        if answer.payload.len() == length { Ok(answer) } else { Err(nonsense()) }
    }
}

impl BlockDevice for PeerStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry, ByteRange::new(offset, buffer.len() as u64))?;
            let length = buffer.len();
            let buffer = RefCell::new(buffer);
            let read = pieces(length).map(async |(start, length)| {
                let answer = self.read_piece(offset + start as u64, length).await?;
                // N.B. at once: the answer holds credit that the other pieces may wait for.
                let mut buffer = buffer.borrow_mut();
                let target = buffer.as_mut_slice().and_then(|bytes| bytes.get_mut(start..start + length));
                target.ok_or_else(nonsense)?.copy_from_slice(&answer.payload);
                Ok::<(), IoError>(())
            });
            try_join_all(read).await?;
            Ok(buffer.into_inner())
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.make(change))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.done(Operation::Flush))
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            check_range(&self.geometry, range)?;
            let mut extents = Vec::new();
            let mut offset = range.offset;
            while offset < range.end() {
                let asked = Operation::Allocation { offset, length: range.end() - offset };
                let answer = self.call(self.priority, asked, Bytes::new()).await?;
                let Answered::Extents(known) = answer.answered else { return Err(nonsense()) };
                let began = offset;
                for (length, kind) in known {
                    let length = length.min(range.end() - offset);
                    push_extent(&mut extents, ByteRange::new(offset, length), kind.into());
                    offset += length;
                }
                if offset == began {
                    return Err(nonsense());
                }
            }
            Ok(extents)
        })
    }
}

pub(super) struct Payload(pub(super) Buffer);

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl From<Kind> for ExtentKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Data => Self::Data,
            Kind::Zero => Self::Zero,
            Kind::Hole => Self::Hole,
        }
    }
}

impl From<ExtentKind> for Kind {
    fn from(kind: ExtentKind) -> Self {
        match kind {
            ExtentKind::Data => Self::Data,
            ExtentKind::Zero => Self::Zero,
            ExtentKind::Hole => Self::Hole,
        }
    }
}

/// Returns start and length of each piece of a request, each up to the largest payload.
pub(super) fn pieces(length: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..length).step_by(PAYLOAD_BYTES_MAX);
    starts.map(move |start| (start, PAYLOAD_BYTES_MAX.min(length - start)))
}

pub(super) fn nonsense() -> IoError {
    IoError::os("understand the other host's answer", rustix::io::Errno::PROTO)
}
