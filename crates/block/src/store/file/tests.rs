//! Tests the file store with the suite for all devices, and its file operations.

use super::*;
use crate::conformance::Suite;
use crate::engine::{self, EngineChoice};
use crate::executor::{Executor, Handle};
use crate::store::image::{Caching, ImageError};

fn run<F: Future<Output = ()> + 'static>(body: impl Fn(Rc<dyn Engine>, Handle, tempfile::TempDir) -> F) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else { continue };
        let mut executor = Executor::new(driver);
        let handle = executor.handle();
        executor.run(body(engine, handle, tempfile::tempdir().unwrap()));
    }
}

#[test]
fn a_file_system_without_direct_io_serves_as_well() {
    run(|engine, handle, folder| async move {
        let mut count = 0;
        let factory = |size| {
            count += 1;
            let image = Image::create(&folder.path().join(count.to_string()), size).unwrap();
            let image = image.without_direct_io();
            assert_eq!(image.caching(), Caching::Buffered);
            Rc::new(FileStore::new(image, Rc::clone(&engine))) as Rc<dyn BlockDevice>
        };
        Suite::new("buffered file store", handle, factory).run().await;
    });
}

fn without_fallocate(image: Image, engine: &Rc<dyn Engine>) -> FileStore {
    let store = FileStore::new(image, Rc::clone(engine));
    store.punch_hole.set(Ability::Missing);
    store.zero_range.set(Ability::Missing);
    store
}

#[test]
fn a_file_system_without_holes_is_zeroed_by_writing() {
    run(|engine, handle, folder| async move {
        let mut count = 0;
        let factory = |size| {
            count += 1;
            let image = Image::create(&folder.path().join(count.to_string()), size).unwrap();
            Rc::new(without_fallocate(image, &engine)) as Rc<dyn BlockDevice>
        };
        // The sizes exceed a single write.
        let sizes = [4096, (1 << 20) + 4096, (ZERO_PIECE as u64) + 100];
        Suite::new("file store without holes", handle, factory).sizes(&sizes).run().await;
    });
}

#[test]
fn a_discard_makes_a_hole_and_zeroes_that_are_to_stay_take_space() {
    run(|engine, _, folder| async move {
        let image = Image::create(&folder.path().join("disk"), 1 << 20).unwrap();
        let (file, store) = (Arc::clone(image.file()), FileStore::new(image, engine));
        let blocks = || rustix::fs::fstat(&*file).unwrap().st_blocks;
        assert_eq!(blocks(), 0);
        let range = ByteRange::new(0, 1 << 20);
        store.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Durable).await.unwrap();
        let kept = blocks();
        assert!(kept >= (1 << 20) / 512, "{kept} sectors");
        store.discard(range).await.unwrap();
        assert!(blocks() < kept);
        let extents = store.allocation(range).await.unwrap();
        assert_eq!(extents, [Extent { range, kind: ExtentKind::Hole }]);
    });
}

#[test]
fn zeroing_is_called_fast_only_where_the_file_system_has_been_seen_to_do_it() {
    run(|engine, _, folder| async move {
        let create = |name| Image::create(&folder.path().join(name), 1 << 20).unwrap();
        let store = FileStore::new(create("disk"), Rc::clone(&engine));
        assert!(store.zeroes_fast(ZeroMode::MayUnmap), "opening it has tried a hole");
        assert!(!store.zeroes_fast(ZeroMode::KeepAllocated), "not known yet");
        let range = ByteRange::new(0, 4096);
        store.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Volatile).await.unwrap();
        let is_made_by_file_system = store.zero_range.get() == Ability::Known;
        assert_eq!(store.zeroes_fast(ZeroMode::KeepAllocated), is_made_by_file_system);
        let slow = without_fallocate(create("slow"), &engine);
        assert!(!slow.zeroes_fast(ZeroMode::MayUnmap) && !slow.zeroes_fast(ZeroMode::KeepAllocated));
    });
}

#[test]
fn memory_that_direct_io_cannot_use_is_copied() {
    run(|engine, _, folder| async move {
        let store = FileStore::new(Image::create(&folder.path().join("disk"), 1 << 16).unwrap(), engine);
        let whole = Buffer::copy_of(&(0..9000).map(|index| (index % 251) as u8).collect::<Vec<_>>());
        store.write(4096, whole.slice(3, 8192), Durability::Volatile).await.unwrap();
        let target = Buffer::zeroed(9000).slice(5, 8192);
        let read = store.read(4096, target).await.unwrap();
        assert_eq!(read.as_slice(), &whole.as_slice()[3..8195]);
    });
}

#[test]
fn an_image_is_free_as_soon_as_its_store_is_gone_and_nothing_is_in_flight() {
    run(|engine, _, folder| async move {
        let path = folder.path().join("disk");
        // An odd size has a second description.
        drop(Image::create(&path, (1 << 20) + 1).unwrap());
        for _ in 0..10 {
            let store = FileStore::new(Image::open(&path, Access::ReadWrite).unwrap(), Rc::clone(&engine));
            let size = store.geometry().size;
            let data = Buffer::zeroed(size as usize);
            store.write(0, data, Durability::Volatile).await.unwrap();
            assert!(matches!(Image::open(&path, Access::ReadWrite), Err(ImageError::Locked { .. })));
        }
    });
}

#[test]
fn an_image_stays_locked_while_a_dropped_write_is_in_flight() {
    run(|engine, handle, folder| async move {
        let path = folder.path().join("disk");
        let store = FileStore::new(Image::create(&path, 8 << 20).unwrap(), Rc::clone(&engine));
        let file = Arc::downgrade(store.image().file());
        let mut write = store.write(0, Buffer::zeroed(8 << 20), Durability::Durable);
        let waker = std::task::Waker::noop();
        assert!(write.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
        drop(write);
        drop(store);
        // The lock is free only once no request is in flight; a helper thread may end at any moment.
        while let Err(error) = Image::open(&path, Access::ReadWrite) {
            assert!(matches!(error, ImageError::Locked { .. }), "{error}");
            handle.sleep(std::time::Duration::from_micros(200)).await;
        }
        assert_eq!(file.strong_count(), 0);
    });
}

#[test]
fn dropped_requests_of_an_image_never_meet_the_next_one() {
    const PAGES: u64 = 256;
    run(|engine, _, folder| async move {
        let content = Buffer::copy_of(&vec![0x6D; PAGES as usize * 4096]);
        for attempt in 0..20 {
            let create = |name: &str| {
                let path = folder.path().join(format!("{name}-{attempt}"));
                FileStore::new(Image::create(&path, PAGES * 4096).unwrap(), Rc::clone(&engine))
            };
            let (first, next) = (create("first"), create("next"));
            first.write(0, content.clone(), Durability::Volatile).await.unwrap();
            for page in 0..PAGES {
                let mut discard = first.discard(ByteRange::new(page * 4096, 4096));
                let waker = std::task::Waker::noop();
                let _ = discard.as_mut().poll(&mut std::task::Context::from_waker(waker));
            }
            drop(first);
            next.write(0, content.clone(), Durability::Volatile).await.unwrap();
            next.flush().await.unwrap();
            // The engine has ended dropped requests when the image can be opened.
            let path = folder.path().join(format!("first-{attempt}"));
            while Image::open(&path, Access::ReadOnly).is_err() {
                next.flush().await.unwrap();
            }
            let read = next.read(0, Buffer::zeroed(content.len())).await.unwrap();
            let lost = read.as_slice().chunks(4096).filter(|page| page[0] != 0x6D).count();
            assert_eq!(lost, 0, "pages lost by discards of another image, attempt {attempt}");
        }
    });
}
