//! One volume's part in the source's half of a migration, on the volume's own lane.
//!
//! ```text
//!   driver, on the lane of the first volume ──SourceOrder──► part ──► gate, copying, store
//!        ▲                                                       │
//!        └──────────────────────── Event ────────────────────────┘
//! ```
//! The driver's own volume takes its orders by a call. Every other volume of the migration is on its own lane: orders and events
//! are messages between two threads, in order both ways.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::{BlockDevice, BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, join, select};
use migration::planted::{Bug, broken};
use migration::source::{Costs, SourceEvent};
use migration::strategy::{Copying, CopyingSettings, Round, VolumeEvent};
use migration::target::FlushResult;
use migration::{Attempt, VolumeIndex, VolumeProgress};
use tracing::warn;

use super::{CopySettings, Event, OutgoingVolume, flush};
use crate::REPORT_INTERVAL;
use crate::cloning;
use crate::copies_elsewhere;
use crate::copy::VolumeCopy;
use crate::handle::Rest;
use crate::peer::PriorityBoost;
use crate::reservoir::Served;
use crate::shared_storage::HeldLease;
use crate::stack::{GateMode, Home, Volume};

#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceOrder {
    /// Hold its requests. Report when none is in flight, and when one waits.
    CloseGate(Attempt),
    OpenGate,
    /// Give copied and mirrored data priority over a VM's memory, or not. While the gate is closed they always have priority.
    ShareLink(PriorityBoost),
    /// Flush its store while its guest works.
    Settle(u32),
    /// Flush its store behind its closed gate, while the target prepares.
    Flush(Attempt),
    Copying(VolumeEvent),
    /// The target's daemon has restarted: inform the copying, and confirm.
    PeerRestarted,
    SetBandwidth(Option<u64>),
    SetImpact(Option<pacer::Impact>),
    /// Confirms that the driver received that the replica is behind.
    BehindWasHeard,
    StopCopying,
    /// Send nothing to a store that may be the owner's.
    Release,
    /// Serve the remaining clients here from the new owner.
    ServeFromSuccessor,
    /// Serve it from its own store again, with this generation; `None`: with its present one.
    TakeBack(Option<Generation>),
    /// Drop its store, before the image is deleted or renamed.
    LetGo,
}

pub(crate) struct SourceVolume {
    index: VolumeIndex,
    handle: Handle,
    leaving: OutgoingVolume,
    /// The source's store, for a hand-back; `None` once the image is deleted or renamed.
    source: RefCell<Option<Rc<dyn BlockDevice>>>,
    copy: RefCell<Option<Rc<VolumeCopy>>>,
    costs: RefCell<Costs>,
    has_left: Cell<bool>,
    rounds: RefCell<Vec<Round>>,
    events: mpsc::UnboundedSender<Event>,
}

impl SourceVolume {
    pub(crate) fn new(
        handle: &Handle,
        buffers: &BufferPool,
        copying: Option<&CopySettings>,
        index: VolumeIndex,
        leaving: OutgoingVolume,
        events: mpsc::UnboundedSender<Event>,
    ) -> Rc<Self> {
        let copy =
            copying.map(|settings| start_copy(handle, buffers, settings, index, &leaving, events.clone()));
        let part = Rc::new(Self {
            index,
            handle: handle.clone(),
            source: RefCell::new(Some(leaving.volume.store())),
            leaving,
            copy: RefCell::new(copy),
            costs: RefCell::default(),
            has_left: Cell::default(),
            rounds: RefCell::default(),
            events,
        });
        if let Some(filling) = &part.leaving.filling {
            // N.B. The volume returns to the host that has its missing blocks: to fetch them here would be useless.
            filling.rest(Rest::Pause);
        }
        if let Some(lease) = &part.leaving.lease {
            let lossy = Rc::downgrade(&part);
            lease.on_loss(Box::new(move || {
                if let Some(part) = lossy.upgrade() {
                    part.tell_copy(VolumeEvent::TargetRestarted);
                }
            }));
        }
        part
    }

