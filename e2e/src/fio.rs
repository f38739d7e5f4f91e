//! fio with its `nbd` engine: it writes blocks that bear a checksum, reads them back, and fails on the first wrong one.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, anyhow, ensure};
use serde_json::Value;
use testbed::{Host, Program, until};

/// Bytes of a request.
const BLOCK_BYTES: u64 = 8192;
/// fio is at work once it has written so many blocks.
const WRITES_AT_WORK: u64 = 1000;

/// What a pass of fio did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Blocks written.
    pub writes: u64,
    /// Blocks read, those that were read to verify them included.
    pub reads: u64,
}

/// One pass of fio over the first `bytes` bytes of an export: 8 KiB random writes and reads, sixteen at a time; some
/// blocks are verified while others are written, and in the end all of them are.
///
/// It runs until every block was written once, so that no clock cuts the verification short.
pub fn write_and_verify(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed)
        .args(["--rw=randrw", "--rwmixwrite=60", "--verify_backlog=1024", "--verify_backlog_batch=256"])
        .args(["--do_verify=1", "--verify_fatal=1"])
}

/// Writes as [`write_and_verify`] does, and verifies nothing.
pub fn only_write(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed).args(["--rw=randwrite", "--do_verify=0", "--end_fsync=1"])
}

/// Verifies what [`only_write`] with the same numbers has written.
pub fn only_verify(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed).args(["--rw=randwrite", "--verify_only=1"])
}

/// Runs one of the above to its end.
///
/// # Errors
/// If fio found a wrong block, or an error of the export.
pub fn run(fio: Program) -> anyhow::Result<Pass> {
    let outcome = fio.run()?;
    outcome.expect(0)?;
    // fio prints notes before the JSON, to standard output too.
    let start = outcome.stdout.find('{').context("fio printed no JSON")?;
    let report: Value = serde_json::from_str(&outcome.stdout[start..]).context("fio's report")?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio reports error {}", job["error"]);
    let count =
        |kind: &str| job[kind]["total_ios"].as_u64().with_context(|| format!("fio counts no {kind}s"));
    Ok(Pass { writes: count("write")?, reads: count("read")? })
}

/// Lets fio go over the volume `v` of a scene, again and again, while `meanwhile` does something; returns what both did.
///
/// # Errors
/// If fio finds anything wrong, or `meanwhile` fails.
pub fn at_work<T>(
    scene: &Host,
    bytes: u64,
    meanwhile: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Vec<Pass>)> {
    let uri = scene.volume()?.uri;
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let passes = scope.spawn(|| {
            let mut passes = Vec::new();
            for seed in 1.. {
                passes.push(run(write_and_verify(&uri, bytes, seed))?);
                if enough.load(Ordering::Relaxed) {
                    break;
                }
            }
            anyhow::Ok(passes)
        });
        let works = until("fio works", || {
            ensure!(!passes.is_finished(), "fio ended at once");
            let statistics = scene.volume()?.statistics;
            Ok(statistics.filter(|statistics| statistics.writes >= WRITES_AT_WORK).map(drop))
        });
        let done = works.and_then(|()| meanwhile());
        enough.store(true, Ordering::Relaxed);
        let passes = passes.join().map_err(|_| anyhow!("fio's thread panicked"))?;
        // What fio has found says more than what failed because of it.
        let passes = passes.context("fio at work")?;
        let blocks = bytes / BLOCK_BYTES;
        for pass in &passes {
            // Each block was either read or written, and what was written was read to verify it.
            ensure!(
                pass.writes > blocks / 4 && pass.reads >= blocks,
                "fio did less than it should: {pass:?}"
            );
        }
        Ok((done?, passes))
    })
}

fn base(uri: &str, bytes: u64, seed: u32) -> Program {
    Program::of_package("fio", "fio")
        .args(["--name=disk", "--ioengine=nbd", "--thread", "--output-format=json"])
        .args(["--iodepth=16", "--verify=crc32c", "--verify_async=0", "--verify_state_save=0"])
        .arg(format!("--bs={BLOCK_BYTES}"))
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={bytes}"))
        .arg(format!("--randseed={seed}"))
}
