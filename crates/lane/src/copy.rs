//! One volume being copied: the strategy of the core, and the I/O that it asks for.
//!
//! ```text
//!   mirror filter ──arrive──►┐                      ┌──► admits and completes writes
//!   mover ──chunk copied────►│ strategy (the core) ─┼──► spawns the mover for a chunk, flushes the target
//!   timer ──due─────────────►┘                      └──► notices for the driver
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use block::{BlockDevice, BufferPool, ByteRange, ExtentKind, Handle, IoError, ZeroMode};
use chronicle::LayeredBitmap;
use futures_channel::mpsc;
use futures_util::future::{Either, select};
use migration::VolumeIndex;
use migration::strategy::{
    Copying, Route, SourceFault, TargetFault, TellingId, VolumeAction, VolumeEvent, WriteId,
};

use crate::driver::{Event, Replica, TargetContent};
use crate::mover;
use crate::signal::Signal;

/// Bytes whose allocation is asked for at a time: the answer stays small, and other tasks get their turn.
const SURVEY_BYTES: u64 = 1 << 30;

/// One volume being copied from its source store to its target store.
pub struct VolumeCopy {
    /// For the tasks that it spawns.
    me: Weak<Self>,
    volume: VolumeIndex,
    handle: Handle,
    source: Rc<dyn BlockDevice>,
    target: Replica,
    buffers: BufferPool,
    machine: RefCell<Copying>,
    next_write: Cell<u64>,
    /// Writes that wait for the strategy's word.
    tickets: RefCell<BTreeMap<WriteId, Rc<TicketState>>>,
    notices: mpsc::UnboundedSender<Event>,
    timer: Timer,
    behind: Behind,
}

#[derive(Default)]
struct TicketState {
    route: Cell<Option<Route>>,
    completed: Cell<bool>,
    waiter: Cell<Option<Waker>>,
}

/// When the strategy wants to be called, and what its timer task sleeps on.
#[derive(Default)]
struct Timer {
    /// What the task has been told to wake up for; `None` while it sleeps without a deadline.
    armed: Cell<Option<Duration>>,
    changed: Signal,
    stopped: Cell<bool>,
}

/// How often it was said that the replica is behind, and how often the driver has heard it.
#[derive(Default)]
struct Behind {
    said: Cell<u64>,
    heard: Cell<u64>,
    changed: Signal,
}

/// A guest write, from its arrival until it has ended.
pub(crate) struct Ticket<'a> {
    copy: &'a VolumeCopy,
    id: WriteId,
    state: Rc<TicketState>,
}

