//! Tests of migrations' descriptions, and of when watchers are notified.

use std::sync::Arc;
use std::time::Duration;

use api::{GuestLocation, MigrationState};
use chronicle::Generation;
use lane::Report;
use migration::journal::{
    ExportSettings, FailureCode, ImageLocation, MigratingVolume, Outcome, Record, Side, Summary, VolumeRecord,
};
use migration::strategy::Tally;
use migration::{MigrationId, Phase, Progress, VolumeId, Waiting};

use super::{Migrations, parse_id};
use crate::files::lock::FolderLock;
use crate::journal::Journal;

const VOLUME: VolumeId = VolumeId([3; 16]);
const MIGRATION: MigrationId = MigrationId(4);

struct Scene {
    _folder: tempfile::TempDir,
    journal: Journal,
    migrations: Arc<Migrations>,
}

async fn scene() -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::open(folder.path(), FolderLock::acquire(folder.path()).unwrap()).unwrap();
    let image = |store: &str| ImageLocation::raw_file(store, format!("/{store}/v.img"));
    let volume = VolumeRecord {
        volume: VOLUME,
        name: "v".into(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: image(""),
        generation: Generation(0),
        export: ExportSettings::default(),
    };
    let volumes = vec![MigratingVolume { volume: VOLUME, source: image(""), target: image("b") }];
    let started =
        Record::MigrationStarted { migration: MIGRATION, volumes, keep_source: true, side: Side::OneHost };
    journal.commit(vec![Record::VolumeAdded(volume), started]).await.unwrap();
    let migrations = Arc::<Migrations>::default();
    migrations.track(MIGRATION, vec![VOLUME]);
    Scene { _folder: folder, journal, migrations }
}

fn progress() -> Progress {
    Progress {
        phase: Phase::Closing,
        bytes_synchronised: 3,
        bytes_missing: Some(131_072),
        fraction: 0.5,
        bytes_copied: 100,
        bytes_mirrored: 20,
        bytes_zero: 3,
        bytes_cloned: 0,
        copy_bytes_per_second: 7.0,
        remaining: Some((Duration::from_secs(1), Duration::from_secs(3))),
        waiting: Some(Waiting {
            reason: "the requests in flight",
            remaining: Some(Duration::from_millis(500)),
        }),
        suspended: None,
        attempt: 2,
        tally: Tally::default(),
        rounds: Vec::new(),
        paced: None,
        limited_by: None,
        hurry: None,
    }
}

#[tokio::test]
async fn running_migration_is_shown_as_the_lane_reports_it() {
    let scene = scene().await;
    assert_eq!(scene.migrations.running_of(VOLUME), Some(MIGRATION));
    scene.migrations.report(Report::Progress { migration: MIGRATION, progress: progress() });
    let shown = scene.migrations.get(&scene.journal, MIGRATION).unwrap();
    assert_eq!((shown.id.as_str(), shown.volume.as_str()), ("m4", "v"));
    assert_eq!((shown.source.store, shown.target.store), (None, Some("b".into())));
    assert_eq!((shown.state, shown.phase), (MigrationState::Running, api::Phase::Closing));
    assert_eq!((shown.bytes_copied, shown.bytes_moved, shown.bytes_missing), (100, 120, Some(131_072)));
    let waiting = shown.waiting_for.unwrap();
    assert_eq!((waiting.reason.as_str(), waiting.remaining_ms), ("the requests in flight", Some(500)));
    assert_eq!(shown.guest, GuestLocation::Source);
}