    pub(crate) fn carry_out(&self, order: SourceOrder) {
        let volume = &self.leaving.volume;
        match order {
            SourceOrder::CloseGate(attempt) => {
                self.tell_copy(VolumeEvent::GateCloses);
                // N.B. missing blocks are now downtime, unless they arrive while a VM's devices are sent.
                self.set_boost(PriorityBoost::AboveMemory);
                let closed = volume.close();
                let index = self.index;
                self.answer_after(async move {
                    closed.await;
                    SourceEvent::GateClosed { volume: index, attempt }
                });
                self.say_if_held(attempt);
            }
            SourceOrder::OpenGate => {
                self.set_boost(PriorityBoost::Off);
                self.tell_copy(VolumeEvent::GateOpens);
                volume.open();
            }
            SourceOrder::ShareLink(boost) => {
                if volume.gate().mode() == GateMode::Open {
                    self.set_boost(boost);
                }
            }
            SourceOrder::Settle(settling) => {
                let (index, volume) = (self.index, Rc::clone(volume));
                self.answer_after(async move {
                    let result = flush_own(&volume).await;
                    SourceEvent::Settled { volume: index, settling, result }
                });
            }
            SourceOrder::Flush(attempt) => {
                // The target flushes and prepares meanwhile.
                self.tell_copy(VolumeEvent::Freeze);
                let (index, volume) = (self.index, Rc::clone(volume));
                let lease = self.leaving.lease.clone();
                self.answer_after(async move {
                    // N.B. the target waits for its image before it prepares.
                    let (flushed, given) = join(flush_own(&volume), give_back(lease)).await;
                    let result = if given == FlushResult::Failed { given } else { flushed };
                    SourceEvent::Flushed { volume: index, attempt, result }
                });
            }
            SourceOrder::Copying(event) => {
                if let Some(reservoir) = &self.leaving.reservoir {
                    match event {
                        VolumeEvent::Pause => reservoir.rest(Rest::Pause),
                        VolumeEvent::Resume => reservoir.rest(Rest::Resume),
                        _ => {}
                    }
                }
                self.tell_copy(event);
            }
            SourceOrder::PeerRestarted => {
                // N.B. The event is sent first: the copying knows of the restart when it makes later notices.
                self.send(Event::RestartHeard(self.index));
                self.tell_copy(VolumeEvent::TargetRestarted);
            }
            SourceOrder::SetBandwidth(rate) => {
                if let Some(reservoir) = &self.leaving.reservoir {
                    reservoir.set_rate(rate);
                }
                if let Some(copy) = &*self.copy.borrow() {
                    copy.set_bandwidth(rate);
                }
            }
            SourceOrder::SetImpact(impact) => {
                if let Some(reservoir) = &self.leaving.reservoir {
                    reservoir.set_impact(self.handle.now(), impact);
                }
                if let Some(copy) = &*self.copy.borrow() {
                    copy.set_impact(impact);
                }
            }
            SourceOrder::BehindWasHeard => {
                if let Some(copy) = &*self.copy.borrow() {
                    copy.behind_was_heard();
                }
            }
            SourceOrder::StopCopying => {
                self.stop_copy();
                volume.remove_mirror();
            }
            SourceOrder::Release => {
                self.leave_reservoir();
                self.stop_copy();
            }
            SourceOrder::ServeFromSuccessor => {
                self.has_left.set(true);
                self.leave_reservoir();
                if let (Home::Elsewhere(owner), Some(successor)) = (volume.home(), &self.leaving.successor)
                    && Rc::ptr_eq(&owner, successor)
                {
                    // An earlier driver, which was replaced, has handled it.
                    volume.open();
                    return;
                }
                if let Some(filling) = &self.leaving.filling {
                    filling.leave();
                }
                let departed = self.leaving.to.and_then(|to| volume.chronicler().departs(to));
                if let Some(successor) = &self.leaving.successor {
                    volume.change_hands(Home::Elsewhere(Rc::clone(successor)), volume.generation().next());
                    volume.open();
                }
                if let (Some(_), Some(rpc)) = (self.leaving.to, self.leaving.channel.clone()) {
                    copies_elsewhere::tell(&self.handle, volume, departed, self.index, rpc);
                }
            }
            SourceOrder::TakeBack(generation) => {
                if let Some(source) = &*self.source.borrow() {
                    volume.change_hands(
                        Home::Here(Rc::clone(source)),
                        generation.unwrap_or(volume.generation()),
                    );
                    volume.open();
                }
            }
            SourceOrder::LetGo => {
                let (costs, rounds) = (self.costs(), self.progress().rounds);
                self.costs.replace(costs);
                self.rounds.replace(rounds);
                self.copy.replace(None);
                self.source.replace(None);
                if let Some(reservoir) = &self.leaving.reservoir {
                    // N.B. Nothing is missing at the target, so late requests for blocks find no reservoir.
                    reservoir.close();
                }
            }
        }
    }

