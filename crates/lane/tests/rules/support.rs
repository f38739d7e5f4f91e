//! A lane without a thread: a volume over a memory store that can fail or hang, such a target, and a clock that jumps
//! from deadline to deadline.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::elastic::{Elastic, GrowthSwitch};
use block::executor::Unpark;
use block::filter::{Aligner, Delay, DelaySwitch, Fault, FaultSwitch};
use block::{
    BlockDevice, Buffer, BufferPool, ByteRange, Driver, Durability, Executor, Handle, MemoryStore, ZeroMode,
};
use chronicle::{BlockSize, Generation};
use futures_channel::oneshot;
use lane::{
    Control, ControlFault, GivesWay, LaneFuture, LocalDriver, Plan, PlannedVolume, Report, SourceHandle,
    TargetContent, TimeLimits, VmFault, Volume,
};
use migration::journal::{ImageLocation, Outcome, Record};
use migration::recovery::Retirement;
use migration::strategy::Strategy;
use migration::{CommitFault, MigrationId, PacingSettings, Phase, Progress, VolumeId};

pub(crate) const SIZE: u64 = 8 << 20;
pub(crate) const GENERATION: Generation = Generation(3);
pub(crate) const LIMITS: TimeLimits = TimeLimits {
    mirror_wait_max: Duration::from_secs(1),
    switch_over_max: Duration::from_millis(500),
    no_progress_max: Duration::from_secs(300),
};

pub(crate) struct Store {
    pub(crate) device: Rc<dyn BlockDevice>,
    pub(crate) memory: Rc<MemoryStore>,
    pub(crate) fault: FaultSwitch,
    pub(crate) delay: DelaySwitch,
    pub(crate) growth: Rc<RefCell<GrowthSwitch>>,
}

pub(crate) struct Scene {
    pub(crate) handle: Handle,
    pub(crate) control: Rc<Remembering>,
    pub(crate) source: Store,
    pub(crate) target: Store,
    pub(crate) target_content: TargetContent,
    pub(crate) volume: Rc<Volume>,
}

#[derive(Default)]
pub(crate) struct Remembering {
    pub(crate) records: RefCell<Vec<Record>>,
    pub(crate) progress: RefCell<Vec<Progress>>,
    pub(crate) retired: RefCell<Vec<ImageLocation>>,
    pub(crate) discarded: RefCell<Vec<ImageLocation>>,
    pub(crate) commits_take: Cell<Duration>,
    clock: RefCell<Option<Handle>>,
}

/// Runs `test` on an executor whose clock jumps; ends when the test ends.
pub(crate) fn play<F: Future<Output = ()> + 'static>(test: impl FnOnce(Scene) -> F) {
    let mut executor = Executor::new(JumpingClock::default());
    let handle = executor.handle();
    let (source, target) = (Store::new(&handle), Store::new(&handle));
    let (store, aligner) = (Rc::clone(&source.device), Aligner::new(BufferPool::new(), handle.clone()));
    let volume = Volume::new(VolumeId([7; 16]), BlockSize::DEFAULT, GENERATION, store, aligner);
    let control = Remembering { clock: RefCell::new(Some(handle.clone())), ..Remembering::default() };
    let test = test(Scene {
        handle,
        control: Rc::new(control),
        source,
        target,
        target_content: TargetContent::Zero,
        volume,
    });
    executor.run(test);
}

impl Scene {
    pub(crate) fn device(&self) -> Rc<dyn BlockDevice> {
        self.volume.device()
    }

    pub(crate) fn replace_source(&mut self, device: Rc<dyn BlockDevice>) {
        let aligner = Aligner::new(BufferPool::new(), self.handle.clone());
        self.volume = Volume::new(VolumeId([7; 16]), BlockSize::DEFAULT, GENERATION, device, aligner);
    }

    pub(crate) fn migrate(&self) -> (SourceHandle, Rc<RefCell<Option<Outcome>>>) {
        self.migrate_paced(PacingSettings::default())
    }

    pub(crate) fn migrate_slowly(
        &self,
        bytes_per_second: u64,
    ) -> (SourceHandle, Rc<RefCell<Option<Outcome>>>) {
        let bytes_per_second = Some(bytes_per_second);
        self.migrate_paced(PacingSettings {
            chunk_bytes: 128 << 10,
            bytes_per_second,
            ..PacingSettings::default()
        })
    }

