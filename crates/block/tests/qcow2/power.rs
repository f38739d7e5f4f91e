//! Tests power cuts: any sectors written since the last sync may be lost. The image stays valid, and flushed data is there.
//!
//! An engine records its requests and when they ended. From these, images are made as a disk with a volatile cache could hold
//! them at a moment.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::engine::{AllocateMode, Engine, EngineChoice, Interrupt, Received};
use block::store::qcow2::{Qcow2Image, Qcow2Store};
use block::{Access, BlockDevice, Buffer, BufferPool, ByteRange, Durability, IoFuture};

use crate::crash::{FLUSH_EVERY, SIZE, check_content, run_batch};
use crate::tools::{Lane, Random, alone, check_whole, folder, on_engine, path_in, run, text};

const SECTOR: usize = 512;

struct Noting {
    inner: Rc<dyn Engine>,
    notes: Rc<RefCell<Notes>>,
}

#[derive(Default)]
struct Notes {
    /// Moments so far: each beginning and each end is one.
    now: usize,
    changes: Vec<Change>,
    syncs: Vec<(usize, usize)>,
}

struct Change {
    begun: usize,
    /// `usize::MAX` until it ends.
    ended: usize,
    durability: Durability,
    offset: u64,
    /// The written data; `None`: the range is zeroed.
    data: Option<Vec<u8>>,
    length: u64,
}

impl Notes {
    fn tick(&mut self) -> usize {
        self.now += 1;
        self.now
    }

    fn begin(&mut self, offset: u64, length: u64, data: Option<Vec<u8>>, durability: Durability) -> usize {
        let begun = self.tick();
        self.changes.push(Change { begun, ended: usize::MAX, durability, offset, data, length });
        self.changes.len() - 1
    }

    fn end(&mut self, change: usize) {
        self.changes[change].ended = self.tick();
    }

    fn is_durable(&self, change: &Change, moment: usize) -> bool {
        let is_synced = |(begun, ended): &(usize, usize)| change.ended < *begun && *ended < moment;
        let is_by_itself = change.durability == Durability::Durable && change.ended < moment;
        is_by_itself || self.syncs.iter().any(is_synced)
    }

    fn disk_at(&self, before: &[u8], moment: usize, random: &mut Random) -> Vec<u8> {
        // In some cuts nearly all is lost, in others nearly nothing.
        let lost_of_ten = random.below(11);
        let mut disk = before.to_vec();
        for change in self.changes.iter().filter(|change| change.begun < moment) {
            let must_be_there = self.is_durable(change, moment);
            let end = (change.offset + change.length) as usize;
            if change.data.is_some() && disk.len() < end {
                disk.resize(end, 0);
            }
            let mut position = change.offset as usize;
            while position < end.min(disk.len()) {
                let next = (position + SECTOR).min(end).min(disk.len());
                if must_be_there || random.below(10) >= lost_of_ten {
                    match &change.data {
                        Some(data) => {
                            let from = position - change.offset as usize;
                            disk[position..next].copy_from_slice(&data[from..from + next - position]);
                        }
                        None => disk[position..next].fill(0),
                    }
                }
                position = next;
            }
        }
        disk
    }
}

impl Engine for Noting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn buffers(&self) -> &BufferPool {
        self.inner.buffers()
    }

    fn read_at(&self, file: &Arc<OwnedFd>, offset: u64, buffer: Buffer) -> IoFuture<'static, Buffer> {
        self.inner.read_at(file, offset, buffer)
    }

    fn write_at(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        data: Buffer,
        durability: Durability,
    ) -> IoFuture<'static, ()> {
        let (notes, bytes) = (Rc::clone(&self.notes), data.as_slice().to_vec());
        let written = self.inner.write_at(file, offset, data, durability);
        Box::pin(async move {
            let change = notes.borrow_mut().begin(offset, bytes.len() as u64, Some(bytes), durability);
            written.await?;
            notes.borrow_mut().end(change);
            Ok(())
        })
    }

    fn sync(&self, file: &Arc<OwnedFd>) -> IoFuture<'static, ()> {
        let (notes, synced) = (Rc::clone(&self.notes), self.inner.sync(file));
        Box::pin(async move {
            let begun = notes.borrow_mut().tick();
            synced.await?;
            let ended = notes.borrow_mut().tick();
            notes.borrow_mut().syncs.push((begun, ended));
            Ok(())
        })
    }

    fn allocate(&self, file: &Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> IoFuture<'static, ()> {
        let (notes, made) = (Rc::clone(&self.notes), self.inner.allocate(file, mode, range));
        Box::pin(async move {
            let change = notes.borrow_mut().begin(range.offset, range.length, None, Durability::Volatile);
            made.await?;
            notes.borrow_mut().end(change);
            Ok(())
        })
    }

    fn accept(&self, listener: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd> {
        self.inner.accept(listener)
    }

    fn receive(&self, socket: &Arc<OwnedFd>, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        self.inner.receive(socket, buffer)
    }

    fn receive_unless(
        &self,
        interrupt: &Interrupt,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
    ) -> IoFuture<'static, Received> {
        self.inner.receive_unless(interrupt, socket, buffer)
    }

    fn accept_unless(
        &self,
        interrupt: &Interrupt,
        listener: &Arc<OwnedFd>,
    ) -> IoFuture<'static, Option<OwnedFd>> {
        self.inner.accept_unless(interrupt, listener)
    }

    fn send(&self, socket: &Arc<OwnedFd>, pieces: Vec<Buffer>) -> IoFuture<'static, ()> {
        self.inner.send(socket, pieces)
    }

    fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()> {
        self.inner.run_blocking(work)
    }
}

