//! The target's half of a driver: it prepares, takes the volumes over, and starts them from its stores.
//!
//! ```text
//!   messages of the source ────►┐
//!   ends of flushes, commits ───┤ events ──► Target ──► actions ──► tasks that send events back
//!   a started volume's answer ──┘
//! ```
//! Copied data goes to the stores directly.

use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use block::{BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{ImageLocation, MigrationState, Outcome, Promotion};
use migration::message::{ToSource, ToTarget};
use migration::planted::{Bug, broken};
use migration::source::Moves;
use migration::target::{FlushResult, TargetAction, TargetEvent, Wrote};
use migration::{MigrationId, Target, VolumeIndex};
use tracing::warn;

use super::participant::TargetParticipant;
use super::target_volume::{Heard, TargetOrder, TargetVolume, gone};
use super::{SendMessage, TargetPlan, left_over};
use crate::control::Control;
use crate::handle::Promoted;

/// The interface to a target's half on the same thread.
#[derive(Clone)]
pub struct TargetHandle {
    events: mpsc::UnboundedSender<Heard>,
}

/// Runs the target's half of one migration.
pub struct TargetDriver {
    handle: Handle,
    control: Rc<dyn Control>,
    migration: MigrationId,
    participants: Vec<TargetParticipant>,
    images: Vec<ImageLocation>,
    /// Why the VM does not run, and how many changes each volume's gate has let through so far.
    failing: Option<(String, BTreeMap<VolumeIndex, u64>)>,
    target: Target,
    /// Whether the volumes' parts believe that an attempt is in progress.
    is_trying: bool,
    to_source: SendMessage<ToSource>,
    sender: mpsc::UnboundedSender<Heard>,
    events: mpsc::UnboundedReceiver<Heard>,
}

impl TargetHandle {
    /// Notes that the source's host can be reached again, perhaps after a restart.
    pub fn link_back(&self) {
        self.send(TargetEvent::LinkBack);
    }

    /// Notes that the source's host cannot be reached.
    pub fn link_lost(&self) {
        self.send(TargetEvent::LinkLost);
    }

    /// Takes the volumes over without COMMIT, if they are prepared in the given attempt.
    pub fn promote(&self, promoted: Promoted) {
        let Promoted { attempt, generations, promotion } = promoted;
        self.send(TargetEvent::Promote { attempt, generations, promotion });
    }

    /// Ends the migration before anything is promised.
    ///
    /// **N.B.** Only once the journal has accepted the cancellation ([`migration::orders::cancel`]): from then on
    /// it accepts no promise.
    pub fn cancel(&self) {
        self.send(TargetEvent::Cancel);
    }

    /// Delivers a message of the source's half.
    pub fn deliver(&self, message: ToTarget) {
        self.send(TargetEvent::Received(message));
    }

    fn send(&self, event: TargetEvent) {
        let _ = self.events.unbounded_send(Heard::Target(event));
    }
}

impl TargetDriver {
    /// Makes a target's half that waits for the source's first message.
    pub fn new(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: SendMessage<ToSource>,
    ) -> (Self, TargetHandle) {
        let volumes = plan.volumes.len() + plan.group.joined.len();
        let target = match plan.service {
            None => Target::new(plan.migration, volumes),
            Some(_) => {
                let here = plan.volumes.iter().map(|coming| coming.volume.id());
                let joined = plan.group.joined.iter().map(|joined| joined.volume);
                Target::between_hosts(plan.migration, volumes).of_volumes(here.chain(joined).collect())
            }
        };
        let target = accompanied(target, &plan);
        Self::with_vm(handle, control, buffers, plan, to_source, target)
    }

    /// Makes the target's half of a migration between hosts that a restart interrupted. Continues where the journal says; `None`
    /// if nothing is left to do.
    pub fn resume(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: SendMessage<ToSource>,
        recorded: &MigrationState,
    ) -> Option<(Self, TargetHandle)> {
        let target = accompanied(Target::resume(handle.now(), plan.migration, recorded)?, &plan);
        Some(Self::with_vm(handle, control, buffers, plan, to_source, target))
    }

    fn with_vm(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: SendMessage<ToSource>,
        target: Target,
    ) -> (Self, TargetHandle) {
        let TargetPlan { migration, volumes: coming, group, trial_max, service, .. } = plan;
        let (sender, events) = group.events;
        let target_handle = TargetHandle { events: sender.clone() };
        let here = coming.iter().map(|coming| coming.image.clone());
        let images = here.chain(group.joined.iter().map(|joined| joined.image.clone())).collect();
        let here = VolumeIndex::all(coming.len()).zip(coming).map(|(index, coming)| {
            let (handle, buffers, service) = (handle.clone(), buffers.clone(), service.clone());
            let events = sender.clone();
            TargetParticipant::Here(TargetVolume::new(
                handle, buffers, index, coming, trial_max, service, events,
            ))
        });
        let participants = here
            .chain(group.joined.into_iter().map(|joined| TargetParticipant::Elsewhere(joined.orders)))
            .collect();
        let driver = Self {
            handle,
            control,
            migration,
            participants,
            images,
            failing: None,
            // They hold the source's changes until they learn that nothing is promised.
            is_trying: true,
            target,
            to_source,
            sender,
            events,
        };
        (driver, target_handle)
    }

    /// Takes part until nothing is left to do here; returns the outcome. On one host it never returns: there the
    /// source ends the migration.
    pub async fn run(mut self) -> Outcome {
        loop {
            while let Some(action) = self.target.poll_action() {
                if let TargetAction::End { outcome } = action {
                    return outcome;
                }
                self.carry_out(action);
            }
            if self.target.is_receiving() && std::mem::take(&mut self.is_trying) {
                self.order_all(TargetOrder::PromiseNothing);
            }
            let next = match self.target.poll_timeout() {
                None => self.events.next().await,
                Some((at, _)) => match select(self.events.next(), self.handle.sleep_until(at)).await {
                    Either::Left((event, _)) => event,
                    Either::Right(_) => None,
                },
            };
            let now = self.handle.now();
            match next {
                Some(Heard::Target(
                    event @ TargetEvent::Promote { promotion: Promotion::Force { .. }, .. },
                )) => self.force(now, event),
                Some(Heard::Target(event)) => self.target.handle_event(now, event),
                Some(Heard::VmDoesNotRun(detail)) => {
                    // A volume whose lane has ended cannot report; then nothing is handed back.
                    let gone = VolumeIndex::all(self.participants.len()).zip(&self.participants);
                    let gone =
                        gone.filter(|(_, participant)| participant.is_gone()).map(|(volume, _)| (volume, 1));
                    self.failing = Some((detail, gone.collect()));
                    self.order_all(TargetOrder::CloseAndCount);
                }
                Some(Heard::Confirmed(volume, order)) => {
                    if self.is_wanted(volume, &order) || broken(Bug::ConfirmedTooLate) {
                        self.order(volume, order);
                    }
                }
                Some(Heard::Changes(volume, changes)) => self.changes_counted(now, volume, changes),
                None => self.target.handle_timeout(now),
            }
        }
    }

    /// Takes over volumes whose source may live. Prepared volumes stay as prepared: a source that continues changes nothing
    /// before the promise is withdrawn.
    fn force(&mut self, now: Duration, event: TargetEvent) {
        if self.participants.iter().any(TargetParticipant::is_gone) {
            warn!(migration = %self.migration, "not promoted: the thread of one of its volumes has ended; restart the daemon");
            return;
        }
        self.target.handle_event(now, event);
        if self.target.prepared().is_none() && self.target.is_receiving() {
            warn!(migration = %self.migration, "not promoted: the source continues, and changes the promised data");
        }
    }

    fn carry_out(&mut self, action: TargetAction) {
        match action {
            TargetAction::Flush { volume, attempt } => {
                self.is_trying = true;
                let fault = TargetEvent::Flushed { volume, attempt, result: FlushResult::Failed };
                self.order_confirmed(volume, TargetOrder::Flush(attempt), move |_| fault);
            }
            TargetAction::FlushHollow { volume, attempt, manifest } => {
                self.is_trying = true;
                let fault = TargetEvent::Flushed { volume, attempt, result: FlushResult::Failed };
                self.order_confirmed(volume, TargetOrder::FlushHollow(attempt, manifest), move |_| fault);
            }
            TargetAction::Commit { commit, records } => {
                let committed = self.control.commit(records);
                self.spawn(async move {
                    Heard::Target(TargetEvent::Committed { commit, result: committed.await })
                });
            }
            TargetAction::Send(message) => (self.to_source)(message),
            TargetAction::Start(volume) => self.start(volume, TargetOrder::Start),
            TargetAction::StartHollow(volume) => self.start(volume, TargetOrder::StartHollow),
            TargetAction::End { .. } => {}
            TargetAction::RunVm => self.run_vm(),
            TargetAction::Open(volume) => self.order(volume, TargetOrder::Open),
            TargetAction::Close(volume) => self.order(volume, TargetOrder::Close),
            TargetAction::Discard => {
                self.order_all(TargetOrder::LeaveStore);
                let work: Vec<_> =
                    self.images.iter().map(|image| self.control.discard(image.clone())).collect();
                self.spawn(async move {
                    Heard::Target(TargetEvent::Discarded { left_over: left_over(work).await })
                });
            }
        }
    }

    fn start(&self, volume: VolumeIndex, order: TargetOrder) {
        if self.participants.get(volume.as_usize()).is_some_and(TargetParticipant::is_gone) {
            let _ = self.sender.unbounded_send(gone(volume));
        }
        self.order_confirmed(volume, order, move |detail| TargetEvent::StartFailed { volume, detail });
    }

    /// Has an order carried out if the name of the volume's image leads to what was filled. `fault`: what it comes to otherwise.
    fn order_confirmed(
        &self,
        volume: VolumeIndex,
        order: TargetOrder,
        fault: impl FnOnce(String) -> TargetEvent + 'static,
    ) {
        let image = self.images.get(volume.as_usize());
        let Some(confirmed) = image.and_then(|image| self.control.confirm(image)) else {
            return self.order(volume, order);
        };
        self.spawn(async move {
            match confirmed.await {
                Ok(()) => Heard::Confirmed(volume, order),
                Err(error) => {
                    warn!(%error, "cannot confirm that the name of the target's image leads to it; the target is not used");
                    Heard::Target(fault(error.to_string()))
                }
            }
        });
    }

    /// Returns whether the target still waits for an order that took time to confirm.
    ///
    /// **N.B.** A flush for an attempt that is over would hold the source's changes, and nothing would let them go.
    fn is_wanted(&self, volume: VolumeIndex, order: &TargetOrder) -> bool {
        match order {
            TargetOrder::Flush(attempt) | TargetOrder::FlushHollow(attempt, _) => {
                self.target.is_flushing(*attempt)
            }
            TargetOrder::Start | TargetOrder::StartHollow => self.target.is_starting(volume),
            TargetOrder::PromiseNothing
            | TargetOrder::Open
            | TargetOrder::Close
            | TargetOrder::CloseAndCount
            | TargetOrder::LeaveStore => true,
        }
    }

    /// Lets the VM run. If it does not run, finds out whether it has written anything.
    fn run_vm(&self) {
        let runs = self.control.run_vm(self.migration);
        self.spawn(async move {
            match runs.await {
                Ok(()) => Heard::Target(TargetEvent::VmRuns),
                Err(fault) => Heard::VmDoesNotRun(fault.detail),
            }
        });
    }

    /// Notes how many changes a VM that does not run may have made to this volume. Once all volumes are counted, decides whether
    /// they can be handed back.
    fn changes_counted(&mut self, now: Duration, volume: VolumeIndex, changes: u64) {
        let Some((_, counted)) = &mut self.failing else { return };
        counted.insert(volume, changes);
        if counted.len() < self.participants.len() {
            return;
        }
        let Some((detail, counted)) = self.failing.take() else { return };
        let wrote =
            if counted.values().all(|changes| *changes == 0) { Wrote::Nothing } else { Wrote::Something };
        if wrote == Wrote::Something {
            self.order_all(TargetOrder::Open);
        }
        self.target.handle_event(now, TargetEvent::VmFailed { detail, wrote });
    }

    fn order(&self, volume: VolumeIndex, order: TargetOrder) {
        if let Some(participant) = self.participants.get(volume.as_usize()) {
            participant.order(order);
        }
    }

    fn order_all(&self, order: TargetOrder) {
        self.participants.iter().for_each(|participant| participant.order(order));
    }

    fn spawn(&self, task: impl Future<Output = Heard> + 'static) {
        let sender = self.sender.clone();
        self.handle.spawn(async move {
            let event = task.await;
            let _ = sender.unbounded_send(event);
        });
    }
}

fn accompanied(target: Target, plan: &TargetPlan) -> Target {
    let target = match plan.patience {
        Some(patience) => target.with_patience(patience),
        None => target,
    };
    match plan.moves {
        Moves::Volumes | Moves::VolumesAfterHooks => target,
        Moves::Vm => target.with_vm(),
    }
}
