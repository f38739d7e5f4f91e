//! Tests of clients that stay at a host that their volume has left, or is moving to, with restarts of daemons.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, VolumeState};
use e2e::{Host, LinkState, Pair, guest, host, play_pair, until};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 200;
/// A rate at which the migration of the filled part outlasts the restart of a daemon.
const SLOWLY: &str = "2MiB/s";
/// Longest wait of an ending daemon for a volume, shorter than the test's wait for its end.
const STOP_WAIT_MAX: Duration = Duration::from_secs(60);

/// Begins the return of the volume `v` from `beta`, and returns the migration.
fn begin_to_come_home(pair: &Pair, bandwidth: Option<&str>) -> anyhow::Result<Migration> {
    pair.beta.begin_to_migrate("alpha:a", bandwidth)
}

fn under_way(scene: &Host) -> anyhow::Result<Migration> {
    let migrations: Vec<Migration> = scene.ask(&["migration", "list"])?;
    migrations.into_iter().find(|migration| !migration.state.has_ended()).context("nothing is under way")
}

/// Checks that a migration names the host that has cancelled it.
fn check_cancelled_at_beta(ended: &Migration) -> anyhow::Result<()> {
    let message = ended.message.as_deref().unwrap_or_default();
    let says_so = message.contains("cancelled it at the other host, \"beta\"");
    ensure!(ended.state == MigrationState::Cancelled && says_so, "{ended:?}");
    Ok(())
}

#[test]
fn owner_that_is_killed_after_it_released_the_volume_fails_no_request_of_clients_elsewhere() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        pair.leave()?;
        pair.beta.stop()?;
        pair.beta.start_with(&[("STERNA_FAIL_POINT", "after-released")])?;
        // Its answer may be lost with the daemon.
        let migrating = pair.beta.start_migrating("alpha:a")?;
        ensure!(pair.beta.wait_for_end()? == 137, "the owner is to be killed at its commit point");
        drop(migrating);
        // The guest's requests go to a host that has released the volume.
        pair.beta.start()?;
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::until_worked(&guest, 100)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn clients_are_served_from_the_owner_while_their_volume_comes_home_to_a_daemon_that_was_killed() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        pair.alpha.sterna(["migrate", "v", "--to", "beta:a", "--serve-here"])?.success()?;
        let begun = begin_to_come_home(pair, Some(SLOWLY))?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        guest::until_worked(&guest, 100)?;
        let seen = pair.beta.migration(&begun.id)?;
        ensure!(seen.state == MigrationState::Running, "the guest was held until it was over: {seen:?}");
        let ended = pair.beta.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn migration_that_is_cancelled_where_it_goes_says_so_where_it_comes_from() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let begun = pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?;
        pair.beta.sterna(["migration", "cancel", &under_way(&pair.beta)?.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        check_cancelled_at_beta(&ended)?;
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn source_that_was_killed_while_its_migration_was_cancelled_elsewhere_hears_of_it() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        let begun = pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?;
        pair.link.set(LinkState::Cut);
        pair.alpha.kill()?;
        pair.beta.sterna(["migration", "cancel", &under_way(&pair.beta)?.id])?.success()?;
        until("the other host has nothing of it", || Ok(pair.beta.images("a")?.is_empty().then_some(())))?;
        pair.alpha.start()?;
        pair.link.set(LinkState::Up);
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        check_cancelled_at_beta(&ended)?;
        ensure!(pair.alpha.volume()?.state == VolumeState::Serving);
        pair.alpha.stop()?;
        guest::verify_image(&pair.alpha.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn clients_of_hosts_that_are_unpaired_and_paired_again_go_on() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        pair.leave()?;
        // Requests wait meanwhile, whichever host has removed the other.
        for (forgets_alpha, forgets_beta) in [(true, false), (false, true), (true, true)] {
            if forgets_alpha {
                pair.beta.sterna(["host", "remove", "alpha", "--force"])?.success()?;
            }
            if forgets_beta {
                pair.alpha.sterna(["host", "remove", "beta", "--force"])?.success()?;
            }
            pair.join()?;
            guest::until_worked(&guest, WORK_REQUESTS).with_context(|| {
                format!("after alpha was forgotten: {forgets_alpha}, beta: {forgets_beta}")
            })?;
        }
        guest::stop_and_verify(guest)?;
        until("the owner has no clients left", || {
            Ok((pair.beta.statistics()?.connections == 0).then_some(()))
        })?;
        pair.check_at(&pair.beta, &pair.alpha)
    });
}

