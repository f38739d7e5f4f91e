//! Tests of `sterna evacuate`: everything leaves a host, also if a target or this daemon dies meanwhile, and of hosts that are
//! drained.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{Evacuation, EvacuationState, Vm, VmState, Volume, WorkloadState};
use e2e::throw_away_root::repository;
use e2e::trio::play_trio;
use e2e::{Host, Outcome, Pair, Program, play_pair, program, until, vm};
use rustix::process::Signal;

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 16 << 20;
const REQUESTS: u64 = 200;
/// How long a target may take to answer a dry run.
const DRY_RUN_MAX: Duration = Duration::from_secs(30);
/// The bytes of each volume that holds something.
const HELD_BYTES: usize = 24 << 20;
/// The rate of a store that is slow on purpose: a volume takes three seconds.
const SLOW: u64 = 8 << 20;

/// Bytes that no compression shortens, another sequence for each seed.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..length / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Makes volumes `n0`, `n1`, … with content, and returns it.
fn make_volumes(host: &Host, count: u64) -> anyhow::Result<Vec<Vec<u8>>> {
    (0..count)
        .map(|number| {
            let content = noise(number + 1, HELD_BYTES);
            let image = host.path("given.img");
            std::fs::write(&image, &content)?;
            let image = image.to_str().context("a path of text")?;
            let name = format!("n{number}");
            host.sterna(["volume", "create", &name, "--image", image, "--store", "a"])?.success()?;
            Ok(content)
        })
        .collect()
}

fn content(host: &Host, volume: &str) -> anyhow::Result<Vec<u8>> {
    let shown: Volume = host.ask(&["volume", "show", volume])?;
    std::fs::read(Path::new(&shown.image)).context("read the image of a volume")
}

/// Makes the store `a` of a host slow, so that there is time to interrupt.
fn slow_down(host: &mut Host) -> anyhow::Result<()> {
    host.configure(&format!("[stores.a.delay]\nbytes_per_second = {SLOW}\n"))?;
    host.stop()?;
    host.start()
}

fn status(host: &Host) -> anyhow::Result<Evacuation> {
    host.ask(&["evacuate", "--status"])
}

/// Waits for the end of the evacuation of a host.
fn ended(host: &Host) -> anyhow::Result<Evacuation> {
    let mut last = None;
    for _ in 0..4 {
        let found = until("the evacuation ends", || {
            let shown = status(host)?;
            Ok((shown.state == EvacuationState::Ended).then_some(shown))
        });
        match found {
            Ok(shown) => return Ok(shown),
            Err(error) => last = Some(error),
        }
    }
    Err(last.context("it was looked at")?)
}

fn sees(host: &Host, names: &[&str]) -> anyhow::Result<()> {
    until("the hosts see each other", || {
        let peers: Vec<api::Peer> = host.ask(&["host", "list"])?;
        let is_there = |name: &&str| peers.iter().any(|peer| peer.name == **name && peer.connected);
        Ok(names.iter().all(is_there).then_some(()))
    })
}

/// Runs the example script for power failures.
fn run_script(host: &Host, arguments: &[&str]) -> anyhow::Result<Outcome> {
    let sterna = program::sterna()?;
    let folders = sterna.parent().map(|folder| folder.display().to_string()).unwrap_or_default();
    let script = Program::at(&repository().join("contrib/nut/sterna-evacuate"));
    arguments
        .iter()
        .fold(script, Program::arg)
        .env("PATH", format!("{folders}:{}", std::env::var("PATH")?))
        .env("STERNA_HOST", host.address()?.to_string())
        .run()
}

#[test]
fn when_the_power_fails_vms_leave_and_a_host_that_nobody_answers_for_is_said() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(alpha, FILL_BYTES)?;
        console.work_on(REQUESTS)?;
        sees(alpha, &["beta"])?;
        run_script(alpha, &["beta:a", "2m"])?.expect(0)?;
        vm::check_at(beta, alpha)?;
        console.work_on(REQUESTS)?;

        // First there is nothing left to move, and then no daemon.
        run_script(alpha, &["beta:a", "2m"])?.expect(0)?;
        alpha.stop()?;
        let unheard = run_script(alpha, &["beta:a", "2m"])?;
        ensure!(unheard.code == 7, "{unheard:?}");
        Ok(())
    });
}

