//! One volume's part in the target's half of a migration: what is done on the lane that has the volume.
//!
//! As at the source (`source_volume.rs`): the driver's own volume takes its orders by a call, every other one has a lane of its own
//! by a lane of its own, and orders and events are messages between two threads.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle, IoError};
use chronicle::Generation;
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::filling::Manifest;
use migration::planted::{Bug, broken};
use migration::target::{FlushResult, TargetEvent};
use migration::{Attempt, VolumeIndex};
use tracing::warn;

use super::{IncomingVolume, flush};
use crate::filling::FillingStore;
use crate::peer::Service;
use crate::peer::head::Address;
use crate::shared_storage::LeasedImage;
use crate::stack::{GateMode, Home};

/// Bytes read from the target's store to see whether it answers, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

/// What a driver has done for a volume of its migration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TargetOrder {
    /// Flush its store, which is to be promised: if its image was leased, that is taken back first.
    Flush(Attempt),
    /// The same, and see that exactly this is known to be missing.
    FlushHollow(Attempt, Manifest),
    /// Nothing is promised any more: the source may have its image again.
    PromiseNothing,
    /// Serve it from its store, its gate still closed, and see whether that answers.
    Start,
    /// The same, and fetch what it lacks from its source.
    StartHollow,
    /// Let its requests through.
    Open,
    Close,
    /// Hold them, and say how many have changed the volume since they were let through.
    CloseAndCount,
    /// Leave its store, which is deleted next: a volume that had clients here leads to its owner again, as before.
    LeaveStore,
}

/// What a driver of a target's half waits for.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    /// What its machine is told.
    Target(TargetEvent),
    /// The VM does not run, for this reason.
    VmDoesNotRun(String),
    /// So many changes were let through before the gate closed.
    Changes(VolumeIndex, u64),
}

/// One volume's part.
pub(crate) struct TargetVolume {
    index: VolumeIndex,
    handle: Handle,
    buffers: BufferPool,
    coming: IncomingVolume,
    /// How long its store may take to answer the first read.
    trial_max: Duration,
    /// What lets a source on another host use the store.
    service: Option<Rc<Service>>,
    /// Changes that the gate had let through when it was opened last.
    changes_before: Cell<u64>,
    /// Where a volume with clients here led to before it was started, and its generation; `None`: nowhere.
    led_to: RefCell<Option<(Home, Generation)>>,
    events: mpsc::UnboundedSender<Heard>,
}

impl TargetVolume {
    /// Makes the part of a volume.
    pub(crate) fn new(
        handle: Handle,
        buffers: BufferPool,
        index: VolumeIndex,
        coming: IncomingVolume,
        trial_max: Duration,
        service: Option<Rc<Service>>,
        events: mpsc::UnboundedSender<Heard>,
    ) -> Rc<Self> {
        let (changes_before, led_to) = (Cell::new(0), RefCell::default());
        let part =
            Self { index, handle, buffers, coming, trial_max, service, changes_before, led_to, events };
        // After a restart it may be promised: the driver knows, and says if it is not.
        part.hold_changes();
        Rc::new(part)
    }

    /// Does what the driver says.
    pub(crate) fn carry_out(&self, order: TargetOrder) {
        let (index, volume) = (self.index, &self.coming.volume);
        match order {
            TargetOrder::Flush(attempt) => {
                self.hold_changes();
                // N.B. it fails until what copies has been told of a flush that failed before.
                let (store, leased) = (self.coming.store.ours(), self.coming.leased.clone());
                self.answer_after(async move {
                    let result = match take_back(leased).await {
                        Ok(()) => flush(&store).await,
                        Err(error) => {
                            warn!(%error, "the target's image is not closed by the source's host, so nothing is promised");
                            FlushResult::Failed
                        }
                    };
                    TargetEvent::Flushed { volume: index, attempt, result }
                });
            }
            TargetOrder::FlushHollow(attempt, manifest) => {
                self.hold_changes();
                let knows = self.coming.filling.as_ref().is_some_and(|filling| filling.knows(manifest));
                if !knows {
                    warn!("what a source leaves behind is not what it told, so nothing is promised");
                }
                let store = self.coming.store.ours();
                self.answer_after(async move {
                    let result = if knows { flush(&store).await } else { FlushResult::Failed };
                    TargetEvent::Flushed { volume: index, attempt, result }
                });
            }
            TargetOrder::PromiseNothing => {
                if let Some(service) = &self.service {
                    service.let_change(Address::Replica(index.0));
                }
                if let Some(leased) = &self.coming.leased {
                    leased.promise_nothing();
                }
            }
            TargetOrder::Start => self.start(None),
            TargetOrder::StartHollow => self.start(self.coming.filling.clone()),
            TargetOrder::Open => {
                self.changes_before.set(volume.gate().changes_admitted());
                volume.open();
            }
            TargetOrder::Close => {
                // It is handed back.
                drop(volume.close());
                self.leave_filling();
            }
            TargetOrder::CloseAndCount => {
                // N.B. closed first: what has not passed yet will not.
                drop(volume.close());
                let changes = volume.gate().changes_admitted() - self.changes_before.get();
                // The driver is gone only when the migration has ended.
                let _ = self.events.unbounded_send(Heard::Changes(index, changes));
            }
            TargetOrder::LeaveStore => {
                if let Some(service) = &self.service {
                    // N.B. what waits is not written any more: an image that another host reads stays, and may be come back to again.
                    service.withdraw(Address::Replica(index.0));
                }
                self.leave_filling();
                if let Some((home, generation)) = self.led_to.take() {
                    volume.change_hands(home, generation);
                    volume.open();
                }
            }
        }
    }

