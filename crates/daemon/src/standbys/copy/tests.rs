//! Tests of a keeper with files, without a source.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use chronicle::{BlockCount, BlockRange, Epoch, Generation};
use lane::capture::BLOCK_BYTES;
use standby::receiver::Event;
use standby::record::{ImageState, KeptBy, Point, Standing};
use standby::wire::{Content, StreamId, ToStandby};
use standby::{LifeId, StandbyId, VolumeIndex, Watermark};

use super::cloning::{CloneOrder, delete_clone, name_clone};
use super::files::Files;
use super::input::{Ending, Input, LendingEnd};
use super::keeper::Keeper;
use crate::standbys::book::{Book, CopiedVolume, CopyConfig, Keep, Noted, hex};

const ID: StandbyId = StandbyId(9);
const STREAM: StreamId = StreamId(1);
const BLOCKS: u64 = 16;

/// A keeper of one volume, in folders of its own.
struct Scene {
    _folder: tempfile::TempDir,
    store: PathBuf,
    data: PathBuf,
    keeper: Keeper,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (store, data) = (folder.path().join("store"), folder.path().join("data"));
        [&store, &data].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        let keeper = begun(&store, &data);
        Self { _folder: folder, store, data, keeper }
    }

    /// Ends the keeper without an order, and begins another one.
    fn restart(&mut self) {
        self.keeper.open = None;
        self.keeper = begun(&self.store, &self.data);
    }

    fn image(&self) -> PathBuf {
        self.store.join(".sterna-standbys").join(hex(ID)).join("image-0")
    }

    fn receive(&mut self, message: ToStandby, payload: &[u8]) {
        self.keeper.look_for_room(&message).unwrap();
        self.keeper.handle(Event::Received(STREAM, message), &Bytes::copy_from_slice(payload));
    }

    fn offer(&mut self) {
        let (generation, life) = (Generation(1), LifeId(2));
        self.receive(ToStandby::Offer { standby: ID, generation, life, acknowledged: None }, &[]);
    }

    /// Receives an epoch that sets one block.
    fn epoch(&mut self, number: u64, block: u64, value: u8) {
        let (epoch, base) = (Epoch(number), (number > 1).then(|| Epoch(number - 1)));
        self.receive(ToStandby::Begin { epoch, base, blocks: 1, sizes: vec![BlockCount(BLOCKS)] }, &[]);
        let (volume, blocks) = (VolumeIndex(0), BlockRange::new(block, block + 1));
        let extent = ToStandby::Extent { volume, blocks, content: Content::Payload };
        self.receive(extent, &[value; BLOCK_BYTES as usize]);
        self.receive(ToStandby::Seal { epoch, age_ms: 0 }, &[]);
    }

    fn standing(&self) -> (Standing, ImageState, Option<u64>) {
        let record = self.keeper.open.as_ref().unwrap().machine.record();
        (record.standing, record.image, record.watermark.map(|at| at.epoch.0))
    }
}

fn begun(store: &Path, data: &Path) -> Keeper {
    let volume = CopiedVolume {
        volume: String::new(),
        name: "v".to_owned(),
        size_bytes: BLOCKS * BLOCK_BYTES,
        promoted: String::new(),
    };
    let config = CopyConfig {
        id: hex(ID),
        name: "v".to_owned(),
        store: "s".to_owned(),
        volumes: vec![volume],
        keep: Keep { last: 2, hourly: 0, daily: 0 },
        noted: Noted::default(),
        is_removed: false,
        is_yielded: false,
    };
    let store = store.to_owned();
    let locate =
        Box::new(move || if store.exists() { Ok(store.clone()) } else { Err("it is away".to_owned()) });
    let mut keeper = Keeper::new(config, locate, Book::open(data).unwrap());
    keeper.reopen();
    keeper
}

fn with_two_epochs() -> Scene {
    let mut scene = Scene::new();
    scene.offer();
    scene.epoch(1, 0, 1);
    scene.epoch(2, 1, 2);
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(2)));
    scene
}

