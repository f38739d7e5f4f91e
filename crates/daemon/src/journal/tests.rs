//! Tests of the journal's promises: a commit is durable, not durable, or reported as unknown; torn ends
//! are dropped, damage is refused.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, RwLock};

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, HEADER, HEADER_BYTES, ImageLocation, MigratingVolume, Outcome, Record, Side,
    Stage, State, Summary, VERSION, VolumeRecord, encode,
};
use migration::{Attempt, CommitFault, MigrationId, VolumeId};
use tokio::sync::oneshot;

use super::file::{self, COMPACT_BYTES, NextFrame, ReplaceFault, Storage};
use super::writer::{Request, Writer};
use super::{JOURNAL_FILE, Journal, JournalError};
use crate::error::with_causes;
use crate::files::lock::FolderLock;
use crate::files::whole_file::page_cache::Cached;

fn open(folder: &Path) -> Result<Journal, JournalError> {
    // A dropped journal releases its lock a moment later, when its thread has ended.
    let lock = loop {
        if let Ok(lock) = FolderLock::acquire(folder) {
            break lock;
        }
        std::thread::yield_now();
    };
    Journal::open(folder, lock)
}

fn volume(number: u8) -> VolumeId {
    VolumeId([number; 16])
}

fn image(name: &str) -> ImageLocation {
    ImageLocation::raw_file("store", format!("/store/{name}"))
}

fn added(number: u8) -> Record {
    Record::VolumeAdded(VolumeRecord {
        volume: volume(number),
        name: format!("volume-{number}"),
        size_bytes: 1 << 30,
        block_size_bytes: 65536,
        image: image("source"),
        generation: Generation(0),
        export: ExportSettings::default(),
    })
}

/// Returns the commits of a migration, each one entry.
fn migration_of(volume: VolumeId, number: u64) -> Vec<Record> {
    let migration = MigrationId(number);
    let attempt = Attempt(1);
    let generations = vec![(volume, Generation(1))];
    let volumes = vec![MigratingVolume { volume, source: image("source"), target: image("target") }];
    vec![
        Record::MigrationStarted { migration, volumes, keep_source: false, side: Side::OneHost },
        Record::TargetPrepared { migration, attempt },
        Record::Released { migration, attempt, generations: generations.clone() },
        Record::Owned { migration, attempt, generations },
        Record::MigrationEnded {
            migration,
            outcome: Outcome::Moved { left_over: String::new() },
            summary: Summary::default(),
        },
    ]
}

#[tokio::test]
async fn what_was_committed_is_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    journal.commit(vec![added(1), added(2)]).await.unwrap();
    for record in migration_of(volume(1), 0) {
        journal.commit(vec![record]).await.unwrap();
    }
    let before = journal.read(State::clone);
    assert_eq!(before.volumes[&volume(1)].record.image, image("target"));
    drop(journal);
    for _ in 0..3 {
        assert_eq!(open(folder.path()).unwrap().read(State::clone), before);
    }
}

#[tokio::test]
async fn commits_of_one_caller_are_applied_in_order_also_when_they_are_not_awaited() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    let mut commits = vec![journal.commit(vec![added(1)])];
    commits.extend(migration_of(volume(1), 0).into_iter().map(|record| journal.commit(vec![record])));
    for commit in commits {
        commit.await.unwrap();
    }
    assert!(journal.read(|state| state.unfinished().next().is_none()));
}

#[tokio::test]
async fn contradiction_is_refused_whole_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    journal.commit(vec![added(1)]).await.unwrap();
    let before = journal.read(State::clone);
    let mut records = migration_of(volume(1), 0);
    records.remove(1);
    // Released without the target's promise.
    assert_eq!(journal.commit(records).await, Err(CommitFault::NotWritten));
    assert_eq!(journal.read(State::clone), before);
    journal.commit(vec![added(2)]).await.unwrap();
    drop(journal);
    assert_eq!(open(folder.path()).unwrap().read(|state| state.volumes.len()), 2);
}

#[tokio::test]
async fn journal_is_compacted_and_says_the_same_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    journal.commit(vec![added(1)]).await.unwrap();
    let wide = Record::VolumeAdded(VolumeRecord {
        name: "x".repeat(COMPACT_BYTES / 3),
        volume: volume(2),
        size_bytes: 1,
        block_size_bytes: 4096,
        image: image("wide"),
        generation: Generation(0),
        export: ExportSettings::default(),
    });
    // More than a file's space in total, while a migration keeps it from being compacted.
    journal.commit(vec![migration_of(volume(1), 0).remove(0)]).await.unwrap();
    for _ in 0..20 {
        journal.commit(vec![wide.clone()]).await.unwrap();
        journal.commit(vec![Record::VolumeRemoved { volume: volume(2) }]).await.unwrap();
    }
    let before = journal.read(State::clone);
    drop(journal);
    assert_eq!(open(folder.path()).unwrap().read(State::clone), before);
    assert!(std::fs::metadata(folder.path().join(JOURNAL_FILE)).unwrap().len() < 4 << 20);
}

