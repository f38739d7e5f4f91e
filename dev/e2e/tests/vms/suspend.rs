//! Tests of VMs that are suspended to disk: their guests go on where they were, whatever is killed, full or damaged meanwhile, and
//! never with a memory that does not fit their disks.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use api::{Vm, VmState, Volume};
use e2e::file_system::FileSystem;
use e2e::vm::Work;
use e2e::{Host, play, play_with_mounts, until, vm};

const VOLUMES: [&str; 2] = ["root", "data"];
const DISK_BYTES: u64 = 16 << 20;
const WORK: Work = Work {
    fill_bytes: 4 << 20,
    workers: 4,
    memory_bytes: 8 << 20,
    swept_bytes: 0,
    pause: std::time::Duration::from_millis(3),
};
const REQUESTS: u64 = 200;
/// A disk that is large enough for the memory of the VM.
const LARGE_BYTES: u64 = 512 << 20;
/// A disk that is not.
const SMALL_BYTES: u64 = 80 << 20;
/// The number of steps that suspend a VM, and that restore one; the first of them after which a daemon finds it in the new state.
const SAVE_STEPS: (u32, u32) = (8, 7);
const RESTORE_STEPS: (u32, u32) = (6, 5);

fn make_disks(host: &Host) -> anyhow::Result<()> {
    for volume in VOLUMES {
        let order = ["volume", "create", volume, "--store", "a", "--size", &DISK_BYTES.to_string()];
        host.sterna(order)?.success()?;
    }
    Ok(())
}

fn start(host: &Host) -> anyhow::Result<vm::Vm> {
    make_disks(host)?;
    vm::start_busy(host, &VOLUMES, WORK)
}

fn suspend(host: &Host) -> anyhow::Result<Vm> {
    let suspended: Vm = host.ask(&["vm", "suspend", vm::NAME])?;
    ensure!(suspended.state == VmState::Suspended && suspended.process.is_none(), "{suspended:?}");
    ensure!(suspended.message.as_ref().is_some_and(|said| said.contains("vm start web1")), "{suspended:?}");
    Ok(suspended)
}

fn restore(host: &Host) -> anyhow::Result<()> {
    let started: Vm = host.ask(&["vm", "start", vm::NAME])?;
    ensure!(started.state == VmState::Running, "{started:?}");
    ensure!(!memory(host).exists(), "its memory could be restored a second time");
    Ok(())
}

fn memory(host: &Host) -> PathBuf {
    host.path("data/suspended/web1.memory")
}

fn state(host: &Host) -> anyhow::Result<VmState> {
    Ok(vm::vms(host)?.first().context("there is no VM")?.state)
}

/// Waits until the VM runs or is suspended after a start of the daemon.
fn settled(host: &Host) -> anyhow::Result<VmState> {
    until("the VM runs, or is suspended", || {
        let state = state(host)?;
        Ok(matches!(state, VmState::Running | VmState::Suspended).then_some(state))
    })
}

/// Checks that the guest has gone on, and was not booted again.
fn went_on(console: &vm::Vm) -> anyhow::Result<()> {
    console.work_on(REQUESTS)?;
    let record = console.console();
    let ticks = record.ticks();
    ensure!(ticks.is_sorted_by_key(|tick| tick.at_ms), "the guest was booted again: {ticks:?}");
    Ok(())
}

fn refusal(host: &Host, order: &[&str]) -> anyhow::Result<String> {
    let refused = host.sterna(order)?;
    ensure!(refused.code != 0, "it was not refused: {order:?}: {refused:?}");
    Ok(refused.stderr)
}

