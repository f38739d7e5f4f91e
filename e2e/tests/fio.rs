//! fio writes and verifies a volume while it moves.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, ensure};
use e2e::fio::{self, Pass};
use e2e::{Scene, play, until};

const DISK_BYTES: u64 = 128 << 20;

/// Moves the volume so many times while fio goes over its disk, again and again.
fn move_under_fio(scene: &Scene, migrations: u32) -> anyhow::Result<Vec<Pass>> {
    let uri = scene.create_volume(DISK_BYTES)?.uri;
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let passes = scope.spawn(|| {
            let mut passes = Vec::new();
            for seed in 1.. {
                passes.push(fio::run(fio::write_and_verify(&uri, DISK_BYTES, seed))?);
                if enough.load(Ordering::Relaxed) {
                    break;
                }
            }
            anyhow::Ok(passes)
        });
        let at_work = until("fio works", || {
            ensure!(!passes.is_finished(), "fio ended at once");
            let statistics = scene.volume()?.statistics;
            Ok(statistics.filter(|statistics| statistics.writes > 1000).map(drop))
        });
        let moved = at_work.and_then(|()| scene.migrate_to_and_fro(migrations));
        enough.store(true, Ordering::Relaxed);
        let passes = passes.join().map_err(|_| anyhow::anyhow!("fio's thread panicked"))?;
        // What fio has found says more than a migration that failed after it.
        let passes = passes.context("fio")?;
        moved.map(|()| passes)
    })
}

#[test]
fn fio_verifies_a_disk_that_moves_ten_times() {
    play(|scene| {
        let passes = move_under_fio(scene, 10)?;
        let blocks = DISK_BYTES / 8192;
        for pass in &passes {
            // Each block was either read or written, and what was written was read to verify it.
            ensure!(pass.writes > blocks / 4 && pass.reads >= blocks, "{pass:?}");
        }
        let statistics = scene.volume()?.statistics.context("the volume is served")?;
        ensure!(statistics.errors == 0, "{statistics:?}");
        println!("{} passes of fio: {passes:?}", passes.len());
        Ok(())
    });
}

#[test]
fn fio_finds_a_block_that_was_changed_behind_its_back() {
    play(|scene| {
        let volume = scene.create_volume(16 << 20)?;
        fio::run(fio::only_write(&volume.uri, 16 << 20, 7))?;
        scene.migrate("b")?;
        fio::run(fio::only_verify(&volume.uri, 16 << 20, 7)).context("nothing was changed yet")?;
        let image = scene.volume()?.image;
        scene.stop()?;
        let file = std::fs::File::options().read(true).write(true).open(image)?;
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 5_000_000)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[byte[0] ^ 1], 5_000_000)?;
        scene.start()?;
        let error = fio::run(fio::only_verify(&volume.uri, 16 << 20, 7)).map(drop).unwrap_err();
        assert!(error.to_string().contains("verify"), "{error}");
        Ok(())
    });
}
