//! Tests of incomplete volumes at another host, under a guest at work.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Phase, Volume, VolumeFilling, VolumeState};
use e2e::{Host, LinkState, Pair, guest, play_pair, until};
use testbed::nbd_client::{Address, Client, ClientError, ClientOptions, Operation, WriteDurability};

use crate::kills_wanted;

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 32 << 20;
const BLOCK_BYTES: u64 = 4096;
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 50;
/// Longest time of a request that should be answered.
const ANSWER: Duration = Duration::from_secs(30);
/// Time after which a request counts as unanswered.
const NO_ANSWER: Duration = Duration::from_secs(2);

/// Hands `v` over without any blocks, and returns once it is served at the other host.
fn hand_over(from: &Host, to: &Host, target: &str, more: &[&str]) -> anyhow::Result<Migration> {
    let order = ["migrate", "v", "--to", target, "--strategy", "post-copy", "--detach"];
    let begun: Migration = from.ask(&[&order[..], more].concat())?;
    until("the volume works at the other host, and lacks something", || {
        Ok(to.volume().ok().filter(|volume| volume.state == VolumeState::Serving && volume.filling.is_some()))
    })?;
    Ok(begun)
}

/// Waits until the volume is complete, and the source knows that.
fn until_whole(from: &Host, to: &Host, migration: &str) -> anyhow::Result<()> {
    until("nothing is missing", || Ok(filling(to)?.is_none().then_some(())))?;
    let ended = from.wait_for_migration(migration)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    Ok(())
}

fn filling(host: &Host) -> anyhow::Result<Option<VolumeFilling>> {
    // A daemon that has just started may not have opened it yet.
    let volume = host.volume()?;
    Ok(if volume.state == VolumeState::Serving { volume.filling } else { None })
}

fn perform(export: &Address, operation: Operation, wait: Duration) -> Result<Operation, ClientError> {
    let options = ClientOptions { answer_deadline: wait, ..ClientOptions::default() };
    Client::connect(export, options)?.perform(operation)
}

fn read(export: &Address, offset: u64, wait: Duration) -> anyhow::Result<Vec<u8>> {
    match perform(export, Operation::Read { offset, buffer: vec![0; BLOCK_BYTES as usize] }, wait)? {
        Operation::Read { buffer, .. } => Ok(buffer),
        other => anyhow::bail!("{other:?}"),
    }
}

#[test]
fn three_phases_end_after_the_rounds_that_were_ordered_whatever_a_guest_writes() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let order = ["migrate", "v", "--to", "beta:a", "--strategy", "three-phase", "--rounds", "2"];
        let ended: Migration = pair.alpha.ask(&[&order[..], &["--bandwidth", "16MiB/s"]].concat())?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let shown = pair.alpha.migration(&ended.id)?;
        ensure!((1..=2).contains(&shown.rounds.len()), "{:?}", shown.rounds);
        pair.check_at(&pair.beta, &pair.alpha)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn only_what_is_missing_waits_while_the_link_is_away() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let mut content = std::fs::read(pair.alpha.path("a/v.img"))?;
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "2MiB/s"])?;
        ensure!(pair.alpha.migration(&begun.id)?.phase == Phase::Filling, "the source waits");
        until("something has come", || Ok(filling(&pair.beta)?.filter(|filling| filling.bytes_pushed > 0)))?;
        pair.link.set(LinkState::BlackHole);

        let export = pair.beta.export()?;
        let lacking = filling(&pair.beta)?.context("it lacks most of it")?;
        // Its guest also discards, so the block after it may be a hole.
        let is_long = |range: &&api::MissingRange| range.length_bytes >= 2 * BLOCK_BYTES;
        let missing =
            lacking.ranges.iter().rev().find(is_long).context("where that is, is told")?.offset_bytes;
        let data = vec![7; BLOCK_BYTES as usize];
        let write = Operation::Write { offset: missing, data, durability: WriteDurability::Durable };
        perform(&export, write, NO_ANSWER).context("what is overwritten need not have come")?;
        content[missing as usize..][..BLOCK_BYTES as usize].fill(7);
        let written = read(&export, missing, NO_ANSWER).context("what was written is there")?;
        ensure!(written == [7; BLOCK_BYTES as usize]);
        let missing = missing + BLOCK_BYTES;
        let data = vec![8; BLOCK_BYTES as usize];
        let write = Operation::Write { offset: missing, data, durability: WriteDurability::Volatile };
        perform(&export, write, NO_ANSWER)?;
        content[missing as usize..][..BLOCK_BYTES as usize].fill(8);
        perform(&export, Operation::Flush, NO_ANSWER).context("a flush waits for nothing that is missing")?;
        let missing = missing + BLOCK_BYTES;
        ensure!(read(&export, missing, NO_ANSWER).is_err(), "it has not come, and is not made up");
        ensure!(
            pair.alpha.images("a")?.iter().any(|image| image == "v.img"),
            "{:?}",
            pair.alpha.images("a")?
        );

        pair.link.set(LinkState::Up);
        let pulled = read(&export, missing, ANSWER)?;
        ensure!(pulled == content[missing as usize..][..BLOCK_BYTES as usize], "at {missing}");
        pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
        until_whole(&pair.alpha, &pair.beta, &begun.id)?;
        ensure!(pair.alpha.images("a")?.is_empty(), "{:?}", pair.alpha.images("a")?);
        pair.beta.stop()?;
        ensure!(std::fs::read(pair.beta.path("a/v.img"))? == content, "the disk is what it was");
        Ok(())
    });
}