#[test]
fn everything_leaves_as_the_dry_run_says_and_the_host_takes_nothing_meanwhile() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(alpha, FILL_BYTES)?;
        let contents = make_volumes(alpha, 3)?;
        alpha.sterna(["volume", "create", "cold", "--size", "16MiB", "--store", "a"])?.success()?;
        alpha.sterna(["vm", "set", vm::NAME, "--priority", "80"])?.success()?;
        let shown: Vm = alpha.ask(&["vm", "show", vm::NAME])?;
        ensure!(shown.priority == 80, "{shown:?}");
        sees(alpha, &["beta"])?;

        let planned = alpha.sterna(["evacuate", "--to", "beta:a", "--dry-run", "--json"])?;
        ensure!(planned.code == 0, "{planned:?}");
        let plan: Evacuation = planned.json()?;
        ensure!(plan.state == EvacuationState::Planned && !plan.misses, "{plan:?}");
        ensure!(plan.workloads.len() == 5 && plan.workloads[0].name == vm::NAME, "{plan:?}");
        ensure!(alpha.sterna(["evacuate", "--status"])?.code == 3, "a dry run leaves nothing");

        let outcome = alpha.sterna(["evacuate", "--to", "beta:a", "--json"])?;
        ensure!(outcome.code == 0, "{outcome:?}");
        let done: Evacuation = outcome.json()?;
        let places = |evacuation: &Evacuation| -> Vec<(String, Option<String>)> {
            evacuation
                .workloads
                .iter()
                .map(|workload| (workload.name.clone(), workload.target.clone()))
                .collect()
        };
        ensure!(places(&done) == places(&plan), "{done:?} rather than {plan:?}");
        ensure!(done.workloads.iter().all(|workload| workload.state == WorkloadState::Left), "{done:?}");
        vm::check_at(beta, alpha)?;
        console.work_on(REQUESTS)?;
        let there: Vm = beta.ask(&["vm", "show", vm::NAME])?;
        ensure!(there.priority == 80, "its priority moves with it: {there:?}");
        for (number, expected) in contents.iter().enumerate() {
            ensure!(content(beta, &format!("n{number}"))? == *expected, "n{number} is another one there");
        }
        // A host without anything is evacuated at once.
        let again: Evacuation = alpha.ask(&["evacuate", "--to", "beta"])?;
        ensure!(again.workloads.is_empty(), "{again:?}");
        Ok(())
    });
}

#[test]
fn a_drained_host_takes_nothing_new_until_it_is_undrained() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        sees(alpha, &["beta"])?;
        beta.sterna(["host", "drain"])?.success()?;
        beta.kill()?;
        beta.start()?;
        sees(alpha, &["beta"])?;
        let told = beta.sterna(["health"])?;
        ensure!(told.code == 0 && told.stdout.contains("sterna host undrain"), "{told:?}");
        ensure!(beta.sterna(["host", "list"])?.stdout.contains("this host is drained"), "host list says it");
        let refused = beta.sterna(["volume", "create", "w", "--size", "1MiB", "--store", "a"])?;
        ensure!(refused.code == 4 && refused.stderr.contains("sterna host undrain"), "{refused:?}");
        for arguments in [&["migrate", "v", "--to", "beta:a"][..], &["standby", "add", "v", "--to", "beta:a"]]
        {
            let refused = alpha.sterna(arguments)?;
            ensure!(refused.code == 4 && refused.stderr.contains("drained"), "{arguments:?}: {refused:?}");
        }
        // Nothing can go there, and what stays is named.
        let stays = alpha.sterna(["evacuate", "--to", "beta:a", "--json"])?;
        let ended: Evacuation = stays.json()?;
        let v = ended.workloads.first().context("the volume")?;
        ensure!(stays.code == 5 && v.state == WorkloadState::Stays, "{ended:?}");
        ensure!(v.reason.as_ref().is_some_and(|reason| reason.contains("drained")), "{v:?}");
        beta.sterna(["host", "undrain"])?.success()?;
        alpha.sterna(["migrate", "v", "--to", "beta:a"])?.success()?;
        Ok(())
    });
}

