//! Tests of a VM's memory over several streams, and by post-copy, with faults. The guest checks its disk and
//! its memory all the time.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use api::{MemoryMove, Migration, MigrationPlan, MigrationState, VmState};
use e2e::vm::{self, Work};
use e2e::{Host, LinkState, Pair, play_pair, until};

const DISK_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;
/// Bytes of memory that the guest rewrites many times while a slow link carries them once.
const SWEPT_BYTES: u64 = 24 << 20;

fn start(pair: &Pair, fill_bytes: u64, memory_bytes: u64, swept_bytes: u64) -> anyhow::Result<vm::Vm> {
    pair.alpha.create_volume(DISK_BYTES)?;
    vm::start_busy(&pair.alpha, &["v"], Work { memory_bytes, swept_bytes, ..Work::on_disk(fill_bytes) })
}

fn memory(scene: &Host, id: &str) -> anyhow::Result<Option<MemoryMove>> {
    Ok(scene.migration(id)?.machine.and_then(|machine| machine.memory))
}

/// Returns whether the kernel allows post-copy for QEMU.
fn may_run_ahead() -> bool {
    let everybody = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let may = everybody.trim() == "1" || rustix::process::geteuid().is_root();
    if !may {
        omission::machine_lacks("userfaultfd for QEMU");
    }
    may
}

/// A host, with its name and its store.
type End<'a> = (&'a Host, &'a str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Daemon {
    Source,
    Target,
}

/// Remaining bytes with which a source has hardly ever finished before a test breaks the stream.
const MUCH_BYTES: u64 = 8 << 20;

/// Begins to move a VM that writes faster than the link, and waits until it runs at the target without much of its memory.
fn run_ahead(pair: &Pair, (from, home): End<'_>, (to, there): End<'_>) -> anyhow::Result<Migration> {
    // On a busy host the rest may have arrived before the check, or the move may have failed. Then it is repeated.
    for _ in 0..5 {
        pair.link.set(LinkState::Slow);
        let begun: Migration =
            from.ask(&["migrate", vm::NAME, "--to", there, "--memory", "post-copy", "--detach"])?;
        let is_ahead = until("it runs at the target, and its memory follows", || {
            let shown = from.migration(&begun.id)?;
            let memory = shown.machine.and_then(|machine| machine.memory);
            let lacks_much =
                memory.is_some_and(|memory| memory.post_copy && memory.remaining_bytes >= MUCH_BYTES);
            let is_ahead = shown.phase == api::Phase::Retiring && lacks_much;
            Ok((is_ahead || shown.state.has_ended()).then_some(is_ahead))
        })?;
        if is_ahead {
            return Ok(begun);
        }
        pair.link.set(LinkState::Up);
        if from.migration(&begun.id)?.state != MigrationState::Moved {
            vm::check_at(from, to)?;
            continue;
        }
        vm::check_at(to, from)?;
        let back: Migration = to.ask(&["migrate", vm::NAME, "--to", home])?;
        ensure!(back.state == MigrationState::Moved, "{back:?}");
        vm::check_at(from, to)?;
    }
    bail!("its memory was there every time before anybody had looked")
}

/// The outcome for a VM whose volumes are at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Runs,
    Lost,
}

/// Waits for the end of a migration whose volumes the target owns. If the VM's memory was lost, both hosts must report that, and
/// it is started again.
fn ends(source: &Host, target: &Host, console: &vm::Vm, begun: &Migration) -> anyhow::Result<Fate> {
    let ended = source.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    until("nothing of it is left at the source", || Ok(vm::vms(source)?.is_empty().then_some(())))?;
    // That is known when the migration ends, and reported a moment later.
    let log = source.log()?;
    let after = log.rsplit("migration begun").next().unwrap_or_default();
    let fate = if after.contains("that has moved is lost") { Fate::Lost } else { Fate::Runs };
    if fate == Fate::Lost {
        let lost = until("its end is known where its disks are", || {
            let crashed = vm::vms(target)?.into_iter().find(|vm| vm.state == VmState::Crashed);
            Ok(crashed.and_then(|vm| vm.message).filter(|message| message.contains("its memory is lost")))
        })?;
        ensure!(lost.contains("sterna vm start web1"), "{lost}");
        until("the migration says so, too", || {
            let said = source.migration(&begun.id)?.message.unwrap_or_default();
            Ok(said.contains("memory was lost").then_some(()))
        })?;
        console.forget();
        target.sterna(["vm", "start", vm::NAME])?.success()?;
    }
    vm::check_at(target, source).with_context(|| format!("{fate:?}"))?;
    console.work_on(REQUESTS).with_context(|| format!("{fate:?}"))?;
    Ok(fate)
}

