//! The demo, as it is: it verifies every block, and leaves nothing behind.

use anyhow::ensure;
use e2e::{Program, program};
use serde_json::Value;

#[test]
fn the_demo_moves_a_busy_disk_verifies_it_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let demo =
        Program::at(&program::sterna()?).args(["demo", "--json", "--folder"]).arg(folder.path()).run()?;
    demo.expect(0)?;
    let figures: Value = demo.json()?;
    println!("{figures}");
    ensure!(figures["verified"] == true, "{figures}");
    for figure in ["bytes_moved", "migration_seconds", "iops_before", "iops_during", "iops_after"] {
        ensure!(figures[figure].as_f64() > Some(0.0), "{figure}: {figures}");
    }
    ensure!(figures["longest_stall_ms"].as_f64().is_some(), "{figures}");
    ensure!(
        std::fs::read_dir(folder.path())?.next().is_none(),
        "something is left in {}",
        folder.path().display()
    );
    Ok(())
}