#[test]
fn a_host_that_was_unpaired_when_it_was_started_forwards_once_it_is_paired_again() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let moved: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a", "--serve-here"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        pair.alpha.sterna(["host", "remove", "beta", "--force"])?.success()?;
        pair.alpha.stop()?;
        pair.alpha.start()?;
        ensure!(
            pair.alpha.log()?.contains("cannot forward its clients yet"),
            "nobody is known to lead them to"
        );
        pair.join()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        guest::stop_and_verify(guest)?;
        Ok(())
    });
}

#[test]
fn a_daemon_that_ends_waits_for_no_host_that_is_down_and_has_its_volume() {
    play_pair(|pair| {
        pair.alpha.configure(&format!("[limits]\nstop_wait_max_ms = {}\n", STOP_WAIT_MAX.as_millis()))?;
        pair.alpha.stop()?;
        pair.alpha.start()?;
        pair.alpha.create_volume(DISK_BYTES)?;
        let moved: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a", "--serve-here"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        // The owner flushes the writes of this client.
        guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        pair.beta.stop()?;
        let begun = Instant::now();
        pair.alpha.take_over(&[])?;
        ensure!(begun.elapsed() < STOP_WAIT_MAX, "the daemon that was taken over waited as long as it may");
        let begun = Instant::now();
        pair.alpha.stop()?;
        ensure!(begun.elapsed() < STOP_WAIT_MAX, "the daemon waited as long as it may");
        Ok(())
    });
}

/// Starts a third host, which is paired with `beta`.
fn third(pair: &Pair) -> anyhow::Result<Host> {
    let mut gamma = host()?;
    gamma.configure("[hosts]\nlisten = []\n")?;
    gamma.start()?;
    gamma.sterna(["host", "init", "--name", "gamma"])?.success()?;
    let invitation: api::Invitation = pair.beta.ask(&["host", "invite"])?;
    gamma.sterna(["host", "join", &invitation.addresses[0], &invitation.token])?.success()?;
    Ok(gamma)
}

/// Returns the number of clients at other hosts that a host knows for its volume `v`.
fn clients_elsewhere(scene: &Host) -> anyhow::Result<u32> {
    Ok(scene.volume()?.clients_elsewhere.iter().map(|led| led.clients).sum())
}

#[test]
fn clients_that_stay_are_served_and_counted_while_their_volume_goes_on_to_a_third_host() {
    play_pair(|pair| {
        let gamma = third(pair)?;
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        pair.leave()?;
        until("the owner to know its client", || Ok((clients_elsewhere(&pair.beta)? == 1).then_some(())))?;
        for command in [["volume", "remove", "v"], ["host", "remove", "alpha"]] {
            let refused = pair.beta.sterna(command)?;
            ensure!(refused.success().is_err(), "a client at the other host needs it: {command:?}");
        }
        until("the hosts to be connected", || {
            Ok(pair.beta.sterna(["migrate", "v", "--to", "gamma:a"])?.success().is_ok().then_some(()))
        })?;
        until("the next owner to know it", || Ok((clients_elsewhere(&gamma)? == 1).then_some(())))?;
        // This is long enough for many checks of the relaying host whether it is still needed.
        for _ in 0..10 {
            guest::until_worked(&guest, WORK_REQUESTS)?;
            ensure!(pair.beta.volume()?.state == VolumeState::Forwarding, "its clients need it");
        }
        pair.link.set(LinkState::Cut);
        pair.link.set(LinkState::Up);
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        until("the owner to know it again", || Ok((clients_elsewhere(&gamma)? == 1).then_some(())))?;
        // Relayed requests do not hold the next migration.
        gamma.sterna(["migrate", "v", "--to", "beta:a"])?.success()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        guest::stop_and_verify(guest)?;
        until(
            "the owner to know that it has left",
            || Ok((clients_elsewhere(&pair.beta)? == 0).then_some(())),
        )
    });
}
