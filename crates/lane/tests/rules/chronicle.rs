//! Tests the chronicle of a volume across restarts: which writes wait for a mark, and what a restart knows.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::support::{SIZE, Scene, play};
use block::conformance::Forgetful;
use block::filter::Aligner;
use block::{BlockDevice, Buffer, BufferPool, Durability, Handle, MemoryStore};
use chronicle::{
    BlockRange, BlockSize, Epoch, Generation, Kept, LayeredBitmap, MarkPolicy, ReplicaOf, StayId,
};
use lane::{Chronicler, Home, Keeper, Keeping, LaneFuture, NotDurable, Volume};
use migration::filling::LogEntry;
use migration::stay::Beginning;
use migration::{StayKey, VolumeId};

const VOLUME: VolumeId = VolumeId([7; 16]);
const GENERATION: Generation = Generation(3);
const COPY: ReplicaOf = ReplicaOf::Host { host: [1; 32], departure: 3 };
const MIB: u64 = 1 << 20;

struct Folder {
    handle: Handle,
    kept: RefCell<Option<Kept>>,
    marks: RefCell<BTreeMap<Epoch, Vec<BlockRange>>>,
    refuses: RefCell<u32>,
    doubts: RefCell<u32>,
}

const TAKES: Duration = Duration::from_millis(3);
const WAIT_MAX: Duration = Duration::from_secs(1);

impl Folder {
    fn new(handle: &Handle) -> Rc<Self> {
        Rc::new(Self {
            handle: handle.clone(),
            kept: RefCell::default(),
            marks: RefCell::default(),
            refuses: RefCell::default(),
            doubts: RefCell::default(),
        })
    }

    fn found(&self) -> Option<Kept> {
        let marks = self.marks.borrow().clone();
        self.kept.borrow().clone().map(|kept| kept.with_marks(marks))
    }
}

struct FolderKeeper(Rc<Folder>);

impl Keeper for FolderKeeper {
    fn mark(&self, _: StayKey, epoch: Epoch, blocks: Vec<BlockRange>) -> LaneFuture<Result<(), NotDurable>> {
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

    fn keep(&self, _: StayKey, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            folder.marks.borrow_mut().retain(|epoch, _| *epoch > kept.through);
            *folder.kept.borrow_mut() = Some(kept);
            Ok(())
        })
    }

    fn forget(&self, _: StayKey, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            *folder.kept.borrow_mut() = None;
            folder.marks.borrow_mut().retain(|epoch, _| *epoch > through);
            Ok(())
        })
    }

    fn doubt(&self, _: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        let folder = Rc::clone(&self.0);
        Box::pin(async move {
            folder.handle.sleep(TAKES).await;
            *folder.doubts.borrow_mut() += 1;
            Ok(())
        })
    }

    fn begin_presence(&self, _: StayKey, _: u64, _: LogEntry) -> LaneFuture<Result<(), NotDurable>> {
        keeps_no_presence()
    }

    fn add_presence(&self, _: StayKey, _: u64, _: LogEntry) -> LaneFuture<Result<(), NotDurable>> {
        keeps_no_presence()
    }

    fn note_presence(&self, _: StayKey, _: u64, _: Vec<BlockRange>) -> LaneFuture<Result<(), NotDurable>> {
        keeps_no_presence()
    }

    fn forget_presence(&self, _: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        keeps_no_presence()
    }
}

/// Refuses: no volume of these rules lacks blocks.
fn keeps_no_presence() -> LaneFuture<Result<(), NotDurable>> {
    Box::pin(async { Err(NotDurable { detail: "keeps no presence".to_owned() }) })
}

fn start(folder: &Rc<Folder>) -> Rc<Volume> {
    start_over(folder, Rc::new(MemoryStore::new(SIZE)))
}

