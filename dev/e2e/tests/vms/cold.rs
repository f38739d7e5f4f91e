//! Tests of stopped VMs that move with all that they are: definition, disks, small files, the state of a TPM. With daemons that
//! are killed at each step, and orders that are refused or cancelled.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationPlan, MigrationState, VmState};
use e2e::{Host, Pair, play_pair, until, vm};

const VOLUMES: [&str; 2] = ["root", "data"];
const DISK_BYTES: usize = 8 << 20;
/// All of both disks, because a guest that is started again does not know what it wrote before.
const FILL_BYTES: u64 = 2 * DISK_BYTES as u64;
/// Requests of the guest before and after moves.
const REQUESTS: u64 = 200;
/// A rate at which the disks are copied for some seconds.
const SLOWLY: &str = "2MiB/s";
/// QEMU's words for a small file of the VM, in place of UEFI variables.
const FILE_WORDS: [&str; 2] = ["-fw_cfg", "name=opt/vars,file={file:vars}"];

/// Everything of a VM that is not its definition: its disks, its small file, and its TPM's state, if there is one.
type Content = (Vec<Vec<u8>>, Vec<u8>, Option<Vec<u8>>);

fn folder(host: &Host) -> PathBuf {
    host.path("data").join("vms").join(vm::NAME)
}

/// Returns the words of a TPM and of a small file, and the section that names the file.
fn more(host: &Host) -> anyhow::Result<(Vec<&'static str>, String)> {
    let vars = host.path("vars");
    std::fs::write(&vars, b"the variables of a firmware")?;
    let words = vm::tpm_words().iter().copied().chain(FILE_WORDS).collect();
    Ok((words, format!("[files]\nvars = '{}'\n", vars.display())))
}

/// Makes two volumes with content at alpha.
fn make_disks(pair: &Pair) -> anyhow::Result<()> {
    for (volume, seed) in VOLUMES.iter().zip(1..) {
        let image = pair.alpha.path(&format!("{volume}.raw"));
        let bytes: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 * seed) as u8 | 1).collect();
        std::fs::write(&image, bytes)?;
        let image = image.to_str().context("a folder that is not UTF-8")?;
        pair.alpha.sterna(["volume", "create", volume, "--store", "a", "--image", image])?.success()?;
    }
    Ok(())
}

/// Makes two volumes with content at alpha, and adds a VM that uses them and is never started.
fn add(pair: &Pair) -> anyhow::Result<Content> {
    make_disks(pair)?;
    let (words, mut sections) = more(&pair.alpha)?;
    if !vm::tpm_words().is_empty() {
        // What a TPM that has run would have.
        let state = pair.alpha.path("state");
        std::fs::create_dir(&state)?;
        std::fs::write(state.join("tpm2-00.permall"), b"keys of the guest's disks")?;
        sections += &format!("[tpm]\nstate = '{}'\n", state.display());
    }
    vm::add(&pair.alpha, &VOLUMES, &words, &sections)?;
    content(&pair.alpha)
}

fn content(host: &Host) -> anyhow::Result<Content> {
    let image = |volume: &&str| std::fs::read(host.path("a").join(format!("{volume}.img")));
    let disks = VOLUMES.iter().map(image).collect::<Result<_, _>>()?;
    let tpm = std::fs::read(folder(host).join("tpm/tpm2-00.permall")).ok();
    Ok((disks, std::fs::read(folder(host).join("files/vars"))?, tpm))
}

/// Checks that the stopped VM is at `there` with this content, and that `elsewhere` has nothing of it.
fn check_at(there: &Host, elsewhere: &Host, expected: &Content) -> anyhow::Result<()> {
    until("the VM is at one host, stopped", || {
        let (found, other) = (vm::vms(there)?, vm::vms(elsewhere)?);
        let rests = matches!(found.as_slice(), [vm] if vm.state == VmState::Stopped);
        Ok((rests && other.is_empty()).then_some(()))
    })?;
    ensure!(content(there)? == *expected, "something of it is not what it was");
    until("nothing is left", || {
        let volumes: Vec<api::Volume> = elsewhere.ask(&["volume", "list"])?;
        let is_empty = volumes.is_empty() && elsewhere.images("a")?.is_empty();
        Ok((is_empty && !folder(elsewhere).exists()).then_some(()))
    })
}

/// Waits for the end of everything, and checks where the VM is: returns whether that is alpha.
fn settled(pair: &Pair, expected: &Content) -> anyhow::Result<bool> {
    let is_alpha = pair.settled(VOLUMES.len())?;
    let (owner, other) = if is_alpha { (&pair.alpha, &pair.beta) } else { (&pair.beta, &pair.alpha) };
    check_at(owner, other, expected)?;
    Ok(is_alpha)
}

/// Begins to move the VM, once the hosts are in touch.
fn begin(source: &Host, to: &str, more: &[&str]) -> anyhow::Result<Migration> {
    let order = [&["migrate", vm::NAME, "--to", to, "--detach"], more].concat();
    until("the hosts are in touch", || Ok(source.ask(&order).ok()))
}

