//! A store that lacks blocks: reads of missing blocks fetch them from the volume's former host, and store them here.
//!
//! ```text
//!   before the handover   guest's reads ───────────────────────────────► reservoir (nothing is stored)
//!                         missing-set updates (Told, the core) ────────► kept durably
//!   after it              guest's requests ──► Filling (the core) ──► store
//!                                                 │   ▲
//!                                    fetch, store ▼   │ answers          … until nothing is missing
//!                                             reservoir, keeper
//! ```
//! The decisions are [`migration::filling::Filling`]'s: what may be fetched, stored, recorded and answered, and in which order.
//! The store lies below the tracker: a fetched block is no guest's write, and the chronicle need not record it.

mod requests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::filter::FlushDebt;
use block::{BlockDevice, Buffer, BufferPool, ByteRange, Geometry, Handle, IoError, ZeroMode};
use chronicle::{BlockRange, BlockSize, LayeredBitmap};
use futures_util::future::{Either, join_all, select};
use migration::StayKey;
use migration::filling::{
    FetchFault, FetchId, Filling, FillingAction, FillingEvent, FillingProgress, FillingSettings, LogEntry,
    Manifest, NoPiece, OnBehalf, RecordingId, RequestId, RewriteId, StoreFault, Told, UnitMap, Urgency,
};
use migration::journal::Record;
use rustix::io::Errno;
use tracing::{error, info, warn};

use self::requests::{TicketState, Word};
use crate::chronicler::NotDurable;
use crate::control::Control;
use crate::driver::GivesWay;
use crate::handle::Rest;
use crate::mover;
use crate::peer::head::Address;
use crate::peer::{PeerStore, RequestPriority, RpcChannel};
use crate::signal::Signal;

/// Pause before the journal is asked again to record that nothing is missing.
const COMMIT_RETRY: Duration = Duration::from_millis(500);

/// The store of a volume that arrives, or has arrived, incomplete.
pub struct FillingStore {
    me: Weak<Self>,
    handle: Handle,
    buffers: BufferPool,
    control: Rc<dyn Control>,
    key: StayKey,
    store: Rc<FlushDebt>,
    reservoir: Missing,
    state: RefCell<FillingState>,
    settings: FillingSettings,
    /// How background fetches give way to guests of the store's disk.
    gives_way: RefCell<GivesWay>,
    /// The longest wait of a read for a reservoir that does not answer; `None`: no limit.
    wait_max: Cell<Option<Duration>>,
    next_request: Cell<u64>,
    tickets: RefCell<BTreeMap<RequestId, Rc<TicketState>>>,
    /// Fetched data that is not stored yet, with its offset.
    fetched: RefCell<BTreeMap<FetchId, (u64, Buffer)>>,
    /// Parts of reads that pass by the store, with their offsets.
    passed: RefCell<BTreeMap<FetchId, Vec<(u64, Buffer)>>>,
    timer: Rc<Timer>,
}

/// Access to the missing blocks at the volume's former host.
pub struct Missing {
    /// Serves the reads that guests wait for.
    urgent: PeerStore,
    background: PeerStore,
}

enum FillingState {
    /// Another host still owns the volume.
    Waiting(Box<Told>),
    /// Remains after the last block has arrived: requests may be in flight.
    Filling(Box<Filling>),
    /// The volume has gone back, or does not arrive.
    Left,
}

#[derive(Default)]
struct Timer {
    armed: Cell<Option<Duration>>,
    changed: Signal,
    stopped: Cell<bool>,
}

impl Missing {
    /// Refers to the reservoir of the volume of this position, at the other end of a channel.
    pub fn new(rpc: &Rc<RpcChannel>, index: u32, geometry: Geometry) -> Self {
        let store = |address, priority| PeerStore::new(Rc::clone(rpc), address, geometry, priority);
        Self {
            urgent: store(Address::Reservoir(index), RequestPriority::Awaited),
            background: store(Address::ReservoirInBackground(index), RequestPriority::Bulk),
        }
    }

    fn store(&self, urgency: Urgency) -> &PeerStore {
        match urgency {
            Urgency::Urgent => &self.urgent,
            Urgency::Background => &self.background,
        }
    }
}

