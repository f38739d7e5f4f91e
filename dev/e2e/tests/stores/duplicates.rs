//! Tests of copies of volumes in use (`volume clone`): each is the volume at one instant, whatever its stores are.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, ensure};
use api::Volume;
use e2e::{Host, guest, play, play_unstarted, until};
use testbed::nbd_client::{Address, Operation, WriteDurability};

use crate::cloned::play_on_each;

const DISK_BYTES: u64 = 64 << 20;
/// Bytes that have data before the first write that is checked.
const FILL_BYTES: u64 = 48 << 20;
const BLOCK_BYTES: u64 = 4096;
/// A rate at which a copy of [`FILL_BYTES`] takes some seconds.
const SLOW_STORE: &str = "[stores.b.delay]\nbytes_per_second = 8388608\n";

/// A client that makes one write after the other, each with its number: a copy has all of them up to one, and none behind.
struct Counter {
    answered: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<u64>>,
}

/// Returns the block that write number `number` goes to: scattered, and some blocks more often than others.
fn block_of(number: u64) -> u64 {
    let blocks = DISK_BYTES / BLOCK_BYTES;
    let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    if number.is_multiple_of(3) { scattered % 64 } else { scattered % blocks }
}

fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK_BYTES as usize / 8)
}

impl Counter {
    /// Fills a disk, and counts from there.
    fn start(export: &Address) -> anyhow::Result<Self> {
        let mut client = guest::connect(export)?;
        let fill = vec![0xff; 1 << 20];
        for offset in (0..FILL_BYTES).step_by(1 << 20) {
            let durability = WriteDurability::Volatile;
            client.perform(Operation::Write { offset, data: fill.clone(), durability })?;
        }
        let (answered, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (told, ends) = (Arc::clone(&answered), Arc::clone(&is_over));
        let thread = std::thread::spawn(move || {
            let mut number = 0;
            while !ends.load(Ordering::SeqCst) {
                number += 1;
                let (offset, data) = (block_of(number) * BLOCK_BYTES, content(number));
                let durability = WriteDurability::Volatile;
                client.perform(Operation::Write { offset, data, durability })?;
                told.store(number, Ordering::SeqCst);
            }
            Ok(number)
        });
        let counter = Self { answered, is_over, thread };
        counter.until_answered(100)?;
        Ok(counter)
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::SeqCst)
    }

    fn until_answered(&self, more: u64) -> anyhow::Result<()> {
        let first = self.answered();
        until("a client writes", || {
            ensure!(!self.thread.is_finished(), "the client has ended");
            Ok((self.answered() >= first + more).then_some(()))
        })
    }

    fn stop(self) -> anyhow::Result<u64> {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().map_err(|_| anyhow::anyhow!("the client panicked"))?
    }
}

/// Checks that a raw image has exactly the first so many writes; returns how many.
fn count_of(image: &Path, least: u64, most: u64) -> anyhow::Result<u64> {
    let bytes = std::fs::read(image)?;
    ensure!(bytes.len() as u64 == DISK_BYTES, "{} bytes", bytes.len());
    let number_at = |at: usize| {
        let number = bytes.get(at..at + 8).context("within the image")?;
        Ok::<_, anyhow::Error>(u64::from_le_bytes(number.try_into()?))
    };
    let mut last = 0;
    for at in (0..bytes.len()).step_by(BLOCK_BYTES as usize) {
        let number = number_at(at)?;
        last = if number == u64::MAX { last } else { last.max(number) };
    }
    ensure!((least..=most).contains(&last), "{last} is not between {least} and {most}");
    let expected: BTreeMap<u64, u64> = (1..=last).map(|number| (block_of(number), number)).collect();
    for (block, found) in (0..).zip(bytes.chunks(BLOCK_BYTES as usize)) {
        let filled = if block * BLOCK_BYTES < FILL_BYTES { u64::MAX } else { 0 };
        let number = expected.get(&block).copied().unwrap_or(filled);
        ensure!(found == content(number), "block {block} has not write {number} of {last}");
    }
    Ok(last)
}

