//! Tests of stores on disks that fail, hang and fill up, while a migration uses them.
//!
//! They mount small file systems, so without root they are left out.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState};
use e2e::file_system::{Faults, FileSystem};
use e2e::{Host, fio, guest, play_with_mounts, until};
use testbed::nbd_client::{Client, ClientError, ClientOptions, Operation};

const DISK_BYTES: u64 = 32 << 20;
const STORE_BYTES: u64 = 96 << 20;
/// The daemon's default of the longest hold of a guest's write.
const MIRROR_WAIT_MAX: Duration = Duration::from_secs(1);
/// Extra time on a busy machine. A guest that waited for the target would wait until the test gives up.
const SLACK: Duration = Duration::from_secs(20);

/// Puts a store on a disk with faults and starts the daemon.
fn start_with_faulty(scene: &mut Host, store: &str) -> anyhow::Result<Faults> {
    let (mounted, faults) = FileSystem::on_faulty_disk(&scene.path(store), STORE_BYTES)?;
    scene.keep(mounted)?;
    scene.start()?;
    Ok(faults)
}

/// Begins a migration that takes eight seconds, and waits until it has copied something.
fn begin_slowly(scene: &Host) -> anyhow::Result<Migration> {
    let begun = scene.begin_to_migrate("b", Some("2MiB/s"))?;
    until("something is copied", || {
        let migration = scene.migration(&begun.id)?;
        ensure!(migration.state == MigrationState::Running, "it ended too early: {migration:?}");
        Ok((migration.bytes_copied > 512 << 10).then_some(migration))
    })
}

/// Checks that a migration has failed for this reason, also by exit code, and that the volume is where it was.
fn check_failed(scene: &Host, id: &str, failure: &str) -> anyhow::Result<()> {
    scene.sterna(["migration", "watch", id])?.expect(5)?;
    let migration = scene.migration(id)?;
    ensure!(migration.state == MigrationState::Failed, "{migration:?}");
    ensure!(migration.guest == GuestLocation::Source, "{migration:?}");
    ensure!(migration.failure.as_deref() == Some(failure), "{migration:?}");
    ensure!(migration.message.as_ref().is_some_and(|message| !message.is_empty()), "{migration:?}");
    scene.check_place("a")
}

#[test]
fn a_target_that_fails_during_the_copy_ends_the_migration_and_not_the_guest() {
    play_with_mounts(|scene| {
        let faults = start_with_faulty(scene, "b")?;
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let migration = begin_slowly(scene)?;
        faults.fail_writes()?;
        check_failed(scene, &migration.id, "target-faulty")?;
        faults.recover()?;
        scene.migrate("b").context("once the disk is repaired")?;
        guest::stop_and_verify(guest)?;
        Ok(())
    });
}

#[test]
fn a_target_that_hangs_holds_the_guest_for_a_second_and_the_migration_goes_on_later() {
    play_with_mounts(|scene| {
        let faults = start_with_faulty(scene, "b")?;
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let migration = begin_slowly(scene)?;
        let before = guest.mark();
        let hung = faults.hang()?;
        let suspended = until("mirroring is suspended", || Ok(scene.migration(&migration.id)?.suspended))?;
        guest::until_worked(&guest, 2000).context("while the target hangs")?;
        drop(hung);
        let ended = scene.wait_for_migration(&migration.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        scene.check_place("b")?;
        let felt = guest.between(&before, &guest.mark());
        println!("{suspended}; slowest request {:?}", felt.latency_max);
        ensure!(felt.latency_max <= MIRROR_WAIT_MAX + SLACK, "{felt:?}");
        guest::stop_and_verify(guest)?;
        Ok(())
    });
}

#[test]
fn a_source_that_cannot_be_read_fails_its_guest_as_ever_and_the_migration_with_the_place() {
    play_with_mounts(|scene| {
        let faults = start_with_faulty(scene, "a")?;
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let mut stopped = guest::stop_and_verify(guest)?;
        faults.fail_reads()?;
        let read = stopped.client.perform(Operation::Read { offset: 0, buffer: vec![0; 4096] });
        ensure!(matches!(read, Err(ClientError::Answered(errno)) if errno.0 == 5), "{read:?}");
        // A thread of its own writes the log.
        let said = until("the log says so", || {
            let log = scene.log()?;
            Ok(log
                .lines()
                .find(|line| line.contains("a guest's request failed in its store"))
                .map(str::to_owned))
        })?;
        for word in ["volume=v", "offset=0", "length=4096", "error=read: Input/output error"] {
            ensure!(said.contains(word), "{word}: {said}");
        }
        let migration = scene.begin_to_migrate("b", None)?;
        check_failed(scene, &migration.id, "source-unreadable")?;
        faults.recover()?;
        scene.migrate("b").context("once the disk is repaired")?;
        scene.stop()?;
        guest::verify_image(&scene.path("b/v.img"), &stopped.content)
    });
}

#[test]
fn a_target_that_is_filled_by_the_guests_own_writes_ends_the_migration_and_not_the_guest() {
    const LARGER_THAN_STORE: u64 = 64 << 20;
    play_with_mounts(|scene| {
        scene.keep(FileSystem::plain(&scene.path("b"), 24 << 20)?)?;
        scene.start()?;
        scene.create_volume(LARGER_THAN_STORE)?;
        fio::at_work(scene, LARGER_THAN_STORE, || {
            // Slowly, so that the store is full before the copy ends, also on a busy machine.
            let migration = scene.begin_to_migrate("b", Some("4MiB/s"))?;
            check_failed(scene, &migration.id, "target-full")
        })?;
        // The volume can return to a store with free space.
        let mut client = Client::connect(&scene.export()?, ClientOptions::default())?;
        client.perform(Operation::Flush)?;
        Ok(())
    });
}

#[test]
fn a_disk_of_the_machine_that_answers_nobody_any_more_keeps_no_image_from_being_deleted() {
    play_with_mounts(|scene| {
        let folder = scene.path("lost");
        std::fs::create_dir(&folder)?;
        let (lost, _faults) = FileSystem::on_faulty_disk(&folder, STORE_BYTES)?;
        lost.lose_disk()?;
        scene.keep(lost)?;
        scene.start()?;
        scene.create_volume(DISK_BYTES)?;
        scene.migrate("b")?;
        scene.check_place("b")?;
        ensure!(!scene.path("a/v.img").exists(), "the image that the volume has left");
        scene.sterna(["volume", "remove", "v"])?.success()?;
        ensure!(!scene.path("b/v.img").exists(), "the image of the volume");
        Ok(())
    });
}
