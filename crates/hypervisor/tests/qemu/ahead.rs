//! Machines that run at the target before all of their memory is there, with real QEMU.

use std::num::NonZeroU64;
use std::time::Duration;

use hypervisor::qemu::{MemoryMode, MemoryOptions, MemoryTransfer, MigrationStatus, PostCopyStart, RunState};

use crate::scene::{DEADLINE, Qemu, Scene};

/// So slow that memory is missing when a machine is to run without it.
const BYTES_PER_S: u64 = 1 << 20;

/// A source that stands still, with memory that its target lacks; `None`: this kernel does not let a machine run without it.
async fn pair(scene: &Scene) -> Option<(Qemu, Qemu)> {
    let (source, target) = (scene.start("source", &[]).await, scene.start_target("target").await);
    if target.machine.post_copy_obstacle().await.unwrap().is_some() {
        omission::machine_lacks("userfaultfd");
        return None;
    }
    assert_eq!(source.machine.post_copy_hazard().await.unwrap(), None);
    let transfer = MemoryTransfer { mode: MemoryMode::PostCopy, ..MemoryTransfer::default() };
    target.machine.expect_memory(&target.memory, transfer).await.unwrap();
    let bandwidth_max_bytes_per_s = NonZeroU64::new(BYTES_PER_S);
    let downtime_limit = Duration::from_millis(1);
    let options = MemoryOptions { downtime_limit, bandwidth_max_bytes_per_s, transfer };
    source.machine.offer_memory(&target.memory, options).await.unwrap();
    source.machine.await_status(&[MigrationStatus::Active], DEADLINE).await.unwrap();
    assert_eq!(source.machine.begin_post_copy().await.unwrap(), PostCopyStart::Begun);
    source.machine.await_status(&[MigrationStatus::PreSwitchover], DEADLINE).await.unwrap();
    Some((source, target))
}

#[tokio::test]
async fn a_machine_runs_ahead_of_its_memory_and_at_the_source_never_again() {
    let Some(scene) = Scene::new() else { return };
    let Some((source, target)) = pair(&scene).await else { return };
    source.machine.switch_over().await.unwrap();
    target.machine.await_loaded(DEADLINE).await.unwrap();
    target.machine.resume().await.unwrap();
    assert_eq!(target.machine.status().await.unwrap(), RunState::Running);
    source.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.machine.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    assert_ne!(source.machine.status().await.unwrap(), RunState::Running);
}

#[tokio::test]
async fn a_machine_whose_memory_was_to_follow_goes_on_if_nothing_was_switched_over() {
    let Some(scene) = Scene::new() else { return };
    let Some((source, mut target)) = pair(&scene).await else { return };
    // N.B. by itself it does not run, whatever QEMU makes of the broken stream.
    target.process.kill().await.unwrap();
    source.machine.abandon().await.unwrap();
    let ends = [MigrationStatus::Cancelled, MigrationStatus::Failed];
    source.machine.await_status(&ends, DEADLINE).await.unwrap();
    assert_ne!(source.machine.status().await.unwrap(), RunState::Running);
    source.machine.resume().await.unwrap();
    assert_eq!(source.machine.status().await.unwrap(), RunState::Running);
}
