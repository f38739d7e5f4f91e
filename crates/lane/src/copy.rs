//! One volume being copied: the strategy of the core, and the I/O that it asks for.
//!
//! ```text
//!   mirror filter ──arrive──►┐                      ┌──► admits and completes writes
//!   mover ──chunk copied────►│ strategy (the core) ─┼──► spawns the mover for a chunk, flushes the target
//!   timer ──due─────────────►┘                      └──► notices for the driver
//! ```

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use block::clone::PlainFile;
use block::{BlockDevice, BufferPool, ByteRange, ExtentKind, Handle, IoError, ZeroMode};
use chronicle::LayeredBitmap;
use futures_channel::mpsc;
use futures_util::future::{Either, select};
use migration::progress::{ArrivedChunks, ChunksInFlight};
use migration::strategy::{
    Copying, Route, SourceFault, TargetFault, TellingId, VolumeAction, VolumeEvent, WriteId,
};
use migration::{VolumeIndex, VolumeProgress};

use crate::cloning::Cloning;
use crate::driver::{Event, Replica, TargetContent};
use crate::mover;
use crate::peer::PeerStore;
use crate::peer::head::GivenWay;
use crate::signal::Signal;

/// Bytes per query for allocation: keeps the answer small, and gives other tasks their turn.
const SURVEY_BYTES: u64 = 1 << 30;

/// How often the target's host is asked what chunks wait for there.
const ASKS_THERE: Duration = Duration::from_millis(500);

/// One volume being copied from its source store to its target store.
pub struct VolumeCopy {
    me: Weak<Self>,
    volume: VolumeIndex,
    handle: Handle,
    source: Rc<dyn BlockDevice>,
    target: Replica,
    buffers: BufferPool,
    machine: RefCell<Copying>,
    next_write: Cell<u64>,
    tickets: RefCell<BTreeMap<WriteId, Rc<TicketState>>>,
    notices: mpsc::UnboundedSender<Event>,
    timer: Timer,
    behind: Behind,
    /// The bytes of chunks that are being read.
    reading: Cell<u64>,
    guests_there: GuestsThere,
    /// Unset: chunks are read and written from the beginning.
    cloning: OnceCell<Cloning>,
}

/// How chunks give way to guests at the target's host.
#[derive(Default)]
struct GuestsThere {
    /// What was ordered last, and what it does; `None`: nothing, or the target's host has not answered.
    ordered: Cell<Option<pacer::Impact>>,
    given_way: Cell<Option<GivenWay>>,
    changed: Signal,
}

#[derive(Default)]
struct TicketState {
    route: Cell<Option<Route>>,
    completed: Cell<bool>,
    waiter: Cell<Option<Waker>>,
}

#[derive(Default)]
struct Timer {
    /// The time for which the task is set to wake up; `None` while it sleeps without a deadline.
    armed: Cell<Option<Duration>>,
    changed: Signal,
    stopped: Cell<bool>,
}

/// Counts of reports that the replica is behind: those sent, and those that the driver has received.
#[derive(Default)]
struct Behind {
    said: Cell<u64>,
    heard: Cell<u64>,
    changed: Signal,
}

pub(crate) struct Ticket<'a> {
    copy: &'a VolumeCopy,
    id: WriteId,
    state: Rc<TicketState>,
}