    pub(crate) fn progress(&self) -> VolumeProgress {
        let copy = self.copy.borrow();
        let Some(copy) = &*copy else {
            let rounds = self.rounds.borrow().clone();
            return VolumeProgress { costs: self.costs(), rounds, ..VolumeProgress::default() };
        };
        let mut progress = copy.progress();
        if let Some(reservoir) = self.leaving.reservoir.as_ref().filter(|_| self.has_left.get()) {
            // Blocks that were left behind count as on their way once the target asks for them.
            let served = reservoir.served().bytes.min(progress.bytes_missing);
            progress.bytes_missing -= served;
            progress.bytes_synchronised += served;
            progress.costs = self.costs();
            let all = progress.bytes_missing + progress.bytes_synchronised;
            progress.fraction = if all == 0 { 1.0 } else { progress.bytes_synchronised as f64 / all as f64 };
        }
        progress
    }

    pub(crate) fn costs(&self) -> Costs {
        let mut costs = match &*self.copy.borrow() {
            Some(copy) => copy.with_machine(|machine| machine.costs()),
            None => return *self.costs.borrow(),
        };
        if let Some(reservoir) = &self.leaving.reservoir {
            let Served { bytes, pulled } = reservoir.served();
            costs.bytes_copied += bytes;
            costs.tally.bytes_followed = bytes;
            costs.tally.bytes_pulled = pulled;
        }
        costs
    }

    fn leave_reservoir(&self) {
        if let Some(reservoir) = &self.leaving.reservoir {
            reservoir.leave();
        }
    }

    pub(crate) fn peer_restarted(&self) {
        self.tell_copy(VolumeEvent::TargetRestarted);
    }

    pub(crate) async fn follow(self: Rc<Self>, mut orders: mpsc::UnboundedReceiver<SourceOrder>) {
        // Dropped even by a panic.
        let _gone = Gone { index: self.index, events: self.events.clone() };
        loop {
            let sleep = self.handle.sleep(REPORT_INTERVAL);
            match select(orders.next(), sleep).await {
                Either::Left((Some(order), _)) => {
                    let tells = matches!(order, SourceOrder::StopCopying | SourceOrder::Release);
                    self.carry_out(order);
                    if tells {
                        self.tell_progress();
                    }
                }
                Either::Left((None, _)) => break,
                Either::Right(_) => self.tell_progress(),
            }
        }
        // A driver that ended in order has said so. A driver whose thread failed has not: only the journal knows the result of
        // its attempt, so the gate stays as it is.
        self.stop_copy();
        if self.copy.replace(None).is_some() {
            self.leaving.volume.remove_mirror();
        }
    }

    fn say_if_held(&self, attempt: Attempt) {
        let (events, volume) = (self.events.clone(), self.index);
        let held = self.leaving.volume.holds_a_request();
        self.handle.spawn(async move {
            if held.await {
                let _ = events.unbounded_send(Event::Source(SourceEvent::RequestHeld { volume, attempt }));
            }
        });
    }

    fn tell_progress(&self) {
        self.send(Event::Told(self.index, Box::new(self.progress())));
    }

    fn tell_copy(&self, event: VolumeEvent) {
        if let Some(copy) = &*self.copy.borrow() {
            copy.event(event);
        }
    }

