//! One volume's part in the target's half of a migration, on the volume's own lane.
//!
//! As at the source (`source_volume.rs`), the driver's own volume takes its orders by a call. Every other one is on its own lane,
//! and orders and events are messages between two threads.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, OptionFuture, select};
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

/// Bytes read from the target's store as a trial, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

#[derive(Clone, Copy, Debug)]
pub(crate) enum TargetOrder {
    /// Flush its store, before the target promises to wait. A leased image is taken back first.
    Flush(Attempt),
    /// The same, and verify that exactly these blocks are known to be missing.
    FlushHollow(Attempt, Manifest),
    /// Nothing is promised: the source may lease the image again.
    PromiseNothing,
    /// Serve it from its store with its gate closed, and check that the store answers.
    Start,
    StartHollow,
    Open,
    Close,
    /// Hold its requests, and report how many changed the volume since it was opened.
    CloseAndCount,
    /// Drop its store, which is deleted next. Local clients are forwarded to the owner again.
    LeaveStore,
}

#[derive(Clone, Debug)]
pub(crate) enum Heard {
    Target(TargetEvent),
    /// The name of a volume's image leads to what was filled: the order may be carried out.
    Confirmed(VolumeIndex, TargetOrder),
    VmDoesNotRun(String),
    Changes(VolumeIndex, u64),
}

pub(crate) struct TargetVolume {
    index: VolumeIndex,
    handle: Handle,
    buffers: BufferPool,
    coming: IncomingVolume,
    trial_max: Duration,
    service: Option<Rc<Service>>,
    /// Changes that the gate had let through when it was last opened.
    changes_before: Cell<u64>,
    /// Where local clients were forwarded before the volume was started, and its generation; `None`: nowhere.
    led_to: RefCell<Option<(Home, Generation)>>,
    events: mpsc::UnboundedSender<Heard>,
}

impl TargetVolume {
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
        // After a restart the target may have promised to wait. If it has not, the driver orders [`TargetOrder::PromiseNothing`].
        part.hold_changes();
        Rc::new(part)
    }

    pub(crate) fn carry_out(&self, order: TargetOrder) {
        let (index, volume) = (self.index, &self.coming.volume);
        match order {
            TargetOrder::Flush(attempt) => {
                self.hold_changes();
                // N.B. This flush fails until the copying has learned of an earlier failed one.
                let store = self.coming.store.ours();
                let taken_back = self.coming.leased.as_ref().map(LeasedImage::promise);
                self.answer_after(async move {
                    let taken_back = OptionFuture::from(taken_back).await.transpose();
                    let result = match taken_back {
                        Ok(_) => flush(&store).await,
                        Err(error) => {
                            warn!(%error, "the target cannot become prepared: the source's host has not closed its image");
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
                    warn!(
                        "the target cannot become prepared: the source's list of missing blocks differs from its updates"
                    );
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
                drop(volume.close());
                self.leave_filling();
            }
            TargetOrder::CloseAndCount => {
                // N.B. The gate is closed before changes are counted, so that no later request passes.
                drop(volume.close());
                let changes = volume.gate().changes_admitted() - self.changes_before.get();
                let _ = self.events.unbounded_send(Heard::Changes(index, changes));
            }
            TargetOrder::LeaveStore => {
                if let Some(service) = &self.service {
                    // N.B. waiting requests are dropped: an image that another host reads stays, and may be used again.
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

    pub(crate) async fn follow(self: Rc<Self>, mut orders: mpsc::UnboundedReceiver<TargetOrder>) {
        // Dropped even by a panic.
        let _gone = Gone { index: self.index, events: self.events.clone() };
        while let Some(order) = orders.next().await {
            self.carry_out(order);
        }
    }

    /// Serves the volume from its target store with its gate closed, and checks that the store answers in time.
    fn start(&self, filling: Option<Rc<FillingStore>>) {
        let (index, volume) = (self.index, Rc::clone(&self.coming.volume));
        if let Some(service) = &self.service {
            // N.B. Late requests of the source are refused: the store belongs to a volume from here on (design §5.10).
            service.withdraw(Address::Replica(index.0));
        }
        if volume.gate().mode() == GateMode::Open {
            // Local clients are forwarded to the owner so far. N.B. none may write before the store is known to answer: a write
            // that has passed the gate rules out a hand-back (design §5.14).
            self.led_to.replace(Some((volume.home(), volume.generation())));
            if !broken(Bug::OpenOnTrial) {
                drop(volume.close());
            }
        }
        // N.B. a promised image is open here, and locked.
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

    fn hold_changes(&self) {
        if let Some(service) = &self.service {
            let events = self.events.clone();
            let wanted = move || {
                let _ = events.unbounded_send(Heard::Target(TargetEvent::ChangeHeld));
            };
            service.hold_changes(Address::Replica(self.index.0), Rc::new(wanted));
        }
    }

    fn answer_after(&self, task: impl Future<Output = TargetEvent> + 'static) {
        let events = self.events.clone();
        self.handle.spawn(async move {
            let event = Heard::Target(task.await);
            let _ = events.unbounded_send(event);
        });
    }
}

struct Gone {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Heard>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.events.unbounded_send(gone(self.index));
    }
}

pub(super) fn gone(volume: VolumeIndex) -> Heard {
    let detail = "the thread of one of its volumes has ended; see the log".to_owned();
    Heard::Target(TargetEvent::StartFailed { volume, detail })
}
