//! Tests of the folder of residencies: what a restart finds there, and what is deleted.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use chronicle::{
    BlockRange, BlockSize, Chronicle, Epoch, Generation, Kept, KeptReplica, LayeredBitmap, ReplicaOf, StayId,
};
use lane::{Keeper as _, NotDurable};
use migration::filling::{LogEntry, Telling};
use migration::journal::{ImageLocation, State};
use migration::{StayKey, VolumeId};

use super::{Chronicles, FOLDER, marks};

const KEY: StayKey = StayKey { volume: VolumeId([3; 16]), stay: StayId::Arrived(7) };
const LATER: StayKey = StayKey { stay: StayId::Arrived(9), ..KEY };
const SIZE: u64 = 256 << 20;

fn wait(done: lane::LaneFuture<Result<(), NotDurable>>) -> Result<(), NotDurable> {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(done)
}

/// Returns the recorded form of a chronicle in epoch 5 to which a copy refers.
fn kept() -> Kept {
    let mut chronicle = Chronicle::new(BlockSize::DEFAULT, SIZE, Epoch(4));
    let _ = chronicle.record(7 << 16, 1);
    chronicle.advance();
    let missing = LayeredBitmap::new(chronicle.blocks());
    let replica = KeptReplica { generation: Generation(2), as_of: Epoch(3), missing };
    chronicle.keep(Epoch(3), [(ReplicaOf::Migration(1), replica)].into())
}

/// Makes a data folder, and the image of a volume.
fn scene() -> (tempfile::TempDir, Chronicles, ImageLocation) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.img");
    std::fs::write(&path, b"content").unwrap();
    let chronicles = Chronicles::open(folder.path()).unwrap();
    (folder, chronicles, ImageLocation::raw_file("s", path.to_str().unwrap()))
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder.join(FOLDER))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Writes to the image behind the daemon's back.
fn touch(image: &ImageLocation) {
    let path = Path::new(image.place.name());
    let before = super::look(image);
    // The clock of a file system may stand still for some milliseconds.
    while super::look(image) == before {
        std::fs::write(path, b"CONTENT").unwrap();
    }
}

#[test]
fn marks_later_than_what_was_kept_are_found_after_a_restart() {
    let (folder, chronicles, image) = scene();
    assert_eq!(chronicles.open_stay(KEY, &image).unwrap(), None);
    wait(chronicles.keep(KEY, kept())).unwrap();
    wait(chronicles.mark(KEY, Epoch(5), vec![BlockRange::new(16, 32)])).unwrap();
    wait(chronicles.mark(KEY, Epoch(5), vec![BlockRange::new(48, 64), BlockRange::new(20, 40)])).unwrap();
    wait(chronicles.mark(KEY, Epoch(6), vec![BlockRange::new(0, 1)])).unwrap();
    drop(chronicles);

    let chronicles = Chronicles::open(folder.path()).unwrap();
    let found = chronicles.open_stay(KEY, &image).unwrap().unwrap();
    let marked: Vec<_> =
        found.epochs.iter().map(|(epoch, set)| (epoch.0, set.runs().collect::<Vec<_>>())).collect();
    let expected = [
        (4, vec![BlockRange::new(112, 113)]),
        // A bit stands for 16 blocks.
        (5, vec![BlockRange::new(16, 64)]),
        (6, vec![BlockRange::new(0, 16)]),
    ];
    assert_eq!(marked, expected);
    assert_eq!(found.replicas, kept().replicas);
}

#[test]
fn a_chronicle_and_marks_of_another_version_are_named_and_not_believed() {
    // The last byte of a header is the version.
    for name in [format!("{KEY}.kept"), format!("{KEY}.5.marks")] {
        let (folder, chronicles, image) = scene();
        chronicles.open_stay(KEY, &image).unwrap();
        wait(chronicles.keep(KEY, kept())).unwrap();
        wait(chronicles.mark(KEY, Epoch(5), vec![BlockRange::new(0, 16)])).unwrap();
        let path = folder.path().join(FOLDER).join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[7] += 1;
        std::fs::write(&path, bytes).unwrap();
        let refused = chronicles.files.kept(KEY).unwrap_err().to_string();
        assert!(refused.contains("version"), "{refused}");
        assert_eq!(chronicles.open_stay(KEY, &image).unwrap(), None, "every copy lacks everything");
    }
}