/// The parts of a lane that a filling store needs.
pub struct Surroundings {
    /// The executor of the lane.
    pub handle: Handle,
    /// The pool that buffers come from.
    pub buffers: BufferPool,
    /// The control plane of the lane.
    pub control: Rc<dyn Control>,
}

impl FillingStore {
    /// Makes the store of a volume that is to arrive. `known`: the missing blocks, after a restart.
    pub fn new(
        surroundings: Surroundings,
        key: StayKey,
        store: Rc<FlushDebt>,
        reservoir: Missing,
        settings: FillingSettings,
        known: Option<UnitMap>,
    ) -> Rc<Self> {
        let Surroundings { handle, buffers, control } = surroundings;
        let told = Told::new(settings.size_bytes, known);
        let filling = Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            handle,
            buffers,
            control,
            key,
            store,
            reservoir,
            state: RefCell::new(FillingState::Waiting(Box::new(told))),
            settings,
            gives_way: RefCell::default(),
            wait_max: Cell::default(),
            next_request: Cell::new(0),
            tickets: RefCell::default(),
            fetched: RefCell::default(),
            passed: RefCell::default(),
            timer: Rc::default(),
        });
        filling.handle.spawn(Self::run_timer(
            Rc::downgrade(&filling),
            Rc::clone(&filling.timer),
            filling.handle.clone(),
        ));
        filling
    }

    /// Makes background fetches give way to guests, once this host owns the volume.
    pub fn give_way(&self, gives_way: GivesWay) {
        self.gives_way.replace(gives_way);
    }

    /// Takes a missing-set update; when the last part has arrived, makes the set durable.
    ///
    /// # Errors
    /// [`IoError`]: the update is not valid.
    pub async fn tell(&self, is_base: bool, is_last: bool, runs: &[u8]) -> Result<(), IoError> {
        let complete = match &mut *self.state.borrow_mut() {
            FillingState::Waiting(told) => {
                told.take(is_base, is_last, runs).map_err(|NoPiece| IoError::Unsupported)?
            }
            FillingState::Filling(_) | FillingState::Left => return Err(IoError::Closed),
        };
        let Some(mut complete) = complete else { return Ok(()) };
        for (entry, is_first) in std::mem::take(&mut complete.entries) {
            let kept = self.keep(entry, is_first);
            if let Err(error) = kept.await {
                warn!(volume = %self.key.volume, %error, "cannot record the missing blocks of an arriving volume");
                return Err(IoError::os("record what is missing", Errno::NOSPC));
            }
        }
        match &mut *self.state.borrow_mut() {
            FillingState::Waiting(told) => told.kept(&complete),
            FillingState::Filling(_) | FillingState::Left => return Err(IoError::Closed),
        }
        Ok(())
    }

    /// Returns whether the durable missing set is exactly this one.
    pub fn knows(&self, manifest: Manifest) -> bool {
        matches!(&*self.state.borrow(), FillingState::Waiting(told) if told.manifest() == Some(manifest))
    }

    /// Begins to fill: this host owns the volume.
    pub fn begin(&self) {
        let mut state = self.state.borrow_mut();
        let FillingState::Waiting(told) = &mut *state else { return };
        info!(volume = %self.key.volume, units = told.units_missing(), "fetching missing blocks");
        let mut filling = told.begin(self.settings.clone());
        filling.set_paced(self.gives_way.borrow().filler());
        *state = FillingState::Filling(Box::new(filling));
        drop(state);
        self.event(FillingEvent::WaitsLimited { to: self.wait_max.get() });
    }

    /// Limits how long reads wait for a former host that does not answer, before they fail; `None`: no limit.
    pub fn limit_waits(&self, to: Option<Duration>) {
        self.wait_max.set(to);
        self.event(FillingEvent::WaitsLimited { to });
    }

    /// Stops fetching, because the former host is lost. Reads of missing blocks fail.
    pub fn give_up_missing(&self) {
        self.event(FillingEvent::MissingGivenUp);
    }

    /// Pauses or resumes background fetching. It pauses while the volume may be going to the host that has all blocks.
    pub fn rest(&self, rest: Rest) {
        self.event(match rest {
            Rest::Pause => FillingEvent::Rest,
            Rest::Resume => FillingEvent::GoOn,
        });
    }

    /// Returns the blocks that the host lacks which has this one's missing blocks ([`Filling::lacking_there`]); `None` if nothing
    /// is missing, or the volume is not this host's yet.
    pub(crate) fn lacking_there(
        &self,
        written: Option<LayeredBitmap>,
        block_size: BlockSize,
    ) -> Option<LayeredBitmap> {
        match &*self.state.borrow() {
            FillingState::Filling(machine) => Some(machine.lacking_there(written, block_size)),
            FillingState::Waiting(_) | FillingState::Left => written,
        }
    }

    /// Returns the first runs of missing blocks; empty before this host owns the volume.
    pub fn first_missing(&self, runs_max: usize) -> Vec<ByteRange> {
        match &*self.state.borrow() {
            FillingState::Waiting(_) | FillingState::Left => Vec::new(),
            FillingState::Filling(machine) => machine.first_missing(runs_max),
        }
    }

    /// Stops fetching: this host does not own the volume, and its image is deleted.
    pub fn leave(&self) {
        self.state.replace(FillingState::Left);
        let waiting: Vec<_> = self.tickets.borrow().keys().copied().collect();
        waiting.into_iter().for_each(|request| self.answer(request, Word::Left));
    }

    /// Returns the progress; `None` before this host owns the volume.
    pub fn progress(&self) -> Option<FillingProgress> {
        match &*self.state.borrow() {
            FillingState::Waiting(_) | FillingState::Left => None,
            FillingState::Filling(machine) => Some(machine.progress()),
        }
    }

    /// Returns whether this host owns the volume and blocks are missing.
    pub fn lacks_blocks(&self) -> bool {
        matches!(&*self.state.borrow(), FillingState::Filling(machine) if machine.progress().units_missing > 0)
    }

    fn is_whole(&self) -> bool {
        matches!(&*self.state.borrow(), FillingState::Filling(machine) if machine.is_whole())
    }

    fn keep(&self, entry: LogEntry, is_first: bool) -> impl Future<Output = Result<(), NotDurable>> + use<> {
        let size_bytes = self.settings.size_bytes;
        let kept = self.control.keeper().map(|keeper| match is_first {
            true => keeper.begin_presence(self.key, size_bytes, entry),
            false => keeper.add_presence(self.key, size_bytes, entry),
        });
        async move {
            match kept {
                Some(kept) => kept.await,
                None => Err(NotDurable { detail: "this host keeps no records of missing blocks".to_owned() }),
            }
        }
    }
}

