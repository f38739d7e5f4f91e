//! Tests of standbys whose host has content already: it is compared by hashes, and only the difference is sent.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use api::Standby;
use e2e::{Host, Pair, play_pair, until};
use testbed::nbd_client::{Operation, WriteDurability};

use crate::standbys::{DISK_BYTES, connect, read, until_current, write};

const FILL_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;
const DIFFERENCE_BYTES: usize = 256 << 10;
/// The difference, and the hashes of everything.
const SENT_BYTES_MAX: u64 = 1 << 20;

/// Makes a volume at the first host, each of whose blocks has another content.
fn begin(alpha: &Host) -> anyhow::Result<()> {
    alpha.create_volume(DISK_BYTES)?;
    let mut client = connect(alpha, "v")?;
    for offset in (0..FILL_BYTES).step_by(CHUNK_BYTES) {
        let words = (offset / 8..(offset + CHUNK_BYTES as u64) / 8)
            .map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let data = words.flat_map(u64::to_le_bytes).collect();
        client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
    }
    client.perform(Operation::Flush)?;
    Ok(())
}

fn shown(host: &Host) -> anyhow::Result<Standby> {
    host.ask(&["standby", "show", "v"])
}

fn copy_at(beta: &Host, id: &str) -> PathBuf {
    beta.path("a").join(".sterna-standbys").join(id).join("image-0")
}

fn compare(alpha: &Host, beta: &Host, id: &str) -> anyhow::Result<()> {
    let same = std::fs::read(alpha.path("a/v.img"))? == std::fs::read(copy_at(beta, id))?;
    ensure!(same, "the standby differs");
    Ok(())
}

#[test]
fn a_standby_that_begins_with_an_old_copy_is_sent_the_difference_only() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        let seed = beta.path("a/carried.img");
        std::fs::copy(alpha.path("a/v.img"), &seed)?;
        // The copy is older than the volume.
        File::options().write(true).open(&seed)?.write_all_at(&[7; DIFFERENCE_BYTES], 3 << 20)?;
        write(&mut connect(alpha, "v")?, 8 << 20, 9)?;
        // Slow enough to be seeded meanwhile.
        let add = ["standby", "add", "v", "--to", "beta:a", "--every", "1s", "--bandwidth", "64KiB/s"];
        alpha.sterna(add)?.success()?;
        let id = shown(alpha)?.id;
        std::fs::write(beta.path("a/first.img"), vec![1; CHUNK_BYTES])?;
        std::fs::hard_link(beta.path("a/first.img"), beta.path("a/linked.img"))?;
        std::os::unix::fs::symlink(&seed, beta.path("a/symbolic.img"))?;
        std::fs::write(beta.path("a/open.img"), vec![1; CHUNK_BYTES])?;
        let mut command = Command::new("tee");
        command.arg("--append").arg(beta.path("a/open.img")).stdin(Stdio::piped()).stdout(Stdio::null());
        // It ends with its pipe.
        let mut other = command.spawn()?;
        for (file, word) in [
            ("none.img", "does not exist"),
            ("../v.img", "name"),
            ("linked.img", "other names"),
            ("symbolic.img", "symbolic"),
            ("open.img", "tee (process"),
        ] {
            let refused = beta.sterna(["standby", "seed", "v", file])?;
            ensure!(refused.code != 0 && refused.stderr.contains(word), "{file}: {refused:?}");
        }
        drop(other.stdin.take());
        other.wait()?;
        let elsewhere = alpha.sterna(["standby", "seed", "v", "carried.img"])?;
        ensure!(elsewhere.stderr.contains("give this order at host \"beta\""), "{elsewhere:?}");
        beta.sterna(["standby", "seed", "v", "carried.img"])?.success()?;
        ensure!(!seed.exists(), "the image is the standby's now");
        alpha.sterna(["standby", "set", "v", "--bandwidth", "1GiB/s"])?.success()?;
        until_current(alpha)?;
        let source = shown(alpha)?;
        let found = source.bytes_found.unwrap_or_default();
        // Some was sent before there was a seed.
        ensure!(found >= FILL_BYTES - 2 * CHUNK_BYTES as u64, "{source:?}");
        ensure!(source.bytes_sent.is_some_and(|sent| sent < 2 * SENT_BYTES_MAX), "{source:?}");
        compare(alpha, beta, &id)?;
        let late = beta.sterna(["standby", "seed", "v", "first.img"])?;
        ensure!(late.code != 0 && beta.path("a/first.img").exists(), "{late:?}");
        // It is a standby like any other.
        alpha.kill()?;
        until("the loss is noticed", || {
            let refused = beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        let mut client = connect(beta, "v")?;
        ensure!(read(&mut client, 8 << 20)? == 9);
        Ok(())
    });
}