#[test]
fn what_a_guest_reads_waits_for_no_limit_of_the_rest_and_for_no_pause() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let content = std::fs::read(pair.alpha.path("a/v.img"))?;
        // A background piece takes a quarter of a minute, and several are in flight.
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "64KiB/s"])?;
        pair.alpha.sterna(["migration", "pause", &begun.id])?.success()?;
        let export = pair.beta.export()?;
        for offset in (0..FILL_BYTES).step_by(2 << 20) {
            let found = read(&export, offset, ANSWER).with_context(|| format!("at {offset}"))?;
            ensure!(found == content[offset as usize..][..BLOCK_BYTES as usize], "at {offset}");
        }
        ensure!(filling(&pair.beta)?.is_some(), "the rest waits");
        pair.alpha.sterna(["migration", "resume", &begun.id])?.success()?;
        pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
        until_whole(&pair.alpha, &pair.beta, &begun.id)
    });
}

#[test]
fn what_would_hurt_a_volume_that_is_filled_is_refused_and_its_way_home_waits() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let begun =
            hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s", "--keep-source"])?;
        for arguments in [&["volume", "resize", "v", "128MiB"][..], &["volume", "remove", "v", "--force"]] {
            let refused = pair.beta.sterna(arguments)?;
            ensure!(refused.code != 0 && refused.stderr.contains("filled from host"), "{refused:?}");
        }
        for arguments in [
            &["migration", "cancel", &begun.id][..],
            &["volume", "promote", "v", "--force"],
            &["volume", "remove", "v", "--force"],
            &["replica", "drop", "v"],
            &["replica", "drop", "v", "--all"],
        ] {
            let refused = pair.alpha.sterna(arguments)?;
            ensure!(refused.code != 0, "{refused:?}");
        }
        // If an incomplete volume were handed over, its missing blocks would be at neither host.
        let order = ["migrate", "v", "--to", "alpha:a", "--strategy", "post-copy", "--detach"];
        let home: Migration = pair.beta.ask(&order)?;
        ensure!(home.queue.as_ref().is_some_and(|place| place.reason.contains("alpha")), "{home:?}");
        guest::until_worked(&guest, WORK_REQUESTS)?;
        ensure!(filling(&pair.beta)?.is_some(), "none of that has changed anything");
        pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
        let home = pair.beta.wait_for_migration(&home.id)?;
        ensure!(home.state == MigrationState::Moved && home.replica.is_some(), "{home:?}");
        pair.check_at(&pair.alpha, &pair.beta)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn what_a_lost_host_had_is_given_up_by_order_and_only_that() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        let refused = pair.beta.sterna(["volume", "promote", "v", "--without-missing"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("which answers"), "{refused:?}");
        let order = ["migrate", "v", "--to", "alpha:a", "--strategy", "post-copy", "--detach"];
        let waits: Migration = pair.beta.ask(&order)?;
        ensure!(waits.queue.as_ref().is_some_and(|place| place.reason.contains("alpha")), "{waits:?}");
        pair.beta.sterna(["migration", "cancel", &waits.id])?.success()?;

        pair.alpha.kill()?;
        until("beta knows that alpha is away", || {
            Ok(filling(&pair.beta)?.filter(|filling| filling.waits_for.is_some()))
        })?;
        let promoted: Volume = pair.beta.ask(&["volume", "promote", "v", "--without-missing"])?;
        let lost = promoted.filling.context("something is lost")?;
        let last = *lost.ranges.last().context("where that is, is told")?;
        ensure!(lost.is_given_up && lost.bytes_missing > 0 && last.length_bytes >= 8192, "{lost:?}");
        let export = pair.beta.export()?;
        ensure!(read(&export, last.offset_bytes, ANSWER).is_err(), "what is lost cannot be read");
        if let Some(first) = lost.ranges.first().filter(|first| first.offset_bytes > 0) {
            read(&export, first.offset_bytes - BLOCK_BYTES, ANSWER)?;
        }
        let refused = pair.beta.sterna(["volume", "resize", "v", "128MiB"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("fstrim"), "{refused:?}");

        pair.beta.kill()?;
        pair.beta.start()?;
        until("the volume is served again", || {
            Ok(pair.beta.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
        })?;
        let lost = filling(&pair.beta)?.context("it is lost still")?;
        ensure!(lost.is_given_up && read(&export, last.offset_bytes, ANSWER).is_err(), "{lost:?}");
        let mut client = Client::connect(&export, ClientOptions::default())?;
        for range in &lost.ranges {
            for offset in (range.offset_bytes..range.offset_bytes + range.length_bytes).step_by(1 << 20) {
                let length = (range.offset_bytes + range.length_bytes - offset).min(1 << 20);
                let data = vec![7; usize::try_from(length)?];
                client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
            }
        }
        client.perform(Operation::Flush)?;
        read(&export, last.offset_bytes, ANSWER)?;
        until("nothing is missing any more", || Ok(filling(&pair.beta)?.is_none().then_some(())))?;
        pair.beta.sterna(["volume", "resize", "v", "128MiB"])?.success()?;
        pair.alpha.start()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        Ok(())
    });
}

