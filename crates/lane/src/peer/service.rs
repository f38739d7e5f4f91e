//! Carries out what a peer asks for, on the stores and volumes that it may use.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;

use block::{BlockDevice, BufferPool, ByteRange, Change, Durability, Handle, IoError, ZeroMode};
use bytes::Bytes;
use chronicle::{Generation, ReplicaOf};
use futures_util::future::{Either, select};
use migration::HostId;
use migration::planted::{Bug, broken};

use super::head::{Address, Answered, EXTENTS_MAX, Operation};
use super::store::Payload;
use super::window::WINDOW_BYTES;
use super::{Capabilities, PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel};
use crate::clients::{ByHost, Way};
use crate::copies_elsewhere::Learner;
use crate::fencing::{Changed, FencingToken};
use crate::filling::FillingStore;
use crate::shared_storage::{LeasedImage, Secret};
use crate::signal::Signal;
use crate::stack::{Origin, Route, Volume};

/// Calls of one peer that are carried out at a time; more wait. Enough for a disk to be busy, and few enough that what
/// they hold of memory stays within what the channel lets through.
const CALLS_MAX: usize = 1024;

/// Bytes of changes to a volume that are held for a peer beside what the channel lets through: whatever a volume waits for, it
/// keeps nothing of the channel that others need. As much as a peer sends ([`super::window`]); of one that sends more the rest
/// keeps its credit.
const SET_ASIDE_BYTES: u64 = WINDOW_BYTES;

/// Bytes that are described for one call: the peer asks for the rest.
const DESCRIBE_BYTES_MAX: u64 = 1 << 30;

/// Something that a peer may use.
#[derive(Clone)]
struct Offered {
    device: Rc<dyn BlockDevice>,
    /// The volume whose device it is, as its clients see it, and the host that they are at; `None`: it is a store.
    volume: Option<(Rc<Volume>, HostId)>,
}

/// What a peer may use, and how.
pub struct Service {
    handle: Handle,
    buffers: BufferPool,
    devices: RefCell<BTreeMap<Address, Offered>>,
    /// What the peer has said of the clients that it leads to volumes here.
    ways: RefCell<BTreeMap<Address, Way>>,
    /// Those of them that may be leased.
    leased: RefCell<BTreeMap<Address, Rc<LeasedImage>>>,
    /// Those of them that may be handed over with blocks missing.
    filling: RefCell<BTreeMap<Address, Rc<FillingStore>>>,
    /// What takes note of copies that the peer knows, of volumes that come from there.
    learners: RefCell<BTreeMap<Address, Rc<Learner>>>,
    /// How large the peer knows volumes to be that it offers to clients.
    followers: RefCell<BTreeMap<Address, Rc<Cell<u64>>>>,
    /// Replicas that are not to be changed, and whom to tell that somebody wants it.
    held: RefCell<BTreeMap<Address, Rc<dyn Fn()>>>,
    /// Calls of the peer's present process that are under way.
    under_way: RefCell<Rc<Cell<usize>>>,
    /// Bytes that are held of changes to volumes, without credit.
    set_aside: Rc<Cell<u64>>,
    /// Those of its former ones.
    left_behind: RefCell<Vec<Rc<Cell<usize>>>>,
    ended: Signal,
    /// Nothing more is to be heard of the peer.
    is_over: Cell<bool>,
    over: Signal,
}

impl Service {
    /// Makes a service that offers nothing yet.
    pub fn new(handle: Handle, buffers: BufferPool) -> Rc<Self> {
        Rc::new(Self {
            handle,
            buffers,
            devices: RefCell::default(),
            ways: RefCell::default(),
            leased: RefCell::default(),
            filling: RefCell::default(),
            learners: RefCell::default(),
            followers: RefCell::default(),
            held: RefCell::default(),
            under_way: RefCell::default(),
            set_aside: Rc::default(),
            left_behind: RefCell::default(),
            ended: Signal::default(),
            is_over: Cell::default(),
            over: Signal::default(),
        })
    }

