//! Tests of the files of a standby.

use chronicle::Epoch;
use standby::{LifeId, StandbyId};

use super::*;

fn at(epoch: u64) -> Watermark {
    Watermark { standby: StandbyId(1), life: LifeId(2), epoch: Epoch(epoch) }
}

fn files(store: &Path) -> Files {
    Files::open(store, "s", &[BlockCount(16), BlockCount(8)], true, &[], &[]).unwrap()
}

fn block(value: u8) -> Vec<u8> {
    vec![value; BLOCK_BYTES as usize]
}

/// Writes an epoch that sets one block of the first volume, by way of the spool.
fn epoch(files: &mut Files, number: u64, index: u64, value: u8) {
    files.spool(VolumeIndex(0), BlockRange::new(index, index + 1), Some(&block(value))).unwrap();
    files.seal_spool(at(number)).unwrap();
    let sizes = vec![BlockCount(16), BlockCount(8)];
    let sealed = Sealed { watermark: at(number), blocks: 1, sizes, as_of_ms: 0 };
    assert_eq!(files.apply(&sealed).unwrap(), Room::Enough);
    files.flush().unwrap();
    files.unlink_spool(at(number)).unwrap();
}

fn first_blocks(files: &Files) -> Vec<u8> {
    let mut bytes = vec![0; 3 * BLOCK_BYTES as usize];
    files.images[0].read_exact_at(&mut bytes, 0).unwrap();
    bytes.chunks(BLOCK_BYTES as usize).map(|block| block[0]).collect()
}

#[test]
fn a_point_of_before_a_volume_grew_has_zeroes_where_it_grew() {
    let store = tempfile::tempdir().unwrap();
    let mut files = files(store.path());
    epoch(&mut files, 1, 0, 1);
    files.keep_point(at(1), KeptBy::Undo).unwrap();
    files.grow(&[BlockCount(32), BlockCount(8)]).unwrap();
    files.spool(VolumeIndex(0), BlockRange::new(15, 18), Some(&[7; 3 * BLOCK_BYTES as usize])).unwrap();
    files.seal_spool(at(2)).unwrap();
    let sizes = vec![BlockCount(32), BlockCount(8)];
    files.apply(&Sealed { watermark: at(2), blocks: 3, sizes, as_of_ms: 0 }).unwrap();
    files.restore_point(at(1)).unwrap();
    let mut bytes = vec![1; 4 * BLOCK_BYTES as usize];
    files.images[0].read_exact_at(&mut bytes, 14 * BLOCK_BYTES).unwrap();
    assert!(block::buffer::is_zero(&bytes), "something of the later epoch is left");
}

#[test]
fn any_point_comes_back_by_undo_also_when_one_between_was_dropped() {
    let store = tempfile::tempdir().unwrap();
    let mut files = files(store.path());
    epoch(&mut files, 1, 0, 1);
    for number in 2..6 {
        files.keep_point(at(number - 1), KeptBy::Undo).unwrap();
        epoch(&mut files, number, number % 3, number as u8);
    }
    assert_eq!(first_blocks(&files), [3, 4, 5]);
    let kept = |numbers: &[u64]| -> Vec<Point> {
        let point =
            |number: &u64| Point { watermark: at(*number), kept_by: KeptBy::Undo, blocks: 1, as_of_ms: 0 };
        numbers.iter().map(point).collect()
    };
    files.prepare_to_drop(&kept(&[1, 2, 4])).unwrap();
    let points = kept(&[1, 2, 4]);
    // A start deletes what is dropped: the daemon was killed before it could.
    drop(files);
    let sizes = [BlockCount(16), BlockCount(8)];
    let mut again = Files::open(store.path(), "s", &sizes, false, &points, &[]).unwrap();
    again.restore_point(at(4)).unwrap();
    assert_eq!(first_blocks(&again), [3, 4, 2]);
    again.restore_point(at(2)).unwrap();
    assert_eq!(first_blocks(&again), [1, 0, 2]);
    again.restore_point(at(1)).unwrap();
    assert_eq!(first_blocks(&again), [1, 0, 0]);
}

#[test]
fn an_image_that_is_gone_is_not_made_anew() {
    let store = tempfile::tempdir().unwrap();
    let first = files(store.path());
    first.folder.remove("image-1").unwrap();
    drop(first);
    let sizes = [BlockCount(16), BlockCount(8)];
    let error = Files::open(store.path(), "s", &sizes, false, &[], &[]).err().unwrap();
    assert!(error.to_string().contains("is the disk of the store mounted?"), "{error}");
}

#[test]
fn a_start_deletes_what_no_record_names() {
    let store = tempfile::tempdir().unwrap();
    let mut first = files(store.path());
    epoch(&mut first, 1, 0, 1);
    first.keep_point(at(1), KeptBy::Undo).unwrap();
    first.spool(VolumeIndex(0), BlockRange::new(1, 2), Some(&block(9))).unwrap();
    drop(first);
    let again = files(store.path());
    assert_eq!(again.folder.names().unwrap().len(), 2);
    assert_eq!(first_blocks(&again), [1, 0, 0]);
}