#[tokio::test]
async fn failure_says_why_and_where_the_guest_is() {
    let scene = scene().await;
    scene.migrations.report(Report::Progress { migration: MIGRATION, progress: progress() });
    let outcome = Outcome::Failed { code: FailureCode::TargetFull, detail: "no space in store b".into() };
    let summary = Summary { total_us: 2_500_000, bytes_copied: 300, ..Summary::default() };
    let ended = Record::MigrationEnded { migration: MIGRATION, outcome: outcome.clone(), summary };
    scene.journal.commit(vec![ended]).await.unwrap();
    scene.migrations.report(Report::Ended { migration: MIGRATION, outcome, summary });
    let shown = scene.migrations.get(&scene.journal, MIGRATION).unwrap();
    assert_eq!((shown.state, shown.guest), (MigrationState::Failed, GuestLocation::Source));
    assert_eq!(shown.failure.as_deref(), Some("target-full"));
    let advice = "the store b is full: make room there, then run: sterna migration retry m4";
    assert_eq!(shown.message.as_deref(), Some(advice));
    assert_eq!((shown.bytes_copied, shown.seconds, shown.fraction), (300, 2.5, 0.5));
    assert!(shown.waiting_for.is_none() && shown.switch_over.is_none());
    assert_eq!(scene.migrations.running_of(VOLUME), None);
}

#[tokio::test]
async fn watching_waits_for_a_change_and_not_longer_than_asked() {
    let scene = scene().await;
    let watch = |after, milliseconds| {
        scene.migrations.watch(&scene.journal, MIGRATION, after, Duration::from_millis(milliseconds))
    };
    let first = watch(0, 60_000).await.unwrap();
    assert_eq!(watch(first.change, 1).await.unwrap().change, first.change);
    let report = async {
        scene.migrations.report(Report::Progress { migration: MIGRATION, progress: progress() });
    };
    let (changed, ()) = tokio::join!(watch(first.change, 60_000), report);
    assert!(changed.unwrap().change > first.change);
    // No report may follow the end of a migration.
    scene.migrations.report(Report::Ended {
        migration: MIGRATION,
        outcome: Outcome::Cancelled,
        summary: Summary::default(),
    });
    assert_eq!(watch(1000, 60_000).await.unwrap().state, MigrationState::Cancelled);
}

#[tokio::test]
async fn who_waits_for_the_end_finds_what_goes_with_it_settled() {
    let scene = scene().await;
    let settling = scene.migrations.settle(MIGRATION);
    let outcome = Outcome::Moved { left_over: String::new() };
    scene.migrations.report(Report::Ended { migration: MIGRATION, outcome, summary: Summary::default() });
    // The settling task learns of the end. A watcher does not yet, and gets no repeated answers meanwhile.
    assert!(scene.migrations.outcome(MIGRATION).await.is_some());
    let shown = scene.migrations.get(&scene.journal, MIGRATION).unwrap();
    assert_eq!((shown.state, shown.phase), (MigrationState::Running, api::Phase::Retiring));
    let watch = scene.migrations.watch(&scene.journal, MIGRATION, shown.change, Duration::from_secs(60));
    let settled = async { drop(settling) };
    let (ended, ()) = tokio::join!(watch, settled);
    let ended = ended.unwrap();
    assert!(ended.state == MigrationState::Moved && ended.change > shown.change, "{ended:?}");
}

#[tokio::test]
async fn parts_of_the_switch_over_add_up() {
    let scene = scene().await;
    let summary = Summary {
        total_us: 1,
        gate_closed_us: 1500,
        drain_us: 100,
        prepare_us: 700,
        release_us: 300,
        own_us: 250,
        start_us: 150,
        ..Summary::default()
    };
    let outcome = Outcome::Moved { left_over: String::new() };
    scene.migrations.report(Report::Ended { migration: MIGRATION, outcome, summary });
    let parts = scene.migrations.get(&scene.journal, MIGRATION).unwrap().switch_over.unwrap();
    let sum = parts.drain_ms + parts.prepare_ms + parts.release_ms + parts.own_ms + parts.start_ms;
    assert!((sum - parts.gate_closed_ms).abs() < 1e-9 && parts.gate_closed_ms == 1.5);
}

#[test]
fn identities_are_read_as_they_are_written() {
    assert_eq!(parse_id("m12").unwrap(), MigrationId(12));
    for text in ["", "m", "12", "m-1", "m+1", "m012", "M12", "m99999999999999999999", "m1 "] {
        assert!(parse_id(text).is_err(), "{text}");
    }
}
