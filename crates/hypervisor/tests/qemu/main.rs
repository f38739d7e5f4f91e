//! Tests moves of VMs between two real QEMU processes that share a disk: committed, undone, abandoned, and broken.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

mod ahead;
mod contract;
mod disks;
mod has;
mod scene;
mod understood;

use std::time::Duration;

use hypervisor::{HypervisorError, MigrationStatus, RunState};
use scene::{DEADLINE, Scene};

#[tokio::test]
async fn a_vm_tells_its_state_and_obeys() {
    let Some(scene) = Scene::new() else { return };
    let mut started = scene.start("machine", &[]).await;
    let qemu = &started.qemu;
    assert!(qemu.version().major >= 7, "{}", qemu.version());
    assert_eq!(qemu.status().await.unwrap(), RunState::Running);
    qemu.stop().await.unwrap();
    assert_eq!(qemu.status().await.unwrap(), RunState::Paused);
    qemu.resume().await.unwrap();
    assert_eq!(qemu.status().await.unwrap(), RunState::Running);
    assert_eq!(qemu.migration_blockers().await.unwrap(), [""; 0]);
    // It is emulated, with 32 MiB.
    assert_eq!(qemu.memory_hazard().await.unwrap().is_some(), qemu.version().major < 9);
    qemu.announce().await.unwrap();
    let devices = qemu.query_block().await.unwrap();
    let node = devices[0].node.as_ref().unwrap();
    assert_eq!((node.name.as_str(), node.driver.as_str()), ("disk", "raw"));
    assert_eq!(node.size_bytes, Some(scene::DISK_BYTES));
    let nodes = qemu.named_nodes().await.unwrap();
    assert!(nodes.iter().any(|node| node.name == "file" && node.driver == "file"), "{nodes:?}");
    qemu.quit().await.unwrap();
    qemu.closed().await;
    assert!(started.process.wait().await.unwrap().success());
    assert!(qemu.status().await.unwrap_err().is_gone());
}

#[tokio::test]
async fn a_vm_moves_and_runs_there_only_when_it_is_told_to() {
    let Some(scene) = Scene::new() else { return };
    let (source, target) = scene.pair().await;
    source.qemu.switch_over().await.unwrap();
    let completed = source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await;
    assert_eq!(completed.unwrap(), MigrationStatus::Completed);
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    // Neither side runs: this is where the disks change hands.
    assert_eq!(source.qemu.status().await.unwrap(), RunState::PostMigrate);
    assert_eq!(target.qemu.status().await.unwrap(), RunState::Paused);
    let progress = source.qemu.memory_progress().await.unwrap();
    assert!(progress.downtime_ms.is_some() && progress.total_bytes > 0, "{progress:?}");
    target.qemu.resume().await.unwrap();
    assert_eq!(target.qemu.status().await.unwrap(), RunState::Running);
    source.qemu.quit().await.unwrap();
}

#[tokio::test]
async fn a_vm_whose_target_dies_after_it_has_loaded_goes_on_at_the_source() {
    let Some(scene) = Scene::new() else { return };
    let (source, mut target) = scene.pair().await;
    source.qemu.switch_over().await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    target.process.kill().await.unwrap();
    target.qemu.closed().await;
    source.qemu.resume().await.unwrap();
    assert_eq!(source.qemu.status().await.unwrap(), RunState::Running);
    // The same VM can leave again.
    let again = scene.start_target("again").await;
    scene.offer(&source, &again).await;
    source.qemu.switch_over().await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    again.qemu.await_loaded(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_move_that_is_given_up_leaves_the_vm_running() {
    let Some(scene) = Scene::new() else { return };
    let (source, target) = scene.pair().await;
    source.qemu.abandon().await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Cancelled], DEADLINE).await.unwrap();
    scene.until_running(&source).await;
    let lost = target.qemu.await_loaded(DEADLINE).await.unwrap_err();
    assert!(!matches!(lost, HypervisorError::Deadline { .. }), "{lost:?}");
}

#[tokio::test]
async fn a_target_that_dies_before_the_switch_over_leaves_the_vm_running() {
    let Some(scene) = Scene::new() else { return };
    let (source, mut target) = scene.pair().await;
    target.process.kill().await.unwrap();
    source.qemu.switch_over().await.unwrap();
    let failed = source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap_err();
    assert!(
        matches!(failed, HypervisorError::MigrationEnded { status: MigrationStatus::Failed, .. }),
        "{failed:?}"
    );
    scene.until_running(&source).await;
}

#[tokio::test]
async fn a_target_of_another_shape_refuses_the_memory_and_the_vm_goes_on() {
    let Some(scene) = Scene::new() else { return };
    // The target does not know one of the source's devices.
    let source = scene.start("source", &["-device", "virtio-rng-pci"]).await;
    let target = scene.start_target("target").await;
    scene.offer(&source, &target).await;
    source.qemu.switch_over().await.unwrap();
    let refused = target.qemu.await_loaded(DEADLINE).await.unwrap_err();
    assert!(!matches!(refused, HypervisorError::Deadline { .. }), "{refused:?}");
    let failed = source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap_err();
    assert!(
        matches!(failed, HypervisorError::MigrationEnded { status: MigrationStatus::Failed, .. }),
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
    source.qemu.switch_over().await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    assert_eq!(target.qemu.status().await.unwrap(), RunState::Paused);
}

#[tokio::test]
async fn the_throttle_can_be_raised_while_memory_moves() {
    let Some(scene) = Scene::new() else { return };
    let (source, _target) = scene.pair().await;
    source.qemu.raise_throttle(40).await.unwrap();
    let parameters = serde_json::json!({});
    let parameters = source.qemu.qmp().execute("query-migrate-parameters", parameters, DEADLINE).await;
    assert_eq!(parameters.unwrap()["max-cpu-throttle"], 40);
    // Enough time for QEMU to be queried once, even on a busy host.
    let late = source.qemu.await_status(&[MigrationStatus::Completed], Duration::from_secs(3)).await;
    assert!(late.unwrap_err().to_string().ends_with("still pre-switchover"));
}
