//! Tests of snapshots of whole VMs.

use anyhow::{Context as _, ensure};
use api::{VmState, Volume};
use e2e::{play, until, vm};

const VOLUMES: [&str; 2] = ["root", "data"];
const DISK_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 8 << 20;
/// Requests of the guest between two steps.
const REQUESTS: u64 = 200;

#[test]
fn the_disks_of_a_vm_are_cut_off_at_one_instant_while_it_runs_and_go_back_together_once_it_is_stopped() {
    play(|host| {
        for volume in VOLUMES {
            host.sterna(["volume", "create", volume, "--store", "a", "--size", &DISK_BYTES.to_string()])?
                .success()?;
        }
        let console = vm::start_with(host, &VOLUMES, FILL_BYTES)?;
        let taken: Vec<Volume> = host.ask(&["vm", "snapshot", vm::NAME, "--label", "s"])?;
        let groups: Vec<_> = taken.iter().filter_map(|one| Some(&one.snapshot_of.as_ref()?.group)).collect();
        ensure!(groups.len() == 2 && groups[0] == groups[1], "{taken:?}");
        console.work_on(REQUESTS)?;
        let refused = host.sterna(["vm", "revert", vm::NAME, "s"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("stop"), "{refused:?}");
        host.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        console.end();
        // One volume has no such snapshot: none is reverted.
        host.sterna(["volume", "snapshot", "root", "--label", "alone"])?.success()?;
        let refused = host.sterna(["vm", "revert", vm::NAME, "alone"])?;
        ensure!(refused.code == 3 && refused.stderr.contains("data"), "{refused:?}");
        let reverted: Vec<Volume> = host.ask(&["vm", "revert", vm::NAME, "s", "--keep-current"])?;
        ensure!(reverted.len() == 2, "{reverted:?}");
        for volume in VOLUMES {
            let read = |name: &str| std::fs::read(host.path("a").join(name)).context("an image");
            let [now, then] = [read(&format!("{volume}.img"))?, read(&format!("{volume}@s.img"))?];
            ensure!(now == then, "{volume} is not what it was");
        }
        let kept: Vec<Volume> = host.ask(&["volume", "snapshots", "data"])?;
        ensure!(kept.iter().any(|one| one.name.contains("before-revert")), "{kept:?}");
        host.sterna(["vm", "start", vm::NAME])?.success()?;
        until("the VM runs", || {
            Ok(vm::vms(host)?.first().is_some_and(|vm| vm.state == VmState::Running).then_some(()))
        })
    });
}
