//! The source's side: the target's image as the copying sees it, over either path.
//!
//! ```text
//!            it is leased, and opened here
//!    Away ───────────────────────────────► Here
//!     │ ▲     closed: to be promised there │ │
//!     │ └──────────────────────────────────┘ │ it has become unusable
//!     └── not proved to be the same ─► Link ◄┘       (from each: ─► Closed, when the copying has ended)
//! ```
//! The lease is taken before the first write, and again after an abandoned attempt at the handover. Once blocks have gone over
//! the link, they do so for the rest of the migration.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::engine::{Engine, run_blocking};
use block::store::image::{Caching, Patience};
use block::store::{Access, FileStore, Holder, Image};
use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, Handle, IoError, IoFuture};
use bytes::Bytes;
use rustix::io::Errno;

use super::token::{Secret, SharedImage};
use crate::peer::head::{Address, Operation};
use crate::peer::{PeerStore, Question, RequestPriority, RpcChannel, is_lost};
use crate::signal::Signal;

/// Pause before a prepared target is asked again, which does not know yet that the attempt is over.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// How often, 20 ms apart, the lock of an image is tried that the target has closed.
const OPEN_LOOKS_MAX: u32 = 25;

/// The path of blocks to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPath {
    /// Over the link to the target host.
    Link,
    /// Directly into the image, which both hosts can open; the link carries control messages only.
    Shared,
}

/// The target's image, which the source's host leases if it can.
pub struct HeldLease {
    me: Weak<Self>,
    handle: Handle,
    engine: Rc<dyn Engine>,
    channel: Rc<RpcChannel>,
    address: Address,
    shared: SharedImage,
    geometry: Geometry,
    state: RefCell<LeaseState>,
    changed: Signal,
    told: Cell<Option<DataPath>>,
    tell: Box<dyn Fn(DataPath)>,
    /// Called when data that was not durable there may be lost.
    lost: RefCell<Option<Box<dyn Fn()>>>,
}

enum LeaseState {
    Away,
    Asking,
    Here(Rc<dyn BlockDevice>),
    Link,
    Closed,
}

enum Unproved {
    /// The peer's process, or the copying, has ended meanwhile: the lease is asked for again if still needed.
    Interrupted,
    /// The image is not proved to be the same one, or is unusable.
    Because(String),
}

