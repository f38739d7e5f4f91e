//! Feeds qcow2 images, which are opened, read, and written as by guests.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use block::engine::{Engine, EngineChoice, EngineDriver};
use block::store::qcow2::{Qcow2Image, Qcow2Options, Qcow2Store};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability, Executor, ExtentKind, ZeroMode};
use futures_util::future::{Either, select};

/// Longest time of a few requests, far more than they need.
const PATIENCE: Duration = Duration::from_secs(20);
/// Zeroes after the fed bytes, for each step of the second byte. Tables may lie there.
const TAIL_STEP: u64 = 16 << 10;
/// Size of the backing files.
const BASE_BYTES: u64 = 64 << 10;
/// Growth of a disk, so much that the first-level table of an image with the smallest clusters must move.
const GROWTH_BYTES: u64 = 4 << 20;
/// The folder for files in memory, if it exists.
const IN_MEMORY: &str = "/dev/shm";

/// Opens the bytes as an image. The first byte decides its use, the second the number of zeroes after it.
pub(crate) fn feed(bytes: &[u8]) {
    thread_local! {
        static LANE: RefCell<Lane> = RefCell::new(Lane::open());
    }
    let Some(([kind, tail], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let use_as = match kind % 4 {
        1 => Use::Write,
        3 => Use::Grow,
        _ => Use::Read,
    };
    LANE.with_borrow_mut(|lane| lane.serve(bytes, u64::from(*tail) * TAIL_STEP, use_as));
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Read,
    Write,
    /// It is written, grown, and written again.
    Grow,
}

/// The parts that are reused by the next image.
struct Lane {
    executor: Executor<EngineDriver>,
    engine: Rc<dyn Engine>,
    folder: PathBuf,
}

impl Lane {
    #[expect(clippy::expect_used, reason = "threads and a small file can be had")]
    fn open() -> Self {
        let (driver, engine) = block::engine::open(EngineChoice::Auto).expect("an engine");
        let folder = make_folder().expect("a folder with images to stand on");
        Self { executor: Executor::new(driver), engine, folder }
    }

    #[expect(clippy::expect_used, reason = "a small file can be had")]
    fn serve(&mut self, bytes: &[u8], tail: u64, use_as: Use) {
        let access = if use_as == Use::Read { Access::ReadOnly } else { Access::ReadWrite };
        let path = self.folder.join("disk");
        write_image(&path, bytes, tail).expect("an image is written");
        let opened = Qcow2Image::open(&path, access);
        // The open file stays usable, and nothing is left behind.
        let _ = std::fs::remove_file(&path);
        let image = match opened {
            Ok(image) => image,
            Err(error) => {
                assert!(!error.to_string().is_empty(), "an error says why: {error:?}");
                return;
            }
        };
        let (handle, engine) = (self.executor.handle(), Rc::clone(&self.engine));
        self.executor.run(async move {
            let work = Box::pin(async {
                if let Ok(store) = Qcow2Store::open(image, &handle, &engine).await {
                    read(&store).await;
                    if use_as != Use::Read {
                        write(&store).await;
                        read(&store).await;
                    }
                    if use_as == Use::Grow {
                        grow(&store).await;
                        write(&store).await;
                        read(&store).await;
                    }
                }
            });
            let ended = matches!(select(work, handle.sleep(PATIENCE)).await, Either::Left(_));
            assert!(ended, "requests go on after {PATIENCE:?}");
        });
    }
}

/// Reads and describes a few ranges. A damaged image may fail any request, but answers must be true.
async fn read(store: &dyn BlockDevice) {
    let size = store.geometry().size;
    for range in places(size) {
        if let Ok(data) = store.read(range.offset, Buffer::zeroed(range.length as usize)).await {
            assert_eq!(data.len() as u64, range.length);
        }
    }
    let Ok(extents) = store.allocation(ByteRange::new(0, size)).await else { return };
    let mut position = 0;
    for extent in extents {
        assert_eq!(extent.range.offset, position, "extents follow one another");
        position = extent.range.end();
        let first = ByteRange::new(extent.range.offset, extent.range.length.min(4096));
        if extent.kind != ExtentKind::Data
            && first.offset < BASE_BYTES
            && let Ok(data) = store.read(first.offset, Buffer::zeroed(first.length as usize)).await
        {
            assert!(data.as_slice().iter().all(|byte| *byte == 0), "{extent:?} is said to be zero");
        }
    }
    assert_eq!(position, size, "extents cover what was asked for");
}

/// Changes a few ranges with every operation of a guest.
async fn write(store: &dyn BlockDevice) {
    let size = store.geometry().size;
    let mut is_written = false;
    for range in places(size) {
        let mut data = Buffer::zeroed(range.length as usize);
        if let Some(bytes) = data.as_mut_slice() {
            bytes.fill(0xA5);
        }
        is_written |= store.write(range.offset, data, Durability::Volatile).await.is_ok();
    }
    for range in places(size) {
        let _ = store.discard(range).await;
        let _ = store.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Durable).await;
    }
    if is_written {
        let _ = store.flush().await;
    }
}

/// Makes the disk larger, if the image supports it.
async fn grow(store: &dyn BlockDevice) {
    let Some(growth) = store.growth() else { return };
    let size = store.geometry().size.next_multiple_of(4096).saturating_add(GROWTH_BYTES);
    match growth.prepare(size).await {
        Ok(()) => {
            growth.show(size);
            assert_eq!(store.geometry().size, size);
        }
        Err(_) => drop(growth.undo().await),
    }
}

/// Returns the disk's first blocks, a range around its middle, and its last block.
fn places(size: u64) -> impl Iterator<Item = ByteRange> {
    let middle = size / 2 / 4096 * 4096;
    let end = size.saturating_sub(4096) / 4096 * 4096;
    let places = [(0, 4096), (8192, 12 << 10), (middle, 8192), (end, 4096)];
    places.into_iter().filter_map(move |(offset, length)| {
        let length = size.saturating_sub(offset).min(length);
        (length > 0).then_some(ByteRange::new(offset, length))
    })
}

fn write_image(path: &PathBuf, bytes: &[u8], tail: u64) -> anyhow::Result<()> {
    std::fs::write(path, bytes)?;
    let file = std::fs::File::options().write(true).open(path)?;
    Ok(file.set_len(bytes.len() as u64 + tail)?)
}

/// Makes a folder with the backing files `raw` and `qcow2`, which is left in the temporary folder.
fn make_folder() -> anyhow::Result<PathBuf> {
    let builder = || tempfile::Builder::new();
    let folder = builder()
        .prefix("sterna-hostile-")
        .tempdir_in(IN_MEMORY)
        .or_else(|_| builder().prefix("sterna-hostile-").tempdir())
        .context("make a folder")?
        .keep();
    std::fs::write(folder.join("raw"), vec![0x5A; BASE_BYTES as usize])?;
    let options = Qcow2Options { cluster_size: 512, backing: None };
    Qcow2Image::create(&folder.join("qcow2"), BASE_BYTES, &options)?;
    Ok(folder)
}