#[derive(Clone, Copy)]
enum Start {
    Empty {
        cluster_size: u64,
    },
    /// Full of compressed clusters, which are freed gradually.
    Compressed,
    /// Full of clusters that a snapshot shares.
    Snapshot,
}

impl Start {
    fn make(self, path: &Path) -> Vec<u8> {
        if let Self::Empty { cluster_size } = self {
            drop(Qcow2Image::create(path, SIZE, &alone(cluster_size)).unwrap());
            return vec![0; SIZE as usize];
        }
        // Bytes that the work does not write, and that compress to a third: most clusters of the file hold parts
        // of three compressed ones.
        let mut random = Random::new(3);
        let content: Vec<u8> = (0..SIZE).map(|_| 251 + random.below(5) as u8).collect();
        let raw = path.with_extension("raw");
        std::fs::write(&raw, &content).unwrap();
        let convert = ["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(path)];
        match self {
            Self::Compressed => run("qemu-img", &[&convert[..], &["-c", "-o", "cluster_size=4k"]].concat()),
            _ => {
                run("qemu-img", &convert);
                run("qemu-img", &["snapshot", "-c", "before", text(path)])
            }
        };
        content
    }
}

async fn cut_power(lane: Lane, start: Start, batches: u64, cuts: u64) {
    let folder = folder();
    let path = path_in(&folder, "disk.qcow2");
    let old = start.make(&path);
    let image = lane.open_when_free(&path, Access::ReadWrite).await.unwrap();
    let before = std::fs::read(&path).unwrap();
    let notes = Rc::<RefCell<Notes>>::default();
    let noting = Noting { inner: Rc::clone(&lane.engine), notes: Rc::clone(&notes) };
    let engine: Rc<dyn Engine> = Rc::new(noting);
    let device = Rc::new(Qcow2Store::open(image, &lane.handle, &engine).await.unwrap());
    let seed = 7;
    // When a flush was acknowledged, and after which batch it began.
    let mut flushes = vec![(0, 0)];
    for number in 1..=batches {
        run_batch(&device, seed, number).await;
        if number % FLUSH_EVERY == 0 {
            device.flush().await.unwrap();
            flushes.push((notes.borrow().now, number));
        }
    }
    let notes = notes.borrow();
    assert!(notes.syncs.len() > flushes.len(), "tables are written in an order");
    let mut random = Random::new(31);
    let cut = path_in(&folder, "cut.qcow2");
    let moments: BTreeSet<usize> =
        (0..cuts).map(|_| 1 + random.below(notes.now as u64 + 1) as usize).collect();
    for moment in moments {
        std::fs::write(&cut, notes.disk_at(&before, moment, &mut random)).unwrap();
        let flushed = flushes.iter().rev().find(|(at, _)| *at < moment).unwrap().1;
        eprintln!("cut at {moment} of {}, after batch {flushed} was flushed", notes.now);
        check_whole(&cut);
        check_content(&old, &content(&cut), seed, flushed);
    }
}

fn content(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("raw");
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(path), text(&raw)]);
    std::fs::read(raw).unwrap()
}

fn check_cuts(start: Start, batches: u64, cuts: u64) {
    on_engine(EngineChoice::Threads, move |lane| cut_power(lane, start, batches, cuts));
}

#[test]
fn a_power_cut_leaves_the_usual_clusters_whole() {
    check_cuts(Start::Empty { cluster_size: 64 << 10 }, 15, 12);
}

#[test]
fn a_power_cut_leaves_small_clusters_whole() {
    check_cuts(Start::Empty { cluster_size: 4096 }, 12, 12);
}

#[test]
fn a_power_cut_leaves_the_smallest_clusters_whole() {
    // More second-level tables than are kept in memory.
    check_cuts(Start::Empty { cluster_size: 512 }, 9, 12);
}

#[test]
fn a_power_cut_loses_nothing_that_was_compressed() {
    check_cuts(Start::Compressed, 40, 60);
}

#[test]
fn a_power_cut_leaves_an_image_with_a_snapshot_whole() {
    check_cuts(Start::Snapshot, 9, 12);
}