/// Copies `v` to `w` while a client counts, and checks the copy.
fn copy_and_check(host: &mut Host, more: &[&str], image: &str) -> anyhow::Result<()> {
    let counter = Counter::start(&host.export()?)?;
    let before = counter.answered();
    let copy: Volume = host.ask(&[&["volume", "clone", "v", "w"], more].concat())?;
    let after = counter.answered();
    ensure!(copy.name == "w" && copy.size_bytes == DISK_BYTES, "{copy:?}");
    // What is written to one of them afterwards is not in the other one.
    counter.until_answered(200)?;
    let last = counter.stop()?;
    host.stop()?;
    let copied = count_of(&host.path(image), before, after + 1)?;
    println!(
        "{before} writes were answered before, {after} after, {copied} are in the copy, {last} in the volume"
    );
    host.start()?;
    host.sterna(["volume", "remove", "v"])?.success()?;
    let alone: Volume = host.ask(&["volume", "show", "w"])?;
    ensure!(alone.image.ends_with(image), "{alone:?}");
    Ok(())
}

#[test]
fn a_copy_that_shares_blocks_is_the_volume_at_one_instant() {
    play_on_each(|host| {
        host.sterna(["volume", "create", "v", "--store", "x", "--size", &DISK_BYTES.to_string()])?
            .success()?;
        copy_and_check(host, &[], "disk/x/w.img")
    });
}

#[test]
fn a_copy_on_another_file_system_is_the_volume_at_one_instant() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        copy_and_check(host, &["--store", "b"], "b/w.img")
    });
    play_on_each(|host| {
        host.sterna(["volume", "create", "v", "--store", "x", "--size", &DISK_BYTES.to_string()])?
            .success()?;
        copy_and_check(host, &["--store", "b"], "b/w.img")
    });
}

/// The guests are held for a moment at the end, and the copying follows all that they write until then.
#[test]
fn a_copy_into_a_slow_store_is_the_volume_at_its_end() {
    play_unstarted(|host| {
        host.configure(SLOW_STORE)?;
        host.start()?;
        host.create_volume(DISK_BYTES)?;
        copy_and_check(host, &["--store", "b"], "b/w.img")
    });
}

#[test]
fn a_copy_can_have_another_format_and_a_copy_of_a_copy_is_whole() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&host.export()?, FILL_BYTES)?)?;
        host.sterna(["volume", "clone", "v", "w", "--store", "b", "--format", "qcow2"])?.success()?;
        host.sterna(["volume", "clone", "w", "u", "--store", "a", "--format", "raw"])?.success()?;
        host.stop()?;
        guest::verify_image(&host.path("a/u.img"), &stopped.content)
    });
}

/// Waits until some of the copy `w` is made.
fn until_begun(host: &Host) -> anyhow::Result<()> {
    until("some of it is copied", || {
        let outcome = host.sterna(["volume", "show", "w", "--json"])?;
        if outcome.code != 0 {
            return Ok(None);
        }
        let shown: Volume = outcome.json()?;
        Ok(shown.creation.filter(|creation| creation.bytes_done > DISK_BYTES / 8).map(drop))
    })
}

/// Checks that nothing looks like a copy, and that the volume is as it was.
fn nothing_is_left(host: &mut Host, counter: Counter) -> anyhow::Result<()> {
    ensure!(host.sterna(["volume", "show", "w"])?.code == 3, "there is a volume");
    ensure!(host.images("b")?.is_empty(), "{:?}", host.images("b")?);
    counter.until_answered(50)?;
    let last = counter.stop()?;
    host.stop()?;
    count_of(&host.path("a/v.img"), last, last).map(drop)
}

