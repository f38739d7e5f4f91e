//! A store, or a volume, of another host as a device.
//!
//! It waits for as long as the line is broken. Whoever cannot wait says so: the core lets no guest wait for a replica
//! longer than `mirror_wait_max` (design §5.7). When the peer has restarted, a replica's calls fail, for the core must
//! know what was lost; a volume's owner is asked again: its clients wait for one answer, whoever gives it.

use std::future::Future;
use std::rc::Rc;

use block::device::{check_range, check_write, push_extent};
use block::{
    BlockDevice, Buffer, ByteRange, Durability, Extent, ExtentKind, Geometry, IoError, IoFuture, ZeroMode,
};
use bytes::Bytes;
use futures_util::future::{join_all, try_join_all};

use super::head::{Address, Answered, Kind, Operation};
use super::{Answer, Conversation, PAYLOAD_BYTES_MAX, Urgency, is_lost};

/// A device of another host.
pub struct PeerStore {
    conversation: Rc<Conversation>,
    address: Address,
    geometry: Geometry,
    urgency: Urgency,
}

impl PeerStore {
    /// Makes a device of what has this address at the other end of the conversation, and is like this.
    pub fn new(
        conversation: Rc<Conversation>,
        address: Address,
        geometry: Geometry,
        urgency: Urgency,
    ) -> Self {
        Self { conversation, address, geometry, urgency }
    }

    /// Asks, and asks an owner again that has restarted.
    fn call(
        &self,
        urgency: Urgency,
        operation: Operation,
        payload: Bytes,
    ) -> impl Future<Output = Result<Answer, IoError>> + use<> {
        let (conversation, address) = (Rc::clone(&self.conversation), self.address);
        let first = conversation.call(urgency, address, operation, payload.clone());
        async move {
            let mut result = first.await;
            while matches!(address, Address::Owner(_)) && result.as_ref().is_err_and(is_lost) {
                result = conversation.call(urgency, address, operation, payload.clone()).await;
            }
            result
        }
    }

    async fn done(&self, operation: Operation) -> Result<(), IoError> {
        // Small, so it goes ahead of whatever is queued.
        let urgency = self.urgency.min(Urgency::Mirrored);
        self.call(urgency, operation, Bytes::new()).await.map(drop)
    }

    async fn read_piece(&self, offset: u64, length: usize) -> Result<Answer, IoError> {
        let asked = Operation::Read { offset, length: u32::try_from(length).unwrap_or(u32::MAX) };
        let answer = self.call(self.urgency, asked, Bytes::new()).await?;
        if answer.payload.len() == length { Ok(answer) } else { Err(nonsense()) }
    }
}

impl BlockDevice for PeerStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry, ByteRange::new(offset, buffer.len() as u64))?;
            let pieces =
                pieces(buffer.len()).map(|(start, length)| self.read_piece(offset + start as u64, length));
            let answers = try_join_all(pieces).await?;
            let Some(target) = buffer.as_mut_slice() else { return Err(nonsense()) };
            for (piece, answer) in target.chunks_mut(PAYLOAD_BYTES_MAX).zip(&answers) {
                piece.copy_from_slice(&answer.payload);
            }
            Ok(buffer)
        })
    }

    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_write(&self.geometry, ByteRange::new(offset, data.len() as u64))?;
            let durable = durability == Durability::Durable;
            let writes = pieces(data.len()).map(|(start, length)| {
                let operation = Operation::Write { offset: offset + start as u64, durable };
                let payload = Bytes::from_owner(Payload(data.slice(start, length)));
                self.call(self.urgency, operation, payload)
            });
            // All of them to their end: what is still under way must not be taken for over.
            join_all(writes.collect::<Vec<_>>()).await.into_iter().try_for_each(|written| written.map(drop))
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.done(Operation::Flush))
    }

    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_write(&self.geometry, range)?;
            self.done(Operation::Discard { offset: range.offset, length: range.length }).await
        })
    }

    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_write(&self.geometry, range)?;
            let ByteRange { offset, length } = range;
            let keep_allocated = mode == ZeroMode::KeepAllocated;
            let durable = durability == Durability::Durable;
            self.done(Operation::WriteZeroes { offset, length, keep_allocated, durable }).await
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            check_range(&self.geometry, range)?;
            let mut extents = Vec::new();
            let mut offset = range.offset;
            while offset < range.end() {
                let asked = Operation::Allocation { offset, length: range.end() - offset };
                let answer = self.call(self.urgency, asked, Bytes::new()).await?;
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

/// A buffer as the owner of a payload's bytes.
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

/// Start and length of each piece of a request, as large as a payload may be.
fn pieces(length: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..length).step_by(PAYLOAD_BYTES_MAX);
    starts.map(move |start| (start, PAYLOAD_BYTES_MAX.min(length - start)))
}

/// The answer does not fit the question.
fn nonsense() -> IoError {
    IoError::os("understand the other host's answer", rustix::io::Errno::PROTO)
}
