//! Tests of volumes between two hosts that can open each other's stores: blocks are written there directly if the stores are
//! proved to be the same.

use std::path::Path;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState};
use e2e::file_system::{FileSystem, MountedFor, SecondMount};
use e2e::{FAR, Host, LinkState, Pair, guest, may_mount, play_sharing_pair, share, until};
use lab::workload::Guest;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// A rate at which the migration of the filled part takes a while.
const SLOWLY: &str = "6MiB/s";
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 2000;
/// Largest number of control bytes of a migration on the link, far fewer than it moves.
const CONTROL_BYTES_MAX: u64 = FILL_BYTES / 16;

fn play_sharing(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    play_sharing_pair(|alpha, beta| share(alpha, beta), test);
}

/// Makes the volume `v` at `alpha`, and starts a guest that fills a part of it.
fn start_guest(pair: &Pair) -> anyhow::Result<Guest> {
    pair.alpha.create_volume(DISK_BYTES)?;
    guest::start(&pair.alpha.export()?, FILL_BYTES)
}

/// Waits until a slow migration has written some blocks directly to the other host's store.
fn until_copied_directly(pair: &Pair, begun: &Migration) -> anyhow::Result<()> {
    until("a part is copied", || {
        let migration = pair.alpha.migration(&begun.id)?;
        Ok((migration.shared && migration.bytes_copied >= FILL_BYTES / 4).then_some(()))
    })
}

fn begin_to_leave(pair: &Pair) -> anyhow::Result<(Guest, Migration)> {
    let guest = start_guest(pair)?;
    let begun = pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?;
    until_copied_directly(pair, &begun)?;
    Ok((guest, begun))
}

fn until_left(pair: &Pair, begun: &Migration) -> anyhow::Result<Migration> {
    let ended = pair.alpha.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    pair.check_at(&pair.beta, &pair.alpha)?;
    Ok(ended)
}

/// Moves an idle volume, and returns the bytes on the link.
fn leave_alone(pair: &Pair, more: &[&str]) -> anyhow::Result<(Migration, u64)> {
    let before = pair.link.carried_bytes();
    let arguments = ["migrate", "v", "--to", "beta:a"];
    let ended = pair.alpha.ask(&arguments.iter().chain(more).copied().collect::<Vec<_>>())?;
    let carried = pair.link.carried_bytes() - before;
    pair.check_at(&pair.beta, &pair.alpha)?;
    Ok((ended, carried))
}

/// Moves a volume of known content while `far` is not the same store. Everything must go over the link, and the
/// source's log has the reason.
fn check_goes_over_the_link(pair: &mut Pair, reason: &str) -> anyhow::Result<()> {
    let stopped = guest::stop_and_verify(start_guest(pair)?)?;
    let (ended, carried) = leave_alone(pair, &[])?;
    ensure!(!ended.shared && carried > CONTROL_BYTES_MAX, "{carried} bytes on the link; {ended:?}");
    ensure!(pair.alpha.log()?.contains(reason), "no word of: {reason}");
    pair.beta.stop()?;
    guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
}

/// Runs a test in which `mount` makes `far` at `alpha` from the folder of `beta`'s store.
fn play_mounted(
    mount: impl FnOnce(&Path, &Host) -> anyhow::Result<SecondMount>,
    test: impl FnOnce(&mut Pair) -> anyhow::Result<()>,
) {
    if !may_mount() {
        return;
    }
    play_sharing_pair(
        |alpha, beta| {
            std::fs::create_dir(alpha.path(FAR))?;
            let mounted = mount(&beta.path("a"), alpha)?;
            alpha.keep_mounted(mounted);
            Ok(())
        },
        test,
    );
}

