//! Shared by the tests of qcow2 images: engines, QEMU's tools, models, reproducible numbers.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::rc::Rc;
use std::time::Duration;

use block::engine::{self, Engine, EngineChoice};
use block::store::qcow2::{Qcow2Error, Qcow2Image, Qcow2Options, Qcow2Store};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability, Executor, Handle, ImageError, ZeroMode};
use futures_util::future::join_all;

#[derive(Clone)]
pub(crate) struct Lane {
    pub(crate) handle: Handle,
    pub(crate) engine: Rc<dyn Engine>,
}

impl Lane {
    pub(crate) async fn open(&self, path: &Path, access: Access) -> Qcow2Store {
        self.serve(self.open_when_free(path, access).await.unwrap()).await
    }

    /// Opens an image as soon as it is free. Programs of other tests may hold it for a moment, and so does the device before,
    /// until this thread's executor has run. So the thread must not sleep meanwhile.
    pub(crate) async fn open_when_free(&self, path: &Path, access: Access) -> Result<Qcow2Image, Qcow2Error> {
        for _ in 0..LOCK_TRIES {
            match Qcow2Image::open(path, access) {
                Err(error) if is_held(&error) => self.handle.sleep(LOCK_POLL).await,
                result => return result,
            }
        }
        Qcow2Image::open(path, access)
    }

    pub(crate) async fn serve(&self, image: Qcow2Image) -> Qcow2Store {
        Qcow2Store::open(image, &self.handle, &self.engine).await.unwrap()
    }
}

pub(crate) fn on_each_engine<F: Future<Output = ()> + 'static>(body: impl Fn(Lane) -> F) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        if !on_engine(choice, &body) {
            assert_eq!(choice, EngineChoice::Ring);
            omission::kernel_lacks("io_uring");
        }
    }
}

pub(crate) fn on_engine<F: Future<Output = ()> + 'static>(
    choice: EngineChoice,
    body: impl Fn(Lane) -> F,
) -> bool {
    let Ok((driver, engine)) = engine::open(choice) else { return false };
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    executor.run(body(Lane { handle, engine }));
    true
}

/// How often, and how long apart, a locked image is tried again: half a minute in all, which only bounds a failure.
const LOCK_TRIES: u32 = 1500;
const LOCK_POLL: Duration = Duration::from_millis(20);

/// Opens or makes an image, again while a file that it needs is held.
///
/// A program that another test starts has all our files, and their locks, from its fork to its exec: even those of images that
/// were closed here meanwhile.
pub(crate) fn when_free<T>(mut attempt: impl FnMut() -> Result<T, Qcow2Error>) -> Result<T, Qcow2Error> {
    for _ in 0..LOCK_TRIES {
        match attempt() {
            // There is no event when the other test's program has begun.
            Err(error) if is_held(&error) => std::thread::sleep(LOCK_POLL),
            result => return result,
        }
    }
    attempt()
}

fn is_held(error: &Qcow2Error) -> bool {
    match error {
        Qcow2Error::Image(error) => matches!(error, ImageError::Locked { .. }),
        Qcow2Error::Backing { source, .. } => is_held(source),
        _ => false,
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = run_when_free(program, arguments);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    told
}

/// Runs a program of QEMU's, again while it finds its image locked, for [`when_free`]'s reason.
fn run_when_free(program: &str, arguments: &[&str]) -> Output {
    let mut output = try_run(program, arguments);
    for _ in 0..LOCK_TRIES {
        let told = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || !told.contains("Is another process using the image") {
            break;
        }
        // Nothing reports when the program of another test releases the lock.
        std::thread::sleep(LOCK_POLL);
        output = try_run(program, arguments);
    }
    output
}

pub(crate) fn try_run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    output.unwrap_or_else(|error| panic!("{program}: {error}; run scripts/install-packages first"))
}

pub(crate) fn check_clean(path: &Path) {
    run("qemu-img", &["check", "-f", "qcow2", text(path)]);
}

