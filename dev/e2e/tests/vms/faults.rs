//! Tests of a moving VM with faults: stores of its target that fail, hang and fill up, and QEMUs that are killed or hang. The VM
//! keeps working, knows its writes, and is at one host at the end.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState, Phase, VmState};
use e2e::file_system::FileSystem;
use e2e::{Host, Pair, play_pair, play_pair_with_data_disks, play_pair_with_mounts, until, vm};
use rustix::process::Signal;

const DISK_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Size of a store with enough space for the disk.
const STORE_BYTES: u64 = 32 << 20;
/// Requests of the guest after each fault.
const REQUESTS: u64 = 50;
/// A rate at which the disk is copied for some seconds.
const SLOWLY: &str = "2MiB/s";

/// Size of a disk for a data folder.
const DATA_BYTES: u64 = 8 << 20;
/// Failure codes of a VM's move if its target store fails.
const ANSWERED_WITH_AN_ERROR: &str = "the target's store answered with an error";
/// Time for which a disk hangs after the VM's memory is copied, longer than the rest of the move.
const HANGS: Duration = Duration::from_secs(4);
/// Least part of this time in which the VM is paused.
const STANDS_MS: f64 = 1000.0;

fn start(pair: &Pair) -> anyhow::Result<vm::Vm> {
    pair.alpha.create_volume(DISK_BYTES)?;
    vm::start(&pair.alpha, FILL_BYTES)
}

/// Moves the VM once the store can take an image. A deleted file keeps its space until its last user closes it, and the file
/// system has recorded that. After a fault of the disk, the file system first repeats its failed writes.
fn order(pair: &Pair, to: &str, more: &[&str]) -> anyhow::Result<Migration> {
    let is_temporary = |refused: &anyhow::Error| {
        let said = format!("{refused:#}");
        said.contains("are needed") || said.contains("Input/output error")
    };
    until("the store takes an image", || {
        match pair.alpha.ask(&[&["migrate", vm::NAME, "--to", to], more].concat()) {
            Err(refused) if is_temporary(&refused) => Ok(None),
            ordered => ordered.map(Some),
        }
    })
}

/// Begins to move the VM, and returns once it is in `phase`, with a part of its disk at the target.
fn begin(pair: &Pair, to: &str, phase: Phase) -> anyhow::Result<Migration> {
    let slowly: &[&str] = if phase == Phase::Copying { &["--bandwidth", SLOWLY] } else { &[] };
    begin_with(pair, to, phase, slowly)
}

fn begin_with(pair: &Pair, to: &str, phase: Phase, more: &[&str]) -> anyhow::Result<Migration> {
    let begun = order(pair, to, &[&["--detach"], more].concat())?;
    until("it is that far", || {
        let shown = pair.alpha.migration(&begun.id)?;
        ensure!(!shown.state.has_ended(), "it ended before: {shown:?}");
        Ok((shown.phase == phase && shown.bytes_copied > 0).then_some(()))
    })?;
    Ok(begun)
}

/// Checks that the migration fails with a reason, and that the VM works at alpha.
fn stayed(pair: &Pair, console: &vm::Vm, begun: &Migration) -> anyhow::Result<Migration> {
    let ended = pair.alpha.wait_for_migration(&begun.id)?;
    ensure!(ended.state != MigrationState::Moved && ended.guest == GuestLocation::Source, "{ended:?}");
    ensure!(ended.state == MigrationState::Cancelled || ended.message.is_some(), "{ended:?}");
    until("it runs where it was", || {
        let runs = matches!(vm::vms(&pair.alpha)?.as_slice(), [vm] if vm.state == VmState::Running);
        Ok(runs.then_some(()))
    })?;
    console.work_on(REQUESTS).with_context(|| pair.alpha.standstill())?;
    Ok(ended)
}

/// Checks that neither the VM nor an image is left at beta.
fn is_empty(host: &Host) -> anyhow::Result<()> {
    let there = || anyhow::Ok((vm::vms(host)?, host.images("a")?, host.images("b")?));
    let waited = until("nothing is left at the target", || {
        let (vms, a, b) = there()?;
        Ok((vms.is_empty() && a.is_empty() && b.is_empty()).then_some(()))
    });
    waited.with_context(|| format!("what is there: {:?}", there()))
}

/// Deletes the file that the migration could not delete and has named, as an administrator would.
fn delete_left_over(host: &Host, store: &str, ended: &Migration) -> anyhow::Result<()> {
    if !ended.message.as_deref().is_some_and(|said| said.contains("left over: cannot delete")) {
        return Ok(());
    }
    until("what is left over can be deleted", || {
        let names = host.images(store)?;
        let deleted = names.iter().all(|name| std::fs::remove_file(host.path(store).join(name)).is_ok());
        Ok(deleted.then_some(()))
    })
}

/// Fills the remaining space of a folder's disk.
fn fill(folder: &Path) -> anyhow::Result<PathBuf> {
    // The name is not that of an image.
    let path = folder.join(".filler");
    let mut file = File::create(&path).context("make a file")?;
    let piece = vec![1; 64 << 10];
    // Delayed allocation reserves more space than it finally needs.
    for _ in 0..3 {
        while file.write_all(&piece).is_ok() {}
        let _ = file.sync_data();
    }
    Ok(path)
}

