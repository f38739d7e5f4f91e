//! Tests in which fio writes and verifies a volume while it moves.

use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, ensure};
use e2e::{fio, play};

const DISK_BYTES: u64 = 128 << 20;

#[test]
fn fio_verifies_a_disk_that_moves_ten_times() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let ((), passes) = fio::at_work(scene, DISK_BYTES, || scene.migrate_to_and_fro(10))?;
        let statistics = scene.statistics()?;
        ensure!(statistics.errors == 0, "{statistics:?}");
        println!("{} passes of fio: {passes:?}", passes.len());
        Ok(())
    });
}

/// This test shows that fio notices a wrong block.
#[test]
fn fio_finds_a_bit_that_was_changed_behind_its_back() {
    const SEED: u32 = 7;
    const BYTES: u64 = 16 << 20;
    play(|scene| {
        let uri = scene.create_volume(BYTES)?.uri;
        fio::run(fio::only_write(&uri, BYTES, SEED))?;
        scene.migrate("b")?;
        fio::run(fio::only_verify(&uri, BYTES, SEED)).context("nothing was changed yet")?;
        scene.stop()?;
        let image = std::fs::File::options().read(true).write(true).open(scene.path("b/v.img"))?;
        let mut byte = [0];
        image.read_exact_at(&mut byte, 5_000_000)?;
        image.write_all_at(&[byte[0] ^ 1], 5_000_000)?;
        scene.start()?;
        let outcome = fio::only_verify(&uri, BYTES, SEED).run()?;
        ensure!(outcome.code != 0 && outcome.stderr.contains("crc32c: verify failed"), "{outcome:?}");
        Ok(())
    });
}
