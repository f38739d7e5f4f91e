//! The demo against a fake daemon: its report, the faults that it finds, and that it cleans up.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

#[path = "support/fake_daemon.rs"]
mod fake_daemon;
#[expect(dead_code, reason = "shared with other tests")]
mod support;

use std::num::NonZeroU32;
use std::time::Duration;

use lab::demo::{DemoOptions, GuestKind, Progress, Report, run};
use lab::workload::GuestOptions;
use tempfile::TempDir;

use self::fake_daemon::Behaviour;

/// Runs a small demo, and checks that it cleans up.
async fn demo(behaviour: Behaviour) -> anyhow::Result<Report> {
    let (programs, parent) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let guest = GuestOptions { in_flight: NonZeroU32::new(4).unwrap(), ..GuestOptions::default() };
    let options = DemoOptions {
        program: fake_daemon::program(programs.path(), behaviour),
        parent: Some(parent.path().to_owned()),
        disk_bytes: 8 << 20,
        // Long enough for some requests of the guest.
        margin: Duration::from_millis(500),
        guest: GuestKind::Thread { block_bytes: 4096, fill_bytes: 4 << 20, options: guest },
        strategy: api::Strategy::Mirror,
    };
    let result = run(options, &mut Progress::silent()).await;
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "{behaviour:?} left something behind");
    result
}

#[tokio::test]
async fn a_good_migration_is_verified_and_reported() {
    let report = demo(Behaviour::Good).await.unwrap();
    assert!(report.figures.verified, "{report}");
    assert_eq!((report.figures.bytes_moved, report.figures.migration_seconds), (1234, 0.25));
    assert!(report.figures.iops_before > 0.0 && report.figures.iops_after > 0.0, "{report}");
    assert!(report.figures.longest_stall_ms > 0.0 && report.requests > 0);
    assert_eq!(report.gate_closed_ms, Some(0.5));
    assert!(report.history.as_ref().is_some_and(|history| history.migration.bytes_moved == 1234));
    assert!(report.to_string().contains("4 KiB, 70/30 random, 4 outstanding"), "{report}");
}

#[tokio::test]
async fn a_wrong_image_is_reported_even_though_the_export_was_right() {
    let report = demo(Behaviour::CorruptImage).await.unwrap();
    assert!(!report.figures.verified);
    assert_eq!(report.wrong.count, 1);
    assert!(report.wrong.first[0].starts_with("block 0: "), "{:?}", report.wrong);
}

#[tokio::test]
async fn a_migration_that_fails_ends_the_demo_with_the_reason() {
    let error = demo(Behaviour::Fails).await.unwrap_err().to_string();
    assert!(error.contains("it ended as \"failed\": the moon was too bright"), "{error}");
}

#[tokio::test]
async fn a_daemon_that_dies_ends_the_demo_with_its_log() {
    let error = demo(Behaviour::Dies).await.unwrap_err().to_string();
    assert!(error.contains("the fake daemon dies as it was told"), "{error}");
}

#[test]
#[ignore = "the other tests start it as a process of its own"]
fn the_fake_daemon() {
    fake_daemon::main();
}