    /// Offers a device under an address.
    pub fn offer(&self, address: Address, device: Rc<dyn BlockDevice>) {
        self.devices.borrow_mut().insert(address, Offered { device, volume: None });
    }

    /// Offers a volume that is here, or leads on from here, to the clients of this peer.
    pub fn offer_volume(&self, volume: Rc<Volume>, peer: HostId) {
        let (address, device) = (Address::Owner(volume.id().0), volume.device());
        self.ways.borrow_mut().remove(&address);
        self.devices.borrow_mut().insert(address, Offered { device, volume: Some((volume, peer)) });
    }

    /// Lends the image of an address to a peer that asks for it.
    pub(crate) fn offer_lease(&self, address: Address, image: Rc<LeasedImage>) {
        self.leased.borrow_mut().insert(address, image);
    }

    /// Has the peer tell what will be missing of the replica of an address.
    pub fn offer_filling(&self, address: Address, store: Rc<FillingStore>) {
        self.filling.borrow_mut().insert(address, store);
    }

    /// Has the peer tell what it knows of copies elsewhere of a volume, under an address, also when that is the volume's own.
    pub fn offer_learner(&self, address: Address, learner: Rc<Learner>) {
        self.learners.borrow_mut().insert(address, learner);
    }

    /// Offers it no longer: calls that come from now on fail. Those under way go on.
    pub fn withdraw(&self, address: Address) {
        self.devices.borrow_mut().remove(&address);
        self.leased.borrow_mut().remove(&address);
        self.filling.borrow_mut().remove(&address);
        self.let_change(address);
    }

    /// Lets nobody change a replica, nor lease it: such calls wait, and `wanted` is called for each that comes.
    ///
    /// **N.B.** While it is promised, or may be: what a promise is kept by is what was there when it was given.
    pub(crate) fn hold_changes(&self, address: Address, wanted: Rc<dyn Fn()>) {
        self.held.borrow_mut().insert(address, wanted);
    }

    /// Lets calls that wait, and later ones, change a replica again, if it is still offered.
    pub(crate) fn let_change(&self, address: Address) {
        if self.held.borrow_mut().remove(&address).is_some() {
            self.ended.notify();
        }
    }

    /// The peer is another process now. Its calls wait until those of the former one have ended: a write that was given
    /// up with that process must not land on top of a newer one (hard cases 4 and 12).
    pub(super) fn restarted(&self) {
        self.ways.borrow_mut().clear();
        self.followers.borrow_mut().clear();
        self.left_behind.borrow_mut().push(self.under_way.take());
    }

    /// Hears nothing more of the peer; resolves when all that it has asked for has been answered.
    pub async fn end(&self) {
        self.is_over.set(true);
        self.over.notify();
        let has_ended = || self.under_way.borrow().get() == 0 && self.left_behind().is_empty();
        self.ended.wait_for(|| has_ended().then_some(())).await;
    }

    /// What is heard next, unless nothing more is to be.
    pub(super) async fn unless_ended<T>(&self, heard: impl Future<Output = Option<T>>) -> Option<T> {
        let is_over = self.over.wait_for(|| self.is_over.get().then_some(()));
        match select(pin!(heard), pin!(is_over)).await {
            Either::Left((heard, _)) => heard,
            Either::Right(_) => None,
        }
    }

    /// The peer says how many clients it leads here.
    fn clients_are(&self, address: Address, number: u64, said: &[u8]) -> Result<Answered, IoError> {
        let offered = self.devices.borrow().get(&address).cloned();
        let Some(Offered { volume: Some((volume, peer)), .. }) = offered else {
            return Err(IoError::Closed);
        };
        let mut ways = self.ways.borrow_mut();
        if said.is_empty() {
            ways.remove(&address);
            return Ok(Answered::Done);
        }
        let clients = ByHost::decode(said, peer).ok_or(IoError::Unsupported)?;
        ways.entry(address).or_insert_with(|| volume.clients().way(peer)).says(number, clients);
        Ok(Answered::Done)
    }

