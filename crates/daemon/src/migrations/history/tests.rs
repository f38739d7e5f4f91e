//! Tests of histories: limited in number and size, and harmless when they are lost.

use std::time::Duration;

use lane::{Recorded, Sample, Window};
use migration::strategy::Tally;
use migration::{MigrationId, Phase};

use super::file::Folder;
use super::recording::{Facts, Recording};

const STARTED: u64 = 1_700_000_000_000;

fn facts() -> Facts {
    Facts {
        started_unix_ms: STARTED,
        size_bytes: 1 << 30,
        bandwidth_bytes_per_second: None,
        mirror_wait_max: Duration::from_secs(1),
        strategy: api::Strategy::Tracking,
    }
}

fn sample(began_ms: i64, length_ms: u64, suspended: Option<&'static str>) -> Sample {
    Sample {
        began_us: began_ms * 1000,
        guest: Window { length: Duration::from_millis(length_ms), reads: length_ms, ..Window::default() },
        bytes_copied: if suspended.is_none() { 1000 } else { 0 },
        bytes_mirrored: 0,
        bytes_zero: 0,
        bytes_missing: None,
        waits_for: Some("the target"),
        suspended,
    }
}

fn piece(samples: Vec<Sample>, phases: Vec<(i64, Phase)>) -> Recorded {
    Recorded { samples, phases, tally: Tally { writes_held: 7, ..Tally::default() }, rounds: Vec::new() }
}

/// Returns a recording of `count` samples of 100 ms while the migration ran, with a second before and one after.
fn recording(count: i64) -> Recording {
    let mut recording = Recording::new(facts());
    recording.add(piece((-10..0).map(|index| sample(index * 100, 100, None)).collect(), Vec::new()));
    for index in 0..count {
        let suspended = (index == 2 || index == 3).then_some("the target's store answered with an error");
        recording
            .add(piece(vec![sample(index * 100, 100, suspended)], vec![(index * 100_000, Phase::Copying)]));
    }
    recording.add(piece(vec![sample(count * 100, 3, None)], vec![(count * 100_000, Phase::Closing)]));
    recording.end();
    recording.add(piece(
        (0..10).map(|index| sample(count * 100 + 3 + index * 100, 100, None)).collect(),
        Vec::new(),
    ));
    recording
}

#[test]
fn a_long_migration_has_longer_samples_and_not_more_and_loses_nothing() {
    for count in [5, 599, 600, 601, 5000, 50_000] {
        let shown = recording(count).describe();
        assert!(shown.samples.len() <= 621, "{count}: {}", shown.samples.len());
        let copied: u64 = shown.samples.iter().map(|sample| sample.bytes_copied).sum();
        assert_eq!(copied, 1000 * (count as u64 + 19));
        let mut end = -1000.0;
        for sample in &shown.samples {
            assert_eq!(sample.at_ms, end);
            end += sample.length_ms;
        }
        assert_eq!(shown.ended_ms, Some(count as f64 * 100.0 + 3.0));
        let during = shown.during.unwrap();
        assert!((during.seconds - (count as f64 / 10.0 + 0.003)).abs() < 1e-6);
        assert!((during.iops - 1000.0).abs() < 1e-6);
    }
}

#[test]
fn phases_suspensions_waits_and_decisions_are_shown() {
    let shown = recording(20).describe();
    let phases: Vec<_> = shown.phases.iter().map(|entered| (entered.at_ms, entered.phase)).collect();
    assert_eq!(phases, [(0.0, api::Phase::Copying), (2000.0, api::Phase::Closing)]);
    assert_eq!(shown.suspensions.len(), 1);
    assert_eq!((shown.suspensions[0].at_ms, shown.suspensions[0].ended_ms), (200.0, Some(400.0)));
    assert_eq!((shown.waits.len(), shown.waits[0].total_ms), (1, 200.0));
    assert_eq!(shown.decisions.writes_held, 7);
}

#[test]
fn files_are_found_again_and_the_oldest_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let histories = Folder::new(folder.path().join("history"));
    let written = recording(3).describe();
    for number in 0..120 {
        histories.write(MigrationId(number), STARTED, &written);
    }
    let read = histories.read(MigrationId(119), STARTED).unwrap();
    assert_eq!((read.samples, read.phases), (written.samples, written.phases));
    assert_eq!(histories.read(MigrationId(119), STARTED + 1), None, "another journal's migration");
    assert_eq!(histories.read(MigrationId(19), STARTED), None);
    assert_eq!(std::fs::read_dir(folder.path().join("history")).unwrap().count(), 100);
}

#[test]
fn a_file_that_is_damaged_huge_or_unwritable_is_no_history_and_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let histories = Folder::new(folder.path().to_owned());
    std::fs::write(folder.path().join("m1.json"), b"{\"format\":1").unwrap();
    std::fs::write(folder.path().join("m2.json"), vec![b' '; 5 << 20]).unwrap();
    assert_eq!(histories.read(MigrationId(1), STARTED), None);
    assert_eq!(histories.read(MigrationId(2), STARTED), None);
    // A file has the folder's name.
    let blocked = Folder::new(folder.path().join("m1.json"));
    blocked.write(MigrationId(3), STARTED, &recording(1).describe());
    assert_eq!(blocked.read(MigrationId(3), STARTED), None);
}