#[test]
fn what_was_going_to_a_target_that_dies_goes_elsewhere() {
    play_trio(|[alpha, beta, gamma]| {
        slow_down(alpha)?;
        let contents = make_volumes(alpha, 5)?;
        sees(alpha, &["beta", "gamma"])?;
        alpha.sterna(["evacuate", "--to", "beta:a,gamma:a", "--detach"])?.success()?;
        until("something is on its way to beta", || {
            let is_going = |workload: &api::EvacuatedWorkload| {
                workload.state == WorkloadState::Moving && workload.target.as_deref() == Some("beta:a")
            };
            Ok(status(alpha)?.workloads.iter().any(is_going).then_some(()))
        })?;
        beta.kill()?;
        let done = ended(alpha)?;
        for (workload, number) in done.workloads.iter().zip(0..) {
            let number =
                workload.name.strip_prefix('n').and_then(|digit| digit.parse().ok()).unwrap_or(number);
            let expected = contents.get::<usize>(number).context("a volume of this test")?;
            match (workload.state, workload.target.as_deref()) {
                (WorkloadState::Left, Some("gamma:a")) => {
                    ensure!(content(gamma, &workload.name)? == *expected, "{workload:?}");
                }
                // It was there before its host died.
                (WorkloadState::Left, Some("beta:a")) => {}
                _ => anyhow::bail!("{workload:?}"),
            }
        }
        let away = done.workloads.iter().filter(|workload| workload.target.as_deref() == Some("gamma:a"));
        ensure!(away.count() >= 3, "{done:?}");
        Ok(())
    });
}

#[test]
fn a_daemon_that_is_killed_goes_on_with_what_is_left() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        slow_down(alpha)?;
        let contents = make_volumes(alpha, 4)?;
        sees(alpha, &["beta"])?;
        alpha.sterna(["evacuate", "--to", "beta:a", "--detach"])?.success()?;
        until("one has left", || {
            let count = |state| {
                Ok::<_, anyhow::Error>(
                    status(alpha)?.workloads.iter().filter(|workload| workload.state == state).count(),
                )
            };
            Ok((count(WorkloadState::Left)? >= 1).then_some(()))
        })?;
        alpha.kill()?;
        alpha.start()?;
        ensure!(alpha.sterna(["evacuate", "--to", "beta:a"])?.code == 4, "one runs already");
        let done = ended(alpha)?;
        ensure!(done.workloads.len() == 4, "{done:?}");
        ensure!(done.workloads.iter().all(|workload| workload.state == WorkloadState::Left), "{done:?}");
        for (number, expected) in contents.iter().enumerate() {
            ensure!(content(beta, &format!("n{number}"))? == *expected, "n{number} is another one there");
        }
        Ok(())
    });
}

#[test]
fn an_abort_leaves_everything_at_one_host() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, .. } = pair;
        slow_down(alpha)?;
        make_volumes(alpha, 3)?;
        sees(alpha, &["beta"])?;
        ensure!(alpha.sterna(["evacuate", "--abort"])?.code == 3, "none runs");
        alpha.sterna(["evacuate", "--to", "beta:a", "--detach"])?.success()?;
        until("one moves", || {
            let moves = |workload: &api::EvacuatedWorkload| workload.state == WorkloadState::Moving;
            Ok(status(alpha)?.workloads.iter().any(moves).then_some(()))
        })?;
        let aborted = alpha.sterna(["evacuate", "--abort", "--json"])?;
        let ended: Evacuation = aborted.json()?;
        ensure!(aborted.code == 6 && ended.aborted, "{aborted:?}");
        let stays = ended.workloads.iter().filter(|workload| workload.state == WorkloadState::Stays).count();
        ensure!(stays >= 2, "{ended:?}");
        // It takes new volumes again.
        alpha.sterna(["volume", "create", "new", "--size", "1MiB", "--store", "a"])?.success()?;
        Ok(())
    });
}

