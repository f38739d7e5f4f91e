//! Tests the gate, the tracker and the mirror filter as devices: what they admit, when, and with which durability.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::support::{SIZE, Scene, play};
use block::filter::fault::FaultRule;
use block::filter::{Delay, Operation, Operations};
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, Geometry, IoError, IoFuture, MemoryStore,
    ZeroMode,
};
use chronicle::{BlockSize, Chronicle, Epoch};
use lane::Chronicler;
use lane::stack::{Gate, GateMode, Tracker};
use migration::journal::{Outcome, Record};
use migration::{VolumeId, VolumeIndex};
use rustix::io::Errno;

struct Durable {
    memory: Rc<MemoryStore>,
    writes: RefCell<Vec<Durability>>,
    flushes: Cell<usize>,
}

impl BlockDevice for Durable {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.memory.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        if matches!(change, Change::Write(..)) {
            self.writes.borrow_mut().push(change.durability());
        }
        self.memory.change(change)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.flushes.set(self.flushes.get() + 1);
        self.memory.flush()
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.memory.allocation(range)
    }
}

struct Left;

impl BlockDevice for Left {
    fn geometry(&self) -> Geometry {
        MemoryStore::new(SIZE).geometry()
    }

    fn read(&self, _: u64, _: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async { Err(IoError::Closed) })
    }

    fn change(&self, _: Change) -> IoFuture<'_, ()> {
        Box::pin(async { Err(IoError::Closed) })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async { Err(IoError::Closed) })
    }

    fn allocation(&self, _: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async { Err(IoError::Closed) })
    }
}

fn block_of(stamp: u8) -> Buffer {
    Buffer::copy_of(&[stamp; 4096])
}

fn started(scene: &Scene, request: impl Future<Output = Result<(), IoError>> + 'static) -> Rc<Cell<bool>> {
    let ended = Rc::new(Cell::new(false));
    let done = Rc::clone(&ended);
    scene.handle.spawn(async move {
        assert_eq!(request.await, Ok(()));
        done.set(true);
    });
    ended
}

#[test]
fn a_write_is_recorded_before_it_is_submitted_and_again_when_the_epoch_has_moved_on() {
    play(|scene| async move {
        let block_size = BlockSize::DEFAULT;
        let chronicle = Chronicler::volatile(VolumeId([7; 16]), Chronicle::new(block_size, SIZE, Epoch(1)));
        let (slow, delay) = Delay::new(Rc::new(MemoryStore::new(SIZE)), scene.handle.clone());
        let tracker = Tracker::new(Rc::new(slow), Rc::clone(&chronicle));
        delay.hang(Operations::ALL);
        let ended = started(&scene, async move { tracker.write(0, block_of(1), Durability::Volatile).await });
        scene.handle.sleep(Duration::from_millis(1)).await;
        // It is in flight: it is in the epoch that was open when it came.
        assert_eq!(chronicle.blocks_since(Epoch(0)), 1);
        chronicle.advance();
        assert_eq!(chronicle.blocks_since(Epoch(1)), 0);
        delay.release();
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(ended.get());
        assert_eq!(chronicle.blocks_since(Epoch(1)), 1, "it ended in the second epoch");
    });
}

#[test]
fn a_write_that_fails_is_recorded_all_the_same() {
    play(|scene| async move {
        let chronicle =
            Chronicler::volatile(VolumeId([7; 16]), Chronicle::new(BlockSize::DEFAULT, SIZE, Epoch(1)));
        let eio = IoError::os("write", Errno::IO);
        scene.source.fault.add(FaultRule::always(Operations::CHANGES, eio));
        let tracker = Tracker::new(Rc::clone(&scene.source.device), Rc::clone(&chronicle));
        assert_eq!(tracker.discard(ByteRange::new(0, 4096)).await, Err(eio));
        assert_eq!(chronicle.blocks_since(Epoch(0)), 1);
    });
}

#[test]
fn a_gate_is_drained_only_when_no_request_is_below_it() {
    play(|scene| async move {
        let (slow, delay) = Delay::new(Rc::new(MemoryStore::new(SIZE)), scene.handle.clone());
        let gate = Rc::new(Gate::new(Rc::new(slow)));
        delay.hang(Operations::ALL);
        let below = Rc::clone(&gate);
        let write = started(&scene, async move { below.write(0, block_of(1), Durability::Volatile).await });
        scene.handle.sleep(Duration::from_millis(1)).await;
        gate.set_mode(GateMode::Hold);
        let drains = gate.drained();
        let drained = started(&scene, async move {
            drains.await;
            Ok(())
        });
        let late = Rc::clone(&gate);
        let held = started(&scene, async move { late.flush().await });
        scene.handle.sleep(Duration::from_millis(10)).await;
        assert!(!drained.get() && gate.in_flight() == 1);
        delay.release();
        scene.handle.sleep(Duration::from_millis(10)).await;
        assert!(write.get() && drained.get());
        assert!(!held.get(), "a request passed a closed gate");
        gate.set_mode(GateMode::Open);
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(held.get());
    });
}

