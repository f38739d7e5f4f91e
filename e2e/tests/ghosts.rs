//! What a client leaves behind at a host when it goes to another one: it never lands over what the client writes there.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Scene, WireState, play_pair, until};
use lab::nbd_client::{Client, ClientError, ClientOptions, Operation, WriteDurability};

const DISK_BYTES: u64 = 1 << 20;
const WRITE_BYTES: usize = 64 << 10;

/// A client that gives up soon.
fn connect(scene: &Scene) -> anyhow::Result<Client> {
    let options = ClientOptions { answer_deadline: Duration::from_millis(300), ..ClientOptions::default() };
    Ok(Client::connect(&scene.export()?, options)?)
}

/// Writes the same byte all over the beginning of the disk.
fn write(client: &mut Client, byte: u8) -> Result<(), ClientError> {
    let (data, durability) = (vec![byte; WRITE_BYTES], WriteDurability::Volatile);
    client.perform(Operation::Write { offset: 0, data, durability }).map(drop)
}

#[test]
fn write_that_is_caught_in_a_silent_link_does_not_land_over_what_its_client_writes_elsewhere() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = connect(&pair.alpha)?;
        pair.leave()?;
        write(&mut client, 1).context("write by way of the host that the volume has left")?;
        pair.wire.set(WireState::BlackHole);
        ensure!(write(&mut client, 2).is_err(), "there is nobody to answer");
        drop(client);
        let mut elsewhere = connect(&pair.beta)?;
        write(&mut elsewhere, 2)?;
        write(&mut elsewhere, 3)?;
        pair.wire.set(WireState::Whole);
        until("nothing of the client is left at alpha", || Ok(pair.alpha.volume().is_err().then_some(())))?;
        let read = elsewhere.perform(Operation::Read { offset: 0, buffer: vec![0; WRITE_BYTES] })?;
        let Operation::Read { buffer, .. } = read else { anyhow::bail!("not a read: {read:?}") };
        ensure!(buffer == [3; WRITE_BYTES], "what was left behind has landed");
        Ok(())
    });
}