/// Expects `qemu-img check` to find no corruption; returns how many clusters are lost, which it can reclaim.
pub(crate) fn check_whole(path: &Path) -> u64 {
    let output = run_when_free("qemu-img", &["check", "-f", "qcow2", "--output=json", text(path)]);
    let told = String::from_utf8_lossy(&output.stdout);
    let number = |name: &str| {
        let (_, rest) = told.split_once(&format!("\"{name}\": ")).unwrap_or(("", "0"));
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap_or(0)
    };
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}: {told}", path.display());
    assert_eq!((number("corruptions"), number("check-errors")), (0, 0), "{told}");
    number("leaks")
}

pub(crate) fn check_equal(path: &Path, model: &[u8]) {
    let raw = path.with_extension("model");
    std::fs::write(&raw, model).unwrap();
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(path), text(&raw)]);
    std::fs::remove_file(raw).unwrap();
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn path_in(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    folder.path().join(name)
}

pub(crate) fn alone(cluster_size: u64) -> Qcow2Options {
    Qcow2Options { cluster_size, backing: None }
}

pub(crate) async fn write(device: &dyn BlockDevice, offset: u64, bytes: &[u8]) {
    device.write(offset, Buffer::copy_of(bytes), Durability::Volatile).await.unwrap();
}

pub(crate) async fn read(device: &dyn BlockDevice, offset: u64, length: usize) -> Vec<u8> {
    let dirty = Buffer::copy_of(&vec![0xA5; length]);
    device.read(offset, dirty).await.unwrap().as_slice().to_vec()
}

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Makes random requests, many at a time, on ranges that do not overlap; `model` gets their changes. Each batch reads the data
/// of the one before.
pub(crate) async fn work(device: &dyn BlockDevice, model: &mut [u8], seed: u64, batches: usize) {
    const BATCH: usize = 24;
    let mut random = Random::new(seed);
    for _ in 0..batches {
        let ranges = distinct_ranges(&mut random, model.len() as u64, BATCH);
        let requests = ranges.into_iter().map(|range| {
            let fill = random.below(255) as u8 + 1;
            let span = range.offset as usize..range.end() as usize;
            let (kind, before) = (random.below(10), model[span.clone()].to_vec());
            match kind {
                0..=4 => model[span].fill(fill),
                5..=7 => model[span].fill(0),
                _ => {}
            }
            request(device, kind, fill, range, before)
        });
        join_all(requests.collect::<Vec<_>>()).await;
    }
}

async fn request(device: &dyn BlockDevice, kind: u64, fill: u8, range: ByteRange, before: Vec<u8>) {
    let data = || Buffer::copy_of(&vec![fill; range.length as usize]);
    let answer = match kind {
        0 => device.write(range.offset, data(), Durability::Durable).await,
        1..=4 => device.write(range.offset, data(), Durability::Volatile).await,
        5 => device.discard(range).await,
        6 => device.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await,
        7 => device.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Volatile).await,
        8 => device.flush().await,
        _ => {
            let found = read(device, range.offset, before.len()).await;
            assert!(found == before, "{range:?} reads as something else");
            Ok(())
        }
    };
    assert_eq!(answer, Ok(()), "request {kind} of {range:?}");
}

fn distinct_ranges(random: &mut Random, size: u64, count: usize) -> Vec<ByteRange> {
    const BLOCK: u64 = 4096;
    let blocks = size.div_ceil(BLOCK);
    let mut ranges: Vec<ByteRange> = Vec::new();
    for _ in 0..count {
        let first = random.below(blocks);
        // Mostly small, sometimes many clusters.
        let longest = if random.below(8) == 0 { 200 } else { 20 };
        let last = (first + 1 + random.below(longest)).min(blocks);
        let range = ByteRange::new(first * BLOCK, (last * BLOCK).min(size) - first * BLOCK);
        if ranges.iter().all(|other| other.end() <= range.offset || range.end() <= other.offset) {
            ranges.push(range);
        }
    }
    ranges
}
