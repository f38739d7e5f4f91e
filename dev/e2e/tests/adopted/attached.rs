//! Tests that `virsh migrate` moves a domain whose disk is an attached volume, between two libvirts as they stand.

use anyhow::ensure;
use api::{Migration, MigrationState, Volume};
use e2e::libvirt::Libvirtd;
use e2e::{Host, play_pair};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest between two steps.
const REQUESTS: u64 = 100;
/// How often the domain goes there and back.
const PASSES: usize = 3;

fn move_disk(from: &Host, to: &str) -> anyhow::Result<()> {
    let moved: Migration = from.ask(&["migrate", "volume:v", "--to", &format!("{to}:a")])?;
    ensure!(moved.state == MigrationState::Moved, "{moved:?}");
    Ok(())
}

#[test]
fn a_domain_is_migrated_there_and_back_by_libvirt_with_its_disk_after_its_memory_and_ahead_of_it() {
    play_pair(|pair| {
        let (alpha, beta) = (&pair.alpha, &pair.beta);
        let Some(here) = Libvirtd::start_as(alpha, "alpha")? else { return Ok(()) };
        let Some(there) = Libvirtd::start_as(beta, "beta")? else { return Ok(()) };
        let volume = alpha.create_volume(DISK_BYTES)?;
        let console = here.domain_on_volume(alpha, &volume, FILL_BYTES)?;
        for _ in 0..PASSES {
            alpha.ask::<Volume>(&["volume", "attach", "v", "--at", "beta"])?;
            let sockets = (volume.socket.clone(), beta.volume()?.socket);
            here.migrate(&there, (&sockets.0, &sockets.1))?;
            console.work_on(REQUESTS)?;
            ensure!(beta.volume()?.attached_by.is_some(), "only the memory has moved");
            move_disk(alpha, "beta")?;
            console.work_on(REQUESTS)?;
            // On the way back the disk goes ahead.
            beta.ask::<Volume>(&["volume", "attach", "v", "--at", "alpha"])?;
            move_disk(beta, "alpha")?;
            console.work_on(REQUESTS)?;
            there.migrate(&here, (&sockets.1, &sockets.0))?;
            console.work_on(REQUESTS)?;
        }
        console.verify()?;
        console.end();
        Ok(())
    });
}