#[test]
fn what_a_cancelled_migration_began_with_is_the_standby_s_again() {
    for (writes, restarts) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut scene = with_two_epochs();
        let lent = vec![scene.store.join("v.img.standby")];
        scene.keeper.lend(5, &lent).unwrap();
        assert_eq!(scene.standing().0, Standing::Consumed);
        assert_eq!(scene.keeper.book.lent(&hex(ID)).unwrap().unwrap().migration, 5);
        // The migration takes it under a name of its own.
        let target = scene.store.join("v.img");
        std::fs::rename(&lent[0], &target).unwrap();
        let file = std::fs::File::options().write(true).open(&target).unwrap();
        if writes {
            file.write_all_at(&[7; BLOCK_BYTES as usize], BLOCK_BYTES).unwrap();
        }
        if restarts {
            scene.restart();
        }
        std::fs::remove_file(&target).unwrap();
        scene.keeper.end_lending(&lent, LendingEnd::GivenBack).unwrap();
        let image = if writes { ImageState::Torn } else { ImageState::AsOfWatermark };
        assert_eq!(scene.standing(), (Standing::Receiving, image, Some(2)), "{writes} {restarts}");
        assert_eq!(scene.keeper.book.lent(&hex(ID)).unwrap(), None);
        scene.restart();
        scene.offer();
        scene.epoch(3, 1, 9);
        assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(3)));
        let bytes = std::fs::read(scene.image()).unwrap();
        assert_eq!((bytes[0], bytes[BLOCK_BYTES as usize]), (1, 9));
    }
}

#[test]
fn images_are_lent_to_one_migration_at_a_time() {
    let mut scene = with_two_epochs();
    let lent = vec![scene.store.join("v.img.standby")];
    scene.keeper.lend(5, &lent).unwrap();
    let file = std::fs::File::options().write(true).open(&lent[0]).unwrap();
    file.write_all_at(&[7; BLOCK_BYTES as usize], BLOCK_BYTES).unwrap();
    let before = scene.keeper.book.lent(&hex(ID)).unwrap();
    // Only what does not depend on the image is left, if the store can keep that.
    let kept_by = scene.keeper.open.as_ref().unwrap().files.keeps_points_by();
    let left = if kept_by == KeptBy::Reflink { 2 } else { 0 };
    assert_eq!(scene.keeper.view().points.len(), left);
    for restarts in [false, true] {
        if restarts {
            scene.restart();
        }
        let refused = scene.keeper.lend(6, &lent).unwrap_err();
        assert!(refused.contains("another migration"), "{refused}");
        assert_eq!(scene.keeper.book.lent(&hex(ID)).unwrap(), before);
    }
    scene.keeper.end_lending(&lent, LendingEnd::GivenBack).unwrap();
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::Torn, Some(2)));
    scene.keeper.lend(6, &lent).unwrap();
}

#[test]
fn images_that_are_volumes_have_no_name_in_the_folder_of_standbys() {
    let mut scene = with_two_epochs();
    let lent = vec![scene.store.join("v.img.standby")];
    scene.keeper.lend(5, &lent).unwrap();
    scene.restart();
    scene.keeper.end_lending(&lent, LendingEnd::UsedUp).unwrap();
    assert!(!scene.image().exists() && lent[0].exists());
    scene.restart();
    assert_eq!(scene.standing().0, Standing::Consumed);
}

#[test]
fn a_store_without_second_names_lends_nothing_and_loses_nothing() {
    let mut scene = with_two_epochs();
    let lent = vec![PathBuf::from("/proc/self/v.img.standby")];
    let refused = scene.keeper.lend(5, &lent).unwrap_err();
    assert!(refused.contains("cannot give a file two names"), "{refused}");
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(2)));
    scene.offer();
    scene.epoch(3, 1, 9);
    assert_eq!(scene.standing().2, Some(3));
}

#[test]
fn a_full_store_makes_a_standby_late_and_breaks_nothing() {
    let mut scene = with_two_epochs();
    let points = |scene: &Scene| scene.keeper.open.as_ref().unwrap().machine.record().points.len();
    assert_eq!(points(&scene), 1);
    scene.keeper.space = |_| Ok((1 << 30, 100 << 30));
    scene.epoch(3, 2, 3);
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(2)));
    assert_eq!(points(&scene), 0, "points give way to others");
    assert!(scene.keeper.fault.is_none());
    scene.keeper.space = |_| Ok((10 << 30, 100 << 30));
    scene.receive(ToStandby::StillCurrent, &[]);
    scene.epoch(3, 2, 3);
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(3)));
    assert_eq!(points(&scene), 1);
}