impl VolumeCopy {
    /// Makes a copying that knows of no blocks yet. The mirror filter can be put into the stack at once; then
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
            reading: Cell::default(),
            guests_there: GuestsThere::default(),
            cloning: OnceCell::new(),
        });
        copy.handle.spawn(Rc::clone(&copy).run_timer());
        if let Some(there) = copy.target.guests_there.clone() {
            copy.handle.spawn(Rc::clone(&copy).give_way_there(there));
        }
        copy
    }

    /// Finds out what is allocated, and starts copying it.
    ///
    /// **N.B.** Call this only once every write passes the mirror filter, and earlier writes have ended: the filter reports holes
    /// that are written after the allocation scan.
    pub(crate) async fn begin(&self) {
        let size = self.source.geometry().size;
        if self.target.content == TargetContent::Unknown {
            // Holes of the volume have to be copied as well: as zeroes, over the present content.
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
                // A store that cannot tell counts as fully allocated.
                Err(_) => self.event(VolumeEvent::Allocated(range)),
            }
            offset = range.end();
        }
        self.event(VolumeEvent::AllocationKnown);
    }

    /// Starts to copy only the blocks that the target's copy lacks.
    ///
    /// **N.B.** Call this only once every write passes the mirror filter, and earlier writes have ended.
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

    pub(crate) fn target(&self) -> &Rc<dyn BlockDevice> {
        &self.target.bulk
    }

    pub(crate) fn mirror_target(&self) -> &Rc<dyn BlockDevice> {
        &self.target.mirrored
    }

    pub(crate) fn zeroes(&self) -> ZeroMode {
        self.target.zeroes
    }

    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    pub(crate) fn with_machine<T>(&self, look: impl FnOnce(&mut Copying) -> T) -> T {
        look(&mut self.machine.borrow_mut())
    }

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

    pub(crate) fn event(&self, event: VolumeEvent) {
        self.machine.borrow_mut().handle_event(self.handle.now(), event);
        self.drain();
    }

    pub(crate) fn stop(&self) {
        self.event(VolumeEvent::Stop);
        self.timer.stopped.set(true);
        self.timer.changed.notify();
        self.behind.changed.notify();
        self.guests_there.changed.notify();
    }

    /// Counts a chunk as being read until the result is dropped.
    pub(crate) fn reads(&self, bytes: u64) -> Reading<'_> {
        self.reading.set(self.reading.get() + bytes);
        Reading { copy: self, bytes }
    }

    /// Returns the progress.
    pub(crate) fn progress(&self) -> VolumeProgress {
        let now = self.handle.now();
        let there = self.guests_there.given_way.get();
        let chunks = ChunksInFlight {
            reading: self.reading.get(),
            arrived: there
                .map(|there| ArrivedChunks { bytes: there.bytes_arrived, limit: there.held_back.into() }),
        };
        let (limited_by, progress) =
            self.with_machine(|machine| (machine.limited_by(chunks), machine.progress(now)));
        let there = there.filter(|there| there.is_paced).map(pacer::Status::from);
        let paced = progress.paced.into_iter().chain(there).reduce(pacer::Status::and);
        VolumeProgress { limited_by, paced, ..progress }
    }

    /// Keeps the volume from being handed over until [`VolumeCopy::growth_ended`].
    ///
    /// Resolves when the driver has received that. The driver then abandons an attempt that is before the commit
    /// point, and begins none.
    pub(crate) async fn hold_back(&self) {
        self.event(VolumeEvent::GrowthBegins);
        // Even if the replica was behind already: the driver may not have received that yet.
        self.carry_out(VolumeAction::Behind);
        let said = self.behind.said.get();
        let heard = || (self.behind.heard.get() >= said || self.timer.stopped.get()).then_some(());
        self.behind.changed.wait_for(heard).await;
    }

    pub(crate) fn behind_was_heard(&self) {
        self.behind.heard.set(self.behind.heard.get() + 1);
        self.behind.changed.notify();
    }

    /// Continues with a volume that grew from `former` to `size` bytes.
    ///
    /// Both stores read as zeroes in the new part. The mover allocates space there that is to stay allocated.
    pub(crate) fn growth_ended(&self, former: u64, size: u64) {
        self.event(VolumeEvent::GrowthEnds { size_bytes: size });
        if size > former && self.target.zeroes == ZeroMode::KeepAllocated {
            self.event(VolumeEvent::Allocated(ByteRange::new(former, size - former)));
        }
    }

    pub(crate) fn set_impact(&self, impact: Option<pacer::Impact>) {
        if let Some(cloning) = self.cloning() {
            return cloning.set_impact(impact);
        }
        self.machine.borrow_mut().set_impact(self.handle.now(), impact);
        self.drain();
    }

    /// Makes it clone its chunks. Called before the first one.
    pub(crate) fn clone_chunks(&self, cloning: Cloning) {
        // There is one caller, which calls once.
        let _ = self.cloning.set(cloning);
    }

    fn cloning(&self) -> Option<&Cloning> {
        self.cloning.get().filter(|cloning| !cloning.is_over())
    }

    /// Returns the file that chunks are cloned from; `None`: they are read and written.
    pub(crate) fn cloned_from(&self) -> Option<PlainFile> {
        self.cloning().map(Cloning::from)
    }

    /// Notes that the file system has refused to clone a chunk. Chunks that are copied give way to guests.
    pub(crate) fn clone_refused(&self, error: &IoError) {
        if let Some(impact) = self.cloning().and_then(|cloning| cloning.refused(error)) {
            self.set_impact(impact);
        }
    }

    pub(crate) fn set_bandwidth(&self, bytes_per_second: Option<u64>) {
        self.machine.borrow_mut().set_bandwidth(self.handle.now(), bytes_per_second);
        self.drain();
    }
}