    fn migrate_paced(&self, pacing: PacingSettings) -> (SourceHandle, Rc<RefCell<Option<Outcome>>>) {
        let plan = Plan {
            migration: MigrationId(1),
            volumes: vec![PlannedVolume {
                volume: Rc::clone(&self.volume),
                target: Rc::clone(&self.target.device),
                target_content: self.target_content,
                zeroes: ZeroMode::MayUnmap,
                chunks: lane::Chunks::default(),
                known: None,
                carried: migration::Carried::default(),
                source_image: location("source"),
                target_image: location("target"),
            }],
            keep_source: false,
            pacing,
            gives_way: GivesWay::default(),
            limits: LIMITS,
            strategy: Strategy::Mirror,
            moves: migration::source::Moves::Volumes,
        };
        let control = Rc::clone(&self.control) as Rc<dyn Control>;
        let (driver, source) = LocalDriver::new(self.handle.clone(), control, &BufferPool::new(), plan);
        let outcome = Rc::new(RefCell::new(None));
        let ended = Rc::clone(&outcome);
        self.handle.spawn(async move { *ended.borrow_mut() = Some(driver.run().await) });
        (source, outcome)
    }

    pub(crate) async fn outcome(&self, outcome: &Rc<RefCell<Option<Outcome>>>) -> Outcome {
        loop {
            if let Some(outcome) = outcome.borrow_mut().take() {
                return outcome;
            }
            self.handle.sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) async fn reach(&self, driver: &SourceHandle, phase: Phase) {
        // Most phases begin and end at one instant of this clock, which moves only when all tasks are idle.
        const LOOKS: u32 = 1000;
        loop {
            for _ in 0..LOOKS {
                if driver.phase() >= phase {
                    return;
                }
                self.handle.sleep(Duration::ZERO).await;
            }
            self.handle.sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) async fn migrate_to_the_end(&self) -> Outcome {
        let (_, outcome) = self.migrate();
        self.outcome(&outcome).await
    }

    /// Writes a block of 4 KiB and returns how long it took.
    pub(crate) async fn write(&self, block: u64, stamp: u8) -> Duration {
        let began = self.handle.now();
        let data = Buffer::copy_of(&[stamp; 4096]);
        self.device().write(block * 4096, data, Durability::Volatile).await.unwrap();
        self.handle.now() - began
    }

    pub(crate) async fn fill(&self, blocks: u64) {
        for block in 0..blocks {
            self.write(block, (block % 250) as u8 + 1).await;
        }
    }
}

impl Store {
    pub(crate) fn new(handle: &Handle) -> Self {
        let memory = Rc::new(MemoryStore::new(SIZE));
        let (delayed, delay) = Delay::new(Rc::clone(&memory) as Rc<dyn BlockDevice>, handle.clone());
        let (faulty, fault) = Fault::new(Rc::new(delayed), 1);
        let (elastic, growth) = Elastic::new(Rc::new(faulty));
        Self { device: Rc::new(elastic), memory, fault, delay, growth }
    }

    pub(crate) fn memory_size(&self) -> u64 {
        self.memory.geometry().size
    }

    pub(crate) async fn content(&self) -> Vec<u8> {
        let buffer = Buffer::zeroed(usize::try_from(self.memory_size()).unwrap());
        self.memory.read(0, buffer).await.unwrap().as_slice().to_vec()
    }
}

pub(crate) fn location(name: &str) -> ImageLocation {
    ImageLocation::raw_file(name, format!("/{name}.img"))
}

pub(crate) fn block_range(block: u64) -> ByteRange {
    ByteRange::new(block * 4096, 4096)
}

impl Control for Remembering {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        self.records.borrow_mut().extend(records);
        let (clock, takes) = (self.clock.borrow().clone(), self.commits_take.get());
        Box::pin(async move {
            if let Some(clock) = clock.filter(|_| !takes.is_zero()) {
                clock.sleep(takes).await;
            }
            Ok(())
        })
    }

    /// Pauses the VM at once, and never completes.
    fn stop_vm(&self, _: MigrationId, paused: oneshot::Sender<()>) -> LaneFuture<Result<(), VmFault>> {
        paused.send(()).unwrap();
        Box::pin(pending())
    }

    fn retire(&self, image: ImageLocation, _: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        self.retired.borrow_mut().push(image);
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        self.discarded.borrow_mut().push(image);
        Box::pin(async { Ok(()) })
    }

    fn report(&self, report: Report) {
        if let Report::Progress { progress, .. } = report {
            self.progress.borrow_mut().push(progress);
        }
    }
}

/// A driver for tests: no event comes from outside, so the clock jumps to the next deadline.
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
        match deadline {
            Some(deadline) => self.now.set(self.now.get().max(deadline)),
            None => panic!("everybody waits, and for nothing that has a deadline"),
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(Nobody)
    }
}
