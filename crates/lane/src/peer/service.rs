//! Carries out a peer's calls on the stores and volumes that are offered to it.

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

use super::arriving::ArrivingChunks;
use super::head::{Address, Answered, EXTENTS_MAX, Operation};
use super::store::Payload;
use super::window::WINDOW_BYTES;
use super::{PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel};
use crate::clients::{ByHost, Way};
use crate::copies_elsewhere::Learner;
use crate::fencing::Changed;
use crate::filling::FillingStore;
use crate::shared_storage::{LeasedImage, Secret};
use crate::signal::Signal;
use crate::stack::{Origin, Route, Volume};

/// The limit of concurrent calls of one peer; more wait. Enough to keep a disk busy, and few enough that their memory stays
/// within the channel's credit.
const CALLS_MAX: usize = 1024;

/// The limit of bytes of waiting volume changes that are held for a peer without credit. So a waiting volume keeps no credit
/// of the channel that others need. It equals what a correct peer sends ([`super::window`]); a peer that sends more keeps
/// its credit in use.
const SET_ASIDE_BYTES: u64 = WINDOW_BYTES;

/// Bytes that one call describes at most: the peer asks again for more.
const DESCRIBE_BYTES_MAX: u64 = 1 << 30;

#[derive(Clone)]
struct Offered {
    device: Rc<dyn BlockDevice>,
    /// The volume as its clients see it, and their host; `None`: the device is a store.
    volume: Option<(Rc<Volume>, HostId)>,
}

/// The devices that are offered to a peer, and the peer's calls.
pub struct Service {
    handle: Handle,
    buffers: BufferPool,
    devices: RefCell<BTreeMap<Address, Offered>>,
    ways: RefCell<BTreeMap<Address, Way>>,
    leased: RefCell<BTreeMap<Address, Rc<LeasedImage>>>,
    filling: RefCell<BTreeMap<Address, Rc<FillingStore>>>,
    /// The chunks of replicas, which give way to guests.
    chunks: RefCell<BTreeMap<Address, Rc<ArrivingChunks>>>,
    /// The receivers of missing sets of copies, for volumes that come from the peer.
    learners: RefCell<BTreeMap<Address, Rc<Learner>>>,
    /// The sizes that the peer knows of volumes which it offers to clients.
    followers: RefCell<BTreeMap<Address, Rc<Cell<u64>>>>,
    /// Replicas that must not change, with the callback for each change that waits.
    held: RefCell<BTreeMap<Address, Rc<dyn Fn()>>>,
    /// The number of calls in flight of the peer's present process.
    under_way: RefCell<Rc<Cell<usize>>>,
    set_aside: Rc<Cell<u64>>,
    /// The same of its former processes.
    left_behind: RefCell<Vec<Rc<Cell<usize>>>>,
    ended: Signal,
    /// Whether the peer's messages are ignored from now on.
    is_over: Cell<bool>,
    over: Signal,
}