impl VolumeCopy {
    fn drain(&self) {
        loop {
            // Borrowed for the poll only: carrying an action out may bring the next event.
            let action = self.machine.borrow_mut().poll_action();
            let Some(action) = action else { break };
            self.carry_out(action);
        }
        self.arm_timer();
        if self.machine.borrow().impact() != self.guests_there.ordered.get() {
            self.guests_there.changed.notify();
        }
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

    /// Makes sure that the timer task wakes up in time. An early wake-up is harmless, so a deadline that moves
    /// back needs no action.
    fn arm_timer(&self) {
        let Some((deadline, _)) = self.machine.borrow().poll_timeout() else { return };
        if self.timer.armed.get().is_none_or(|armed| deadline < armed) {
            self.timer.armed.set(Some(deadline));
            self.timer.changed.notify();
        }
    }

    /// Lets chunks give way at the target's host as they do here, and asks at intervals what that does.
    async fn give_way_there(self: Rc<Self>, there: Rc<PeerStore>) {
        let is_over = || self.timer.stopped.get().then_some(());
        while !self.timer.stopped.get() {
            let impact = self.machine.borrow().impact();
            self.guests_there.ordered.set(impact);
            let ends = pin!(self.guests_there.changed.wait_for(is_over));
            match select(pin!(there.give_way(impact)), ends).await {
                Either::Left((given_way, _)) => self.guests_there.given_way.set(given_way.ok()),
                Either::Right(_) => return,
            }
            let is_due = || self.timer.stopped.get() || self.machine.borrow().impact() != impact;
            loop {
                let changed = self.guests_there.changed.wait_for(|| is_due().then_some(()));
                select(pin!(self.handle.sleep(ASKS_THERE)), pin!(changed)).await;
                // N.B. a copy that is paused, or has nothing to do, asks nothing: the target would take it for progress.
                let is_copying = self.machine.borrow().limited_by(ChunksInFlight::default()).is_some();
                if is_copying || is_due() {
                    break;
                }
            }
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

/// A chunk that is being read.
pub(crate) struct Reading<'a> {
    copy: &'a VolumeCopy,
    bytes: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.copy.reading.set(self.copy.reading.get() - self.bytes);
    }
}

impl Ticket<'_> {
    pub(crate) fn id(&self) -> WriteId {
        self.id
    }

    pub(crate) fn route(&self) -> impl Future<Output = Route> + '_ {
        self.state.wait_for(|state| state.route.take())
    }

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

pub(crate) fn target_fault(error: &IoError) -> TargetFault {
    if error.is_no_space() { TargetFault::NoSpace } else { TargetFault::Error }
}
