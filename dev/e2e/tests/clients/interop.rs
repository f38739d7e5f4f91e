//! Tests of other programs on a volume: while it is idle, while it moves, and after the move.
//!
//! `ranges.rs` has tests of byte ranges, copies and comparisons, `fio.rs` of fio, and `vms/disks.rs` of VMs.

use anyhow::{Context as _, ensure};
use e2e::file_system::FileSystem;
use e2e::{Program, play, play_with_mounts};
use serde_json::Value;

const DISK_BYTES: u64 = 48 << 20;

#[test]
fn qemu_io_reads_what_it_wrote_zeroed_and_discarded() {
    at_rest_and_moving(|uri, round| {
        let pattern = format!("0x{:02x}", 0x31 + round);
        let commands = [
            format!("write -P {pattern} 0 1M"),
            format!("read -P {pattern} 0 1M"),
            "write -z 64k 128k".to_owned(),
            "read -P 0 64k 128k".to_owned(),
            "discard 512k 64k".to_owned(),
            "read -P 0 512k 64k".to_owned(),
            // Neither its beginning nor its end is at a block boundary.
            format!("write -P {pattern} 2097151 4099"),
            format!("read -P {pattern} 2097151 4099"),
            format!("aio_write -P {pattern} 4M 256k"),
            format!("aio_write -P {pattern} 5M 256k"),
            "aio_flush".to_owned(),
            format!("read -P {pattern} 4M 256k"),
            format!("read -P {pattern} 192k 320k"),
            "flush".to_owned(),
        ];
        let said = qemu_io("raw", uri, &commands)?;
        ensure!(!said.contains("failed") && said.contains("wrote 1048576/1048576 bytes"), "{said}");
        // A wrong pattern must be noticed, so that the test proves something.
        ensure!(qemu_io("raw", uri, &["read -P 0xee 0 4k".to_owned()]).is_err());
        Ok(())
    });
}

#[test]
fn a_qcow2_image_within_a_volume_stays_clean() {
    at_rest_and_moving(|uri, round| {
        if round == 0 {
            qemu_img(&["create", "-q", "-f", "qcow2", uri, "32M"])?;
        }
        let pattern = 0x41 + round;
        let commands: Vec<String> = (0..16)
            .flat_map(|index| {
                let offset = index * (2 << 20) + round * 65536;
                [format!("write -P {pattern} {offset} 96k"), format!("read -P {pattern} {offset} 96k")]
            })
            .collect();
        qemu_io("qcow2", uri, &commands)?;
        qemu_img(&["check", "-f", "qcow2", uri])?;
        Ok(())
    });
}

#[test]
fn qemu_img_maps_data_and_holes_where_they_are() {
    at_rest_and_moving(|uri, _| {
        let map = qemu_img(&["map", "--output=json", "-f", "raw", uri])?;
        let map: Value = serde_json::from_str(&map).context("the map")?;
        let mut end = 0;
        for extent in map.as_array().context("a map is a list")? {
            ensure!(extent["start"].as_u64() == Some(end), "a gap at {end}: {map}");
            let length = extent["length"].as_u64().context("a length")?;
            let is_zero = extent["zero"] == true;
            ensure!(is_zero || end < FILLED_BYTES, "data at {end}, where nothing was written: {map}");
            ensure!(!is_zero || end >= FILLED_BYTES, "zeroes at {end}, where data was written: {map}");
            end += length;
        }
        ensure!(end == DISK_BYTES, "{map}");
        Ok(())
    });
}

#[test]
fn a_file_system_over_nbdfuse_is_whole_after_moves() {
    play_with_mounts(|scene| {
        scene.start()?;
        let uri = scene.create_volume(DISK_BYTES)?.uri;
        let folder = scene.path("mounted");
        std::fs::create_dir(&folder)?;
        let file_system = FileSystem::on_export(&folder, &uri, DISK_BYTES)?;
        let mut expected = Vec::new();
        for (round, store) in [None, Some("b"), Some("a")].into_iter().enumerate() {
            let name = folder.join(format!("file-{round}"));
            let content: Vec<u8> =
                (0..2_u32 << 20).map(|byte| (byte / 7 + round as u32 * 31) as u8).collect();
            let write = || {
                std::fs::write(&name, &content)?;
                Ok(std::fs::File::open(&name)?.sync_all()?)
            };
            match store {
                Some(store) => scene.while_migrating(store, write)?,
                None => write()?,
            }
            expected.push((name, content));
            for (name, content) in &expected {
                ensure!(std::fs::read(name)? == *content, "{} has changed", name.display());
            }
        }
        file_system.unmount_and_check()
    });
}

/// Bytes that [`fill`] writes at the beginning of the disk.
const FILLED_BYTES: u64 = 24 << 20;

/// Runs `work` on a partly filled volume: while it is idle, while it moves, and after the move.
fn at_rest_and_moving(work: impl Fn(&str, u64) -> anyhow::Result<()>) {
    play(|scene| {
        let uri = scene.create_volume(DISK_BYTES)?.uri;
        fill(&uri)?;
        work(&uri, 0).context("at rest")?;
        scene.while_migrating("b", || work(&uri, 1).context("while it moves"))?;
        work(&uri, 2).context("after it has moved")?;
        scene.while_migrating("a", || work(&uri, 3).context("on its way back"))
    });
}

fn fill(uri: &str) -> anyhow::Result<()> {
    qemu_io("raw", uri, &[format!("write -P 0x5a 0 {FILLED_BYTES}"), "flush".to_owned()]).map(drop)
}

/// Runs commands of qemu-io. A failed command, or a wrong pattern, is an error.
fn qemu_io(format: &str, uri: &str, commands: &[String]) -> anyhow::Result<String> {
    let program = Program::qemu_io().args(["-f", format]);
    program.args(commands.iter().flat_map(|command| ["-c", command])).arg(uri).succeed()
}

fn qemu_img(arguments: &[&str]) -> anyhow::Result<String> {
    Program::qemu_img().args(arguments).succeed()
}