    fn set_boost(&self, boost: PriorityBoost) {
        if let Some(channel) = &self.leaving.channel {
            channel.set_boost(boost);
        }
    }

    fn stop_copy(&self) {
        self.set_boost(PriorityBoost::Off);
        if let Some(copy) = &*self.copy.borrow() {
            copy.stop();
        }
        if let Some(lease) = &self.leaving.lease {
            lease.close();
        }
    }

    fn answer_after(&self, task: impl Future<Output = SourceEvent> + 'static) {
        let events = self.events.clone();
        self.handle.spawn(async move {
            let event = Event::Source(task.await);
            let _ = events.unbounded_send(event);
        });
    }

    fn send(&self, event: Event) {
        let _ = self.events.unbounded_send(event);
    }
}

impl Drop for SourceVolume {
    /// If the volume has not gone back, its filling resumes.
    fn drop(&mut self) {
        if let Some(filling) = &self.leaving.filling {
            filling.rest(Rest::Resume);
        }
    }
}

async fn flush_own(volume: &Volume) -> FlushResult {
    let result = flush(&volume.store_for_us()).await;
    if result == FlushResult::Failed {
        volume.chronicler().store_failed().await;
    }
    result
}

/// Closes a leased image of the target once all of its data is durable.
async fn give_back(lease: Option<Rc<HeldLease>>) -> FlushResult {
    let Some(lease) = lease else { return FlushResult::Durable };
    match lease.give_back().await {
        Ok(()) => FlushResult::Durable,
        Err(error) => {
            warn!(%error, "the target's image could not be flushed");
            FlushResult::Failed
        }
    }
}

struct Gone {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Event>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.events.unbounded_send(Event::PartGone(self.index));
    }
}

/// Begins to copy a volume, with a mirror in its live stack.
pub(crate) fn start_copy(
    handle: &Handle,
    buffers: &BufferPool,
    settings: &CopySettings,
    index: VolumeIndex,
    leaving: &OutgoingVolume,
    notices: mpsc::UnboundedSender<Event>,
) -> Rc<VolumeCopy> {
    let source = leaving.volume.store();
    let block_size = leaving.volume.block_size();
    let copying = CopyingSettings {
        block_size,
        size_bytes: source.geometry().size,
        pacing: settings.pacing.clone(),
        wait_max: settings.limits.mirror_wait_max,
        no_progress_max: settings.limits.no_progress_max,
    };
    let replica = leaving.replica.clone();
    let (cloning, gives_way, pacing) = cloning::begin(&source, &replica, settings);
    let copying = CopyingSettings { pacing, ..copying };
    let machine = Copying::new(copying, settings.strategy)
        .carrying(replica.carried.clone())
        .paced(gives_way.mover(handle.now()))
        .ending_by(handle.now(), gives_way.ends_by, gives_way.impact);
    let machine = match settings.gives_way.budget.clone() {
        Some(budget) => machine.sharing(budget),
        None => machine,
    };
    let copy = VolumeCopy::new(index, handle.clone(), source, replica, buffers.clone(), machine, notices);
    if let Some(cloning) = cloning {
        copy.clone_chunks(cloning);
    }
    let in_place = leaving.volume.insert_mirror(Rc::clone(&copy));
    let begins = Rc::clone(&copy);
    let (chronicler, known) = (Rc::clone(leaving.volume.chronicler()), leaving.replica.known);
    let forgets_writes = leaving.to.is_none() && broken(Bug::CopyForgetsWrites);
    let filling = leaving.filling.clone();
    handle.spawn(async move {
        in_place.await;
        // N.B. Asked after the wait: writes that passed the mirror by are in the chronicle once they have ended.
        let lacking = known.and_then(|(of, generation)| match forgets_writes {
            true => chronicler.lacked_when_kept(of),
            false => chronicler.lacking(of, generation),
        });
        let lacking = match filling {
            None => lacking,
            Some(filling) => filling.lacking_there(lacking, block_size),
        };
        match lacking {
            Some(lacking) => begins.begin_with(&lacking),
            None => begins.begin().await,
        }
    });
    copy
}