#[test]
fn a_source_whose_blocks_were_given_up_has_an_end_and_keeps_its_image() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        pair.beta.sterna(["volume", "promote", "v", "--without-missing", "--force"])?.success()?;
        pair.beta.sterna(["volume", "remove", "v", "--force"])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        ensure!(ended.message.as_ref().is_some_and(|why| why.contains("kept here")), "{ended:?}");
        let images = pair.alpha.images("a")?;
        ensure!(images.iter().any(|image| image.starts_with("v.img")), "{images:?}");
        Ok(())
    });
}

#[test]
fn what_was_written_since_is_served_although_the_lost_source_is_removed_from_the_hosts() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        let offset = FILL_BYTES - BLOCK_BYTES;
        let data = vec![7; BLOCK_BYTES as usize];
        let write = Operation::Write { offset, data, durability: WriteDurability::Durable };
        perform(&pair.beta.export()?, write, ANSWER)?;
        pair.alpha.kill()?;
        pair.beta.sterna(["host", "remove", "alpha", "--force"])?.success()?;
        pair.beta.kill()?;
        pair.beta.start()?;
        until("the volume is served", || {
            Ok(pair.beta.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
        })?;
        let promoted: Volume = pair.beta.ask(&["volume", "promote", "v", "--without-missing"])?;
        ensure!(promoted.filling.is_some_and(|lost| lost.is_given_up), "the rest is given up by name");
        let written = read(&pair.beta.export()?, offset, ANSWER)?;
        ensure!(written == [7; BLOCK_BYTES as usize]);
        Ok(())
    });
}

#[test]
fn a_volume_whose_target_is_lost_continues_at_its_source_as_it_was_when_it_left() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let content = std::fs::read(pair.alpha.path("a/v.img"))?;
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        pair.beta.kill()?;
        let late = pair.alpha.sterna(["migration", "cancel", &begun.id])?;
        ensure!(late.code != 0 && late.stderr.contains("sterna volume promote v --force"), "{late:?}");
        until("it is known that beta is away", || {
            Ok(pair.alpha.sterna(["volume", "promote", "v", "--force"])?.success().ok())
        })?;
        let offset = FILL_BYTES / 2;
        let found = read(&pair.alpha.export()?, offset, ANSWER)?;
        ensure!(found == content[offset as usize..][..BLOCK_BYTES as usize], "at {offset}");
        let ended = pair.alpha.migration(&begun.id)?;
        ensure!(ended.state == MigrationState::HandedBack, "{ended:?}");
        Ok(())
    });
}

