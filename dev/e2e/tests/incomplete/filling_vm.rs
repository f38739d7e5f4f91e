//! Tests of VMs with incomplete disks, while they are filled, with broken links and killed daemons.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Phase, Vm, VmState, Volume};
use e2e::{LinkState, Pair, play_pair, until, vm};
use testbed::nbd_client::{Client, ClientOptions, Operation};

use crate::{fillings, volumes};

const DISK_BYTES: u64 = 96 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 200;
/// A rate at which disks hardly fill in the background during a test.
const SLOWLY: &str = "64KiB/s";
/// Options by which QEMU stops the guest at errors of its disks, and retries.
const STOPPED_BY_ERRORS: [&str; 4] =
    ["-global", "virtio-blk-device.rerror=stop", "-global", "virtio-blk-device.werror=stop"];
/// Longer than a read of such a VM waits for a host that does not answer.
const AWAY: Duration = Duration::from_secs(25);

/// Begins to move the VM from `alpha` to `beta`, with disks that follow, and returns once it runs there.
fn hand_over(pair: &Pair, strategy: &[&str]) -> anyhow::Result<Migration> {
    // Rounds leave the blocks that the guest writes while its memory is sent.
    pair.link.set(LinkState::Slow);
    let order = ["migrate", vm::NAME, "--to", "beta:a", "--detach", "--strategy"];
    let begun: Migration = pair.alpha.ask(&[&order[..], strategy].concat())?;
    until("its memory is sent", || {
        let shown = pair.alpha.migration(&begun.id)?;
        ensure!(shown.state == MigrationState::Running, "it has ended: {shown:?}");
        Ok((shown.phase == Phase::Memory).then_some(()))
    })?;
    pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", SLOWLY])?.success()?;
    until("it runs at the other host", || {
        Ok(vm::vms(&pair.beta)?.iter().any(|vm| vm.state == VmState::Running).then_some(()))
    })?;
    pair.link.set(LinkState::Up);
    ensure!(!fillings(&pair.beta)?.is_empty(), "its disks have not come");
    Ok(begun)
}

/// Removes the bandwidth limit, and waits until both hosts know that the disks are complete.
fn until_whole(pair: &Pair, begun: &Migration) -> anyhow::Result<()> {
    pair.alpha.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
    until("nothing is missing", || Ok(fillings(&pair.beta)?.is_empty().then_some(())))?;
    let ended = pair.alpha.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    vm::check_at(&pair.beta, &pair.alpha)
}

fn seen(pair: &Pair) -> anyhow::Result<Vm> {
    pair.beta.ask(&["vm", "show", vm::NAME])
}

