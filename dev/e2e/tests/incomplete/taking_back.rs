//! Tests of incomplete volumes that return to the host with their missing blocks.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Phase, VolumeState};
use e2e::qemu_nbd::QemuNbd;
use e2e::{LinkState, Pair, guest, play_pair, until};
use testbed::nbd_client::{Client, ClientOptions, Operation, WriteDurability};

use crate::{kills_wanted, lacks};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 32 << 20;
const BLOCK_BYTES: u64 = 4096;
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 50;
/// Bytes that may be copied besides the writes.
const SLACK_BYTES: u64 = 1 << 20;

/// Hands `v` over to beta without any blocks, with a low bandwidth.
fn hand_over(pair: &Pair) -> anyhow::Result<Migration> {
    let order =
        ["migrate", "v", "--to", "beta:a", "--strategy", "post-copy", "--bandwidth", "1MiB/s", "--detach"];
    let begun: Migration = pair.alpha.ask(&order)?;
    until("the volume works at beta, and lacks something", || {
        Ok(pair.beta.volume().ok().filter(|v| v.state == VolumeState::Serving && v.filling.is_some()))
    })?;
    until("alpha waits until nothing is missing", || {
        Ok((pair.alpha.migration(&begun.id)?.phase == Phase::Filling).then_some(()))
    })?;
    Ok(begun)
}

/// Checks that the volume of `departure` is back, and the outcome of that migration.
fn check_taken_back(pair: &Pair, departure: &str) -> anyhow::Result<()> {
    pair.check_at(&pair.alpha, &pair.beta)?;
    pair.check_departure_taken_back(departure)
}

#[test]
fn what_was_written_goes_home_and_nothing_else() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let mut content = std::fs::read(pair.alpha.path("a/v.img"))?;
        let departure = hand_over(pair)?;
        let mut client = Client::connect(&pair.beta.export()?, ClientOptions::default())?;
        for offset in (0..FILL_BYTES).step_by(1 << 20) {
            let data = vec![7; BLOCK_BYTES as usize];
            content[offset as usize..][..data.len()].copy_from_slice(&data);
            client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
        }
        drop(client);
        ensure!(lacks(&pair.beta)? > FILL_BYTES / 2, "most of it is at alpha");
        let home: Migration = pair.beta.ask(&["migrate", "v", "--to", "alpha", "--keep-source"])?;
        ensure!(home.state == MigrationState::Moved && home.replica.is_some(), "{home:?}");
        let written = FILL_BYTES / (1 << 20) * BLOCK_BYTES;
        let sent = home.bytes_copied + home.bytes_mirrored;
        ensure!(sent <= written + written / 20 + SLACK_BYTES, "{sent} bytes for {written} that were written");
        ensure!(!home.keep_source, "what lacks blocks is no copy: {home:?}");
        check_taken_back(pair, &departure.id)?;
        let again: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
        ensure!(again.state == MigrationState::Moved, "{again:?}");
        pair.beta.stop()?;
        ensure!(std::fs::read(pair.beta.path("a/v.img"))? == content, "the disk is what it was");
        Ok(())
    });
}

#[test]
fn what_was_written_goes_home_into_the_export_of_another_server() {
    play_pair(|pair| {
        let folder = pair.alpha.path("qemu");
        std::fs::create_dir(&folder)?;
        let server = QemuNbd::start(&folder, "qcow2", DISK_BYTES)?;
        pair.alpha.stop()?;
        pair.alpha.configure(&format!("[stores.qemu]\nnbd = '{}'\n", server.uri()))?;
        pair.alpha.start()?;
        pair.alpha.create_volume(DISK_BYTES)?;
        pair.alpha.migrate("qemu")?;
        // The former state of an export is unknown.
        pair.alpha.stop()?;
        pair.alpha.start()?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let departure = hand_over(pair)?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        ensure!(lacks(&pair.beta)? > FILL_BYTES / 2, "most of it is at alpha");
        let home: Migration = pair.beta.ask(&["migrate", "v", "--to", "alpha"])?;
        ensure!(home.state == MigrationState::Moved && home.bytes_copied < FILL_BYTES / 2, "{home:?}");
        pair.check_departure_taken_back(&departure.id)?;
        let volume = pair.alpha.volume()?;
        ensure!(
            volume.state == VolumeState::Serving && volume.store.as_deref() == Some("qemu"),
            "{volume:?}"
        );
        let content = guest::stop_and_verify(guest)?.content;
        pair.alpha.stop()?;
        guest::verify_image(&server.stop_and_check()?, &content)
    });
}

#[test]
fn nothing_comes_back_into_an_image_that_may_have_lost_something() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let content = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.content;
        pair.alpha.stop()?;
        pair.alpha.configure("[stores.a.fault]\noperations = [\"flush\"]\ncount = 1\n")?;
        pair.alpha.start()?;
        let mut client = Client::connect(&pair.alpha.export()?, ClientOptions::default())?;
        ensure!(client.perform(Operation::Flush).is_err(), "the guest is told of it");
        drop(client);
        let departure = hand_over(pair)?;
        let order = ["migrate", "v", "--to", "alpha:a"];
        for order in [&order[..], &[&order[..], &["--dry-run"]].concat()] {
            let refused = pair.beta.sterna(order)?;
            ensure!(refused.code != 0, "{refused:?}");
            let said = refused.stdout + &refused.stderr;
            ensure!(said.contains("a flush of it has failed"), "{said}");
        }
        ensure!(lacks(&pair.beta)? > 0, "little has come");
        until("it can be told to hurry", || {
            let set = pair.alpha.sterna(["migration", "set", &departure.id, "--bandwidth", "none"])?;
            Ok((set.code == 0).then_some(()))
        })?;
        let departure = pair.alpha.wait_for_migration(&departure.id)?;
        ensure!(departure.state == MigrationState::Moved, "{departure:?}");
        let home: Migration = pair.beta.ask(&order)?;
        ensure!(home.state == MigrationState::Moved && home.bytes_copied >= FILL_BYTES, "{home:?}");
        pair.alpha.stop()?;
        guest::verify_image(&pair.alpha.path("a/v.img"), &content)
    });
}

