//! Tests of a restart during a migration between two stores of one host: only data in flight is copied again.

use std::num::NonZeroU64;
use std::time::Duration;

use anyhow::ensure;
use api::{Migration, MigrationState, Volume};
use e2e::{Host, guest, play, play_with_mounts, until, vm};
use lab::workload::{Guest, GuestOptions};
use rustix::process::Signal;

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// Bytes that a busy guest uses, fewer than may be copied twice.
const WORKED_BYTES: u64 = 4 << 20;
/// A rate at which it can be interrupted half-way, also on a busy machine.
const SLOWLY: &str = "8MiB/s";
/// Bytes that are copied between two of several restarts.
const MORE_BYTES: u64 = 2 << 20;
/// Time for which a daemon is stopped, longer than a lane waits for the journal, or a client for a first answer.
const STANDSTILL: Duration = Duration::from_secs(3);
/// Size of a disk for the data folder that is soon full.
const DATA_DISK_BYTES: u64 = 16 << 20;
/// Bytes that may be copied again besides missing blocks: chunks in flight.
const SLACK_BYTES: u64 = 4 << 20;

/// How a daemon is replaced by the next one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Restart {
    TakenOver,
    Stopped,
    Killed,
}

fn restart(host: &mut Host, how: Restart) -> anyhow::Result<()> {
    match how {
        Restart::TakenOver => return host.take_over(&[]),
        Restart::Stopped => host.stop()?,
        Restart::Killed => host.kill()?,
    }
    host.start()
}

/// Begins to move `v` with a strategy, and waits until half of it is copied.
fn half_way(host: &Host, strategy: &str) -> anyhow::Result<Migration> {
    let order = ["migrate", "v", "--to", "b", "--detach", "--bandwidth", SLOWLY, "--strategy", strategy];
    let begun: Migration = host.ask(&order)?;
    until("half of it is copied", || {
        let shown = host.migration(&begun.id)?;
        Ok((shown.bytes_copied >= FILL_BYTES / 2).then_some(shown))
    })
}

fn worked() -> GuestOptions {
    GuestOptions { working_set_bytes: NonZeroU64::new(WORKED_BYTES), ..GuestOptions::default() }
}

/// Waits for the end, and checks the total of copied bytes.
fn end(host: &Host, half: &Migration) -> anyhow::Result<Migration> {
    let ended = host.wait_for_migration(&half.id)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    ensure!(ended.seconds >= half.seconds, "{half:?}, {ended:?}");
    Ok(ended)
}

/// Ends the guest, and checks that all of its writes are in the expected store.
fn is_whole(host: &mut Host, busy: Guest, store: &str) -> anyhow::Result<()> {
    host.check_place(store)?;
    let stopped = guest::stop_and_verify(busy)?;
    host.stop()?;
    guest::verify_image(&host.path(&format!("{store}/v.img")), &stopped.content)
}

#[test]
fn a_restart_copies_only_what_was_missing_and_counts_on() {
    for (how, strategy) in
        [(Restart::TakenOver, "mirror"), (Restart::Stopped, "mirror"), (Restart::TakenOver, "tracking")]
    {
        play(|host| {
            host.create_volume(DISK_BYTES)?;
            let stopped = guest::stop_and_verify(guest::start(&host.export()?, FILL_BYTES)?)?;
            let half = half_way(host, strategy)?;
            restart(host, how)?;
            let goes_on = until("it goes on", || {
                let shown = host.migration(&half.id)?;
                ensure!(!shown.state.has_ended(), "{how:?}: {shown:?}");
                Ok((shown.bytes_copied > half.bytes_copied).then_some(shown))
            })?;
            ensure!(goes_on.fraction >= half.fraction, "{how:?}: {half:?}, {goes_on:?}");
            let missing = |migration: &Migration| migration.bytes_missing.unwrap_or(u64::MAX);
            ensure!(missing(&goes_on) <= missing(&half).saturating_add(SLACK_BYTES), "{half:?}, {goes_on:?}");
            let ended = end(host, &half)?;
            let copied = ended.bytes_copied + ended.bytes_zero;
            println!("{how:?}, {strategy}: {} MiB of {} MiB were copied", copied >> 20, FILL_BYTES >> 20);
            ensure!(copied <= FILL_BYTES + SLACK_BYTES, "{how:?}, {strategy}: {copied} bytes, {half:?}");
            host.check_place("b")?;
            host.stop()?;
            guest::verify_image(&host.path("b/v.img"), &stopped.content)
        });
    }
}

