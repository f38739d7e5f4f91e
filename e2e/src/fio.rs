//! fio with its `nbd` engine: it writes blocks that bear a checksum, reads them back, and fails on the first wrong one.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::program::Program;

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

fn base(uri: &str, bytes: u64, seed: u32) -> Program {
    Program::of_package("fio", "fio")
        .args(["--name=disk", "--ioengine=nbd", "--thread", "--output-format=json"])
        .args(["--bs=8k", "--iodepth=16", "--verify=crc32c", "--verify_async=0"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={bytes}"))
        .arg(format!("--randseed={seed}"))
}
