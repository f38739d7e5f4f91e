//! Tests of the incremental return: it sends only the writes since the volume left a kept image.

use anyhow::{Context as _, bail, ensure};
use api::{ImageFate, KeptBecause, Migration, MigrationState, RemovedVolume, Replica, Volume, VolumeState};
use e2e::trio::play_trio;
use e2e::{Host, Pair, guest, play_pair, until};
use testbed::nbd_client::{Address, Client, ClientOptions, Operation, WriteDurability};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 32 << 20;
/// Unit of recording and copying.
const UNIT_BYTES: u64 = 4 << 10;

/// Moves `v` to the other host, keeps its old image, and waits until it is served there.
fn travel(from: &Host, to: &Host, target: &str, more: &[&str]) -> anyhow::Result<Migration> {
    let arguments = [&["migrate", "v", "--to", target, "--keep-source"], more].concat();
    let ended: Migration = from.ask(&arguments)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    until("the volume is served by its owner", || {
        let volume: Option<Volume> = to.ask(&["volume", "show", "v"]).ok();
        Ok(volume.filter(|volume| volume.state == VolumeState::Serving))
    })?;
    Ok(ended)
}

fn leave(pair: &Pair) -> anyhow::Result<Migration> {
    travel(&pair.alpha, &pair.beta, "beta:a", &[])
}

fn come_home(pair: &Pair, more: &[&str]) -> anyhow::Result<Migration> {
    travel(&pair.beta, &pair.alpha, "alpha:a", more)
}

/// Returns the bytes that were sent, and those that were found to be zero.
fn sent(ended: &Migration) -> u64 {
    ended.bytes_moved + ended.bytes_zero
}

/// Returns the content of a disk at beta, whose guest has left.
fn away(pair: &mut Pair) -> anyhow::Result<lab::workload::Content> {
    pair.alpha.create_volume(DISK_BYTES)?;
    let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
    drop(stopped.client);
    let first = leave(pair)?;
    ensure!(sent(&first) >= FILL_BYTES, "{first:?}");
    until("its last client has left it", || Ok(pair.alpha.volume().is_err().then_some(())))?;
    Ok(stopped.content)
}

#[test]
fn volume_that_nobody_wrote_to_comes_home_for_nothing_and_goes_back_for_nothing() {
    play_pair(|pair| {
        let content = away(pair)?;
        for ended in [come_home(pair, &[])?, leave(pair)?, come_home(pair, &[])?] {
            ensure!(sent(&ended) == 0, "{ended:?}");
        }
        let whole = leave(pair)?;
        ensure!(sent(&whole) == 0, "{whole:?}");
        let whole = come_home(pair, &["--full"])?;
        ensure!(sent(&whole) >= FILL_BYTES, "{whole:?}");
        pair.alpha.stop()?;
        guest::verify_image(&pair.alpha.path("a/v.img"), &content)
    });
}