#[test]
fn images_of_any_size_will_do_and_a_source_that_is_killed_meanwhile_compares_again() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        for bytes in [4096, CHUNK_BYTES as u64 + 77, DISK_BYTES + CHUNK_BYTES as u64] {
            let add = ["standby", "add", "v", "--to", "beta:a", "--every", "1s", "--bandwidth", "64KiB/s"];
            alpha.sterna(add)?.success()?;
            let id = shown(alpha)?.id;
            std::fs::write(beta.path("a/seed.img"), vec![0xa5; usize::try_from(bytes)?])?;
            beta.sterna(["standby", "seed", "v", "seed.img"])?.success()?;
            alpha.kill()?;
            alpha.start()?;
            alpha.sterna(["standby", "set", "v", "--bandwidth", "1GiB/s"])?.success()?;
            write(&mut connect(alpha, "v")?, 12 << 20, bytes)?;
            until_current(alpha)?;
            let arrived = || Ok(compare(alpha, beta, &id).is_ok().then_some(()));
            until("the standby is the same", arrived).with_context(|| format!("seed of {bytes} bytes"))?;
            alpha.sterna(["standby", "remove", "v"])?.success()?;
        }
        Ok(())
    });
}

#[test]
fn an_image_that_another_program_has_changed_is_compared_and_mended() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?.success()?;
        let id = until_current(alpha)?.id;
        let sent = shown(alpha)?.bytes_sent.unwrap_or_default();
        beta.stop()?;
        let image = File::options().write(true).open(copy_at(beta, &id))?;
        image.write_all_at(&[7; DIFFERENCE_BYTES], 5 << 20)?;
        drop(image);
        beta.start()?;
        until("the image was compared", || {
            let found = shown(alpha)?.bytes_found.unwrap_or_default();
            Ok((found >= FILL_BYTES - CHUNK_BYTES as u64).then_some(()))
        })?;
        until_current(alpha)?;
        let again = shown(alpha)?.bytes_sent.unwrap_or_default() - sent;
        ensure!(again < SENT_BYTES_MAX, "{again} bytes were sent");
        compare(alpha, beta, &id)
    });
}

#[test]
fn a_host_that_is_killed_during_the_first_copy_goes_on_with_what_it_has() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        let add = ["standby", "add", "v", "--to", "beta:a", "--every", "1s", "--bandwidth", "8MiB/s"];
        alpha.sterna(add)?.success()?;
        let id = shown(alpha)?.id;
        for _ in 0..2 {
            let before = shown(alpha)?.bytes_sent.unwrap_or_default();
            until("a part is sent", || {
                let now = shown(alpha)?.bytes_sent.unwrap_or_default();
                Ok((now > before + 2 * CHUNK_BYTES as u64).then_some(()))
            })?;
            beta.kill()?;
            write(&mut connect(alpha, "v")?, before & !0xfff, 5)?;
            beta.start()?;
        }
        alpha.sterna(["standby", "set", "v", "--bandwidth", "1GiB/s"])?.success()?;
        until_current(alpha)?;
        compare(alpha, beta, &id)
    });
}

#[test]
fn a_deep_check_finds_damage_and_mends_it_while_the_guest_writes() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?.success()?;
        let id = until_current(alpha)?.id;
        let well = alpha.sterna(["standby", "check", "v", "--deep"])?;
        ensure!(well.code == 0 && well.stdout.contains("all is the same"), "{well:?}");
        let elsewhere = beta.sterna(["standby", "check", "v", "--deep"])?;
        ensure!(elsewhere.stderr.contains("give this order there"), "{elsewhere:?}");
        // The disk of the standby has forgotten something.
        let image = File::options().write(true).open(copy_at(beta, &id))?;
        image.write_all_at(&[7; 3 * 4096], 5 << 20)?;
        image.write_all_at(&[7; 1], DISK_BYTES - 1)?;
        let sent = shown(alpha)?.bytes_sent.unwrap_or_default();
        let (stops, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let checked = std::thread::scope(|scope| {
            let writes = scope.spawn(|| {
                let mut client = connect(alpha, "v")?;
                while !stops.load(Ordering::Relaxed) {
                    let number = written.fetch_add(1, Ordering::Relaxed) + 1;
                    write(&mut client, (number * 7919 * 4096) % (4 << 20), number)?;
                }
                anyhow::Ok(())
            });
            let checked = until("the guest writes", || {
                ensure!(!writes.is_finished(), "the guest has ended");
                Ok((written.load(Ordering::Relaxed) > 10).then_some(()))
            })
            .and_then(|()| alpha.sterna(["standby", "check", "v", "--deep", "--json"]));
            stops.store(true, Ordering::Relaxed);
            writes.join().map_err(|_| anyhow::anyhow!("the guest has panicked"))??;
            checked
        })?;
        ensure!(checked.code == 10, "{checked:?}");
        let standby: Standby = serde_json::from_str(&checked.stdout)?;
        let check = standby.check.context("no check")?;
        ensure!(check.bytes_done == DISK_BYTES && check.bytes_differing == 4 * 4096, "{check:?}");
        until("what differed is sent again", || {
            let again = alpha.sterna(["standby", "check", "v", "--deep"])?;
            Ok((again.code == 0).then_some(()))
        })?;
        ensure!(shown(alpha)?.bytes_sent.unwrap_or_default() > sent);
        until_current(alpha)?;
        until("the last cut has arrived", || Ok(compare(alpha, beta, &id).is_ok().then_some(())))?;
        // A host that goes away interrupts nothing for good.
        beta.kill()?;
        let interrupted = std::thread::scope(|scope| {
            let check = scope.spawn(|| alpha.sterna(["standby", "check", "v", "--deep"]));
            beta.start()?;
            check.join().map_err(|_| anyhow::anyhow!("the check has panicked"))?
        })?;
        ensure!(interrupted.code == 0, "{interrupted:?}");
        Ok(())
    });
}
