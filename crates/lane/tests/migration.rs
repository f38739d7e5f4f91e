//! Tests a lane with real image files and the io_uring engine (and threads): a volume moves between two images while requests
//! go through its stack.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use block::engine::{Engine, EngineChoice};
use block::filter::Aligner;
use block::{Access, Buffer, Durability, Executor, FileStore, Handle, Image, ZeroMode};
use chronicle::{BlockSize, Generation};
use lane::{
    Control, ControlFault, GivesWay, LaneFuture, LocalDriver, Plan, PlannedVolume, Report, TargetContent,
    TimeLimits, Volume,
};
use migration::journal::{ImageLocation, Outcome, Record};
use migration::recovery::Retirement;
use migration::strategy::Strategy;
use migration::{CommitFault, MigrationId, PacingSettings, VolumeId};

const SIZE: u64 = 64 << 20;

#[derive(Default)]
struct Remembering {
    records: RefCell<Vec<Record>>,
    reports: RefCell<Vec<Report>>,
    retired: RefCell<Vec<(ImageLocation, Retirement)>>,
    discarded: RefCell<Vec<ImageLocation>>,
}

impl Control for Remembering {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        self.records.borrow_mut().extend(records);
        Box::pin(async { Ok(()) })
    }

    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        self.retired.borrow_mut().push((image, retirement));
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        self.discarded.borrow_mut().push(image);
        Box::pin(async { Ok(()) })
    }

    fn report(&self, report: Report) {
        self.reports.borrow_mut().push(report);
    }
}

struct Bench {
    folder: tempfile::TempDir,
    handle: Handle,
    engine: Rc<dyn Engine>,
    control: Rc<Remembering>,
    volume: Rc<Volume>,
}

impl Bench {
    fn location(&self, name: &str) -> ImageLocation {
        ImageLocation::raw_file(name, self.path(name).to_string_lossy())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.img"))
    }

    fn migrate(&self) -> (LocalDriver, lane::SourceHandle) {
        let target = Image::create(&self.path("target"), SIZE).unwrap();
        let plan = Plan {
            migration: MigrationId(1),
            volumes: vec![PlannedVolume {
                volume: Rc::clone(&self.volume),
                target: Rc::new(FileStore::new(target, Rc::clone(&self.engine))),
                target_content: TargetContent::Zero,
                zeroes: ZeroMode::MayUnmap,
                chunks: lane::Chunks::default(),
                known: None,
                carried: migration::Carried::default(),
                source_image: self.location("source"),
                target_image: self.location("target"),
            }],
            keep_source: false,
            pacing: PacingSettings::default(),
            gives_way: GivesWay::default(),
            limits: TimeLimits::default(),
            strategy: Strategy::Mirror,
            moves: migration::source::Moves::Volumes,
        };
        let control = Rc::clone(&self.control) as Rc<dyn Control>;
        LocalDriver::new(self.handle.clone(), control, self.engine.buffers(), plan)
    }
}

fn run<F: Future<Output = ()> + 'static>(engine: EngineChoice, test: impl FnOnce(Bench) -> F + 'static) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (driver, engine) = block::engine::open(engine).unwrap();
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    let image = Image::create(&folder.path().join("source.img"), SIZE).unwrap();
    let store = Rc::new(FileStore::new(image, Rc::clone(&engine)));
    let aligner = Aligner::new(engine.buffers().clone(), handle.clone());
    let volume = Volume::new(VolumeId([7; 16]), BlockSize::DEFAULT, Generation(3), store, aligner);
    let bench = Bench { folder, handle, engine, control: Rc::default(), volume };
    executor.run(test(bench));
}

fn pattern(stamp: u64) -> Buffer {
    let words: Vec<u8> = (0..1024u64).flat_map(|word| (stamp * 1_000_003 + word).to_le_bytes()).collect();
    Buffer::copy_of(&words)
}

fn for_both_engines<F: Future<Output = ()> + 'static>(test: impl Fn(Bench) -> F + Copy + 'static) {
    run(EngineChoice::Ring, test);
    run(EngineChoice::Threads, test);
}

fn bytes_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn a_volume_in_use_moves_and_keeps_every_acknowledged_write() {
    for_both_engines(|bench| async move {
        let device = bench.volume.device();
        for block in 0..2000u64 {
            device.write(block * 3 * 8192, pattern(block), Durability::Volatile).await.unwrap_or(());
        }
        let (driver, source) = bench.migrate();
        // Slow until the guest has written enough, whatever its pace.
        source.set_bandwidth(Some(1 << 20));
        let ended = Rc::new(RefCell::new(None));
        let outcome = Rc::clone(&ended);
        bench.handle.spawn(async move { *outcome.borrow_mut() = Some(driver.run().await) });
        let mut stamp = 10_000;
        let mut expected = std::collections::BTreeMap::new();
        while ended.borrow().is_none() {
            let block = stamp * 7919 % (SIZE / 8192);
            device.write(block * 8192, pattern(stamp), Durability::Volatile).await.unwrap();
            expected.insert(block, stamp);
            stamp += 1;
            if expected.len() == 200 {
                source.set_bandwidth(None);
            }
        }
        assert_eq!(*ended.borrow(), Some(Outcome::Moved { left_over: String::new() }));
        assert!(expected.len() >= 200, "the guest wrote {} blocks meanwhile", expected.len());
        for (block, stamp) in expected {
            let read = device.read(block * 8192, Buffer::zeroed(8192)).await.unwrap();
            assert_eq!(read.as_slice(), pattern(stamp).as_slice(), "block {block}");
        }
        device.flush().await.unwrap();
        assert_eq!(bench.volume.generation(), Generation(4));
        let records = bench.control.records.borrow();
        let kinds: Vec<_> = records.iter().map(std::mem::discriminant).collect();
        let prepared = Record::TargetPrepared { migration: MigrationId(1), attempt: migration::Attempt(1) };
        assert_eq!(kinds.first(), Some(&std::mem::discriminant(&prepared)));
        assert!(matches!(
            records.last(),
            Some(Record::MigrationEnded { outcome: Outcome::Moved { .. }, .. })
        ));
        assert_eq!(*bench.control.retired.borrow(), [(bench.location("source"), Retirement::Delete)]);
        assert!(bench.control.discarded.borrow().is_empty());
        // The source's image is released: it can be locked again.
        drop(Image::open(&bench.path("source"), Access::ReadWrite).unwrap());
    });
}

#[test]
fn a_cancelled_migration_leaves_the_volume_at_the_source() {
    for_both_engines(|bench| async move {
        let device = bench.volume.device();
        for block in 0..1000u64 {
            device.write(block * 8192, pattern(block), Durability::Volatile).await.unwrap();
        }
        let (driver, source) = bench.migrate();
        source.set_bandwidth(Some(1 << 20));
        let canceller = bench.handle.clone();
        bench.handle.spawn(async move {
            canceller.sleep(std::time::Duration::from_millis(50)).await;
            source.cancel();
        });
        assert_eq!(driver.run().await, Outcome::Cancelled);
        assert_eq!(bench.volume.generation(), Generation(3));
        assert_eq!(*bench.control.discarded.borrow(), [bench.location("target")]);
        device.write(0, pattern(77), Durability::Durable).await.unwrap();
        assert_eq!(bytes_of(&bench.path("source"))[..8192], *pattern(77).as_slice());
        assert_ne!(bytes_of(&bench.path("target"))[..8192], *pattern(77).as_slice());
    });
}
