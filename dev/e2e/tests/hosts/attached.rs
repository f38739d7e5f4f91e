//! Tests of volumes that are attached at hosts which never owned them, with guests that know what they wrote.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{DetachedVolume, MigrationState, Volume, VolumeState};
use e2e::trio::play_trio;
use e2e::{Host, LinkState, Pair, Program, guest, play_pair, until};
use testbed::nbd_client::{Client, ClientError, ClientOptions, Operation, WriteDurability};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 8 << 20;
/// Requests of a guest between two steps.
const REQUESTS: u64 = 200;
const WRITE_BYTES: usize = 64 << 10;
/// Time after which a client stops waiting.
const SOON: Duration = Duration::from_millis(500);

fn attach(owner: &Host, host: &str) -> anyhow::Result<Volume> {
    owner.ask(&["volume", "attach", "v", "--at", host])
}

fn move_to(owner: &Host, host: &str) -> anyhow::Result<()> {
    let moved: api::Migration = owner.ask(&["migrate", "v", "--to", &format!("{host}:a")])?;
    ensure!(moved.state == MigrationState::Moved, "{moved:?}");
    Ok(())
}

/// Checks that a command is refused, with all of `words`.
fn check_refused(host: &Host, command: &[&str], words: &[&str]) -> anyhow::Result<()> {
    let said = host.sterna(command)?;
    let error = said.stderr.clone();
    ensure!(said.success().is_err(), "{command:?} is to be refused");
    ensure!(words.iter().all(|word| error.contains(word)), "{command:?}: {words:?} in {error}");
    Ok(())
}