#[test]
fn before_the_deadline_the_lower_vm_is_shut_down_and_the_higher_one_has_left() {
    play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(alpha, FILL_BYTES)?;
        alpha.sterna(["vm", "set", vm::NAME, "--priority", "90"])?.success()?;
        // A VM that no host takes, because it has no disk. It has no guest either, which could shut down.
        let idle = alpha.path("idle.toml");
        std::fs::write(
            &idle,
            "command = ['qemu-system-x86_64', '-nodefaults', '-display', 'none', '-qmp', 'unix:{qmp},server=on,wait=off']\n",
        )?;
        alpha.sterna(["vm", "add", "idle", "--definition", idle.to_str().context("a path")?])?.success()?;
        alpha.sterna(["vm", "start", "idle"])?.success()?;
        sees(alpha, &["beta"])?;
        let deadline = ["evacuate", "--to", "beta:a", "--deadline", "45s", "--stop-rest"];
        let planned = alpha.sterna(deadline.iter().copied().chain(["--dry-run"]))?;
        ensure!(planned.code == 4 && planned.stdout.contains("shut down before it: idle"), "{planned:?}");
        let began = Instant::now();
        let outcome = alpha.sterna(deadline.iter().copied().chain(["--json"]))?;
        ensure!(outcome.code == 5, "{outcome:?}");
        ensure!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        let done: Evacuation = outcome.json()?;
        let state = |name: &str| {
            done.workloads.iter().find(|workload| workload.name == name).map(|found| found.state)
        };
        ensure!(state(vm::NAME) == Some(WorkloadState::Left), "{done:?}");
        let idle: Vm = alpha.ask(&["vm", "show", "idle"])?;
        match idle.state {
            VmState::Stopped => ensure!(state("idle") == Some(WorkloadState::Stopped), "{done:?}"),
            // Its firmware may ignore the button.
            _ => ensure!(state("idle") == Some(WorkloadState::Stays), "{done:?}"),
        }
        // Nothing else ends a QEMU that the daemon has started.
        if idle.state != VmState::Stopped {
            alpha.sterna(["vm", "stop", "idle", "--now"])?.success()?;
        }
        let there: Vm = beta.ask(&["vm", "show", vm::NAME])?;
        ensure!(there.state == VmState::Running, "{there:?}");
        console.work_on(REQUESTS)
    });
}

#[test]
fn a_target_that_stands_still_is_asked_once_and_an_abort_waits_for_no_answer() {
    play_trio(|[alpha, beta, gamma]| {
        let contents = make_volumes(alpha, 12)?;
        sees(alpha, &["beta", "gamma"])?;
        beta.signal(Signal::STOP)?;
        alpha.sterna(["evacuate", "--to", "beta:a", "--detach"])?.success()?;
        let began = Instant::now();
        let given_up = alpha.sterna(["evacuate", "--abort"])?;
        ensure!(given_up.code == 6, "{given_up:?}");
        let aborted = ended(alpha)?;
        ensure!(began.elapsed() < DRY_RUN_MAX && aborted.aborted, "{aborted:?} after {:?}", began.elapsed());
        alpha.sterna(["evacuate", "--to", "beta:a,gamma:a", "--detach"])?.success()?;
        let began = Instant::now();
        until("the other hosts have answered", || {
            Ok((status(alpha)?.state != EvacuationState::Asking).then_some(()))
        })?;
        // Twelve dry runs, eight at a time, and only the first eight wait for the silent target.
        ensure!(began.elapsed() < 2 * DRY_RUN_MAX, "asked for {:?}", began.elapsed());
        let done = ended(alpha)?;
        for (number, expected) in contents.iter().enumerate() {
            ensure!(content(gamma, &format!("n{number}"))? == *expected, "{done:?}");
        }
        beta.signal(Signal::CONT)
    });
}
