//! What the source's machine asks for.

use std::rc::Rc;

use chronicle::Generation;
use migration::recovery::Retirement;
use migration::source::{SourceAction, SourceEvent};
use migration::{Phase, VolumeId};
use tracing::{error, info};

use super::{Conductor, Event, flush, left_over};
use crate::control::Report;

impl Conductor {
    pub(super) fn carry_out_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::Enter(phase) => self.enter(phase),
            SourceAction::CloseGate { volume, attempt } => {
                let closed = self.volume(volume).close();
                self.spawn(async move {
                    closed.await;
                    Event::Source(SourceEvent::GateClosed { volume, attempt })
                });
            }
            SourceAction::OpenGate(volume) => self.volume(volume).open(),
            SourceAction::Flush { volume, attempt } => {
                let store = self.volume(volume).store();
                self.spawn(async move {
                    let result = flush(&store).await;
                    Event::Source(SourceEvent::Flushed { volume, attempt, result })
                });
            }
            SourceAction::Commit { commit, records } => self.commit(records, commit, |commit, result| {
                Event::Source(SourceEvent::Committed { commit, result })
            }),
            SourceAction::Send(message) => self.send_to_target(message),
            SourceAction::StopCopying => {
                self.copies.iter().for_each(|copy| copy.stop());
                self.plan.volumes.iter().for_each(|planned| planned.volume.remove_mirror());
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

    pub(super) fn enter(&mut self, phase: Phase) {
        let before = self.phase.replace(phase);
        self.is_released |= phase == Phase::Committing;
        let migration = self.plan.migration;
        if before != phase && !before.may_become(phase) {
            error!(%migration, %before, %phase, "a transition that is not in the table");
        }
        info!(%migration, %phase, attempt = self.source.attempt().0, "phase");
        self.control.entered(migration, phase);
        // The gates are closed in these: a report would only make that longer.
        if !matches!(phase, Phase::Closing | Phase::Preparing | Phase::Releasing | Phase::Committing) {
            self.report_progress(self.handle.now());
        }
    }

    pub(super) fn take_back(&self, generations: &[(VolumeId, Generation)]) {
        for (planned, source) in self.plan.volumes.iter().zip(&self.sources) {
            let volume = &planned.volume;
            let generation = generations.iter().find(|(id, _)| *id == volume.id());
            let generation = generation.map_or(volume.generation(), |(_, generation)| *generation);
            volume.change_hands(Rc::clone(source), generation);
            volume.open();
        }
    }

    pub(super) fn retire(&mut self) {
        self.costs = self.costs();
        self.copies.clear();
        self.sources.clear();
        let keep = self.plan.keep_source;
        let images = self.plan.volumes.iter().map(|planned| planned.source_image.clone());
        let work: Vec<_> = images
            .map(|image| {
                let retirement = Retirement::of(&image, keep);
                self.control.retire(image, retirement)
            })
            .collect();
        self.spawn(async move { Event::Source(SourceEvent::Retired { left_over: left_over(work).await }) });
    }
}
