//! Tests that requests which a client left behind at a host never land after its writes at another host.

use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::Volume;
use e2e::{Host, LinkState, play_pair, until};
use testbed::nbd_client::{Client, ClientError, ClientOptions, Operation, WriteDurability};

const DISK_BYTES: u64 = 1 << 20;
const WRITE_BYTES: usize = 64 << 10;
/// Time after which a client stops waiting.
const SOON: Duration = Duration::from_secs(1);
/// Longer than a promoted volume needs until it is served.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
/// Number of writes in flight, of which at least one is always unanswered.
const WRITES_IN_FLIGHT: u64 = 8;

/// Connects a client that gives up soon.
fn connect(scene: &Host) -> anyhow::Result<Client> {
    let options = ClientOptions { answer_deadline: SOON, ..ClientOptions::default() };
    Ok(Client::connect(&scene.export()?, options)?)
}

/// Returns a write of one byte value over the beginning of the disk.
fn write_of(byte: u8) -> Operation {
    Operation::Write { offset: 0, data: vec![byte; WRITE_BYTES], durability: WriteDurability::Volatile }
}

fn write(client: &mut Client, byte: u8) -> Result<(), ClientError> {
    client.perform(write_of(byte)).map(drop)
}

/// Repeats a write until no server answers.
fn write_until_left_alone(client: &mut Client, byte: u8) -> ClientError {
    let mut submit = |token| client.submit(write_of(byte), token);
    if let Err(error) = (0..WRITES_IN_FLIGHT).try_for_each(&mut submit) {
        return error;
    }
    let mut answered = Vec::new();
    loop {
        let submitted = client.complete(&mut answered).and_then(|()| {
            answered.drain(..).try_for_each(|write| client.submit(write.operation, write.token))
        });
        if let Err(error) = submitted {
            return error;
        }
    }
}

/// Checks the content of the beginning of the disk.
fn check(client: &mut Client, byte: u8) -> anyhow::Result<()> {
    let read = client.perform(Operation::Read { offset: 0, buffer: vec![0; WRITE_BYTES] })?;
    let Operation::Read { buffer, .. } = read else { anyhow::bail!("not a read: {read:?}") };
    ensure!(buffer == [byte; WRITE_BYTES], "what was left behind has landed");
    Ok(())
}

#[test]
fn write_that_is_caught_in_a_silent_link_does_not_land_over_what_its_client_writes_elsewhere() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = connect(&pair.alpha)?;
        pair.leave()?;
        write(&mut client, 1).context("write by way of the host that the volume has left")?;
        pair.link.set(LinkState::BlackHole);
        ensure!(write(&mut client, 2).is_err(), "there is nobody to answer");
        drop(client);
        let mut elsewhere = connect(&pair.beta)?;
        write(&mut elsewhere, 2)?;
        write(&mut elsewhere, 3)?;
        pair.link.set(LinkState::Up);
        until("nothing of the client is left at alpha", || Ok(pair.alpha.volume().is_err().then_some(())))?;
        check(&mut elsewhere, 3)
    });
}

#[test]
fn write_that_a_killed_host_had_sent_on_does_not_come_back_to_it_with_the_volume() {
    play_pair(|pair| {
        pair.alpha.stop()?;
        // It is killed once it owns the volume again. Its forwarded requests wait at the other host's closed gate, and would be
        // sent back from there.
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-owned")])?;
        pair.alpha.create_volume(DISK_BYTES)?;
        let options = ClientOptions { reconnect_deadline: SOON, ..ClientOptions::default() };
        let mut client = Client::connect(&pair.alpha.export()?, options)?;
        pair.leave()?;
        let writing = std::thread::spawn(move || write_until_left_alone(&mut client, 1));
        let migrating = pair.beta.start_migrating("alpha:a")?;
        ensure!(
            pair.alpha.wait_for_end()? == 137,
            "the volume's host is to be killed when it has become that"
        );
        // It resumes by itself once the hosts have contact again.
        drop(migrating);
        pair.link.set(LinkState::Cut);
        let left = writing.join().map_err(|_| anyhow::anyhow!("the client has ended in disorder"))?;
        pair.alpha.start()?;
        let mut again = connect(&pair.alpha).with_context(|| format!("connect again, after: {left}"))?;
        write(&mut again, 1)?;
        write(&mut again, 2)?;
        pair.link.set(LinkState::Up);
        until("nothing of the client is left at beta", || Ok(pair.beta.volume().is_err().then_some(())))?;
        check(&mut again, 2)
    });
}

#[test]
fn what_a_lost_owner_was_asked_for_is_answered_where_the_volume_is_promoted() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = Client::connect(&pair.alpha.export()?, ClientOptions::default())?;
        pair.leave()?;
        pair.beta.stop()?;
        // It is killed for good once the volume is complete at its first host again.
        pair.beta.start_with(&[("STERNA_FAIL_POINT", "before-released")])?;
        write(&mut client, 1)?;
        let migrating = pair.beta.start_migrating("alpha:a")?;
        let (answered, answers) = mpsc::channel();
        let writing = std::thread::spawn(move || -> anyhow::Result<Client> {
            loop {
                write(&mut client, 2)?;
                if answered.send(()).is_err() {
                    return Ok(client);
                }
            }
        });
        ensure!(
            pair.beta.wait_for_end()? == 137,
            "the owner is to be killed before it gives the volume away"
        );
        drop(migrating);
        until("what is under way is not answered", || Ok(answers.recv_timeout(SOON).is_err().then_some(())))?;
        let _: Volume = pair.alpha.ask(&["volume", "promote", "v", "--force"])?;
        answers.recv_timeout(ANSWERED_WITHIN).context("what the lost owner was asked for is answered")?;
        drop(answers);
        let mut client =
            writing.join().map_err(|_| anyhow::anyhow!("the client has ended in disorder"))??;
        check(&mut client, 2)
    });
}
