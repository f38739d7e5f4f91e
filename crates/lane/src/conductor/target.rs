//! The target's half of a conductor: it promises, takes the volumes over, and starts them from its stores.
//!
//! ```text
//!   messages of the source ────►┐
//!   ends of flushes, commits ───┤ events ──► Target ──► actions ──► tasks that send events back
//!   a started volume's answer ──┘
//! ```
//! What is copied does not pass here: it goes to the stores.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use block::{BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{MigrationState, Outcome};
use migration::message::{ToSource, ToTarget};
use migration::source::Moves;
use migration::target::{TargetAction, TargetEvent, Wrote};
use migration::{Target, VolumeIndex};

use super::{ComingVolume, Post, TargetPlan, flush, left_over};
use crate::control::Control;
use crate::handle::Promoted;
use crate::peer::head::Address;

/// Bytes read from the target's store to see whether it answers, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

/// Talks to a target's half that runs on the same thread.
#[derive(Clone)]
pub struct TargetBaton {
    /// Whether the target has promised to wait, or gone further.
    promised: Rc<Cell<bool>>,
    events: mpsc::UnboundedSender<TargetEvent>,
}

/// Runs the target's half of one migration.
pub struct TargetConductor {
    handle: Handle,
    control: Rc<dyn Control>,
    buffers: BufferPool,
    plan: TargetPlan,
    target: Target,
    promised: Rc<Cell<bool>>,
    to_source: Post<ToSource>,
    sender: mpsc::UnboundedSender<TargetEvent>,
    events: mpsc::UnboundedReceiver<TargetEvent>,
}

impl TargetBaton {
    /// Tells that the source's host can be reached again, or is another process now.
    pub fn link_back(&self) {
        let _ = self.events.unbounded_send(TargetEvent::LinkBack);
    }

    /// Takes the volumes over without COMMIT, if they are prepared in the try that is named.
    pub fn promote(&self, promoted: Promoted) {
        let Promoted { attempt, generations, promotion } = promoted;
        let _ = self.events.unbounded_send(TargetEvent::Promote { attempt, generations, promotion });
    }

    /// Ends the migration; returns whether it is early enough for that: nothing is promised yet.
    pub fn cancel(&self) -> bool {
        let early_enough = !self.promised.get();
        if early_enough {
            let _ = self.events.unbounded_send(TargetEvent::Cancel);
        }
        early_enough
    }

    /// Delivers what the source's half says.
    pub fn deliver(&self, message: ToTarget) {
        // A conductor that is gone needs no messages.
        let _ = self.events.unbounded_send(TargetEvent::Received(message));
    }
}

impl TargetConductor {
    /// Makes a target's half that waits for the source to speak.
    pub fn new(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: Post<ToSource>,
    ) -> (Self, TargetBaton) {
        let volumes = plan.volumes.len();
        let target = match plan.service {
            None => Target::new(plan.migration, volumes),
            Some(_) => Target::between_hosts(plan.migration, volumes),
        };
        let target = accompanied(target, &plan);
        Self::with_machine(handle, control, buffers, plan, to_source, target)
    }

    /// Makes the target's half of a migration between hosts that a restart interrupted, which goes on where the journal
    /// says; `None`: nothing is left for it to do.
    pub fn resume(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: Post<ToSource>,
        recorded: &MigrationState,
    ) -> Option<(Self, TargetBaton)> {
        let target = accompanied(Target::resume(handle.now(), plan.migration, recorded)?, &plan);
        Some(Self::with_machine(handle, control, buffers, plan, to_source, target))
    }

    fn with_machine(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: TargetPlan,
        to_source: Post<ToSource>,
        target: Target,
    ) -> (Self, TargetBaton) {
        let (sender, events) = mpsc::unbounded();
        let promised = Rc::new(Cell::new(target.prepared().is_some()));
        let baton = TargetBaton { promised: Rc::clone(&promised), events: sender.clone() };
        let buffers = buffers.clone();
        (Self { handle, control, buffers, plan, target, promised, to_source, sender, events }, baton)
    }

