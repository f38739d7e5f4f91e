//! Tests of a killed daemon during a migration between hosts: only data in flight is copied again.

use std::time::SystemTime;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState};
use e2e::{LinkState, Pair, guest, play_pair, until};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// A rate at which it can be paused half-way, also on a busy machine. The whole copy would take six seconds.
const SLOWLY: &str = "8MiB/s";
/// Bytes that may be copied again besides missing blocks. There are no tables of file systems here, so they are few.
const SLACK_BYTES: u64 = 4 << 20;

/// Begins to move `v`, pauses it when half is copied, and waits until alpha has saved its progress.
fn half_way(pair: &Pair) -> anyhow::Result<Migration> {
    let begun = pair.alpha.begin_to_migrate("beta:a", Some(SLOWLY))?;
    until("half of it is copied", || {
        Ok((pair.alpha.migration(&begun.id)?.bytes_copied >= FILL_BYTES / 2).then_some(()))
    })?;
    pair.alpha.sterna(["migration", "pause", &begun.id])?.success()?;
    // The first save after the pause may have begun before it, and each one waits for the flush of the one before.
    let mut seen = kept_at(pair)?;
    for _ in 0..3 {
        seen = until("how far it is is kept", || Ok(kept_at(pair)?.filter(|at| Some(*at) != seen)))?.into();
    }
    pair.alpha.migration(&begun.id)
}

/// Returns when alpha's chronicle was last saved.
fn kept_at(pair: &Pair) -> anyhow::Result<Option<SystemTime>> {
    for entry in std::fs::read_dir(pair.alpha.path("data/chronicles")).context("list the chronicles")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "kept") {
            // The file is replaced all the time.
            return Ok(std::fs::metadata(path).and_then(|found| found.modified()).ok());
        }
    }
    Ok(None)
}

/// A paused migration stays paused after a restart of its daemon, until it is resumed.
fn go_on(pair: &Pair, paused: &Migration) -> anyhow::Result<Migration> {
    let rests = pair.alpha.migration(&paused.id)?;
    ensure!(rests.state == MigrationState::Paused, "{rests:?}");
    pair.alpha.sterna(["migration", "resume", &paused.id])?.success()?;
    pair.alpha.wait_for_migration(&paused.id)
}

#[test]
fn killed_source_sends_only_what_was_missing() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        let paused = half_way(pair)?;
        let missing = paused.bytes_missing.context("what is missing is known")?;
        ensure!(missing < FILL_BYTES, "{paused:?}");
        pair.alpha.kill()?;
        pair.alpha.start()?;
        let ended = go_on(pair, &paused)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let again = ended.bytes_copied + ended.bytes_zero;
        ensure!(
            again <= missing + SLACK_BYTES,
            "{again} bytes were copied after the restart, and {missing} were missing"
        );
        pair.check_at(&pair.beta, &pair.alpha)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn killed_source_whose_guest_wrote_on_loses_none_of_it() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let paused = half_way(pair)?;
        // All later writes were in marked regions.
        let stopped = guest::stop_and_verify(guest)?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        let ended = go_on(pair, &paused)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        pair.check_at(&pair.beta, &pair.alpha)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn source_that_was_stopped_in_order_sends_only_what_was_missing() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        let paused = half_way(pair)?;
        pair.alpha.stop()?;
        pair.alpha.start()?;
        let ended = go_on(pair, &paused)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let again = ended.bytes_copied + ended.bytes_zero;
        ensure!(again <= paused.bytes_missing.unwrap_or(0) + SLACK_BYTES, "{again}, {paused:?}");
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn killed_target_is_sent_only_what_it_had_not_made_durable() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        let paused = half_way(pair)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        pair.alpha.sterna(["migration", "resume", &paused.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&paused.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let all = paused.bytes_copied + paused.bytes_missing.unwrap_or(0) + SLACK_BYTES;
        ensure!(ended.bytes_copied <= all, "{} bytes were copied: {paused:?}", ended.bytes_copied);
        pair.check_at(&pair.beta, &pair.alpha)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn a_migration_goes_on_when_the_thread_of_its_volume_ends_by_a_defect() {
    for (host, point) in [
        ("alpha", "lane-released"),
        ("alpha", "lane-ended"),
        ("beta", "lane-prepared"),
        ("beta", "lane-owned"),
    ] {
        play_pair(|pair| {
            pair.alpha.create_volume(8 << 20)?;
            let at = if host == "alpha" { &mut pair.alpha } else { &mut pair.beta };
            at.stop()?;
            at.start_with(&[("STERNA_FAIL_POINT", point)])?;
            let begun = pair.alpha.begin_to_migrate("beta:a", None)?;
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Moved, "{point} at {host}: {ended:?}");
            let failed = if host == "alpha" { &pair.alpha } else { &pair.beta };
            ensure!(failed.log()?.contains("the fail point of"), "{point} at {host} was not passed");
            ensure!(!pair.settled(1)?, "{point} at {host}: it is at alpha");
            pair.come_home().map(drop)
        });
    }
}

#[test]
fn how_a_move_was_ordered_is_known_to_a_daemon_that_was_killed_as_it_began() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        pair.alpha.stop()?;
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-started")])?;
        let order = ["migrate", "v", "--to", "beta:a", "--bandwidth", SLOWLY, "--detach"];
        pair.alpha.sterna(order)?;
        ensure!(pair.alpha.wait_for_end()? == 137, "the daemon is to be killed when the migration has begun");
        pair.alpha.start()?;
        let docket = std::fs::read_to_string(pair.alpha.path("data/dockets/m0.json"))?;
        ensure!(docket.contains("\"bandwidth_bytes_per_second\": 8388608"), "{docket}");
        pair.alpha.until_idle()
    });
}

#[test]
fn what_was_interrupted_can_be_cancelled_although_the_other_host_is_gone_for_good() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let paused = half_way(pair)?;
        pair.beta.kill()?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        pair.alpha.sterna(["migration", "cancel", &paused.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&paused.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        pair.alpha.check_place("a")?;
        // The guest has lost nothing, and the other host deletes its copy when it is back.
        let stopped = guest::stop_and_verify(guest)?;
        pair.beta.start()?;
        until("the copy is deleted", || Ok(pair.beta.images("a")?.is_empty().then_some(())))?;
        pair.alpha.stop()?;
        guest::verify_image(&pair.alpha.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn a_migration_can_be_cancelled_before_the_other_host_has_answered() {
    play_pair(|pair| {
        pair.alpha.create_volume(8 << 20)?;
        pair.link.set(LinkState::BlackHole);
        let order = pair.alpha.start_migrating("beta:a")?;
        let first =
            |migrations: Vec<Migration>| migrations.into_iter().find(|found| !found.state.has_ended());
        let begun = until("it is recorded", || Ok(first(pair.alpha.ask(&["migration", "list"])?)))?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        ensure!(order.wait()?.success().is_err(), "whoever ordered it is told that it has moved");
        pair.link.set(LinkState::Up);
        pair.alpha.check_place("a")?;
        pair.leave().map(drop)
    });
}