#[test]
fn a_store_at_the_target_that_fails_hangs_or_fills_up_costs_the_move_and_not_the_machine() {
    play_pair_with_mounts(|pair| {
        pair.beta.stop()?;
        let small = FileSystem::plain(&pair.beta.path("a"), STORE_BYTES)?;
        pair.beta.keep(small)?;
        let (faulty, faults) = FileSystem::on_faulty_disk(&pair.beta.path("b"), STORE_BYTES)?;
        pair.beta.keep(faulty)?;
        pair.beta.start()?;
        let console = start(pair)?;
        for phase in [Phase::Copying, Phase::Memory] {
            // The copying of its memory takes longer than noticing the failed store.
            let begun = begin_with(pair, "beta:b", phase, &["--bandwidth", SLOWLY])?;
            faults.fail_writes()?;
            let ended = stayed(pair, &console, &begun).with_context(|| format!("EIO: {phase:?}"))?;
            // A paused VM resumes within its downtime limit.
            let is_faulty = ended.failure.as_deref() == Some("target-faulty");
            let tells_it = ended.message.as_ref().is_some_and(|said| said.contains(ANSWERED_WITH_AN_ERROR));
            ensure!(is_faulty || phase == Phase::Memory && tells_it, "{ended:?}");
            faults.recover()?;
            delete_left_over(&pair.beta, "b", &ended)?;
            is_empty(&pair.beta)?;
        }
        // A copied disk needs no more space there.
        let begun = begin(pair, "beta:a", Phase::Copying)?;
        let filler = fill(&pair.beta.path("a"))?;
        let ended = stayed(pair, &console, &begun).context("full")?;
        ensure!(ended.failure.as_deref() == Some("target-full"), "{ended:?}");
        is_empty(&pair.beta)?;
        // The store is also full before the beginning.
        let refused = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("are needed"), "{refused:?}");
        std::fs::remove_file(filler)?;
        // A hanging store prevents the start of QEMU or the handover of the disk, whichever comes first.
        let begun = begin(pair, "beta:b", Phase::Memory)?;
        let hung = faults.hang()?;
        let ended = stayed(pair, &console, &begun).context("hung")?;
        drop(hung);
        let failure = ended.failure.as_deref();
        ensure!(matches!(failure, Some("handover-refused" | "machine-stayed")), "{ended:?}");
        is_empty(&pair.beta)?;
        let moved = order(pair, "beta:b", &[])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.verify()
    });
}

#[test]
fn a_data_folder_that_is_full_when_a_move_ends_costs_the_machine_nothing_once_it_has_room() {
    play_pair_with_data_disks(DATA_BYTES, |pair| {
        let console = start(pair)?;
        for moves in [false, true] {
            let begun = begin(pair, "beta:a", Phase::Memory)?;
            // First the source's and then the target's data folder is full. The host that pauses the VM needs space.
            let noting = if moves { &pair.beta } else { &pair.alpha };
            ensure!(noting.fill_data()?, "it has a disk of its own");
            if !moves {
                pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
            }
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!((ended.state == MigrationState::Moved) == moves, "{ended:?}");
            // The target may write a record into the space of an earlier one.
            if !moves {
                until("it cannot be noted where it is", || {
                    Ok(noting.log()?.contains("cannot record at which host the VM is").then_some(()))
                })?;
            }
            noting.free_data()?;
            console.work_on(REQUESTS)?;
            let (owner, other) = if moves { (&pair.beta, &pair.alpha) } else { (&pair.alpha, &pair.beta) };
            until("it is at home at one host", || Ok(vm::check_at(owner, other).is_ok().then_some(())))?;
        }
        let home = until("the next move is taken", || {
            Ok(pair.beta.ask::<Migration>(&["migrate", vm::NAME, "--to", "alpha:a"]).ok())
        })?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        vm::check_at(&pair.alpha, &pair.beta)?;
        console.verify()
    });
}