#[test]
fn a_guest_goes_on_where_it_was_after_its_daemon_was_restarted_and_its_disks_stay_as_they_are() {
    play(|host| {
        let console = start(host)?;
        for round in 0..2 {
            console.work_on(REQUESTS)?;
            if round == 1 {
                host.sterna(["vm", "suspend", vm::NAME, "--timeout", "600"])?.success()?;
            } else {
                suspend(host)?;
            }
            let found = std::fs::metadata(memory(host))?;
            ensure!(found.permissions().mode() & 0o777 == 0o600, "others may read its memory");
            for order in [
                ["vm", "suspend", vm::NAME].as_slice(),
                &["vm", "resume", vm::NAME],
                &["vm", "stop", vm::NAME],
                &["migrate", "root", "--to", "b"],
                &["volume", "resize", "data", "32MiB"],
            ] {
                let said = refusal(host, order)?;
                ensure!(said.contains("suspended") && said.contains("vm start web1"), "{order:?}: {said}");
            }
            let planned = host.sterna(["migrate", "root", "--to", "b", "--dry-run"])?;
            ensure!(planned.code != 0 && planned.stdout.contains("suspended"), "{planned:?}");
            if round == 0 {
                host.stop()?;
            } else {
                host.kill()?;
            }
            host.start()?;
            ensure!(settled(host)? == VmState::Suspended, "it is not suspended any more");
            // A snapshot only reads.
            let label = format!("s{round}");
            let taken: Vec<Volume> = host.ask(&["vm", "snapshot", vm::NAME, "--label", &label])?;
            ensure!(taken.len() == VOLUMES.len(), "{taken:?}");
            let said = refusal(host, &["vm", "revert", vm::NAME, &label])?;
            ensure!(said.contains("suspended"), "{said}");
            restore(host)?;
            went_on(&console)?;
        }
        console.verify()
    });
}

#[test]
fn a_paused_vm_stays_paused_and_a_tpm_comes_along() {
    play(|host| {
        make_disks(host)?;
        let second = host.path("second");
        let monitor = format!("unix:{},server=on,wait=off", second.display());
        let words = [vm::tpm_words(), &["-qmp", &monitor]].concat();
        let console = vm::start_with_words(host, &VOLUMES, WORK.fill_bytes, &words)?;
        suspend(host)?;
        restore(host)?;
        went_on(&console)?;
        // Somebody pauses it by a monitor of its own.
        let mut words = UnixStream::connect(second).context("connect to the monitor")?;
        words.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"stop\",\"id\":1}\n")?;
        let mut answers = BufReader::new(words).lines().map_while(Result::ok);
        ensure!(answers.any(|line| line.contains("\"id\": 1")), "QEMU does not answer");
        ensure!(state(host)? == VmState::Paused, "it is not paused");
        suspend(host)?;
        let started: Vm = host.ask(&["vm", "start", vm::NAME])?;
        ensure!(started.state == VmState::Paused, "{started:?}");
        host.sterna(["vm", "resume", vm::NAME])?.success()?;
        went_on(&console)?;
        console.verify()
    });
}

#[test]
fn a_daemon_killed_at_any_step_leaves_a_guest_that_runs_or_one_that_is_suspended_as_a_whole() {
    play(|host| {
        let console = start(host)?;
        let (steps, first) = SAVE_STEPS;
        for step in 1..=steps {
            host.stop()?;
            host.start_with(&[("STERNA_FAIL_POINT", &format!("before-suspend@{step}"))])?;
            until("the VM is found", || Ok((state(host)? == VmState::Running).then_some(())))?;
            // The command is interrupted by the kill.
            host.sterna(["vm", "suspend", vm::NAME])?;
            ensure!(host.wait_for_end()? == 137, "{step}: it was not killed");
            host.start()?;
            let found = settled(host)?;
            let is_suspended = found == VmState::Suspended;
            ensure!(is_suspended == (step >= first), "suspend, before step {step}: {found:?}");
            if is_suspended {
                restore(host)?;
            }
            went_on(&console).with_context(|| format!("suspend, before step {step}"))?;
            until("no memory is left", || Ok((!memory(host).exists()).then_some(())))?;
        }
        let (steps, first) = RESTORE_STEPS;
        for step in 1..=steps {
            suspend(host)?;
            host.stop()?;
            host.start_with(&[("STERNA_FAIL_POINT", &format!("before-restore@{step}"))])?;
            host.sterna(["vm", "start", vm::NAME])?;
            ensure!(host.wait_for_end()? == 137, "{step}: it was not killed");
            host.start()?;
            let found = settled(host)?;
            let is_suspended = found == VmState::Suspended;
            ensure!(is_suspended == (step < first), "restore, before step {step}: {found:?}");
            if is_suspended {
                restore(host)?;
            }
            went_on(&console).with_context(|| format!("restore, before step {step}"))?;
            until("no memory is left", || Ok((!memory(host).exists()).then_some(())))?;
        }
        console.verify()
    });
}

