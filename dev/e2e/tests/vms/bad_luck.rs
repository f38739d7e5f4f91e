//! Tests of VMs with two disks between two hosts, with faults: daemons killed at each step of the handover, links, stores. The
//! guest checks its disks all the time.

use anyhow::{Context as _, ensure};
use api::{Migration, Phase};
use e2e::{LinkState, Pair, play_pair, until, vm};

const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;
const VOLUMES: [&str; 2] = ["root", "data"];

fn start(pair: &Pair) -> anyhow::Result<vm::Vm> {
    for volume in VOLUMES {
        pair.alpha.sterna(["volume", "create", volume, "--size", "16MiB", "--store", "a"])?.success()?;
    }
    // The state of its TPM is at one host with it as well; the guest checks that.
    vm::start_with_words(&pair.alpha, &VOLUMES, FILL_BYTES, vm::tpm_words())
}

/// Waits for the end of all operations. Returns the host with the VM and both volumes, and whether that is alpha.
fn settled(pair: &Pair) -> anyhow::Result<bool> {
    until("one host has all, and the VM runs there", || {
        let is_alpha = pair.settled(VOLUMES.len())?;
        let (owner, other) = if is_alpha { (&pair.alpha, &pair.beta) } else { (&pair.beta, &pair.alpha) };
        Ok(vm::check_at(owner, other).is_ok().then_some(is_alpha))
    })
}

#[test]
fn killed_at_each_step_of_the_handover_a_machine_is_at_one_host_with_all_its_disks() {
    #[derive(Clone, Copy, PartialEq)]
    enum Killed {
        Source,
        Target,
    }
    let steps = [
        (Killed::Target, "after-launch"),
        (Killed::Source, "before-released"),
        (Killed::Target, "after-prepared"),
        (Killed::Source, "after-released"),
        (Killed::Target, "before-owned"),
        (Killed::Target, "after-owned"),
        (Killed::Source, "before-ended"),
        (Killed::Target, "before-ended"),
    ];
    play_pair(|pair| {
        let console = start(pair)?;
        let mut is_at_alpha = true;
        for (who, step) in steps {
            let kills_alpha = is_at_alpha == (who == Killed::Source);
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            killed.stop()?;
            killed.start_with(&[("STERNA_FAIL_POINT", step)])?;
            let (source, to) = if is_at_alpha { (&pair.alpha, "beta:a") } else { (&pair.beta, "alpha:a") };
            until("the VM is found again, and begins to move", || {
                let begun = source.sterna(["migrate", vm::NAME, "--to", to, "--detach"])?;
                Ok((begun.code == 0).then_some(()))
            })?;
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            ensure!(killed.wait_for_end()? == 137, "{step}: it was not killed");
            killed.start()?;
            is_at_alpha = settled(pair).with_context(|| format!("killed {step}"))?;
            console.work_on(REQUESTS).with_context(|| format!("killed {step}"))?;
        }
        console.verify()
    });
}

/// Fail points between the records of the migration and of its VM.
#[test]
fn killed_before_it_is_noted_that_a_machine_leaves_its_disks_do_not_go_without_it() {
    play_pair(|pair| {
        let console = start(pair)?;
        pair.alpha.stop()?;
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-started")])?;
        until("the VM is found again", || {
            Ok(vm::vms(&pair.alpha)?.iter().any(|vm| vm.state == api::VmState::Running).then_some(()))
        })?;
        // The command is interrupted by the kill.
        pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a", "--detach"])?;
        ensure!(pair.alpha.wait_for_end()? == 137, "it was not killed");
        pair.alpha.start()?;
        ensure!(settled(pair)?, "it stays");
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_whose_host_is_gone_after_it_was_released_is_promoted_with_all_its_disks() {
    play_pair(|pair| {
        let console = start(pair)?;
        pair.alpha.stop()?;
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-released")])?;
        until("the VM is found again, and begins to move", || {
            let begun = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a", "--detach"])?;
            Ok((begun.code == 0).then_some(()))
        })?;
        ensure!(pair.alpha.wait_for_end()? == 137, "it was not killed");
        // All of its volumes move, or none.
        pair.beta.sterna(["volume", "promote", VOLUMES[0], "--force"])?.success()?;
        until("the VM runs where its volumes are", || {
            Ok(vm::vms(&pair.beta)?.iter().any(|vm| vm.state == api::VmState::Running).then_some(()))
        })?;
        console.work_on(REQUESTS)?;
        // The other host comes back, and learns the outcome.
        pair.alpha.start()?;
        ensure!(!settled(pair)?, "it is at beta");
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn links_that_are_cut_or_silent_while_a_machine_moves_cost_time_and_nothing_else() {
    play_pair(|pair| {
        let console = start(pair)?;
        for state in [LinkState::Cut, LinkState::BlackHole] {
            let begun: Migration = pair.alpha.ask(&["migrate", vm::NAME, "--to", "beta:a", "--detach"])?;
            until("its memory is on its way", || {
                let phase = pair.alpha.migration(&begun.id)?.phase;
                Ok((phase != Phase::Copying).then_some(()))
            })?;
            pair.link.set(state);
            // If the VM was already paused, it resumes here after its downtime limit.
            let before = pair.alpha.migration(&begun.id)?;
            if before.phase == Phase::Memory {
                console.work_on(REQUESTS)?;
            }
            pair.link.set(LinkState::Up);
            let is_at_alpha = settled(pair)?;
            console.work_on(REQUESTS)?;
            if !is_at_alpha {
                let home: Migration = pair.beta.ask(&["migrate", vm::NAME, "--to", "alpha:a"])?;
                ensure!(home.state.has_ended(), "{home:?}");
                ensure!(settled(pair)?, "it came home");
            }
        }
        // The wait has no limit, but can be cancelled, and the VM works meanwhile.
        let begun: Migration = pair.alpha.ask(&["migrate", vm::NAME, "--to", "beta:a", "--detach"])?;
        pair.link.set(LinkState::BlackHole);
        console.work_on(REQUESTS)?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        pair.alpha.wait_for_migration(&begun.id)?;
        console.work_on(REQUESTS)?;
        pair.link.set(LinkState::Up);
        ensure!(settled(pair)?, "it stays");
        console.verify()
    });
}
