//! Tests of the demos: they verify every block, and leave nothing behind.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Program, program};
use lab::demo::{HostsOptions, LinkKind, Progress, run_hosts};
use serde_json::Value;

/// Size of the disk between two hosts. It moves there and back, and takes long enough for a cut of the link.
const HOSTS_DISK: (&str, u64) = ("256MiB", 256 << 20);

#[test]
fn the_demo_moves_a_busy_disk_verifies_it_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    check(&demo(folder.path(), &[])?)?;
    check_empty(folder.path())
}

#[test]
fn the_demo_between_two_namespaces_goes_on_after_the_cut_and_leaves_nothing_behind() -> anyhow::Result<()> {
    if let Err(error) = lab::network::check() {
        omission::machine_lacks(&format!("what hosts need: {error}"));
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    check_hosts(&demo(folder.path(), &["--hosts", "--size", HOSTS_DISK.0])?)?;
    check_empty(folder.path())
}

/// Runs the demo as a user who is not root.
#[test]
fn the_demo_between_two_daemons_on_loopback_goes_on_after_the_cut_and_leaves_nothing_behind()
-> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let options = HostsOptions {
        parent: Some(folder.path().to_owned()),
        kind: Some(LinkKind::Loopback),
        margin: Duration::from_millis(500),
        ..HostsOptions::new(program::sterna()?, HOSTS_DISK.1)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(run_hosts(options, &mut Progress::silent()))?;
    println!("{report}");
    check_hosts(&serde_json::from_str(&report.json()?).context("the figures")?)?;
    check_empty(folder.path())
}

/// It takes half a minute, and several while other tests have the processors.
const DEMO_MAX: Duration = Duration::from_secs(400);

fn demo(folder: &Path, more: &[&str]) -> anyhow::Result<Value> {
    let demo = Program::at(&program::sterna()?).args(["demo", "--json", "--folder"]).arg(folder);
    let outcome = demo.args(more).within(DEMO_MAX).run()?;
    outcome.expect(0)?;
    outcome.json()
}

fn check(figures: &Value) -> anyhow::Result<()> {
    println!("{figures}");
    ensure!(figures["verified"] == true, "{figures}");
    for figure in ["bytes_moved", "migration_seconds", "iops_before", "iops_during", "iops_after"] {
        ensure!(figures[figure].as_f64() > Some(0.0), "{figure}: {figures}");
    }
    ensure!(figures["longest_stall_ms"].as_f64().is_some(), "{figures}");
    Ok(())
}

fn check_hosts(figures: &Value) -> anyhow::Result<()> {
    check(figures)?;
    ensure!(figures["resumed"] == true, "{figures}");
    // Nothing arrived during the cut of two seconds.
    ensure!(figures["longest_gap_ms"].as_f64() > Some(1900.0), "{figures}");
    Ok(())
}

fn check_empty(folder: &Path) -> anyhow::Result<()> {
    ensure!(std::fs::read_dir(folder)?.next().is_none(), "something is left in {}", folder.display());
    Ok(())
}
