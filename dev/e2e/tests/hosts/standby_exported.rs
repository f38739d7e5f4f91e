//! Tests of standbys whose first copy is carried over in a folder.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use api::{Standby, StandbyState};
use e2e::{Host, Pair, play_pair, until};
use testbed::nbd_client::{Operation, WriteDurability};

use crate::standbys::{BLOCK_BYTES, DISK_BYTES, connect, read, until_current, write};

const FILL_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// Two regions in which was written: a killed source knows no more.
const SENT_BYTES_MAX: u64 = 4 << 20;

/// Makes volumes whose blocks differ, and orders a standby of them over a link that would take minutes.
fn begin(alpha: &Host, volumes: &[&str]) -> anyhow::Result<Standby> {
    for (volume, salt) in volumes.iter().zip(1_u64..) {
        let size = DISK_BYTES.to_string();
        alpha.sterna(["volume", "create", volume, "--size", &size, "--store", "a"])?.success()?;
        let mut client = connect(alpha, volume)?;
        for offset in (0..FILL_BYTES).step_by(CHUNK_BYTES) {
            let words = (offset / 8..(offset + CHUNK_BYTES as u64) / 8)
                .map(|word| (word + (salt << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let data = words.flat_map(u64::to_le_bytes).collect();
            client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
        }
        client.perform(Operation::Flush)?;
    }
    let terms = ["--to", "beta:a", "--every", "1s", "--bandwidth", "64KiB/s"];
    alpha.sterna([&["standby", "add"], volumes, &terms].concat())?.success()?;
    until("the group runs", || {
        let standby = shown(alpha)?;
        Ok((standby.state == StandbyState::Seeding).then_some(standby))
    })
}

fn shown(host: &Host) -> anyhow::Result<Standby> {
    host.ask(&["standby", "show", "v"])
}

fn carry(from: &Path, to: &Path) -> anyhow::Result<()> {
    ensure!(Command::new("cp").args(["-r", "--sparse=always"]).arg(from).arg(to).status()?.success());
    Ok(())
}

fn compare(alpha: &Host, beta: &Host, id: &str, volumes: &[&str]) -> anyhow::Result<()> {
    for (index, volume) in volumes.iter().enumerate() {
        let copy = beta.path("a/.sterna-standbys").join(id).join(format!("image-{index}"));
        let same = std::fs::read(alpha.path(&format!("a/{volume}.img")))? == std::fs::read(copy)?;
        ensure!(same, "the standby of {volume} differs");
    }
    Ok(())
}

fn until_same(alpha: &Host, beta: &Host, id: &str, volumes: &[&str]) -> anyhow::Result<()> {
    until_current(alpha)?;
    let mut last = Ok(());
    let same = until("the standby is the same", || {
        last = compare(alpha, beta, id, volumes);
        Ok(last.is_ok().then_some(()))
    });
    same.and(last)
}

#[test]
fn a_standby_that_was_carried_over_is_sent_what_was_written_since() {
    play_pair(|Pair { alpha, beta, .. }| {
        let id = begin(alpha, &["v", "w"])?.id;
        let folder = alpha.path("carry");
        let path = folder.to_str().context("a path")?;
        alpha.sterna(["standby", "export", "v", path])?.success()?;
        let names: Vec<_> =
            std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.file_name())).collect::<anyhow::Result<_>>()?;
        ensure!(names.len() == 3 && !alpha.path(".carry.partial").exists(), "{names:?}");
        let image = std::fs::metadata(folder.join("v.img"))?;
        ensure!(image.len() == DISK_BYTES && image.blocks() * 512 < FILL_BYTES + (1 << 20), "it is sparse");
        let exported = shown(alpha)?;
        ensure!(exported.state == StandbyState::Paused, "{exported:?}");
        let again = alpha.sterna(["standby", "export", "v", path])?;
        ensure!(again.code != 0 && folder.join("manifest.json").exists(), "{again:?}");
        // Guests go on, and both daemons are killed meanwhile.
        write(&mut connect(alpha, "v")?, 8 << 20, 9)?;
        alpha.kill()?;
        beta.kill()?;
        alpha.start()?;
        beta.start()?;
        write(&mut connect(alpha, "w")?, 60 << 20, 10)?;
        carry(&folder, &beta.path("a/carried"))?;
        beta.sterna(["standby", "seed", "v", "--exported", "carried"])?.success()?;
        let sent = shown(alpha)?.bytes_sent.unwrap_or_default();
        alpha.sterna(["standby", "set", "v", "--bandwidth", "1GiB/s"])?.success()?;
        alpha.sterna(["standby", "resume", "v"])?.success()?;
        until_same(alpha, beta, &id, &["v", "w"])?;
        let source = shown(alpha)?;
        let sent = source.bytes_sent.unwrap_or_default() - sent;
        ensure!(sent < SENT_BYTES_MAX && source.bytes_found.is_none(), "{sent} bytes were sent: {source:?}");
        // It is a standby like any other.
        alpha.sterna(["standby", "check", "v", "--deep"])?.success()?;
        alpha.kill()?;
        until("the loss is noticed", || {
            let refused = beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        ensure!(
            read(&mut connect(beta, "v")?, 8 << 20)? == 9 && read(&mut connect(beta, "w")?, 60 << 20)? == 10
        );
        Ok(())
    });
}

#[test]
fn a_folder_that_is_not_as_it_was_exported_is_refused_and_changes_nothing() {
    play_pair(|Pair { alpha, beta, .. }| {
        let id = begin(alpha, &["v", "w"])?.id;
        let folder = alpha.path("carry");
        alpha.sterna(["standby", "export", "v", folder.to_str().context("a path")?])?.success()?;
        let carried = beta.path("a/carried");
        let refused = |what: &str, word: &str, damage: &dyn Fn(&Path) -> anyhow::Result<()>| {
            let _ = std::fs::remove_dir_all(&carried);
            carry(&folder, &carried)?;
            damage(&carried)?;
            let refused = beta.sterna(["standby", "seed", "v", "--exported", "carried"])?;
            ensure!(refused.code != 0 && refused.stderr.contains(word), "{what}: {refused:?}");
            anyhow::Ok(())
        };
        refused("no manifest", "no whole export", &|folder| {
            Ok(std::fs::remove_file(folder.join("manifest.json"))?)
        })?;
        refused("another epoch", "damaged", &|folder| {
            let text = std::fs::read_to_string(folder.join("manifest.json"))?;
            Ok(std::fs::write(folder.join("manifest.json"), text.replace("\"epoch\": ", "\"epoch\": 1"))?)
        })?;
        refused("garbage", "none of an export", &|folder| {
            Ok(std::fs::write(folder.join("manifest.json"), [0xff; 4096])?)
        })?;
        refused("a changed block", "not as it was exported", &|folder| {
            let image = File::options().write(true).open(folder.join("w.img"))?;
            Ok(image.write_all_at(&[7; BLOCK_BYTES], 40 << 20)?)
        })?;
        refused("swapped files", "not as it was exported", &|folder| {
            std::fs::rename(folder.join("v.img"), folder.join("x"))?;
            std::fs::rename(folder.join("w.img"), folder.join("v.img"))?;
            Ok(std::fs::rename(folder.join("x"), folder.join("w.img"))?)
        })?;
        refused("a file that is cut off", "not as it was exported", &|folder| {
            Ok(File::options().write(true).open(folder.join("v.img"))?.set_len(4096)?)
        })?;
        refused("no image", "does not exist", &|folder| Ok(std::fs::remove_file(folder.join("v.img"))?))?;
        for name in ["../carried", "carried/", "none", ""] {
            let wrong = beta.sterna(["standby", "seed", "v", "--exported", name])?;
            ensure!(wrong.code != 0, "{name}: {wrong:?}");
        }
        // What was refused has changed nothing.
        let _ = std::fs::remove_dir_all(&carried);
        carry(&folder, &carried)?;
        beta.sterna(["standby", "seed", "v", "--exported", "carried"])?.success()?;
        alpha.sterna(["standby", "resume", "v"])?.success()?;
        until_same(alpha, beta, &id, &["v", "w"])
    });
}

#[test]
fn what_is_cancelled_killed_or_without_room_leaves_no_folder_and_a_folder_of_another_standby_is_compared() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha, &["v"])?;
        let refused = |alpha: &Host, folder: &str, word: &str| {
            let refused = alpha.sterna(["standby", "export", "v", folder])?;
            ensure!(refused.code != 0 && refused.stderr.contains(word), "{folder}: {refused:?}");
            anyhow::Ok(())
        };
        refused(alpha, "/", "no absolute path")?;
        refused(alpha, "/nonexistent/folder", "cannot be made")?;
        refused(alpha, alpha.path("a").to_str().context("a path")?, "is there already")?;
        let elsewhere = beta.sterna(["standby", "export", "v", "/tmp/none"])?;
        ensure!(elsewhere.stderr.contains("give this order there"), "{elsewhere:?}");
        let first = alpha.path("first");
        let path = first.to_str().context("a path")?.to_owned();
        let order = alpha.command(["standby", "export", "v", &path])?.start()?;
        until("it has begun", || Ok(alpha.path(".first.partial").exists().then_some(())))?;
        alpha.kill()?;
        order.wait()?;
        ensure!(!first.exists(), "a killed export looks whole");
        alpha.start()?;
        until("the group runs", || Ok(shown(alpha)?.bytes_waiting.map(drop)))?;
        refused(alpha, &path, "is in the way")?;
        std::fs::remove_dir_all(alpha.path(".first.partial"))?;
        until("it is exported", || {
            let exported = alpha.sterna(["standby", "export", "v", &path])?;
            Ok((exported.code == 0).then_some(()))
        })?;
        // Removed and added again it is another standby: nothing is known of the folder but its content.
        alpha.sterna(["standby", "remove", "v"])?.success()?;
        let terms = ["standby", "add", "v", "--to", "beta:a", "--every", "1s", "--bandwidth", "64KiB/s"];
        alpha.sterna(terms)?.success()?;
        let id = shown(alpha)?.id;
        carry(&first, &beta.path("a/carried"))?;
        beta.sterna(["standby", "seed", "v", "--exported", "carried"])?.success()?;
        alpha.sterna(["standby", "set", "v", "--bandwidth", "1GiB/s"])?.success()?;
        until_same(alpha, beta, &id, &["v"])?;
        let found = shown(alpha)?.bytes_found.unwrap_or_default();
        ensure!(found >= FILL_BYTES - 2 * CHUNK_BYTES as u64, "{found} bytes were found");
        Ok(())
    });
}