#[test]
fn a_way_back_waits_for_what_an_earlier_one_still_writes_and_not_for_ever() {
    /// Time of a write at alpha.
    const WRITE: Duration = Duration::from_secs(7);
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        pair.alpha.stop()?;
        let mut content = std::fs::read(pair.alpha.path("a/v.img"))?;
        let configuration = pair.alpha.folder().configuration();
        let before = std::fs::read(&configuration)?;
        pair.alpha.configure(&format!("[stores.a.delay]\nwrite_us = {}\n", WRITE.as_micros()))?;
        pair.alpha.start()?;
        hand_over(pair)?;
        let data = vec![7; BLOCK_BYTES as usize];
        content[..data.len()].copy_from_slice(&data);
        let mut client = Client::connect(&pair.beta.export()?, ClientOptions::default())?;
        client.perform(Operation::Write { offset: 0, data, durability: WriteDurability::Volatile })?;
        drop(client);
        let order = ["migrate", "v", "--to", "alpha:a"];
        let first: Migration = pair.beta.ask(&[&order[..], &["--detach"]].concat())?;
        until(
            "it is copied",
            || Ok((pair.beta.migration(&first.id)?.phase == Phase::Copying).then_some(())),
        )?;
        let began = Instant::now();
        // There is no sign that a write has reached a disk that does not answer.
        std::thread::sleep(Duration::from_millis(500));
        pair.beta.sterna(["migration", "cancel", &first.id])?.success()?;
        pair.beta.wait_for_migration(&first.id)?;
        let refused = pair.beta.sterna(order)?;
        ensure!(began.elapsed() < WRITE, "{:?}: {refused:?}", began.elapsed());
        let said = refused.stdout + &refused.stderr;
        ensure!(refused.code != 0 && said.contains("still in flight"), "{said}");
        // A write has also ended once its host was restarted.
        pair.alpha.kill()?;
        std::fs::write(&configuration, before)?;
        pair.alpha.start()?;
        let home: Migration = pair.beta.ask(&order)?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        let sent = home.bytes_copied + home.bytes_mirrored;
        ensure!(sent <= SLACK_BYTES, "what was written goes back, whatever came to nothing before: {home:?}");
        pair.alpha.stop()?;
        ensure!(std::fs::read(pair.alpha.path("a/v.img"))? == content, "the disk is what it was");
        Ok(())
    });
}

#[test]
fn what_does_not_get_home_goes_on_to_come() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let departure = hand_over(pair)?;
        for is_cut in [false, true] {
            guest::until_worked(&guest, WORK_REQUESTS)?;
            let order = ["migrate", "v", "--to", "alpha:a", "--bandwidth", "64KiB/s", "--detach"];
            let home: Migration = pair.beta.ask(&order)?;
            guest::until_worked(&guest, WORK_REQUESTS)?;
            ensure!(pair.beta.migration(&home.id)?.state == MigrationState::Running);
            if is_cut {
                pair.link.set(LinkState::BlackHole);
            }
            pair.beta.sterna(["migration", "cancel", &home.id])?.success()?;
            pair.link.set(LinkState::Up);
            let home = pair.beta.wait_for_migration(&home.id)?;
            ensure!(home.state == MigrationState::Cancelled, "{home:?}");
            guest::until_worked(&guest, WORK_REQUESTS)?;
            until("the departure goes on", || {
                let shown = pair.alpha.migration(&departure.id)?;
                Ok((shown.phase == Phase::Filling).then_some(()))
            })?;
            ensure!(lacks(&pair.beta)? > 0, "little has come");
        }
        until("it can be told to hurry", || {
            let set = pair.alpha.sterna(["migration", "set", &departure.id, "--bandwidth", "none"])?;
            Ok((set.code == 0).then_some(()))
        })?;
        until("nothing is missing", || Ok((lacks(&pair.beta)? == 0).then_some(())))?;
        let departure = pair.alpha.wait_for_migration(&departure.id)?;
        ensure!(departure.state == MigrationState::Moved && departure.message.is_none(), "{departure:?}");
        ensure!(pair.alpha.images("a")?.is_empty(), "{:?}", pair.alpha.images("a")?);
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn nothing_is_lost_whichever_host_is_killed_on_the_way_back() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let mut kills = 0;
        while kills < kills_wanted()? {
            let departure = hand_over(pair)?;
            guest::until_worked(&guest, WORK_REQUESTS)?;
            let order = ["migrate", "v", "--to", "alpha:a", "--bandwidth", "64KiB/s", "--detach"];
            let home: Migration = pair.beta.ask(&order)?;
            for _ in 0..3 {
                pair.kill_in_turn(kills)?;
                kills += 1;
                guest::until_worked(&guest, WORK_REQUESTS)?;
            }
            let shown = until("it goes on, or has ended", || {
                let set = pair.beta.sterna(["migration", "set", &home.id, "--bandwidth", "none"])?;
                let shown = pair.beta.migration(&home.id)?;
                Ok(Some(shown).filter(|shown| set.code == 0 || shown.state != MigrationState::Running))
            })?;
            let home = pair.beta.wait_for_migration(&shown.id).context("the way back")?;
            ensure!(home.state == MigrationState::Moved, "{home:?}");
            check_taken_back(pair, &departure.id)?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}