#[test]
fn nothing_is_lost_whichever_host_is_killed_while_a_volume_is_filled() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let (mut kills, mut moves) = (0, 0);
        while kills < kills_wanted()? {
            let is_home = moves % 2 == 0;
            let target = if is_home { "beta:a" } else { "alpha:a" };
            let check_owner = |pair: &Pair| -> anyhow::Result<()> {
                let (from, to) = if is_home { (&pair.alpha, &pair.beta) } else { (&pair.beta, &pair.alpha) };
                until("the volume is served", || {
                    Ok(to.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
                })?;
                ensure!(
                    from.volume().ok().is_none_or(|volume| volume.state != VolumeState::Serving),
                    "two owners"
                );
                Ok(())
            };
            let (from, to) = if is_home { (&pair.alpha, &pair.beta) } else { (&pair.beta, &pair.alpha) };
            let begun = hand_over(from, to, target, &["--bandwidth", "1MiB/s"])?;
            for _ in 0..3 {
                pair.kill_in_turn(kills)?;
                kills += 1;
                check_owner(pair)?;
                guest::until_worked(&guest, WORK_REQUESTS)?;
            }
            let (from, to) = if is_home { (&pair.alpha, &pair.beta) } else { (&pair.beta, &pair.alpha) };
            if filling(to)?.is_some() {
                // It may just have learnt that nothing is missing.
                let _ = from.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?;
            }
            until_whole(from, to, &begun.id)?;
            moves += 1;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_source_hears_at_once_that_nothing_is_missing() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, 1 << 20)?)?.client);
        let mut took = Vec::new();
        for trip in 0..10 {
            let (from, to) = if trip % 2 == 0 { (&pair.alpha, "beta:a") } else { (&pair.beta, "alpha:a") };
            let ended: Migration = from.ask(&["migrate", "v", "--to", to, "--strategy", "post-copy"])?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
            took.push(ended.seconds);
            // A source that only polls would ask after this time.
            if ended.seconds < 0.5 {
                println!("seconds: {took:?}");
                return Ok(());
            }
        }
        anyhow::bail!("none of {took:?} s is less than a question takes to come");
    });
}

#[test]
fn a_restarted_source_says_what_is_missing_only_when_it_has_heard_it() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        pair.alpha.kill()?;
        pair.link.set(LinkState::Cut);
        pair.alpha.start()?;
        let mut shown = pair.alpha.migration(&begun.id)?;
        ensure!(shown.bytes_missing.is_none() && shown.fraction < 1.0, "nobody has said it: {shown:?}");
        let text = pair.alpha.sterna(["migration", "show", &begun.id])?.success()?;
        ensure!(text.contains("unknown") && !text.contains('%'), "{text}");
        pair.link.set(LinkState::Up);
        shown = until("it is known what is missing", || {
            Ok(Some(pair.alpha.migration(&begun.id)?).filter(|shown| shown.bytes_missing.is_some()))
        })?;
        let (said, lacking) =
            (shown.bytes_missing.unwrap_or(0), filling(&pair.beta)?.context("it lacks some")?);
        // The figure is a little old, so less may be missing.
        let fits = lacking.bytes_missing <= said && said <= lacking.bytes_at_handover;
        ensure!(fits && said > 0 && shown.fraction < 1.0, "{shown:?}, {lacking:?}");
        let text = pair.alpha.sterna(["migration", "show", &begun.id])?.success()?;
        ensure!(!text.contains("100.0 %"), "{text}");
        pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
        until_whole(&pair.alpha, &pair.beta, &begun.id)
    });
}

/// Returns the size of a host's records of writes for copies at other hosts.
fn kept(host: &Host) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(host.path("data/chronicles")).context("list the chronicles")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".kept") {
            found.push(name);
        }
    }
    Ok(found)
}

#[test]
fn what_is_whole_records_nothing_for_a_host_that_keeps_nothing() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let begun = hand_over(&pair.alpha, &pair.beta, "beta:a", &["--bandwidth", "1MiB/s"])?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        ensure!(kept(&pair.beta)?.len() == 1, "it may go back as long as it lacks something");
        pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
        until_whole(&pair.alpha, &pair.beta, &begun.id)?;
        until("nothing is recorded", || Ok(kept(&pair.beta)?.is_empty().then_some(())))?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        ensure!(kept(&pair.beta)?.is_empty(), "{:?}", kept(&pair.beta)?);
        // The return reuses the kept image.
        let order = ["migrate", "v", "--to", "alpha:a", "--strategy", "post-copy", "--keep-source"];
        let ended: Migration = pair.beta.ask(&order)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        guest::until_worked(&guest, WORK_REQUESTS)?;
        ensure!(!kept(&pair.alpha)?.is_empty(), "what is written is known for the way back");
        guest::stop_and_verify(guest).map(drop)
    });
}