fn refusal(host: &Host, order: &[&str]) -> anyhow::Result<String> {
    let refused = host.sterna(order)?;
    ensure!(refused.code != 0, "it was not refused: {refused:?}");
    let looked = host.sterna([order, &["--dry-run"]].concat())?;
    ensure!(looked.code == refused.code, "the dry run ends with another code: {looked:?}, {refused:?}");
    Ok(refused.stderr)
}

#[test]
fn a_stopped_machine_goes_there_and_back_with_all_that_it_is_and_starts_there() {
    play_pair(|pair| {
        for volume in VOLUMES {
            let size = DISK_BYTES.to_string();
            pair.alpha.sterna(["volume", "create", volume, "--size", &size, "--store", "a"])?.success()?;
        }
        let (words, sections) = more(&pair.alpha)?;
        let console = vm::start_with_sections(&pair.alpha, &VOLUMES, FILL_BYTES, &words, &sections)?;
        let has_tpm = !vm::tpm_words().is_empty();
        for (from, to, name) in [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")] {
            console.work_on(REQUESTS)?;
            // Each start counts on, if the TPM has its state.
            let counted = console.console().tpm_counter();
            ensure!(counted.is_some() == has_tpm, "{counted:?}");
            from.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
            let expected = content(from)?;
            ensure!(expected.2.is_some() == has_tpm, "its TPM has a state");
            until("the hosts are in touch", || {
                Ok((from.sterna(["migrate", vm::NAME, "--to", name, "--dry-run"])?.code == 0).then_some(()))
            })?;
            let plan: MigrationPlan = from.ask(&["migrate", vm::NAME, "--to", name, "--dry-run"])?;
            let machine = plan.machine.context("a VM goes along")?;
            ensure!(machine.stopped && machine.memory_bytes.is_none(), "{machine:?}");
            ensure!(machine.max_downtime_ms.is_none() && machine.least_downtime_ms.is_none(), "{machine:?}");
            let moved: Migration = from.ask(&["migrate", vm::NAME, "--to", name])?;
            ensure!(moved.state == MigrationState::Moved && moved.machine.is_none(), "{moved:?}");
            check_at(to, from, &expected)?;
            console.forget();
            to.sterna(["vm", "start", vm::NAME])?.success()?;
            console.work_on(1)?;
            if let Some(counted) = counted {
                let again = console.console().tpm_counter().context("the guest tells")?;
                ensure!(again > counted, "its counter was {counted}, and is {again}");
            }
        }
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn killed_at_each_step_a_stopped_machine_is_at_one_host_with_all_that_it_is() {
    #[derive(Clone, Copy, PartialEq)]
    enum Killed {
        Source,
        Target,
    }
    // For each step, whether the VM has moved at the end.
    let steps = [
        (Killed::Source, "after-started", false),
        (Killed::Target, "before-keep", false),
        (Killed::Target, "after-keep", true),
        (Killed::Source, "before-released", true),
        (Killed::Target, "after-prepared", true),
        (Killed::Source, "after-released", true),
        (Killed::Target, "before-owned", true),
        (Killed::Target, "after-owned", true),
        (Killed::Source, "before-ended", true),
        (Killed::Target, "before-ended", true),
    ];
    play_pair(|pair| {
        let expected = add(pair)?;
        let mut is_at_alpha = true;
        for (who, step, moves) in steps {
            let kills_alpha = is_at_alpha == (who == Killed::Source);
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            killed.stop()?;
            killed.start_with(&[("STERNA_FAIL_POINT", step)])?;
            let (source, to) = if is_at_alpha { (&pair.alpha, "beta:a") } else { (&pair.beta, "alpha:a") };
            until("the hosts are in touch", || {
                let looked = source.sterna(["migrate", vm::NAME, "--to", to, "--dry-run"])?;
                Ok((looked.code == 0).then_some(()))
            })?;
            let ordered = source.command(["migrate", vm::NAME, "--to", to, "--detach"])?.start()?;
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            ensure!(killed.wait_for_end()? == 137, "{step}: it was not killed");
            killed.start()?;
            // Its answer, or that of a killed daemon, says nothing.
            ordered.wait()?;
            let was_at_alpha = is_at_alpha;
            is_at_alpha = settled(pair, &expected).with_context(|| format!("killed {step}"))?;
            ensure!(
                (is_at_alpha != was_at_alpha) == moves,
                "{step}: at alpha before {was_at_alpha}, now {is_at_alpha}"
            );
        }
        Ok(())
    });
}

#[test]
fn killed_in_the_middle_of_the_copying_a_stopped_machine_goes_on_to_its_target() {
    play_pair(|pair| {
        let expected = add(pair)?;
        for kills_source in [true, false] {
            let begun = begin(&pair.alpha, "beta:a", &["--bandwidth", SLOWLY])?;
            until("a part is copied", || {
                let shown = pair.alpha.migration(&begun.id)?;
                ensure!(!shown.state.has_ended(), "{shown:?}");
                Ok((shown.bytes_copied > 0).then_some(()))
            })?;
            // It cannot be started or removed meanwhile, at either host.
            for (host, states) in [(&pair.alpha, VmState::Leaving), (&pair.beta, VmState::Arriving)] {
                ensure!(
                    matches!(vm::vms(host)?.as_slice(), [vm] if vm.state == states),
                    "{:?}",
                    vm::vms(host)?
                );
                for order in ["start", "remove"] {
                    let refused = host.sterna(["vm", order, vm::NAME])?;
                    let says_so = refused.stderr.contains("is being moved by m");
                    ensure!(refused.code != 0 && says_so, "{refused:?}");
                }
            }
            let killed = if kills_source { &mut pair.alpha } else { &mut pair.beta };
            killed.kill()?;
            killed.start()?;
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
            ensure!(!settled(pair, &expected)?, "it is at beta");
            let home = begin(&pair.beta, "alpha:a", &[])?;
            pair.beta.wait_for_migration(&home.id)?;
            ensure!(settled(pair, &expected)?, "it came home");
        }
        // Cancelled, it is where it was, and can be started.
        let begun = begin(&pair.alpha, "beta:a", &["--bandwidth", SLOWLY])?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        ensure!(settled(pair, &expected)?, "it stays");
        pair.alpha.sterna(["vm", "remove", vm::NAME])?.success().map(drop)
    });
}

#[test]
fn what_a_stopped_machine_lacks_at_its_target_is_said_before_a_byte_moves() {
    play_pair(|pair| {
        let expected = add(pair)?;
        let order = ["migrate", vm::NAME, "--to", "beta:a"];
        until("the hosts are in touch", || {
            Ok((pair.alpha.sterna([&order[..], &["--dry-run"]].concat())?.code == 0).then_some(()))
        })?;
        for (more, word) in [
            (&["--memory", "post-copy"][..], "--memory post-copy"),
            (&["--memory-streams", "2"], "--memory-streams"),
            (&["--strategy", "post-copy"], "--strategy post-copy"),
        ] {
            let said = refusal(&pair.alpha, &[&order[..], more].concat())?;
            ensure!(said.contains(word) && said.contains("is stopped"), "{said}");
        }
        // Its name is taken there.
        pair.beta.sterna(["volume", "create", "other", "--size", "1MiB", "--store", "a"])?.success()?;
        vm::add(&pair.beta, &["other"], &[], "")?;
        let said = refusal(&pair.alpha, &order)?;
        ensure!(said.contains("exists"), "{said}");
        pair.beta.sterna(["vm", "remove", vm::NAME])?.success()?;
        pair.beta.sterna(["volume", "remove", "other"])?.success()?;
        // It may bring no VMs.
        pair.beta.sterna(["host", "set", "alpha", "--deny-machines"])?.success()?;
        let said = refusal(&pair.alpha, &order)?;
        ensure!(said.contains("accepts no VMs"), "{said}");
        pair.beta.sterna(["host", "set", "alpha", "--allow-machines"])?.success()?;
        ensure!(settled(pair, &expected)?, "it stays");
        // Its program is not there.
        pair.beta.stop()?;
        pair.beta.start_with(&[("PATH", "/nowhere")])?;
        until("the hosts are in touch", || {
            let said = pair.alpha.sterna([&order[..], &["--dry-run"]].concat())?;
            Ok(said
                .stderr
                .contains("qemu-system")
                .then_some(())
                .or(said.stdout.contains("qemu-system").then_some(())))
        })?;
        let said = refusal(&pair.alpha, &order)?;
        ensure!(said.contains("qemu-system"), "{said}");
        ensure!(settled(pair, &expected)?, "it stays");
        Ok(())
    });
}

#[test]
fn a_machine_whose_disk_is_elsewhere_is_not_started_over_the_link_by_accident() {
    play_pair(|pair| {
        make_disks(pair)?;
        let _console = vm::add(&pair.alpha, &VOLUMES, &[], "")?;
        let away = |more: &[&str]| {
            let order = [&["migrate", "data", "--to", "beta:a"], more].concat();
            until("the hosts are in touch", || Ok((pair.alpha.sterna(&order)?.code == 0).then_some(())))
        };
        away(&[])?;
        let refused = pair.alpha.sterna(["vm", "start", vm::NAME])?;
        ensure!(refused.code != 0, "{refused:?}");
        for word in ["\"data\"", "\"beta\"", "sterna migrate data --to alpha"] {
            ensure!(refused.stderr.contains(word), "{word}: {refused:?}");
        }
        let home: Migration = pair.beta.ask(&["migrate", "data", "--to", "alpha:a"])?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        // It was ordered that it is served here from there.
        away(&["--serve-here"])?;
        pair.alpha.sterna(["vm", "start", vm::NAME])?.success()?;
        pair.alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success().map(drop)
    });
}