fn start_over(folder: &Rc<Folder>, store: Rc<dyn BlockDevice>) -> Rc<Volume> {
    let keeper = Rc::new(FolderKeeper(Rc::clone(folder)));
    let handle = folder.handle.clone();
    let beginning = Beginning {
        id: StayId::Made,
        block_size: BlockSize::DEFAULT,
        size_bytes: SIZE,
        regions: MarkPolicy::regions_for(BlockSize::DEFAULT, SIZE),
    };
    let aligner = Aligner::new(BufferPool::new(), handle.clone());
    let keeping = Keeping { keeper, handle, wait_max: WAIT_MAX };
    let chronicler = Chronicler::kept(VOLUME, beginning, folder.found(), keeping);
    let home = Home::Here(store);
    Volume::with_chronicler(VOLUME, chronicler, GENERATION, home, aligner)
}

async fn write(scene: &Scene, volume: &Volume, offset: u64) -> Duration {
    let began = scene.handle.now();
    let block = Buffer::copy_of(&[7; 4096]);
    volume.device().write(offset, block, Durability::Volatile).await.unwrap();
    scene.handle.now() - began
}

async fn refer(volume: &Volume) {
    let complete = || Some(LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(SIZE)));
    volume.chronicler().refer_to(COPY, GENERATION, || Some(volume.store()), complete).await.unwrap();
}

fn lacking(volume: &Volume) -> Option<Vec<BlockRange>> {
    volume.chronicler().lacking(COPY, GENERATION).map(|lacking| lacking.runs().collect())
}

#[test]
fn an_image_of_the_same_generation_that_left_by_another_departure_is_not_the_copy_that_is_known() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        refer(&volume).await;
        for volume in [volume, start(&folder)] {
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
        let volume = start(&folder);
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
        let volume = start(&folder);
        refer(&volume).await;
        assert_eq!(write(&scene, &volume, 0).await, TAKES);
        assert_eq!(write(&scene, &volume, MIB / 2).await, Duration::ZERO);
        assert_eq!(write(&scene, &volume, MIB).await, TAKES);
        // Regions in use at the end of an epoch are marked for the next one beforehand.
        refer(&volume).await;
        assert_eq!(write(&scene, &volume, 0).await, Duration::ZERO);
        assert_eq!(volume.chronicler().waits(), 2);
    });
}

#[test]
fn after_a_kill_every_marked_region_counts_as_written() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        write(&scene, &volume, 7 * MIB).await;
        refer(&volume).await;
        write(&scene, &volume, 2 * MIB + 4096).await;
        let exact = lacking(&volume);
        assert_eq!(exact, Some(vec![BlockRange::new(513, 514)]));
        // This is like a kill: nothing more is recorded.
        let volume = start(&folder);
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(512, 768)]), "its region, and no other");
        // A restart after that knows both lives.
        write(&scene, &volume, 5 * MIB).await;
        let volume = start(&folder);
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(512, 768), BlockRange::new(1280, 1536)]));
    });
}

#[test]
fn a_copy_is_known_by_its_generation_and_gone_when_it_is_forgotten() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
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
fn a_folder_that_takes_no_mark_for_a_moment_holds_the_write_and_does_not_fail_it() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        refer(&volume).await;
        *folder.refuses.borrow_mut() = 2;
        let took = write(&scene, &volume, 0).await;
        assert!((2 * TAKES..WAIT_MAX).contains(&took), "{took:?}");
        assert!(lacking(&volume).is_some() && volume.chronicler().given_up().is_none());
    });
}

#[test]
fn a_folder_that_takes_no_marks_costs_the_copies_and_holds_no_write_longer_than_the_limit() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        refer(&volume).await;
        *folder.refuses.borrow_mut() = u32::MAX;
        let took = write(&scene, &volume, 0).await;
        assert!((WAIT_MAX..=WAIT_MAX + TAKES).contains(&took), "{took:?}");
        // This happens once for all writes.
        assert_eq!(write(&scene, &volume, 5 * MIB).await, Duration::ZERO);
        assert!(lacking(&volume).is_none() && folder.found().is_none());
        assert_eq!(volume.chronicler().given_up().map(|given_up| given_up.copies), Some(1));
        // A folder that is still full makes no write wait.
        let complete = || Some(LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(SIZE)));
        let referred =
            volume.chronicler().refer_to(COPY, GENERATION, || Some(volume.store()), complete).await;
        assert!(referred.is_err());
        assert_eq!(write(&scene, &volume, 7 * MIB).await, Duration::ZERO);
        *folder.refuses.borrow_mut() = 0;
        refer(&volume).await;
        assert!(lacking(&volume).is_some() && volume.chronicler().given_up().is_none());
    });
}