    /// What a call that comes now has to wait for: the calls of former processes.
    fn left_behind(&self) -> Vec<Rc<Cell<usize>>> {
        let mut left_behind = self.left_behind.borrow_mut();
        left_behind.retain(|calls| calls.get() > 0);
        left_behind.clone()
    }

    /// Begins to carry out a call as soon as there are few enough, and answers it when it has ended.
    pub(super) async fn carry_out(
        self: &Rc<Self>,
        channel: Rc<RpcChannel>,
        call: u64,
        question: Question,
        payload: Bytes,
        credit: Box<dyn Any + Send>,
    ) {
        let Question { address, operation, .. } = question;
        if let Operation::Clients { number } = operation {
            let result = self.clients_are(address, number, &payload);
            channel.answer(RequestPriority::Control, call, result, Bytes::new());
            return;
        }
        let is_held = keeps_promises()
            && (matches!(operation, Operation::Lease { .. } | Operation::Missing { .. })
                || operation.is_change());
        let wanted = self.held.borrow().get(&address).filter(|_| is_held).cloned();
        if let Some(wanted) = wanted {
            wanted();
        }
        self.ended.wait_for(|| (self.under_way.borrow().get() < CALLS_MAX).then_some(())).await;
        let offered = self.offered(address);
        if offered.is_none() && !self.learners.borrow().contains_key(&address) {
            channel.answer(RequestPriority::Control, call, Err(IoError::Closed), Bytes::new());
            return;
        }
        let under_way = Rc::clone(&*self.under_way.borrow());
        let volume = offered.and_then(|offered| offered.volume).map(|(volume, _)| volume);
        if let (Operation::Attach, Some(volume)) = (operation, &volume) {
            let (service, volume) = (Rc::clone(self), Rc::clone(volume));
            // N.B. among no calls, so that none waits for it: it waits for changes of clients of this host, and those may
            // have to come back here by way of the peer.
            self.handle.spawn(async move {
                let result = attach(&volume).await;
                if Rc::ptr_eq(&under_way, &*service.under_way.borrow()) {
                    channel.answer(RequestPriority::Control, call, result, Bytes::new());
                }
            });
            return;
        }
        if let (Operation::Size { known }, Some(volume)) = (operation, &volume) {
            let (service, volume) = (Rc::clone(self), Rc::clone(volume));
            let follower = self.follower(&volume, address, known);
            // N.B. among no calls: it is answered when the volume has grown, if it ever does.
            self.handle.spawn(async move {
                let grown = service.unless_ended(async { Some(volume.larger_than(&follower).await) }).await;
                if let Some(size) = grown
                    && Rc::ptr_eq(&under_way, &*service.under_way.borrow())
                {
                    channel.answer(RequestPriority::Control, call, Ok(Answered::Size(size)), Bytes::new());
                }
            });
            return;
        }
        under_way.set(under_way.get() + 1);
        let credit = match address {
            Address::Owner(_) => self.set_aside(payload.len(), credit),
            Address::Replica(_)
            | Address::Reservoir(_)
            | Address::ReservoirInBackground(_)
            | Address::Copies(_) => Held::Credit { _credit: credit },
        };
        let left_behind = self.left_behind();
        let service = Rc::clone(self);
        self.handle.spawn(async move {
            // Here, for messages of a handover do not wait.
            let have_ended = || left_behind.iter().all(|calls| calls.get() == 0).then_some(());
            service.ended.wait_for(have_ended).await;
            if is_held {
                let may_change = || (!service.held.borrow().contains_key(&address)).then_some(());
                service.ended.wait_for(may_change).await;
            }
            // Looked for only now: it may be a volume's own by the time that it may be changed.
            let result = match (operation, service.offered(address)) {
                (Operation::Copy { .. } | Operation::CopiesTold, _) => {
                    service.copy(address, operation, &payload).await
                }
                (_, None) => Err(IoError::Closed),
                (Operation::Lease { .. } | Operation::LeaseIsHeld, _) => {
                    service.grant_lease(address, operation).await
                }
                (Operation::Missing { is_base, is_last }, _) => {
                    service.missing(address, is_base, is_last, &payload).await
                }
                (_, Some(Offered { volume: Some((volume, _)), .. })) if operation.is_change() => {
                    service
                        .change(&volume, origin(question, channel.capabilities()), operation, payload)
                        .await
                }
                (_, Some(Offered { device, .. })) => service.apply(&device, operation, payload).await,
            };
            // Only now may the peer send as much again to a replica: its speed is that of the store.
            drop(credit);
            let (result, payload) = match result {
                Ok((answered, payload)) => (Ok(answered), payload),
                Err(error) => (Err(error), Bytes::new()),
            };
            let priority = match (payload.is_empty(), address) {
                (true, _) => RequestPriority::Control,
                (false, Address::Owner(_) | Address::Reservoir(_)) => RequestPriority::Awaited,
                (false, Address::Replica(_) | Address::ReservoirInBackground(_) | Address::Copies(_)) => {
                    RequestPriority::Bulk
                }
            };
            // N.B. a former process is not answered: its successor may have given a call of its own that number.
            if Rc::ptr_eq(&under_way, &*service.under_way.borrow()) {
                channel.answer(priority, call, result, payload);
            }
            under_way.set(under_way.get() - 1);
            service.ended.notify();
        });
    }

