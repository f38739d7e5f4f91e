//! fio with its `nbd` engine. It writes blocks with checksums, reads them back, and fails at the first wrong one.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, anyhow, ensure};
use serde_json::Value;
use testbed::{Host, Program, until};

const BLOCK_BYTES: u64 = 8192;
/// Number of written blocks after which fio counts as at work.
const WRITES_AT_WORK: u64 = 1000;

/// The result of a pass of fio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Number of written blocks.
    pub writes: u64,
    /// Number of read blocks, including those for verification.
    pub reads: u64,
}

/// Returns one pass of fio over the first `bytes` bytes of an export, with random 8 KiB writes and reads, sixteen at a time. Some
/// blocks are verified meanwhile, and all at the end.
///
/// It runs until every block was written once, without a time limit.
pub fn write_and_verify(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed)
        .args(["--rw=randrw", "--rwmixwrite=60", "--verify_backlog=1024", "--verify_backlog_batch=256"])
        .args(["--do_verify=1", "--verify_fatal=1"])
}

/// Writes as [`write_and_verify`], without verification.
pub fn only_write(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed).args(["--rw=randwrite", "--do_verify=0", "--end_fsync=1"])
}

/// Verifies the writes of [`only_write`] with the same arguments.
pub fn only_verify(uri: &str, bytes: u64, seed: u32) -> Program {
    base(uri, bytes, seed).args(["--rw=randwrite", "--verify_only=1"])
}

/// Runs a pass to its end.
///
/// # Errors
/// If fio found a wrong block, or an error of the export.
pub fn run(fio: Program) -> anyhow::Result<Pass> {
    let outcome = fio.run()?;
    outcome.expect(0)?;
    // fio prints notes before the JSON on standard output.
    let start = outcome.stdout.find('{').context("fio printed no JSON")?;
    let report: Value = serde_json::from_str(&outcome.stdout[start..]).context("fio's report")?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio reports error {}", job["error"]);
    let count =
        |kind: &str| job[kind]["total_ios"].as_u64().with_context(|| format!("fio counts no {kind}s"));
    Ok(Pass { writes: count("write")?, reads: count("read")? })
}

/// Runs passes of fio over the volume `v` of a scene during `meanwhile`, and returns both results.
///
/// # Errors
/// If fio finds a wrong block, or `meanwhile` fails.
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
        // An error of fio is reported first, because it may have caused the other.
        let passes = passes.context("fio at work")?;
        let blocks = bytes / BLOCK_BYTES;
        for pass in &passes {
            // Each block was read or written, and written blocks were read for verification.
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
