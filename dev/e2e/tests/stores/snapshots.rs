//! Tests of snapshots: one cut of several volumes, and the way back to it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use api::Volume;
use e2e::{Host, guest, play, play_unstarted, until};
use testbed::nbd_client::{Address, Client, Operation, WriteDurability};

use crate::cloned::play_on_each;

const DISK_BYTES: u64 = 16 << 20;
const BLOCK_BYTES: u64 = 4096;
const VOLUMES: [&str; 3] = ["v", "w", "u"];

/// Returns the volume and the block that write number `number` goes to.
fn place_of(number: u64) -> (usize, u64) {
    let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    ((scattered % 3) as usize, scattered / 3 % (DISK_BYTES / BLOCK_BYTES))
}

fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK_BYTES as usize / 8)
}

fn export_of(host: &Host, name: &str) -> anyhow::Result<Address> {
    Ok(host.ask::<Volume>(&["volume", "show", name])?.uri.parse()?)
}

fn clients(host: &Host) -> anyhow::Result<Vec<Client>> {
    VOLUMES.iter().map(|name| guest::connect(&export_of(host, name)?)).collect()
}

fn write(clients: &mut [Client], number: u64) -> anyhow::Result<()> {
    let (volume, block) = place_of(number);
    let (offset, data) = (block * BLOCK_BYTES, content(number));
    let durability = WriteDurability::Volatile;
    let client = clients.get_mut(volume).context("there are three volumes")?;
    client.perform(Operation::Write { offset, data, durability }).map(drop).map_err(Into::into)
}

/// Checks that three images together have exactly the first so many writes, one after the other; returns how many.
fn count_of(images: &[PathBuf]) -> anyhow::Result<u64> {
    let mut found = BTreeMap::new();
    for (volume, image) in images.iter().enumerate() {
        let bytes = std::fs::read(image).with_context(|| image.display().to_string())?;
        for (block, bytes) in (0..).zip(bytes.chunks(BLOCK_BYTES as usize)) {
            let number = u64::from_le_bytes(bytes[..8].try_into()?);
            ensure!(bytes == content(number), "a torn block {block} of {}", image.display());
            if number > 0 {
                found.insert((volume, block), number);
            }
        }
    }
    let last = found.values().copied().max().unwrap_or_default();
    let expected: BTreeMap<_, _> = (1..=last).map(|number| (place_of(number), number)).collect();
    ensure!(found == expected, "not all writes up to {last}, or one behind it");
    Ok(last)
}

fn images(host: &Host, folder: &str, suffix: &str) -> Vec<PathBuf> {
    VOLUMES.iter().map(|name| host.path(&format!("{folder}/{name}{suffix}.img"))).collect()
}

fn create_all(host: &Host, store: &str) -> anyhow::Result<()> {
    for name in VOLUMES {
        let size = DISK_BYTES.to_string();
        host.sterna(["volume", "create", name, "--store", store, "--size", &size])?.success()?;
    }
    Ok(())
}