impl VolumeCopy {
    /// Makes a copying that knows of nothing yet. The mirror filter can be put into the stack at once; then
    /// [`VolumeCopy::begin`] is called.
    pub(crate) fn new(
        volume: VolumeIndex,
        handle: Handle,
        source: Rc<dyn BlockDevice>,
        target: Replica,
        buffers: BufferPool,
        machine: Copying,
        notices: mpsc::UnboundedSender<Event>,
    ) -> Rc<Self> {
        let copy = Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            volume,
            handle,
            source,
            target,
            buffers,
            machine: RefCell::new(machine),
            next_write: Cell::new(0),
            tickets: RefCell::default(),
            notices,
            timer: Timer::default(),
            behind: Behind::default(),
        });
        copy.handle.spawn(Rc::clone(&copy).run_timer());
        copy
    }

    /// Finds out what is allocated, and starts copying it.
    ///
    /// **N.B.** Only once every write goes through the mirror filter and those that did not have ended: a hole that is
    /// written after it was looked at is known by that.
    pub(crate) async fn begin(&self) {
        let size = self.source.geometry().size;
        if self.target.content == TargetContent::Unknown {
            // Also what the volume does not have must get there: as zeroes, over what is there now.
            self.event(VolumeEvent::Allocated(ByteRange::new(0, size)));
            self.event(VolumeEvent::AllocationKnown);
            return;
        }
        let mut offset = 0;
        while offset < size {
            let range = ByteRange::new(offset, SURVEY_BYTES.min(size - offset));
            let allocated = match self.target.content {
                TargetContent::Backing => self.source.own_allocation(range),
                TargetContent::Zero | TargetContent::Unknown => self.source.allocation(range),
            };
            match allocated.await {
                Ok(extents) => {
                    for extent in extents.iter().filter(|extent| extent.kind == ExtentKind::Data) {
                        self.event(VolumeEvent::Allocated(extent.range));
                    }
                }
                // Who cannot tell has everything.
                Err(_) => self.event(VolumeEvent::Allocated(range)),
            }
            offset = range.end();
        }
        self.event(VolumeEvent::AllocationKnown);
    }

    /// Starts to copy what the target's copy of the volume lacks, and nothing else.
    ///
    /// **N.B.** Only once every write goes through the mirror filter and those that did not have ended.
    pub(crate) fn begin_with(&self, lacking: &LayeredBitmap) {
        self.machine.borrow_mut().lacks(lacking);
        self.event(VolumeEvent::AllocationKnown);
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn source(&self) -> &Rc<dyn BlockDevice> {
        &self.source
    }

    /// The target's store, for what the mover copies.
    pub(crate) fn target(&self) -> &Rc<dyn BlockDevice> {
        &self.target.bulk
    }

    /// The same store, for guest writes.
    pub(crate) fn mirror_target(&self) -> &Rc<dyn BlockDevice> {
        &self.target.mirrored
    }

    /// How zeroes are written to the target.
    pub(crate) fn zeroes(&self) -> ZeroMode {
        self.target.zeroes
    }

    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Looks at the strategy, for progress.
    pub(crate) fn with_machine<T>(&self, look: impl FnOnce(&mut Copying) -> T) -> T {
        look(&mut self.machine.borrow_mut())
    }

    /// Announces a guest write to the strategy.
    pub(crate) fn arrive(&self, range: ByteRange) -> Ticket<'_> {
        let id = WriteId(self.next_write.get());
        self.next_write.set(id.0 + 1);
        let state = Rc::<TicketState>::default();
        self.tickets.borrow_mut().insert(id, Rc::clone(&state));
        self.event(VolumeEvent::WriteArrived { write: id, range });
        Ticket { copy: self, id, state }
    }

    pub(crate) fn target_written(&self, write: WriteId, result: &Result<(), IoError>) {
        let result = result.map_err(|error| target_fault(&error));
        self.event(VolumeEvent::TargetWritten { write, result });
    }

    /// Tells the strategy what happened and does what it says.
    pub(crate) fn event(&self, event: VolumeEvent) {
        self.machine.borrow_mut().handle_event(self.handle.now(), event);
        self.drain();
    }

    /// Ends copying for good: nothing is held any more, and the timer task ends.
    pub(crate) fn stop(&self) {
        self.event(VolumeEvent::Stop);
        self.timer.stopped.set(true);
        self.timer.changed.notify();
        self.behind.changed.notify();
    }

    /// Keeps the volume from being handed over until [`VolumeCopy::growth_ended`].
    ///
    /// When it resolves the driver has heard of it: a try at the handover that is not past the point of return then
    /// is given up, and none is begun.
    pub(crate) async fn hold_back(&self) {
        self.event(VolumeEvent::GrowthBegins);
        // Also if it was behind already: the driver may not have heard of that yet.
        self.carry_out(VolumeAction::Behind);
        let said = self.behind.said.get();
        let heard = || (self.behind.heard.get() >= said || self.timer.stopped.get()).then_some(());
        self.behind.changed.wait_for(heard).await;
    }

    /// Takes note that the driver has heard once more that the replica is behind.
    pub(crate) fn behind_was_heard(&self) {
        self.behind.heard.set(self.behind.heard.get() + 1);
        self.behind.changed.notify();
    }

    /// Goes on with a volume that has `size` bytes now; it had `former` before.
    ///
    /// Both stores read as zeroes in what is new. Space that is to stay allocated is allocated by the mover.
    pub(crate) fn growth_ended(&self, former: u64, size: u64) {
        self.event(VolumeEvent::GrowthEnds { size_bytes: size });
        if size > former && self.target.zeroes == ZeroMode::KeepAllocated {
            self.event(VolumeEvent::Allocated(ByteRange::new(former, size - former)));
        }
    }

    /// Changes the mover's rate limit.
    pub(crate) fn set_bandwidth(&self, bytes_per_second: Option<u64>) {
        self.machine.borrow_mut().set_bandwidth(self.handle.now(), bytes_per_second);
        self.drain();
    }
}

// What the strategy says is done.
impl VolumeCopy {
    fn drain(&self) {
        loop {
            // Borrowed for the poll only: what is done may bring the next event.
            let action = self.machine.borrow_mut().poll_action();
            let Some(action) = action else { break };
            self.carry_out(action);
        }
        self.arm_timer();
    }