    /// The peer offers a volume to clients with a size that it knows; what it knew before counts no more.
    fn follower(&self, volume: &Volume, address: Address, known: u64) -> Rc<Cell<u64>> {
        let follower = Rc::new(Cell::new(known));
        self.followers.borrow_mut().insert(address, Rc::clone(&follower));
        volume.is_followed_by(&follower);
        follower
    }

    fn offered(&self, address: Address) -> Option<Offered> {
        self.devices.borrow().get(&address).cloned()
    }

    /// Gives the credit of a change to a volume back while that waits, if there is room for it.
    fn set_aside(&self, bytes: usize, credit: Box<dyn Any + Send>) -> Held {
        let (held, bytes) = (&self.set_aside, bytes as u64);
        if held.get() + bytes > SET_ASIDE_BYTES {
            return Held::Credit { _credit: credit };
        }
        held.set(held.get() + bytes);
        Held::Room { held: Rc::clone(held), bytes }
    }

    async fn grant_lease(
        &self,
        address: Address,
        operation: Operation,
    ) -> Result<(Answered, Bytes), IoError> {
        let leased = self.leased.borrow().get(&address).cloned();
        let image = leased.ok_or(IoError::Unsupported)?;
        match operation {
            Operation::Lease { answer } => image.grant_lease(Secret(answer)).await?,
            _ => image.is_locked().await?,
        }
        Ok((Answered::Done, Bytes::new()))
    }

    /// The peer says what will be missing.
    async fn missing(
        &self,
        address: Address,
        is_base: bool,
        is_last: bool,
        runs: &[u8],
    ) -> Result<(Answered, Bytes), IoError> {
        let store = self.filling.borrow().get(&address).cloned();
        store.ok_or(IoError::Unsupported)?.tell(is_base, is_last, runs).await?;
        Ok((Answered::Done, Bytes::new()))
    }

    /// The peer tells of a copy at a third host.
    async fn copy(
        &self,
        address: Address,
        operation: Operation,
        runs: &[u8],
    ) -> Result<(Answered, Bytes), IoError> {
        let learner = self.learners.borrow().get(&address).cloned().ok_or(IoError::Closed)?;
        match operation {
            Operation::Copy { host, departure, generation } => {
                let of = ReplicaOf::Host { host, departure };
                learner.learn(of, Generation(generation), runs).await?;
            }
            _ => learner.all_told(),
        }
        Ok((Answered::Done, Bytes::new()))
    }

