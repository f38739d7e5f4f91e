//! The target's half of a conductor: it promises, takes the volumes over, and starts them from its stores.
//!
//! ```text
//!   messages of the source ────►┐
//!   ends of flushes, commits ───┤ events ──► Target ──► actions ──► tasks that send events back
//!   a started volume's answer ──┘
//! ```
//! What is copied does not pass here: it goes to the stores.

use std::convert::Infallible;
use std::future::Future;
use std::rc::Rc;

use block::{BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::message::{ToSource, ToTarget};
use migration::target::{TargetAction, TargetEvent};
use migration::{Target, VolumeIndex};

use super::{ComingVolume, Post, TargetPlan, flush, left_over};
use crate::control::Control;

/// Bytes read from the target's store to see whether it answers, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

/// Talks to a target's half that runs on the same thread.
#[derive(Clone)]
pub struct TargetBaton {
    events: mpsc::UnboundedSender<TargetEvent>,
}

/// Runs the target's half of one migration.
pub struct TargetConductor {
    handle: Handle,
    control: Rc<dyn Control>,
    buffers: BufferPool,
    plan: TargetPlan,
    target: Target,
    to_source: Post<ToSource>,
    sender: mpsc::UnboundedSender<TargetEvent>,
    events: mpsc::UnboundedReceiver<TargetEvent>,
}

impl TargetBaton {
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
        let (sender, events) = mpsc::unbounded();
        let baton = TargetBaton { events: sender.clone() };
        let conductor = Self {
            handle,
            control,
            buffers: buffers.clone(),
            target: Target::new(plan.migration, plan.volumes.len()),
            plan,
            to_source,
            sender,
            events,
        };
        (conductor, baton)
    }

    /// Takes part for as long as it is polled: that the migration has ended, the source says.
    pub async fn run(mut self) -> Infallible {
        loop {
            while let Some(action) = self.target.poll_action() {
                self.carry_out(action);
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
            TargetAction::Open(volume) => self.coming(volume).volume.open(),
            TargetAction::Close(volume) => drop(self.coming(volume).volume.close()),
            TargetAction::Discard => {
                let images = self.plan.volumes.iter().map(|coming| coming.image.clone());
                let work: Vec<_> = images.map(|image| self.control.discard(image)).collect();
                self.spawn(async move { TargetEvent::Discarded { left_over: left_over(work).await } });
            }
            // Only of a target with a journal of its own; this one is ended by its source.
            TargetAction::End { .. } => {}
        }
    }

    /// Puts a volume onto its target store, its gate still closed, and sees whether that answers in time.
    fn start(&self, index: VolumeIndex) {
        let coming = self.coming(index);
        let volume = Rc::clone(&coming.volume);
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