    fn leave_filling(&self) {
        if let Some(filling) = &self.coming.filling {
            filling.leave();
        }
    }

    /// Takes the orders of a driver on another lane until it has ended.
    pub(crate) async fn follow(self: Rc<Self>, mut orders: mpsc::UnboundedReceiver<TargetOrder>) {
        // Also if this thread panics.
        let _gone = Gone { index: self.index, events: self.events.clone() };
        while let Some(order) = orders.next().await {
            self.carry_out(order);
        }
    }

    /// Puts the volume onto its target store, its gate still closed, and sees whether that answers in time.
    fn start(&self, filling: Option<Rc<FillingStore>>) {
        let (index, volume) = (self.index, Rc::clone(&self.coming.volume));
        if let Some(service) = &self.service {
            // N.B. whatever the source still sends, late: the store is a volume's from here on (design §5.10).
            service.withdraw(Address::Replica(index.0));
        }
        if volume.gate().mode() == GateMode::Open {
            // Clients here are led to the owner so far. N.B. none may write before it is known that the store answers: what
            // has passed the gate cannot be given back (design §5.14).
            self.led_to.replace(Some((volume.home(), volume.generation())));
            if !broken(Bug::OpenOnTrial) {
                drop(volume.close());
            }
        }
        // N.B. what was promised is open here, and locked.
        let promised = self.coming.leased.as_ref().and_then(|leased| leased.here());
        let own = promised.unwrap_or_else(|| Rc::clone(&self.coming.store) as Rc<dyn BlockDevice>);
        let store = match filling {
            Some(filling) => {
                filling.begin();
                filling as Rc<dyn BlockDevice>
            }
            None => Rc::clone(&own),
        };
        volume.change_hands(Home::Here(store), volume.generation().next());
        if let Some(leased) = self.coming.leased.clone() {
            self.handle.spawn(async move { leased.forget_token().await });
        }
        let bytes = TRIAL_BYTES.min(own.geometry().size);
        let buffer = self.buffers.take(usize::try_from(bytes).unwrap_or(0));
        let deadline = self.handle.sleep(self.trial_max);
        self.answer_after(async move {
            let detail = match select(own.read(0, buffer), deadline).await {
                Either::Left((Ok(_), _)) => return TargetEvent::Started(index),
                Either::Left((Err(error), _)) => format!("the target's store does not answer: {error}"),
                Either::Right(_) => "the target's store does not answer in time".to_owned(),
            };
            TargetEvent::StartFailed { volume: index, detail }
        });
    }

    /// Has the source change nothing of the replica, and its machine told if it wants to.
    fn hold_changes(&self) {
        if let Some(service) = &self.service {
            let events = self.events.clone();
            let wanted = move || {
                // The driver is gone only when the migration has ended.
                let _ = events.unbounded_send(Heard::Target(TargetEvent::ChangeHeld));
            };
            service.hold_changes(Address::Replica(self.index.0), Rc::new(wanted));
        }
    }

    fn answer_after(&self, task: impl Future<Output = TargetEvent> + 'static) {
        let events = self.events.clone();
        self.handle.spawn(async move {
            let event = Heard::Target(task.await);
            // The driver is gone only when the migration has ended.
            let _ = events.unbounded_send(event);
        });
    }
}

/// Opens an image that was leased, as soon as the source's host has closed it.
async fn take_back(leased: Option<Rc<LeasedImage>>) -> Result<(), IoError> {
    match leased {
        None => Ok(()),
        Some(leased) => leased.promise().await.map(drop),
    }
}

/// Says that a part is no longer there.
struct Gone {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Heard>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.events.unbounded_send(gone(self.index));
    }
}

/// What becomes of a volume that is to be started, and whose lane is no longer there.
pub(super) fn gone(volume: VolumeIndex) -> Heard {
    let detail = "the thread of one of its volumes has ended; see the log".to_owned();
    Heard::Target(TargetEvent::StartFailed { volume, detail })
}
