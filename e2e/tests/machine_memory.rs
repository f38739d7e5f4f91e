//! Which way a machine's memory goes: over several streams, and behind the machine (post-copy), with bad luck on the way. The
//! guest works on its disk and its memory all the while, and knows what it wrote.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use api::{MemoryMove, Migration, MigrationState, VmState};
use e2e::vm::{self, Work};
use e2e::{Pair, Scene, WireState, until};

const DISK_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// What the guest does before, between and after moves.
const REQUESTS: u64 = 200;
/// It is written anew many times while a slow link carries it once.
const SWEPT_BYTES: u64 = 24 << 20;

/// One test at a time: two processors emulate one machine's well enough, and not several machines'.
fn play(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    e2e::play_pair(test);
}

fn start(pair: &Pair, fill_bytes: u64, memory_bytes: u64, swept_bytes: u64) -> anyhow::Result<vm::Console> {
    pair.alpha.create_volume(DISK_BYTES)?;
    vm::Console::start_busy(&pair.alpha, &["v"], Work { fill_bytes, memory_bytes, swept_bytes })
}

fn memory(scene: &Scene, id: &str) -> anyhow::Result<Option<MemoryMove>> {
    Ok(scene.migration(id)?.machine.and_then(|machine| machine.memory))
}

/// Whether the kernel lets QEMU run a machine before all of its memory is there.
fn may_run_ahead() -> bool {
    let everybody = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let may = everybody.trim() == "1" || rustix::process::geteuid().is_root();
    if !may {
        omission::machine_lacks("userfaultfd for QEMU");
    }
    may
}

/// A host, and what it is called with its store.
type End<'a> = (&'a Scene, &'a str);

/// Begins to move a machine that writes faster than the link carries, and waits until it runs there without all of its memory.
fn run_ahead(pair: &Pair, (from, home): End<'_>, (to, there): End<'_>) -> anyhow::Result<Migration> {
    // On a busy host the rest may have come before anybody has looked: then once more.
    for _ in 0..5 {
        pair.wire.set(WireState::Slow);
        let begun: Migration =
            from.ask(&["migrate", vm::NAME, "--to", there, "--memory", "post-copy", "--detach"])?;
        let is_ahead = until("it runs at the target, and its memory follows", || {
            let shown = from.migration(&begun.id)?;
            let memory = shown.machine.and_then(|machine| machine.memory);
            let is_ahead =
                shown.phase == api::Phase::Retiring && memory.is_some_and(|memory| memory.post_copy);
            Ok((is_ahead || shown.state.has_ended()).then_some(is_ahead))
        })?;
        if is_ahead {
            return Ok(begun);
        }
        pair.wire.set(WireState::Whole);
        vm::check_at(to, from)?;
        let back: Migration = to.ask(&["migrate", vm::NAME, "--to", home])?;
        ensure!(back.state == MigrationState::Moved, "{back:?}");
        vm::check_at(from, to)?;
    }
    bail!("its memory was there every time before anybody had looked")
}

#[test]
fn memory_goes_over_several_streams_there_and_home() {
    play(|pair| {
        let console = start(pair, FILL_BYTES, 24 << 20, 0)?;
        let ways = [(&pair.alpha, &pair.beta, "beta:a", "4"), (&pair.beta, &pair.alpha, "alpha:a", "2")];
        for (from, to, name, streams) in ways {
            console.work_on(REQUESTS)?;
            let moved: Migration =
                from.ask(&["migrate", vm::NAME, "--to", name, "--memory-streams", streams])?;
            ensure!(moved.state == MigrationState::Moved, "{moved:?}");
            let memory = memory(from, &moved.id)?.context("its memory went along")?;
            ensure!(memory.streams.to_string() == streams, "{memory:?}");
            vm::check_at(to, from)?;
        }
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn memory_follows_the_machine_over_a_link_that_is_cut() {
    if !may_run_ahead() {
        return;
    }
    play(|pair| {
        let console = start(pair, FILL_BYTES, 4 << 20, SWEPT_BYTES)?;
        // The link is away for a while: the machine waits for what it misses, and has all of it in the end.
        let begun = run_ahead(pair, (&pair.alpha, "alpha:a"), (&pair.beta, "beta:a"))?;
        pair.wire.set(WireState::Cut);
        pair.wire.set(WireState::Whole);
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved && ended.message.is_none(), "{ended:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_that_is_lost_before_its_memory_came_says_so_and_starts_again_on_whole_disks() {
    if !may_run_ahead() {
        return;
    }
    play(|pair| {
        // All of it: the guest that is started again fills it anew.
        let console = start(pair, DISK_BYTES, 4 << 20, SWEPT_BYTES)?;
        let begun = run_ahead(pair, (&pair.alpha, "alpha:a"), (&pair.beta, "beta:a"))?;
        // Nothing more comes until it is gone.
        pair.wire.set(WireState::BlackHole);
        let process = until("QEMU is there", || Ok(vm::vms(&pair.beta)?.first().and_then(|vm| vm.process)))?;
        vm::kill(process);
        pair.wire.set(WireState::Slow);
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        let message = ended.message.clone().unwrap_or_default();
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let lost = until("its end is known where its disks are", || {
            let found = vm::vms(&pair.beta)?;
            let crashed = found.into_iter().find(|vm| vm.state == VmState::Crashed);
            Ok(crashed.and_then(|vm| vm.message).filter(|message| message.contains("its memory is lost")))
        })?;
        ensure!(lost.contains("sterna vm start web1"), "{lost}");
        until("nothing of it is left at the source", || Ok(vm::vms(&pair.alpha)?.is_empty().then_some(())))?;
        until("the migration says so, too", || {
            let said = pair.alpha.migration(&begun.id)?.message.unwrap_or_default();
            Ok(said.contains("memory was lost").then_some(()))
        })
        .with_context(|| message.clone())?;
        pair.wire.set(WireState::Whole);
        console.forget();
        pair.beta.sterna(["vm", "start", vm::NAME])?.success()?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}