#[test]
fn a_guest_that_writes_all_the_time_loses_nothing_and_hardly_waits() {
    for strategy in ["mirror", "tracking"] {
        play(|host| {
            host.create_volume(DISK_BYTES)?;
            let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
            let half = half_way(host, strategy)?;
            let before = busy.mark();
            for _ in 0..2 {
                restart(host, Restart::TakenOver)?;
                guest::until_worked(&busy, 50)?;
            }
            let longest = busy.between(&before, &busy.mark()).longest_stall;
            host.sterna(["migration", "set", &half.id, "--bandwidth", "none"])?.success()?;
            let ended = end(host, &half)?;
            println!(
                "{strategy}: two restarts; the guest waited {longest:?} at most; {} MiB were copied",
                ended.bytes_copied >> 20
            );
            if strategy == "mirror" {
                let most = FILL_BYTES * 11 / 10 + 3 * WORKED_BYTES;
                ensure!(ended.bytes_copied <= most, "{} bytes were copied", ended.bytes_copied);
            }
            is_whole(host, busy, "b")
        });
    }
}

#[test]
fn what_rests_rests_on_and_its_limit_stays() {
    for how in [Restart::TakenOver, Restart::Stopped] {
        play(|host| {
            host.create_volume(DISK_BYTES)?;
            let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
            let half = half_way(host, "mirror")?;
            host.sterna(["migration", "pause", &half.id])?.success()?;
            host.sterna(["migration", "set", &half.id, "--bandwidth", "1MiB/s"])?.success()?;
            restart(host, how)?;
            let rests = until("it rests", || {
                let shown = host.migration(&half.id)?;
                // What was under way has ended.
                let waits =
                    shown.waiting_for.as_ref().is_some_and(|waits| waits.reason.contains("administrator"));
                Ok((shown.state == MigrationState::Paused && waits).then_some(shown))
            })?;
            guest::until_worked(&busy, 100)?;
            let still = host.migration(&half.id)?;
            ensure!(still.bytes_copied == rests.bytes_copied, "{how:?}: {rests:?}, {still:?}");
            host.sterna(["migration", "resume", &half.id])?.success()?;
            let goes_on = until("a little more is copied", || {
                let shown = host.migration(&half.id)?;
                Ok((shown.bytes_copied >= still.bytes_copied + (2 << 20)).then_some(shown))
            })?;
            ensure!(!goes_on.state.has_ended(), "{how:?}: without its limit it has ended: {goes_on:?}");
            host.sterna(["migration", "set", &half.id, "--bandwidth", "none"])?.success()?;
            end(host, &half)?;
            is_whole(host, busy, "b")
        });
    }
}

#[test]
fn killed_at_any_time_it_goes_on_or_stays_and_nothing_is_lost() {
    for killed_after in [0, FILL_BYTES / 8, FILL_BYTES / 2] {
        play(|host| {
            host.create_volume(DISK_BYTES)?;
            let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
            let begun = host.begin_to_migrate("b", Some(SLOWLY))?;
            until("some of it is copied", || {
                Ok((host.migration(&begun.id)?.bytes_copied >= killed_after).then_some(()))
            })?;
            for how in [Restart::Killed, Restart::Killed, Restart::Stopped] {
                restart(host, how)?;
                guest::until_worked(&busy, 50)?;
            }
            // If the migration had just begun, nothing was kept, and it may have ended.
            if !host.migration(&begun.id)?.state.has_ended() {
                host.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?;
            }
            let ended = host.wait_for_migration(&begun.id)?;
            let store = if ended.state == MigrationState::Moved { "b" } else { "a" };
            println!("killed when {} MiB were copied: {:?}", killed_after >> 20, ended.state);
            ensure!(killed_after < FILL_BYTES / 2 || store == "b", "{ended:?}");
            is_whole(host, busy, store)
        });
    }
}

#[test]
fn a_copy_that_somebody_has_changed_is_not_gone_on_with() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&host.export()?, FILL_BYTES)?)?;
        let half = half_way(host, "mirror")?;
        host.stop()?;
        let copy = std::fs::OpenOptions::new().write(true).open(host.path("b/v.img"))?;
        std::os::unix::fs::FileExt::write_all_at(&copy, &[0x5a; 4096], 8192)?;
        drop(copy);
        host.start()?;
        let ended = host.wait_for_migration(&half.id)?;
        ensure!(ended.state == MigrationState::Failed, "{ended:?}");
        // The copy begins anew.
        let next = until("it begins anew", || Ok(host.migration(&half.id)?.retried_as))?;
        host.sterna(["migration", "set", &next, "--bandwidth", "none"])?.success()?;
        let moved = host.wait_for_migration(&next)?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_copied >= FILL_BYTES, "{moved:?}");
        host.check_place("b")?;
        host.stop()?;
        guest::verify_image(&host.path("b/v.img"), &stopped.content)
    });
}