#[test]
fn what_is_written_in_place_waits_for_what_it_overwrites() {
    let store = tempfile::tempdir().unwrap();
    let mut files = Files::open(store.path(), "s", &[BlockCount(BLOCKS)], true, &[], &[]).unwrap();
    let at = Watermark { standby: ID, life: LifeId(2), epoch: Epoch(1) };
    files.keep_point(at, KeptBy::Undo).unwrap();
    let path = store.path().join(".sterna-standbys/s/image-0");
    let written =
        || std::fs::read(&path).unwrap()[..4 * BLOCK_BYTES as usize].iter().filter(|byte| **byte > 0).count();
    for block in 0..4 {
        let range = BlockRange::new(block, block + 1);
        files.write(VolumeIndex(0), range, Some(&[1; BLOCK_BYTES as usize])).unwrap();
    }
    // One flush of the undo file is enough for all.
    assert_eq!(written(), 0);
    files.flush().unwrap();
    assert_eq!(written(), 4 * BLOCK_BYTES as usize);
    files.restore_point(at).unwrap();
    assert_eq!(written(), 0);
}

#[test]
fn points_that_share_blocks_outlast_a_start_without_images() {
    let store = tempfile::tempdir().unwrap();
    let open = |images: &[BlockCount], points: &[Point]| {
        Files::open(store.path(), "s", images, !images.is_empty(), points, &[]).unwrap()
    };
    let two = [BlockCount(BLOCKS); 2];
    let kept_by = open(&two, &[]).keeps_points_by();
    let at = |epoch| Watermark { standby: ID, life: LifeId(2), epoch: Epoch(epoch) };
    let folder = store.path().join(".sterna-standbys/s");
    let names = || {
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with("image-")).collect();
        names.sort();
        names
    };
    let of = |epoch, index: usize| format!("point-{}-{index}", super::files::text(at(epoch)));
    for (epoch, index) in [(1, 0), (1, 1), (11, 0), (2, 0)] {
        std::fs::write(folder.join(of(epoch, index)), "content").unwrap();
    }
    let point = |epoch| Point { watermark: at(epoch), kept_by: KeptBy::Reflink, blocks: 1, as_of_ms: 0 };
    // The images are lent to a migration.
    let lent = open(&[], &[point(1), point(11)]);
    assert_eq!(names(), [of(1, 0), of(1, 1), of(11, 0)]);
    assert_eq!(lent.keeps_points_by(), kept_by);
}

#[test]
fn the_oldest_points_go_without_being_copied_into_each_other() {
    let store = tempfile::tempdir().unwrap();
    let mut files = Files::open(store.path(), "s", &[BlockCount(BLOCKS)], true, &[], &[]).unwrap();
    let at = |epoch| Watermark { standby: ID, life: LifeId(2), epoch: Epoch(epoch) };
    for epoch in 1..5 {
        files.keep_point(at(epoch), KeptBy::Undo).unwrap();
        let range = BlockRange::new(epoch, epoch + 1);
        files.write(VolumeIndex(0), range, Some(&[epoch as u8; BLOCK_BYTES as usize])).unwrap();
        files.flush().unwrap();
    }
    let bytes = || {
        let folder = std::fs::read_dir(store.path().join(".sterna-standbys/s")).unwrap();
        folder.map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>()
    };
    let before = bytes();
    let point = |epoch| Point { watermark: at(epoch), kept_by: KeptBy::Undo, blocks: 1, as_of_ms: 0 };
    files.prepare_to_drop(&[point(4)]).unwrap();
    assert_eq!(bytes(), before, "a full store has no room for more");
    files.prepare_to_drop(&[]).unwrap();
    assert_eq!(bytes(), before);
    (1..4).for_each(|epoch| files.drop_point(at(epoch)).unwrap());
    files.restore_point(at(4)).unwrap();
    let image = std::fs::read(store.path().join(".sterna-standbys/s/image-0")).unwrap();
    assert_eq!([3, 4].map(|block| image[block * BLOCK_BYTES as usize]), [3, 0]);
}

