//! Tests of hostile clients: slow ones, crowds, and clients that vanish, never read, or send garbage. In each test a guest that
//! knows every block uses the same daemon, and its disk moves meanwhile.

#[path = "hostile/api.rs"]
mod api_clients;
#[path = "hostile/nbd.rs"]
mod nbd_clients;
#[path = "hostile/raw.rs"]
mod raw;

use anyhow::ensure;
use api::{MigrationState, Volume};
use e2e::{Host, guest, play, until};

const DISK_BYTES: u64 = 16 << 20;
/// Bytes on the disk when it begins to move. The guest soon writes all of it.
const FILLED_BYTES: u64 = 4 << 20;
/// A rate at which the copy outlasts most attacks, and the handover happens during the longest ones.
const RATE: &str = "4MiB/s";

/// Runs `attack` while a guest works on a moving volume, and checks that neither is affected.
fn undisturbed(attack: impl FnOnce(&Host, &Volume) -> anyhow::Result<()>) {
    play(|scene| {
        let volume = scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, FILLED_BYTES)?;
        let migration = scene.begin_to_migrate("b", Some(RATE))?;
        attack(scene, &volume)?;
        let ended = scene.wait_for_migration(&migration.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        guest::stop_and_verify(guest)?;
        until("the attack's connections are gone", || Ok((connections(scene)? == 0).then_some(())))
    });
}

fn connections(scene: &Host) -> anyhow::Result<usize> {
    Ok(scene.statistics()?.connections)
}
