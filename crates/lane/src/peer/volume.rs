//! A volume of another host, for the clients that are forwarded there.
//!
//! ```text
//!   a client's request ──► pieces ──► window ──► RpcChannel ══► owner (claims blocks, checks the fence)
//! ```
//! Requests wait while the channel is broken, and are repeated when the owner has restarted: a client gets one answer, whichever
//! process gives it. A request whose client has gone is abandoned. Its calls in flight are not made once the client has connected
//! again anywhere ([`crate::fencing`]).

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::device::{ALIGNMENT, check_range, check_write, push_extent};
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, Geometry, Handle, IoError, IoFuture, ZeroMode,
};
use bytes::Bytes;
use futures_util::future::{Either, join_all, select};
use migration::VolumeId;
use migration::planted::{Bug, broken};

use super::head::{Address, Answered, Operation};
use super::store::{nonsense, pieces};
use super::window::Window;
use super::{Answer, PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel, is_lost};
use crate::clients::Clients;
use crate::fencing::{Always, Changed, FencingToken, Presence};

/// The limit of a request's pieces in flight: others have room beside the largest.
const PIECES_MAX: usize = 4;
/// Pause before an owner that did not report the volume's size is asked again.
const SIZE_INTERVAL: Duration = Duration::from_secs(1);
/// How often a forwarded request checks whether its client is still connected.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(1);

/// A volume of another host.
pub struct PeerVolume {
    me: Weak<Self>,
    channel: Rc<RpcChannel>,
    address: Address,
    geometry: Cell<Geometry>,
    handle: Handle,
    window: Window,
    /// The owner's latest fencing token; `None`: not known yet.
    fence: Cell<Option<FencingToken>>,
    /// The clients that are forwarded to the owner, once they are reported to it.
    clients: RefCell<Option<Rc<Clients>>>,
    told: Cell<u64>,
}

#[derive(Clone)]
enum Asker {
    Client(Rc<dyn Presence>),
    Host(FencingToken),
}