#[test]
fn a_damaged_point_is_refused_also_after_a_restart_and_when_it_has_taken_up_another_one() {
    let store = tempfile::tempdir().unwrap();
    let at = |epoch| Watermark { standby: ID, life: LifeId(2), epoch: Epoch(epoch) };
    let mut files = Files::open(store.path(), "s", &[BlockCount(BLOCKS)], true, &[], &[]).unwrap();
    for epoch in 1..4 {
        files.keep_point(at(epoch), KeptBy::Undo).unwrap();
        for block in 0..4 {
            let range = BlockRange::new(block, block + 1);
            files.write(VolumeIndex(0), range, Some(&[epoch as u8; BLOCK_BYTES as usize])).unwrap();
        }
        files.flush().unwrap();
    }
    drop(files);
    let undo = store.path().join(".sterna-standbys/s").join(format!("undo-{}", super::files::text(at(2))));
    let file = std::fs::File::options().write(true).open(undo).unwrap();
    file.write_all_at(&[99; 16], BLOCK_BYTES + 200).unwrap();
    let point = |epoch| Point { watermark: at(epoch), kept_by: KeptBy::Undo, blocks: 4, as_of_ms: 0 };
    let points = [point(1), point(2), point(3)];
    let mut files = Files::open(store.path(), "s", &[BlockCount(BLOCKS)], false, &points, &[]).unwrap();
    // Both need what is damaged, and the newest does not.
    assert!(files.undo_since(at(1)).is_err() && files.undo_since(at(2)).is_err());
    assert!(files.undo_since(at(3)).is_ok());
    files.prepare_to_drop(&[point(1), point(3)]).unwrap();
    files.drop_point(at(2)).unwrap();
    assert!(files.undo_since(at(1)).is_err());
    files.restore_point(at(3)).unwrap();
}

#[test]
fn an_image_that_was_touched_while_no_daemon_ran_is_copied_again() {
    for touches in [false, true] {
        let mut scene = with_two_epochs();
        scene.keeper.close(Ending::InOrder);
        if touches {
            let before = std::fs::metadata(scene.image()).unwrap().modified().unwrap();
            let image = std::fs::File::options().write(true).open(scene.image()).unwrap();
            // The clock of a file system may stand still for some milliseconds.
            while std::fs::metadata(scene.image()).unwrap().modified().unwrap() == before {
                image.write_all_at(&[9; 512], 0).unwrap();
            }
        }
        scene.restart();
        let (watermark, note) = if touches { (None, true) } else { (Some(2), false) };
        assert_eq!((scene.standing().2, scene.keeper.view().note.is_some()), (watermark, note));
        // What follows is the daemon's own.
        scene.restart();
        assert_eq!(scene.standing().2, watermark);
        scene.offer();
        scene.epoch(1, 0, 1);
        assert_eq!(scene.keeper.view().note, None);
    }
}

#[test]
fn a_standby_without_its_store_says_so_and_goes_on_when_it_is_back() {
    let mut scene = with_two_epochs();
    scene.keeper.open = None;
    let away = scene.store.with_extension("away");
    std::fs::rename(&scene.store, &away).unwrap();
    scene.restart();
    assert_eq!(scene.keeper.view().fault.as_deref(), Some("it is away"));
    std::fs::rename(&away, &scene.store).unwrap();
    scene.keeper.reopen();
    assert_eq!((scene.standing().2, scene.keeper.view().fault), (Some(2), None));
}

/// A clone that is being made: its order, and its answer.
struct Making {
    answer: tokio::sync::oneshot::Receiver<Result<Watermark, String>>,
    inputs: std::sync::mpsc::Receiver<Input>,
}

fn begin_clone(scene: &mut Scene, point: Option<Watermark>) -> Making {
    let (answer, answered) = tokio::sync::oneshot::channel();
    let (back, inputs) = std::sync::mpsc::channel();
    scene.keeper.begin_clone(CloneOrder { point, progress: std::sync::Arc::default(), answer, back });
    Making { answer: answered, inputs }
}

