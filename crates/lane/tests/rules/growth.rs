//! Tests volumes that become larger while they are used, and while they move.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use block::filter::fault::FaultRule;
use block::filter::{Operation, Operations};
use block::{Buffer, Durability, IoError};
use lane::growth::grow;
use lane::{Refused, SourceHandle, StoreRole};
use migration::journal::{Outcome, Record};
use migration::{MigrationId, Phase, VolumeId};
use rustix::io::Errno;

use crate::support::{SIZE, Scene, play};

const MIB: u64 = 1 << 20;
const LARGER: u64 = SIZE + 4 * MIB;

impl Scene {
    async fn grow(&self, driver: Option<&SourceHandle>, size: u64) -> Result<(), Refused> {
        grow(&self.volume, driver, &*self.control, size).await
    }

    fn sizes(&self) -> Vec<Record> {
        let is_about_size =
            |record: &&Record| matches!(record, Record::ResizeBegun { .. } | Record::Resized { .. });
        self.control.records.borrow().iter().filter(is_about_size).cloned().collect()
    }
}

fn begun(size_bytes: u64) -> Record {
    Record::ResizeBegun { volume: VolumeId([7; 16]), size_bytes }
}

fn resized(size_bytes: u64) -> Record {
    Record::Resized { volume: VolumeId([7; 16]), size_bytes }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

#[test]
fn a_volume_grows_is_recorded_first_and_does_not_shrink() {
    play(|scene| async move {
        assert_eq!(scene.grow(None, SIZE - MIB).await, Err(Refused::Shrinks { size_bytes: SIZE }));
        assert_eq!(scene.grow(None, SIZE).await, Ok(()));
        assert!(scene.sizes().is_empty());
        assert_eq!(scene.grow(None, LARGER).await, Ok(()));
        assert_eq!(scene.sizes(), [begun(LARGER), resized(LARGER)]);
        assert_eq!(scene.device().geometry().size, LARGER);
        scene.write(LARGER / 4096 - 1, 9).await;
    });
}

#[test]
fn what_is_written_behind_the_former_end_moves_whenever_the_volume_grew() {
    // During the allocation scan, the copying, and after it.
    for after_ms in [0, 1, 200, 1500, 3900] {
        play(move |scene| async move {
            scene.fill(2048).await;
            let (driver, outcome) = scene.migrate_slowly(2 << 20);
            scene.handle.sleep(Duration::from_millis(after_ms)).await;
            assert_eq!(scene.grow(Some(&driver), LARGER).await, Ok(()), "{after_ms}");
            for block in [SIZE / 4096 - 1, SIZE / 4096, LARGER / 4096 - 1] {
                scene.write(block, 200).await;
            }
            assert_eq!(scene.outcome(&outcome).await, moved(), "{after_ms}");
            let (source, target) = (scene.source.content().await, scene.target.content().await);
            assert_eq!((source.len() as u64, target.len() as u64), (LARGER, LARGER));
            assert!(source == target, "{after_ms}");
            let last = target.len() - 4096;
            assert_eq!((target[SIZE as usize], target[last], target[last - 1]), (200, 200, 0));
            scene.write(LARGER / 4096 - 1, 201).await;
            assert_eq!(scene.target.content().await[last], 201);
        });
    }
}

#[test]
fn a_guest_that_writes_all_the_time_finds_every_write_at_the_target() {
    play(|scene| async move {
        scene.fill(2048).await;
        let (driver, outcome) = scene.migrate_slowly(4 << 20);
        let scene = Rc::new(scene);
        let is_over = Rc::new(Cell::new(false));
        let (guest, over) = (Rc::clone(&scene), Rc::clone(&is_over));
        let written = Rc::new(Cell::new(0_u64));
        let count = Rc::clone(&written);
        scene.handle.spawn(async move {
            let mut random = 1_u64;
            while !over.get() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let blocks = guest.volume.size() / 4096;
                guest.write((random >> 33) % blocks, random as u8 | 1).await;
                count.set(count.get() + 1);
                guest.handle.sleep(Duration::from_millis(2)).await;
            }
        });
        for step in 1..=4 {
            scene.handle.sleep(Duration::from_millis(300)).await;
            assert_eq!(scene.grow(Some(&driver), SIZE + step * MIB).await, Ok(()));
        }
        assert_eq!(scene.outcome(&outcome).await, moved());
        is_over.set(true);
        let source = scene.source.content().await;
        scene.handle.sleep(Duration::from_millis(10)).await;
        let target = scene.target.content().await;
        assert!(written.get() > 500, "{}", written.get());
        // After the handover at most one write came, and that only to the target.
        let differing =
            source.chunks(4096).zip(target.chunks(4096)).filter(|(one, other)| one != other).count();
        assert!(differing <= 1, "{differing} blocks differ");
    });
}

