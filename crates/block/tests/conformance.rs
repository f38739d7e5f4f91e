//! Runs the conformance suite on every store and filter of this crate, with both engines.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its scene has failed")]

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::conformance::{Forgetful, Suite, check_failed_flushes, check_read_only};
use block::device::Geometry;
use block::engine::{self, Engine, EngineChoice};
use block::filter::check::Requests;
use block::filter::{Align, Check, Delay, Fault, FlushDebt, Operations};
use block::store::qcow2::{Qcow2Image, Qcow2Options, Qcow2Store};
use block::{
    Access, BlockDevice, Buffer, Durability, Executor, FileStore, Handle, Image, IoFuture, MemoryStore,
};

const ON_DISK: &str = env!("CARGO_TARGET_TMPDIR");
const ON_TMPFS: &str = "/dev/shm";

const CASES: usize = 16;

fn check(
    name: &str,
    choice: EngineChoice,
    make: impl Fn(u64, &Rc<dyn Engine>, &Handle) -> Rc<dyn BlockDevice> + 'static,
) {
    let Ok((driver, engine)) = engine::open(choice) else {
        omission::kernel_lacks("io_uring");
        return;
    };
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    let name = format!("{name} on {}", engine.name());
    executor.run(async move {
        let factory_handle = handle.clone();
        Suite::new(&name, handle, move |size| make(size, &engine, &factory_handle)).run().await;
    });
}

fn check_files(choice: EngineChoice, folder: &str) {
    if !Path::new(folder).is_dir() {
        omission::machine_lacks(&format!("the folder {folder}"));
        return;
    }
    let folder = tempfile::tempdir_in(folder).unwrap();
    let count = std::cell::Cell::new(0);
    check("file store", choice, move |size, engine, _| {
        count.set(count.get() + 1);
        let path = folder.path().join(format!("{}.raw", count.get()));
        let image = Image::create(&path, size).unwrap();
        // The file lives on until the device is gone.
        std::fs::remove_file(path).unwrap();
        Rc::new(FileStore::new(image, Rc::clone(engine)))
    });
}

#[test]
fn file_store_over_io_uring_on_disk() {
    check_files(EngineChoice::Ring, ON_DISK);
}

#[test]
fn file_store_over_threads_on_disk() {
    check_files(EngineChoice::Threads, ON_DISK);
}

#[test]
fn file_store_over_io_uring_on_tmpfs() {
    check_files(EngineChoice::Ring, ON_TMPFS);
}

#[test]
fn file_store_over_threads_on_tmpfs() {
    check_files(EngineChoice::Threads, ON_TMPFS);
}

/// qcow2 counts in sectors, so its odd sizes are whole ones.
fn check_qcow2(choice: EngineChoice, folder: &str, cluster_size: u64) {
    if !Path::new(folder).is_dir() {
        omission::machine_lacks(&format!("the folder {folder}"));
        return;
    }
    let Ok((driver, engine)) = engine::open(choice) else {
        omission::kernel_lacks("io_uring");
        return;
    };
    let folder = tempfile::tempdir_in(folder).unwrap();
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    let name = format!("qcow2 with clusters of {cluster_size} on {}", engine.name());
    executor.run(async move {
        // The devices are made beforehand, because the suite makes its devices at once, and opening an image takes a while.
        for size in [4096, 256 << 10, (256 << 10) + 512, (96 << 10) + 512, 3584] {
            let mut devices = Vec::new();
            for index in 0..CASES {
                let path = folder.path().join(format!("{size}-{index}"));
                let options = Qcow2Options { cluster_size, backing: None };
                let image = Qcow2Image::create(&path, size, &options).unwrap();
                std::fs::remove_file(path).unwrap();
                devices.push(Rc::new(Qcow2Store::open(image, &handle, &engine).await.unwrap()));
            }
            let make = move |_| devices.pop().unwrap() as Rc<dyn BlockDevice>;
            Suite::new(&name, handle.clone(), make).sizes(&[size]).run().await;
        }
    });
}

#[test]
fn qcow2_over_io_uring_on_disk() {
    check_qcow2(EngineChoice::Ring, ON_DISK, 64 << 10);
    check_qcow2(EngineChoice::Ring, ON_DISK, 512);
}

#[test]
fn qcow2_over_threads_on_disk() {
    check_qcow2(EngineChoice::Threads, ON_DISK, 64 << 10);
}

#[test]
fn qcow2_over_io_uring_on_tmpfs() {
    check_qcow2(EngineChoice::Ring, ON_TMPFS, 4096);
}

#[test]
fn qcow2_over_threads_on_tmpfs() {
    check_qcow2(EngineChoice::Threads, ON_TMPFS, 64 << 10);
}

#[test]
fn memory_store() {
    check("memory store", EngineChoice::Threads, |size, _, _| Rc::new(MemoryStore::new(size)));
    check("memory store of bytes", EngineChoice::Threads, |size, _, _| {
        Rc::new(MemoryStore::with_geometry(Geometry { size, alignment: 1, read_only: false, discards: true }))
    });
}

#[test]
fn fault_without_rules() {
    check("fault", EngineChoice::Threads, |size, _, _| {
        Rc::new(Fault::new(Rc::new(MemoryStore::new(size)), 1).0)
    });
}