#[test]
fn a_copy_that_is_cancelled_leaves_nothing() {
    play_unstarted(|host| {
        host.configure(SLOW_STORE)?;
        host.start()?;
        host.create_volume(DISK_BYTES)?;
        let counter = Counter::start(&host.export()?)?;
        let copying = host.command(["volume", "clone", "v", "w", "--store", "b", "--json"])?.start()?;
        until_begun(host)?;
        // Meanwhile nothing else is done with the volume.
        let refused = host.sterna(["migrate", "v", "--to", "b", "--json"])?;
        ensure!(refused.stdout.contains("volume_busy"), "{refused:?}");
        let cancelled = host.sterna(["volume", "remove", "w"])?.success()?;
        ensure!(cancelled.contains("cancelled"), "{cancelled}");
        let outcome = copying.wait()?;
        ensure!(outcome.code != 0, "{outcome:?}");
        // It can be ordered again at once.
        nothing_is_left(host, counter)
    });
}

#[test]
fn a_daemon_that_is_killed_or_stopped_while_it_copies_leaves_nothing() {
    for kills in [true, false] {
        play_unstarted(|host| {
            host.configure(SLOW_STORE)?;
            host.start()?;
            host.create_volume(DISK_BYTES)?;
            let counter = Counter::start(&host.export()?)?;
            let copying = host.command(["volume", "clone", "v", "w", "--store", "b"])?.start()?;
            until_begun(host)?;
            if kills {
                host.kill()?;
            } else {
                host.stop()?;
            }
            ensure!(copying.wait()?.code != 0, "it has not failed");
            host.start()?;
            // The client's connection has ended with the daemon.
            let written = counter.answered();
            counter.is_over.store(true, Ordering::SeqCst);
            drop(counter.thread.join());
            ensure!(host.sterna(["volume", "show", "w"])?.code == 3, "there is a volume");
            ensure!(host.images("b")?.is_empty(), "{:?}", host.images("b")?);
            host.stop()?;
            count_of(&host.path("a/v.img"), written, written + 1).map(drop)
        });
    }
}

#[test]
fn killed_at_any_step_there_is_a_whole_copy_or_none() {
    for (point, exists) in [
        // The first image made is the volume's own.
        ("before-create-image@2", false),
        ("after-create-image@2", false),
        ("before-added@2", false),
        ("after-added@2", true),
    ] {
        play_unstarted(|host| {
            host.start_with(&[("STERNA_FAIL_POINT", point)])?;
            host.create_volume(DISK_BYTES)?;
            let stopped = guest::stop_and_verify(guest::start(&host.export()?, FILL_BYTES)?)?;
            ensure!(host.sterna(["volume", "clone", "v", "w"])?.code != 0, "the daemon was not killed");
            host.wait_for_end()?;
            host.start()?;
            let code = host.sterna(["volume", "show", "w"])?.code;
            ensure!((code == 0) == exists, "{point}: {code}");
            let images = host.images("a")?;
            ensure!(images.len() == if exists { 2 } else { 1 }, "{point}: {images:?}");
            host.stop()?;
            if exists {
                guest::verify_image(&host.path("a/w.img"), &stopped.content)?;
            }
            guest::verify_image(&host.path("a/v.img"), &stopped.content)
        });
    }
}

#[test]
fn what_cannot_be_copied_says_why_and_what_to_do() {
    play(|host| {
        host.create_volume(DISK_BYTES)?;
        let refused = |order: &[&str], code: &str| {
            let outcome = host.sterna([&["volume", "clone"], order, &["--json"]].concat())?;
            ensure!(outcome.code != 0 && outcome.stdout.contains(code), "{order:?}: {outcome:?}");
            Ok::<_, anyhow::Error>(())
        };
        refused(&["nobody", "w"], "volume_not_found")?;
        refused(&["v", "v"], "volume_exists")?;
        refused(&["v", "w", "--store", "c"], "store_not_found")?;
        refused(&["v", "no/name"], "invalid_request")?;
        std::fs::write(host.path("a/w.img"), "somebody's")?;
        refused(&["v", "w"], "target_exists")?;
        ensure!(std::fs::read(host.path("a/w.img"))? == b"somebody's", "a file is lost");
        Ok(())
    });
}