#[tokio::test]
async fn journal_that_cannot_be_compacted_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    journal.commit(vec![added(1)]).await.unwrap();
    drop(journal);
    // No new file can be made under the name of a folder.
    std::fs::create_dir(folder.path().join("journal.new")).unwrap();
    for number in 2..5 {
        let journal = open(folder.path()).unwrap();
        journal.commit(vec![added(number)]).await.unwrap();
    }
    assert_eq!(open(folder.path()).unwrap().read(|state| state.volumes.len()), 4);
    // A first journal cannot be made either.
    std::fs::remove_file(folder.path().join(JOURNAL_FILE)).unwrap();
    assert!(matches!(open(folder.path()), Err(JournalError::Io { operation: "written", .. })));
}

/// Returns a journal of a snapshot and these commits, followed by zeroes, and the end of each frame.
fn bytes_of(commits: &[Vec<Record>]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = HEADER.to_vec();
    let snapshot = vec![Record::Snapshot(Box::default())];
    let mut ends = Vec::new();
    for (sequence, records) in std::iter::once(&snapshot).chain(commits).enumerate() {
        let entry = Entry { at_unix_ms: 1, records: records.clone() };
        encode(sequence as u64, &entry, &mut bytes).unwrap();
        ends.push(bytes.len());
    }
    bytes.resize(bytes.len() + 4096, 0);
    (bytes, ends)
}

fn open_bytes(bytes: &[u8]) -> Result<State, JournalError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL_FILE);
    std::fs::write(&path, bytes).unwrap();
    let result = open(folder.path()).map(|journal| journal.read(State::clone));
    if result.is_err() {
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "a refused journal is left as it is");
    }
    result
}

#[test]
fn journal_torn_at_any_byte_of_the_last_frame_is_what_it_was_before_that_commit() {
    let (whole, ends) = bytes_of(&[vec![added(1)], vec![added(2)]]);
    let (start, end) = (ends[1], ends[2]);
    assert_eq!(open_bytes(&whole).unwrap().volumes.len(), 2);
    for torn in start..end {
        // The rest of the frame was not written, or lost its sectors, or the file ends there.
        let mut zeroes = whole.clone();
        zeroes[torn..end].fill(0);
        let mut wrong = whole.clone();
        wrong[torn] ^= 0x55;
        for (kind, bytes) in [("zeroes", &zeroes[..]), ("wrong", &wrong), ("short", &whole[..torn])] {
            // A frame may end in zeroes, and is complete without them.
            let is_whole = bytes.get(start..end) == Some(&whole[start..end]);
            let expected = if is_whole { 2 } else { 1 };
            assert_eq!(open_bytes(bytes).unwrap().volumes.len(), expected, "{kind} at {torn}");
        }
    }
}

#[test]
fn damage_before_acknowledged_records_is_refused_at_every_byte() {
    let (bytes, ends) = bytes_of(&[vec![added(1)], vec![added(2)], vec![added(3)]]);
    for position in ends[0]..ends[2] {
        let mut damaged = bytes.clone();
        damaged[position] ^= 0x55;
        let error = open_bytes(&damaged).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { .. }), "at {position}: {error}");
    }
}

#[test]
fn foreign_newer_and_empty_files_are_refused_and_left_alone() {
    let (bytes, ends) = bytes_of(&[]);
    let mut newer = bytes.clone();
    newer[HEADER_BYTES - 1] += 1;
    let refused = with_causes(&open_bytes(&newer).unwrap_err());
    assert!(refused.contains("nothing of it was changed: start the program that wrote it"), "{refused}");
    assert!(refused.contains(&format!("the journal has version {} of the format", VERSION + 1)), "{refused}");
    for foreign in [&b""[..], b"QFI\xfb", b"SQLite format 3\0 and so on", &[0; 8192]] {
        let error = open_bytes(foreign).unwrap_err();
        assert!(error.to_string().contains("is this the right data folder?"), "{error}");
    }
    // The first frame exists before the file has its name, so a file without it is damaged.
    let mut beheaded = bytes.clone();
    beheaded[HEADER_BYTES..ends[0]].fill(0);
    assert!(matches!(open_bytes(&beheaded), Err(JournalError::Codec { .. })));
    // A record that does not follow from the state.
    let (inconsistent, _) = bytes_of(&[vec![Record::VolumeRemoved { volume: volume(9) }]]);
    assert!(matches!(open_bytes(&inconsistent), Err(JournalError::Inconsistent { .. })));
}

