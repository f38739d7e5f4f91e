//! Tests of a keeper with files, without a source.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use chronicle::{BlockCount, BlockRange, Epoch, Generation};
use lane::capture::BLOCK_BYTES;
use standby::receiver::Event;
use standby::record::{ImageState, Standing};
use standby::wire::{Content, StreamId, ToStandby};
use standby::{LifeId, StandbyId, VolumeIndex};

use super::keeper::{Keeper, LendingEnd};
use crate::standbys::book::{Book, CopiedVolume, CopyConfig, Keep, hex};

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
        host: String::new(),
        store: "s".to_owned(),
        volumes: vec![volume],
        keep: Keep { last: 2, hourly: 0, daily: 0 },
        is_complete: false,
        is_removed: false,
    };
    let mut keeper = Keeper::new(config, store.to_owned(), Book::open(data).unwrap());
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