#[test]
fn memory_goes_over_several_streams_there_and_home() {
    play_pair(|pair| {
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
fn a_limit_binds_the_memory_and_the_disks_of_a_machine_together() {
    play_pair(|pair| {
        // Memory that is written faster than the limit would never be sent.
        let console = start(pair, FILL_BYTES, 0, 0)?;
        let ways = [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")];
        for (from, to, name) in ways {
            console.work_on(REQUESTS)?;
            let (mut began, mut before) = (Instant::now(), pair.link.carried_bytes());
            // On a slow machine the VM may stand still for too long at such a rate: then it stays, and it is tried again.
            until("the machine has moved", || {
                (began, before) = (Instant::now(), pair.link.carried_bytes());
                let order = ["migrate", vm::NAME, "--to", name, "--bandwidth", "8MiB/s", "--json"];
                let moved: Migration = from.sterna(order)?.json()?;
                let is_late = moved.failure.as_deref() == Some("handover-refused");
                ensure!(moved.state == MigrationState::Moved || is_late, "{moved:?}");
                Ok((moved.state == MigrationState::Moved).then_some(()))
            })?;
            let (took, carried) = (began.elapsed(), pair.link.carried_bytes() - before);
            ensure!(carried >= MUCH_BYTES, "{carried} bytes prove nothing");
            // The whole link carries many times that. The guest's writes, and what goes while it stands still, have no limit.
            let rate = carried as f64 / took.as_secs_f64();
            ensure!(rate < 1.5 * f64::from(8 << 20), "{carried} bytes in {took:?}");
            vm::check_at(to, from)?;
        }
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_host_whose_hypervisor_may_not_run_a_machine_ahead_says_so_before_anything_is_begun() {
    if !may_run_ahead() {
        return;
    }
    play_pair(|pair| {
        let Some(path) = without_userfaultfd(&pair.beta)? else {
            omission::machine_lacks("a QEMU that can be kept from userfaultfd");
            return Ok(());
        };
        pair.beta.stop()?;
        pair.beta.start_with(&[("PATH", &path)])?;
        let console = start(pair, FILL_BYTES, 0, 0)?;
        let order = ["migrate", vm::NAME, "--to", "beta:a", "--memory", "post-copy"];
        let dry = [&order[..], &["--dry-run", "--json"]].concat();
        let said = |text: &str| text.contains("post-copy") && text.contains("vm.unprivileged_userfaultfd=1");
        let plan = until("beta can be reached again, and says it", || {
            let plan: MigrationPlan = pair.alpha.sterna(&dry)?.json()?;
            let is_told = plan.refusals.iter().any(|refusal| said(&refusal.message));
            Ok(is_told.then_some(plan))
        })?;
        ensure!(!plan.can_begin, "{plan:#?}");
        // The same move without post-copy is possible.
        pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a", "--dry-run"])?.success()?;
        let refused = pair.alpha.sterna(order)?;
        ensure!(refused.code != 0 && said(&refused.stderr), "{refused:?}");
        until("nothing is left there", || {
            Ok((pair.beta.images("a")?.is_empty() && vm::vms(&pair.beta)?.is_empty()).then_some(()))
        })?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

/// Returns a folder with a QEMU that may not use userfaultfd; `None` if that cannot be prevented here.
fn without_userfaultfd(scene: &Host) -> anyhow::Result<Option<String>> {
    const QEMU: &str = "qemu-system-x86_64";
    let folder = scene.path("bin");
    std::fs::create_dir(&folder).context("make a folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let script = format!(
        "#!/bin/sh\nPATH='{path}'\nexec setpriv --inh-caps=-sys_ptrace --bounding-set=-sys_ptrace {QEMU} \"$@\"\n"
    );
    let program = folder.join(QEMU);
    std::fs::write(&program, script).context("write a program")?;
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).context("write a program")?;
    let version = Command::new(&program).arg("--version").output().context("run a program")?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    // From 8.1 on QEMU also uses a device.
    let is_old = version.contains("version 7.");
    let everybody = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    Ok((is_old && everybody.trim() == "0").then(|| format!("{}:{path}", folder.display())))
}

#[test]
fn memory_follows_the_machine_over_a_link_that_was_cut_and_when_a_daemon_was_killed_or_is_said_to_be_lost() {
    if !may_run_ahead() {
        return;
    }
    play_pair(|pair| {
        // The whole disk is filled, because a restarted guest fills it anew.
        let console = start(pair, DISK_BYTES, 4 << 20, SWEPT_BYTES)?;
        // The killed daemon is always beta's.
        for killed in [None, Some(Daemon::Source), Some(Daemon::Target)] {
            let (alpha, beta) = ((&pair.alpha, "alpha:a"), (&pair.beta, "beta:a"));
            let comes_home = killed == Some(Daemon::Source);
            let begun =
                if comes_home { run_ahead(pair, beta, alpha)? } else { run_ahead(pair, alpha, beta)? };
            match killed {
                None => pair.link.set(LinkState::Cut),
                Some(_) => {
                    // No more pages arrive, and the guest soon needs some.
                    pair.link.set(LinkState::BlackHole);
                    pair.beta.kill()?;
                }
            }
            pair.link.set(LinkState::Up);
            if killed.is_some() {
                pair.beta.start()?;
            }
            let (source, target) =
                if comes_home { (&pair.beta, &pair.alpha) } else { (&pair.alpha, &pair.beta) };
            // If its QEMU had sent everything, the rest is lost and reported as lost.
            let fate = ends(source, target, &console, &begun).with_context(|| format!("{killed:?}"))?;
            ensure!(fate == Fate::Runs || killed.is_some(), "only a daemon that is killed costs the memory");
        }
        console.verify()
    });
}

#[test]
fn a_machine_that_is_lost_before_its_memory_came_says_so_and_starts_again_on_whole_disks() {
    if !may_run_ahead() {
        return;
    }
    play_pair(|pair| {
        // The whole disk is filled, because the restarted guest fills it anew.
        let console = start(pair, DISK_BYTES, 4 << 20, SWEPT_BYTES)?;
        let begun = run_ahead(pair, (&pair.alpha, "alpha:a"), (&pair.beta, "beta:a"))?;
        // No more pages arrive before its end.
        pair.link.set(LinkState::BlackHole);
        let process = until("QEMU is there", || Ok(vm::vms(&pair.beta)?.first().and_then(|vm| vm.process)))?;
        vm::kill(process);
        pair.link.set(LinkState::Slow);
        ensure!(ends(&pair.alpha, &pair.beta, &console, &begun)? == Fate::Lost, "it has no memory");
        pair.link.set(LinkState::Up);
        console.verify()
    });
}
