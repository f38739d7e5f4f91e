//! Tests of the example script for power failures: `contrib/nut/sterna-evacuate`.

use anyhow::ensure;
use e2e::throw_away_root::repository;
use e2e::{Host, Outcome, Pair, Program, program, until, vm};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 16 << 20;
const REQUESTS: u64 = 200;

/// Runs the script for all VMs of a host.
fn evacuate(host: &Host, to: &str) -> anyhow::Result<Outcome> {
    let sterna = program::sterna()?;
    let folders = sterna.parent().map(|folder| folder.display().to_string()).unwrap_or_default();
    Program::at(&repository().join("contrib/nut/sterna-evacuate"))
        .arg(to)
        .env("PATH", format!("{folders}:{}", std::env::var("PATH")?))
        .env("STERNA_HOST", host.address()?.to_string())
        .run()
}

#[test]
fn when_the_power_fails_vms_leave_and_a_host_that_nobody_answers_for_is_said() {
    e2e::play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(alpha, FILL_BYTES)?;
        console.work_on(REQUESTS)?;
        until("the hosts see each other", || {
            Ok((alpha.sterna(["migrate", vm::NAME, "--to", "beta:a", "--dry-run"])?.code == 0).then_some(()))
        })?;
        evacuate(alpha, "beta:a")?.expect(0)?;
        vm::check_at(beta, alpha)?;
        console.work_on(REQUESTS)?;

        // First there is nothing left to move, and then no daemon.
        evacuate(alpha, "beta:a")?.expect(0)?;
        alpha.stop()?;
        let unheard = evacuate(alpha, "beta:a")?;
        ensure!(unheard.code == 1, "{unheard:?}");
        Ok(())
    });
}
