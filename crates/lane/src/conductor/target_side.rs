//! What the target's machine asks for.

use std::rc::Rc;

use futures_util::future::{Either, select};
use migration::VolumeIndex;
use migration::target::{TargetAction, TargetEvent};

use super::{Conductor, Event, flush, left_over};

/// Bytes read from the target's store to see whether it answers, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

impl Conductor {
    pub(super) fn carry_out_target(&mut self, action: TargetAction) {
        match action {
            TargetAction::Flush { volume, attempt } => {
                let store = Rc::clone(&self.planned(volume).target);
                self.spawn(async move {
                    let result = flush(&store).await;
                    Event::Target(TargetEvent::Flushed { volume, attempt, result })
                });
            }
            TargetAction::Commit { commit, records } => self.commit(records, commit, |commit, result| {
                Event::Target(TargetEvent::Committed { commit, result })
            }),
            TargetAction::Send(message) => self.send_to_source(message),
            TargetAction::Start(volume) => self.start(volume),
            TargetAction::Open(volume) => self.volume(volume).open(),
            TargetAction::Close(volume) => drop(self.volume(volume).close()),
            TargetAction::Discard => {
                let images = self.plan.volumes.iter().map(|planned| planned.target_image.clone());
                let work: Vec<_> = images.map(|image| self.control.discard(image)).collect();
                self.spawn(async move {
                    Event::Target(TargetEvent::Discarded { left_over: left_over(work).await })
                });
            }
        }
    }

    /// Puts a volume onto its target store, its gate still closed, and sees whether that answers in time.
    pub(super) fn start(&self, index: VolumeIndex) {
        let volume = Rc::clone(self.volume(index));
        if let Some(copy) = self.copies.get(index.as_usize()) {
            copy.stop();
        }
        volume.change_hands(Rc::clone(&self.planned(index).target), volume.generation().next());
        let bytes = TRIAL_BYTES.min(volume.store().geometry().size);
        let buffer = self.buffers.take(usize::try_from(bytes).unwrap_or(0));
        let deadline = self.handle.sleep(self.plan.limits.mirror_wait_max);
        self.spawn(async move {
            let detail = match select(Box::pin(volume.try_reading(buffer)), deadline).await {
                Either::Left((Ok(()), _)) => return Event::Target(TargetEvent::Started(index)),
                Either::Left((Err(error), _)) => format!("the target's store does not answer: {error}"),
                Either::Right(_) => "the target's store does not answer in time".to_owned(),
            };
            Event::Target(TargetEvent::StartFailed { volume: index, detail })
        });
    }
}
