//! The top of a volume's live stack: admits or holds requests, and counts those below it.
//!
//! ```text
//!    requests ──► [ mode: open │ reads only │ hold ] ──► the stack below, as it is now
//!                       held requests wait here            │
//!                                                          ▼ counted until they end
//! ```
//! The stack below can be replaced: later requests take the new one, and [`Gate::replace`] resolves when the last request in the
//! old one has ended. So a filter can be put into a live stack, and no request passes it by unnoticed.
//!
//! **N.B.** Run the futures of this device to their end: a request whose future is dropped counts as ended, although the store
//! may still carry it out. The export does so even if its client vanishes.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use futures_util::future::{Either, select};

use crate::peer::PeerVolume;
use crate::signal::Signal;

/// The requests that a gate admits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateMode {
    /// All requests are admitted.
    #[default]
    Open,
    /// Reads and flushes are admitted; changes of the volume wait.
    ReadsOnly,
    /// No request is admitted: all wait.
    Hold,
}

/// The gate of one volume.
pub struct Gate {
    mode: Rc<Cell<GateMode>>,
    /// Whether its lane ends: then no request is admitted in any mode.
    has_ended: Cell<bool>,
    below: RefCell<Below>,
    /// The request counts of former stacks that are still in use.
    former: RefCell<Vec<Rc<Cell<usize>>>>,
    /// Requests below the gate, in any stack.
    in_flight: Rc<Cell<usize>>,
    held: Rc<Cell<usize>>,
    changes: Cell<u64>,
    changed: Rc<Signal>,
}

#[derive(Clone)]
struct Below {
    device: Rc<dyn BlockDevice>,
    /// The same device, if it is the volume's owner on another host.
    owner: Option<Rc<PeerVolume>>,
    requests: Rc<Cell<usize>>,
}

pub(crate) struct Pass {
    below: Below,
    in_flight: Rc<Cell<usize>>,
    changed: Rc<Signal>,
}

struct Waits(Rc<Cell<usize>>);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Change,
    /// The announcement of a client: admitted like a change, but not counted as one.
    Attach,
}

impl Gate {
    /// Makes an open gate above `below`.
    pub fn new(below: Rc<dyn BlockDevice>) -> Self {
        Self {
            mode: Rc::default(),
            has_ended: Cell::default(),
            below: RefCell::new(Below::here(below)),
            former: RefCell::default(),
            in_flight: Rc::default(),
            held: Rc::default(),
            changes: Cell::default(),
            changed: Rc::default(),
        }
    }

    /// Returns the gate's present mode.
    pub fn mode(&self) -> GateMode {
        self.mode.get()
    }

    /// Changes the mode. Requests already below the gate continue, even if the new mode would hold them.
    pub fn set_mode(&self, mode: GateMode) {
        self.mode.set(mode);
        self.changed.notify();
    }

    /// Admits no request from now on. Those below the gate continue.
    ///
    /// **N.B.** A migration may still open the gate while its lane ends.
    pub fn end(&self) {
        self.has_ended.set(true);
    }

    /// Returns the number of requests below the gate.
    pub fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// Returns the number of changes admitted since the gate was made.
    pub fn changes_admitted(&self) -> u64 {
        self.changes.get()
    }

    /// Resolves when no request is below the gate.
    pub fn drained(&self) -> impl Future<Output = ()> + use<> {
        let (in_flight, changed) = (Rc::clone(&self.in_flight), Rc::clone(&self.changed));
        async move { changed.wait_for(|| (in_flight.get() == 0).then_some(())).await }
    }

    /// Resolves to true when a request waits at the gate, or to false once the gate's mode is not `Hold`.
    pub fn holds_a_request(&self) -> impl Future<Output = bool> + use<> {
        let (mode, held, changed) = (Rc::clone(&self.mode), Rc::clone(&self.held), Rc::clone(&self.changed));
        async move {
            let looks = || match mode.get() {
                GateMode::Hold => (held.get() > 0).then_some(true),
                GateMode::Open | GateMode::ReadsOnly => Some(false),
            };
            changed.wait_for(looks).await
        }
    }

    /// Puts another stack below the gate; resolves when no request is in a former one.
    ///
    /// The stack is replaced at once, whether or not the future is polled.
    pub fn replace(&self, below: Rc<dyn BlockDevice>) -> impl Future<Output = ()> + use<> {
        self.take_turns(Below::here(below))
    }

    /// Puts the volume's owner on another host below the gate; resolves as [`Gate::replace`].
    pub(crate) fn lead_to(&self, owner: Rc<PeerVolume>) -> impl Future<Output = ()> + use<> {
        let device = Rc::clone(&owner) as Rc<dyn BlockDevice>;
        self.take_turns(Below { device, owner: Some(owner), requests: Rc::default() })
    }

