//! Tests of the demo with a whole VM in both forms: it verifies disk and memory, keeps its connection, and leaves nothing behind.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::program;
use lab::demo::{LinkKind, MovedVmOptions, Progress, run_vm};
use lab::vm::{GuestImage, VmOptions};
use serde_json::Value;

const DISK_BYTES: u64 = 64 << 20;

#[test]
fn a_machine_between_two_namespaces_keeps_its_connection_and_leaves_nothing_behind() -> anyhow::Result<()> {
    if let Err(error) = lab::network::check() {
        omission::machine_lacks(&format!("what hosts need: {error}"));
        return Ok(());
    }
    if let Err(error) = lab::network::check_lan() {
        omission::kernel_lacks(&format!("bridges, for a network of guests: {error}"));
        return Ok(());
    }
    let figures = play(LinkKind::Namespaces)?;
    ensure!(figures["connection_survived"] == true, "{figures}");
    ensure!(figures["longest_connection_gap_ms"].as_f64() > Some(0.0), "{figures}");
    Ok(())
}

/// Runs the demo as a user who is not root.
#[test]
fn a_machine_between_two_daemons_on_loopback_is_verified_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let figures = play(LinkKind::Loopback)?;
    ensure!(figures["connection_survived"].is_null(), "{figures}");
    ensure!(figures["longest_connection_gap_ms"].is_null(), "{figures}");
    Ok(())
}

/// Runs a small demo and returns its figures. Only one runs at a time, because each emulates a processor.
fn play(kind: LinkKind) -> anyhow::Result<Value> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir()?;
    let usual = MovedVmOptions::with_image(program::sterna()?, GuestImage::find(None)?, DISK_BYTES);
    let options = MovedVmOptions {
        parent: Some(folder.path().to_owned()),
        kind: Some(kind),
        margin: Duration::from_millis(500),
        machine: VmOptions { memory_bytes: 16 << 20, ..usual.machine },
        ..usual
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(run_vm(options, &mut Progress::silent()))?;
    println!("{report}");
    ensure!(report.is_good(), "{report}");
    ensure!(report.memory_bytes == 16 << 20, "memory is verified: {report}");
    ensure!(std::fs::read_dir(folder.path())?.next().is_none(), "something is left");
    let figures: Value = serde_json::from_str(&report.json()?).context("the figures")?;
    println!("{figures}");
    check(&figures)?;
    Ok(figures)
}

fn check(figures: &Value) -> anyhow::Result<()> {
    ensure!(figures["verified"] == true, "{figures}");
    for figure in ["bytes_moved", "migration_seconds", "iops_before", "downtime_ms", "longest_stall_ms"] {
        ensure!(figures[figure].as_f64() > Some(0.0), "{figure}: {figures}");
    }
    ensure!(figures["disruption_ms"].is_number(), "{figures}");
    let parts = figures["downtime_parts"].as_object().context("the parts of the downtime")?;
    let sum: f64 = parts.values().filter_map(Value::as_f64).sum();
    let downtime_ms = figures["downtime_ms"].as_f64().unwrap_or_default();
    ensure!((sum - downtime_ms).abs() < 0.01, "the parts do not add up: {figures}");
    Ok(())
}
