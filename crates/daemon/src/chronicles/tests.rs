//! The folder of chronicles: what a restart finds there, and what goes.

use std::path::Path;

use chronicle::{BlockRange, BlockSize, Chronicle, Epoch, Generation, KeptReplica, LayeredBitmap, ReplicaOf};
use lane::{Keeper as _, NotDurable};
use migration::VolumeId;

use super::{Chronicles, FOLDER, marks};

const VOLUME: VolumeId = VolumeId([3; 16]);
const SIZE: u64 = 256 << 20;

fn wait(done: lane::LaneFuture<Result<(), NotDurable>>) -> Result<(), NotDurable> {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(done)
}

/// A chronicle in epoch 5 that a copy refers to, as it is kept.
fn kept() -> chronicle::Kept {
    let mut chronicle = Chronicle::new(BlockSize::DEFAULT, SIZE, Epoch(4));
    let _ = chronicle.record(7 << 16, 1);
    chronicle.advance();
    let missing = LayeredBitmap::new(chronicle.blocks());
    let replica = KeptReplica { generation: Generation(2), as_of: Epoch(3), missing };
    chronicle.keep(Epoch(3), [(ReplicaOf::Migration(1), replica)].into())
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder.join(FOLDER))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn marks_later_than_what_was_kept_are_found_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let chronicles = Chronicles::open(folder.path()).unwrap();
    assert_eq!(chronicles.load(VOLUME).unwrap(), None);
    wait(chronicles.keep(VOLUME, kept())).unwrap();
    wait(chronicles.mark(VOLUME, Epoch(5), vec![BlockRange::new(16, 32)])).unwrap();
    wait(chronicles.mark(VOLUME, Epoch(5), vec![BlockRange::new(48, 64), BlockRange::new(20, 40)])).unwrap();
    wait(chronicles.mark(VOLUME, Epoch(6), vec![BlockRange::new(0, 1)])).unwrap();
    drop(chronicles);

    let chronicles = Chronicles::open(folder.path()).unwrap();
    let found = chronicles.load(VOLUME).unwrap().unwrap();
    let marked: Vec<_> =
        found.epochs.iter().map(|(epoch, set)| (epoch.0, set.runs().collect::<Vec<_>>())).collect();
    let expected = [
        (4, vec![BlockRange::new(7, 8)]),
        (5, vec![BlockRange::new(16, 40), BlockRange::new(48, 64)]),
        (6, vec![BlockRange::new(0, 1)]),
    ];
    assert_eq!(marked, expected);
    assert_eq!(found.replicas, kept().replicas);
}

#[test]
fn what_is_kept_supersedes_older_marks_and_forgetting_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let chronicles = Chronicles::open(folder.path()).unwrap();
    for epoch in [3, 4, 5] {
        wait(chronicles.mark(VOLUME, Epoch(epoch), vec![BlockRange::new(0, 16)])).unwrap();
    }
    wait(chronicles.keep(VOLUME, kept())).unwrap();
    assert_eq!(files(folder.path()), [format!("{VOLUME}.5.marks"), format!("{VOLUME}.kept")]);
    wait(chronicles.forget(VOLUME, Epoch(5))).unwrap();
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn a_damaged_chronicle_counts_as_none_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    let chronicles = Chronicles::open(folder.path()).unwrap();
    wait(chronicles.keep(VOLUME, kept())).unwrap();
    let path = folder.path().join(FOLDER).join(format!("{VOLUME}.kept"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(chronicles.load(VOLUME).unwrap(), None);
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn a_marks_file_that_was_cut_off_while_it_was_made_holds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("marks");
    std::fs::write(&path, b"STERNAM").unwrap();
    assert_eq!(marks::read(&path).unwrap(), []);
    marks::MarksFile::open(&path).unwrap().mark(&[BlockRange::new(9, 11)]).unwrap();
    assert_eq!(marks::read(&path).unwrap(), [BlockRange::new(9, 11)]);
}
