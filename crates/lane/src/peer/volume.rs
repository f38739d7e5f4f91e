//! A volume at the host that owns it, for the clients that are led there.
//!
//! ```text
//!   a client's request ──► pieces ──► window ──► RpcChannel ══► owner (claims blocks, checks the fence)
//!                            └ an owner that takes whole blocks only: put together here, under claims of this host
//! ```
//! It waits for as long as the channel is broken, and asks again when the owner has restarted: clients wait for one answer,
//! whoever gives it. A request whose client has gone is given up: what of it is under way is not made once that client
//! has come back anywhere ([`crate::fencing`]).

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::device::{ALIGNMENT, check_range, check_write, push_extent};
use block::filter::Aligner;
use block::{
    BlockDevice, Buffer, BufferPool, ByteRange, Change, Durability, Extent, Geometry, Handle, IoError,
    IoFuture, ZeroMode,
};
use bytes::Bytes;
use futures_util::future::{Either, join_all, select};
use migration::VolumeId;
use migration::planted::{Bug, broken};

use super::head::{Address, Answered, Operation};
use super::store::{nonsense, pieces};
use super::window::Window;
use super::{Answer, Capabilities, PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel, is_lost};
use crate::clients::Clients;
use crate::fencing::{Always, Changed, FencingToken, Presence};

/// Pieces of one request that are under way at a time: others have room beside the largest.
const PIECES_MAX: usize = 4;
/// How long the owner is left alone that has said nothing of the volume's size.
const SIZE_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is looked whether a client still waits for what the owner does not answer.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(1);

/// A volume of another host.
pub struct PeerVolume {
    me: Weak<Self>,
    channel: Rc<RpcChannel>,
    address: Address,
    geometry: Cell<Geometry>,
    handle: Handle,
    window: Window,
    /// The fencing token that the owner told last; `None`: nothing.
    fence: Cell<Option<FencingToken>>,
    /// Claims of this host's clients, for an owner that takes whole blocks only.
    aligner: Aligner,
    /// Those who are led to the owner, once that is told of them.
    clients: RefCell<Option<Rc<Clients>>>,
    /// Number of what the owner was told last of them.
    told: Cell<u64>,
}

/// Whom a change is made for.
#[derive(Clone)]
enum Asker {
    /// A client of this host.
    Client(Rc<dyn Presence>),
    /// Another host, which was told of this fencing token.
    Host(FencingToken),
}