impl Making {
    /// Lets the keeper answer the thread of the clone until that has ended.
    fn end(mut self, scene: &mut Scene) -> Result<Watermark, String> {
        loop {
            match self.inputs.recv().unwrap() {
                Input::Copied { number, answer } => scene.keeper.answer_copied(number, &answer),
                Input::Cloned { number, result } => {
                    scene.keeper.take_clone(number, result);
                    return self.answer.try_recv().unwrap();
                }
                _ => panic!("another input"),
            }
        }
    }
}

/// Returns the first bytes of blocks of the clone.
fn cloned(scene: &Scene) -> Vec<u8> {
    let bytes = std::fs::read(scene.image().with_file_name("clone-0")).unwrap();
    assert_eq!(bytes.len() as u64, BLOCKS * BLOCK_BYTES);
    bytes.chunks(BLOCK_BYTES as usize).map(|block| block[0]).take(4).collect()
}

#[test]
fn a_clone_is_exactly_its_point_while_epochs_go_on_being_applied() {
    let scene = with_two_epochs();
    let first = scene.keeper.open.as_ref().unwrap().machine.record().points[0].watermark;
    for (point, expected) in [(None, [1, 2, 0, 0]), (Some(first), [1, 0, 0, 0])] {
        let mut scene = with_two_epochs();
        let making = begin_clone(&mut scene, point);
        // These are applied before, while or after the images are copied, and points of before give way.
        for number in 3..9 {
            scene.epoch(number, number % 4, number as u8);
        }
        let at = making.end(&mut scene).unwrap();
        assert_eq!(at.epoch, if point.is_some() { Epoch(1) } else { Epoch(2) });
        assert_eq!(cloned(&scene), expected);
        // What a test writes is nothing of the standby's, and its point may give way.
        std::fs::write(scene.image().with_file_name("clone-0"), b"test").unwrap();
        scene.epoch(9, 0, 9);
        let record = scene.keeper.open.as_ref().unwrap().machine.record().clone();
        assert_eq!(record.points.len(), 2);
        let bytes = std::fs::read(scene.image()).unwrap();
        let held: Vec<u8> = bytes.chunks(BLOCK_BYTES as usize).map(|block| block[0]).take(4).collect();
        assert_eq!(held, [9, 5, 6, 7]);
        // The file of a test outlives the keeper.
        scene.restart();
        assert!(scene.image().with_file_name("clone-0").exists());
    }
}

#[test]
fn a_clone_without_room_or_without_its_point_ends_and_nothing_else() {
    let mut scene = with_two_epochs();
    scene.keeper.space = |_| Ok((1 << 30, 100 << 30));
    let mut making = begin_clone(&mut scene, None);
    let refused = making.answer.try_recv().unwrap().unwrap_err();
    assert!(refused.contains("no room"), "{refused}");
    scene.keeper.space = |_| Ok((11 << 30, 100 << 30));
    let unknown = Watermark { standby: ID, life: LifeId(2), epoch: Epoch(77) };
    let mut making = begin_clone(&mut scene, Some(unknown));
    let refused = making.answer.try_recv().unwrap().unwrap_err();
    assert!(refused.contains("no such recovery point"), "{refused}");
    scene.epoch(3, 1, 9);
    assert_eq!(scene.standing(), (Standing::Receiving, ImageState::AsOfWatermark, Some(3)));
}

#[test]
fn only_the_clone_s_own_file_is_deleted_at_its_place_in_the_store() {
    let mut scene = with_two_epochs();
    begin_clone(&mut scene, None).end(&mut scene).unwrap();
    let (id, place) = (hex(ID), scene.store.join("v-test.img"));
    std::fs::write(&place, b"another's").unwrap();
    assert!(name_clone(&scene.store, &id, 0, &place).is_err(), "a file is there");
    delete_clone(&scene.store, &id, &[&place]).unwrap();
    assert_eq!(std::fs::read(&place).unwrap(), b"another's");
    assert!(!scene.image().with_file_name("clone-0").exists());
    std::fs::remove_file(&place).unwrap();
    begin_clone(&mut scene, None).end(&mut scene).unwrap();
    name_clone(&scene.store, &id, 0, &place).unwrap();
    for _ in 0..2 {
        delete_clone(&scene.store, &id, &[&place]).unwrap();
        assert!(!place.exists() && !scene.image().with_file_name("clone-0").exists());
    }
}