impl HeldLease {
    /// Makes a lease of `shared`, which the peer knows by `address`; asks for nothing yet.
    ///
    /// `tell` is called with the path of blocks, at first and whenever it changes.
    pub(crate) fn new(
        handle: Handle,
        engine: Rc<dyn Engine>,
        channel: Rc<RpcChannel>,
        address: Address,
        shared: SharedImage,
        geometry: Geometry,
        tell: Box<dyn Fn(DataPath)>,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            handle,
            engine,
            channel,
            address,
            shared,
            geometry,
            state: RefCell::new(LeaseState::Away),
            changed: Signal::default(),
            told: Cell::new(None),
            tell,
            lost: RefCell::default(),
        })
    }

    /// Sets the callback for a possible loss of unflushed writes. It is called before any later request has ended.
    pub(crate) fn on_loss(&self, lost: Box<dyn Fn()>) {
        self.lost.replace(Some(lost));
    }

    /// Makes all writes durable, and closes the image, so that the target's host may open it. No request may be in flight. Fails
    /// with the error of the flush; the image is closed all the same.
    pub(crate) async fn give_back(&self) -> Result<(), IoError> {
        let here = self.here();
        let Some(device) = here else { return Ok(()) };
        let flushed = device.flush().await;
        if flushed.is_err() {
            self.say_lost();
        }
        self.enter(LeaseState::Away);
        flushed
    }

    pub(crate) fn close(&self) {
        self.enter(LeaseState::Closed);
        self.lost.replace(None);
    }

    /// Returns the image if blocks go there; `None` if they go over the link.
    async fn device(&self) -> Result<Option<Rc<dyn BlockDevice>>, IoError> {
        loop {
            if self.is_away() {
                self.ask();
            }
            let decided = || match &*self.state.borrow() {
                LeaseState::Here(device) => Some(Some(Ok(Some(Rc::clone(device))))),
                LeaseState::Link => Some(Some(Ok(None))),
                LeaseState::Closed => Some(Some(Err(IoError::Closed))),
                // It was given back before this check.
                LeaseState::Away => Some(None),
                LeaseState::Asking => None,
            };
            if let Some(decided) = self.changed.wait_for(decided).await {
                return decided;
            }
        }
    }

    /// Asks for the lease, in a task of its own: the request that needs it may be dropped meanwhile.
    fn ask(&self) {
        let Some(lease) = self.me.upgrade() else { return };
        self.state.replace(LeaseState::Asking);
        self.handle.spawn(async move {
            let next = loop {
                match lease.ask_for_lease().await {
                    Ok(device) => break LeaseState::Here(device),
                    Err(Unproved::Interrupted) if lease.is_asking() => {
                        lease.handle.sleep(ASK_AGAIN).await;
                    }
                    Err(Unproved::Interrupted) => return,
                    Err(Unproved::Because(reason)) => {
                        let image = lease.shared.path.display();
                        tracing::info!(%image, reason, "blocks go over the link");
                        lease.say_lost();
                        break LeaseState::Link;
                    }
                }
            };
            if lease.is_asking() {
                lease.enter(next);
            }
        });
    }

    async fn ask_for_lease(&self) -> Result<Rc<dyn BlockDevice>, Unproved> {
        let answer = self.answer().await?;
        let leased = self.call(Operation::Lease { answer: answer.0 }).await;
        let shared = self.shared.clone();
        // The target's host removes an answer file that is left over.
        let _ = run_blocking(&self.engine, move || shared.forget_answer(answer)).await;
        leased?;
        let image = self.open().await?;
        self.call(Operation::LeaseIsHeld).await?;
        Ok(Rc::new(FileStore::new(image, Rc::clone(&self.engine))))
    }

    async fn answer(&self) -> Result<Secret, Unproved> {
        let shared = self.shared.clone();
        let answered = run_blocking(&self.engine, move || {
            let answer = Secret::new()?;
            shared.answer(answer).map(|()| answer)
        });
        match answered.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Unproved::Because(format!("its folder cannot be written to: {error}"))),
            Err(_) => Err(Unproved::Interrupted),
        }
    }

    async fn call(&self, operation: Operation) -> Result<(), Unproved> {
        let question = Question { address: self.address, operation, fence: None };
        match self.channel.call(RequestPriority::Control, question, Bytes::new(), None).await {
            Ok(_) => Ok(()),
            Err(error) if is_lost(&error) || error.errno() == Errno::AGAIN => Err(Unproved::Interrupted),
            Err(error) => Err(Unproved::Because(format!("the other host says: {error}"))),
        }
    }

    async fn open(&self) -> Result<Image, Unproved> {
        let shared = self.shared.clone();
        let opened = run_blocking(&self.engine, move || {
            // The target has closed it, but another process may briefly hold it.
            let mut looks = 0..OPEN_LOOKS_MAX;
            let patience = |_: &Holder| looks.next().map_or(Patience::GiveUp, |_| Patience::Wait);
            let image = Image::open_waiting(&shared.path, Access::ReadWrite, patience);
            // N.B. after locking: the token is removed before its image.
            image.map(|image| {
                let proof = (shared.is_there(), shared.is_image(&**image.held()));
                (image, proof)
            })
        });
        let because = |reason: &str| Err(Unproved::Because(reason.to_owned()));
        match opened.await {
            Err(_) => Err(Unproved::Interrupted),
            Ok(Err(error)) => Err(Unproved::Because(error.to_string())),
            Ok(Ok((_, (false, _)))) => because("its token is gone"),
            Ok(Ok((_, (true, false)))) => because("another file has its name"),
            Ok(Ok((image, _))) if image.size() != self.geometry.size => because("it has another size"),
            Ok(Ok((image, _))) if image.caching() != Caching::Direct => {
                because("its file system has no direct I/O")
            }
            Ok(Ok((image, _))) => Ok(image),
        }
    }

    /// Takes the result of a request to the image; after an error the image is not used again.
    fn judge<T>(&self, device: &Rc<dyn BlockDevice>, result: Result<T, IoError>) -> Result<T, IoError> {
        if let Err(error) = &result
            && !error.is_no_space()
            && self.here().is_some_and(|here| Rc::ptr_eq(&here, device))
        {
            tracing::warn!(image = %self.shared.path.display(), %error, "cannot use a shared image; requesting it again");
            self.say_lost();
            self.enter(LeaseState::Away);
        }
        result
    }

    fn here(&self) -> Option<Rc<dyn BlockDevice>> {
        match &*self.state.borrow() {
            LeaseState::Here(device) => Some(Rc::clone(device)),
            _ => None,
        }
    }

    fn is_away(&self) -> bool {
        matches!(&*self.state.borrow(), LeaseState::Away)
    }

    fn is_asking(&self) -> bool {
        matches!(&*self.state.borrow(), LeaseState::Asking)
    }

    fn say_lost(&self) {
        if let Some(lost) = &*self.lost.borrow() {
            lost();
        }
    }

    fn enter(&self, state: LeaseState) {
        let way = match &state {
            LeaseState::Here(_) => Some(DataPath::Shared),
            LeaseState::Link => Some(DataPath::Link),
            LeaseState::Away | LeaseState::Asking | LeaseState::Closed => None,
        };
        // The former state may hold the last reference to the image.
        drop(self.state.replace(state));
        if way.is_some()
            && self.told.replace(way) != way
            && let Some(way) = way
        {
            (self.tell)(way);
        }
        self.changed.notify();
    }
}

/// The target's image as a device: leased, or at the other end of the link.
pub struct ReplicaStore {
    lease: Rc<HeldLease>,
    link: PeerStore,
}

impl ReplicaStore {
    pub(crate) fn new(lease: Rc<HeldLease>, link: PeerStore) -> Self {
        Self { lease, link }
    }
}

impl BlockDevice for ReplicaStore {
    fn geometry(&self) -> Geometry {
        self.link.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            match self.lease.device().await? {
                Some(image) => self.lease.judge(&image, image.read(offset, buffer).await),
                None => self.link.read(offset, buffer).await,
            }
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match self.lease.device().await? {
                Some(image) => self.lease.judge(&image, image.change(change).await),
                None => self.link.change(change).await,
            }
        })
    }

    /// Flushes an open image; a returned one was flushed before.
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if self.lease.is_away() {
                return Ok(());
            }
            match self.lease.device().await? {
                Some(image) => self.lease.judge(&image, image.flush().await),
                None => self.link.flush().await,
            }
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            match self.lease.device().await? {
                Some(image) => self.lease.judge(&image, image.allocation(range).await),
                None => self.link.allocation(range).await,
            }
        })
    }
}