impl FillingStore {
    fn event(&self, event: FillingEvent) {
        self.with_machine(|machine, now| machine.handle_event(now, event));
    }

    fn with_machine(&self, act: impl FnOnce(&mut Filling, Duration)) {
        if let FillingState::Filling(machine) = &mut *self.state.borrow_mut() {
            act(machine, self.handle.now());
        }
        loop {
            // Borrowed for the poll only: carrying an action out may bring the next event.
            let action = match &mut *self.state.borrow_mut() {
                FillingState::Filling(machine) => machine.poll_action(),
                _ => None,
            };
            let Some(action) = action else { break };
            self.carry_out(action);
        }
        self.arm_timer();
    }

    fn carry_out(&self, action: FillingAction) {
        match action {
            FillingAction::Admit { request } => self.answer(request, Word::Admitted),
            FillingAction::AdmitWith { request, fetch } => {
                let parts = self.passed.borrow_mut().remove(&fetch).unwrap_or_default();
                if let Some(ticket) = self.tickets.borrow().get(&request) {
                    ticket.passed.replace(parts);
                }
                self.answer(request, Word::Admitted);
            }
            FillingAction::PassBy { fetch, parts } => {
                self.spawn(move |filling| async move { filling.pass_by(fetch, parts).await });
            }
            FillingAction::Written { request } => self.answer(request, Word::Written),
            // N.B. the next daemon does not trust what this store may lose while the host runs, so it is made durable at once.
            FillingAction::Note { note, units } if self.control.store_starts_alone() => {
                self.spawn(move |filling| async move {
                    let result = filling.record_at_once(units).await;
                    filling.event(FillingEvent::Noted { note, result });
                });
            }
            FillingAction::Note { note, units } => {
                let size_bytes = self.settings.size_bytes;
                let noted =
                    self.control.keeper().map(|keeper| keeper.note_presence(self.key, size_bytes, units));
                self.spawn(move |filling| async move {
                    let result = match noted {
                        Some(noted) => noted.await.map_err(|error| {
                            warn!(volume = %filling.key.volume, %error, "cannot note what guests have written; trying again");
                            StoreFault
                        }),
                        None => Err(StoreFault),
                    };
                    filling.event(FillingEvent::Noted { note, result });
                });
            }
            FillingAction::Refuse { request, why } => self.answer(request, Word::Refused(why)),
            FillingAction::Flushed { request, result } => self.answer(request, Word::Flushed(result)),
            FillingAction::Fetch { fetch, range, urgency } => {
                self.spawn(move |filling| async move { filling.fetch(fetch, range, urgency).await });
            }
            FillingAction::Store { fetch, parts } => {
                let Some(fetched) = self.fetched.borrow_mut().remove(&fetch) else { return };
                self.spawn(move |filling| async move { filling.store(fetch, fetched, parts).await });
            }
            FillingAction::FlushStore { recording, on_behalf } => {
                self.spawn(move |filling| async move { filling.flush_store(recording, on_behalf).await });
            }
            FillingAction::Rewrite { rewrite, range } => {
                self.spawn(move |filling| async move { filling.rewrite(rewrite, range).await });
            }
            FillingAction::Record { recording, units } => {
                let kept = self.keep(LogEntry::Present { runs: units }, false);
                self.spawn(move |filling| async move {
                    let result = kept.await.map_err(|error| {
                        warn!(volume = %filling.key.volume, %error, "cannot record which blocks are present; trying again");
                        StoreFault
                    });
                    filling.event(FillingEvent::Recorded { recording, result });
                });
            }
            FillingAction::Whole => self.spawn(|filling| async move { filling.end().await }),
        }
    }

