//! What befalls a VM that moves at its target's store and in the hypervisors: stores that fail, hang and fill up, QEMUs
//! that are killed or hang. It works on, knows what it wrote, and is at one host in the end.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState, Phase, VmState};
use e2e::file_system::FileSystem;
use e2e::{Host, Pair, play_pair, play_pair_with_data_disks, play_pair_with_mounts, until, vm};
use rustix::process::{Pid, Signal, kill_process};

const DISK_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Room for the disk, if nobody takes it.
const STORE_BYTES: u64 = 32 << 20;
/// What the guest does after each mishap.
const REQUESTS: u64 = 50;
/// So slow that the disk is copied for some seconds.
const SLOWLY: &str = "2MiB/s";

/// Room for a data folder.
const DATA_BYTES: u64 = 8 << 20;
/// Why the disks of a VM were not handed over, if their target fails.
const ANSWERED_WITH_AN_ERROR: &str = "the target's store answered with an error";
/// How long a disk hangs once a VM's memory is copied: longer than that takes.
const HANGS: Duration = Duration::from_secs(4);
/// The least of it for which the VM stands still.
const STANDS_MS: f64 = 1000.0;

fn start(pair: &Pair) -> anyhow::Result<vm::Vm> {
    pair.alpha.create_volume(DISK_BYTES)?;
    vm::start(&pair.alpha, FILL_BYTES)
}

/// Orders the VM to move, once the store takes an image: what was deleted there has its room until the last who has it open lets go of
/// it, and the file system has noted that; and of a disk that works again it believes that only when it has written again what failed.
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

/// Begins to move the VM; when it is in `phase`, and something of its disk is at the target, that is told.
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

/// The migration comes to nothing, says why, and the VM works at alpha.
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

/// Nothing is left there: no VM, and no image.
fn is_empty(host: &Host) -> anyhow::Result<()> {
    let there = || anyhow::Ok((vm::vms(host)?, host.images("a")?, host.images("b")?));
    let waited = until("nothing is left at the target", || {
        let (vms, a, b) = there()?;
        Ok((vms.is_empty() && a.is_empty() && b.is_empty()).then_some(()))
    });
    waited.with_context(|| format!("what is there: {:?}", there()))
}

/// Deletes from a store, as somebody would who has read it, what the migration says is left over there because it could not be deleted.
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

/// Takes all the room that is left in a folder.
fn fill(folder: &Path) -> anyhow::Result<PathBuf> {
    // Not what a store would take for an image.
    let path = folder.join(".filler");
    let mut file = File::create(&path).context("make a file")?;
    let piece = vec![1; 64 << 10];
    // What has no place on the disk yet takes more room than it needs then.
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
            // Its memory takes longer than it takes to see that the store has failed.
            let begun = begin_with(pair, "beta:b", phase, &["--bandwidth", SLOWLY])?;
            faults.fail_writes()?;
            let ended = stayed(pair, &console, &begun).with_context(|| format!("EIO: {phase:?}"))?;
            // A VM that was stopped first stands still no longer than it may.
            let is_faulty = ended.failure.as_deref() == Some("target-faulty");
            let tells_it = ended.message.as_ref().is_some_and(|said| said.contains(ANSWERED_WITH_AN_ERROR));
            ensure!(is_faulty || phase == Phase::Memory && tells_it, "{ended:?}");
            faults.recover()?;
            delete_left_over(&pair.beta, "b", &ended)?;
            is_empty(&pair.beta)?;
        }
        // Once its disk is copied it needs no more room there.
        let begun = begin(pair, "beta:a", Phase::Copying)?;
        let filler = fill(&pair.beta.path("a"))?;
        let ended = stayed(pair, &console, &begun).context("full")?;
        ensure!(ended.failure.as_deref() == Some("target-full"), "{ended:?}");
        is_empty(&pair.beta)?;
        // It is full before it begins, too.
        let refused = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("are needed"), "{refused:?}");
        std::fs::remove_file(filler)?;
        // One that hangs keeps QEMU there from starting, or the disk from being handed over: whichever comes first.
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
            // The one where it stays, and then the one where it comes: whoever pauses it needs room.
            let noting = if moves { &pair.beta } else { &pair.alpha };
            ensure!(noting.fill_data()?, "it has a disk of its own");
            if !moves {
                pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
            }
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!((ended.state == MigrationState::Moved) == moves, "{ended:?}");
            // At the target a note may find the room that one before it has left.
            if !moves {
                until("it cannot be noted where it is", || {
                    Ok(noting.log()?.contains("could not be noted").then_some(()))
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
        // A guest that waits for its disk writes no memory: it is stopped soon, and QEMU waits for what is under way. Nothing
        // tells of that meanwhile.
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
fn a_hypervisor_that_hangs_or_is_killed_leaves_one_machine_at_one_host() {
    play_pair(|pair| {
        let console = start(pair)?;
        // Either of them hangs: whoever waits can end it.
        for hangs_at_alpha in [false, true] {
            let begun = begin(pair, "beta:a", Phase::Memory)?;
            let hung = process(if hangs_at_alpha { &pair.alpha } else { &pair.beta })?;
            send(hung, Signal::STOP)?;
            pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
            // The one at the target has been killed.
            let goes_on = send(hung, Signal::CONT);
            ensure!(goes_on.is_ok() || !hangs_at_alpha, "{goes_on:?}");
            stayed(pair, &console, &begun).with_context(|| format!("at alpha: {hangs_at_alpha}"))?;
            is_empty(&pair.beta)?;
        }
        // That of the target is killed around the switch-over: the VM is where its volume is.
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        let killed = process(&pair.beta)?;
        until("the VM stands still, or has moved", || {
            Ok((pair.alpha.migration(&begun.id)?.phase != Phase::Memory).then_some(()))
        })?;
        send(killed, Signal::KILL)?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        if ended.state == MigrationState::Moved {
            // It crashed there, as any machine may, and is started there again.
            until("that it is gone is seen", || Ok(restart(&pair.beta)?.then_some(())))?;
            return until("there is one", || Ok(vm::vms(&pair.alpha)?.is_empty().then_some(())));
        }
        stayed(pair, &console, &begun)?;
        is_empty(&pair.beta)?;
        // That of the source is killed while its memory is on its way: it is gone, and its disk is where it was.
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        send(process(&pair.alpha)?, Signal::KILL)?;
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

fn process(scene: &Host) -> anyhow::Result<Pid> {
    let process = until("the VM's QEMU is there", || Ok(vm::vms(scene)?.first().and_then(|vm| vm.process)))?;
    Pid::from_raw(i32::try_from(process)?).context("a process without a number")
}

fn send(process: Pid, signal: Signal) -> anyhow::Result<()> {
    kill_process(process, signal).context("send a signal")
}

/// Starts a VM again that has crashed; false: that is not known yet.
fn restart(scene: &Host) -> anyhow::Result<bool> {
    Ok(scene.sterna(["vm", "start", vm::NAME])?.code == 0)
}

#[test]
fn a_machine_whose_host_went_down_while_its_memory_was_copied_is_started_again_there() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        // All of it: the guest that is started again fills it anew.
        let console = vm::start(&pair.alpha, DISK_BYTES)?;
        let begun = begin(pair, "beta:a", Phase::Memory)?;
        let qemu = process(&pair.alpha)?;
        pair.alpha.kill()?;
        send(qemu, Signal::KILL)?;
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
