//! Whole VMs go back to the host that has what their disks lack, before that has followed them.

use std::sync::{Mutex, PoisonError};

use anyhow::ensure;
use api::{Migration, MigrationState, Phase, VmState, Volume};
use e2e::{Host, LinkState, Pair, until, vm};
use testbed::nbd_client::{Client, ClientOptions, Operation};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// What the guest does before, between and after.
const REQUESTS: u64 = 100;
/// How fast disks are filled in the background: hardly, within a test.
const SLOWLY: &str = "64KiB/s";
/// What may be copied besides what was written.
const SLACK_BYTES: u64 = 1 << 20;

/// One test at a time: two processors emulate one VM's well enough, and not several.
fn play(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    e2e::play_pair(test);
}

fn volumes(host: &Host) -> anyhow::Result<Vec<Volume>> {
    host.ask(&["volume", "list"])
}

/// What the volumes of a host lack, in bytes.
fn lacks(host: &Host) -> anyhow::Result<u64> {
    Ok(volumes(host)?
        .into_iter()
        .filter_map(|volume| volume.filling)
        .map(|filling| filling.bytes_missing)
        .sum())
}

/// What guests have written to the volumes of a host.
fn written(host: &Host) -> anyhow::Result<u64> {
    let shown = ["v", "w"].map(|volume| host.ask::<Volume>(&["volume", "show", volume]));
    let mut bytes = 0;
    for volume in shown {
        bytes += volume?.statistics.map_or(0, |statistics| statistics.bytes_written);
    }
    Ok(bytes)
}

/// Starts a VM with two disks at `alpha`.
fn start(pair: &Pair) -> anyhow::Result<vm::Vm> {
    for volume in ["v", "w"] {
        let size = DISK_BYTES.to_string();
        pair.alpha.sterna(["volume", "create", volume, "--size", &size, "--store", "a"])?.success()?;
    }
    vm::start_with(&pair.alpha, &["v", "w"], FILL_BYTES)
}

/// Hands the VM over to `beta` before anything of its disks has come, and lets little come.
fn hand_over(pair: &Pair) -> anyhow::Result<Migration> {
    let order =
        ["migrate", vm::NAME, "--to", "beta:a", "--detach", "--strategy", "post-copy", "--bandwidth", SLOWLY];
    let begun: Migration = pair.alpha.ask(&order)?;
    until("it runs at the other host", || {
        let shown = pair.alpha.migration(&begun.id)?;
        ensure!(shown.state == MigrationState::Running, "it has ended: {shown:?}");
        let runs = vm::vms(&pair.beta)?.iter().any(|vm| vm.state == VmState::Running);
        Ok((runs && shown.phase == Phase::Filling).then_some(()))
    })?;
    ensure!(lacks(&pair.beta)? > FILL_BYTES / 2, "its disks have not come");
    Ok(begun)
}

/// Begins to move it back; it does not wait until all has come.
fn go_back(pair: &Pair, more: &[&str]) -> anyhow::Result<Migration> {
    let order = ["migrate", vm::NAME, "--to", "alpha", "--detach"];
    let begun: Migration = pair.beta.ask(&[&order[..], more].concat())?;
    ensure!(begun.state != MigrationState::Queued, "it begins at once: {begun:?}");
    Ok(begun)
}

/// Checks that the VM is at `alpha`, and that it left by `departure` is over.
fn check_taken_back(pair: &Pair, departure: &Migration) -> anyhow::Result<()> {
    vm::check_at(&pair.alpha, &pair.beta)?;
    let departure = until("the departure has ended, too", || {
        let shown = pair.alpha.migration(&departure.id)?;
        Ok(Some(shown).filter(|shown| shown.state != MigrationState::Running))
    })?;
    let said = departure.message.clone().unwrap_or_default();
    ensure!(departure.state == MigrationState::Moved && said.contains("came back"), "{departure:?}");
    ensure!(pair.beta.images("a")?.is_empty(), "{:?}", pair.beta.images("a")?);
    Ok(())
}

