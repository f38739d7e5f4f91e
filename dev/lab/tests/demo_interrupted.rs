//! A signal ends the demo in order. This is a process of its own, because the signal reaches every demo of a process.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

#[path = "support/fake_daemon.rs"]
mod fake_daemon;
#[expect(dead_code, reason = "shared with other tests")]
mod support;

use std::time::Duration;

use lab::demo::{DemoOptions, GuestKind, Interrupted, Progress, run};
use lab::workload::GuestOptions;
use tempfile::TempDir;

use self::fake_daemon::Behaviour;

#[tokio::test]
async fn a_signal_during_the_migration_leaves_nothing_behind() {
    let (programs, parent) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let options = DemoOptions {
        program: fake_daemon::program(programs.path(), Behaviour::Interrupts),
        parent: Some(parent.path().to_owned()),
        disk_bytes: 8 << 20,
        margin: Duration::from_millis(50),
        guest: GuestKind::Thread { block_bytes: 4096, fill_bytes: 4 << 20, options: GuestOptions::default() },
        strategy: api::Strategy::Mirror,
    };
    let error = run(options, &mut Progress::silent()).await.unwrap_err();
    let sigterm = rustix::process::Signal::TERM.as_raw();
    assert_eq!(error.downcast_ref(), Some(&Interrupted { signal: sigterm }), "{error:#}");
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "something is left behind");
}

#[test]
#[ignore = "the other test starts it as a process of its own"]
fn the_fake_daemon() {
    fake_daemon::main();
}
