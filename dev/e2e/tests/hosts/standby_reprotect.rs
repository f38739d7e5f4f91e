//! Tests of failing back: after a promotion the former owner's images become the standby, and only the difference is sent.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Divergence, DivergenceState, Migration, MigrationState, Standby, StandbyState, Store};
use e2e::{Host, LinkState, Pair, guest, play_pair, until};

use crate::standby_ends::{lose_alpha, until_replaced};
use crate::standbys::{BLOCK_BYTES, DISK_BYTES, EVERY, add, connect, read, until_current, write};

const FILL_BYTES: u64 = 16 << 20;
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks that alpha writes and nobody receives: scattered, and beside one another.
const ONLY_ALPHA: [u64; 6] = [3, 4, 700, 2000, 5000, 9000];
/// Blocks that beta writes after the promotion. It has some of them in common with alpha.
const ONLY_BETA: [u64; 5] = [4, 10, 5000, 6000, 12_000];

/// Makes a volume with content and a standby, lets alpha write what the standby does not receive, and promotes at beta, which writes.
fn fail_over(pair: &mut Pair) -> anyhow::Result<()> {
    pair.alpha.create_volume(DISK_BYTES)?;
    let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
    drop(stopped.client);
    add(pair, &["v"])?;
    // The last write may follow the first copy.
    std::thread::sleep(2 * EVERY);
    until_current(&pair.alpha)?;
    pair.link.set(LinkState::Cut);
    let mut client = connect(&pair.alpha, "v")?;
    for block in ONLY_ALPHA {
        write(&mut client, block * BLOCK, 1000 + block)?;
    }
    drop(client);
    // Cuts meanwhile do not make them known.
    std::thread::sleep(2 * EVERY);
    lose_alpha(pair, "v")?;
    pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
    let mut client = connect(&pair.beta, "v")?;
    for block in ONLY_BETA {
        write(&mut client, block * BLOCK, 2000 + block)?;
    }
    drop(client);
    pair.link.set(LinkState::Up);
    pair.alpha.start()?;
    until_replaced(&pair.alpha)
}

/// Returns the image of the standby at alpha.
fn image(pair: &Pair, standby: &Standby) -> PathBuf {
    pair.alpha.path("a").join(".sterna-standbys").join(&standby.id).join("image-0")
}

/// Compares the standby at alpha with the volume at beta, while nothing is written.
fn compare(pair: &Pair) -> anyhow::Result<Standby> {
    let standby = until_current(&pair.beta)?;
    let (here, there) = (std::fs::read(pair.beta.path("a/v.img"))?, std::fs::read(image(pair, &standby))?);
    let differs =
        here.chunks(BLOCK_BYTES).zip(there.chunks(BLOCK_BYTES)).position(|(here, there)| here != there);
    ensure!(here.len() == there.len() && differs.is_none(), "block {differs:?} differs");
    Ok(standby)
}

fn divergences(host: &Host) -> anyhow::Result<Vec<Divergence>> {
    host.ask(&["volume", "divergence", "list"])
}

/// Checks that an exported divergence has what alpha has written.
fn expect_export(pair: &Pair, file: &Path) -> anyhow::Result<()> {
    let name = file.to_str().context("a path")?;
    pair.alpha.sterna(["volume", "divergence", "export", "v", name])?.success()?;
    let content = std::fs::read(file)?;
    ensure!(content.len() as u64 == DISK_BYTES, "{} bytes", content.len());
    for block in ONLY_ALPHA {
        let at = (block * BLOCK) as usize;
        let found = u64::from_le_bytes(content[at..at + 8].try_into()?);
        ensure!(found == 1000 + block, "block {block} has {found}");
    }
    let again = pair.alpha.sterna(["volume", "divergence", "export", "v", name])?;
    ensure!(again.code != 0, "it has written over a file");
    Ok(())
}