#[test]
fn only_control_goes_over_the_link() {
    play_sharing(|pair| {
        let stopped = guest::stop_and_verify(start_guest(pair)?)?;
        let (ended, carried) = leave_alone(pair, &[])?;
        ensure!(ended.shared && ended.bytes_copied >= FILL_BYTES, "{ended:?}");
        ensure!(carried < CONTROL_BYTES_MAX, "{carried} bytes went over the link");
        let shown = pair.alpha.sterna(["migration", "show", &ended.id])?;
        ensure!(shown.stdout.contains("link carries control only"), "{shown:?}");
        pair.come_home()?;

        let (ended, carried) = leave_alone(pair, &["--shared-target", "never"])?;
        ensure!(!ended.shared && carried > CONTROL_BYTES_MAX, "{carried} bytes on the link; {ended:?}");
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn volume_goes_there_and_comes_home_while_its_guest_works() {
    play_sharing(|pair| {
        let guest = start_guest(pair)?;
        for _ in 0..2 {
            let ended = pair.leave()?;
            ensure!(ended.shared, "{ended:?}");
            guest::until_worked(&guest, WORK_REQUESTS)?;
            let ended = pair.come_home()?;
            ensure!(ended.shared, "{ended:?}");
            guest::until_worked(&guest, WORK_REQUESTS)?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn cut_link_costs_time_and_nothing_else() {
    play_sharing(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        pair.link.set(LinkState::Cut);
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.link.set(LinkState::Up);
        let ended = until_left(pair, &begun)?;
        ensure!(ended.shared, "{ended:?}");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_target_host_goes_on_where_it_stopped() {
    play_sharing(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        pair.beta.kill()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.beta.start()?;
        let ended = until_left(pair, &begun)?;
        ensure!(ended.shared, "{ended:?}");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_source_host_goes_on_with_the_migration() {
    play_sharing(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        // Its client leaves when the daemon is killed, so its knowledge is compared afterwards.
        let stopped = guest::stop_and_verify(guest)?;
        pair.alpha.kill()?;
        let before = pair.link.carried_bytes();
        pair.alpha.start()?;
        let ended = until_left(pair, &begun)?;
        let carried = pair.link.carried_bytes() - before;
        ensure!(ended.shared && carried < CONTROL_BYTES_MAX, "{carried} bytes on the link; {ended:?}");
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn cancelled_migration_leaves_nothing_at_the_other_host() {
    play_sharing(|pair| {
        let (guest, begun) = begin_to_leave(pair)?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        pair.check_at(&pair.alpha, &pair.beta)?;

        // The target's host cannot open the image at that moment, but deletes it nevertheless.
        let begun = pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?;
        until_copied_directly(pair, &begun)?;
        let arriving: Vec<Migration> = pair.beta.ask(&["migration", "list"])?;
        let arriving = arriving.iter().find(|migration| !migration.state.has_ended());
        let id = &arriving.context("the other host knows of it")?.id;
        pair.beta.sterna(["migration", "cancel", id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_at_each_step_of_the_handover_the_volume_is_at_one_host() {
    let steps = [
        ("alpha", "before-released"),
        ("alpha", "after-released"),
        ("beta", "after-started"),
        ("beta", "after-prepared"),
        ("beta", "before-owned"),
        ("beta", "after-owned"),
    ];
    for (host, step) in steps {
        play_sharing(|pair| {
            let stopped = guest::stop_and_verify(start_guest(pair)?)?;
            pair.leave_killed(host, step)?;
            pair.alpha.until_idle()?;
            // The target may delete its copy only after the source has ended.
            pair.beta.until_idle()?;
            let (owner, other) = match pair.beta.images("a")?.is_empty() {
                true => (&pair.alpha, &pair.beta),
                false => (&pair.beta, &pair.alpha),
            };
            pair.check_at(owner, other)?;
            let image = owner.path("a/v.img");
            pair.alpha.stop()?;
            pair.beta.stop()?;
            guest::verify_image(&image, &stopped.content)
        });
    }
}

#[test]
fn what_is_promoted_by_force_is_not_written_by_the_source_that_goes_on() {
    play_sharing(|pair| {
        let stopped = guest::stop_and_verify(start_guest(pair)?)?;
        pair.promote_by_force()?;

        // The source does not know that, and has not released the volume: it serves it, and would continue to copy.
        pair.alpha.start()?;
        pair.alpha.check_place("a")?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.link.set(LinkState::Up);
        pair.alpha.until_idle()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        drop(guest.stop()?);
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn folder_that_is_mounted_elsewhere_is_the_same() {
    let mount = |shared: &Path, alpha: &Host| SecondMount::of(shared, &alpha.path(FAR), MountedFor::Writing);
    play_mounted(mount, |pair| {
        let guest = start_guest(pair)?;
        let ended = pair.leave()?;
        ensure!(ended.shared, "{ended:?}");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn folder_that_can_only_be_read_is_not_used() {
    let mount = |shared: &Path, alpha: &Host| SecondMount::of(shared, &alpha.path(FAR), MountedFor::Reading);
    play_mounted(mount, |pair| check_goes_over_the_link(pair, "its folder cannot be written to"));
}

#[test]
fn folder_that_only_looks_the_same_is_not_used() {
    // Writes stay in the upper layer: the host sees every token there, but changes nothing below.
    let mount = |shared: &Path, alpha: &Host| {
        let (above, work) = (alpha.path("above"), alpha.path("work"));
        std::fs::create_dir(&above)?;
        std::fs::create_dir(&work)?;
        let layers =
            format!("lowerdir={},upperdir={},workdir={}", shared.display(), above.display(), work.display());
        SecondMount::overlay(&layers, &alpha.path(FAR))
    };
    play_mounted(mount, |pair| check_goes_over_the_link(pair, "the other host says"));
}

#[test]
fn full_store_ends_the_migration_and_leaves_nothing() {
    if !may_mount() {
        return;
    }
    play_sharing_pair(
        |alpha, beta| {
            beta.keep(FileSystem::plain(&beta.path("a"), 2 * DISK_BYTES)?)?;
            share(alpha, beta)
        },
        |pair| {
            let guest = start_guest(pair)?;
            let begun = pair.alpha.begin_to_migrate("beta:a", Some("2MiB/s"))?;
            until("a part is copied", || {
                Ok((pair.alpha.migration(&begun.id)?.bytes_copied > 1 << 20).then_some(()))
            })?;
            // Another program takes the remaining space, with a file that is not an image.
            let ballast =
                std::fs::write(pair.beta.path("a/lost+found/ballast"), vec![1; 3 * DISK_BYTES as usize]);
            ensure!(ballast.is_err(), "it fits");
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.failure.as_deref() == Some("target-full") && ended.shared, "{ended:?}");
            pair.check_at(&pair.alpha, &pair.beta)?;
            guest::stop_and_verify(guest).map(drop)
        },
    );
}
