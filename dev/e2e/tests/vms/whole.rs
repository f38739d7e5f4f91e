//! Tests of whole VMs between two hosts: memory, processors and disk move and return, also with faults. The guest checks
//! its disk all the time.

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Phase, Vm};
use e2e::{Host, Outcome, Pair, play_pair, until, vm};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;

/// Returns the message of a refused command.
fn refusal(outcome: &Outcome) -> anyhow::Result<&str> {
    ensure!(outcome.code != 0, "it was not refused: {outcome:?}");
    Ok(&outcome.stderr)
}

fn start(pair: &Pair) -> anyhow::Result<vm::Vm> {
    pair.alpha.create_volume(DISK_BYTES)?;
    vm::start(&pair.alpha, FILL_BYTES)
}

fn begin(scene: &Host, to: &str) -> anyhow::Result<Migration> {
    scene.ask(&["migrate", vm::NAME, "--to", to, "--detach"])
}

fn until_phase(scene: &Host, migration: &Migration, phase: Phase) -> anyhow::Result<()> {
    until("the phase is reached", || {
        let shown = scene.migration(&migration.id)?;
        ensure!(shown.state == MigrationState::Running, "it has ended: {shown:?}");
        Ok((shown.phase == phase).then_some(()))
    })
}

/// Returns the process of the VM's QEMU at a host.
#[test]
fn a_machine_goes_to_another_host_and_comes_home() {
    play_pair(|pair| {
        let console = start(pair)?;
        for _ in 0..2 {
            for (from, to, name) in
                [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")]
            {
                console.work_on(REQUESTS)?;
                let moved: Migration = from.ask(&["migrate", vm::NAME, "--to", name])?;
                ensure!(moved.state == MigrationState::Moved, "{moved:?}");
                // After the end nothing of the VM is left at the source.
                let left: Vec<Vm> = from.ask(&["vm", "list"])?;
                ensure!(left.is_empty(), "{left:?}");
                let shown = from.migration(&moved.id)?.machine.context("a VM went along")?;
                let downtime = shown.downtime.context("it stood still")?;
                let parts = downtime.memory_ms + downtime.handover_ms;
                ensure!((parts - downtime.total_ms).abs() < 0.01 && parts > 0.0, "{downtime:?}");
                ensure!(
                    shown.memory.is_some_and(|memory| memory.sent_bytes > 1 << 20),
                    "its memory was sent"
                );
                vm::check_at(to, from)?;
            }
        }
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_with_several_disks_goes_with_all_of_them_or_stays_with_all_of_them() {
    play_pair(|pair| {
        let volumes = ["root", "data", "log"];
        for volume in volumes {
            pair.alpha.sterna(["volume", "create", volume, "--size", "32MiB", "--store", "a"])?.success()?;
        }
        let console = vm::start_with(&pair.alpha, &volumes, FILL_BYTES)?;
        // Nothing moves, because one of its names is used there.
        pair.beta.sterna(["volume", "create", "log", "--size", "1MiB", "--store", "a"])?.success()?;
        let refused = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(refusal(&refused)?.contains("log"), "it says which");
        pair.beta.sterna(["volume", "remove", "log"])?.success()?;
        vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        // It is cancelled while its memory is sent, and either daemon is killed.
        let begun = begin(&pair.alpha, "beta:a")?;
        until_phase(&pair.alpha, &begun, Phase::Memory)?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        pair.alpha.wait_for_migration(&begun.id)?;
        vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        for kills_source in [true, false] {
            let begun = begin(&pair.alpha, "beta:a")?;
            until_phase(&pair.alpha, &begun, Phase::Memory)?;
            let killed = if kills_source { &mut pair.alpha } else { &mut pair.beta };
            killed.kill()?;
            killed.start()?;
            pair.alpha.wait_for_migration(&begun.id)?;
            vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        }
        // Each volume returns to its own kept image.
        for (from, to, name) in [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")] {
            let moved: Migration = from.ask(&["migrate", vm::NAME, "--to", name, "--keep-source"])?;
            ensure!(moved.state == MigrationState::Moved, "{moved:?}");
            vm::check_at(to, from)?;
            until("all of them went", || {
                Ok(from.ask::<Vec<api::Volume>>(&["volume", "list"])?.is_empty().then_some(()))
            })?;
            console.work_on(REQUESTS)?;
        }
        console.verify()
    });
}

#[test]
#[ignore = "needs a second QEMU: make test-newer-qemu"]
fn a_machine_goes_to_a_host_with_a_newer_hypervisor() {
    play_pair(|pair| {
        let newer = std::env::var("STERNA_NEWER_QEMU").context("where is it?")?;
        pair.beta.stop()?;
        let path = format!("{newer}:{}", std::env::var("PATH").unwrap_or_default());
        pair.beta.start_with(&[("PATH", &path)])?;
        let console = start(pair)?;
        until("beta can be reached again", || {
            Ok((pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?.code == 0).then_some(()))
        })?;
        vm::check_at(&pair.beta, &pair.alpha)?;
        let program = std::fs::read_link(format!("/proc/{}/exe", vm::process(&pair.beta)?))?;
        ensure!(
            program.starts_with(std::path::Path::new(&newer).parent().context("a folder above")?),
            "{program:?}"
        );
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_goes_on_where_it_was_when_its_move_comes_to_nothing() {
    play_pair(|pair| {
        let console = start(pair)?;
        // It is cancelled while its memory is sent.
        let begun = begin(&pair.alpha, "beta:a")?;
        until_phase(&pair.alpha, &begun, Phase::Memory)?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        // The QEMU at the target is killed.
        let begun = begin(&pair.alpha, "beta:a")?;
        until_phase(&pair.alpha, &begun, Phase::Memory)?;
        vm::kill(vm::process(&pair.beta)?);
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Failed, "{ended:?}");
        ensure!(ended.failure.as_deref() == Some("machine-stayed"), "{ended:?}");
        vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        console.verify()
    });
}

#[test]
fn a_machine_is_at_one_host_after_either_daemon_was_killed() {
    play_pair(|pair| {
        let console = start(pair)?;
        for kills_source in [true, false] {
            let begun = begin(&pair.alpha, "beta:a")?;
            until_phase(&pair.alpha, &begun, Phase::Memory)?;
            let killed = if kills_source { &mut pair.alpha } else { &mut pair.beta };
            killed.kill()?;
            killed.start()?;
            pair.alpha.wait_for_migration(&begun.id)?;
            vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        }
        let moved: Migration = pair.alpha.ask(&["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn disks_of_a_machine_go_to_another_store_of_its_host_while_it_works() {
    play_pair(|pair| {
        let console = start(pair)?;
        pair.alpha.sterna(["migrate", vm::NAME, "--to", "b"])?.success()?;
        ensure!(pair.alpha.images("a")?.is_empty(), "the image is where it was");
        vm::check_works_at(&pair.alpha, &pair.beta, &console)?;
        console.verify()
    });
}

#[test]
fn what_cannot_be_moved_is_refused_before_anything_is_copied() {
    play_pair(|pair| {
        let console = start(pair)?;
        // A VM of this name exists there.
        pair.beta.create_volume(DISK_BYTES)?;
        let definition = pair.alpha.path("vm.toml");
        let definition = definition.to_str().context("a folder that is not UTF-8")?;
        pair.beta.sterna(["vm", "add", vm::NAME, "--definition", definition])?.success()?;
        let refused = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(refusal(&refused)?.contains(vm::NAME), "it says which");
        drop(console);
        Ok(())
    });
}