#[test]
fn while_a_volume_grows_it_is_not_handed_over() {
    play(|scene| async move {
        scene.fill(16).await;
        // The growth takes as long as the journal does.
        scene.control.commits_take.set(Duration::from_secs(3));
        let (driver, outcome) = scene.migrate();
        let grown = scene.grow(Some(&driver), LARGER).await;
        assert_eq!(grown, Ok(()));
        assert!(scene.handle.now() >= Duration::from_secs(6), "two commits");
        assert_eq!(driver.phase(), Phase::Copying);
        scene.control.commits_take.set(Duration::ZERO);
        scene.write(LARGER / 4096 - 1, 5).await;
        assert_eq!(scene.outcome(&outcome).await, moved());
        assert_eq!(scene.target.content().await[LARGER as usize - 1], 5);
    });
}

#[test]
fn a_volume_whose_store_takes_long_to_grow_is_not_handed_over_meanwhile() {
    const LONG: Duration = Duration::from_secs(10);
    for is_target in [false, true] {
        play(move |scene| async move {
            scene.fill(16).await;
            let slow = if is_target { &scene.target } else { &scene.source };
            slow.growth.borrow_mut().takes = Some((scene.handle.clone(), LONG));
            let (driver, outcome) = scene.migrate();
            let grown = scene.grow(Some(&driver), LARGER).await;
            assert_eq!((grown, driver.phase()), (Ok(()), Phase::Copying), "{is_target}");
            assert!(scene.handle.now() >= LONG && outcome.borrow().is_none());
            assert_eq!(scene.outcome(&outcome).await, moved());
            assert_eq!((scene.source.memory_size(), scene.target.memory_size()), (LARGER, LARGER));
        });
    }
}

#[test]
fn past_the_point_of_no_return_a_volume_grows_when_it_has_moved() {
    play(|scene| async move {
        scene.fill(16).await;
        scene.control.commits_take.set(Duration::from_millis(100));
        let (driver, outcome) = scene.migrate();
        scene.reach(&driver, Phase::Releasing).await;
        assert_eq!(scene.grow(Some(&driver), LARGER).await, Err(Refused::HandingOver(MigrationId(1))));
        assert_eq!(scene.outcome(&outcome).await, moved());
        assert_eq!(scene.grow(Some(&driver), LARGER).await, Ok(()));
        assert_eq!(scene.target.memory_size(), LARGER);
        assert_eq!(scene.source.memory_size(), SIZE, "it has nothing to do with the volume any more");
    });
}

