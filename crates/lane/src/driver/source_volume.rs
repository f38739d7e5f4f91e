//! One volume's part in the source's half of a migration: what is done on the lane that has the volume.
//!
//! ```text
//!   driver, on the lane of the first volume ──SourceOrder──► part ──► gate, copying, store
//!        ▲                                                       │
//!        └──────────────────────── Event ────────────────────────┘
//! ```
//! The driver's own volume takes its orders by a call. Every other volume of the migration has a lane of its own: it is
//! on a lane of its own, and orders and events are messages between two threads, in order both ways.

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
use crate::copies_elsewhere;
use crate::copy::VolumeCopy;
use crate::handle::Rest;
use crate::peer::PriorityBoost;
use crate::reservoir::Served;
use crate::shared_storage::HeldLease;
use crate::stack::{GateMode, Home, Volume};

/// What a driver has done for a volume of its migration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceOrder {
    /// Hold its requests, and say when none is in flight, and when one waits.
    CloseGate(Attempt),
    /// Let them go on.
    OpenGate,
    /// Let what is copied and mirrored go before a VM's memory, or after it; while the gate is closed it goes before
    /// it in any case.
    ShareLink(PriorityBoost),
    /// Flush its store while its guest works.
    Settle(u32),
    /// Flush its store behind its closed gate; the target promises meanwhile.
    Flush(Attempt),
    Copying(VolumeEvent),
    /// The target's host is another process now: tell its copying, and say that it knows.
    PeerRestarted,
    /// Change the mover's rate limit.
    SetBandwidth(Option<u64>),
    /// That it is behind has been heard.
    BehindWasHeard,
    /// Copy and mirror no longer; the guests go on here.
    StopCopying,
    /// Send nothing to a store any more that may be the owner.
    Release,
    /// Let the clients that stay here go on at the new owner.
    ServeFromSuccessor,
    /// Serve it from its own store again, with this generation; `None`: with the one that it has.
    TakeBack(Option<Generation>),
    /// Let go of its store: the image is dealt with next.
    LetGo,
}

/// One volume's part.
pub(crate) struct SourceVolume {
    index: VolumeIndex,
    handle: Handle,
    leaving: OutgoingVolume,
    /// The source's store, for a hand-back; `None` once the image is dealt with.
    source: RefCell<Option<Rc<dyn BlockDevice>>>,
    /// `None` if nothing is to be copied any more.
    copy: RefCell<Option<Rc<VolumeCopy>>>,
    /// What the copying cost that is over.
    costs: RefCell<Costs>,
    /// Whether the volume is its target's.
    has_left: Cell<bool>,
    rounds: RefCell<Vec<Round>>,
    events: mpsc::UnboundedSender<Event>,
}

impl SourceVolume {
    /// Makes the part of a volume, and, if it is to be copied, puts a mirror into its live stack.
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
            // N.B. what comes from there from now on is of no use there.
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