    fn take_turns(&self, new: Below) -> impl Future<Output = ()> + use<> {
        // N.B. all former stacks: a slow request may be in a stack that was replaced long ago.
        let mut former = self.former.borrow_mut();
        former.push(self.below.replace(new).requests);
        former.retain(|requests| requests.get() > 0);
        let (former, changed) = (former.clone(), Rc::clone(&self.changed));
        changed.notify();
        async move {
            changed.wait_for(|| former.iter().all(|requests| requests.get() == 0).then_some(())).await;
        }
    }

    /// Carries out a request that changes nothing, once the gate admits it: here, or at the owner on another host while
    /// that owns the volume.
    pub(crate) async fn look<T>(
        &self,
        here: impl AsyncFn(&dyn BlockDevice) -> Result<T, IoError>,
        there: impl AsyncFn(&PeerVolume) -> Result<T, IoError>,
    ) -> Result<T, IoError> {
        loop {
            let pass = self.enter(Access::Read).await;
            let Some(owner) = pass.owner() else {
                match here(pass.device()).await {
                    // The volume was given back during the request: the present owner is asked.
                    Err(IoError::Closed) if self.has_let_go_of(&pass) => continue,
                    answer => return answer,
                }
            };
            // Boxed: a request to a store of this host needs only a fraction of its memory.
            if let Some(answer) = Box::pin(self.unless_home(there(owner))).await {
                return answer;
            }
        }
    }

    /// Returns whether the gate is closed, or has another stack below it than the request's.
    fn has_let_go_of(&self, pass: &Pass) -> bool {
        self.mode() == GateMode::Hold || !Rc::ptr_eq(&pass.below.requests, &self.below.borrow().requests)
    }

    /// Returns the answer of the owner on another host; `None` if the volume has arrived here meanwhile.
    ///
    /// The answer may never come on a silent link.
    ///
    /// **N.B.** A forwarded change cannot land here later: its fencing token is outdated.
    pub(crate) async fn unless_home<T>(&self, asked: impl Future<Output = T>) -> Option<T> {
        let is_home = || self.below.borrow().owner.is_none().then_some(());
        match select(pin!(asked), pin!(self.changed.wait_for(is_home))).await {
            Either::Left((answer, _)) => Some(answer),
            Either::Right(_) => None,
        }
    }

    pub(crate) async fn lets_read(&self) {
        self.changed.wait_for(|| self.admits(Access::Read).then_some(())).await;
    }

    /// Waits until a request is admitted; it stays below the gate until the returned pass is dropped.
    pub(crate) async fn enter(&self, access: Access) -> Pass {
        if !self.admits(access) {
            let _waits = Waits::at(self);
            self.changed.wait_for(|| self.admits(access).then_some(())).await;
        }
        if access == Access::Change {
            self.changes.set(self.changes.get() + 1);
        }
        let below = self.below.borrow().clone();
        below.requests.set(below.requests.get() + 1);
        self.in_flight.set(self.in_flight.get() + 1);
        Pass { below, in_flight: Rc::clone(&self.in_flight), changed: Rc::clone(&self.changed) }
    }

    fn admits(&self, access: Access) -> bool {
        match self.mode.get() {
            _ if self.has_ended.get() => false,
            GateMode::Open => true,
            GateMode::ReadsOnly => access == Access::Read,
            GateMode::Hold => false,
        }
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.below.borrow().device.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let buffer = Again::new(buffer);
        Box::pin(async move {
            let here = async |device: &dyn BlockDevice| device.read(offset, buffer.take()).await;
            self.look(here, async |owner| owner.read(offset, buffer.take()).await).await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let pass = self.enter(Access::Change).await;
            pass.below.device.change(change).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.look(async |device| device.flush().await, async |owner| owner.flush().await))
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.borrow().device.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        let here = async move |device: &dyn BlockDevice| device.allocation(range).await;
        Box::pin(self.look(here, async move |owner: &PeerVolume| owner.allocation(range).await))
    }
}

/// A buffer for a request that may be repeated after an owner on another host has kept it.
pub(crate) struct Again {
    buffer: Cell<Option<Buffer>>,
    length: usize,
}

impl Again {
    pub(crate) fn new(buffer: Buffer) -> Self {
        Self { length: buffer.len(), buffer: Cell::new(Some(buffer)) }
    }

    pub(crate) fn take(&self) -> Buffer {
        self.buffer.take().unwrap_or_else(|| Buffer::zeroed(self.length))
    }
}

impl Below {
    fn here(device: Rc<dyn BlockDevice>) -> Self {
        Self { device, owner: None, requests: Rc::default() }
    }
}

impl Pass {
    pub(crate) fn device(&self) -> &dyn BlockDevice {
        &*self.below.device
    }

    pub(crate) fn owner(&self) -> Option<&Rc<PeerVolume>> {
        self.below.owner.as_ref()
    }
}

impl Waits {
    fn at(gate: &Gate) -> Self {
        gate.held.set(gate.held.get() + 1);
        gate.changed.notify();
        Self(Rc::clone(&gate.held))
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.below.requests.set(self.below.requests.get() - 1);
        self.in_flight.set(self.in_flight.get() - 1);
        if self.below.requests.get() == 0 {
            self.changed.notify();
        }
    }
}
