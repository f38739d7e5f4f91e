//! Tests of stores of another host that fail, hang and fill up, while a volume moves there.
//!
//! They mount small file systems, so without root they are left out.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState};
use e2e::file_system::{Faults, FileSystem};
use e2e::{Pair, guest, play_pair_with_mounts, until};
use lab::workload::Guest;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
const STORE_BYTES: u64 = 96 << 20;
/// A rate at which the migration of the filled part takes a while.
const SLOWLY: &str = "2MiB/s";
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 2000;
/// Longest hold of a guest's request by a migration, with extra time on a busy machine.
const HELD_MAX: Duration = Duration::from_secs(1);
const SLACK: Duration = Duration::from_secs(20);

/// Puts `beta`'s store `a` on a disk with faults.
fn with_faulty_store(pair: &mut Pair) -> anyhow::Result<Faults> {
    pair.beta.stop()?;
    let (mounted, faults) = FileSystem::on_faulty_disk(&pair.beta.path("a"), STORE_BYTES)?;
    pair.beta.keep(mounted)?;
    pair.beta.start()?;
    Ok(faults)
}

/// Begins a slow move of a busy volume to `beta`, and waits until a part has arrived.
fn half_way(pair: &Pair) -> anyhow::Result<(Guest, Migration)> {
    pair.alpha.create_volume(DISK_BYTES)?;
    let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
    let begun: Migration = until("beta can be reached", || {
        Ok(pair.alpha.ask(&["migrate", "v", "--to", "beta:a", "--bandwidth", SLOWLY, "--detach"]).ok())
    })?;
    until("a part is copied", || {
        let migration = pair.alpha.migration(&begun.id)?;
        ensure!(migration.state == MigrationState::Running, "it ended too early: {migration:?}");
        Ok((migration.bytes_copied > 2 << 20).then_some(migration))
    })
    .map(|migration| (guest, migration))
}

/// Checks that a migration has failed for this reason, also in its message, and that nothing of it is left.
fn check_failed(pair: &Pair, id: &str, failure: &str) -> anyhow::Result<()> {
    pair.alpha.sterna(["migration", "watch", id])?.expect(5)?;
    let migration = pair.alpha.migration(id)?;
    ensure!(migration.guest == GuestLocation::Source, "{migration:?}");
    ensure!(migration.failure.as_deref() == Some(failure), "{migration:?}");
    ensure!(migration.message.as_ref().is_some_and(|message| !message.is_empty()), "{migration:?}");
    pair.check_at(&pair.alpha, &pair.beta)
}

#[test]
fn a_store_that_fails_at_another_host_ends_the_migration_and_not_the_guest() {
    play_pair_with_mounts(|pair| {
        let faults = with_faulty_store(pair)?;
        let (guest, migration) = half_way(pair)?;
        faults.fail_writes()?;
        check_failed(pair, &migration.id, "target-faulty")?;
        faults.recover()?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.leave().context("once the disk is repaired")?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_store_that_hangs_at_another_host_holds_no_guest_and_the_migration_goes_on_later() {
    play_pair_with_mounts(|pair| {
        let faults = with_faulty_store(pair)?;
        let (guest, migration) = half_way(pair)?;
        let before = guest.mark();
        let hung = faults.hang()?;
        guest::until_worked(&guest, 2 * WORK_REQUESTS).context("while the target hangs")?;
        drop(hung);
        let ended = pair.alpha.wait_for_migration(&migration.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        pair.check_at(&pair.beta, &pair.alpha)?;
        let felt = guest.between(&before, &guest.mark());
        ensure!(felt.latency_max <= HELD_MAX + SLACK, "{felt:?}");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_store_that_is_filled_at_another_host_ends_the_migration_and_not_the_guest() {
    play_pair_with_mounts(|pair| {
        pair.beta.stop()?;
        pair.beta.keep(FileSystem::plain(&pair.beta.path("a"), STORE_BYTES)?)?;
        pair.beta.start()?;
        let (guest, migration) = half_way(pair)?;
        // Another program takes the remaining space.
        // The file is not among the images.
        let ballast = pair.beta.path("a/lost+found/ballast");
        let filled = std::fs::write(&ballast, vec![1; 2 * STORE_BYTES as usize]);
        ensure!(filled.is_err(), "it fits");
        check_failed(pair, &migration.id, "target-full")?;
        std::fs::remove_file(ballast)?;
        pair.leave().context("once there is room")?;
        guest::stop_and_verify(guest).map(drop)
    });
}
