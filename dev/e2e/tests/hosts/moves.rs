//! Tests of volumes between two hosts without shared storage, with guests that know their writes.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::ensure;
use api::{GuestLocation, ImageFormat, Migration, MigrationState, Volume, VolumeState};
use e2e::{Host, LinkState, Pair, guest, play_pair, until};
use lab::workload::Guest;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// A rate at which the migration of the filled part takes a while.
const SLOWLY: &str = "6MiB/s";
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 2000;
/// Silence after which a link counts as lost.
const NOTICED_AFTER: Duration = Duration::from_secs(5);

/// Makes the volume `v` at `alpha`, and starts a guest that fills a part of it.
fn start_guest(pair: &Pair) -> anyhow::Result<Guest> {
    pair.alpha.create_volume(DISK_BYTES)?;
    guest::start(&pair.alpha.export()?, FILL_BYTES)
}

/// Does the same, and begins a slow move to `beta`.
fn begin_to_leave(pair: &Pair) -> anyhow::Result<(Guest, Migration)> {
    let guest = start_guest(pair)?;
    Ok((guest, pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?))
}

/// Waits until a migration from `alpha` to `beta` has ended, and checks that the volume is there.
fn until_left(pair: &Pair, begun: &Migration) -> anyhow::Result<()> {
    let ended = pair.alpha.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    pair.check_at(&pair.beta, &pair.alpha)
}

/// Waits until `bytes` bytes have been copied.
fn until_copied(scene: &Host, migration: &Migration, bytes: u64) -> anyhow::Result<()> {
    until("a part is copied", || Ok((scene.migration(&migration.id)?.bytes_copied >= bytes).then_some(())))
}