#[test]
fn whole_frame_of_a_newer_program_is_not_taken_for_a_torn_one() {
    let (mut bytes, ends) = bytes_of(&[]);
    bytes.truncate(ends[0]);
    // An entry whose only record has the number of no variant: time 1, one record, variant 99.
    let payload = [1, 1, 99];
    let sequence = 1_u64.to_le_bytes();
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&sequence), &payload);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(&sequence);
    bytes.extend_from_slice(&payload);
    bytes.resize(bytes.len() + 4096, 0);
    assert!(matches!(open_bytes(&bytes), Err(JournalError::Newer { .. })));
}

/// A file in memory with chosen write failures.
#[derive(Clone, Default)]
struct Faulty {
    bytes: Rc<RefCell<Vec<u8>>>,
    /// Whether each of the next writes fails; afterwards all succeed.
    faults: Rc<RefCell<Vec<bool>>>,
}

impl Storage for Faulty {
    fn write_at(&self, position: usize, bytes: &[u8]) -> io::Result<()> {
        let fails = !self.faults.borrow().is_empty() && self.faults.borrow_mut().remove(0);
        // A failed write has written a part.
        let length = if fails { bytes.len() / 2 } else { bytes.len() };
        let mut file = self.bytes.borrow_mut();
        let end = file.len().max(position + length);
        file.resize(end, 0);
        file[position..position + length].copy_from_slice(&bytes[..length]);
        if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn capacity(&self) -> usize {
        1 << 20
    }

    fn replace(&self, _: &State) -> Result<(Self, NextFrame), ReplaceFault> {
        Err(ReplaceFault::Kept(io::ErrorKind::StorageFull.into()))
    }
}

/// Commits `added(1)`, … with these write failures; returns the answers, and the volumes that readers and a restart see.
fn check_faults(commits: u8, faults: &[bool]) -> (Vec<Result<(), CommitFault>>, usize, usize) {
    let (bytes, ends) = bytes_of(&[]);
    let storage =
        Faulty { bytes: Rc::new(RefCell::new(bytes)), faults: Rc::new(RefCell::new(faults.to_vec())) };
    let durable = Arc::new(RwLock::new(State::default()));
    let next = NextFrame { position: ends[0], sequence: 1 };
    let mut writer = Writer::over(storage.clone(), next, State::default(), Arc::clone(&durable));
    let answers = (1..=commits).map(|number| {
        let (reply, mut answer) = oneshot::channel();
        writer.write_group(vec![Request { records: vec![added(number)], reply }]);
        answer.try_recv().unwrap()
    });
    let answers = answers.collect();
    let restarted = open_bytes(&storage.bytes.borrow()).unwrap().volumes.len();
    let seen = durable.read().unwrap().volumes.len();
    (answers, seen, restarted)
}

#[test]
fn failed_write_that_could_be_wiped_out_was_not_written() {
    use CommitFault::NotWritten;
    assert_eq!(check_faults(2, &[true]), (vec![Err(NotWritten), Ok(())], 1, 1));
    assert_eq!(check_faults(3, &[false, true]), (vec![Ok(()), Err(NotWritten), Ok(())], 2, 2));
}

#[test]
fn failed_write_that_could_not_be_wiped_out_is_unknown_until_it_is() {
    use CommitFault::Unknown;
    let answers = vec![Ok(()), Err(Unknown), Ok(())];
    assert_eq!(check_faults(3, &[false, true, true]), (answers, 2, 2));
    // While the disk fails, every answer is unknown.
    let answers = vec![Ok(()), Err(Unknown), Err(Unknown), Err(Unknown), Ok(())];
    assert_eq!(check_faults(5, &[false, true, true, true, true]), (answers, 2, 2));
}

#[test]
fn a_commit_that_only_the_page_cache_has_is_durable_before_it_is_believed() {
    let mut bytes = HEADER.to_vec();
    let snapshot = vec![Record::Snapshot(Box::default()), added(1)];
    encode(0, &Entry { at_unix_ms: 1, records: snapshot }, &mut bytes).unwrap();
    let whole_before = bytes.len();
    for (sequence, record) in (1..).zip(migration_of(volume(1), 0).into_iter().take(3)) {
        encode(sequence, &Entry { at_unix_ms: 1, records: vec![record] }, &mut bytes).unwrap();
    }
    let path = Path::new(JOURNAL_FILE);
    // The daemon was killed after it had written *released*, and nothing of that has reached the disk.
    let left = Cached::new(&bytes, &bytes[..whole_before]);
    let believed = file::read(path, &left).unwrap().unwrap().state;
    let released = believed.migrations.values().any(|found| matches!(found.stage, Stage::Released(_)));
    assert!(released, "COMMIT may be sent now");
    let after_power_cut = file::fold(path, &left.durable.borrow()).unwrap().state;
    assert_eq!(after_power_cut, believed);

    let left = Cached { syncs: Err(io::ErrorKind::StorageFull.into()), ..Cached::new(&bytes, &[]) };
    assert!(file::read(path, &left).is_err(), "what cannot be made durable is not gone by");
}
