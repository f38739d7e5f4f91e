//! Tests of stores that the configuration makes slow or faulty.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState};
use e2e::{Host, guest, play_unstarted};
use testbed::nbd_client::{Client, ClientError, ClientOptions, Operation};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;

fn start_with(scene: &mut Host, configuration: &str) -> anyhow::Result<()> {
    scene.configure(configuration)?;
    scene.start()
}

fn took(migration: &Migration) -> anyhow::Result<Duration> {
    let ended = migration.ended_unix_ms.context("it has ended")?;
    Ok(Duration::from_millis(ended - migration.started_unix_ms))
}

/// Moves the volume to the store `b`, and returns the ended migration.
fn move_away(scene: &Host) -> anyhow::Result<Migration> {
    let begun = scene.begin_to_migrate("b", None)?;
    scene.wait_for_migration(&begun.id)
}

#[test]
fn a_store_takes_no_more_bytes_a_second_than_it_is_said_to_and_everybody_is_told() {
    const RATE: u64 = 8 << 20;
    play_unstarted(|scene| {
        start_with(scene, &format!("[stores.b.delay]\nflush_us = 100000\nbytes_per_second = {RATE}\n"))?;
        scene.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&scene.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        let moved = move_away(scene)?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_copied >= FILL_BYTES, "{moved:?}");
        let least = Duration::from_secs_f64(moved.bytes_copied as f64 / RATE as f64);
        // At least one flush follows the last byte, and times of the API are rounded.
        let least = least + Duration::from_millis(100) - Duration::from_millis(2);
        ensure!(took(&moved)? >= least, "{:?} rather than {least:?}: {moved:?}", took(&moved)?);

        let said = "SLOWED on purpose: 100ms more for each flush, at most 8388608 bytes a second";
        let stores: Vec<api::Store> = scene.ask(&["store", "list"])?;
        let impairments: Vec<_> = stores.iter().map(|store| store.impairment.as_deref()).collect();
        ensure!(impairments == [None, Some(said)], "{impairments:?}");
        let listed = scene.sterna(["store", "list"])?;
        ensure!(listed.stdout.contains(&format!("!! store b is {said}")), "{listed:?}");
        ensure!(scene.log()?.contains(said), "the log says nothing of it");
        scene.stop()?;
        guest::verify_image(&scene.path("b/v.img"), &stopped.content)
    });
}

#[test]
fn each_request_takes_as_much_longer_as_its_store_says() {
    const READS: u32 = 20;
    play_unstarted(|scene| {
        start_with(scene, "[stores.a.delay]\nread_us = 20000\noperations_per_second = 10000\n")?;
        scene.create_volume(DISK_BYTES)?;
        let mut client = Client::connect(&scene.export()?, ClientOptions::default())?;
        let begun = Instant::now();
        for _ in 0..READS {
            client.perform(Operation::Read { offset: 0, buffer: vec![0; 4096] })?;
        }
        ensure!(begun.elapsed() >= READS * Duration::from_millis(20), "{:?}", begun.elapsed());
        Ok(())
    });
}

#[test]
fn a_target_that_is_to_fail_ends_the_migration_and_leaves_the_source_alone() {
    let io = "operations = [\"write\"]\nafter = 8\n";
    let full = "operations = [\"write\"]\nerror = \"no-space\"\noffset = 1048576\nlength = 4194304\n";
    for (fault, failure, words) in [
        (io, "target-faulty", "the target's store failed"),
        (full, "target-full", "is full: make room there, then run: sterna migration retry m"),
    ] {
        play_unstarted(|scene| {
            start_with(scene, &format!("[stores.b.fault]\n{fault}"))?;
            scene.create_volume(DISK_BYTES)?;
            let stopped = guest::stop_and_verify(guest::start(&scene.export()?, FILL_BYTES)?)?;
            drop(stopped.client);
            let failed = move_away(scene)?;
            ensure!(failed.state == MigrationState::Failed, "{fault}: {failed:?}");
            ensure!(failed.guest == GuestLocation::Source, "{fault}: {failed:?}");
            ensure!(failed.failure.as_deref() == Some(failure), "{fault}: {failed:?}");
            let message = failed.message.as_deref().unwrap_or_default();
            ensure!(message.contains(words), "{fault}: {message}");
            scene.check_place("a")?;
            let stores: Vec<api::Store> = scene.ask(&["store", "list"])?;
            let said = stores[1].impairment.as_deref().unwrap_or_default();
            ensure!(said.starts_with("FAULTY on purpose: "), "{said}");
            scene.stop()?;
            guest::verify_image(&scene.path("a/v.img"), &stopped.content)
        });
    }
}

#[test]
fn a_volume_in_a_store_that_is_to_fail_fails_its_guest_and_goes_away_where_it_can_be_read() {
    play_unstarted(|scene| {
        start_with(scene, "[stores.a.fault]\noperations = [\"read\"]\ncount = 1\n")?;
        scene.create_volume(DISK_BYTES)?;
        let mut client = Client::connect(&scene.export()?, ClientOptions::default())?;
        let read = || Operation::Read { offset: 0, buffer: vec![0; 4096] };
        let failed = client.perform(read());
        ensure!(matches!(failed, Err(ClientError::Answered(errno)) if errno.0 == 5), "{failed:?}");
        client.perform(read()).context("the fault is spent")?;
        drop(client);
        scene.migrate("b").map(drop)
    });
}

#[test]
fn what_a_target_lost_by_one_failed_flush_is_copied_again() {
    play_unstarted(|scene| {
        start_with(scene, "[stores.b.fault]\noperations = [\"flush\"]\ncount = 1\n")?;
        scene.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&scene.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        let moved = move_away(scene)?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_copied > FILL_BYTES, "{moved:?}");
        scene.stop()?;
        guest::verify_image(&scene.path("b/v.img"), &stopped.content)
    });
}
