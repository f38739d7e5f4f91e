//! How far the migration is, and what it has cost.

use std::time::Duration;

use migration::source::Costs;
use migration::strategy::Tally;
use migration::{Progress, Waiting};

use super::SourceConductor;
use crate::REPORT_INTERVAL;
use crate::control::Report;

impl SourceConductor {
    pub(super) fn costs(&self) -> Costs {
        let strategies = self.copies.iter();
        let costs = strategies.map(|copy| {
            copy.with_strategy(|strategy| (strategy.copied(), strategy.bytes_mirrored(), strategy.tally()))
        });
        costs.fold(self.costs, |sum, (copied, bytes_mirrored, tally)| Costs {
            bytes_copied: sum.bytes_copied + copied.bytes_written,
            bytes_mirrored: sum.bytes_mirrored + bytes_mirrored,
            bytes_zero: sum.bytes_zero + copied.bytes_zero,
            tally: sum.tally.and(tally),
        })
    }

    pub(super) fn report_progress(&mut self, now: Duration) {
        self.report_at = now + REPORT_INTERVAL;
        let progress = self.progress(now);
        self.control.report(Report::Progress { migration: self.plan.migration, progress });
    }

    pub(super) fn progress(&self, now: Duration) -> Progress {
        let phase = self.phase.get();
        let waiting = |waits: Option<(Duration, &'static str)>| {
            waits.map(|(at, reason)| Waiting { reason, remaining: Some(at.saturating_sub(now)) })
        };
        let patiently = |reason| Waiting { reason, remaining: None };
        let mut progress = Progress {
            phase,
            blocks_synchronised: 0,
            blocks_missing: 0,
            fraction: if self.is_released { 1.0 } else { 0.0 },
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            copy_bytes_per_second: 0.0,
            remaining: None,
            waiting: waiting(self.source.poll_timeout()).or(self.source.waits_for().map(patiently)),
            suspended: None,
            attempt: self.source.attempt().0,
            tally: Tally::default(),
        };
        let volumes = self.copies.len().max(1) as f64;
        for copy in &self.copies {
            copy.with_strategy(|strategy| {
                progress.blocks_synchronised += strategy.blocks_synchronised();
                progress.blocks_missing += strategy.blocks_remaining();
                if !self.is_released {
                    progress.fraction += strategy.fraction() / volumes;
                    let waits = waiting(strategy.poll_timeout()).or(strategy.waits_for().map(patiently));
                    progress.waiting = progress.waiting.or(waits);
                    progress.remaining = progress.remaining.max(strategy.remaining());
                }
                progress.copy_bytes_per_second += strategy.copy_bytes_per_second();
                progress.suspended = progress.suspended.or(strategy.suspended());
            });
        }
        let costs = self.costs();
        progress.bytes_copied = costs.bytes_copied;
        progress.bytes_mirrored = costs.bytes_mirrored;
        progress.bytes_zero = costs.bytes_zero;
        progress.tally = costs.tally;
        progress
    }
}