    async fn apply(
        &self,
        device: &Rc<dyn BlockDevice>,
        operation: Operation,
        payload: Bytes,
    ) -> Result<(Answered, Bytes), IoError> {
        match operation {
            Operation::Read { offset, length } => {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                if length > PAYLOAD_BYTES_MAX {
                    return Err(IoError::Unsupported);
                }
                let read = device.read(offset, self.buffers.take(length)).await?;
                return Ok((Answered::Read, Bytes::from_owner(Payload(read))));
            }
            Operation::Flush => device.flush().await?,
            Operation::Allocation { offset, length } => {
                let length = length.min(DESCRIBE_BYTES_MAX);
                let extents = device.allocation(range(offset, length)?).await?;
                let known = extents.iter().take(EXTENTS_MAX);
                let known = known.map(|extent| (extent.range.length, extent.kind.into())).collect();
                return Ok((Answered::Extents(known), Bytes::new()));
            }
            _ => device.change(self.change_asked_for(operation, &payload)?).await?,
        }
        Ok((Answered::Done, Bytes::new()))
    }

    async fn change(
        &self,
        volume: &Volume,
        origin: Origin<'_>,
        operation: Operation,
        payload: Bytes,
    ) -> Result<(Answered, Bytes), IoError> {
        let change = self.change_asked_for(operation, &payload)?;
        let answered = match volume.change(origin, change).await? {
            Changed::Done => Answered::Done,
            Changed::Refused(now) => Answered::Fenced(now),
        };
        Ok((answered, Bytes::new()))
    }

    fn change_asked_for(&self, operation: Operation, payload: &[u8]) -> Result<Change, IoError> {
        let durability = |durable| if durable { Durability::Durable } else { Durability::Volatile };
        match operation {
            Operation::Write { offset, durable } if payload.len() <= PAYLOAD_BYTES_MAX => {
                let mut data = self.buffers.take(payload.len());
                data.fill_from(payload);
                Ok(Change::Write(offset, data, durability(durable)))
            }
            Operation::Discard { offset, length } => Ok(Change::Discard(range(offset, length)?)),
            Operation::WriteZeroes { offset, length, keep_allocated, durable } => {
                let mode = if keep_allocated { ZeroMode::KeepAllocated } else { ZeroMode::MayUnmap };
                Ok(Change::Zero(range(offset, length)?, mode, durability(durable)))
            }
            _ => Err(IoError::Unsupported),
        }
    }
}

/// Tells whether what is promised is kept from being changed; all three planted bugs let it be, for either rule would cover
/// for the other.
fn keeps_promises() -> bool {
    let bugs = [Bug::PromiseNotWithdrawn, Bug::TryNotCounted, Bug::PromiseOfAnotherIncarnation];
    !bugs.into_iter().any(broken)
}

/// What a call that is carried out holds.
enum Held {
    /// Credit of the channel.
    Credit { _credit: Box<dyn Any + Send> },
    /// Room that is set aside.
    Room { held: Rc<Cell<u64>>, bytes: u64 },
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Self::Room { held, bytes } = self {
            held.set(held.get() - *bytes);
        }
    }
}

/// A client of the peer has come.
async fn attach(volume: &Volume) -> Result<Answered, IoError> {
    let fence = volume.attach(Route::AnotherHost).await?;
    Ok(fence.map_or(Answered::Done, Answered::Fenced))
}

/// What stands behind a change that a peer asks for. One that knows fencing tokens and was not told of any bears one that nobody
/// has: it is told.
fn origin(question: Question, capabilities: Capabilities) -> Origin<'static> {
    match (question.fence, capabilities) {
        (Some(fence), _) => Origin::Host(fence),
        (
            None,
            Capabilities::FencingTokens | Capabilities::Parts | Capabilities::Copies | Capabilities::Sizes,
        ) => Origin::Host(FencingToken::default()),
        (None, Capabilities::Calls | Capabilities::Unknown) => Origin::OldHost,
    }
}

/// A range that a peer names: it may be anything.
fn range(offset: u64, length: u64) -> Result<ByteRange, IoError> {
    match offset.checked_add(length) {
        Some(_) => Ok(ByteRange::new(offset, length)),
        None => Err(IoError::OutOfRange { offset, length, size: 0 }),
    }
}