#[test]
fn a_request_that_waits_at_a_closed_gate_is_told() {
    play(|scene| async move {
        let gate = Rc::new(Gate::new(Rc::new(MemoryStore::new(SIZE))));
        assert!(!gate.holds_a_request().await, "an open gate holds nothing");
        gate.set_mode(GateMode::Hold);
        let told = Rc::new(Cell::new(None));
        let (holds, tells) = (gate.holds_a_request(), Rc::clone(&told));
        scene.handle.spawn(async move { tells.set(Some(holds.await)) });
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert_eq!(told.get(), None);
        let held = Rc::clone(&gate);
        started(&scene, async move { held.flush().await });
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert_eq!(told.get(), Some(true));
        gate.set_mode(GateMode::Open);
        scene.handle.sleep(Duration::from_millis(1)).await;
        gate.set_mode(GateMode::Hold);
        let reopened = gate.holds_a_request();
        gate.set_mode(GateMode::Open);
        assert!(!reopened.await);
    });
}

#[test]
fn a_gate_for_reads_only_holds_whatever_changes_the_volume() {
    play(|scene| async move {
        let gate = Rc::new(Gate::new(Rc::new(MemoryStore::new(SIZE))));
        gate.set_mode(GateMode::ReadsOnly);
        assert!(gate.read(0, Buffer::zeroed(4096)).await.is_ok() && gate.flush().await.is_ok());
        let range = ByteRange::new(0, 4096);
        let (first, second, third) = (Rc::clone(&gate), Rc::clone(&gate), Rc::clone(&gate));
        let held = [
            started(&scene, async move { first.write(0, block_of(1), Durability::Volatile).await }),
            started(&scene, async move { second.discard(range).await }),
            started(&scene, async move {
                third.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await
            }),
        ];
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(held.iter().all(|ended| !ended.get()));
        gate.set_mode(GateMode::Open);
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(held.iter().all(|ended| ended.get()));
    });
}

#[test]
fn what_waits_for_a_store_that_the_volume_leaves_is_read_where_the_volume_is() {
    play(|scene| async move {
        let memory = Rc::new(MemoryStore::new(SIZE));
        memory.write(0, block_of(7), Durability::Volatile).await.unwrap();
        let (left, delay) = Delay::new(Rc::new(Left), scene.handle.clone());
        delay.hang(Operations::ALL);
        let gate = Rc::new(Gate::new(Rc::new(left)));
        let (reads, flushes) = (Rc::clone(&gate), Rc::clone(&gate));
        let read = started(&scene, async move {
            let found = reads.read(0, Buffer::zeroed(4096)).await?;
            assert_eq!(found.as_slice(), block_of(7).as_slice());
            Ok(())
        });
        let flush = started(&scene, async move { flushes.flush().await });
        scene.handle.sleep(Duration::from_millis(1)).await;
        gate.set_mode(GateMode::Hold);
        delay.release();
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(!read.get() && !flush.get() && gate.in_flight() == 0);
        drop(gate.replace(memory));
        gate.set_mode(GateMode::Open);
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(read.get() && flush.get());
        drop(gate.replace(Rc::new(Left)));
        assert_eq!(gate.flush().await, Err(IoError::Closed), "a store that is not left says what it says");
    });
}

#[test]
fn flushes_and_durable_writes_reach_the_source_while_it_is_mirrored() {
    play(|mut scene| async move {
        let memory = Rc::clone(&scene.source.memory);
        let store = Rc::new(Durable { memory, writes: RefCell::default(), flushes: Cell::new(0) });
        scene.replace_source(Rc::clone(&store) as Rc<dyn BlockDevice>);
        scene.fill(1024).await;
        let (_, outcome) = scene.migrate_slowly(2 << 20);
        scene.handle.sleep(Duration::from_millis(300)).await;
        store.writes.borrow_mut().clear();
        let (device, flushes) = (scene.device(), store.flushes.get());
        assert_eq!(device.flush().await, Ok(()));
        assert_eq!(store.flushes.get(), flushes + 1);
        // One block is mirrored, the other is ahead of the cursor.
        for block in [0, 1000] {
            assert_eq!(device.write(block * 4096, block_of(9), Durability::Durable).await, Ok(()));
        }
        assert_eq!(*store.writes.borrow(), [Durability::Durable; 2]);
        assert!(outcome.borrow().is_none(), "the migration was over too early");
    });
}

#[test]
fn the_source_is_flushed_behind_the_closed_gate_before_it_is_released() {
    play(|scene| async move {
        scene.fill(64).await;
        // The flush with the gate open may take any time. An attempt whose flush behind the gate takes as long is abandoned.
        scene.source.delay.set_latency(Operations::of(&[Operation::Flush]), Duration::from_millis(700));
        let (_, outcome) = scene.migrate();
        scene.handle.sleep(Duration::from_secs(2)).await;
        let released = |record: &Record| matches!(record, Record::Released { .. });
        let aborted = |record: &Record| matches!(record, Record::AttemptAborted { .. });
        assert!(scene.control.records.borrow().iter().any(aborted), "no try waited for the source's flush");
        assert!(!scene.control.records.borrow().iter().any(released), "released without the source's flush");
        scene.source.delay.clear();
        assert_eq!(scene.outcome(&outcome).await, Outcome::Moved { left_over: String::new() });
    });
}

#[test]
fn what_a_restarted_target_had_not_made_durable_is_copied_again() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (driver, outcome) = scene.migrate_slowly(4 << 20);
        scene.handle.sleep(Duration::from_millis(500)).await;
        // The target's cache is lost: copied blocks that were not flushed read as zeroes.
        assert_eq!(scene.target.memory.discard(ByteRange::new(0, SIZE)).await, Ok(()));
        driver.target_restarted(VolumeIndex(0));
        assert_eq!(scene.outcome(&outcome).await, Outcome::Moved { left_over: String::new() });
        assert!(scene.target.content().await == scene.source.content().await);
    });
}