#[test]
fn a_machine_that_is_stopped_by_errors_is_while_the_link_is_away_and_goes_on_by_itself() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start_with_words(&pair.alpha, &["v"], FILL_BYTES, &STOPPED_BY_ERRORS)?;
        let begun = hand_over(pair, &["post-copy"])?;
        console.work_on(REQUESTS)?;
        for is_killed in [false, true] {
            pair.link.set(LinkState::BlackHole);
            let stopped = until("the VM is stopped", || {
                Ok(Some(seen(pair)?).filter(|vm| {
                    let says = vm.message.as_deref().unwrap_or_default();
                    vm.state == VmState::Paused && says.contains("Sterna resumes the VM")
                }))
            })?;
            let says = stopped.message.context("it says why")?;
            ensure!(says.contains("volume v, from host alpha"), "{says}");
            let refused = fillings(&pair.beta)?.first().map(|filling| filling.reads_refused);
            ensure!(refused.is_some_and(|refused| refused > 0), "{refused:?}");
            ensure!(pair.beta.log()?.contains("the VM is stopped: a disk of it waits"), "the log says so");
            ensure!(pair.beta.statistics()?.errors > 0, "it was stopped by an error");
            if is_killed {
                // The next daemon knows why the VM is stopped.
                pair.beta.kill()?;
                pair.beta.start()?;
            }
            pair.link.set(LinkState::Up);
            until("the VM goes on", || Ok((seen(pair)?.state == VmState::Running).then_some(())))?;
            console.work_on(REQUESTS)?;
        }
        until_whole(pair, &begun)?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn a_machine_that_would_be_told_of_errors_waits_for_as_long_as_the_link_is_away() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(&pair.alpha, FILL_BYTES)?;
        let begun = hand_over(pair, &["post-copy"])?;
        pair.link.set(LinkState::Cut);
        until("a read waits", || {
            Ok(fillings(&pair.beta)?.iter().any(|filling| filling.requests_waiting > 0).then_some(()))
        })?;
        let began = std::time::Instant::now();
        until("a VM of the other kind would have been stopped", || {
            ensure!(seen(pair)?.state == VmState::Running, "nobody stops it: {:?}", seen(pair)?);
            Ok((began.elapsed() > AWAY).then_some(()))
        })?;
        let lacking = fillings(&pair.beta)?;
        ensure!(lacking.iter().all(|filling| filling.reads_refused == 0), "{lacking:?}");
        ensure!(
            lacking.iter().any(|filling| filling.waits_for.is_some()),
            "it says what it waits for: {lacking:?}"
        );
        pair.link.set(LinkState::Up);
        console.work_on(REQUESTS)?;
        until_whole(pair, &begun)?;
        console.verify()
    });
}

/// Reads a whole volume of `beta`, which pulls its missing blocks.
fn read_all(pair: &Pair, volume: &str) -> anyhow::Result<()> {
    let shown: Volume = pair.beta.ask(&["volume", "show", volume])?;
    let mut client = Client::connect(&shown.uri.parse()?, ClientOptions::default())?;
    for offset in (0..shown.size_bytes).step_by(1 << 20) {
        let length = usize::try_from((shown.size_bytes - offset).min(1 << 20))?;
        client.perform(Operation::Read { offset, buffer: vec![0; length] })?;
    }
    Ok(())
}

/// A VM with two disks moves, daemons are killed, and one disk is complete before the other. All images stay until both are.
fn two_disks_follow(strategy: &[&str]) {
    play_pair(|pair| {
        for volume in ["v", "w"] {
            pair.alpha.sterna(["volume", "create", volume, "--size", "64MiB", "--store", "a"])?.success()?;
        }
        let console = vm::start_with(&pair.alpha, &["v", "w"], FILL_BYTES)?;
        let begun = hand_over(pair, strategy)?;
        ensure!(fillings(&pair.beta)?.len() == 2, "both follow: {:?}", fillings(&pair.beta)?);
        console.work_on(REQUESTS)?;
        for turn in 0..3 {
            pair.kill_in_turn(turn)?;
            console.work_on(REQUESTS)?;
        }
        read_all(pair, "w")?;
        until("one is whole", || {
            let lacking: Vec<_> =
                volumes(&pair.beta)?.into_iter().filter(|it| it.filling.is_some()).collect();
            ensure!(lacking.iter().any(|volume| volume.name == "v"), "the other one is not");
            Ok(lacking.iter().all(|volume| volume.name != "w").then_some(()))
        })?;
        let shown = pair.alpha.migration(&begun.id)?;
        ensure!(shown.state == MigrationState::Running && shown.phase == Phase::Filling, "{shown:?}");
        let images = pair.alpha.images("a")?;
        ensure!(["v.img", "w.img"].iter().all(|name| images.iter().any(|image| image == name)), "{images:?}");
        until_whole(pair, &begun)?;
        ensure!(pair.alpha.images("a")?.is_empty(), "{:?}", pair.alpha.images("a")?);
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

#[test]
fn two_disks_follow_a_machine_that_was_handed_over_at_once() {
    two_disks_follow(&["post-copy"]);
}

#[test]
fn two_disks_follow_a_machine_after_rounds() {
    two_disks_follow(&["three-phase", "--rounds", "1"]);
}
