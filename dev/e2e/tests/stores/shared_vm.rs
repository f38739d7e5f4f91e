//! Tests of a VM between two hosts that can open each other's stores: its disks are written there directly, while a
//! waiting QEMU has them open.

use anyhow::ensure;
use api::{Migration, MigrationState};
use e2e::{play_sharing_pair, share, vm};

const FILL_BYTES: u64 = 8 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;

#[test]
fn a_machine_with_two_disks_goes_to_another_host_and_comes_home() {
    play_sharing_pair(
        |alpha, beta| share(alpha, beta),
        |pair| {
            let volumes = ["root", "data"];
            for volume in volumes {
                let create = ["volume", "create", volume, "--size", "32MiB", "--store", "a"];
                pair.alpha.sterna(create)?.success()?;
            }
            let console = vm::start_with(&pair.alpha, &volumes, FILL_BYTES)?;
            for (from, to, name) in
                [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")]
            {
                console.work_on(REQUESTS)?;
                let moved: Migration = from.ask(&["migrate", vm::NAME, "--to", name])?;
                ensure!(moved.state == MigrationState::Moved && moved.shared, "{moved:?}");
                vm::check_at(to, from)?;
            }
            console.work_on(REQUESTS)?;
            console.verify()
        },
    );
}