#[test]
fn an_attached_volume_is_served_while_it_moves_on_and_hosts_are_killed_until_it_arrives_itself() {
    play_trio(|[alpha, beta, gamma]| {
        alpha.create_volume(DISK_BYTES)?;
        let given = attach(alpha, "gamma")?;
        ensure!(given.attachments.len() == 1 && given.attachments[0].is_confirmed, "{given:?}");
        ensure!(given.attachments[0].host == "gamma" && !given.attachments[0].read_only, "{given:?}");
        let taken = gamma.volume()?;
        ensure!(taken.state == VolumeState::Forwarding, "{taken:?}");
        ensure!(taken.attached_by.as_deref() == Some("alpha") && taken.size_bytes == DISK_BYTES, "{taken:?}");
        ensure!(gamma.images("a")?.is_empty(), "an attached volume has no image");
        let guest = guest::start(&gamma.export()?, FILL_BYTES)?;
        gamma.kill()?;
        gamma.start()?;
        guest::until_worked(&guest, REQUESTS).context("after a restart of the host of its clients")?;
        alpha.kill()?;
        alpha.start()?;
        guest::until_worked(&guest, REQUESTS).context("after a restart of the host that has it")?;
        move_to(alpha, "beta")?;
        guest::until_worked(&guest, REQUESTS)?;
        ensure!(alpha.volume()?.attachments.len() == 1, "its host leads to the next one");
        alpha.kill()?;
        alpha.start()?;
        guest::until_worked(&guest, REQUESTS).context("after a restart of the host on the way")?;
        move_to(beta, "gamma")?;
        guest::until_worked(&guest, REQUESTS)?;
        let owned = gamma.volume()?;
        ensure!(owned.state == VolumeState::Serving && owned.attached_by.is_none(), "{owned:?}");
        gamma.kill()?;
        gamma.start()?;
        guest::until_worked(&guest, REQUESTS).context("after a restart of the host that had attached it")?;
        // Back to the host that gave it: its right is that of a host that the volume has left.
        move_to(gamma, "alpha")?;
        guest::until_worked(&guest, REQUESTS)?;
        ensure!(alpha.volume()?.attachments.is_empty(), "the attachment has become ownership");
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn an_attached_volume_goes_to_the_host_that_has_attached_it_and_back_and_is_attached_again() {
    play_pair(|pair| {
        let Pair { alpha, beta, link } = pair;
        alpha.create_volume(DISK_BYTES)?;
        attach(alpha, "beta")?;
        let guest = guest::start(&beta.export()?, FILL_BYTES)?;
        for state in [LinkState::Cut, LinkState::BlackHole] {
            link.set(state);
            link.set(LinkState::Up);
            guest::until_worked(&guest, REQUESTS).context("after the link was away")?;
        }
        until("the hosts are connected", || {
            Ok(alpha.sterna(["migrate", "v", "--to", "beta:a", "--dry-run"])?.success().is_ok().then_some(()))
        })?;
        move_to(alpha, "beta")?;
        guest::until_worked(&guest, REQUESTS)?;
        // The former owner forgets nothing of the way back.
        attach(beta, "alpha")?;
        let there = alpha.volume()?;
        ensure!(there.attached_by.as_deref() == Some("beta"), "{there:?}");
        alpha.kill()?;
        alpha.start()?;
        let second = guest::connect(&alpha.export()?)?;
        move_to(beta, "alpha")?;
        guest::until_worked(&guest, REQUESTS)?;
        ensure!(alpha.volume()?.state == VolumeState::Serving);
        drop(second);
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn the_present_owner_attaches_its_volume_at_a_host_that_would_lead_to_one_that_is_gone() {
    play_trio(|[alpha, beta, gamma]| {
        alpha.create_volume(DISK_BYTES)?;
        move_to(alpha, "beta")?;
        move_to(beta, "gamma")?;
        move_to(gamma, "alpha")?;
        gamma.kill()?;
        attach(alpha, "beta")?;
        let guest = guest::start(&beta.export()?, FILL_BYTES)?;
        guest::until_worked(&guest, REQUESTS)?;
        gamma.start()?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_host_that_is_removed_by_force_and_paired_again_has_no_right_of_before() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        attach(&pair.alpha, "beta")?;
        let mut client = connect(&pair.beta)?;
        write(&mut client, 1)?;
        drop(client);
        pair.alpha.sterna(["host", "remove", "beta", "--force"])?.success()?;
        ensure!(pair.alpha.volume()?.attachments.is_empty(), "its right ends with the pairing");
        pair.join()?;
        let refused = connect(&pair.beta).and_then(|mut client| Ok(write(&mut client, 2)?));
        ensure!(refused.is_err(), "it has written without a right");
        let mut own = connect(&pair.alpha)?;
        check(&mut own, 1)
    });
}

#[test]
fn orders_about_attachments_that_cannot_be_carried_out_are_refused_by_name() {
    play_pair(|pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let attach_there = ["volume", "attach", "v", "--at", "beta"];
        check_refused(alpha, &["volume", "attach", "v", "--at", "nowhere"], &["\"nowhere\"", "beta"])?;
        check_refused(alpha, &["volume", "attach", "v", "--at", "alpha"], &["\"alpha\" is this host"])?;
        check_refused(alpha, &["volume", "attach", "w", "--at", "beta"], &["no volume \"w\""])?;
        check_refused(alpha, &["volume", "detach", "v", "--at", "beta"], &["not attached at host \"beta\""])?;
        beta.create_volume(DISK_BYTES)?;
        check_refused(alpha, &attach_there, &["\"beta\" refuses", "a volume \"v\" exists"])?;
        ensure!(alpha.volume()?.attachments.is_empty(), "a refused order leaves nothing");
        beta.sterna(["volume", "remove", "v"])?.success()?;
        alpha.sterna(attach_there)?.success()?;
        check_refused(alpha, &attach_there, &["attached at host \"beta\" already"])?;
        check_refused(alpha, &["volume", "remove", "v"], &["is attached at \"beta\"", "volume detach v"])?;
        check_refused(alpha, &["host", "remove", "beta"], &["volume detach v"])?;
        check_refused(beta, &["host", "remove", "alpha"], &["volume detach v"])?;
        let here = ["is attached here", "volume detach v"];
        check_refused(beta, &["volume", "remove", "v"], &here)?;
        check_refused(beta, &["volume", "resize", "v", "64MiB"], &here)?;
        check_refused(beta, &["migrate", "v", "--to", "alpha"], &here)?;
        check_refused(beta, &["volume", "attach", "v", "--at", "alpha"], &here)?;
        check_refused(alpha, &["standby", "add", "v", "--to", "beta:a"], &["a volume \"v\" exists"])?;
        let client = guest::connect(&beta.export()?)?;
        check_refused(
            alpha,
            &["volume", "detach", "v", "--at", "beta"],
            &["\"beta\" refuses", "1 connection"],
        )?;
        check_refused(beta, &["volume", "detach", "v"], &["1 connection"])?;
        drop(client);
        let ended: DetachedVolume = beta.ask(&["volume", "detach", "v"])?;
        ensure!(ended.host == "beta", "{ended:?}");
        until("the owner hears of it", || Ok(alpha.volume()?.attachments.is_empty().then_some(())))?;
        ensure!(beta.volume().is_err(), "nothing of it is left");
        check_refused(beta, &["volume", "detach", "v"], &["no volume \"v\""])?;
        alpha.sterna(attach_there)?.success()?;
        alpha.sterna(["volume", "detach", "v", "--at", "beta"])?.success()?;
        ensure!(beta.volume().is_err(), "nothing of it is left");
        alpha.sterna(["volume", "remove", "v"])?.success().map(drop)
    });
}

#[test]
fn clients_of_a_volume_that_is_attached_for_reading_read_and_the_volume_does_not_go_there() {
    play_pair(|pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.create_volume(DISK_BYTES)?;
        let mut writer = connect(alpha)?;
        write(&mut writer, 5)?;
        let order = ["volume", "attach", "v", "--at", "beta", "--read-only"];
        let given: Volume = alpha.ask(&order)?;
        ensure!(given.attachments[0].read_only, "{given:?}");
        let mut reader = connect(beta)?;
        ensure!(reader.export().read_only, "its clients may only read");
        check(&mut reader, 5)?;
        check_refused(alpha, &["migrate", "v", "--to", "beta"], &["for reading only", "volume detach v"])?;
        // A foreign client sees the same.
        let uri = beta.volume()?.uri;
        let read = format!("read -P 5 0 {WRITE_BYTES}");
        Program::qemu_io().args(["-r", "-f", "raw", "-c", &read, &uri]).succeed().map(drop)
    });
}

#[test]
fn an_order_without_an_answer_is_given_again() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        pair.link.set(LinkState::BlackHole);
        let order = ["volume", "attach", "v", "--at", "beta"];
        check_refused(&pair.alpha, &order, &["\"beta\""])?;
        pair.link.set(LinkState::Up);
        until("the order to be carried out", || {
            let said = pair.alpha.sterna(order)?;
            // What was under way may have arrived meanwhile.
            Ok(said.success().is_ok().then_some(()))
        })?;
        let guest = guest::start(&pair.beta.export()?, FILL_BYTES)?;
        guest::until_worked(&guest, REQUESTS)?;
        guest::stop_and_verify(guest)?;
        // A host that is lost is detached by force.
        pair.beta.kill()?;
        pair.alpha.sterna(["volume", "detach", "v", "--at", "beta", "--force"])?.success()?;
        pair.beta.start()?;
        until("the hosts to be connected", || {
            Ok(pair.beta.sterna(["volume", "detach", "v"])?.success().is_ok().then_some(()))
        })
    });
}

/// Connects a client that gives up soon.
fn connect(host: &Host) -> anyhow::Result<Client> {
    let options = ClientOptions { answer_deadline: SOON, ..ClientOptions::default() };
    Ok(Client::connect(&host.export()?, options)?)
}

/// Writes one byte value over the beginning of the disk.
fn write(client: &mut Client, byte: u8) -> Result<(), ClientError> {
    let data = vec![byte; WRITE_BYTES];
    let write = Operation::Write { offset: 0, data, durability: WriteDurability::Volatile };
    client.perform(write).map(drop)
}

/// Checks the content of the beginning of the disk.
fn check(client: &mut Client, byte: u8) -> anyhow::Result<()> {
    let read = client.perform(Operation::Read { offset: 0, buffer: vec![0; WRITE_BYTES] })?;
    let Operation::Read { buffer, .. } = read else { anyhow::bail!("not a read: {read:?}") };
    ensure!(buffer == [byte; WRITE_BYTES], "{} instead of {byte}", buffer[0]);
    Ok(())
}

/// Two clients hand over as two QEMUs of a migration do: the second one is connected, and has read, while the first one writes.
fn hand_over(pair: &Pair, from: &Host, to: &Host) -> anyhow::Result<()> {
    let mut source = connect(from)?;
    write(&mut source, 1)?;
    let mut target = Client::connect(&to.export()?, ClientOptions::default())?;
    check(&mut target, 1)?;
    // The source is not shut out, whatever the target reads, and the target sees what is answered.
    for byte in 2..10 {
        write(&mut source, byte)?;
        check(&mut target, byte)?;
    }
    pair.link.set(LinkState::BlackHole);
    let late = write(&mut source, 10);
    drop(source);
    if late.is_ok() {
        // The source is at the owner. The target reaches the volume when the link is back.
        pair.link.set(LinkState::Up);
    }
    write(&mut target, 11).context("the target's first write")?;
    pair.link.set(LinkState::Up);
    until("nothing of the source is left", || {
        let left = from.statistics()?;
        Ok((left.connections + left.requests_in_flight == 0).then_some(()))
    })?;
    for _ in 0..20 {
        check(&mut target, 11)?;
        // For the time that a late write may take to the volume.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn clients_at_two_hosts_hand_over_to_each_other_and_nothing_late_lands() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        attach(&pair.alpha, "beta")?;
        hand_over(pair, &pair.beta, &pair.alpha).context("from the attached host to the owner")?;
        hand_over(pair, &pair.alpha, &pair.beta).context("from the owner to the attached host")?;
        hand_over(pair, &pair.beta, &pair.alpha).context("from the attached host to the owner once more")
    });
}