    async fn fetch(&self, fetch: FetchId, range: ByteRange, urgency: Urgency) {
        let fetched = self.fetch_part(range, urgency).await;
        let result = fetched.map(|part| drop(self.fetched.borrow_mut().insert(fetch, part)));
        self.event(FillingEvent::Fetched { fetch, result });
        self.fetched.borrow_mut().remove(&fetch);
    }

    async fn pass_by(&self, fetch: FetchId, parts: Vec<ByteRange>) {
        let parts = join_all(parts.into_iter().map(|part| self.fetch_part(part, Urgency::Urgent))).await;
        let parts = parts.into_iter().collect::<Result<Vec<_>, _>>();
        let result = parts.map(|parts| drop(self.passed.borrow_mut().insert(fetch, parts)));
        self.event(FillingEvent::Passed { fetch, result });
        // Its reader may have left.
        self.passed.borrow_mut().remove(&fetch);
    }

    /// Reads from the reservoir; returns the bytes with their offset.
    async fn fetch_part(&self, range: ByteRange, urgency: Urgency) -> Result<(u64, Buffer), FetchFault> {
        let length = usize::try_from(range.length).unwrap_or(0);
        let read = self.reservoir.store(urgency).read(range.offset, self.buffers.take(length)).await;
        read.map(|buffer| (range.offset, buffer)).map_err(|fault| {
            let fault = fetch_fault(&fault);
            if fault == FetchFault::Unreadable {
                let (offset, length) = (range.offset, range.length);
                error!(volume = %self.key.volume, offset, length, "the former host cannot read missing blocks");
            }
            fault
        })
    }

    async fn store(&self, fetch: FetchId, (origin, fetched): (u64, Buffer), parts: Vec<ByteRange>) {
        let writes = parts.into_iter().map(|part| {
            let start = usize::try_from(part.offset.saturating_sub(origin)).unwrap_or(usize::MAX);
            let length = usize::try_from(part.length).unwrap_or(usize::MAX);
            mover::write_data(&*self.store, part.offset, fetched.slice(start, length), ZeroMode::MayUnmap)
        });
        // N.B. all writes are awaited: a write in flight must not count as ended.
        let written = join_all(writes).await.into_iter().try_for_each(|run| run.map(drop));
        let result = written.map_err(|error: IoError| {
            warn!(volume = %self.key.volume, %error, "cannot store fetched blocks; trying again");
            StoreFault
        });
        self.event(FillingEvent::Stored { fetch, result });
    }