#[test]
fn what_is_kept_supersedes_older_marks_and_forgetting_leaves_nothing() {
    let (folder, chronicles, _) = scene();
    for epoch in [3, 4, 5] {
        wait(chronicles.mark(KEY, Epoch(epoch), vec![BlockRange::new(0, 16)])).unwrap();
    }
    wait(chronicles.keep(KEY, kept())).unwrap();
    assert_eq!(files(folder.path()), [format!("{KEY}.5.marks"), format!("{KEY}.kept")]);
    wait(chronicles.forget(KEY, Epoch(5))).unwrap();
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn a_damaged_chronicle_counts_as_none_and_goes() {
    let (folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    wait(chronicles.keep(KEY, kept())).unwrap();
    let path = folder.path().join(FOLDER).join(format!("{KEY}.kept"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(chronicles.open_stay(KEY, &image).unwrap(), None);
    assert_eq!(files(folder.path()), [format!("{KEY}.image")]);
}

#[test]
fn nothing_of_another_stay_is_read_and_all_of_it_goes() {
    let (folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    wait(chronicles.keep(KEY, kept())).unwrap();
    wait(chronicles.mark(KEY, Epoch(5), vec![BlockRange::new(0, 16)])).unwrap();
    // Also other files with the name of this residency, and files whose names have no residency.
    let names = [format!("{LATER}.kept"), format!("{}.kept", KEY.volume), format!("{}.5.marks", KEY.volume)];
    for name in names {
        std::fs::copy(
            folder.path().join(FOLDER).join(format!("{KEY}.kept")),
            folder.path().join(FOLDER).join(name),
        )
        .unwrap();
    }
    assert_eq!(chronicles.open_stay(LATER, &image).unwrap(), None);
    assert_eq!(files(folder.path()), [format!("{LATER}.image")]);
    // The same epoch of the later residency is another file, although the former residency's was written to.
    wait(chronicles.keep(LATER, kept())).unwrap();
    wait(chronicles.mark(LATER, Epoch(5), vec![BlockRange::new(0, 16)])).unwrap();
    let found = chronicles.open_stay(LATER, &image).unwrap().unwrap();
    assert!(found.epochs.iter().any(|(epoch, set)| epoch.0 == 5 && set.count() == 16));
}

#[test]
fn what_no_journal_knows_is_swept_away() {
    let (folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    wait(chronicles.keep(KEY, kept())).unwrap();
    std::fs::write(folder.path().join(FOLDER).join("litter.new"), b"").unwrap();
    chronicles.sweep(&State::default());
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn an_image_that_was_changed_while_it_was_closed_makes_every_copy_unknown() {
    for touched in [false, true] {
        let (folder, chronicles, image) = scene();
        chronicles.open_stay(KEY, &image).unwrap();
        wait(chronicles.keep(KEY, kept())).unwrap();
        touch(&image);
        chronicles.close_image(KEY, &image);
        if touched {
            touch(&image);
        }
        assert_eq!(chronicles.open_stay(KEY, &image).unwrap().is_some(), !touched);
        let is_kept = files(folder.path()).contains(&format!("{KEY}.kept"));
        assert_eq!(is_kept, !touched, "nothing vouches for it later");
    }
}

#[test]
fn an_image_that_was_changed_after_its_daemon_was_killed_makes_every_copy_unknown() {
    for (after_seconds, is_known) in [(1, true), (60, false)] {
        let (folder, chronicles, image) = scene();
        chronicles.open_stay(KEY, &image).unwrap();
        wait(chronicles.keep(KEY, kept())).unwrap();
        drop(chronicles);
        touch(&image);
        let image_file = std::fs::File::options().write(true).open(image.place.name()).unwrap();
        image_file.set_modified(std::time::SystemTime::now() + Duration::from_secs(after_seconds)).unwrap();
        let chronicles = Chronicles::open(folder.path()).unwrap();
        assert_eq!(chronicles.open_stay(KEY, &image).unwrap().is_some(), is_known, "{after_seconds} s");
        assert_eq!(chronicles.open_stay(KEY, &image).unwrap().is_some(), is_known, "the present run has it");
    }
}

#[test]
fn how_an_image_looks_that_could_not_be_recorded_is_not_trusted() {
    let (folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    wait(chronicles.keep(KEY, kept())).unwrap();
    // A file cannot be made here, as in a full folder.
    let blocked = folder.path().join(FOLDER).join(format!("{KEY}.image.new"));
    std::fs::create_dir(&blocked).unwrap();
    chronicles.close_image(KEY, &image);
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(chronicles.open_stay(KEY, &image).unwrap(), None);
}

#[test]
fn that_a_flush_has_failed_is_remembered_in_a_full_folder_too() {
    let (folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    assert!(chronicles.vouches(KEY));
    // A file cannot be made here, as in a full folder.
    let blocked = folder.path().join(FOLDER).join(format!("{KEY}.image.new"));
    std::fs::create_dir(&blocked).unwrap();
    wait(chronicles.doubt(KEY)).unwrap();
    chronicles.close_image(KEY, &image);
    std::fs::remove_dir(&blocked).unwrap();
    chronicles.open_stay(KEY, &image).unwrap();
    assert!(!chronicles.vouches(KEY), "a restart makes nothing of it good");
}

#[test]
fn a_chronicle_and_the_record_of_an_image_that_are_written_at_once_are_both_whole() {
    let (_folder, chronicles, image) = scene();
    chronicles.open_stay(KEY, &image).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..50).for_each(|_| chronicles.note_image(KEY, &image)));
        }
        (0..50).for_each(|_| wait(chronicles.keep(KEY, kept())).unwrap());
        wait(chronicles.doubt(KEY)).unwrap();
    });
    assert_eq!(chronicles.files.kept(KEY).unwrap(), Some(kept()));
    assert!(!chronicles.vouches(KEY), "a failed flush is not forgotten");
}

#[test]
fn a_marks_file_that_was_cut_off_while_it_was_made_holds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("marks");
    std::fs::write(&path, b"STERNAM").unwrap();
    assert_eq!(marks::read(&path).unwrap(), []);
    marks::MarksFile::open(&path).unwrap().mark(&[BlockRange::new(9, 11)]).unwrap();
    assert_eq!(marks::read(&path).unwrap(), [BlockRange::new(0, 16)]);
}

#[test]
fn what_was_noted_is_not_believed_of_a_store_that_starts_alone() {
    use migration::filling::UNIT_BYTES;
    use migration::journal::Place;
    let (_folder, chronicles, image) = scene();
    let size = 16 * UNIT_BYTES;
    let entry = LogEntry::Missing { telling: Telling::Everything, runs: vec![BlockRange::new(0, 16)] };
    wait(chronicles.begin_presence(KEY, size, entry)).unwrap();
    wait(chronicles.note_presence(KEY, size, vec![BlockRange::new(2, 5)])).unwrap();
    let present = LogEntry::Present { runs: vec![BlockRange::new(8, 9)] };
    wait(chronicles.add_presence(KEY, size, present)).unwrap();
    let missing = |place: &Place| chronicles.missing(KEY, size, place).unwrap().missing.count();
    assert_eq!(missing(&image.place), 12, "noted and recorded");
    assert_eq!(missing(&Place::Nbd("nbd://far/v".to_owned())), 15, "recorded");
    assert_eq!(missing(&Place::Device("/dev/there-is-none".to_owned())), 15);
}

#[test]
fn a_file_of_presence_that_is_found_is_written_anew_before_it_is_added_to() {
    let (folder, chronicles, image) = scene();
    let present = |unit| LogEntry::Present { runs: vec![BlockRange::new(unit, unit + 1)] };
    let runs = vec![BlockRange::new(0, 9)];
    let missing = LogEntry::Missing { telling: Telling::Everything, runs };
    wait(chronicles.begin_presence(KEY, SIZE, missing)).unwrap();
    wait(chronicles.add_presence(KEY, SIZE, present(1))).unwrap();
    let which =
        || std::fs::metadata(folder.path().join(FOLDER).join(format!("{KEY}.presence"))).unwrap().ino();
    let before = which();
    // N.B. data of a failed sync also reads like this: it may be in memory only.
    drop(chronicles);
    let again = Chronicles::open(folder.path()).unwrap();
    wait(again.add_presence(KEY, SIZE, present(2))).unwrap();
    assert_ne!(which(), before);
    wait(again.add_presence(KEY, SIZE, present(3))).unwrap();
    assert_eq!(again.missing(KEY, SIZE, &image.place).unwrap().missing.count(), 6);
}

#[test]
fn records_of_missing_units_take_no_more_space_than_was_reserved() {
    let (folder, chronicles, image) = scene();
    chronicles.reserve_presence(KEY, SIZE).unwrap();
    let space = || {
        let entries = std::fs::read_dir(folder.path().join(FOLDER)).unwrap();
        entries.map(|entry| entry.unwrap().metadata().unwrap().blocks()).sum::<u64>()
    };
    let reserved = space();
    assert!(reserved > 0);
    let runs = vec![BlockRange::new(0, 60_000)];
    wait(chronicles.begin_presence(KEY, SIZE, LogEntry::Missing { telling: Telling::Everything, runs }))
        .unwrap();
    let which =
        || std::fs::metadata(folder.path().join(FOLDER).join(format!("{KEY}.presence"))).unwrap().ino();
    let (first, mut anew) = (which(), false);
    for unit in 0..4000 {
        wait(chronicles.note_presence(KEY, SIZE, vec![BlockRange::new(unit * 7, unit * 7 + 1)])).unwrap();
        anew |= which() != first;
    }
    assert!(anew, "it was never written anew");
    assert_eq!(space(), reserved);
    assert_eq!(chronicles.missing(KEY, SIZE, &image.place).unwrap().missing.count(), 56_000);
    wait(chronicles.forget_presence(KEY)).unwrap();
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn what_cannot_be_reserved_leaves_nothing() {
    let (folder, chronicles, _) = scene();
    assert!(chronicles.reserve_presence(KEY, 1 << 62).is_err());
    assert_eq!(files(folder.path()), [""; 0]);
}