impl PeerVolume {
    /// Makes a device for a volume at the other end of the channel; it takes any range of bytes.
    pub fn new(channel: Rc<RpcChannel>, volume: VolumeId, geometry: Geometry, handle: Handle) -> Rc<Self> {
        Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            channel,
            address: Address::Owner(volume.0),
            geometry: Cell::new(Geometry { alignment: 1, ..geometry }),
            handle,
            window: Window::default(),
            fence: Cell::default(),
            clients: RefCell::default(),
            told: Cell::default(),
        })
    }

    /// Reports the clients that are forwarded from here to the owner, whenever they change or the owner is reached anew.
    pub(crate) fn tell_of(&self, clients: &Rc<Clients>) {
        if self.clients.replace(Some(Rc::clone(clients))).is_some() {
            return;
        }
        let (me, clients) = (Weak::clone(&self.me), Rc::clone(clients));
        let news = Rc::clone(&self.channel.news);
        self.handle.spawn(async move {
            loop {
                let heard = news.times.get();
                let all = clients.everywhere();
                match me.upgrade().filter(|volume| volume.tells()) {
                    Some(volume) => volume.tell(all.encode()),
                    None => return,
                }
                let is_over = || !me.upgrade().is_some_and(|volume| volume.tells());
                let is_new = || is_over() || news.times.get() != heard || clients.everywhere() != all;
                let looks = || is_new().then_some(());
                select(pin!(clients.wait_for(looks)), pin!(news.heard.wait_for(looks))).await;
            }
        });
    }

    /// Resolves when the owner reports a larger size than is known here.
    pub async fn grows(&self) -> u64 {
        loop {
            let known = self.geometry.get().size;
            let (address, operation) = (self.address, Operation::Size { known });
            let question = Question { address, operation, fence: None };
            match self.channel.call(RequestPriority::Control, question, Bytes::new(), None).await {
                Ok(Answer { answered: Answered::Size(size), .. }) if size > known => return size,
                // The owner does not have the volume yet, or has lost it.
                _ => self.handle.sleep(SIZE_INTERVAL).await,
            }
        }
    }

    pub(crate) fn show_size(&self, size: u64) {
        let geometry = self.geometry.get();
        self.geometry.set(Geometry { size: geometry.size.max(size), ..geometry });
    }

    fn tells(&self) -> bool {
        self.clients.borrow().is_some()
    }

    /// Stops reporting clients: the owner has passed the volume on, and knows that none is forwarded.
    pub(crate) fn tell_no_more(&self) {
        if let Some(clients) = self.clients.take() {
            clients.notify();
        }
    }

    fn tell(&self, clients: Vec<u8>) {
        // The clock's time, so that the next lane's numbers are larger.
        let now = u64::try_from(self.handle.now().as_nanos()).unwrap_or(u64::MAX);
        let number = now.max(self.told.get() + 1);
        self.told.set(number);
        let question =
            Question { address: self.address, operation: Operation::Clients { number }, fence: None };
        // The result does not matter: the report arrives, or a restarted owner gets a new one.
        drop(self.channel.call(RequestPriority::Control, question, clients.into(), None));
    }

    /// Asks the owner to change the volume for a local client. Checks at each call that the client is connected.
    pub(crate) async fn ask_for_client(
        &self,
        presence: Rc<dyn Presence>,
        change: Change,
    ) -> Result<(), IoError> {
        let client = Asker::Client(Rc::clone(&presence));
        self.while_there(&*presence, self.make(client, change)).await.map(drop)
    }

    pub(crate) async fn relay(&self, fence: FencingToken, change: Change) -> Result<Changed, IoError> {
        self.make(Asker::Host(fence), change).await
    }

    /// Runs a request while its client is connected.
    pub(crate) async fn while_there<T>(
        &self,
        presence: &dyn Presence,
        asked: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        let mut asked = pin!(asked);
        loop {
            match select(asked.as_mut(), self.handle.sleep(PRESENCE_INTERVAL)).await {
                Either::Left((result, _)) => return result,
                Either::Right(_) if presence.is_there() => {}
                Either::Right(_) => return Err(IoError::Closed),
            }
        }
    }

    /// Announces a new client to the owner; resolves as [`crate::Volume`]'s own method does, with the present fencing token.
    pub(crate) async fn attach(&self) -> Result<FencingToken, IoError> {
        loop {
            let question = Question { address: self.address, operation: Operation::Attach, fence: None };
            match self.channel.call(RequestPriority::Control, question, Bytes::new(), None).await {
                Ok(Answer { answered: Answered::Fenced(fence), .. }) => {
                    self.fence.set(Some(fence));
                    return Ok(fence);
                }
                Ok(_) => return Err(nonsense()),
                // It may be another version of the program after a restart.
                Err(error) if is_lost(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn make(&self, asker: Asker, change: Change) -> Result<Changed, IoError> {
        check_write(&self.geometry.get(), change.range())?;
        match change {
            Change::Write(offset, data, durability) if broken(Bug::ClaimsAtEachHost) => {
                let (start, whole) = self.whole_blocks(offset, &data).await?;
                self.ask_in_pieces(&asker, Change::Write(start, whole, durability)).await
            }
            change => self.ask_in_pieces(&asker, change).await,
        }
    }

    /// Returns the blocks that a write touches, with the write in them. Only the planted bug assembles blocks here.
    async fn whole_blocks(&self, offset: u64, data: &Buffer) -> Result<(u64, Buffer), IoError> {
        let (alignment, size) = (u64::from(ALIGNMENT), self.geometry.get().size);
        let (start, end) = (offset - offset % alignment, offset + data.len() as u64);
        let end = end.next_multiple_of(alignment).min(size);
        let mut whole = self.read_pieces(start, Buffer::zeroed((end - start) as usize)).await?;
        let place = (offset - start) as usize..(offset - start) as usize + data.len();
        let target = whole.as_mut_slice().and_then(|bytes| bytes.get_mut(place)).ok_or_else(nonsense)?;
        target.copy_from_slice(data.as_slice());
        Ok((start, whole))
    }

    async fn ask_in_pieces(&self, asker: &Asker, change: Change) -> Result<Changed, IoError> {
        match change {
            Change::Write(offset, data, durability) => {
                let durable = durability == Durability::Durable;
                let refused = Cell::new(None);
                let written = in_turns(data.len(), async |start, length| {
                    let operation = Operation::Write { offset: offset + start as u64, durable };
                    let payload = Bytes::from_owner(super::store::Payload(data.slice(start, length)));
                    if let Changed::Refused(now) = self.ask_for(asker, operation, payload).await? {
                        refused.set(Some(now));
                    }
                    Ok(())
                });
                written.await?;
                Ok(refused.get().map_or(Changed::Done, Changed::Refused))
            }
            Change::Discard(ByteRange { offset, length }) => {
                self.ask_for(asker, Operation::Discard { offset, length }, Bytes::new()).await
            }
            Change::Zero(ByteRange { offset, length }, mode, durability) => {
                let keep_allocated = mode == ZeroMode::KeepAllocated;
                let durable = durability == Durability::Durable;
                let operation = Operation::WriteZeroes { offset, length, keep_allocated, durable };
                self.ask_for(asker, operation, Bytes::new()).await
            }
        }
    }

    async fn ask_for(&self, asker: &Asker, operation: Operation, payload: Bytes) -> Result<Changed, IoError> {
        loop {
            let permit = self.window.enter(payload.len()).await;
            let fence = match asker {
                // N.B. at the very moment of sending: a change with a token was then sent for a client that was connected after
                // the raise of that token.
                Asker::Client(presence) if !presence.is_there() => return Err(IoError::Closed),
                Asker::Client(_) => self.fence.get(),
                Asker::Host(fence) => Some(*fence),
            };
            let question = Question { address: self.address, operation, fence };
            let called = self.channel.call(RequestPriority::Awaited, question, payload.clone(), Some(permit));
            match called.await {
                Ok(Answer { answered: Answered::Fenced(now), .. }) => match asker {
                    Asker::Host(_) => return Ok(Changed::Refused(now)),
                    Asker::Client(_) if fence == Some(now) => return Err(nonsense()),
                    Asker::Client(_) => self.fence.set(Some(now)),
                },
                Ok(_) => return Ok(Changed::Done),
                Err(error) if is_lost(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends an operation that changes nothing; `bytes` is the largest size of the answer.
    async fn ask(&self, operation: Operation, bytes: usize) -> Result<Answer, IoError> {
        loop {
            let permit = self.window.enter(bytes).await;
            let question = Question { address: self.address, operation, fence: None };
            let called = self.channel.call(RequestPriority::Awaited, question, Bytes::new(), Some(permit));
            match called.await {
                Err(error) if is_lost(&error) => {}
                answer => return answer,
            }
        }
    }

    async fn read_pieces(&self, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        let length = buffer.len();
        let buffer = RefCell::new(buffer);
        let read = in_turns(length, async |start, length| {
            let asked = Operation::Read {
                offset: offset + start as u64,
                length: u32::try_from(length).unwrap_or(u32::MAX),
            };
            let answer = self.ask(asked, length).await?;
            let mut buffer = buffer.borrow_mut();
            let target = buffer.as_mut_slice().and_then(|bytes| bytes.get_mut(start..start + length));
            let target = target.filter(|_| answer.payload.len() == length).ok_or_else(nonsense)?;
            // N.B. at once: the answer holds credit that the other pieces may wait for.
            target.copy_from_slice(&answer.payload);
            Ok(())
        });
        read.await?;
        Ok(buffer.into_inner())
    }

    async fn describe(&self, range: ByteRange) -> Result<Vec<Extent>, IoError> {
        let mut extents = Vec::new();
        let mut offset = range.offset;
        while offset < range.end() {
            let asked = Operation::Allocation { offset, length: range.end() - offset };
            let Answered::Extents(known) = self.ask(asked, 0).await?.answered else {
                return Err(nonsense());
            };
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
    }
}

impl BlockDevice for PeerVolume {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry.get(), ByteRange::new(offset, buffer.len() as u64))?;
            self.read_pieces(offset, buffer).await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.ask_for_client(Rc::new(Always), change))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move { self.ask(Operation::Flush, 0).await.map(drop) })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            check_range(&self.geometry.get(), range)?;
            self.describe(range).await
        })
    }
}

impl Drop for PeerVolume {
    fn drop(&mut self) {
        if let Some(clients) = self.clients.take() {
            self.tell(Vec::new());
            clients.notify();
        }
    }
}

/// Carries out each piece of a request, a few at a time. Awaits all that have begun: a piece in flight must not count as ended.
async fn in_turns(
    length: usize,
    piece: impl AsyncFn(usize, usize) -> Result<(), IoError>,
) -> Result<(), IoError> {
    if length <= PAYLOAD_BYTES_MAX {
        return if length == 0 { Ok(()) } else { piece(0, length).await };
    }
    let (todo, failed) = (RefCell::new(pieces(length)), Cell::new(None));
    let turn = || async {
        while failed.get().is_none() {
            let next = todo.borrow_mut().next();
            let Some((start, length)) = next else { return };
            if let Err(error) = piece(start, length).await {
                failed.set(Some(error));
            }
        }
    };
    join_all((0..PIECES_MAX).map(|_| turn())).await;
    failed.get().map_or(Ok(()), Err)
}
