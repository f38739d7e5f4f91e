//! Tests of VMs with incomplete disks that return to the host with the missing blocks.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::{Migration, MigrationState, Phase, VmState, Volume};
use e2e::{Host, LinkState, Pair, play_pair, until, vm};
use testbed::nbd_client::{Address, Client, ClientOptions, Operation, WriteDurability};

use crate::{lacks, volumes};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 100;
/// A rate at which disks hardly fill in the background during a test.
const SLOWLY: &str = "64KiB/s";
/// Bytes that may be copied besides the writes.
const SLACK_BYTES: u64 = 1 << 20;

/// Returns the bytes that guests have written to a host's volumes.
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

/// Hands the VM over to `beta` without any blocks of its disks, with a low bandwidth.
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

/// Begins the return, which does not wait until the disks are complete.
fn go_back(pair: &Pair, more: &[&str]) -> anyhow::Result<Migration> {
    let order = ["migrate", vm::NAME, "--to", "alpha", "--detach"];
    let begun: Migration = pair.beta.ask(&[&order[..], more].concat())?;
    ensure!(begun.state != MigrationState::Queued, "it begins at once: {begun:?}");
    Ok(begun)
}

/// Checks that the VM is at `alpha`, and that the migration `departure` has ended.
fn check_taken_back(pair: &Pair, departure: &Migration) -> anyhow::Result<()> {
    vm::check_at(&pair.alpha, &pair.beta)?;
    pair.check_departure_taken_back(&departure.id)
}

/// Waits until the departure is under way again, because the return has failed.
fn until_it_goes_on(pair: &Pair, departure: &Migration) -> anyhow::Result<()> {
    let mut last = None;
    until("the departure goes on", || {
        let shown = pair.alpha.migration(&departure.id)?;
        let goes_on = shown.phase == Phase::Filling && shown.state == MigrationState::Running;
        last = Some(shown);
        Ok(goes_on.then_some(()))
    })
    .with_context(|| format!("{last:?}"))
}

#[test]
fn a_machine_goes_back_with_what_it_has_written_and_nothing_else() {
    play_pair(|pair| {
        let console = start(pair)?;
        let departure = hand_over(pair)?;
        console.work_on(REQUESTS)?;
        // The first disk is complete, and the second still lacks most blocks.
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
        // The slack covers its writes after this check.
        ensure!(sent <= most + most / 20 + SLACK_BYTES, "{sent} bytes for {most} that were written");
        console.work_on(REQUESTS)?;
        // It moves again in both directions, so nothing is left that would prevent it.
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
    play_pair(|pair| {
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
            until_it_goes_on(pair, &departure)?;
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
    play_pair(|pair| {
        let console = start(pair)?;
        let departure = hand_over(pair)?;
        for turn in 0..3 {
            console.work_on(REQUESTS)?;
            pair.link.set(LinkState::Slow);
            let home = go_back(pair, &[])?;
            pair.kill_in_turn(turn)?;
            pair.link.set(LinkState::Up);
            let home = pair.beta.wait_for_migration(&home.id)?;
            println!("turn {turn}: {home:?}");
            if home.state == MigrationState::Moved {
                return end_at_home(pair, &departure, &console);
            }
            vm::check_at(&pair.beta, &pair.alpha)?;
            until_it_goes_on(pair, &departure)?;
        }
        let home = go_back(pair, &[])?;
        let home = pair.beta.wait_for_migration(&home.id)?;
        ensure!(home.state == MigrationState::Moved, "{home:?}");
        end_at_home(pair, &departure, &console)
    });
}

#[test]
fn a_client_that_stayed_reads_nothing_that_has_been_overwritten_while_a_machine_comes_back() {
    play_pair(|pair| {
        // The guest does not check these writes.
        let _console = start(pair)?;
        let stayed = pair.alpha.export()?;
        write(&stayed, 1)?;
        let departure = hand_over(pair)?;
        write(&pair.beta.export()?, 2)?;
        ensure!(read(&stayed)? == 2, "it is led to the other host");
        let home = go_back(pair, &["--bandwidth", SLOWLY])?;
        pair.kill_in_turn(0)?;
        let reading = std::thread::spawn(move || read(&stayed));
        // The target is the daemon that has just started: it has forgotten the VM that was coming.
        let state = || anyhow::Ok(pair.beta.migration(&home.id)?.state);
        until("the way back ends", || Ok((state()? == MigrationState::Failed).then_some(())))?;
        let read = reading.join().map_err(|_| anyhow::anyhow!("the client has panicked"))??;
        ensure!(read == 2, "it was written when the volume was at the other host, and {read} was read");
        until_it_goes_on(pair, &departure)?;
        vm::check_at(&pair.beta, &pair.alpha)?;
        // It keeps the missing blocks, also without a client.
        std::thread::sleep(CLIENTS_POLL * 3);
        ensure!(volumes(&pair.alpha)?.len() == 2, "{:?}", volumes(&pair.alpha)?);
        let mut client = Client::connect(&pair.beta.export()?, ClientOptions::default())?;
        client.perform(Operation::Read { offset: 0, buffer: vec![0; 1 << 20] })?;
        Ok(())
    });
}

/// Interval at which a daemon checks whether the clients of a forwarded volume have left.
const CLIENTS_POLL: Duration = Duration::from_secs(1);

/// Bytes that are written at the end of the disk, more than are copied meanwhile.
const WRITTEN_BYTES: u64 = 4 << 20;

fn write(export: &Address, value: u8) -> anyhow::Result<()> {
    let mut client = Client::connect(export, ClientOptions::default())?;
    let (offset, data) = (DISK_BYTES - WRITTEN_BYTES, vec![value; usize::try_from(WRITTEN_BYTES)?]);
    client.perform(Operation::Write { offset, data, durability: WriteDurability::Durable })?;
    Ok(())
}

/// Reads the end of the disk, which is copied last.
fn read(export: &Address) -> anyhow::Result<u8> {
    let mut client = Client::connect(export, ClientOptions::default())?;
    match client.perform(Operation::Read { offset: DISK_BYTES - 4096, buffer: vec![0; 4096] })? {
        Operation::Read { buffer, .. } => buffer.first().copied().context("nothing was read"),
        other => bail!("a read came back as {other:?}"),
    }
}

fn end_at_home(pair: &Pair, departure: &Migration, console: &vm::Vm) -> anyhow::Result<()> {
    check_taken_back(pair, departure)?;
    console.work_on(REQUESTS)?;
    console.verify()
}
