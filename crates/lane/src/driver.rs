//! Drives one migration: runs the source's and the target's machine, and carries out their actions.
//!
//! ```text
//!        source's half                                             target's half
//!   copyings, gates ◄── Source ── Prepare, Commit … ──► SendMessage ──► Target ──► flush, own, start, open
//!                          ▲ ◄──────────────── SendMessage ◄── Prepared, Active … ──┘
//! ```
//! Each half runs on the lane that has its store, and learns of the other only by messages. On one host both run on one lane, and
//! [`LocalDriver`] joins them; between two hosts a link does. A migration may have several volumes, each with its own lane. The
//! first volume's lane drives the half, and the others [follow](SourceParticipation).

mod participant;
mod plan;
mod progress;
mod source;
mod source_actions;
mod source_volume;
mod target;
mod target_volume;

use std::cell::OnceCell;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle};
use futures_util::future::{Either, select};
use migration::journal::{MigrationState, Outcome};
use migration::message::ToTarget;
use migration::target::FlushResult;
use tracing::warn;

use crate::control::{Control, ControlFault, LaneFuture};

pub use participant::{
    IncomingGroup, OutgoingGroup, SourceParticipantRef, SourceParticipation, TargetParticipation,
};
pub use plan::{
    Chunks, CopySettings, GivesWay, IncomingVolume, OutgoingVolume, Plan, PlannedVolume, Replica, SourcePlan,
    TargetContent, TargetPlan, TimeLimits,
};
pub(crate) use source::Event;
pub use source::{SourceDriver, SourceHandle};
pub(crate) use source_volume::start_copy;
pub use target::{TargetDriver, TargetHandle};

/// Sends a message to the other half of a migration. It may be lost or arrive twice: the machines repeat important messages.
pub type SendMessage<M> = Box<dyn Fn(M)>;

/// Runs both halves of a migration between two stores of this host.
pub struct LocalDriver {
    source: SourceDriver,
    target: TargetDriver,
}

impl LocalDriver {
    /// Makes both halves, and puts the mirrors into the volumes' live stacks.
    pub fn new(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: Plan,
    ) -> (Self, SourceHandle) {
        let target = TargetSide::new(&handle, &control, buffers, plan);
        let made = SourceDriver::new(handle, control, buffers, target.source_plan, target.to_target);
        target.joins.with(made, target.driver)
    }

    /// Makes both halves of a migration whose copying a restart interrupted, `spent` after it had begun; `None` if the journal
    /// shows a later step.
    pub fn resume(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: Plan,
        recorded: &MigrationState,
        spent: Duration,
    ) -> Option<(Self, SourceHandle)> {
        let target = TargetSide::new(&handle, &control, buffers, plan);
        let (plan, to_target) = (target.source_plan, target.to_target);
        let (mut source, driver) = SourceDriver::resume(handle, control, buffers, plan, to_target, recorded)?;
        source.source = source.source.having_spent(spent);
        Some(target.joins.with((source, driver), target.driver))
    }

    /// Runs the migration to its end.
    pub async fn run(self) -> Outcome {
        match select(Box::pin(self.source.run()), Box::pin(self.target.run())).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right((_, source)) => source.await,
        }
    }
}

struct TargetSide {
    driver: TargetDriver,
    source_plan: SourcePlan,
    to_target: SendMessage<ToTarget>,
    joins: Joins,
}

/// The target half's reference to the source's half, which is set before the first message.
struct Joins(Rc<OnceCell<SourceHandle>>);

impl TargetSide {
    fn new(handle: &Handle, control: &Rc<dyn Control>, buffers: &BufferPool, plan: Plan) -> Self {
        let (source_plan, target_plan) = plan.halves();
        let source_handle = Rc::new(OnceCell::<SourceHandle>::new());
        let to_source = carried(handle, control, {
            let source = Rc::clone(&source_handle);
            move |message| {
                if let Some(source) = source.get() {
                    source.deliver(message);
                }
            }
        });
        let (driver, target_handle) =
            TargetDriver::new(handle.clone(), Rc::clone(control), buffers, target_plan, to_source);
        let to_target = carried(handle, control, move |message| target_handle.deliver(message));
        Self { driver, source_plan, to_target, joins: Joins(source_handle) }
    }
}

impl Joins {
    fn with(
        self,
        (source, handle): (SourceDriver, SourceHandle),
        target: TargetDriver,
    ) -> (LocalDriver, SourceHandle) {
        let _ = self.0.set(handle.clone());
        (LocalDriver { source, target }, handle)
    }
}

/// Returns a sender to the other half on this lane, with the delays of [`Control::carry`].
fn carried<M: Clone + 'static>(
    handle: &Handle,
    control: &Rc<dyn Control>,
    deliver: impl Fn(M) + Clone + 'static,
) -> SendMessage<M> {
    let (handle, control) = (handle.clone(), Rc::clone(control));
    Box::new(move |message: M| match control.carry() {
        None => deliver(message),
        Some(journeys) => {
            for journey in journeys {
                let (deliver, message) = (deliver.clone(), message.clone());
                handle.spawn(async move {
                    journey.await;
                    deliver(message);
                });
            }
        }
    })
}

async fn flush(store: &Rc<dyn BlockDevice>) -> FlushResult {
    match store.flush().await {
        Ok(()) => FlushResult::Durable,
        Err(error) => {
            warn!(%error, "a flush failed");
            FlushResult::Failed
        }
    }
}

async fn left_over(work: Vec<LaneFuture<Result<(), ControlFault>>>) -> String {
    let mut faults = Vec::new();
    for done in work {
        if let Err(fault) = done.await {
            warn!(%fault, "an image is left over");
            faults.push(fault.to_string());
        }
    }
    faults.join("; ")
}
