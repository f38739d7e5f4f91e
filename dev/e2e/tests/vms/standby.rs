//! Tests of standbys of whole VMs: a promotion starts them where they never ran.

use anyhow::{Context as _, ensure};
use api::{BootCheckState, Standby, StandbyState, StandbyTestState, Vm, VmState, Volume};
use e2e::{Host, Pair, play_pair, until, vm};

const DISK_BYTES: u64 = 16 << 20;
/// The whole disk is filled, because a restarted VM does not know the former writes.
const FILL_BYTES: u64 = DISK_BYTES;
/// Requests of the guest before and after the loss.
const REQUESTS: u64 = 200;
/// What the guest prints on its console once it works.
const BOOTED: &str = "sterna: tick";
/// QEMU's words for a small file of the VM, in place of UEFI variables.
const FILE_WORDS: [&str; 2] = ["-fw_cfg", "name=opt/vars,file={file:vars}"];
const VARIABLES: &[u8] = b"the variables of a firmware";

/// Keeps a standby of the VM at beta, and waits until its first copy is there and its VM was described.
fn keep(pair: &Pair) -> anyhow::Result<Standby> {
    let _: Standby = pair.alpha.ask(&["standby", "add", vm::NAME, "--to", "beta:a", "--every", "1s"])?;
    until("the standby is current, and its VM is described", || {
        let standby = shown(&pair.alpha)?;
        let is_described = standby.vms.iter().any(|vm| vm.described_unix_ms.is_some());
        Ok((standby.state == StandbyState::Current && is_described).then_some(standby))
    })
}

fn shown(host: &Host) -> anyhow::Result<Standby> {
    host.ask(&["standby", "show", vm::NAME])
}

/// Kills the host: its daemon, and the VM's QEMU.
fn lose(host: &mut Host) -> anyhow::Result<()> {
    let process = vm::process(host)?;
    host.kill()?;
    vm::kill(process);
    Ok(())
}

#[test]
fn a_vm_of_a_lost_host_runs_at_its_standby_with_its_files_and_tpm() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let vars = pair.alpha.path("vars");
        std::fs::write(&vars, VARIABLES)?;
        let words: Vec<&str> = vm::tpm_words().iter().copied().chain(FILE_WORDS).collect();
        let sections = format!("[files]\nvars = '{}'\n", vars.display());
        let console = vm::start_with_sections(&pair.alpha, &["v"], FILL_BYTES, &words, &sections)?;
        console.work_on(REQUESTS)?;
        let standby = keep(pair)?;
        ensure!(standby.vms.iter().all(|vm| vm.problem.is_none()), "{:?}", standby.vms);
        console.work_on(REQUESTS)?;
        let (before, had_tpm) = (pair.beta.path("data/vms"), !vm::tpm_words().is_empty());
        ensure!(!before.join(vm::NAME).exists(), "it has a VM before it was told to");
        lose(&mut pair.alpha)?;
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", vm::NAME])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        console.forget();
        let order =
            ["standby", "promote", vm::NAME, "--force", "--source-is-off", "alpha", "--name", "moved"];
        let promoted: Standby = pair.beta.ask(&order)?;
        let known: Vm = pair.beta.ask(&["vm", "show", vm::NAME])?;
        ensure!(known.volumes == ["moved"], "{known:?}");
        ensure!(promoted.vms.iter().all(|vm| vm.problem.is_none()), "{:?}", promoted.vms);
        console.work_on(REQUESTS)?;
        let folder = pair.beta.path("data/vms").join(vm::NAME);
        ensure!(std::fs::read(folder.join("files/vars"))? == VARIABLES, "its file is not what it was");
        if had_tpm {
            let counter = console.console().tpm_counter().context("the guest tells")?;
            ensure!(counter > 1, "its TPM has forgotten everything");
        }
        // The same order again finds everything done.
        let again: Standby =
            pair.beta.ask(&["standby", "promote", vm::NAME, "--force", "--source-is-off", "alpha"])?;
        ensure!(again.vms.iter().all(|vm| vm.problem.is_none()), "{:?}", again.vms);
        pair.beta.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        Ok(())
    });
}

