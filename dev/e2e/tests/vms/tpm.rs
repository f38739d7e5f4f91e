//! Tests of VMs with a software TPM: its state is at the VM's host, moves with the VM, and outlasts its end. The guest uses its
//! TPM all the time, and knows its expected state.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState};
use e2e::{Host, play_pair, until, vm};

const DISK_BYTES: u64 = 16 << 20;
/// The whole disk is filled, because a restarted VM does not know the former writes.
const FILL_BYTES: u64 = DISK_BYTES;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;

fn state(scene: &Host) -> PathBuf {
    scene.path("data").join("vms").join(vm::NAME).join("tpm")
}

/// Returns the number of TPM processes with their state in a folder.
fn keepers(folder: &Path) -> usize {
    let folder = format!("dir={},", folder.display());
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let commands = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    commands.filter(|command| String::from_utf8_lossy(command).contains(&folder)).count()
}

/// Checks that one host has the TPM's state with one process, and the other has neither.
fn check_at(there: &Host, elsewhere: &Host) -> anyhow::Result<()> {
    vm::check_at(there, elsewhere)?;
    let (here, other) = (state(there), state(elsewhere));
    ensure!(here.join("tpm2-00.permall").exists() && keepers(&here) == 1, "{}", here.display());
    ensure!(!other.exists() && keepers(&other) == 0, "{}", other.display());
    Ok(())
}

#[test]
fn a_machines_tpm_goes_with_it_comes_home_and_outlasts_it() {
    if vm::tpm_words().is_empty() {
        return;
    }
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start_with_words(&pair.alpha, &["v"], FILL_BYTES, &vm::TPM)?;
        // A restarted daemon does not change it.
        pair.alpha.kill()?;
        pair.alpha.start()?;
        for (from, to, name) in [(&pair.alpha, &pair.beta, "beta:a"), (&pair.beta, &pair.alpha, "alpha:a")] {
            console.work_on(REQUESTS)?;
            until("the hosts are in touch", || {
                Ok((from.sterna(["migrate", vm::NAME, "--to", name, "--dry-run"])?.code == 0).then_some(()))
            })?;
            let moved: Migration = from.ask(&["migrate", vm::NAME, "--to", name])?;
            ensure!(moved.state == MigrationState::Moved, "{moved:?}");
            check_at(to, from)?;
        }
        console.work_on(REQUESTS)?;
        console.verify()?;
        let counted =
            until("the guest tells", || Ok(console.console().tpm_counter().filter(|counter| *counter > 20)))?;
        // Its power is cut. After a start it has its persistent state.
        pair.alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        ensure!(keepers(&state(&pair.alpha)) == 0, "a TPM without a VM");
        console.forget();
        pair.alpha.sterna(["vm", "start", vm::NAME])?.success()?;
        console.work_on(1)?;
        let again = console.console().tpm_counter().context("the guest tells")?;
        ensure!(again > counted, "its counter was {counted}, and is {again}");
        // A VM whose TPM has died is refused before anything is copied.
        kill_keeper(&state(&pair.alpha))?;
        until("the guest notices", || Ok(console.work_on(0).is_err().then_some(())))?;
        let refused = pair.alpha.sterna(["migrate", vm::NAME, "--to", "beta:a"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("its TPM (swtpm) has ended"), "{refused:?}");
        pair.alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        pair.alpha.sterna(["vm", "remove", vm::NAME])?.success()?;
        ensure!(!state(&pair.alpha).exists(), "it goes with the VM");
        Ok(())
    });
}

fn kill_keeper(folder: &Path) -> anyhow::Result<()> {
    let wanted = format!("dir={},", folder.display());
    for process in std::fs::read_dir("/proc")?.filter_map(Result::ok) {
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&command).contains(&wanted) {
            vm::kill(process.file_name().to_str().and_then(|name| name.parse().ok()).context("its number")?);
        }
    }
    until("it has ended", || Ok((keepers(folder) == 0).then_some(())))
}