#[test]
fn volume_goes_to_another_host_and_comes_home_while_its_guest_stays_connected() {
    play_pair(|pair| {
        let guest = start_guest(pair)?;
        for round in 0..3 {
            pair.leave()?;
            let left: Volume = pair.alpha.volume()?;
            ensure!(left.state == VolumeState::Forwarding, "round {round}: {left:?}");
            pair.come_home()?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn an_image_keeps_its_format_at_another_host_unless_the_order_has_one() {
    play_pair(|pair| {
        let size = DISK_BYTES.to_string();
        let words = ["volume", "create", "v", "--store", "a", "--size", &size, "--format", "qcow2"];
        pair.alpha.sterna(words)?.success()?;
        let format = |host: &Host| Ok::<_, anyhow::Error>(host.volume()?.format);
        for (order, expected) in [(&[][..], ImageFormat::Qcow2), (&["--format", "raw"], ImageFormat::Raw)] {
            let plan = [&["migrate", "v", "--to", "beta:a", "--dry-run"], order].concat();
            let text = pair.alpha.sterna(&plan)?.success()?;
            ensure!(text.contains(&format!("{expected:?}").to_lowercase()), "{expected:?}: {text}");
            pair.alpha.sterna([&["migrate", "v", "--to", "beta:a"], order].concat())?.success()?;
            ensure!(format(&pair.beta)? == expected, "{:?}", pair.beta.volume()?);
            pair.beta.sterna(["migrate", "v", "--to", "alpha:a"])?.success()?;
            ensure!(format(&pair.alpha)? == expected, "{:?}", pair.alpha.volume()?);
        }
        Ok(())
    });
}

#[test]
fn cut_and_silent_links_cost_time_and_nothing_else() {
    play_pair(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        for (state, copied) in [(LinkState::Cut, FILL_BYTES / 4), (LinkState::BlackHole, FILL_BYTES / 2)] {
            until_copied(&pair.alpha, &begun, copied)?;
            pair.link.set(state);
            // A guest that waited for the other host would wait until the test gives up.
            let cut = Instant::now();
            guest::until_worked(&guest, WORK_REQUESTS)?;
            // The same holds for a guest that is held after the loss was noticed.
            sleep(NOTICED_AFTER.saturating_sub(cut.elapsed()));
            guest::until_worked(&guest, WORK_REQUESTS)?;
            pair.link.set(LinkState::Up);
        }
        until_left(pair, &begun)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_target_host_goes_on_where_it_stopped() {
    play_pair(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        until_copied(&pair.alpha, &begun, FILL_BYTES / 4)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        until_left(pair, &begun)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_source_host_goes_on_with_the_migration() {
    play_pair(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        until_copied(&pair.alpha, &begun, FILL_BYTES / 4)?;
        // Its client leaves when the daemon is killed, so its knowledge is compared afterwards.
        let stopped = guest::stop_and_verify(guest)?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until_left(pair, &begun)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn cancelled_migration_leaves_nothing_at_the_other_host() {
    play_pair(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn who_would_move_what_has_gone_is_told_where_it_is() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        pair.leave()?;
        until("nothing is forwarded any more", || {
            Ok((pair.alpha.sterna(["volume", "show", "v"])?.code == 3).then_some(()))
        })?;
        for more in [&[][..], &["--dry-run"]] {
            let refused = pair.alpha.sterna([&["migrate", "v", "--to", "beta:b"][..], more].concat())?;
            let told = refused.stderr.contains("has moved to host \"beta\" (m0): do it there");
            ensure!(refused.code == 3 && told, "{refused:?}");
        }
        Ok(())
    });
}

#[test]
fn what_cannot_be_taken_is_refused_with_the_reason_and_leaves_nothing() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        for (to, part) in [("beta:nowhere", "no store \"nowhere\""), ("gamma", "no host \"gamma\"")] {
            let refused = pair.alpha.sterna(["migrate", "v", "--to", to])?;
            ensure!(refused.code != 0 && refused.stderr.contains(part), "{to}: {refused:?}");
        }
        pair.beta.create_volume(DISK_BYTES)?;
        let refused = pair.alpha.sterna(["migrate", "v", "--to", "beta:b"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("exists"), "{refused:?}");
        ensure!(pair.beta.images("b")?.is_empty());
        pair.alpha.check_place("a")
    });
}

#[test]
fn volume_that_was_released_to_a_host_that_heard_nothing_is_promoted_there_with_the_ticket() {
    play_pair(|pair| {
        let stopped = guest::stop_and_verify(start_guest(pair)?)?;
        pair.alpha.stop()?;
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-released")])?;
        let begun = pair.alpha.begin_to_migrate("beta:a", None)?;
        ensure!(pair.alpha.wait_for_end()? == 137, "the daemon is to be killed at its commit point");
        let waiting = pair.beta.volume()?;
        ensure!(waiting.state == VolumeState::Arriving, "{waiting:?}");
        // No host serves it: the source has released it, and the link stays broken.
        pair.link.set(LinkState::Cut);
        pair.alpha.start()?;
        let released = until("the source prints its ticket", || {
            Ok(Some(pair.alpha.migration(&begun.id)?).filter(|migration| migration.ticket.is_some()))
        })?;
        ensure!(
            released.state == MigrationState::Running && released.guest == GuestLocation::Target,
            "{released:?}"
        );
        let ticket = released.ticket.unwrap_or_default();

        let refused = pair.beta.sterna(["volume", "promote", "v", "--ticket", "sterna-ticket-1-00"])?;
        ensure!(refused.code != 0, "{refused:?}");
        pair.beta.sterna(["volume", "promote", "v", "--ticket", &ticket])?.success()?;
        let promoted = pair.beta.volume()?;
        ensure!(promoted.state == VolumeState::Serving && promoted.generation == 1, "{promoted:?}");

        // The source learns of it when the link works again, and then only forwards clients.
        pair.link.set(LinkState::Up);
        until_left(pair, &begun)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn migration_that_rests_copies_nothing_until_it_goes_on() {
    play_pair(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        pair.alpha.sterna(["migration", "pause", &begun.id])?.success()?;
        // Requests in flight at the pause end first, which takes time on a busy machine.
        until("a second passes in which nothing is copied", || {
            let before = pair.alpha.migration(&begun.id)?;
            // The test needs this time: at the rate of this migration it would copy six megabytes.
            sleep(Duration::from_secs(1));
            let after = pair.alpha.migration(&begun.id)?;
            ensure!(after.state == MigrationState::Paused, "it went on: {after:?}");
            Ok((before.bytes_copied == after.bytes_copied).then_some(()))
        })?;
        pair.alpha.sterna(["migration", "resume", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_at_each_step_of_the_handover_the_volume_is_at_one_host() {
    let steps = [
        ("alpha", "after-started"),
        ("alpha", "before-released"),
        ("alpha", "after-released"),
        ("alpha", "before-ended"),
        ("beta", "after-started"),
        ("beta", "after-prepared"),
        ("beta", "before-owned"),
        ("beta", "after-owned"),
        ("beta", "before-ended"),
    ];
    for (host, step) in steps {
        play_pair(|pair| {
            let stopped = guest::stop_and_verify(start_guest(pair)?)?;
            pair.leave_killed(host, step)?;
            until("exactly one host serves the volume", || {
                let served = |scene: &Host| {
                    let volume = scene.volume().ok();
                    volume.is_some_and(|volume| volume.state == VolumeState::Serving)
                };
                // The volume may change hands once between two checks, so the first host is checked twice.
                let looks = [&pair.alpha, &pair.beta, &pair.alpha].map(served);
                ensure!(looks != [true; 3], "{host} {step}: both serve it");
                Ok(matches!(looks, [true, false, true] | [false, true, false]).then_some(()))
            })?;
            // The migration ends by itself, at either host.
            pair.alpha.until_idle()?;
            pair.beta.until_idle()?;
            let image = if pair.beta.images("a")?.is_empty() { &mut pair.alpha } else { &mut pair.beta };
            image.stop()?;
            guest::verify_image(&image.path("a/v.img"), &stopped.content)
        });
    }
}