#[test]
fn delay() {
    check("delay", EngineChoice::Auto, |size, _, handle| {
        let (delay, switch) = Delay::new(Rc::new(MemoryStore::new(size)), handle.clone());
        switch.set_latency(Operations::ALL, Duration::from_micros(50));
        Rc::new(delay)
    });
}

#[test]
fn align() {
    check("align", EngineChoice::Auto, |size, engine, handle| {
        Rc::new(Align::new(Rc::new(MemoryStore::new(size)), engine.buffers().clone(), handle.clone()))
    });
}

#[test]
fn align_over_a_file() {
    let folder = tempfile::tempdir_in(ON_DISK).unwrap();
    let count = std::cell::Cell::new(0);
    check("align over a file", EngineChoice::Auto, move |size, engine, handle| {
        count.set(count.get() + 1);
        let image = Image::create(&folder.path().join(count.get().to_string()), size).unwrap();
        let store = Rc::new(FileStore::new(image, Rc::clone(engine)));
        // Align passes on valid requests, and those that are out of range altogether.
        let checked = Rc::new(Check::new(store, Requests::Any));
        Rc::new(Align::new(checked, engine.buffers().clone(), handle.clone()))
    });
}

#[test]
fn check_itself() {
    check("check", EngineChoice::Threads, |size, _, _| {
        Rc::new(Check::new(Rc::new(MemoryStore::new(size)), Requests::Any))
    });
}

#[test]
fn read_only_devices() {
    let (driver, engine) = engine::open(EngineChoice::Auto).unwrap();
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    executor.run(async move {
        let folder = tempfile::tempdir_in(ON_DISK).unwrap();
        for size in [1 << 16, (1 << 16) + 100] {
            let path = folder.path().join(size.to_string());
            drop(Image::create(&path, size).unwrap());
            let image = Image::open(&path, Access::ReadOnly).unwrap();
            check_read_only("file store", Rc::new(FileStore::new(image, Rc::clone(&engine)))).await;
        }
        let geometry = Geometry { size: 1 << 16, alignment: 4096, read_only: true, discards: false };
        let memory = || Rc::new(MemoryStore::with_geometry(geometry));
        check_read_only("memory store", memory()).await;
        check_read_only("align", Rc::new(Align::new(memory(), engine.buffers().clone(), handle.clone())))
            .await;
        check_read_only("check", Rc::new(Check::new(memory(), Requests::Any))).await;
    });
}

fn play<F: Future<Output = ()> + 'static>(test: impl FnOnce(Handle) -> F) {
    let (driver, _) = engine::open(EngineChoice::Threads).unwrap();
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    executor.run(test(handle));
}

#[test]
fn every_filter_tells_its_writer_of_a_failed_flush_once() {
    play(|handle| async move {
        let buffers = block::BufferPool::new();
        check_failed_flushes("none", |store| store).await;
        check_failed_flushes("flush debt", |store| FlushDebt::new(store)).await;
        check_failed_flushes("two flush debts", |store| FlushDebt::new(FlushDebt::new(store))).await;
        check_failed_flushes("check", |store| Rc::new(Check::new(store, Requests::Valid))).await;
        check_failed_flushes("fault", |store| Rc::new(Fault::new(store, 1).0)).await;
        check_failed_flushes("align", |store| Rc::new(Align::new(store, buffers.clone(), handle.clone())))
            .await;
    });
}

#[test]
fn forgetful_store() {
    check("forgetful store", EngineChoice::Threads, |size, _, _| Forgetful::new(size));
}

#[test]
fn flush_debt() {
    check("flush debt", EngineChoice::Threads, |size, _, _| FlushDebt::new(Rc::new(MemoryStore::new(size))));
}

#[test]
fn a_flush_of_ours_that_fails_is_owed_to_the_writers_next_one() {
    play(|_| async move {
        let store = Forgetful::new(16 << 10);
        let writer = FlushDebt::new(Rc::clone(&store) as Rc<dyn BlockDevice>);
        let ours = writer.ours();
        // An earlier process may have left unflushed writes.
        store.fail_flushes(1);
        assert!(ours.flush().await.is_err());
        assert!(writer.flush().await.is_err());
        assert_eq!(writer.flush().await, Ok(()));
        // Durable data cannot be lost.
        let block = Buffer::copy_of(&[6; 4096]);
        writer.write(4096, block, Durability::Volatile).await.unwrap();
        assert_eq!(writer.flush().await, Ok(()));
        store.fail_flushes(1);
        assert!(ours.flush().await.is_err());
        assert_eq!(writer.flush().await, Ok(()));
        let block = Buffer::copy_of(&[7; 4096]);
        writer.write(0, block.clone(), Durability::Volatile).await.unwrap();
        store.fail_flushes(1);
        assert!(ours.flush().await.is_err());
        assert!(ours.flush().await.is_err(), "it vouches for nothing before the writer knows");
        assert!(writer.flush().await.is_err(), "the store itself has said it, to us");
        assert_eq!((writer.flush().await, ours.flush().await), (Ok(()), Ok(())));
        assert_eq!(store.durable_content().await[0], 0);

        // Its caller is gone, and it failed all the same.
        writer.write(0, block, Durability::Volatile).await.unwrap();
        store.fail_flushes(1);
        let mut flush: IoFuture<'_, ()> = ours.flush();
        let _ = flush.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        drop(flush);
        assert!(writer.flush().await.is_err());
    });
}
