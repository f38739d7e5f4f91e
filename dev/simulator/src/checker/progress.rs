//! Checks that progress never runs backwards, and is complete only from the commit point on. A migration without progress must
//! say what it waits for.

use std::time::Duration;

use migration::{Phase, Progress};

/// How long a migration may show no progress without a reason.
const SILENCE_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(crate) struct ProgressWatch {
    fraction: f64,
    past_commit_point: bool,
    /// The time and the figures of the last change, or of the last report with a reason for standing still.
    unexplained: Option<(Duration, Phase, u64, u64)>,
}

impl ProgressWatch {
    pub(crate) fn report(&mut self, now: Duration, progress: &Progress) -> Option<String> {
        let Progress { phase, fraction, .. } = *progress;
        let before = std::mem::replace(&mut self.fraction, fraction);
        self.past_commit_point |=
            matches!(phase, Phase::Committing | Phase::Filling | Phase::Retiring | Phase::TakingBack);
        if fraction < before {
            return Some(format!("progress fell from {before} to {fraction} in {phase}"));
        }
        if fraction >= 1.0 && !self.past_commit_point {
            return Some(format!("progress is {fraction} in {phase}, before the commit point"));
        }
        // N.B. the target reports completeness of volumes that have left, and the phase changes then. A volume that is handed
        // back was complete, and progress never falls.
        if phase == Phase::Filling && (fraction >= 1.0 || progress.bytes_missing == Some(0)) {
            let missing = progress.bytes_missing;
            return Some(format!("progress is {fraction} in {phase}, and missing {missing:?}"));
        }
        let shown = (phase, progress.bytes_synchronised, progress.bytes_missing.unwrap_or(u64::MAX));
        let is_explained = progress.waiting.is_some() || progress.suspended.is_some();
        match self.unexplained {
            Some((since, phase, synchronised, missing))
                if !is_explained && (phase, synchronised, missing) == shown =>
            {
                if now.saturating_sub(since) > SILENCE_MAX {
                    return Some(format!(
                        "nothing has changed in {phase} for {:?}, without a reason",
                        now - since
                    ));
                }
            }
            _ => self.unexplained = Some((now, shown.0, shown.1, shown.2)),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(phase: Phase, fraction: f64) -> Progress {
        Progress {
            phase,
            bytes_synchronised: 0,
            bytes_missing: Some(1),
            fraction,
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            bytes_cloned: 0,
            copy_bytes_per_second: 0.0,
            remaining: None,
            waiting: None,
            suspended: None,
            attempt: 0,
            tally: migration::strategy::Tally::default(),
            rounds: Vec::new(),
            paced: None,
            limited_by: None,
            hurry: None,
        }
    }

    #[test]
    fn progress_that_falls_is_noticed() {
        let mut watch = ProgressWatch::default();
        assert_eq!(watch.report(Duration::ZERO, &progress(Phase::Copying, 0.5)), None);
        assert!(watch.report(Duration::ZERO, &progress(Phase::Copying, 0.4)).is_some());
    }

    #[test]
    fn progress_that_is_complete_too_early_is_noticed() {
        let mut watch = ProgressWatch::default();
        assert!(watch.report(Duration::ZERO, &progress(Phase::Discarding, 1.0)).is_some());
        let mut watch = ProgressWatch::default();
        assert!(watch.report(Duration::ZERO, &progress(Phase::Filling, 1.0)).is_some());
        let mut watch = ProgressWatch::default();
        let said_too_early = Progress { bytes_missing: Some(0), ..progress(Phase::Filling, 0.5) };
        assert!(watch.report(Duration::ZERO, &said_too_early).is_some());
        let mut watch = ProgressWatch::default();
        let unknown = Progress { bytes_missing: None, ..progress(Phase::Filling, 0.0) };
        assert_eq!(watch.report(Duration::ZERO, &unknown), None);
        let mut watch = ProgressWatch::default();
        let whole = Progress { bytes_missing: Some(0), ..progress(Phase::Retiring, 1.0) };
        assert_eq!(watch.report(Duration::ZERO, &whole), None);
    }

    #[test]
    fn a_silent_standstill_is_noticed() {
        let mut watch = ProgressWatch::default();
        assert_eq!(watch.report(Duration::ZERO, &progress(Phase::Copying, 0.5)), None);
        let waits = migration::Waiting { reason: "the journal", remaining: None };
        let explained = Progress { waiting: Some(waits), ..progress(Phase::Copying, 0.5) };
        assert_eq!(watch.report(Duration::from_secs(9), &explained), None);
        assert_eq!(watch.report(Duration::from_secs(10), &progress(Phase::Copying, 0.5)), None);
        assert!(watch.report(Duration::from_secs(19), &progress(Phase::Copying, 0.5)).is_some());
    }
}
