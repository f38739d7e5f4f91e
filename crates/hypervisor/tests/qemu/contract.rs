//! Tests what a migration may rely on, for every hypervisor: QEMU, and the fake one.

use std::num::NonZeroU64;
use std::path::Path;

use hypervisor::fake::FakeVm;
use hypervisor::{
    Hypervisor, HypervisorError, MemoryOptions, MemoryTransfer, MigrationStatus, RunChange, RunState,
};

use crate::scene::{DEADLINE, Scene};

async fn offer(source: &dyn Hypervisor, target: &dyn Hypervisor, socket: &Path) {
    target.expect_memory(socket, MemoryTransfer::default()).await.unwrap();
    let options = MemoryOptions::for_downtime(DEADLINE);
    source.offer_memory(socket, options).await.unwrap();
    let reached = source.await_status(&[MigrationStatus::PreSwitchover], DEADLINE).await;
    assert_eq!(reached.unwrap(), MigrationStatus::PreSwitchover);
    assert_ne!(source.run_state().await.unwrap(), RunState::Running);
}

async fn a_vm_runs_at_one_side_when_it_is_told_to(
    source: &dyn Hypervisor,
    target: &dyn Hypervisor,
    socket: &Path,
) {
    assert_eq!(source.run_state().await.unwrap(), RunState::Running);
    assert!(source.memory_bytes().await.unwrap() > 0 && !source.has_disk_over_nothing().await.unwrap());
    assert_eq!(source.memory_progress().await.unwrap().status, MigrationStatus::None);
    let mut changes = source.run_changes();
    offer(source, target, socket).await;
    assert_eq!(changes.next().await, Some(RunChange::Stopped));
    source.set_downtime_target(DEADLINE).await.unwrap();
    source.raise_throttle(40).await.unwrap();
    for limit in [NonZeroU64::new(64 << 20), None] {
        source.limit_memory(limit).await.unwrap();
    }
    source.switch_over().await.unwrap();
    source.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.await_loaded(DEADLINE).await.unwrap();
    assert_eq!(target.run_state().await.unwrap(), RunState::Paused);
    // The move is undone: the VM continues at its source.
    source.resume().await.unwrap();
    assert_eq!(changes.next().await, Some(RunChange::Runs));
    source.announce().await.unwrap();
    assert_eq!(source.run_state().await.unwrap(), RunState::Running);
}

async fn a_move_that_is_given_up_lets_the_vm_run(
    source: &dyn Hypervisor,
    target: &dyn Hypervisor,
    socket: &Path,
) {
    let mut changes = source.run_changes();
    offer(source, target, socket).await;
    assert_eq!(changes.next().await, Some(RunChange::Stopped));
    source.abandon().await.unwrap();
    source.await_status(&[MigrationStatus::Cancelled], DEADLINE).await.unwrap();
    assert_eq!(changes.next().await, Some(RunChange::Runs));
    let lost = target.await_loaded(DEADLINE).await.unwrap_err();
    assert!(!matches!(lost, HypervisorError::Deadline { .. }), "{lost:?}");
    // A finished transfer stays as it is.
    source.abandon().await.unwrap();
    let refused = source.switch_over().await.unwrap_err();
    assert!(matches!(refused, HypervisorError::Refused(_)), "{refused:?}");
}

async fn what_is_asked_at_the_wrong_time_is_refused(
    source: &dyn Hypervisor,
    target: &dyn Hypervisor,
    socket: &Path,
) {
    let refused = source.expect_memory(socket, MemoryTransfer::default()).await.unwrap_err();
    assert!(matches!(refused, HypervisorError::State { expected: RunState::InMigrate, .. }), "{refused:?}");
    for refused in
        [source.switch_over().await, source.resend_memory(socket).await, target.recover_memory(socket).await]
    {
        assert!(matches!(refused, Err(HypervisorError::Refused(_))), "{refused:?}");
    }
    // The error of a vain wait holds the last state.
    let late =
        source.await_status(&[MigrationStatus::Completed], std::time::Duration::ZERO).await.unwrap_err();
    assert!(matches!(late, HypervisorError::Deadline { .. }), "{late:?}");
}

macro_rules! of_both {
    ($($name:ident),*) => {
        mod of_qemu {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                let Some(scene) = Scene::new() else { return };
                let source = scene.start("source", &[]).await;
                let target = scene.start_target("target").await;
                super::$name(&source.qemu, &target.qemu, &target.memory).await;
            })*
        }
        mod of_the_fake {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                let folder = tempfile::tempdir().unwrap();
                let socket = folder.path().join("memory");
                let (source, target) = (FakeVm::running(socket.clone()), FakeVm::waiting(socket.clone()));
                super::$name(&source, &target, &socket).await;
            })*
        }
    };
}

of_both!(
    a_vm_runs_at_one_side_when_it_is_told_to,
    a_move_that_is_given_up_lets_the_vm_run,
    what_is_asked_at_the_wrong_time_is_refused
);

#[tokio::test]
async fn a_fake_that_is_blocked_or_has_ended_says_so() {
    let vm = FakeVm::running("/nowhere".into());
    vm.block("a device of the host");
    assert_eq!(vm.migration_blockers().await.unwrap(), ["a device of the host"]);
    let options = MemoryOptions::for_downtime(DEADLINE);
    let blocked = vm.offer_memory(Path::new("/nowhere"), options).await.unwrap_err();
    assert!(matches!(blocked, HypervisorError::Blocked { .. }), "{blocked:?}");
    vm.end();
    assert!(vm.run_state().await.unwrap_err().is_gone());
    vm.closed().await;
    assert_eq!(vm.run_changes().next().await, None);
}