#[test]
fn a_machine_whose_disk_alone_is_elsewhere_works_on_after_a_restart_of_its_own_host() {
    play_pair(|pair| {
        let console = start(pair)?;
        let moved: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        pair.beta.check_place("a")?;
        console.work_on(REQUESTS)?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        console.work_on(REQUESTS).context("its host was killed")?;
        pair.alpha.stop()?;
        pair.alpha.start()?;
        console.work_on(REQUESTS).context("its host was stopped")?;
        let home: Migration = pair.beta.ask(&["migrate", "v", "--to", "alpha:a"])?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_stands_still_from_when_its_processors_stop_and_not_only_once_its_disks_have_answered() {
    play_pair_with_mounts(|pair| {
        pair.alpha.stop()?;
        let (faulty, faults) = FileSystem::on_faulty_disk(&pair.alpha.path("a"), STORE_BYTES)?;
        pair.alpha.keep(faulty)?;
        pair.alpha.start()?;
        let console = start(pair)?;
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        let hung = faults.hang()?;
        // A guest that waits for its disk writes no memory, so it is paused soon. QEMU then waits for its requests,
        // and nothing reports that meanwhile.
        std::thread::sleep(HANGS);
        drop(hung);
        let moved = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        let downtime = moved.machine.and_then(|machine| machine.downtime).context("it stood still")?;
        ensure!(downtime.total_ms >= STANDS_MS, "{downtime:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.verify()
    });
}

#[test]
fn a_target_that_is_started_again_while_the_disk_is_copied_ends_the_move_before_the_copy() {
    play_pair(|pair| {
        let console = start(pair)?;
        // At this rate the copy takes longer than any test waits.
        let begun = begin_with(pair, "beta:a", Phase::Copying, &["--bandwidth", "1KiB/s"])?;
        pair.beta.kill()?;
        pair.beta.start()?;
        let ended = stayed(pair, &console, &begun)?;
        ensure!(ended.failure.as_deref() == Some("machine-stayed"), "{ended:?}");
        let said = ended.message.unwrap_or_default();
        let retry = format!("sterna migration retry {}", begun.id);
        ensure!(
            said.contains("the daemon of the other host was started again") && said.contains(&retry),
            "{said}"
        );
        is_empty(&pair.beta)?;
        // The host that was restarted says so itself, and which order at the other host repeats the move.
        let arrivals: Vec<Migration> = pair.beta.ask(&["migration", "list"])?;
        let said = arrivals.first().and_then(|ended| ended.message.clone()).unwrap_or_default();
        ensure!(said.contains("this host's daemon was restarted") && said.contains(&retry), "{arrivals:?}");
        drop(console);
        Ok(())
    });
}

#[test]
fn a_hypervisor_that_hangs_or_is_killed_leaves_one_machine_at_one_host() {
    play_pair(|pair| {
        let console = start(pair)?;
        // Either QEMU hangs, and the migration can be cancelled.
        for hangs_at_alpha in [false, true] {
            let begun = begin(pair, "beta:a", Phase::Memory)?;
            let hung = vm::process(if hangs_at_alpha { &pair.alpha } else { &pair.beta })?;
            testbed::signal(hung, Signal::STOP)?;
            pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
            // The QEMU at the target was killed.
            let goes_on = testbed::signal(hung, Signal::CONT);
            ensure!(goes_on.is_ok() || !hangs_at_alpha, "{goes_on:?}");
            stayed(pair, &console, &begun).with_context(|| format!("at alpha: {hangs_at_alpha}"))?;
            is_empty(&pair.beta)?;
        }
        // The target's QEMU is killed around the switch-over. The VM is at its volume's host.
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        let killed = vm::process(&pair.beta)?;
        until("the VM stands still, or has moved", || {
            Ok((pair.alpha.migration(&begun.id)?.phase != Phase::Memory).then_some(()))
        })?;
        testbed::signal(killed, Signal::KILL)?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        if ended.state == MigrationState::Moved {
            // It has crashed there, and is started there again.
            until("that it is gone is seen", || Ok(restart(&pair.beta)?.then_some(())))?;
            return until("there is one", || Ok(vm::vms(&pair.alpha)?.is_empty().then_some(())));
        }
        stayed(pair, &console, &begun)?;
        is_empty(&pair.beta)?;
        // The source's QEMU is killed while its memory is in flight. The memory is lost, and the disk is where it was.
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        testbed::signal(vm::process(&pair.alpha)?, Signal::KILL)?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.failure.as_deref() == Some("machine-stayed"), "{ended:?}");
        let says_so = ended.message.as_ref().is_some_and(|said| said.contains("its QEMU has ended"));
        ensure!(ended.guest == GuestLocation::Source && says_so, "{ended:?}");
        until("it can be started again", || Ok(restart(&pair.alpha)?.then_some(())))?;
        until("beta has nothing of it", || Ok(vm::vms(&pair.beta)?.is_empty().then_some(())))?;
        is_empty(&pair.beta)?;
        drop(console);
        Ok(())
    });
}

/// Starts a crashed VM again; false if the crash is not yet known.
fn restart(scene: &Host) -> anyhow::Result<bool> {
    Ok(scene.sterna(["vm", "start", vm::NAME])?.code == 0)
}

#[test]
fn a_machine_whose_host_went_down_while_its_memory_was_copied_is_started_again_there() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        // The whole disk is filled, because a restarted guest fills it anew.
        let console = vm::start(&pair.alpha, DISK_BYTES)?;
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        let qemu = vm::process(&pair.alpha)?;
        pair.alpha.kill()?;
        testbed::signal(qemu, Signal::KILL)?;
        pair.alpha.start()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Failed && ended.guest == GuestLocation::Source, "{ended:?}");
        ensure!(ended.message.as_deref().is_some_and(|said| said.contains("sterna vm start")), "{ended:?}");
        until("the target has let go", || Ok(vm::vms(&pair.beta)?.is_empty().then_some(())))?;
        is_empty(&pair.beta)?;
        console.forget();
        pair.alpha.sterna(["vm", "start", vm::NAME])?.success()?;
        console.work_on(REQUESTS)?;
        let moved: Migration = pair.alpha.ask(&["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(REQUESTS)
    });
}