#[test]
fn what_goes_on_can_be_cancelled_and_leaves_nothing() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        let half = half_way(host, "mirror")?;
        restart(host, Restart::TakenOver)?;
        host.sterna(["migration", "cancel", &half.id])?.success()?;
        let ended = host.wait_for_migration(&half.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        host.check_place("a")?;
        // The move is repeated, with nothing left of the first.
        host.migrate("b")?;
        is_whole(host, busy, "b")
    });
}

/// Waits until a migration under way has copied `bytes` more bytes.
fn has_copied_more(host: &Host, before: &Migration, bytes: u64) -> anyhow::Result<Migration> {
    until("some more of it is copied", || {
        let shown = host.migration(&before.id)?;
        ensure!(!shown.state.has_ended(), "{before:?}, {shown:?}");
        Ok((shown.bytes_copied >= before.bytes_copied + bytes).then_some(shown))
    })
}

#[test]
fn a_vm_with_two_disks_works_on_while_both_go_on_after_each_restart() {
    play(|host| {
        let names = ["v", "w"];
        let size = DISK_BYTES.to_string();
        for name in names {
            host.sterna(["volume", "create", name, "--store", "a", "--size", &size])?.success()?;
        }
        let console = vm::start_with(host, &names, FILL_BYTES)?;
        let order = ["migrate", vm::NAME, "--to", "b", "--detach", "--bandwidth", "2MiB/s"];
        let begun: Vec<Migration> = host.ask(&order)?;
        ensure!(begun.len() == names.len(), "{begun:?}");
        let mut seen = begun.clone();
        for how in [Restart::TakenOver, Restart::Stopped, Restart::Killed] {
            for one in &mut seen {
                *one = has_copied_more(host, one, MORE_BYTES)?;
            }
            restart(host, how)?;
            for one in &mut seen {
                *one = has_copied_more(host, one, 1)?;
            }
            console.work_on(50)?;
        }
        for one in &begun {
            host.sterna(["migration", "set", &one.id, "--bandwidth", "none"])?.success()?;
        }
        for one in &begun {
            end(host, one)?;
        }
        for name in names {
            let volume: Volume = host.ask(&["volume", "show", name])?;
            ensure!(volume.store.as_deref() == Some("b"), "{volume:?}");
        }
        ensure!(host.images("a")?.is_empty(), "an image is where it was");
        console.work_on(100)?;
        console.verify()
    });
}

#[test]
fn a_daemon_that_stood_still_goes_on_and_so_does_one_that_is_killed_while_it_does() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        let half = half_way(host, "mirror")?;
        host.signal(Signal::STOP)?;
        // The test needs a time in which nothing happens.
        std::thread::sleep(STANDSTILL);
        host.signal(Signal::CONT)?;
        guest::until_worked(&busy, 50)?;
        let goes_on = host.migration(&half.id)?;
        ensure!(!goes_on.state.has_ended(), "{goes_on:?}");
        host.signal(Signal::STOP)?;
        restart(host, Restart::Killed)?;
        guest::until_worked(&busy, 50)?;
        host.sterna(["migration", "set", &half.id, "--bandwidth", "none"])?.success()?;
        let ended = end(host, &half)?;
        let most = FILL_BYTES * 11 / 10 + 3 * WORKED_BYTES;
        ensure!(ended.bytes_copied <= most, "{} bytes were copied", ended.bytes_copied);
        is_whole(host, busy, "b")
    });
}

#[test]
fn a_full_data_folder_costs_progress_at_most() {
    play_with_mounts(|host| {
        host.mount_data(DATA_DISK_BYTES)?;
        host.start()?;
        host.create_volume(DISK_BYTES)?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        let begun = host.begin_to_migrate("b", Some(SLOWLY))?;
        until("some of it is copied", || {
            Ok((host.migration(&begun.id)?.bytes_copied >= FILL_BYTES / 4).then_some(()))
        })?;
        ensure!(host.fill_data()?, "it has a disk of its own");
        until("half of it is copied", || {
            Ok((host.migration(&begun.id)?.bytes_copied >= FILL_BYTES / 2).then_some(()))
        })?;
        guest::until_worked(&busy, 50)?;
        host.kill()?;
        host.free_data()?;
        host.start()?;
        guest::until_worked(&busy, 50)?;
        let mut last = begun.id;
        let ended = loop {
            host.sterna(["migration", "set", &last, "--bandwidth", "none"])?;
            let ended = host.wait_for_migration(&last)?;
            match &ended.retried_as {
                Some(next) => last.clone_from(next),
                None => break ended,
            }
        };
        println!("{:?}, {} MiB were copied", ended.state, ended.bytes_copied >> 20);
        ensure!(ended.state == MigrationState::Moved, "it did not go on: {ended:?}");
        is_whole(host, busy, "b")
    });
}
