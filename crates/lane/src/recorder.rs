//! Records a migration for its report: guests' requests before, during and after it, and its own work.
//!
//! ```text
//!   driver ──► Recorder (a Control) ──► Control of the daemon
//!                    │ at each report of progress: one sample         ▲
//!                    └───────────────── Report::Recorded ─────────────┘
//! ```
//! It stands between the driver and the control plane, so neither the driver nor the simulator knows of it. It adds the counts of
//! the volume's meter. While the gates are closed it only notes the time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::Handle;
use futures_channel::oneshot;
use migration::journal::{ImageLocation, Record};
use migration::recovery::Retirement;
use migration::{CommitFault, MigrationId, Phase, Progress};

use crate::control::{Control, ControlFault, HooksFault, LaneFuture, Recorded, Report, Sample, VmFault};
use crate::pulse::{Pulse, Window};
use crate::{RECORDED_AFTER, SAMPLE_INTERVAL};

/// The expected number of phases in one attempt, for which room is made beforehand.
const PHASES_USUAL: usize = 16;

pub(crate) struct Recorder {
    below: Rc<dyn Control>,
    handle: Handle,
    pulse: Rc<Pulse>,
    migration: MigrationId,
    began: Duration,
    sampled_at: Cell<Duration>,
    /// Phases entered since the last sample, with their times.
    phases: RefCell<Vec<(Duration, Phase)>>,
    progress: RefCell<Option<Progress>>,
    /// Bytes copied, mirrored and found to be zero up to the last sample.
    bytes: Cell<[u64; 3]>,
    ended: Cell<bool>,
}

impl Recorder {
    pub(crate) fn begin(
        below: Rc<dyn Control>,
        handle: Handle,
        pulse: &Rc<Pulse>,
        migration: MigrationId,
    ) -> Rc<Self> {
        let began = handle.now();
        let recorder = Self {
            below,
            handle,
            migration,
            began,
            sampled_at: Cell::new(began),
            phases: RefCell::new(Vec::with_capacity(PHASES_USUAL)),
            progress: RefCell::default(),
            bytes: Cell::default(),
            ended: Cell::default(),
            pulse: Rc::clone(pulse),
        };
        let before = pulse.begin_taking(began).into_iter().map(|window| recorder.quiet(window)).collect();
        recorder.tell(before);
        Rc::new(recorder)
    }

    pub(crate) async fn record_after(&self) {
        let until = self.handle.now() + RECORDED_AFTER;
        while !self.ended.get() && self.handle.now() < until {
            self.handle.sleep(SAMPLE_INTERVAL).await;
            if !self.ended.get() {
                self.sample();
            }
        }
        self.end();
    }

    pub(crate) fn end(&self) {
        if !self.ended.replace(true) {
            self.pulse.end_taking();
            self.below.report(Report::RecordingEnded { migration: self.migration });
        }
    }

    fn sample(&self) {
        let now = self.handle.now();
        self.sampled_at.set(now);
        let window = self.pulse.take(now);
        if window.length.is_zero() {
            // The last sample was taken at this instant, but a phase may still be unreported.
            self.tell(Vec::new());
            return;
        }
        let mut sample = self.quiet(window);
        if let Some(progress) = &*self.progress.borrow() {
            let [copied, mirrored, zero] =
                self.bytes.replace([progress.bytes_copied, progress.bytes_mirrored, progress.bytes_zero]);
            sample.bytes_copied = progress.bytes_copied.saturating_sub(copied);
            sample.bytes_mirrored = progress.bytes_mirrored.saturating_sub(mirrored);
            sample.bytes_zero = progress.bytes_zero.saturating_sub(zero);
            if progress.phase != Phase::Ended {
                sample.bytes_missing = progress.bytes_missing;
                sample.waits_for = progress.waiting.map(|waiting| waiting.reason);
                sample.suspended = progress.suspended;
            }
        }
        self.tell(vec![sample]);
    }

    fn quiet(&self, window: Window) -> Sample {
        Sample {
            began_us: self.since_began(window.began),
            guest: window,
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            bytes_missing: None,
            waits_for: None,
            suspended: None,
        }
    }

    fn tell(&self, samples: Vec<Sample>) {
        let phases = self.phases.take();
        let phases = phases.into_iter().map(|(at, phase)| (self.since_began(at), phase)).collect();
        let progress = self.progress.borrow();
        let (tally, rounds) =
            progress.as_ref().map(|progress| (progress.tally, progress.rounds.clone())).unwrap_or_default();
        let recorded = Recorded { samples, phases, tally, rounds };
        self.below.report(Report::Recorded { migration: self.migration, recorded });
    }

    fn since_began(&self, at: Duration) -> i64 {
        let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        micros(at).saturating_sub(micros(self.began))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end();
    }
}

impl Control for Recorder {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        self.below.commit(records)
    }

    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        self.below.retire(image, retirement)
    }

    fn confirm(&self, image: &ImageLocation) -> Option<LaneFuture<Result<(), ControlFault>>> {
        self.below.confirm(image)
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        self.below.discard(image)
    }

    fn run_hooks(&self, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        self.below.run_hooks(migration)
    }

    fn stop_vm(
        &self,
        migration: MigrationId,
        paused: oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        self.below.stop_vm(migration, paused)
    }

    fn run_vm(&self, migration: MigrationId) -> LaneFuture<Result<(), VmFault>> {
        self.below.run_vm(migration)
    }

    fn report(&self, report: Report) {
        match &report {
            Report::Progress { progress, .. } => {
                self.progress.replace(Some(progress.clone()));
                // A change of phase reports at once; a very short sample would say little.
                if self.handle.now().saturating_sub(self.sampled_at.get()) >= SAMPLE_INTERVAL / 2 {
                    self.sample();
                }
            }
            // Before the report of the end: its receiver may ask for the history at once.
            Report::Ended { .. } => self.sample(),
            Report::DataPath { .. } | Report::Recorded { .. } | Report::RecordingEnded { .. } => {}
        }
        self.below.report(report);
    }

    /// **N.B.** The gates may be closed: the phase is reported with the next sample.
    fn entered(&self, migration: MigrationId, phase: Phase) {
        self.phases.borrow_mut().push((self.handle.now(), phase));
        self.below.entered(migration, phase);
    }

    fn carry(&self) -> Option<Vec<LaneFuture<()>>> {
        self.below.carry()
    }
}

#[cfg(test)]
mod tests;