impl Service {
    /// Makes a service that offers no devices yet.
    pub fn new(handle: Handle, buffers: BufferPool) -> Rc<Self> {
        Rc::new(Self {
            handle,
            buffers,
            devices: RefCell::default(),
            ways: RefCell::default(),
            leased: RefCell::default(),
            filling: RefCell::default(),
            chunks: RefCell::default(),
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

    /// Offers a device at an address.
    pub fn offer(&self, address: Address, device: Rc<dyn BlockDevice>) {
        self.devices.borrow_mut().insert(address, Offered { device, volume: None });
    }

    /// Offers a volume that this host owns or forwards to, to the clients of this peer.
    pub fn offer_volume(&self, volume: Rc<Volume>, peer: HostId) {
        let (address, device) = (Address::Owner(volume.id().0), volume.device());
        self.ways.borrow_mut().remove(&address);
        self.devices.borrow_mut().insert(address, Offered { device, volume: Some((volume, peer)) });
    }

    pub(crate) fn offer_lease(&self, address: Address, image: Rc<LeasedImage>) {
        self.leased.borrow_mut().insert(address, image);
    }

    /// Accepts the peer's missing-set updates for the replica at an address.
    pub fn offer_filling(&self, address: Address, store: Rc<FillingStore>) {
        self.filling.borrow_mut().insert(address, store);
    }

    /// Lets chunks for the replica at an address give way to guests.
    pub fn offer_chunks(&self, address: Address, chunks: Rc<ArrivingChunks>) {
        self.chunks.borrow_mut().insert(address, chunks);
    }

    /// Accepts the peer's missing sets of copies of a volume at other hosts, at an address; also if that is the volume's own.
    pub fn offer_learner(&self, address: Address, learner: Rc<Learner>) {
        self.learners.borrow_mut().insert(address, learner);
    }

    /// Withdraws the offer: later calls fail. Those in flight continue.
    pub fn withdraw(&self, address: Address) {
        self.devices.borrow_mut().remove(&address);
        self.leased.borrow_mut().remove(&address);
        self.filling.borrow_mut().remove(&address);
        if let Some(chunks) = self.chunks.borrow_mut().remove(&address) {
            chunks.set_impact(None);
        }
        self.let_change(address);
    }

    /// Holds changes and leases of a replica: such calls wait, and `wanted` is called for each.
    ///
    /// **N.B.** While the replica is promised, or may be: a promise refers to the replica's content when it was given.
    pub(crate) fn hold_changes(&self, address: Address, wanted: Rc<dyn Fn()>) {
        self.held.borrow_mut().insert(address, wanted);
    }

    /// Releases held calls; the replica may be changed again, if it is still offered.
    pub(crate) fn let_change(&self, address: Address) {
        if self.held.borrow_mut().remove(&address).is_some() {
            self.ended.notify();
        }
    }

    /// Notes that the peer has restarted. Its calls wait until those of the former process have ended: an abandoned write of that
    /// process must not land on top of a newer one (hard cases 4 and 12).
    pub(super) fn restarted(&self) {
        self.ways.borrow_mut().clear();
        self.followers.borrow_mut().clear();
        self.left_behind.borrow_mut().push(self.under_way.take());
        self.ended.notify();
    }

    /// Takes none of the peer's messages from this call on; the future resolves when all calls that were taken have been answered.
    pub async fn end(&self) {
        self.is_over.set(true);
        self.over.notify();
        let has_ended = || self.under_way.borrow().get() == 0 && self.left_behind().is_empty();
        self.ended.wait_for(|| has_ended().then_some(())).await;
    }

    /// Returns the next item of `heard`, unless the service has ended.
    ///
    /// **N.B.** The end is looked at first: a busy peer has a next message ready at any time, and no call may begin after the
    /// end.
    pub(super) async fn unless_ended<T>(&self, heard: impl Future<Output = Option<T>>) -> Option<T> {
        let is_over = self.over.wait_for(|| self.is_over.get().then_some(()));
        match select(pin!(is_over), pin!(heard)).await {
            Either::Left(_) => None,
            Either::Right((heard, _)) => heard,
        }
    }

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

    /// Returns whether these are the calls of the peer's present process.
    fn is_present(&self, calls: &Rc<Cell<usize>>) -> bool {
        Rc::ptr_eq(calls, &*self.under_way.borrow())
    }

    fn left_behind(&self) -> Vec<Rc<Cell<usize>>> {
        let mut left_behind = self.left_behind.borrow_mut();
        left_behind.retain(|calls| calls.get() > 0);
        left_behind.clone()
    }

    pub(super) async fn carry_out(
        self: &Rc<Self>,
        channel: Rc<RpcChannel>,
        call: u64,
        question: Question,
        payload: Bytes,
        credit: Box<dyn Any + Send>,
    ) {
        let Question { operation, .. } = question;
        let (address, chunks) = self.replica_of(question.address);
        if let Operation::Clients { number } = operation {
            let result = self.clients_are(address, number, &payload);
            channel.answer(RequestPriority::Control, call, result, Bytes::new());
            return;
        }
        if let Operation::GiveWay { impact_percent } = operation {
            let given_way = chunks.ok_or(IoError::Unsupported).map(|chunks| {
                chunks.set_impact(pacer::Impact::percent(impact_percent));
                Answered::GivenWay(chunks.given_way())
            });
            channel.answer(RequestPriority::Control, call, given_way, Bytes::new());
            return;
        }
        let chunks = chunks.filter(|_| matches!(operation, Operation::Write { .. }));
        let arrived = chunks.as_ref().map(|chunks| chunks.arrived(payload.len() as u64));
        let is_held = keeps_promises()
            && (matches!(operation, Operation::Lease { .. } | Operation::Missing { .. })
                || operation.is_change());
        let wanted = self.held.borrow().get(&address).filter(|_| is_held).cloned();
        if let Some(wanted) = wanted {
            wanted();
        }
        // N.B. counted before the wait: a service that ends waits for each call that it has taken.
        let under_way = UnderWay::begin(self);
        self.ended.wait_for(|| (self.under_way.borrow().get() <= CALLS_MAX).then_some(())).await;
        let offered = self.offered(address);
        if offered.is_none() && !self.learners.borrow().contains_key(&address) {
            channel.answer(RequestPriority::Control, call, Err(IoError::Closed), Bytes::new());
            return;
        }
        let volume = offered.and_then(|offered| offered.volume).map(|(volume, _)| volume);
        if let (Operation::Attach, Some(volume)) = (operation, &volume) {
            let (service, volume) = (Rc::clone(self), Rc::clone(volume));
            // N.B. does not count as a call, so that no call waits for it. It waits for changes of local clients, and those may
            // have to come back here by way of the peer.
            let process = under_way.process();
            self.handle.spawn(async move {
                let result = attach(&volume).await;
                if service.is_present(&process) {
                    channel.answer(RequestPriority::Control, call, result, Bytes::new());
                }
            });
            return;
        }
        if let (Operation::Size { known }, Some(volume)) = (operation, &volume) {
            let (service, volume) = (Rc::clone(self), Rc::clone(volume));
            let follower = self.follower(&volume, address, known);
            // N.B. does not count as a call: it is answered when the volume has grown, perhaps never.
            let process = under_way.process();
            self.handle.spawn(async move {
                let grown = service.unless_ended(async { Some(volume.larger_than(&follower).await) }).await;
                if let Some(size) = grown
                    && service.is_present(&process)
                {
                    channel.answer(RequestPriority::Control, call, Ok(Answered::Size(size)), Bytes::new());
                }
            });
            return;
        }
        let credit = match address {
            Address::Owner(_) => self.set_aside(payload.len(), credit),
            // N.B. guests' writes use the same credit, and wait for none of these chunks.
            Address::Replica(_) if chunks.as_ref().is_some_and(|chunks| chunks.is_paced()) => {
                self.set_aside(payload.len(), credit)
            }
            Address::Replica(_)
            | Address::ReplicaInBulk(_)
            | Address::Reservoir(_)
            | Address::ReservoirInBackground(_)
            | Address::Copies(_) => Held::Credit { _credit: credit },
        };
        let left_behind = self.left_behind();
        let service = Rc::clone(self);
        self.handle.spawn(async move {
            // Inside the task, because messages of a handover do not wait.
            let have_ended = || left_behind.iter().all(|calls| calls.get() == 0).then_some(());
            service.ended.wait_for(have_ended).await;
            if is_held {
                let may_change = || (!service.held.borrow().contains_key(&address)).then_some(());
                service.ended.wait_for(may_change).await;
            }
            // Looked up only now: the address may belong to a volume by the time that the change may be made.
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
                    service.change(&volume, origin(question), operation, payload).await
                }
                (Operation::Write { offset, durable }, Some(Offered { device, .. })) if chunks.is_some() => {
                    let write = (offset, durability(durable), payload);
                    service.write_chunk(&device, chunks.as_ref(), &under_way.calls, write).await
                }
                (_, Some(Offered { device, .. })) => {
                    let applied = service.apply(&device, operation, payload);
                    service.unless_left_behind(address, &under_way.calls, applied).await
                }
            };
            // N.B. after the write: the credit paces the peer by the replica's store.
            drop((credit, arrived));
            let (result, payload) = match result {
                Ok((answered, payload)) => (Ok(answered), payload),
                Err(error) => (Err(error), Bytes::new()),
            };
            let priority = match (payload.is_empty(), address) {
                (true, _) => RequestPriority::Control,
                (false, Address::Owner(_) | Address::Reservoir(_)) => RequestPriority::Awaited,
                (
                    false,
                    Address::Replica(_)
                    | Address::ReplicaInBulk(_)
                    | Address::ReservoirInBackground(_)
                    | Address::Copies(_),
                ) => RequestPriority::Bulk,
            };
            // N.B. a former process is not answered: its successor may have used the same number for its own call.
            if service.is_present(&under_way.calls) {
                channel.answer(priority, call, result, payload);
            }
            drop(under_way);
        });
    }

    /// Carries out a call. A read of a reservoir ends when the peer has restarted: it may wait long for its turn, and the calls of
    /// the new process wait for it.
    async fn unless_left_behind<T>(
        &self,
        address: Address,
        under_way: &Rc<Cell<usize>>,
        applied: impl Future<Output = Result<T, IoError>>,
    ) -> Result<T, IoError> {
        if !matches!(address, Address::Reservoir(_) | Address::ReservoirInBackground(_)) {
            return applied.await;
        }
        let is_of_former = || (!self.is_present(under_way)).then_some(());
        match select(pin!(applied), pin!(self.ended.wait_for(is_of_former))).await {
            Either::Left((applied, _)) => applied,
            Either::Right(_) => Err(IoError::Closed),
        }
    }

    /// Writes a chunk in pieces, each when the disk's pacer admits it. A chunk that waits ends when the peer has restarted or this
    /// service ends: the copy sends it again, or is over.
    async fn write_chunk(
        &self,
        device: &Rc<dyn BlockDevice>,
        chunks: Option<&Rc<ArrivingChunks>>,
        under_way: &Rc<Cell<usize>>,
        (offset, durability, payload): (u64, Durability, Bytes),
    ) -> Result<(Answered, Bytes), IoError> {
        let (Some(chunks), true) = (chunks, payload.len() <= PAYLOAD_BYTES_MAX) else {
            return Err(IoError::Unsupported);
        };
        let is_of_former = || !self.is_present(under_way);
        let is_useless = || (is_of_former() || self.is_over.get()).then_some(());
        let mut start = 0;
        while start < payload.len() {
            let most = chunks.piece_bytes_max().and_then(|bytes| usize::try_from(bytes).ok());
            let piece = payload.slice(start..payload.len().min(start + most.unwrap_or(PAYLOAD_BYTES_MAX)));
            let restarts = pin!(self.ended.wait_for(is_useless));
            let ends = pin!(self.over.wait_for(is_useless));
            let admitted = pin!(chunks.admit(piece.len() as u64));
            let admitted = match select(admitted, select(restarts, ends)).await {
                Either::Left((admitted, _)) => admitted,
                Either::Right(_) => return Err(IoError::Closed),
            };
            let mut data = self.buffers.take(piece.len());
            data.fill_from(&piece);
            device.change(Change::Write(offset + start as u64, data, durability)).await?;
            drop(admitted);
            start += piece.len();
        }
        Ok((Answered::Done, Bytes::new()))
    }

    /// Returns the address of a replica without the way of its chunks, and that way.
    fn replica_of(&self, address: Address) -> (Address, Option<Rc<ArrivingChunks>>) {
        let Address::ReplicaInBulk(index) = address else { return (address, None) };
        let address = Address::Replica(index);
        (address, self.chunks.borrow().get(&address).cloned())
    }

    /// Notes the size with which the peer offers a volume to clients, in place of an earlier one.
    fn follower(&self, volume: &Volume, address: Address, known: u64) -> Rc<Cell<u64>> {
        let follower = Rc::new(Cell::new(known));
        self.followers.borrow_mut().insert(address, Rc::clone(&follower));
        volume.is_followed_by(&follower);
        follower
    }

    fn offered(&self, address: Address) -> Option<Offered> {
        self.devices.borrow().get(&address).cloned()
    }

    /// Returns the credit of a waiting volume change to the peer, if there is room for the change.
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

/// Returns whether promised replicas are protected from changes. All three planted bugs switch this off, because either rule
/// would cover for the other.
fn keeps_promises() -> bool {
    let bugs = [Bug::PromiseNotWithdrawn, Bug::TryNotCounted, Bug::PromiseOfAnotherIncarnation];
    !bugs.into_iter().any(broken)
}

/// A call of the peer that was taken, until it is dropped.
struct UnderWay {
    service: Rc<Service>,
    /// The calls of the same process of the peer.
    calls: Rc<Cell<usize>>,
}

impl UnderWay {
    fn begin(service: &Rc<Service>) -> Self {
        let calls = Rc::clone(&*service.under_way.borrow());
        calls.set(calls.get() + 1);
        Self { service: Rc::clone(service), calls }
    }

    /// Ends this call; returns the count of calls of the same process.
    fn process(self) -> Rc<Cell<usize>> {
        Rc::clone(&self.calls)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.calls.set(self.calls.get() - 1);
        self.service.ended.notify();
    }
}

enum Held {
    Credit { _credit: Box<dyn Any + Send> },
    Room { held: Rc<Cell<u64>>, bytes: u64 },
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Self::Room { held, bytes } = self {
            held.set(held.get() - *bytes);
        }
    }
}

fn durability(durable: bool) -> Durability {
    if durable { Durability::Durable } else { Durability::Volatile }
}

async fn attach(volume: &Volume) -> Result<Answered, IoError> {
    let fence = volume.attach(Route::AnotherHost).await?;
    Ok(fence.map_or(Answered::Done, Answered::Fenced))
}

/// Returns the origin of a peer's change. A peer without a token gets one that matches nothing: the refusal then
/// tells it the present token.
fn origin(question: Question) -> Origin<'static> {
    Origin::Host(question.fence.unwrap_or_default())
}

fn range(offset: u64, length: u64) -> Result<ByteRange, IoError> {
    match offset.checked_add(length) {
        Some(_) => Ok(ByteRange::new(offset, length)),
        None => Err(IoError::OutOfRange { offset, length, size: 0 }),
    }
}