#[test]
fn a_try_at_the_handover_that_is_not_past_the_release_gives_way() {
    for phase in [Phase::Closing, Phase::Preparing] {
        play(move |scene| async move {
            scene.fill(16).await;
            scene.target.delay.set_latency(Operations::of(&[Operation::Flush]), Duration::from_millis(50));
            scene.source.delay.set_latency(Operations::of(&[Operation::Flush]), Duration::from_millis(50));
            let (driver, outcome) = scene.migrate();
            scene.reach(&driver, phase).await;
            assert_eq!(scene.grow(Some(&driver), LARGER).await, Ok(()), "{phase}");
            assert_eq!((scene.source.memory_size(), scene.target.memory_size()), (LARGER, LARGER));
            scene.write(LARGER / 4096 - 1, 6).await;
            assert_eq!(scene.outcome(&outcome).await, moved());
            assert_eq!(scene.target.content().await[LARGER as usize - 1], 6);
        });
    }
}

#[test]
fn a_store_that_cannot_grow_refuses_before_anything_is_recorded() {
    for role in [StoreRole::Owner, StoreRole::Target] {
        play(move |scene| async move {
            scene.fill(2048).await;
            let (store, other) = match role {
                StoreRole::Owner => (&scene.source, &scene.target),
                StoreRole::Target => (&scene.target, &scene.source),
            };
            store.growth.borrow_mut().capacity = Some(LARGER - 4096);
            let (driver, outcome) = scene.migrate_slowly(4 << 20);
            scene.handle.sleep(Duration::from_millis(100)).await;
            let refused = Refused::NoRoom { store: role, capacity_bytes: LARGER - 4096 };
            assert_eq!(scene.grow(Some(&driver), LARGER).await, Err(refused));
            assert!(scene.sizes().is_empty());
            assert_eq!((store.memory_size(), other.memory_size()), (SIZE, SIZE));
            assert_eq!(scene.grow(Some(&driver), LARGER - 4096).await, Ok(()), "so much fits");
            assert_eq!(scene.outcome(&outcome).await, moved());
        });
    }
}

#[test]
fn a_store_that_fails_to_grow_leaves_both_as_they_were_and_the_migration_goes_on() {
    for role in [StoreRole::Owner, StoreRole::Target] {
        play(move |scene| async move {
            scene.fill(2048).await;
            let error = IoError::os("grow", Errno::NOSPC);
            let store = if role == StoreRole::Owner { &scene.source } else { &scene.target };
            store.growth.borrow_mut().fails = Some(error);
            let (driver, outcome) = scene.migrate_slowly(4 << 20);
            scene.handle.sleep(Duration::from_millis(100)).await;
            let refused = Refused::NotGrown { store: role, error };
            assert_eq!(scene.grow(Some(&driver), LARGER).await, Err(refused));
            assert_eq!(scene.sizes(), [begun(LARGER), resized(SIZE)]);
            let undone = [&scene.source, &scene.target].map(|store| store.growth.borrow().undone);
            assert_eq!(undone, [1, 1]);
            assert_eq!(scene.device().geometry().size, SIZE);
            assert_eq!(scene.outcome(&outcome).await, moved());
        });
    }
}

#[test]
fn a_migration_that_is_cancelled_while_its_volume_grows_does_not_stop_that() {
    play(|scene| async move {
        scene.fill(2048).await;
        scene.control.commits_take.set(Duration::from_secs(1));
        let (driver, outcome) = scene.migrate_slowly(1 << 20);
        let cancelled = async {
            scene.handle.sleep(Duration::from_millis(500)).await;
            driver.cancel();
        };
        let (grown, ()) = futures_util::future::join(scene.grow(Some(&driver), LARGER), cancelled).await;
        assert_eq!(grown, Ok(()));
        assert_eq!(scene.outcome(&outcome).await, Outcome::Cancelled);
        assert_eq!((scene.source.memory_size(), scene.target.memory_size()), (LARGER, SIZE));
        let data = Buffer::copy_of(&[3; 4096]);
        assert_eq!(scene.device().write(SIZE, data, Durability::Volatile).await, Ok(()));
        // Its data does not go to the target.
        scene.target.fault.add(FaultRule::always(Operations::ALL, IoError::os("anything", Errno::IO)));
        scene.write(3, 3).await;
        assert_eq!(scene.target.fault.failed(), 0);
    });
}
