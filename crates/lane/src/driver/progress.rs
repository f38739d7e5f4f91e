//! How far the migration is, and what it has cost.

use std::time::Duration;

use migration::source::Costs;
use migration::strategy::Tally;
use migration::{Progress, VolumeIndex, Waiting};

use super::SourceDriver;
use super::participant::SourceParticipant;
use crate::REPORT_INTERVAL;
use crate::control::Report;

impl SourceDriver {
    pub(super) fn costs(&self) -> Costs {
        self.participants.iter().map(SourceParticipant::costs).fold(Costs::default(), |sum, volume| Costs {
            bytes_copied: sum.bytes_copied + volume.bytes_copied,
            bytes_mirrored: sum.bytes_mirrored + volume.bytes_mirrored,
            bytes_zero: sum.bytes_zero + volume.bytes_zero,
            tally: sum.tally.and(volume.tally),
        })
    }

    pub(super) fn report_progress(&mut self, now: Duration) {
        self.report_at = now + REPORT_INTERVAL;
        let progress = self.progress(now);
        self.control.report(Report::Progress { migration: self.migration, progress });
    }

    pub(super) fn progress(&self, now: Duration) -> Progress {
        let phase = self.phase.get();
        let waiting = |waits: Option<(Duration, &'static str)>| {
            waits.map(|(at, reason)| Waiting { reason, remaining: Some(at.saturating_sub(now)) })
        };
        let patiently = |reason| Waiting { reason, remaining: None };
        let mut progress = Progress {
            phase,
            bytes_synchronised: 0,
            bytes_missing: 0,
            fraction: 0.0,
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            copy_bytes_per_second: 0.0,
            remaining: None,
            waiting: waiting(self.source.poll_timeout()).or(self.source.waits_for().map(patiently)),
            suspended: None,
            attempt: self.source.tries(),
            tally: Tally::default(),
            rounds: Vec::new(),
        };
        let volumes = self.participants.len().max(1) as f64;
        let indices = VolumeIndex::all(self.participants.len());
        for (index, participant) in indices.zip(&self.participants) {
            let volume = participant.progress();
            progress.rounds.extend(volume.rounds.iter().map(|round| (index, *round)));
            progress.bytes_synchronised += volume.bytes_synchronised;
            progress.bytes_missing += volume.bytes_missing;
            // What has left with blocks missing is not whole before they have followed.
            let is_whole = self.is_released && volume.bytes_missing == 0;
            progress.fraction += if is_whole { 1.0 } else { volume.fraction } / volumes;
            if !self.is_released {
                progress.waiting = progress.waiting.or(volume.waiting);
                progress.remaining = progress.remaining.max(volume.remaining);
            }
            progress.copy_bytes_per_second += volume.copy_bytes_per_second;
            progress.suspended = progress.suspended.or(volume.suspended);
        }
        // Before and after the handover it is measured by different things.
        progress.fraction = progress.fraction.max(self.fraction.get());
        self.fraction.set(progress.fraction);
        let costs = self.costs();
        progress.bytes_copied = costs.bytes_copied;
        progress.bytes_mirrored = costs.bytes_mirrored;
        progress.bytes_zero = costs.bytes_zero;
        progress.tally = costs.tally;
        progress
    }
}