#[test]
fn a_second_stay_knows_nothing_of_the_first() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        refer(&volume).await;
        assert!(write(&scene, &volume, 0).await > Duration::ZERO);
        volume.begin_stay(StayId::Arrived(5), GENERATION, None, SIZE).await.unwrap();
        assert_eq!((volume.chronicler().stay(), lacking(&volume)), (StayId::Arrived(5), None));
        refer(&volume).await;
        assert!(write(&scene, &volume, 0).await > Duration::ZERO, "its marks are its own");
        // It continues a residency that it knows.
        volume.begin_stay(StayId::Arrived(5), GENERATION, None, SIZE).await.unwrap();
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(0, 1)]));
    });
}

/// Returns a volume on a store that forgets, with a known copy which lacks the last writes.
async fn written(scene: &Scene) -> (Rc<Folder>, Rc<Forgetful>, Rc<Volume>) {
    let folder = Folder::new(&scene.handle);
    let store = Forgetful::new(SIZE);
    let volume = start_over(&folder, Rc::clone(&store) as Rc<dyn BlockDevice>);
    refer(&volume).await;
    write(scene, &volume, 0).await;
    (folder, store, volume)
}

#[test]
fn a_flush_that_fails_is_told_when_no_copy_is_told_any_more_by_what_it_has_lost() {
    play(|scene| async move {
        let (folder, store, volume) = written(&scene).await;
        store.fail_flushes(1);
        volume.device().flush().await.unwrap_err();
        assert_eq!(*folder.doubts.borrow(), 1, "before the guest is told");
        assert!(lacking(&volume).is_none() && folder.found().is_none());
        assert_eq!(volume.chronicler().given_up().map(|given_up| given_up.copies), Some(1));
        // Nothing more is to be recorded of this residency, and flushes work as before.
        write(&scene, &volume, MIB).await;
        store.fail_flushes(1);
        volume.device().flush().await.unwrap_err();
        volume.device().flush().await.unwrap();
        assert_eq!(*folder.doubts.borrow(), 1);
    });
}

#[test]
fn a_flush_that_begins_before_a_failed_one_is_told_fails_too() {
    play(|scene| async move {
        let (folder, store, volume) = written(&scene).await;
        store.fail_flushes(1);
        let device = volume.device();
        let second = async {
            // The first flush has failed below, and waits until copies do not rely on what it may have lost.
            scene.handle.sleep(TAKES / 2).await;
            assert_eq!(*folder.doubts.borrow(), 0);
            device.flush().await
        };
        let (first, second) = futures_util::future::join(device.flush(), second).await;
        first.unwrap_err();
        second.unwrap_err();
        device.flush().await.unwrap();
    });
}

#[test]
fn a_flush_of_ours_that_fails_is_remembered_as_one_of_the_guests_is() {
    play(|scene| async move {
        let (folder, store, volume) = written(&scene).await;
        store.fail_flushes(1);
        let complete = || Some(LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(SIZE)));
        let ours = volume.store_for_us();
        let of = ReplicaOf::Migration(1);
        volume.chronicler().refer_to(of, GENERATION, || Some(ours), complete).await.unwrap_err();
        assert_eq!(*folder.doubts.borrow(), 1);
        assert!(lacking(&volume).is_none() && folder.found().is_none());
    });
}

#[test]
fn a_stay_is_as_large_as_its_store_also_where_the_volume_was_smaller_before() {
    play(|scene| async move {
        let folder = Folder::new(&scene.handle);
        let volume = start(&folder);
        let larger: Rc<dyn BlockDevice> = Rc::new(MemoryStore::new(SIZE + MIB));
        volume.begin_stay(StayId::Arrived(5), GENERATION, Some(COPY), SIZE + MIB).await.unwrap();
        volume.change_hands(Home::Here(larger), GENERATION);
        write(&scene, &volume, SIZE).await;
        let written = SIZE / 4096;
        assert_eq!(lacking(&volume), Some(vec![BlockRange::new(written, written + 1)]));
    });
}