    async fn rewrite(&self, rewrite: RewriteId, range: ByteRange) {
        let length = usize::try_from(range.length).unwrap_or(0);
        let rewritten = async {
            let bytes = self.store.read(range.offset, self.buffers.take(length)).await?;
            mover::write_data(&*self.store, range.offset, bytes, ZeroMode::MayUnmap).await.map(drop)
        };
        let result = rewritten.await.map_err(|error: IoError| {
            warn!(volume = %self.key.volume, %error, "cannot write again what a failed flush may have lost; trying again");
            StoreFault
        });
        self.event(FillingEvent::Rewritten { rewrite, result });
    }

    async fn record_at_once(&self, units: Vec<BlockRange>) -> Result<(), StoreFault> {
        if self.is_doubted(&units) {
            return Err(StoreFault);
        }
        self.store.ours().flush().await.map_err(|_| StoreFault)?;
        let kept = self.keep(LogEntry::Present { runs: units }, false).await;
        kept.map_err(|error| {
            warn!(volume = %self.key.volume, %error, "cannot record what guests have written; trying again");
            StoreFault
        })
    }

    fn is_doubted(&self, units: &[BlockRange]) -> bool {
        match &*self.state.borrow() {
            FillingState::Filling(machine) => units.iter().any(|run| machine.is_doubted(*run)),
            FillingState::Waiting(_) | FillingState::Left => false,
        }
    }

    async fn flush_store(&self, recording: RecordingId, on_behalf: OnBehalf) {
        let flushed = match on_behalf {
            OnBehalf::Guests => self.store.flush().await,
            OnBehalf::Filling => self.store.ours().flush().await,
        };
        let result = flushed.map_err(|_| StoreFault);
        self.event(FillingEvent::StoreFlushed { recording, result });
    }

    /// Records that nothing is missing, and lets the former host go.
    async fn end(&self) {
        let volume = self.key.volume;
        while let Err(fault) = self.control.commit(vec![Record::Filled { volume }]).await {
            warn!(%volume, %fault, "cannot record that the volume is complete; trying again");
            self.handle.sleep(COMMIT_RETRY).await;
        }
        let progress = self.progress().unwrap_or_default();
        info!(%volume, pulled = progress.units_pulled, pushed = progress.units_pushed, "the volume is complete");
        if let Some(keeper) = self.control.keeper() {
            // No daemon reads it again, so a failure does not matter.
            drop(keeper.forget_presence(self.key));
        }
    }

    fn answer(&self, request: RequestId, word: Word) {
        if let Some(ticket) = self.tickets.borrow().get(&request) {
            ticket.answer.set(Some(word));
            if let Some(waiter) = ticket.waiter.take() {
                waiter.wake();
            }
        }
    }

    fn spawn<F: Future<Output = ()> + 'static>(&self, task: impl FnOnce(Rc<Self>) -> F) {
        if let Some(filling) = self.me.upgrade() {
            self.handle.spawn(task(filling));
        }
    }

    fn arm_timer(&self) {
        let deadline = match &*self.state.borrow() {
            FillingState::Filling(machine) => machine.poll_timeout(),
            _ => None,
        };
        let Some((deadline, _)) = deadline else { return };
        if self.timer.armed.get().is_none_or(|armed| deadline < armed) {
            self.timer.armed.set(Some(deadline));
            self.timer.changed.notify();
        }
    }

    async fn run_timer(me: Weak<Self>, timer: Rc<Timer>, handle: Handle) {
        while !timer.stopped.get() {
            let armed = timer.armed.get();
            let is_news = || (timer.stopped.get() || timer.armed.get() != armed).then_some(());
            let changed = timer.changed.wait_for(is_news);
            match armed {
                None => changed.await,
                Some(deadline) => {
                    let sleep = std::pin::pin!(handle.sleep_until(deadline));
                    if let Either::Left(_) = select(sleep, std::pin::pin!(changed)).await {
                        timer.armed.set(None);
                        let Some(filling) = me.upgrade() else { return };
                        filling.with_machine(Filling::handle_timeout);
                    }
                }
            }
        }
    }
}

impl Drop for FillingStore {
    fn drop(&mut self) {
        self.timer.stopped.set(true);
        self.timer.changed.notify();
    }
}

fn fetch_fault(error: &IoError) -> FetchFault {
    match error {
        IoError::Os { errno, .. } if *errno != Errno::CONNRESET => FetchFault::Unreadable,
        // The channel is not open again yet, or leads to a restarted peer.
        _ => FetchFault::Away,
    }
}