    fn carry_out(&self, action: VolumeAction) {
        match action {
            VolumeAction::Admit { write, route } => {
                self.answer(write, |ticket| ticket.route.set(Some(route)));
            }
            VolumeAction::Complete { write } => self.answer(write, |ticket| ticket.completed.set(true)),
            VolumeAction::Copy { chunk, range } => self.spawn(move |copy| async move {
                let result = mover::copy_chunk(&copy, range).await;
                copy.event(VolumeEvent::ChunkCopied { chunk, result });
            }),
            VolumeAction::TellMissing { telling } => self.spawn(move |copy| async move {
                let told = copy.tell_missing(telling).await;
                let result = told.map_err(|error| target_fault(&error));
                copy.event(VolumeEvent::MissingTold { telling, result });
            }),
            VolumeAction::FlushTarget { flush } => self.spawn(move |copy| async move {
                let result = copy.target().flush().await.map_err(|error| target_fault(&error));
                copy.event(VolumeEvent::TargetFlushed { flush, result });
            }),
            action => {
                if action == VolumeAction::Behind {
                    self.behind.said.set(self.behind.said.get() + 1);
                }
                // The driver is gone only when the migration has ended.
                let _ = self.notices.unbounded_send(Event::Noticed(self.volume, action));
            }
        }
    }

    async fn tell_missing(&self, telling: TellingId) -> Result<(), IoError> {
        let said = self.machine.borrow().telling(telling);
        let (Some((missing, is_base)), Some(manifest)) = (said, &self.target.manifest) else {
            return Err(IoError::Unsupported);
        };
        manifest.tell_missing(&missing, is_base).await
    }

    fn answer(&self, write: WriteId, say: impl FnOnce(&TicketState)) {
        if let Some(ticket) = self.tickets.borrow().get(&write) {
            say(ticket);
            if let Some(waiter) = ticket.waiter.take() {
                waiter.wake();
            }
        }
    }

    fn spawn<F: Future<Output = ()> + 'static>(&self, task: impl FnOnce(Rc<Self>) -> F) {
        if let Some(copy) = self.me.upgrade() {
            self.handle.spawn(task(copy));
        }
    }

    /// Makes sure that the timer task wakes up in time. Waking up too early is harmless, so a deadline that has moved
    /// away costs nothing here.
    fn arm_timer(&self) {
        let Some((deadline, _)) = self.machine.borrow().poll_timeout() else { return };
        if self.timer.armed.get().is_none_or(|armed| deadline < armed) {
            self.timer.armed.set(Some(deadline));
            self.timer.changed.notify();
        }
    }

    async fn run_timer(self: Rc<Self>) {
        while !self.timer.stopped.get() {
            let armed = self.timer.armed.get();
            let changed = self
                .timer
                .changed
                .wait_for(|| (self.timer.stopped.get() || self.timer.armed.get() != armed).then_some(()));
            match armed {
                None => changed.await,
                Some(deadline) => {
                    let sleep = std::pin::pin!(self.handle.sleep_until(deadline));
                    if let Either::Left(_) = select(sleep, std::pin::pin!(changed)).await {
                        self.timer.armed.set(None);
                        self.machine.borrow_mut().handle_timeout(self.handle.now());
                        self.drain();
                    }
                }
            }
        }
    }
}

impl Ticket<'_> {
    pub(crate) fn id(&self) -> WriteId {
        self.id
    }

    /// Waits until the strategy says where the write goes.
    pub(crate) fn route(&self) -> impl Future<Output = Route> + '_ {
        self.state.wait_for(|state| state.route.take())
    }

    /// Waits until the guest may be answered.
    pub(crate) fn completed(&self) -> impl Future<Output = ()> + '_ {
        self.state.wait_for(|state| state.completed.get().then_some(()))
    }

    pub(crate) fn source_written(&self, result: &Result<(), IoError>) {
        let result = result.map_err(|_| SourceFault);
        self.copy.event(VolumeEvent::SourceWritten { write: self.id, result });
    }
}

impl TicketState {
    fn wait_for<'a, T: 'a>(
        &'a self,
        mut look: impl FnMut(&Self) -> Option<T> + 'a,
    ) -> impl Future<Output = T> + 'a {
        poll_fn(move |context| match look(self) {
            Some(found) => Poll::Ready(found),
            None => {
                self.waiter.set(Some(context.waker().clone()));
                Poll::Pending
            }
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.copy.tickets.borrow_mut().remove(&self.id);
    }
}

/// What the core is told of a target's error.
pub(crate) fn target_fault(error: &IoError) -> TargetFault {
    if error.is_no_space() { TargetFault::NoSpace } else { TargetFault::Error }
}