#[test]
fn a_vm_that_was_promoted_comes_home_by_the_images_that_its_former_host_has_given_up() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start_with(&pair.alpha, &["v"], FILL_BYTES)?;
        console.work_on(REQUESTS)?;
        keep(pair)?;
        lose(&mut pair.alpha)?;
        // Only a host that was away for so long asks.
        std::thread::sleep(std::time::Duration::from_secs(3));
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", vm::NAME])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        console.forget();
        pair.beta
            .sterna(["standby", "promote", vm::NAME, "--force", "--source-is-off", "alpha"])?
            .success()?;
        console.work_on(REQUESTS)?;
        pair.alpha.start()?;
        until("alpha knows of the promotion", || {
            Ok((shown(&pair.alpha)?.state == StandbyState::Promoted).then_some(()))
        })?;
        let there: Vm = pair.alpha.ask(&["vm", "show", vm::NAME])?;
        ensure!(there.state != VmState::Running, "{there:?}");
        let refused = pair.alpha.sterna(["volume", "yield", "v"])?;
        ensure!(refused.code == 4 && refused.stderr.contains(vm::NAME), "{refused:?}");
        pair.alpha.sterna(["vm", "remove", vm::NAME])?.success()?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        pair.beta.sterna(["standby", "reprotect", vm::NAME, "--every", "1s"])?.success()?;
        until("the standby is current, and its VM is described", || {
            let standby = shown(&pair.beta)?;
            let is_described = standby.vms.iter().any(|vm| vm.described_unix_ms.is_some());
            Ok((standby.state == StandbyState::Current && is_described).then_some(()))
        })?;
        pair.beta.sterna(["migrate", vm::NAME, "--to", "alpha:a"])?.success()?;
        console.work_on(REQUESTS)?;
        let home: Vm = pair.alpha.ask(&["vm", "show", vm::NAME])?;
        ensure!(home.state == VmState::Running, "{home:?}");
        pair.alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        Ok(())
    });
}

#[test]
fn what_would_not_start_at_the_other_host_is_said_before_it_is_needed() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        // Other hosts may not have ports of this one opened unless its administrator allows it.
        let _console = vm::add(&pair.alpha, &["v"], &["-vnc", "127.0.0.1:77"], "")?;
        let standby = keep(pair)?;
        let problem = standby.vms.iter().find_map(|vm| vm.problem.clone()).context("it was not said")?;
        ensure!(problem.contains("-vnc"), "{problem}");
        let checked = pair.alpha.sterna(["standby", "check"])?;
        ensure!(checked.code == 10 && checked.stdout.contains("would not start"), "{checked:?}");
        let health = pair.alpha.sterna(["health", "--json"])?;
        ensure!(health.stdout.contains("would not start at host beta"), "{health:?}");
        // A VM that is gone is not described any more, and its volumes are promoted without it.
        pair.alpha.sterna(["vm", "remove", vm::NAME])?.success()?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until("the VM is forgotten", || Ok(shown(&pair.beta)?.vms.is_empty().then_some(())))
    });
}

