//! What the source's machine asks for.

use std::rc::Rc;

use chronicle::Generation;
use migration::recovery::Retirement;
use migration::source::{SourceAction, SourceEvent};
use migration::strategy::VolumeEvent;
use migration::{Phase, VolumeId, VolumeIndex};
use tracing::{error, info};

use super::{SourceConductor, flush, left_over};
use crate::control::Report;

impl SourceConductor {
    pub(super) fn carry_out(&mut self, action: SourceAction) {
        match action {
            SourceAction::Enter(phase) => self.enter(phase),
            SourceAction::StopMachine => {
                let stopped = self.control.stop_machine(self.plan.migration);
                self.spawn(async move { SourceEvent::MachineStopped(stopped.await) });
            }
            SourceAction::CloseGate { volume, attempt } => {
                self.tell_copy(volume, VolumeEvent::GateCloses);
                let closed = self.volume(volume).close();
                self.spawn(async move {
                    closed.await;
                    SourceEvent::GateClosed { volume, attempt }
                });
            }
            SourceAction::OpenGate(volume) => {
                self.tell_copy(volume, VolumeEvent::GateOpens);
                self.volume(volume).open();
            }
            SourceAction::Flush { volume, attempt } => {
                let store = self.volume(volume).store();
                self.spawn(
                    async move { SourceEvent::Flushed { volume, attempt, result: flush(&store).await } },
                );
            }
            SourceAction::Commit { commit, records } => self.commit(records, commit),
            SourceAction::Send(message) => (self.to_target)(message),
            SourceAction::StopCopying => {
                self.copies.iter().for_each(|copy| copy.stop());
                self.plan.volumes.iter().for_each(|leaving| leaving.volume.remove_mirror());
            }
            SourceAction::TakeBack(generations) => self.take_back(&generations),
            SourceAction::Retire => self.retire(),
            SourceAction::End { outcome, summary } => {
                let migration = self.plan.migration;
                self.report_progress(self.handle.now());
                self.control.report(Report::Ended { migration, outcome: outcome.clone(), summary });
                self.ended = Some(outcome);
            }
        }
    }

    fn tell_copy(&self, volume: VolumeIndex, event: VolumeEvent) {
        // Once the copying is over nobody need hear of gates.
        if let Some(copy) = self.copies.get(volume.as_usize()) {
            copy.event(event);
        }
    }

    fn enter(&mut self, phase: Phase) {
        let before = self.phase.replace(phase);
        self.is_released |= phase == Phase::Committing;
        let migration = self.plan.migration;
        if before != phase && !before.may_become(phase) {
            error!(%migration, %before, %phase, "a transition that is not in the table");
        }
        info!(%migration, %phase, attempt = self.source.attempt().0, "phase");
        match phase {
            // Nothing is sent to a store any more that may be the owner.
            Phase::Committing => self.copies.iter().for_each(|copy| copy.stop()),
            Phase::Retiring => self.serve_from_successors(),
            _ => {}
        }
        self.control.entered(migration, phase);
        // The gates are closed in these: a report would only make that longer.
        if !matches!(phase, Phase::Closing | Phase::Preparing | Phase::Releasing | Phase::Committing) {
            self.report_progress(self.handle.now());
        }
    }

    /// Lets the clients that stay here go on at the new owner.
    fn serve_from_successors(&self) {
        for leaving in &self.plan.volumes {
            if let Some(successor) = &leaving.successor {
                let volume = &leaving.volume;
                volume.change_hands(Rc::clone(successor), volume.generation().next());
                volume.open();
            }
        }
    }

    fn take_back(&self, generations: &[(VolumeId, Generation)]) {
        for (leaving, source) in self.plan.volumes.iter().zip(&self.sources) {
            let volume = &leaving.volume;
            let generation = generations.iter().find(|(id, _)| *id == volume.id());
            let generation = generation.map_or(volume.generation(), |(_, generation)| *generation);
            volume.change_hands(Rc::clone(source), generation);
            volume.open();
        }
    }

    fn retire(&mut self) {
        self.costs = self.costs();
        self.copies.clear();
        self.sources.clear();
        let keep = self.plan.keep_source;
        let images = self.plan.volumes.iter().map(|leaving| leaving.source_image.clone());
        let work: Vec<_> = images
            .map(|image| {
                let retirement = Retirement::of(&image, keep);
                self.control.retire(image, retirement)
            })
            .collect();
        self.spawn(async move { SourceEvent::Retired { left_over: left_over(work).await } });
    }
}
