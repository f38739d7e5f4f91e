//! Tests of VMs in QEMU with disks of every kind that move, also into images of QEMU's own, with a killed daemon.

use anyhow::{Context as _, ensure};
use api::MigrationState;
use e2e::qemu_nbd::QemuNbd;
use e2e::vm::{self, Vm};
use e2e::{Host, play, play_unstarted};
use testbed::vm::{Bus, DiskModel};

const DISK_BYTES: u64 = 64 << 20;
/// Number of requests after which a VM counts as at work, a fraction of a second.
const SOME_REQUESTS: u64 = 1000;

/// Makes the VM compare its disk, then compares the volume's image.
fn verify(scene: &mut Host, machine: Vm) -> anyhow::Result<()> {
    let options = machine.options().clone();
    let verdict = machine.verify_and_end().context("what the VM sees")?;
    let image = scene.volume()?.image;
    scene.stop()?;
    vm::verify_image(&options, verdict, image.as_ref()).context("what the image holds")
}

#[test]
fn a_machine_finds_every_block_on_a_virtio_disk_that_moves_ten_times() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let machine = vm::launch(&scene.export()?, DISK_BYTES / 2, DiskModel::USUAL)?;
        for round in 1..=10 {
            let store = if round % 2 == 0 { "a" } else { "b" };
            scene.migrate(store).with_context(|| format!("migration {round}"))?;
            machine.work_on(SOME_REQUESTS).with_context(|| format!("after migration {round}"))?;
        }
        verify(scene, machine)
    });
}

#[test]
fn a_machine_with_a_scsi_disk_of_4_kib_sectors_survives_a_daemon_that_is_killed_and_started_again() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let disk = DiskModel { bus: Bus::VirtioScsi, sector_bytes: 4096 };
        let machine = vm::launch(&scene.export()?, DISK_BYTES / 2, disk)?;
        for round in 1..=3 {
            machine.work_on(SOME_REQUESTS).with_context(|| format!("before kill {round}"))?;
            let begun = if round > 1 { Some(scene.begin_to_migrate("b", Some("1MiB/s"))?) } else { None };
            machine.work_on(SOME_REQUESTS)?;
            scene.kill()?;
            scene.start()?;
            if let Some(begun) = begun {
                // In the middle of the migration. It resumes if the copy's missing set was saved by
                // then, and has ended otherwise.
                let _ = scene.sterna(["migration", "cancel", &begun.id])?;
                let ended = scene.wait_for_migration(&begun.id)?;
                ensure!(ended.state != MigrationState::Moved, "{ended:?}");
            }
            scene.check_place("a")?;
        }
        machine.work_on(SOME_REQUESTS)?;
        scene.migrate("b")?;
        machine.work_on(SOME_REQUESTS)?;
        verify(scene, machine)
    });
}

#[test]
fn a_machine_with_a_virtio_disk_of_4_kib_sectors_moves_into_a_raw_image_of_qemu_nbd_and_back() {
    to_qemu_nbd_and_back("raw", DiskModel { bus: Bus::VirtioBlk, sector_bytes: 4096 });
}

#[test]
fn a_machine_with_a_scsi_disk_moves_into_a_qcow2_image_of_qemu_nbd_and_back() {
    to_qemu_nbd_and_back("qcow2", DiskModel { bus: Bus::VirtioScsi, sector_bytes: 512 });
}

/// Moves a VM's disk to an export of qemu-nbd, from there to a store, and back to the export.
fn to_qemu_nbd_and_back(format: &'static str, disk: DiskModel) {
    play_unstarted(|scene| {
        let folder = scene.path("qemu");
        std::fs::create_dir(&folder)?;
        let server = QemuNbd::start(&folder, format, DISK_BYTES)?;
        scene.configure(&format!("[stores.qemu]\nnbd = '{}'\n", server.uri()))?;
        scene.start()?;
        scene.create_volume(DISK_BYTES)?;
        let machine = vm::launch(&scene.export()?, DISK_BYTES / 2, disk)?;
        for store in ["qemu", "b", "qemu"] {
            scene.migrate(store).with_context(|| format!("to {store}"))?;
            machine.work_on(SOME_REQUESTS).with_context(|| format!("in {store}"))?;
        }
        let options = machine.options().clone();
        let verdict = machine.verify_and_end().context("what the VM sees")?;
        scene.stop()?;
        let image = server.stop_and_check()?;
        vm::verify_image(&options, verdict, &image).context("what the image holds")
    });
}