#[test]
fn the_way_back_after_a_failover_sends_only_the_difference_and_loses_nothing() {
    play_pair(|pair| {
        fail_over(pair)?;
        let early = pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s"])?;
        ensure!(early.stderr.contains("sterna volume yield v"), "{early:?}");
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        let found = divergences(&pair.alpha)?;
        ensure!(found.len() == 1 && found[0].state == DivergenceState::InImage, "{found:?}");
        expect_export(pair, &pair.alpha.path("before.img"))?;
        // N.B. A volume made of it would be served beside that of the other host.
        let refused = pair.alpha.sterna(["store", "import", "a/v.img"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("sterna standby reprotect"), "{refused:?}");
        let stores: Vec<Store> = pair.alpha.ask(&["store", "list"])?;
        ensure!(stores.iter().all(|store| store.unknown_images.is_empty()), "{stores:?}");
        pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s"])?.success()?;
        // An order that is given again finds it done.
        pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s"])?.success()?;
        let standby = compare(pair)?;
        let sent = standby.bytes_sent.context("it sends")?;
        let different = ONLY_ALPHA.iter().chain(ONLY_BETA.iter().filter(|block| !ONLY_ALPHA.contains(block)));
        let different = different.count() as u64 * BLOCK;
        // Zeroes are not counted: alpha has written into a hole.
        ensure!((BLOCK..=different * 11 / 10).contains(&sent), "sent {sent} bytes of {different}");
        let found = divergences(&pair.alpha)?;
        ensure!(found.len() == 1 && found[0].state == DivergenceState::Kept, "{found:?}");
        expect_export(pair, &pair.alpha.path("after.img"))?;
        let mut client = connect(&pair.beta, "v")?;
        write(&mut client, 20 * BLOCK, 7)?;
        drop(client);
        // The write is in an interval that ends later.
        std::thread::sleep(2 * EVERY);
        compare(pair)?;
        let home: Migration = pair.beta.ask(&["migrate", "v", "--to", "alpha:a"])?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        ensure!(home.bytes_moved + home.bytes_zero < FILL_BYTES / 4, "{home:?}");
        let mut client = connect(&pair.alpha, "v")?;
        for (block, number) in
            [(3, None), (4, Some(2004)), (10, Some(2010)), (20, Some(7)), (5000, Some(7000))]
        {
            let found = read(&mut client, block * BLOCK)?;
            ensure!(number.map_or(found != 1003, |number| found == number), "block {block} has {found}");
        }
        drop(client);
        pair.beta.sterna(["standby", "remove", "v"])?.success()?;
        pair.alpha.sterna(["volume", "divergence", "drop", "v"])?.success()?;
        ensure!(divergences(&pair.alpha)?.is_empty());
        let again = pair.alpha.sterna(["volume", "divergence", "drop", "v"])?;
        ensure!(again.code == 3 && again.stderr.contains("divergence list"), "{again:?}");
        let left = std::fs::read_dir(pair.alpha.path("a/.sterna-standbys"))?.count();
        ensure!(left == 0, "{left} folders are left over");
        Ok(())
    });
}

#[test]
fn the_way_back_goes_on_although_both_daemons_are_killed_at_any_time() {
    play_pair(|pair| {
        fail_over(pair)?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until("alpha is connected", || {
            let turned =
                pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s", "--bandwidth", "64KiB/s"])?;
            Ok((turned.code == 0).then_some(()))
        })?;
        for round in 0..4 {
            let host = if round % 2 == 0 { &mut pair.alpha } else { &mut pair.beta };
            host.kill()?;
            host.start()?;
        }
        until("beta serves", || Ok(connect(&pair.beta, "v").ok()))?;
        pair.beta.sterna(["standby", "set", "v", "--bandwidth", "none"])?.success()?;
        compare(pair)?;
        expect_export(pair, &pair.alpha.path("after.img"))?;
        let at_beta: Vec<Standby> = pair.beta.ask(&["standby", "list"])?;
        ensure!(at_beta.len() == 1, "{at_beta:?}");
        // The way back once more, in the other direction.
        pair.beta.kill()?;
        until("the loss is noticed", || {
            let refused = pair.alpha.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off").then_some(()))
        })?;
        pair.alpha.sterna(["standby", "promote", "v", "--force", "--source-is-off", "beta"])?.success()?;
        ensure!(read(&mut connect(&pair.alpha, "v")?, 4 * BLOCK)? == 2004);
        Ok(())
    });
}

#[test]
fn a_former_owner_that_has_served_all_the_time_keeps_what_it_wrote() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        add(pair, &["v"])?;
        // The last write may follow the first copy.
        std::thread::sleep(2 * EVERY);
        until_current(&pair.alpha)?;
        pair.link.set(LinkState::Cut);
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off").then_some(()))
        })?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        write(&mut connect(&pair.beta, "v")?, 4 * BLOCK, 2004)?;
        pair.link.set(LinkState::Up);
        until("both hosts have the volume", || {
            let standby: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
            Ok((standby.state == StandbyState::Diverged).then_some(()))
        })?;
        let mut client = connect(&pair.alpha, "v")?;
        for block in ONLY_ALPHA {
            write(&mut client, block * BLOCK, 1000 + block)?;
        }
        drop(client);
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        let found = divergences(&pair.alpha)?;
        // Its chronicle is exact: it was not killed.
        ensure!(found[0].bytes == Some(ONLY_ALPHA.len() as u64 * BLOCK), "{found:?}");
        pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s"])?.success()?;
        let sent = compare(pair)?.bytes_sent.context("it sends")?;
        ensure!(sent <= ONLY_ALPHA.len() as u64 * BLOCK, "sent {sent} bytes");
        expect_export(pair, &pair.alpha.path("after.img"))
    });
}