#[test]
fn a_memory_that_does_not_fit_is_not_restored_and_stays_until_it_is_given_up() {
    play(|host| {
        let console = start(host)?;
        suspend(host)?;
        // A flipped bit, in the middle of the memory.
        let file = File::options().read(true).write(true).open(memory(host))?;
        let (mut byte, at) = ([0], file.metadata()?.len() / 2);
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 1], at)?;
        let said = refusal(host, &["vm", "start", vm::NAME])?;
        ensure!(said.contains("not as it was written") && said.contains("--discard-memory"), "{said}");
        ensure!(state(host)? == VmState::Suspended, "it is lost");
        file.write_all_at(&byte, at)?;
        // Another machine than the one that was suspended, as after a change of QEMU.
        host.stop()?;
        let list = host.path("data/vms.json");
        let kept = std::fs::read_to_string(&list)?;
        let other = kept.replace("131064K", "131056K");
        ensure!(other != kept, "the definition has another form: {kept}");
        std::fs::write(&list, other)?;
        host.start()?;
        let said = refusal(host, &["vm", "start", vm::NAME])?;
        ensure!(said.contains("cannot load the memory") && said.contains("the file stays"), "{said}");
        ensure!(state(host)? == VmState::Suspended, "it is lost");
        host.stop()?;
        std::fs::write(&list, kept)?;
        host.start()?;
        restore(host)?;
        went_on(&console)?;
        suspend(host)?;
        // Somebody writes to a disk, even if it is what was there.
        let image = File::options().read(true).write(true).open(host.path("a/root.img"))?;
        image.read_exact_at(&mut byte, 0)?;
        image.write_all_at(&byte, 0)?;
        let said = refusal(host, &["vm", "start", vm::NAME])?;
        ensure!(said.contains("disk root was written since"), "{said}");
        let stopped: Vm = host.ask(&["vm", "stop", vm::NAME, "--now"])?;
        ensure!(stopped.state == VmState::Stopped && !memory(host).exists(), "{stopped:?}");
        ensure!(stopped.message.is_some_and(|said| said.contains("power cut")), "nothing says what was lost");
        host.sterna(["vm", "start", vm::NAME])?.success()?;
        until("it runs", || Ok((state(host)? == VmState::Running).then_some(())))?;
        suspend(host)?;
        host.sterna(["vm", "start", vm::NAME, "--discard-memory"])?.success()?;
        ensure!(!memory(host).exists(), "its memory is left");
        suspend(host)?;
        host.sterna(["vm", "remove", vm::NAME])?.success()?;
        ensure!(!memory(host).exists() && vm::vms(host)?.is_empty(), "something of it is left");
        console.end();
        Ok(())
    });
}

#[test]
fn a_disk_that_is_full_or_fails_ends_the_order_and_the_guest_goes_on() {
    play_with_mounts(|host| {
        let folder = host.path("suspended");
        std::fs::create_dir(&folder)?;
        let (disk, faults) = FileSystem::on_faulty_disk(&folder, LARGE_BYTES)?;
        host.keep(disk)?;
        // Tests have settings in this section.
        let configuration = host.path("sterna.toml");
        let settings = std::fs::read_to_string(&configuration)?;
        let section = format!("[machines]\nsuspended = '{}'\n", folder.display());
        ensure!(settings.contains("[machines]\n"), "the section is somewhere else: {settings}");
        std::fs::write(&configuration, settings.replacen("[machines]\n", &section, 1))?;
        host.start()?;
        let console = start(host)?;
        faults.fail_writes()?;
        let said = refusal(host, &["vm", "suspend", vm::NAME])?;
        ensure!(said.contains("goes on") && said.contains("web1.memory"), "{said}");
        until("it runs", || Ok((state(host)? == VmState::Running).then_some(())))?;
        went_on(&console)?;
        faults.recover()?;
        until("the disk takes writes again", || {
            Ok((host.sterna(["vm", "suspend", vm::NAME])?.code == 0).then_some(()))
        })?;
        ensure!(folder.join("web1.memory").exists() && !memory(host).exists(), "it is in another folder");
        host.sterna(["vm", "start", vm::NAME])?.success()?;
        went_on(&console)?;
        // What is left of the disk is not enough.
        let filler = File::create(folder.join("filler"))?;
        rustix::fs::fallocate(
            &filler,
            rustix::fs::FallocateFlags::empty(),
            0,
            LARGE_BYTES - SMALL_BYTES * 2,
        )?;
        let said = refusal(host, &["vm", "suspend", vm::NAME])?;
        ensure!(said.contains("MiB are free") && said.contains("machines.suspended"), "{said}");
        went_on(&console)?;
        console.verify()
    });
}
