//! Moves of machines between two real QEMU processes that share a disk: committed, taken back, given up, and broken.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

mod ahead;
mod disks;
mod scene;

use std::time::Duration;

use hypervisor::qemu::{MachineError, MigrationStatus, RunState};
use scene::{DEADLINE, Scene};

#[tokio::test]
async fn a_machine_tells_its_state_and_obeys() {
    let Some(scene) = Scene::new() else { return };
    let mut qemu = scene.start("machine", &[]).await;
    let machine = &qemu.machine;
    assert!(machine.version().major >= 7, "{}", machine.version());
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    machine.stop().await.unwrap();
    assert_eq!(machine.status().await.unwrap(), RunState::Paused);
    machine.resume().await.unwrap();
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    assert_eq!(machine.migration_blockers().await.unwrap(), [""; 0]);
    // It is emulated, with 32 MiB.
    assert_eq!(machine.memory_hazard().await.unwrap().is_some(), machine.version().major < 9);
    machine.announce().await.unwrap();
    let devices = machine.query_block().await.unwrap();
    let node = devices[0].node.as_ref().unwrap();
    assert_eq!((node.name.as_str(), node.driver.as_str()), ("disk", "raw"));
    assert_eq!(node.size_bytes, Some(scene::DISK_BYTES));
    let nodes = machine.named_nodes().await.unwrap();
    assert!(nodes.iter().any(|node| node.name == "file" && node.driver == "file"), "{nodes:?}");
    machine.quit().await.unwrap();
    machine.closed().await;
    assert!(qemu.process.wait().await.unwrap().success());
    assert!(machine.status().await.unwrap_err().is_gone());
}

#[tokio::test]
async fn a_machine_moves_and_runs_there_only_when_it_is_told_to() {
    let Some(scene) = Scene::new() else { return };
    let (source, target) = scene.pair().await;
    source.machine.switch_over().await.unwrap();
    let completed = source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await;
    assert_eq!(completed.unwrap(), MigrationStatus::Completed);
    target.machine.await_loaded(DEADLINE).await.unwrap();
    // Nobody runs: this is where the disks change hands.
    assert_eq!(source.machine.status().await.unwrap(), RunState::PostMigrate);
    assert_eq!(target.machine.status().await.unwrap(), RunState::Paused);
    let progress = source.machine.memory_progress().await.unwrap();
    assert!(progress.downtime_ms.is_some() && progress.total_bytes > 0, "{progress:?}");
    target.machine.resume().await.unwrap();
    assert_eq!(target.machine.status().await.unwrap(), RunState::Running);
    source.machine.quit().await.unwrap();
}

#[tokio::test]
async fn a_machine_whose_target_dies_after_it_has_loaded_goes_on_at_the_source() {
    let Some(scene) = Scene::new() else { return };
    let (source, mut target) = scene.pair().await;
    source.machine.switch_over().await.unwrap();
    source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.machine.await_loaded(DEADLINE).await.unwrap();
    target.process.kill().await.unwrap();
    target.machine.closed().await;
    source.machine.resume().await.unwrap();
    assert_eq!(source.machine.status().await.unwrap(), RunState::Running);
    // The same machine can leave again.
    let again = scene.start_target("again").await;
    scene.offer(&source, &again).await;
    source.machine.switch_over().await.unwrap();
    source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    again.machine.await_loaded(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_move_that_is_given_up_leaves_the_machine_running() {
    let Some(scene) = Scene::new() else { return };
    let (source, target) = scene.pair().await;
    source.machine.abandon().await.unwrap();
    source.machine.await_status(&[MigrationStatus::Cancelled], DEADLINE).await.unwrap();
    scene.until_running(&source).await;
    let lost = target.machine.await_loaded(DEADLINE).await.unwrap_err();
    assert!(!matches!(lost, MachineError::Deadline { .. }), "{lost:?}");
}

#[tokio::test]
async fn a_target_that_dies_before_the_switch_over_leaves_the_machine_running() {
    let Some(scene) = Scene::new() else { return };
    let (source, mut target) = scene.pair().await;
    target.process.kill().await.unwrap();
    source.machine.switch_over().await.unwrap();
    let failed = source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap_err();
    assert!(
        matches!(failed, MachineError::MigrationEnded { status: MigrationStatus::Failed, .. }),
        "{failed:?}"
    );
    scene.until_running(&source).await;
}

#[tokio::test]
async fn a_target_of_another_shape_refuses_the_memory_and_the_machine_goes_on() {
    let Some(scene) = Scene::new() else { return };
    // The target knows nothing of one of the source's devices.
    let source = scene.start("source", &["-device", "virtio-rng-pci"]).await;
    let target = scene.start_target("target").await;
    scene.offer(&source, &target).await;
    source.machine.switch_over().await.unwrap();
    let refused = target.machine.await_loaded(DEADLINE).await.unwrap_err();
    assert!(!matches!(refused, MachineError::Deadline { .. }), "{refused:?}");
    let failed = source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap_err();
    assert!(
        matches!(failed, MachineError::MigrationEnded { status: MigrationStatus::Failed, .. }),
        "{failed:?}"
    );
    scene.until_running(&source).await;
}

#[tokio::test]
async fn a_target_that_would_run_by_itself_is_kept_from_it() {
    let Some(scene) = Scene::new() else { return };
    let source = scene.start("source", &[]).await;
    let target = scene.start("target", &["-incoming", "defer"]).await;
    scene.offer(&source, &target).await;
    source.machine.switch_over().await.unwrap();
    target.machine.await_loaded(DEADLINE).await.unwrap();
    assert_eq!(target.machine.status().await.unwrap(), RunState::Paused);
}

#[tokio::test]
async fn the_throttle_can_be_raised_while_memory_moves() {
    let Some(scene) = Scene::new() else { return };
    let (source, _target) = scene.pair().await;
    source.machine.raise_throttle(40).await.unwrap();
    let parameters = serde_json::json!({});
    let parameters = source.machine.qmp().execute("query-migrate-parameters", parameters, DEADLINE).await;
    assert_eq!(parameters.unwrap()["max-cpu-throttle"], 40);
    // Time enough for QEMU to be asked once, also on a busy machine.
    let late = source.machine.await_status(&[MigrationStatus::Completed], Duration::from_secs(3)).await;
    assert!(late.unwrap_err().to_string().ends_with("still pre-switchover"));
}
