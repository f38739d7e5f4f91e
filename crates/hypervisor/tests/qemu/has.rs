//! Tests the state of a real QEMU: devices, overlays and jobs are found, and a VM that stays paused has its disks.

use std::collections::BTreeSet;
use std::time::Duration;

use hypervisor::qemu::command_line::made::{self, Made};
use hypervisor::qemu::{Launched, Leaf};
use hypervisor::{MigrationStatus, RunState};
use serde_json::json;

use crate::scene::{DEADLINE, Scene, Started};

const SOON: Duration = Duration::from_secs(15);

async fn move_paused(scene: &Scene, source: &Started, target: &Started) {
    scene.offer(source, target).await;
    source.qemu.switch_over().await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn what_a_command_makes_is_what_qemu_has_until_somebody_changes_it() {
    let Some(scene) = Scene::new() else { return };
    let more = [
        "-device",
        "virtio-rng-pci,id=rng,addr=0x9",
        "-device",
        "virtio-balloon-pci",
        "-device",
        "ide-cd,id=cd0",
    ];
    let started = scene.start("machine", &more).await;
    let qemu = &started.qemu;
    let made = Made::of(&Launched::of(qemu.process().unwrap()).unwrap().command);
    let look = qemu.look(&made.settings()).await.unwrap();
    assert_eq!((look.state.clone(), look.works.len()), (RunState::Running, 0));
    assert_eq!(look.devices.len(), made.devices.len());
    for asked in made.devices.iter().filter(|asked| asked.name.is_some()) {
        let seen = look.devices.iter().find(|seen| seen.name == asked.name).unwrap();
        assert!(made::is_kind(&asked.kind, &seen.kind), "{asked:?} {seen:?}");
        for (key, value) in &asked.settings {
            assert!(made::is_setting(key, value, &seen.settings[key]), "{asked:?} {seen:?}");
        }
    }
    let file = Leaf::File(scene.path("disk").to_str().unwrap().to_owned());
    let disk =
        |look: &hypervisor::qemu::Look| look.drives.iter().find(|drive| !drive.leaves.is_empty()).cloned();
    assert_eq!(disk(&look).unwrap().leaves, BTreeSet::from([file.clone()]));
    // A backup tool makes an overlay, and copies the image below it.
    let overlay = scene.path("overlay");
    let snapshot = json!({
        "node-name": "disk", "snapshot-file": overlay, "snapshot-node-name": "over", "mode": "absolute-paths", "format": "qcow2",
    });
    qemu.qmp().execute("blockdev-snapshot-sync", snapshot, SOON).await.unwrap();
    let commit = json!({ "job-id": "j0", "device": "over", "speed": 1 });
    qemu.qmp().execute("block-commit", commit, SOON).await.unwrap();
    let look = qemu.look(&made.settings()).await.unwrap();
    let over = Leaf::File(overlay.to_str().unwrap().to_owned());
    assert_eq!(disk(&look).unwrap().leaves, BTreeSet::from([file, over]));
    assert!(look.works.iter().any(|work| work.contains("\"j0\" (commit)")), "{look:?}");
}

#[tokio::test]
async fn a_vm_that_stays_paused_has_its_disks_and_can_move_on() {
    let Some(scene) = Scene::new() else { return };
    let first = scene.start("first", &[]).await;
    first.qemu.stop().await.unwrap();
    let second = scene.start_target("second").await;
    move_paused(&scene, &first, &second).await;
    assert_eq!(second.qemu.status().await.unwrap(), RunState::Paused);
    second.qemu.take_disks(&scene.path("wake")).await.unwrap();
    assert_eq!(second.qemu.status().await.unwrap(), RunState::Paused);
    // A QEMU before 10 that had not taken its disks would end itself now.
    let third = scene.start_target("third").await;
    move_paused(&scene, &second, &third).await;
    third.qemu.resume().await.unwrap();
    assert_eq!(third.qemu.status().await.unwrap(), RunState::Running);
}
