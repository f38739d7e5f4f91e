//! Tests of a recorder's reports, on a clock that jumps.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use block::Executor;
use block::executor::{Driver, Unpark};
use migration::journal::{Outcome, Summary};
use migration::strategy::Tally;

use super::*;
use crate::RECORDED_BEFORE;

const MIGRATION: MigrationId = MigrationId(7);

#[test]
fn a_recording_reaches_from_before_the_migration_to_after_its_end() {
    let told = play(|scene| async move {
        scene.work(Duration::from_secs(10)).await;
        let recorder = scene.record();
        for round in 1..=5 {
            scene.work(SAMPLE_INTERVAL).await;
            recorder.report(progress(Phase::Copying, round * 1000));
        }
        recorder.report(ended());
        scene.pulse_goes_on(recorder.record_after()).await;
    });
    let samples: Vec<_> = told.iter().flat_map(|piece| &piece.samples).collect();
    let mut at = samples[0].began_us;
    for sample in &samples {
        assert_eq!(sample.began_us, at, "without gaps");
        assert_eq!(sample.guest.latencies.count(), sample.guest.reads);
        at += i64::try_from(sample.guest.length.as_micros()).unwrap();
    }
    let before = i64::try_from(RECORDED_BEFORE.as_micros()).unwrap();
    let after = i64::try_from(RECORDED_AFTER.as_micros()).unwrap();
    assert!((-before - 200_000..=-before).contains(&samples[0].began_us), "{}", samples[0].began_us);
    assert_eq!(at, 500_000 + after);
    let copied: Vec<u64> =
        samples.iter().map(|sample| sample.bytes_copied).filter(|bytes| *bytes > 0).collect();
    assert_eq!(copied, [1000; 5]);
    assert!(samples.iter().all(|sample| sample.guest.reads > 0));
}

#[test]
fn phases_are_told_with_the_next_sample_and_with_the_time_at_which_they_were_entered() {
    let told = play(|scene| async move {
        let recorder = scene.record();
        scene.work(SAMPLE_INTERVAL).await;
        let before = scene.control.pieces.borrow().len();
        recorder.entered(MIGRATION, Phase::Closing);
        scene.handle.sleep(Duration::from_millis(1)).await;
        recorder.entered(MIGRATION, Phase::Preparing);
        assert_eq!(scene.control.pieces.borrow().len(), before, "the gates are closed");
        recorder.report(ended());
        recorder.end();
    });
    let phases: Vec<_> = told.iter().flat_map(|piece| piece.phases.clone()).collect();
    assert_eq!(phases, [(100_000, Phase::Closing), (101_000, Phase::Preparing)]);
}

#[test]
fn the_end_is_told_once_however_the_recording_ends() {
    for way in ["ended", "dropped"] {
        let ends = Rc::new(Cell::new(0));
        let counted = Rc::clone(&ends);
        play(|scene| async move {
            let recorder = scene.record();
            if way == "ended" {
                recorder.end();
                recorder.end();
            }
            drop(recorder);
            counted.set(scene.control.ends.get());
        });
        assert_eq!(ends.get(), 1, "{way}");
    }
}

struct Scene {
    handle: Handle,
    pulse: Rc<Pulse>,
    counters: Rc<crate::stack::Counters>,
    control: Rc<Remembering>,
}

#[derive(Default)]
struct Remembering {
    pieces: RefCell<Vec<Recorded>>,
    ends: Cell<u32>,
}

impl Scene {
    fn record(&self) -> Rc<Recorder> {
        let control = Rc::clone(&self.control) as Rc<dyn Control>;
        Recorder::begin(control, self.handle.clone(), &self.pulse, MIGRATION)
    }

    async fn work(&self, length: Duration) {
        let until = self.handle.now() + length;
        while self.handle.now() < until {
            let arrived = self.handle.now();
            self.handle.sleep(Duration::from_millis(10)).await;
            self.pulse.note(arrived, self.handle.now());
            self.counters.reads.set(self.counters.reads.get() + 1);
        }
    }

    async fn pulse_goes_on(&self, meanwhile: impl Future<Output = ()>) {
        let work = std::pin::pin!(self.work(Duration::from_secs(3600)));
        futures_util::future::select(work, std::pin::pin!(meanwhile)).await;
    }
}

impl Control for Remembering {
    fn commit(&self, _: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        unreachable!("nothing is committed")
    }

    fn retire(&self, _: ImageLocation, _: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        unreachable!("nothing is retired")
    }

    fn discard(&self, _: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        unreachable!("nothing is discarded")
    }

    fn report(&self, report: Report) {
        match report {
            Report::Recorded { recorded, .. } => self.pieces.borrow_mut().push(recorded),
            Report::RecordingEnded { .. } => self.ends.set(self.ends.get() + 1),
            Report::Progress { .. } | Report::DataPath { .. } | Report::Ended { .. } => {}
        }
    }
}

fn progress(phase: Phase, bytes_copied: u64) -> Report {
    let progress = Progress {
        phase,
        bytes_synchronised: 0,
        bytes_missing: Some(0),
        fraction: 0.0,
        bytes_copied,
        bytes_mirrored: 0,
        bytes_zero: 0,
        bytes_cloned: 0,
        copy_bytes_per_second: 0.0,
        remaining: None,
        waiting: None,
        suspended: None,
        attempt: 0,
        tally: Tally::default(),
        rounds: Vec::new(),
        paced: None,
        limited_by: None,
        hurry: None,
    };
    Report::Progress { migration: MIGRATION, progress }
}

fn ended() -> Report {
    Report::Ended { migration: MIGRATION, outcome: Outcome::Cancelled, summary: Summary::default() }
}

fn play<F: Future<Output = ()> + 'static>(test: impl FnOnce(Scene) -> F) -> Vec<Recorded> {
    let mut executor = Executor::new(JumpingClock::default());
    let handle = executor.handle();
    let counters = Rc::<crate::stack::Counters>::default();
    let pulse = Rc::new(Pulse::new(handle.now(), Rc::clone(&counters)));
    let control = Rc::<Remembering>::default();
    let scene = Scene { handle, pulse, counters, control: Rc::clone(&control) };
    executor.run(test(scene));
    control.pieces.take()
}

#[derive(Default)]
struct JumpingClock {
    now: Cell<Duration>,
}

struct Nobody;

impl Unpark for Nobody {
    fn unpark(&self) {}
}

impl Driver for JumpingClock {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn park(&mut self, deadline: Option<Duration>) {
        self.now.set(self.now.get().max(deadline.unwrap()));
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(Nobody)
    }
}