#[test]
fn an_image_that_was_changed_after_it_was_given_up_is_kept_and_everything_is_copied() {
    play_pair(|pair| {
        fail_over(pair)?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        let path = pair.alpha.path("a/v.img");
        let file = std::fs::OpenOptions::new().write(true).open(&path)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[9; BLOCK_BYTES], 800 * BLOCK)?;
        drop(file);
        pair.beta.sterna(["standby", "reprotect", "v", "--every", "1s"])?.success()?;
        let standby = compare(pair)?;
        ensure!(standby.bytes_sent.unwrap_or(0) > FILL_BYTES / 4, "{standby:?}");
        let found = divergences(&pair.alpha)?;
        let aside = found.first().and_then(|found| found.image.clone()).context("it is set aside")?;
        let content = std::fs::read(&aside)?;
        ensure!(content[(800 * BLOCK) as usize] == 9, "the change is lost");
        pair.alpha.sterna(["volume", "divergence", "drop", "v"])?.success()?;
        ensure!(!Path::new(&aside).exists() && divergences(&pair.alpha)?.is_empty());
        Ok(())
    });
}

#[test]
fn without_the_order_the_promoted_standby_is_removed_as_before() {
    play_pair(|pair| {
        fail_over(pair)?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        until("beta has heard it", || {
            let standby: Standby = pair.beta.ask(&["standby", "show", "v"])?;
            ensure!(standby.state == StandbyState::Promoted, "{standby:?}");
            Ok(standby.reason.is_some_and(|reason| reason.contains("sterna standby reprotect")).then_some(()))
        })?;
        pair.beta.sterna(["standby", "remove", "v"])?.success()?;
        let left = std::fs::read_dir(pair.beta.path("data/standbys"))?.count();
        ensure!(left == 0, "{left} files are left over");
        let late = pair.beta.sterna(["standby", "reprotect", "v"])?;
        ensure!(late.code == 3 && late.stderr.contains("sterna standby"), "{late:?}");
        Ok(())
    });
}

#[test]
fn an_image_that_is_not_there_is_waited_for_and_a_drained_host_takes_no_standby() {
    play_pair(|pair| {
        fail_over(pair)?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        let order = ["standby", "reprotect", "v", "--every", "1s"];
        pair.alpha.sterna(["host", "drain"])?.success()?;
        let refused = pair.beta.sterna(order)?;
        ensure!(refused.code != 0 && refused.stderr.contains("drained"), "{refused:?}");
        pair.alpha.sterna(["host", "undrain"])?.success()?;
        // As if its file system were not mounted.
        let (image, away) = (pair.alpha.path("a/v.img"), pair.alpha.path("away.img"));
        std::fs::rename(&image, &away)?;
        pair.beta.sterna(order)?.success()?;
        until("alpha says what it waits for", || {
            let found = divergences(&pair.alpha)?;
            ensure!(found.len() == 1, "a divergence is forgotten: {found:?}");
            let reason = found[0].reason.clone().unwrap_or_default();
            Ok(reason.contains("sterna volume divergence drop v").then_some(()))
        })?;
        std::fs::rename(&away, &image)?;
        compare(pair)?;
        // Everything was sent, so all of the image counts: also what alpha has written.
        expect_export(pair, &pair.alpha.path("after.img"))
    });
}
