//! The chronicle of a volume across restarts: what waits for a mark, and what a restart knows.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::support::{SIZE, Scene, play};
use block::{Buffer, Durability, Handle, MemoryStore};
use chronicle::{BlockRange, BlockSize, Epoch, Generation, Kept, LayeredBitmap, MarkPolicy, ReplicaOf};
use lane::{Beginning, Chronicler, Home, Keeper, LaneFuture, NotDurable, Volume};
use migration::VolumeId;

const VOLUME: VolumeId = VolumeId([7; 16]);
const GENERATION: Generation = Generation(3);
const COPY: ReplicaOf = ReplicaOf::Host { host: [1; 32], departure: 3 };
const MIB: u64 = 1 << 20;

/// A data folder in memory.
struct Folder {
    handle: Handle,
    kept: RefCell<Option<Kept>>,
    marks: RefCell<BTreeMap<Epoch, Vec<BlockRange>>>,
    /// How many more marks it does not take.
    refuses: RefCell<u32>,
}

/// How long anything takes there.
const TAKES: Duration = Duration::from_millis(3);

impl Folder {
    fn new(handle: &Handle) -> Rc<Self> {
        let (kept, marks, refuses) = (RefCell::default(), RefCell::default(), RefCell::default());
        Rc::new(Self { handle: handle.clone(), kept, marks, refuses })
    }

    /// What a restart finds.
    fn found(&self) -> Option<Kept> {
        let marks = self.marks.borrow().clone();
        self.kept.borrow().clone().map(|kept| kept.with_marks(marks))
    }
}

/// The folder as a volume takes it.
struct FolderKeeper(Rc<Folder>);

impl Keeper for FolderKeeper {
    fn mark(&self, _: VolumeId, epoch: Epoch, blocks: Vec<BlockRange>) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            let refuses = *folder.refuses.borrow();
            if refuses > 0 {
                *folder.refuses.borrow_mut() -= 1;
                return Err(NotDurable { detail: "full".to_owned() });
            }
            folder.marks.borrow_mut().entry(epoch).or_default().extend(blocks);
            Ok(())
        })
    }

    fn keep(&self, _: VolumeId, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            folder.marks.borrow_mut().retain(|epoch, _| *epoch > kept.through);
            *folder.kept.borrow_mut() = Some(kept);
            Ok(())
        })
    }

    fn forget(&self, _: VolumeId, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            *folder.kept.borrow_mut() = None;
            folder.marks.borrow_mut().retain(|epoch, _| *epoch > through);
            Ok(())
        })
    }
}

/// The volume after a start of its daemon that may use epochs from `used` on.
fn start(folder: &Rc<Folder>, used: u64) -> Rc<Volume> {
    let keeper = Rc::new(FolderKeeper(Rc::clone(folder)));
    let handle = folder.handle.clone();
    let beginning = Beginning {
        volume: VOLUME,
        block_size: BlockSize::DEFAULT,
        size_bytes: SIZE,
        reserved: Epoch(used),
        regions: MarkPolicy::regions_for(BlockSize::DEFAULT, SIZE),
    };
    let chronicler = Chronicler::kept(beginning, folder.found(), keeper, handle);
    Volume::with_chronicler(VOLUME, chronicler, GENERATION, Home::Here(Rc::new(MemoryStore::new(SIZE))))
}

/// Writes a block, and tells how long that took.
async fn write(scene: &Scene, volume: &Volume, offset: u64) -> Duration {
    let began = scene.handle.now();
    let block = Buffer::copy_of(&[7; 4096]);
    volume.device().write(offset, block, Durability::Volatile).await.unwrap();
    scene.handle.now() - began
}

async fn refer(volume: &Volume) {
    let complete = || Some(LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(SIZE)));
    volume.chronicler().refer_to(COPY, GENERATION, Some(&*volume.store()), complete).await.unwrap();
}

fn lacking(volume: &Volume) -> Option<Vec<BlockRange>> {
    volume.chronicler().lacking(COPY, GENERATION).map(|lacking| lacking.runs().collect())
}

#[test]
fn an_image_of_the_same_generation_that_left_by_another_departure_is_not_the_copy_that_is_known() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        refer(&volume).await;
        for volume in [volume, start(&folder, 20)] {
            assert_eq!(lacking(&volume), Some(Vec::new()));
            let of_another_branch = ReplicaOf::Host { host: [1; 32], departure: 4 };
            assert_eq!(volume.chronicler().lacking(of_another_branch, GENERATION), None);
        }
    });
}

#[test]
fn a_volume_of_which_nobody_has_a_copy_marks_nothing() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        for offset in 0..SIZE / MIB {
            assert_eq!(write(&scene, &volume, offset * MIB).await, Duration::ZERO);
        }
        assert!(folder.marks.borrow().is_empty() && folder.found().is_none());
        assert_eq!(volume.chronicler().waits(), 0);
    });
}

#[test]
fn the_first_write_to_a_region_waits_for_its_mark_and_no_other_does() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        refer(&volume).await;
        assert_eq!(write(&scene, &volume, 0).await, TAKES);
        assert_eq!(write(&scene, &volume, MIB / 2).await, Duration::ZERO);
        assert_eq!(write(&scene, &volume, MIB).await, TAKES);
        // What is in use when an epoch ends is marked for the next one beforehand.
        refer(&volume).await;
        assert_eq!(write(&scene, &volume, 0).await, Duration::ZERO);
        assert_eq!(volume.chronicler().waits(), 2);
    });
}

#[test]
fn after_a_kill_every_marked_region_counts_as_written() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        write(&scene, &volume, 7 * MIB).await;
        refer(&volume).await;
        write(&scene, &volume, 2 * MIB + 4096).await;
        let exact = lacking(&volume);
        assert_eq!(exact, Some(vec![BlockRange::new(32, 33)]));
        // As after a kill: nothing more is told to anybody.
        let volume = start(&folder, 1 << 20);
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(32, 48)]), "its region, and no other");
        // A restart after that knows both lives.
        write(&scene, &volume, 5 * MIB).await;
        let volume = start(&folder, 1 << 21);
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(32, 48), BlockRange::new(80, 96)]));
    });
}

#[test]
fn a_copy_is_known_by_its_generation_and_gone_when_it_is_forgotten() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        refer(&volume).await;
        let chronicler = volume.chronicler();
        assert!(chronicler.lacking(COPY, GENERATION.next()).is_none());
        assert!(chronicler.lacking(ReplicaOf::Migration(1), GENERATION).is_none());
        write(&scene, &volume, 0).await;
        chronicler.forget(COPY).await.unwrap();
        assert!(folder.found().is_none() && lacking(&volume).is_none());
        assert_eq!(write(&scene, &volume, 3 * MIB).await, Duration::ZERO, "nothing is marked any more");
    });
}

#[test]
fn a_folder_that_takes_no_mark_holds_the_write_and_does_not_fail_it() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder, 10);
        refer(&volume).await;
        *folder.refuses.borrow_mut() = 2;
        assert!(write(&scene, &volume, 0).await > 2 * TAKES);
        assert_eq!(folder.marks.borrow().len(), 1);
    });
}