    /// Does what the driver says.
    pub(crate) fn carry_out(&self, order: SourceOrder) {
        let volume = &self.leaving.volume;
        match order {
            SourceOrder::CloseGate(attempt) => {
                self.tell_copy(VolumeEvent::GateCloses);
                // N.B. what the replica lacks now is downtime, unless it arrives while a VM's devices are sent.
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
                // The target flushes, too, and promises.
                self.tell_copy(VolumeEvent::Freeze);
                let (index, volume) = (self.index, Rc::clone(volume));
                let lease = self.leaving.lease.clone();
                self.answer_after(async move {
                    // N.B. the target waits for its image before it promises.
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
                // N.B. first: what the copying says from here on is said by one that knows.
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
                    // A driver before this one, which was set aside, has seen to it.
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
                    // N.B. nothing is missing at the target: what is asked for late finds nothing.
                    reservoir.close();
                }
            }
        }
    }

    /// How far it is now.
    pub(crate) fn progress(&self) -> VolumeProgress {
        let copy = self.copy.borrow();
        let Some(copy) = &*copy else {
            let rounds = self.rounds.borrow().clone();
            return VolumeProgress { costs: self.costs(), rounds, ..VolumeProgress::default() };
        };
        let now = self.handle.now();
        let mut progress = copy.with_machine(|machine| machine.progress(now));
        if let Some(reservoir) = self.leaving.reservoir.as_ref().filter(|_| self.has_left.get()) {
            // What was left behind is on its way, too, once the target asks for it.
            let served = reservoir.served().bytes.min(progress.bytes_missing);
            progress.bytes_missing -= served;
            progress.bytes_synchronised += served;
            progress.costs = self.costs();
            let all = progress.bytes_missing + progress.bytes_synchronised;
            progress.fraction = if all == 0 { 1.0 } else { progress.bytes_synchronised as f64 / all as f64 };
        }
        progress
    }

    /// What its copying has cost.
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

    /// The peer has restarted, as the volume's own line says: before anything that is submitted from here on has ended.
    pub(crate) fn peer_restarted(&self) {
        self.tell_copy(VolumeEvent::TargetRestarted);
    }

    /// Takes the orders of a driver on another lane until it has ended, and tells it every so often how far it is.
    pub(crate) async fn follow(self: Rc<Self>, mut orders: mpsc::UnboundedReceiver<SourceOrder>) {
        // Also if this thread panics.
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
        // A driver that ended in order has said so before; one whose thread has failed has not. What became of its
        // try only the journal knows, so the gate stays as it is.
        self.stop_copy();
        if self.copy.replace(None).is_some() {
            self.leaving.volume.remove_mirror();
        }
    }

    /// Says it once if a request waits at the gate that has just been closed.
    fn say_if_held(&self, attempt: Attempt) {
        let (events, volume) = (self.events.clone(), self.index);
        let held = self.leaving.volume.holds_a_request();
        self.handle.spawn(async move {
            if held.await {
                // The driver is gone only when the migration has ended.
                let _ = events.unbounded_send(Event::Source(SourceEvent::RequestHeld { volume, attempt }));
            }
        });
    }

    fn tell_progress(&self) {
        self.send(Event::Told(self.index, Box::new(self.progress())));
    }

    fn tell_copy(&self, event: VolumeEvent) {
        // Once the copying is over nobody need hear of anything.
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
            // The driver is gone only when the migration has ended.
            let _ = events.unbounded_send(event);
        });
    }

    fn send(&self, event: Event) {
        // As above.
        let _ = self.events.unbounded_send(event);
    }
}

impl Drop for SourceVolume {
    /// Of a volume that has not gone back, what it lacks goes on to come.
    fn drop(&mut self) {
        if let Some(filling) = &self.leaving.filling {
            filling.rest(Rest::Resume);
        }
    }
}

/// Flushes a volume's own store.
async fn flush_own(volume: &Volume) -> FlushResult {
    let result = flush(&volume.store_for_us()).await;
    if result == FlushResult::Failed {
        volume.chronicler().store_failed().await;
    }
    result
}

/// Closes an image of the target's that this host holds a lease of, when all of it is durable.
async fn give_back(lease: Option<Rc<HeldLease>>) -> FlushResult {
    let Some(lease) = lease else { return FlushResult::Durable };
    match lease.give_back().await {
        Ok(()) => FlushResult::Durable,
        Err(error) => {
            warn!(%error, "what was written to the target's image could not be flushed");
            FlushResult::Failed
        }
    }
}

/// Says that a part is no longer there.
struct Gone {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Event>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.events.unbounded_send(Event::PartGone(self.index));
    }
}

fn start_copy(
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
    let machine = Copying::new(copying, settings.strategy).carrying(replica.carried.clone());
    let copy = VolumeCopy::new(index, handle.clone(), source, replica, buffers.clone(), machine, notices);
    let in_place = leaving.volume.insert_mirror(Rc::clone(&copy));
    let begins = Rc::clone(&copy);
    let (chronicler, known) = (Rc::clone(leaving.volume.chronicler()), leaving.replica.known);
    let forgets_writes = leaving.to.is_none() && broken(Bug::CopyForgetsWrites);
    let filling = leaving.filling.clone();
    handle.spawn(async move {
        in_place.await;
        // Not before: what passed the mirror by is in the chronicle when it has ended.
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
