//! Runs a test on one host.

use testbed::Host;

use crate::host;

/// Runs a test on a host with the stores `a` and `b` and a ready daemon.
///
/// # Panics
/// If the test fails: with its error, and the daemon's log.
pub fn play(test: impl FnOnce(&mut Host) -> anyhow::Result<()>) {
    play_unstarted(|host| {
        host.start()?;
        test(host)
    });
}

/// Runs it as [`play`], without a daemon at first.
///
/// # Panics
/// If the test fails: with its error, and the daemon's log.
pub fn play_unstarted(test: impl FnOnce(&mut Host) -> anyhow::Result<()>) {
    expect_success(host().and_then(|mut host| test(&mut host).map_err(|error| host.with_log(error))));
}

/// Runs it as [`play_unstarted`], for a test that mounts. Without root it is left out.
///
/// # Panics
/// If the test fails: with its error, and the daemon's log.
pub fn play_with_mounts(test: impl FnOnce(&mut Host) -> anyhow::Result<()>) {
    if may_mount() {
        play_unstarted(test);
    }
}

/// Returns whether a test may mount. If it may not, the check is recorded as left out.
pub fn may_mount() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        omission::machine_lacks("root, which mounting needs");
    }
    may
}

/// Fails the test if this is an error.
#[expect(clippy::panic, reason = "this is how a test fails")]
pub(crate) fn expect_success(result: anyhow::Result<()>) {
    if let Err(error) = result {
        panic!("{error:#}");
    }
}