#[test]
fn what_was_kept_is_listed_spares_its_bytes_and_is_dropped() {
    play_pair(|pair| {
        away(pair)?;
        let kept: Vec<Replica> = pair.alpha.ask(&["replica", "list"])?;
        let [replica] = kept.as_slice() else { bail!("{kept:?}") };
        ensure!(replica.shortens_return && replica.went_to.as_deref() == Some("beta:a"), "{replica:?}");
        ensure!(replica.allocated_bytes.is_some_and(|bytes| bytes >= FILL_BYTES), "{replica:?}");
        let home = come_home(pair, &[])?;
        let spared = home.replica.context("it began with what was kept")?;
        ensure!(spared.bytes_spared == spared.bytes_held && spared.bytes_held >= FILL_BYTES, "{spared:?}");
        let shown = pair.beta.sterna(["migration", "show", &home.id])?.success()?;
        ensure!(shown.contains("a kept image had "), "{shown}");
        // The kept image at beta is dropped, so the next move copies everything.
        let dropped: Replica = pair.beta.ask(&["replica", "drop", "v"])?;
        ensure!(dropped.shortens_return && pair.beta.images("a")?.is_empty(), "{dropped:?}");
        let whole = leave(pair)?;
        ensure!(whole.replica.is_none() && sent(&whole) >= FILL_BYTES, "{whole:?}");
        // A new volume of this name may be made beside the kept image. Then the old volume cannot return.
        until("its last client has left it", || Ok(pair.alpha.volume().is_err().then_some(())))?;
        pair.alpha.create_volume(DISK_BYTES)?;
        ensure!(pair.alpha.images("a")?.len() == 2, "{:?}", pair.alpha.images("a")?);
        let refused = pair.beta.sterna(["migrate", "v", "--to", "alpha:a"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("a volume \"v\" exists"), "{refused:?}");
        Ok(())
    });
}

#[test]
fn an_image_that_was_somebodys_stays_when_its_volume_is_removed_at_another_host() {
    play_pair(|pair| {
        let raw = pair.alpha.path("raw");
        std::fs::write(&raw, vec![7; 1 << 20])?;
        pair.alpha.sterna(["volume", "add", "v", "--image", &raw.display().to_string()])?.success()?;
        pair.alpha.sterna(["volume", "create", "w", "--store", "a", "--size", "1MiB"])?.success()?;
        for name in ["v", "w"] {
            let ended: Migration = pair.alpha.ask(&["migrate", name, "--to", "beta:a"])?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        }
        // Beta gets a new journal.
        pair.beta.kill()?;
        pair.beta.start()?;
        let made: RemovedVolume = pair.beta.ask(&["volume", "remove", "w"])?;
        ensure!(made.image_fate == ImageFate::Deleted, "{made:?}");
        let given: RemovedVolume = pair.beta.ask(&["volume", "remove", "v"])?;
        let is_kept = (given.image_fate, given.kept_because) == (ImageFate::Kept, Some(KeptBecause::Given));
        ensure!(is_kept && std::fs::read(&given.image)? == vec![7; 1 << 20], "{given:?}");
        Ok(())
    });
}

/// Writes 4 KiB into every other MiB of the disk at beta, and returns the number of bytes.
fn write_scattered(export: &Address) -> anyhow::Result<u64> {
    write_blocks(export, 5, 1)
}

/// Writes this block of every other MiB, and returns the number of bytes.
fn write_blocks(export: &Address, block: u64, byte: u8) -> anyhow::Result<u64> {
    let mut client = Client::connect(export, ClientOptions::default())?;
    let places = (0..DISK_BYTES).step_by(2 << 20);
    let mut bytes = 0;
    for place in places {
        let (offset, data) = (place + block * UNIT_BYTES, vec![byte; UNIT_BYTES as usize]);
        let write = Operation::Write { offset, data, durability: WriteDurability::Volatile };
        client.perform(write)?;
        bytes += UNIT_BYTES;
    }
    client.perform(Operation::Flush)?;
    Ok(bytes)
}

#[test]
fn scattered_writes_of_4_kib_cost_their_own_size_on_the_way_home() {
    play_pair(|pair| {
        away(pair)?;
        let written = write_scattered(&pair.beta.export()?)?;
        let home = come_home(pair, &[])?;
        ensure!(home.bytes_moved >= written, "{home:?}");
        ensure!(sent(&home) * 100 <= written * 105, "{written} bytes were written: {home:?}");
        let spared = home.replica.context("it began with what was kept")?;
        ensure!(spared.bytes_spared > 0, "{spared:?}");
        Ok(())
    });
}

/// Moves `v`, and checks that about as much was sent as was written since it left that host.
fn go_on(from: &Host, to: &Host, target: &str, written: u64) -> anyhow::Result<()> {
    let ended = travel(from, to, target, &[])?;
    ensure!(sent(&ended) >= written, "{written} bytes were written: {ended:?}");
    ensure!(sent(&ended) * 100 <= written * 105, "{written} bytes were written: {ended:?}");
    ensure!(ended.replica.is_some(), "it began with what was kept: {ended:?}");
    Ok(())
}

#[test]
fn volume_that_has_been_at_three_hosts_goes_to_each_with_what_that_one_lacks() {
    play_trio(|[alpha, beta, gamma]| {
        alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&alpha.export()?, FILL_BYTES)?)?.client);
        travel(alpha, beta, "beta:a", &[])?;
        let at_beta = write_blocks(&beta.export()?, 1, 1)?;
        travel(beta, gamma, "gamma:a", &[])?;
        let at_gamma = write_blocks(&gamma.export()?, 2, 2)?;
        // Its knowledge of the copy at alpha, which it has from beta, survives a restart. (After a kill
        // it counts regions, not blocks.)
        gamma.stop()?;
        gamma.start()?;
        until("the volume is served again", || {
            Ok(gamma.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
        })?;
        go_on(gamma, alpha, "alpha:a", at_beta + at_gamma)?;
        let at_alpha = write_blocks(&alpha.export()?, 3, 3)?;
        go_on(alpha, beta, "beta:a", at_gamma + at_alpha)?;
        let again = write_blocks(&beta.export()?, 4, 4)?;
        go_on(beta, gamma, "gamma:a", at_alpha + again)?;
        gamma.stop()?;
        let image = std::fs::read(gamma.path("a/v.img"))?;
        for place in (0..image.len()).step_by(2 << 20) {
            let bytes = (1..5).map(|block| image[place + block * UNIT_BYTES as usize]);
            ensure!(bytes.eq(1..5), "at {place}");
        }
        Ok(())
    });
}

#[test]
fn image_that_somebody_touched_is_not_come_home_to() {
    play_pair(|pair| {
        let content = away(pair)?;
        let kept = pair.alpha.images("a")?.pop().context("the image is kept")?;
        let path = pair.alpha.path("a").join(kept);
        let file = std::fs::File::options().write(true).open(&path)?;
        std::os::unix::fs::FileExt::write_all_at(&file, b"somebody else's", 4096)?;
        drop(file);
        let ended = come_home(pair, &[])?;
        ensure!(sent(&ended) >= FILL_BYTES, "{ended:?}");
        pair.alpha.stop()?;
        guest::verify_image(&pair.alpha.path("a/v.img"), &content)
    });
}

#[test]
fn busy_guest_loses_nothing_when_its_disk_goes_to_and_fro_between_kept_images() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        for _ in 0..3 {
            leave(pair)?;
            come_home(pair, &[])?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn killed_owner_remembers_what_was_written_since_the_disk_left() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        leave(pair)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        until("the volume is served again", || {
            Ok(pair.beta.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
        })?;
        come_home(pair, &[])?;
        guest::stop_and_verify(guest).map(drop)
    });
}
