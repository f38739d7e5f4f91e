//! Computes the progress and the costs of a migration.

use std::time::Duration;

use migration::filling::UNIT_BYTES;
use migration::source::{Costs, Following};
use migration::strategy::Tally;
use migration::{Phase, Progress, VolumeIndex, Waiting};

use super::SourceDriver;
use super::participant::SourceParticipant;
use crate::REPORT_INTERVAL;
use crate::control::Report;

const NEARLY: f64 = 0.999;

impl SourceDriver {
    pub(super) fn costs(&self) -> Costs {
        self.participants.iter().map(SourceParticipant::costs).fold(Costs::default(), |sum, volume| Costs {
            bytes_copied: sum.bytes_copied + volume.bytes_copied,
            bytes_mirrored: sum.bytes_mirrored + volume.bytes_mirrored,
            bytes_zero: sum.bytes_zero + volume.bytes_zero,
            bytes_cloned: sum.bytes_cloned + volume.bytes_cloned,
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
            bytes_missing: None,
            fraction: 0.0,
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            bytes_cloned: 0,
            copy_bytes_per_second: 0.0,
            remaining: None,
            waiting: waiting(self.source.poll_timeout()).or(self.source.waits_for().map(patiently)),
            suspended: None,
            attempt: self.source.tries(),
            tally: Tally::default(),
            rounds: Vec::new(),
            paced: None,
            limited_by: None,
            hurry: None,
        };
        let volumes = self.participants.len().max(1) as f64;
        let mut bytes_missing = 0;
        let indices = VolumeIndex::all(self.participants.len());
        for (index, participant) in indices.zip(&self.participants) {
            let volume = participant.progress();
            progress.rounds.extend(volume.rounds.iter().map(|round| (index, *round)));
            progress.bytes_synchronised += volume.bytes_synchronised;
            bytes_missing += volume.bytes_missing;
            // Blocks that the handover left behind count as arrived only when the target says so, even if
            // guests overwrote them there.
            let is_whole = self.is_released && (volume.bytes_missing == 0 || phase == Phase::Retiring);
            progress.fraction += if is_whole { 1.0 } else { volume.fraction } / volumes;
            if !self.is_released {
                progress.waiting = progress.waiting.or(volume.waiting);
                progress.remaining = progress.remaining.max(volume.remaining);
            }
            progress.copy_bytes_per_second += volume.copy_bytes_per_second;
            progress.suspended = progress.suspended.or(volume.suspended);
            progress.paced = progress.paced.into_iter().chain(volume.paced).reduce(pacer::Status::and);
            progress.limited_by = progress.limited_by.or(volume.limited_by);
            let together = progress.hurry.zip(volume.hurry).map(|(one, two)| one.with(two));
            progress.hurry = together.or(progress.hurry).or(volume.hurry);
        }
        progress.bytes_missing = Some(if phase == Phase::Retiring { 0 } else { bytes_missing });
        if let Some(following) = self.source.following() {
            (progress.bytes_missing, progress.fraction) =
                followed(following, bytes_missing, progress.bytes_synchronised);
        }
        progress.fraction = progress.fraction.max(self.fraction.get());
        self.fraction.set(progress.fraction);
        let costs = self.costs();
        progress.bytes_copied = costs.bytes_copied;
        progress.bytes_mirrored = costs.bytes_mirrored;
        progress.bytes_zero = costs.bytes_zero;
        progress.bytes_cloned = costs.bytes_cloned;
        progress.tally = costs.tally;
        progress
    }
}

/// Returns the missing bytes of volumes that were handed over incomplete, and the fraction that has arrived. `bytes_missing` and
/// `bytes_synchronised` count this run's copies and reads; both are 0 after a restart.
///
/// The result is never complete: only the target reports that.
fn followed(following: Following, bytes_missing: u64, bytes_synchronised: u64) -> (Option<u64>, f64) {
    let bytes = |units: u64| units.saturating_mul(UNIT_BYTES);
    let all = match bytes_missing.saturating_add(bytes_synchronised) {
        0 => bytes(following.units_at_handover),
        all => all,
    };
    // Blocks that were read may be read again, so reads do not prove arrival.
    let by_reads = (bytes_missing + bytes_synchronised > 0).then(|| bytes_missing.max(UNIT_BYTES));
    let missing = following.units_missing.map(bytes).or(by_reads);
    let there = missing.map_or(0, |missing| all.saturating_sub(missing));
    (missing, (there as f64 / all.max(1) as f64).min(NEARLY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_not_known_after_a_restart_before_it_was_said_and_is_never_whole() {
        let following = |units_missing| Following { units_at_handover: 100, units_missing };
        assert_eq!(followed(following(None), 0, 0), (None, 0.0));
        assert_eq!(followed(following(Some(25)), 0, 0), (Some(25 * UNIT_BYTES), 0.75));
        // In the run that handed the volumes over, reads give an estimate; the target's count is exact.
        assert_eq!(
            followed(following(None), 50 * UNIT_BYTES, 150 * UNIT_BYTES),
            (Some(50 * UNIT_BYTES), 0.75)
        );
        assert_eq!(
            followed(following(Some(20)), 50 * UNIT_BYTES, 150 * UNIT_BYTES),
            (Some(20 * UNIT_BYTES), 0.9)
        );
        let (missing, fraction) = followed(following(None), 0, 200 * UNIT_BYTES);
        assert!(missing.is_some_and(|missing| missing > 0) && fraction < 1.0, "{missing:?}, {fraction}");
    }
}
