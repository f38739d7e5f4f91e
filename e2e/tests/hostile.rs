//! Clients that mean ill: slow ones, crowds, those that vanish, never listen, or say what makes no sense. In each test a
//! guest that knows every block works on the same daemon, and its disk moves meanwhile.

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
/// What is on the disk when it begins to move; the guest writes all of it soon.
const FILLED_BYTES: u64 = 4 << 20;
/// So slow that the disk is still copied when most attacks end, and changes hands while the patient ones last.
const RATE: &str = "4MiB/s";

/// Lets a guest work on a volume that moves while `attack` does its worst, and checks that neither has suffered.
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