#[test]
fn a_machine_goes_back_with_what_it_has_written_and_nothing_else() {
    play(|pair| {
        let console = start(pair)?;
        let departure = hand_over(pair)?;
        console.work_on(REQUESTS)?;
        // One of its disks has all, the other goes on lacking most of it.
        let w: Volume = pair.beta.ask(&["volume", "show", "w"])?;
        let mut client = Client::connect(&w.uri.parse()?, ClientOptions::default())?;
        for offset in (0..w.size_bytes).step_by(1 << 20) {
            client.perform(Operation::Read { offset, buffer: vec![0; 1 << 20] })?;
        }
        drop(client);
        until("one is whole", || {
            let shown: Volume = pair.beta.ask(&["volume", "show", "w"])?;
            Ok(shown.filling.is_none().then_some(()))
        })?;
        ensure!(lacks(&pair.beta)? > FILL_BYTES / 4, "the other one is not");
        let home = go_back(pair, &[])?;
        let mut most = 0;
        let home = until("it is back", || {
            most = most.max(written(&pair.beta).unwrap_or(0));
            Ok(Some(pair.beta.migration(&home.id)?).filter(|shown| shown.state != MigrationState::Running))
        })?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        check_taken_back(pair, &departure)?;
        let sent = home.bytes_copied + home.bytes_mirrored;
        println!("{sent} bytes went back, {most} had been written, {home:?}");
        // What it wrote after that was seen is in the slack.
        ensure!(sent <= most + most / 20 + SLACK_BYTES, "{sent} bytes for {most} that were written");
        console.work_on(REQUESTS)?;
        // There and back again: nothing is left that would be in the way.
        let departure = hand_over(pair)?;
        let home = go_back(pair, &["--strategy", "tracking"])?;
        let home = pair.beta.wait_for_migration(&home.id)?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        check_taken_back(pair, &departure)?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_that_does_not_get_back_goes_on_and_its_disks_still_come() {
    play(|pair| {
        let console = start(pair)?;
        let departure = hand_over(pair)?;
        for phase in [Phase::Copying, Phase::Memory] {
            console.work_on(REQUESTS)?;
            pair.link.set(LinkState::Slow);
            let home = go_back(pair, &[])?;
            until("it is on its way", || {
                let shown = pair.beta.migration(&home.id)?;
                ensure!(shown.state == MigrationState::Running, "{shown:?}");
                Ok((phase == Phase::Copying || shown.phase != Phase::Copying).then_some(()))
            })?;
            pair.beta.sterna(["migration", "cancel", &home.id])?.success()?;
            pair.link.set(LinkState::Up);
            let home = pair.beta.wait_for_migration(&home.id)?;
            ensure!(home.state == MigrationState::Cancelled, "{home:?}");
            console.work_on(REQUESTS)?;
            until("the departure goes on", || {
                let shown = pair.alpha.migration(&departure.id)?;
                Ok((shown.phase == Phase::Filling && shown.state == MigrationState::Running).then_some(()))
            })?;
            vm::check_at(&pair.beta, &pair.alpha)?;
        }
        until("it can be told to hurry", || {
            let set = pair.alpha.sterna(["migration", "set", &departure.id, "--bandwidth", "none"])?;
            Ok((set.code == 0).then_some(()))
        })?;
        until("nothing is missing", || Ok((lacks(&pair.beta)? == 0).then_some(())))?;
        let departure = pair.alpha.wait_for_migration(&departure.id)?;
        ensure!(departure.state == MigrationState::Moved && departure.message.is_none(), "{departure:?}");
        ensure!(pair.alpha.images("a")?.is_empty(), "{:?}", pair.alpha.images("a")?);
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_works_on_whichever_host_is_killed_on_its_way_back() {
    play(|pair| {
        let console = start(pair)?;
        let departure = hand_over(pair)?;
        for (alpha, beta) in [(true, false), (false, true), (true, true)] {
            console.work_on(REQUESTS)?;
            pair.link.set(LinkState::Slow);
            let home = go_back(pair, &[])?;
            for (host, is_killed) in [(&mut pair.alpha, alpha), (&mut pair.beta, beta)] {
                if is_killed {
                    host.kill()?;
                }
            }
            for (host, is_killed) in [(&mut pair.alpha, alpha), (&mut pair.beta, beta)] {
                if is_killed {
                    host.start()?;
                }
            }
            pair.link.set(LinkState::Up);
            let home = pair.beta.wait_for_migration(&home.id)?;
            println!("killed: {alpha}, {beta}: {home:?}");
            if home.state == MigrationState::Moved {
                return end_at_home(pair, &departure, &console);
            }
            vm::check_at(&pair.beta, &pair.alpha)?;
            until("the departure goes on", || {
                let shown = pair.alpha.migration(&departure.id)?;
                Ok((shown.phase == Phase::Filling && shown.state == MigrationState::Running).then_some(()))
            })?;
        }
        let home = go_back(pair, &[])?;
        let home = pair.beta.wait_for_migration(&home.id)?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        end_at_home(pair, &departure, &console)
    });
}

fn end_at_home(pair: &Pair, departure: &Migration, console: &vm::Vm) -> anyhow::Result<()> {
    check_taken_back(pair, departure)?;
    console.work_on(REQUESTS)?;
    console.verify()
}
