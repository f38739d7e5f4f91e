//! Three paired hosts, with direct connections that cannot be cut.

use anyhow::Context as _;
use testbed::Host;

use crate::host;
use crate::play::expect_success;

/// Names of the three hosts.
pub const NAMES: [&str; 3] = ["alpha", "beta", "gamma"];

/// Makes three hosts, pairs each with each, and leaves their daemons ready.
///
/// # Errors
/// If one does not start, or they cannot be paired.
pub fn three_hosts() -> anyhow::Result<[Host; 3]> {
    let hosts = [named(NAMES[0])?, named(NAMES[1])?, named(NAMES[2])?];
    for (inviting, joining) in [(0, 1), (0, 2), (1, 2)] {
        let invitation: api::Invitation = hosts[inviting].ask(&["host", "invite"])?;
        let address = invitation.addresses.first().context("an invitation names an address")?;
        hosts[joining].sterna(["host", "join", address, &invitation.token])?.success()?;
    }
    Ok(hosts)
}

fn named(name: &str) -> anyhow::Result<Host> {
    let mut host = host()?;
    host.listen_for_hosts()?;
    host.start()?;
    host.sterna(["host", "init", "--name", name])?.success()?;
    Ok(host)
}

/// Runs a test with three hosts.
///
/// # Panics
/// If the test fails: with its error, and the daemons' logs.
pub fn play_trio(test: impl FnOnce(&mut [Host; 3]) -> anyhow::Result<()>) {
    expect_success(three_hosts().and_then(|mut hosts| {
        test(&mut hosts).map_err(|error| hosts.iter().fold(error, |error, host| host.with_log(error)))
    }));
}