#[test]
fn a_host_that_may_bring_no_vms_brings_none_by_a_standby_either() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let _console = vm::add(&pair.alpha, &["v"], &[], "")?;
        let permit = |pair: &Pair, how| pair.beta.sterna(["host", "set", "alpha", how])?.success().map(drop);
        let is_refused = |standby: &Standby| {
            let mut problems = standby.vms.iter().filter_map(|vm| vm.problem.as_ref());
            problems.any(|problem| problem.contains("accepts no VMs of this host"))
        };
        permit(pair, "--deny-machines")?;
        let standby = keep(pair)?;
        ensure!(is_refused(&standby), "{:?}", standby.vms);
        ensure!(shown(&pair.beta)?.vms.is_empty(), "it keeps what it does not accept");
        permit(pair, "--allow-machines")?;
        // It describes everything again.
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until("the VM is described", || Ok((!shown(&pair.beta)?.vms.is_empty()).then_some(())))?;
        // What was permitted then is not any more.
        permit(pair, "--deny-machines")?;
        pair.alpha.kill()?;
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", vm::NAME])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        let promoted: Standby =
            pair.beta.ask(&["standby", "promote", vm::NAME, "--force", "--source-is-off", "alpha"])?;
        ensure!(is_refused(&promoted), "{:?}", promoted.vms);
        ensure!(pair.beta.sterna(["vm", "show", vm::NAME])?.code == 3, "it is a VM there");
        permit(pair, "--allow-machines")?;
        let promoted: Standby =
            pair.beta.ask(&["standby", "promote", vm::NAME, "--force", "--source-is-off", "alpha"])?;
        ensure!(promoted.vms.iter().all(|vm| vm.problem.is_none()), "{:?}", promoted.vms);
        pair.beta.sterna(["vm", "stop", vm::NAME, "--now"])?.success().map(drop)
    });
}

#[test]
fn a_second_instance_boots_from_a_test_and_the_first_and_its_standby_go_on() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let vars = pair.alpha.path("vars");
        std::fs::write(&vars, VARIABLES)?;
        let words: Vec<&str> = vm::tpm_words().iter().copied().chain(FILE_WORDS).collect();
        let sections = format!("[files]\nvars = '{}'\n", vars.display());
        let console = vm::start_with_sections(&pair.alpha, &["v"], FILL_BYTES, &words, &sections)?;
        console.work_on(REQUESTS)?;
        keep(pair)?;
        let booted: Standby = pair.beta.ask(&["standby", "test", vm::NAME, "--boot-check", BOOTED])?;
        let test = booted.test.context("there is a test")?;
        let check = test.boot_check.context("it was checked")?;
        ensure!(check.state == BootCheckState::Passed && check.seconds.is_some(), "{check:?}");
        ensure!(test.state == StandbyTestState::Ended && test.vms[0].name == "web1-test", "{:?}", test.vms);
        nothing_is_left(&pair.beta)?;
        // One that goes on has files and a TPM of its own, and ends with its QEMU.
        let order = ["standby", "test", vm::NAME, "--name", "try", "--boot-check", BOOTED, "--for", "1h"];
        let running: Standby = pair.beta.ask(&order)?;
        ensure!(running.test.is_some_and(|test| test.state == StandbyTestState::Running), "it has ended");
        let known: Vm = pair.beta.ask(&["vm", "show", "try"])?;
        ensure!(known.state == VmState::Running && known.volumes == ["try"], "{known:?}");
        let folder = pair.beta.path("data/vms/try");
        ensure!(std::fs::read(folder.join("files/vars"))? == VARIABLES, "its file is not what it was");
        console.work_on(REQUESTS)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        until("the VM is known again", || {
            let known: Vm = pair.beta.ask(&["vm", "show", "try"])?;
            Ok((known.state == VmState::Running).then_some(()))
        })?;
        pair.beta.sterna(["standby", "test", vm::NAME, "--end"])?.success()?;
        nothing_is_left(&pair.beta)?;
        ensure!(!folder.exists(), "its files are left");
        let order =
            ["standby", "test", vm::NAME, "--boot-check", "no such words", "--boot-check-timeout", "3s"];
        let failed = pair.beta.sterna(order)?;
        ensure!(failed.code == 10 && failed.stdout.contains("has not appeared"), "{failed:?}");
        nothing_is_left(&pair.beta)?;
        console.work_on(REQUESTS)?;
        pair.alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        Ok(())
    });
}

/// Checks that a host has no VM and no volume.
fn nothing_is_left(host: &Host) -> anyhow::Result<()> {
    let (vms, volumes): (Vec<Vm>, Vec<Volume>) = (vm::vms(host)?, host.ask(&["volume", "list"])?);
    ensure!(vms.is_empty() && volumes.is_empty(), "{vms:?} {volumes:?}");
    Ok(())
}
