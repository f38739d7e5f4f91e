//! Tests of other programs' NBD clients on an idle volume, and while it moves.

use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::{Host, Program, play, until};
use serde_json::Value;

const DISK_BYTES: u64 = 32 << 20;
/// The interpreter of Debian's package of libnbd's binding.
const PYTHON: &str = "/usr/bin/python3";
/// Number of requests after which the model counts as at work.
const SOME_REQUESTS: u64 = 500;

#[test]
fn every_byte_range_reads_as_the_model_says_while_the_disk_moves() {
    play(|scene| {
        // It is not a multiple of the chronicle's block size.
        let uri = scene.create_volume((8 << 20) + 4096)?.uri;
        let stop = scene.path("stop");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/model.py");
        let python = Program::of_package(PYTHON, "python3 (with python3-libnbd)");
        let mut model = python.arg(script).args([&uri, "1"]).arg(&stop).start()?;
        for store in ["b", "a", "b", "a", "b"] {
            let done = requests(scene)?;
            until("the model works", || {
                ensure!(model.is_running()?, "the model has ended");
                Ok((requests(scene)? > done + SOME_REQUESTS).then_some(()))
            })?;
            scene.migrate(store)?;
        }
        std::fs::write(stop, b"")?;
        let done: Value = model.wait()?.json()?;
        for kind in ["read", "write", "zero", "trim", "flush"] {
            ensure!(done[kind].as_u64() > Some(0), "{done}");
        }
        println!("{done}");
        Ok(())
    });
}

/// Returns the number of guests' requests to the volume.
fn requests(scene: &Host) -> anyhow::Result<u64> {
    let statistics = scene.statistics()?;
    Ok(statistics.reads + statistics.writes)
}

#[test]
fn images_are_copied_in_and_out_and_compared_at_rest_and_while_the_disk_moves() {
    play(|scene| {
        let uri = scene.create_volume(DISK_BYTES)?.uri;
        let (old, image) = (scene.path("old-image"), scene.path("image"));
        write_image(&old, 0x0101_0101)?;
        write_image(&image, 0x9e37_79b9)?;
        let copy_in = |image: &Path| {
            nbdcopy().args(["--connections=4", "--flush"]).arg(image).arg(&uri).succeed().map(drop)
        };
        let copy_out = || {
            let copy = scene.path("copied-out");
            nbdcopy().arg("--connections=4").arg(&uri).arg(&copy).succeed()?;
            compare(&image, "raw", copy.to_str().context("a path")?, "raw")
        };
        let convert_in = |image: &Path| {
            let convert =
                Program::qemu_img().args(["convert", "-n", "-W", "-m", "4", "-f", "raw", "-O", "raw"]);
            convert.arg(image).arg(&uri).succeed().map(drop)
        };
        let convert_out = || {
            let copy = scene.path("copy.qcow2");
            let convert = Program::qemu_img().args(["convert", "-f", "raw", "-O", "qcow2", &uri]);
            convert.arg(&copy).succeed()?;
            compare(&image, "raw", copy.to_str().context("a path")?, "qcow2")
        };
        let compare_all = || compare(&image, "raw", &uri, "raw");

        copy_in(&old)?;
        scene.while_migrating("b", || copy_in(&image))?;
        copy_out()?;
        scene.while_migrating("a", copy_out)?;
        compare_all()?;
        scene.while_migrating("b", compare_all)?;
        convert_out()?;
        scene.while_migrating("a", convert_out)?;
        convert_in(&old)?;
        compare(&old, "raw", &uri, "raw")?;
        scene.while_migrating("b", || convert_in(&image))?;
        compare_all()?;
        describe(&uri)?;
        scene.while_migrating("a", || describe(&uri))?;
        // The last copy has the image's holes.
        let map: Value = nbdinfo(&["--map", "--json", &uri])?;
        ensure!(map.to_string().contains("hole"), "{map}");
        Ok(())
    });
}

/// Checks by nbdinfo the export's size, and that its extents cover it once.
fn describe(uri: &str) -> anyhow::Result<()> {
    let info: Value = nbdinfo(&["--json", uri])?;
    ensure!(info["exports"][0]["export-size"] == DISK_BYTES, "{info}");
    let map: Value = nbdinfo(&["--map", "--json", uri])?;
    let extents = map.as_array().context("a map is a list")?;
    let bytes: Option<u64> = extents.iter().map(|extent| extent["length"].as_u64()).sum();
    ensure!(bytes == Some(DISK_BYTES), "{map}");
    Ok(())
}

fn compare(image: &Path, format: &str, other: &str, other_format: &str) -> anyhow::Result<()> {
    let compare = Program::qemu_img().args(["compare", "-f", format, "-F"]);
    compare.arg(other_format).arg(image).arg(other).succeed().map(drop)
}

fn nbdcopy() -> Program {
    Program::of_package("nbdcopy", "libnbd-bin")
}

fn nbdinfo(arguments: &[&str]) -> anyhow::Result<Value> {
    let outcome = Program::of_package("nbdinfo", "libnbd-bin").args(arguments).run()?;
    outcome.expect(0)?;
    outcome.json()
}

/// Makes an image with data at its beginning and end, and a hole in the middle.
fn write_image(path: &Path, factor: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::create(path)?;
    file.set_len(DISK_BYTES)?;
    let data: Vec<u8> = (0_u32..3 << 20).flat_map(|word| word.wrapping_mul(factor).to_le_bytes()).collect();
    file.write_all_at(&data, 4096)?;
    file.write_all_at(&data[..10_000], DISK_BYTES - 10_000)?;
    Ok(())
}