impl PeerVolume {
    /// Makes a device of a volume that is at the other end of the channel; it takes any range of bytes.
    pub fn new(
        channel: Rc<RpcChannel>,
        volume: VolumeId,
        geometry: Geometry,
        handle: Handle,
        buffers: BufferPool,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            channel,
            address: Address::Owner(volume.0),
            geometry: Cell::new(Geometry { alignment: 1, ..geometry }),
            aligner: Aligner::new(buffers, handle.clone()),
            handle,
            window: Window::default(),
            fence: Cell::default(),
            clients: RefCell::default(),
            told: Cell::default(),
        })
    }

    /// Tells the owner from now on who its clients are that are led there from here, each time that this changes or the
    /// owner is heard of anew.
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

    /// Resolves when the owner says that the volume is larger than is known here; never, if it does not know how.
    pub async fn grows(&self) -> u64 {
        loop {
            if self.channel.known_capabilities().await >= Capabilities::Sizes {
                let known = self.geometry.get().size;
                let (address, operation) = (self.address, Operation::Size { known });
                let question = Question { address, operation, fence: None };
                let asked = self.channel.call(RequestPriority::Control, question, Bytes::new(), None);
                match asked.await {
                    Ok(Answer { answered: Answered::Size(size), .. }) if size > known => return size,
                    // It does not have the volume yet, or any more.
                    _ => self.handle.sleep(SIZE_INTERVAL).await,
                }
            } else {
                self.handle.sleep(SIZE_INTERVAL).await;
            }
        }
    }

    /// What is offered from here on.
    pub(crate) fn show_size(&self, size: u64) {
        let geometry = self.geometry.get();
        self.geometry.set(Geometry { size: geometry.size.max(size), ..geometry });
    }

    fn tells(&self) -> bool {
        self.clients.borrow().is_some()
    }

    /// Tells the owner no more: the volume has gone from there, and it knows that nobody is led there.
    pub(crate) fn tell_no_more(&self) {
        if let Some(clients) = self.clients.take() {
            clients.notify();
        }
    }

    fn tell(&self, clients: Vec<u8>) {
        // Who is not heard of yet is told then.
        if self.channel.capabilities() < Capabilities::Parts {
            return;
        }
        // The lane after this one goes on from here: it has the same clock.
        let now = u64::try_from(self.handle.now().as_nanos()).unwrap_or(u64::MAX);
        let number = now.max(self.told.get() + 1);
        self.told.set(number);
        let question =
            Question { address: self.address, operation: Operation::Clients { number }, fence: None };
        // What becomes of it is of no interest: it arrives, or another process is told anew.
        drop(self.channel.call(RequestPriority::Control, question, clients.into(), None));
    }

    /// Has the owner change the volume for a client of this host, if that is there each time that the owner is asked.
    pub(crate) async fn ask_for_client(
        &self,
        presence: Rc<dyn Presence>,
        change: Change,
    ) -> Result<(), IoError> {
        let client = Asker::Client(Rc::clone(&presence));
        self.while_there(&*presence, self.make(client, change)).await.map(drop)
    }

    /// Has the owner change the volume for another host, which was told of this fencing token.
    pub(crate) async fn relay(&self, fence: FencingToken, change: Change) -> Result<Changed, IoError> {
        self.make(Asker::Host(fence), change).await
    }

    /// Tells whether what was asked for may be asked for elsewhere, although it was not answered: an owner that knows no fencing tokens
    /// would make it whenever it comes. One that has not been heard of was asked for nothing.
    pub(crate) fn may_be_left(&self) -> bool {
        self.channel.capabilities() != Capabilities::Calls
    }

    /// Asks for something as long as a client is there to be answered.
    ///
    /// An owner that knows no fencing tokens is asked to the end: it would make what is given up whenever it comes.
    pub(crate) async fn while_there<T>(
        &self,
        presence: &dyn Presence,
        asked: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        let mut asked = pin!(asked);
        loop {
            match select(asked.as_mut(), self.handle.sleep(PRESENCE_INTERVAL)).await {
                Either::Left((result, _)) => return result,
                Either::Right(_) if presence.is_there() || !self.may_be_left() => {}
                Either::Right(_) => return Err(IoError::Closed),
            }
        }
    }

    /// Tells the owner that a client has come; resolves as [`crate::Volume`]'s own does, and says which fencing token is the present one.
    pub(crate) async fn attach(&self) -> Result<Option<FencingToken>, IoError> {
        loop {
            if self.channel.known_capabilities().await < Capabilities::FencingTokens {
                return Ok(None);
            }
            let question = Question { address: self.address, operation: Operation::Attach, fence: None };
            match self.channel.call(RequestPriority::Control, question, Bytes::new(), None).await {
                Ok(Answer { answered: Answered::Fenced(fence), .. }) => {
                    self.fence.set(Some(fence));
                    return Ok(Some(fence));
                }
                // The owner, further away, knows nothing of them.
                Ok(_) => return Ok(None),
                // It may be another program now.
                Err(error) if is_lost(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn make(&self, asker: Asker, change: Change) -> Result<Changed, IoError> {
        check_write(&self.geometry.get(), change.range())?;
        if self.takes_any_range().await {
            self.ask_in_pieces(&asker, change).await
        } else {
            self.ask_in_blocks(asker, change).await
        }
    }

    /// Tells whether the owner claims parts of blocks for clients of other hosts, too.
    async fn takes_any_range(&self) -> bool {
        // The planted bug has each host claim blocks for its own clients, as owners of before wanted it.
        self.channel.known_capabilities().await >= Capabilities::Parts && !broken(Bug::ClaimsAtEachHost)
    }

    /// Asks for a change as it is.
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

    /// Asks for a change in whole blocks, under claims of this host.
    async fn ask_in_blocks(&self, asker: Asker, change: Change) -> Result<Changed, IoError> {
        let Some(volume) = self.me.upgrade() else { return Err(IoError::Closed) };
        let blocks = Rc::new(Blocks { volume, asker, refused: Cell::default() });
        let aligned = self.aligner.over(Rc::clone(&blocks) as Rc<dyn BlockDevice>);
        let result = aligned.change(change).await;
        match blocks.refused.get() {
            Some(now) => Ok(Changed::Refused(now)),
            None => result.map(|()| Changed::Done),
        }
    }

    async fn ask_for(&self, asker: &Asker, operation: Operation, payload: Bytes) -> Result<Changed, IoError> {
        loop {
            let permit = self.window.enter(payload.len()).await;
            let fence = match asker {
                // N.B. at the very moment that it is sent: what is asked for with a fencing token is asked for by a client that was
                // there after that fencing token was raised.
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

    /// Asks for what changes nothing; `bytes` is what the answer may bring.
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

    /// Reads any range that the owner takes.
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
            // N.B. at once, whatever the other pieces do: the answer has credit that they may wait for.
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

    /// The owner, for a request that it may want in whole blocks.
    fn in_blocks(&self) -> Result<impl BlockDevice + use<>, IoError> {
        let volume = self.me.upgrade().ok_or(IoError::Closed)?;
        let asker = Asker::Client(Rc::new(Always));
        Ok(self.aligner.over(Rc::new(Blocks { volume, asker, refused: Cell::default() })))
    }
}

impl BlockDevice for PeerVolume {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry.get(), ByteRange::new(offset, buffer.len() as u64))?;
            if self.takes_any_range().await {
                self.read_pieces(offset, buffer).await
            } else {
                self.in_blocks()?.read(offset, buffer).await
            }
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
            if self.takes_any_range().await {
                self.describe(range).await
            } else {
                self.in_blocks()?.allocation(range).await
            }
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

/// The owner as a device of whole blocks, for one request.
struct Blocks {
    volume: Rc<PeerVolume>,
    asker: Asker,
    /// The owner's fencing token, if it refused a change that bears another one.
    refused: Cell<Option<FencingToken>>,
}

impl BlockDevice for Blocks {
    fn geometry(&self) -> Geometry {
        Geometry { alignment: ALIGNMENT, ..self.volume.geometry.get() }
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.volume.read_pieces(offset, buffer))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match self.volume.ask_in_pieces(&self.asker, change).await? {
                Changed::Done => Ok(()),
                Changed::Refused(now) => {
                    self.refused.set(Some(now));
                    Err(IoError::Closed)
                }
            }
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.volume.flush()
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(self.volume.describe(range))
    }
}

/// Has each piece of a request carried out, a few at a time; all that have begun to their end, for what is still under
/// way must not be taken for over.
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
