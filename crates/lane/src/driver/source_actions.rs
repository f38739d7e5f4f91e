//! Carries out the actions of the source's machine.

use chronicle::Generation;
use futures_channel::oneshot;
use migration::journal::ImageLocation;
use migration::message::ToTarget;
use migration::recovery::Retirement;
use migration::source::{SourceAction, SourceEvent};
use migration::{Phase, VolumeId};
use tracing::{error, info};

use super::source_volume::SourceOrder;
use super::{Event, SourceDriver, left_over};
use crate::control::Report;

impl SourceDriver {
    pub(super) fn carry_out(&mut self, action: SourceAction) {
        match action {
            SourceAction::Enter(phase) => self.enter(phase),
            SourceAction::StopVm => {
                let (paused, is_paused) = oneshot::channel();
                let stopped = self.control.stop_vm(self.migration, paused);
                self.spawn(
                    async move { SourceEvent::VmStopped(stopped.await.map_err(|fault| fault.detail)) },
                );
                let events = self.sender.clone();
                self.handle.spawn(async move {
                    if is_paused.await.is_ok() {
                        let _ = events.unbounded_send(Event::Source(SourceEvent::VmPaused));
                    }
                });
            }
            SourceAction::RunHooks => {
                let run = self.control.run_hooks(self.migration);
                self.spawn(async move { SourceEvent::HooksRun(run.await.map_err(|fault| fault.detail)) });
            }
            SourceAction::CloseGate { volume, attempt } => {
                self.order(volume, SourceOrder::CloseGate(attempt));
            }
            SourceAction::OpenGate(volume) => self.order(volume, SourceOrder::OpenGate),
            SourceAction::Settle { volume, settling } => self.order(volume, SourceOrder::Settle(settling)),
            SourceAction::Flush { volume, attempt } => self.order(volume, SourceOrder::Flush(attempt)),
            SourceAction::Commit { commit, records } => self.commit(records, commit),
            SourceAction::Send(message) => (self.to_target)(message),
            SourceAction::StopCopying => self.order_all(SourceOrder::StopCopying),
            SourceAction::TakeBack(generations) => self.take_back(&generations),
            SourceAction::Retire => self.retire(Retirement::of),
            SourceAction::KeepImages => self.retire(|_, _| Retirement::Keep),
            SourceAction::End { outcome, summary } => {
                let migration = self.migration;
                self.report_progress(self.handle.now());
                self.control.report(Report::Ended { migration, outcome: outcome.clone(), summary });
                self.ended = Some(outcome);
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        let before = self.phase.replace(phase);
        self.is_released |= phase == Phase::Committing;
        let migration = self.migration;
        if before != phase && !before.may_become(phase) {
            error!(%migration, %before, %phase, "a transition of phases that is not in the table; this is a defect");
        }
        info!(%migration, %phase, attempt = %self.source.attempt(), "phase");
        match phase {
            // No request may reach a store that may be the owner's.
            Phase::Committing => self.order_all(SourceOrder::Release),
            Phase::Filling => self.order_all(SourceOrder::ServeFromSuccessor),
            Phase::Retiring if before != Phase::Filling => self.order_all(SourceOrder::ServeFromSuccessor),
            _ => {}
        }
        if (before, phase) == (Phase::Filling, Phase::Retiring) {
            self.say_if_nothing_is_kept();
        }
        self.control.entered(migration, phase);
        // The gates are closed in these phases: a report would prolong that.
        if !matches!(phase, Phase::Closing | Phase::Preparing | Phase::Releasing | Phase::Committing) {
            self.report_progress(self.handle.now());
        }
    }

    /// Logs that no image is kept. Writes at the target were recorded for a cheap return until all blocks had arrived.
    fn say_if_nothing_is_kept(&self) {
        let is_deleted =
            |image: &ImageLocation| Retirement::of(image, self.keep_source) == Retirement::Delete;
        if self.images.iter().all(is_deleted) {
            (self.to_target)(ToTarget::NothingKept(self.source.attempt()));
        }
    }

    fn take_back(&self, generations: &[(VolumeId, Generation)]) {
        for (participant, volume) in self.participants.iter().zip(&self.volumes) {
            let generation = generations.iter().find(|(id, _)| id == volume);
            participant.order(SourceOrder::TakeBack(generation.map(|(_, generation)| *generation)));
        }
    }

    fn retire(&mut self, retirement: impl Fn(&ImageLocation, bool) -> Retirement) {
        self.order_all(SourceOrder::LetGo);
        let keep = self.keep_source;
        let work: Vec<_> = self
            .images
            .iter()
            .map(|image| self.control.retire(image.clone(), retirement(image, keep)))
            .collect();
        self.spawn(async move { SourceEvent::Retired { left_over: left_over(work).await } });
    }
}