    /// Takes part until nothing is left to do here. On one host that is never: there the source says that the
    /// migration has ended.
    pub async fn run(mut self) -> Outcome {
        loop {
            while let Some(action) = self.target.poll_action() {
                if let TargetAction::End { outcome } = action {
                    return outcome;
                }
                self.carry_out(action);
            }
            self.promised.set(self.target.prepared().is_some() || self.target.is_active());
            let next = match self.target.poll_timeout() {
                None => self.events.next().await,
                Some((at, _)) => match select(self.events.next(), self.handle.sleep_until(at)).await {
                    Either::Left((event, _)) => event,
                    Either::Right(_) => None,
                },
            };
            let now = self.handle.now();
            match next {
                Some(event) => self.target.handle_event(now, event),
                None => self.target.handle_timeout(now),
            }
        }
    }

    fn carry_out(&mut self, action: TargetAction) {
        match action {
            TargetAction::Flush { volume, attempt } => {
                let store = Rc::clone(&self.coming(volume).store);
                self.spawn(
                    async move { TargetEvent::Flushed { volume, attempt, result: flush(&store).await } },
                );
            }
            TargetAction::Commit { commit, records } => {
                let committed = self.control.commit(records);
                self.spawn(async move { TargetEvent::Committed { commit, result: committed.await } });
            }
            TargetAction::Send(message) => (self.to_source)(message),
            TargetAction::Start(volume) => self.start(volume),
            // The loop ends with it.
            TargetAction::End { .. } => {}
            TargetAction::RunMachine => self.run_machine(),
            TargetAction::Open(volume) => self.coming(volume).volume.open(),
            TargetAction::Close(volume) => drop(self.coming(volume).volume.close()),
            TargetAction::Discard => {
                let images = self.plan.volumes.iter().map(|coming| coming.image.clone());
                let work: Vec<_> = images.map(|image| self.control.discard(image)).collect();
                self.spawn(async move { TargetEvent::Discarded { left_over: left_over(work).await } });
            }
        }
    }

    /// Puts a volume onto its target store, its gate still closed, and sees whether that answers in time.
    fn start(&self, index: VolumeIndex) {
        let coming = self.coming(index);
        let volume = Rc::clone(&coming.volume);
        if let Some(service) = &self.plan.service {
            // N.B. whatever the source still sends, late: the store is a volume's from here on (design §5.10).
            service.withdraw(Address::Replica(index.0));
        }
        volume.change_hands(Rc::clone(&coming.store), volume.generation().next());
        let bytes = TRIAL_BYTES.min(volume.store().geometry().size);
        let buffer = self.buffers.take(usize::try_from(bytes).unwrap_or(0));
        let deadline = self.handle.sleep(self.plan.trial_max);
        self.spawn(async move {
            let detail = match select(Box::pin(volume.try_reading(buffer)), deadline).await {
                Either::Left((Ok(()), _)) => return TargetEvent::Started(index),
                Either::Left((Err(error), _)) => format!("the target's store does not answer: {error}"),
                Either::Right(_) => "the target's store does not answer in time".to_owned(),
            };
            TargetEvent::StartFailed { volume: index, detail }
        });
    }

    /// Lets the machine run; if it does not, it matters whether it has written anything.
    fn run_machine(&self) {
        let runs = self.control.run_machine(self.plan.migration);
        let volumes: Vec<_> = self.plan.volumes.iter().map(|coming| Rc::clone(&coming.volume)).collect();
        let before: u64 = volumes.iter().map(|volume| volume.gate().changes_admitted()).sum();
        self.spawn(async move {
            let Err(detail) = runs.await else { return TargetEvent::MachineRuns };
            // N.B. closed first: what has not passed yet will not.
            volumes.iter().for_each(|volume| drop(volume.close()));
            let after: u64 = volumes.iter().map(|volume| volume.gate().changes_admitted()).sum();
            let wrote = if after == before { Wrote::Nothing } else { Wrote::Something };
            if wrote == Wrote::Something {
                volumes.iter().for_each(|volume| volume.open());
            }
            TargetEvent::MachineFailed { detail, wrote }
        });
    }

    fn coming(&self, volume: VolumeIndex) -> &ComingVolume {
        &self.plan.volumes[volume.as_usize()]
    }

    fn spawn(&self, task: impl Future<Output = TargetEvent> + 'static) {
        let sender = self.sender.clone();
        self.handle.spawn(async move {
            let event = task.await;
            // The conductor is gone only when the migration has ended.
            let _ = sender.unbounded_send(event);
        });
    }
}

fn accompanied(target: Target, plan: &TargetPlan) -> Target {
    match plan.moves {
        Moves::Volumes => target,
        Moves::Machine => target.with_machine(),
    }
}