/// Takes snapshots of three volumes while a client writes to one after the other, reverts to one, and checks all.
fn snap_and_revert(host: &mut Host, store: &str, folder: &str) -> anyhow::Result<()> {
    create_all(host, store)?;
    let (answered, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let mut writers = clients(host)?;
    let (told, ends) = (Arc::clone(&answered), Arc::clone(&is_over));
    let thread = std::thread::spawn(move || {
        let mut number = 0;
        while !ends.load(Ordering::SeqCst) {
            number += 1;
            write(&mut writers, number)?;
            told.store(number, Ordering::SeqCst);
        }
        Ok::<_, anyhow::Error>(number)
    });
    let mut bounds = Vec::new();
    for label in ["one", "two", "three"] {
        let first = answered.load(Ordering::SeqCst);
        until("a client writes", || {
            ensure!(!thread.is_finished(), "the client has ended");
            Ok((answered.load(Ordering::SeqCst) > first + 200).then_some(()))
        })?;
        let before = answered.load(Ordering::SeqCst);
        let taken: Vec<Volume> = host.ask(&["volume", "snapshot", "v", "w", "u", "--label", label])?;
        let groups: Vec<_> = taken.iter().filter_map(|one| Some(&one.snapshot_of.as_ref()?.group)).collect();
        ensure!(groups.len() == 3 && groups.iter().all(|group| *group == groups[0]), "{taken:?}");
        ensure!(taken.iter().all(|one| one.read_only), "{taken:?}");
        bounds.push((label, before, answered.load(Ordering::SeqCst) + 1));
        let refused = host.sterna(["volume", "revert", "v", label, "--json"])?;
        ensure!(refused.stdout.contains("volume_in_use"), "{refused:?}");
    }
    is_over.store(true, Ordering::SeqCst);
    let last = thread.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    let listed: Vec<Volume> = host.ask(&["volume", "snapshots", "w"])?;
    let names: Vec<_> = listed.iter().map(|one| one.name.as_str()).collect();
    ensure!(names == ["w@one", "w@two", "w@three"], "{names:?}");
    for name in VOLUMES {
        let reverted: Vec<Volume> = host.ask(&["volume", "revert", name, "two", "--keep-current"])?;
        ensure!(reverted.len() == 1 && reverted[0].name == name, "{reverted:?}");
    }
    host.stop()?;
    let mut counts = BTreeMap::new();
    for (label, before, after) in &bounds {
        let count = count_of(&images(host, folder, &format!("@{label}")))?;
        ensure!((*before..=*after).contains(&count), "{label}: {count} is not in {before}..={after}");
        counts.insert(*label, count);
    }
    println!("{counts:?} of {last} writes");
    ensure!(count_of(&images(host, folder, ""))? == counts["two"], "the volumes are not what they were");
    host.start()?;
    // The relations are in the journal.
    let listed: Vec<Volume> = host.ask(&["volume", "snapshots", "v"])?;
    ensure!(listed.len() == 4, "{listed:?}");
    host.sterna(["volume", "remove", "v@one"])?.success()?;
    host.sterna(["volume", "remove", "v"])?.success()?;
    let orphans: Vec<Volume> = host.ask(&["volume", "snapshots"])?;
    ensure!(orphans.iter().any(|one| one.name == "v@two"), "{orphans:?}");
    Ok(())
}

#[test]
fn snapshots_that_are_mirrored_are_of_one_instant_and_lead_back() {
    play(|host| snap_and_revert(host, "a", "a"));
}

#[test]
fn snapshots_that_share_blocks_are_of_one_instant_and_lead_back() {
    play_on_each(|host| snap_and_revert(host, "x", "disk/x"));
}

/// Fills three volumes, takes snapshots, and overwrites all; ends with the count at the snapshots.
fn prepare(host: &Host) -> anyhow::Result<u64> {
    create_all(host, "a")?;
    let mut writers = clients(host)?;
    (1..=300).try_for_each(|number| write(&mut writers, number))?;
    host.sterna(["volume", "snapshot", "v", "w", "u", "--label", "then"])?.success()?;
    (301..=900).try_for_each(|number| write(&mut writers, number))?;
    Ok(300)
}

#[test]
fn a_daemon_that_is_killed_while_it_reverts_goes_on_before_it_serves() {
    for point in ["before-revert-begun", "after-revert-begun", "before-reverted", "after-reverted"] {
        play_unstarted(|host| {
            host.start_with(&[("STERNA_FAIL_POINT", point)])?;
            let then = prepare(host)?;
            ensure!(host.sterna(["volume", "revert", "v", "then"])?.code != 0, "the daemon was not killed");
            host.wait_for_end()?;
            host.start()?;
            let is_reverted = point != "before-revert-begun";
            // A client is served only what is complete.
            let mut client = guest::connect(&export_of(host, "v")?)?;
            let expected: BTreeMap<u64, u64> = (1..=if is_reverted { then } else { 900 })
                .filter(|number| place_of(*number).0 == 0)
                .map(|number| (place_of(number).1, number))
                .collect();
            for block in 0..DISK_BYTES / BLOCK_BYTES {
                let buffer = vec![1; BLOCK_BYTES as usize];
                let read = client.perform(Operation::Read { offset: block * BLOCK_BYTES, buffer })?;
                let number = expected.get(&block).copied().unwrap_or_default();
                let is_it = matches!(&read, Operation::Read { buffer, .. } if *buffer == content(number));
                ensure!(is_it, "{point}: block {block} has not write {number}");
            }
            drop(client);
            host.sterna(["volume", "remove", "v@then"])?.success().map(drop)
        });
    }
}

#[test]
fn what_cannot_be_reverted_says_why_and_a_lost_snapshot_what_to_do() {
    play(|host| {
        create_all(host, "a")?;
        host.sterna(["volume", "snapshot", "v", "--label", "s"])?.success()?;
        let refused = |order: &[&str], code: &str| {
            let outcome = host.sterna([&["volume"], order, &["--json"]].concat())?;
            ensure!(outcome.code != 0 && outcome.stdout.contains(code), "{order:?}: {outcome:?}");
            Ok::<_, anyhow::Error>(())
        };
        refused(&["snapshot", "v", "--label", "s"], "volume_exists")?;
        refused(&["snapshot", "v", "--label", "no/label"], "invalid_request")?;
        refused(&["snapshot", "v", "nobody"], "volume_not_found")?;
        refused(&["snapshot", "v@s"], "invalid_request")?;
        refused(&["revert", "v", "t"], "volume_not_found")?;
        refused(&["revert", "w", "v@s"], "volume_not_found")?;
        refused(&["create", "a@b", "--size", "4096"], "invalid_request")?;
        refused(&["resize", "v@s", "1GiB"], "invalid_request")?;
        // Two within a second have two labels.
        let [one, two]: [Vec<Volume>; 2] =
            [host.ask(&["volume", "snapshot", "w"])?, host.ask(&["volume", "snapshot", "w"])?];
        ensure!(one[0].name != two[0].name, "{one:?} {two:?}");
        let long = "n".repeat(63);
        host.sterna(["volume", "create", &long, "--store", "a", "--size", "4096"])?.success()?;
        let outcome = host.sterna(["volume", "snapshot", &long])?;
        ensure!(outcome.stderr.contains("under a shorter name"), "{outcome:?}");
        let removed = host.sterna(["volume", "remove", "w"])?;
        ensure!(removed.stdout.contains(&two[0].name), "{removed:?}");
        host.sterna(["volume", "create", "w", "--store", "a", "--size", "4096"])?.success()?;
        ensure!(host.ask::<Vec<Volume>>(&["volume", "snapshots", "w"])?.is_empty(), "they are of another w");
        // What the volume has grown by becomes zeroes.
        let larger = (2 * DISK_BYTES).to_string();
        host.sterna(["volume", "resize", "v", &larger])?.success()?;
        let mut client = guest::connect(&export_of(host, "v")?)?;
        let data = content(7);
        let durability = WriteDurability::Volatile;
        client.perform(Operation::Write { offset: DISK_BYTES + BLOCK_BYTES, data, durability })?;
        drop(client);
        let reverted: Vec<Volume> = host.ask(&["volume", "revert", "v", "v@s"])?;
        ensure!(reverted[0].size_bytes == 2 * DISK_BYTES, "{reverted:?}");
        host.stop()?;
        let bytes = std::fs::read(host.path("a/v.img"))?;
        ensure!(bytes.iter().all(|byte| *byte == 0), "the new part is not zero");
        Ok(())
    });
}

#[test]
fn a_snapshot_whose_image_is_lost_changes_none_of_the_volumes_that_were_to_be_reverted() {
    for harm in ["remove", "truncate"] {
        play(|host| {
            let then = prepare(host)?;
            let image = host.path("a/w@then.img");
            match harm {
                "remove" => std::fs::rename(&image, host.path("aside.img"))?,
                _ => std::fs::OpenOptions::new().write(true).open(&image)?.set_len(DISK_BYTES / 2)?,
            }
            // The snapshot is still served: it is open.
            for name in VOLUMES {
                let outcome = host.sterna(["volume", "revert", name, "then", "--json"])?;
                let is_lost = name == "w";
                ensure!((outcome.code == 0) != is_lost, "{harm}: {outcome:?}");
                ensure!(!is_lost || outcome.stdout.contains("nothing was changed"), "{harm}: {outcome:?}");
            }
            let served: Vec<Volume> = host.ask(&["volume", "list"])?;
            let is_served = |name: &str| {
                served.iter().any(|one| one.name == name && one.state == api::VolumeState::Serving)
            };
            ensure!(VOLUMES.into_iter().all(is_served), "{served:?}");
            host.stop()?;
            let kept = std::fs::read(host.path("a/w.img"))?;
            let newest =
                (1..=900).filter(|number| VOLUMES[place_of(*number).0] == "w").max().unwrap_or_default();
            let at = (place_of(newest).1 * BLOCK_BYTES) as usize;
            ensure!(newest > then && kept[at..at + 4096] == content(newest)[..], "{harm}: w has changed");
            Ok(())
        });
    }
}
