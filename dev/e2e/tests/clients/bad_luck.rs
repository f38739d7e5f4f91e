//! Tests of clients that vanish, send garbage or come in crowds, and of commands at the wrong time.

use std::io::Write as _;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState};
use e2e::{fio, guest, play, until};
use lab::workload::random::Random;
use rustix::process::Signal;

const DISK_BYTES: u64 = 32 << 20;

#[test]
fn a_client_that_is_killed_with_requests_in_flight_harms_neither_the_migration_nor_the_next_client() {
    play(|scene| {
        let uri = scene.create_volume(DISK_BYTES)?.uri;
        for store in ["b", "a"] {
            let written = scene.statistics()?.writes;
            let fio = fio::write_and_verify(&uri, DISK_BYTES, 1).start()?;
            until("fio works", || Ok((scene.statistics()?.writes > written + 500).then_some(())))?;
            let migration = scene.begin_to_migrate(store, Some("16MiB/s"))?;
            fio.signal(Signal::KILL)?;
            drop(fio);
            until("the connection is gone", || Ok((scene.statistics()?.connections == 0).then_some(())))?;
            ensure!(scene.wait_for_migration(&migration.id)?.state == MigrationState::Moved);
            scene.check_place(store)?;
            fio::run(fio::write_and_verify(&uri, DISK_BYTES, 2)).context("the next client")?;
        }
        Ok(())
    });
}

#[test]
fn garbage_on_the_sockets_does_not_disturb_a_guest_whose_disk_moves() {
    const GARBAGE_CLIENTS: u64 = 100;
    play(|scene| {
        let volume = scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let migration = scene.begin_to_migrate("b", Some("16MiB/s"))?;
        let api = scene.address()?;
        for seed in 0..GARBAGE_CLIENTS {
            for socket in [volume.socket.as_ref(), api.path()] {
                let mut stream = UnixStream::connect(socket)?;
                // The daemon may close the connection early.
                let _ = stream.write_all(&garbage(seed));
            }
        }
        ensure!(scene.wait_for_migration(&migration.id)?.state == MigrationState::Moved);
        guest::stop_and_verify(guest)?;
        until("the garbage's connections are gone", || {
            Ok((scene.statistics()?.connections == 0).then_some(()))
        })
    });
}

/// Returns garbage. Every other one has a valid beginning.
fn garbage(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    // These are the client's flags of the fixed newstyle handshake, and the beginning of an option.
    let beginning: &[u8] = if seed.is_multiple_of(2) { b"\0\0\0\x03IHAVEOPT" } else { b"" };
    let length = random.below(4096) as usize;
    beginning.iter().copied().chain((0..length).map(|_| random.below(256) as u8)).collect()
}

#[test]
fn migrations_that_are_cancelled_half_way_leave_nothing_and_can_be_begun_again() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES)?;
        // The whole disk would take eight seconds.
        for bytes in [0, 1 << 20, 3 << 20, 6 << 20] {
            let begun = scene.begin_to_migrate("b", Some("4MiB/s"))?;
            until("enough is copied", || {
                Ok((scene.migration(&begun.id)?.bytes_copied >= bytes).then_some(()))
            })?;
            scene.sterna(["migration", "cancel", &begun.id])?.success()?;
            scene.sterna(["migration", "watch", &begun.id])?.expect(6)?;
            let ended = scene.migration(&begun.id)?;
            ensure!(
                ended.state == MigrationState::Cancelled && ended.guest == GuestLocation::Source,
                "{ended:?}"
            );
            scene.check_place("a")?;
        }
        scene.migrate("b")?;
        guest::stop_and_verify(guest)?;
        Ok(())
    });
}

#[test]
fn a_daemon_that_is_stopped_or_killed_at_any_moment_serves_the_guest_again() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES)?;
        let mut place = "a";
        let mut random = Random::new(5);
        for round in 0..16 {
            let target = if place == "a" { "b" } else { "a" };
            let migrating = scene.start_migrating(target)?;
            // It waits for a number of requests instead of a time, so each restart meets another phase on any machine.
            let requests = random.below(1200);
            guest::until_worked(&guest, requests)?;
            if round % 2 == 0 {
                scene.kill()?;
            } else {
                scene.stop()?;
            }
            scene.start()?;
            // The command survives the restart, or reports the broken connection.
            let code = migrating.wait()?.code;
            let moved = scene.volume()?.store.as_deref() == Some(target);
            ensure!(code != 0 || moved, "round {round}: told a success that is none");
            place = if moved { target } else { place };
            scene.check_place(place).with_context(|| format!("round {round}"))?;
            println!("round {round}: {requests} requests, exit {code}, volume in {place}");
        }
        let migrations: Vec<Migration> = scene.ask(&["migration", "list"])?;
        ensure!(migrations.iter().all(|migration| migration.state.has_ended()), "{migrations:?}");
        let stopped = guest::stop_and_verify(guest)?;
        scene.stop()?;
        guest::verify_image(&scene.path(&format!("{place}/v.img")), &stopped.content)
    });
}

#[test]
fn three_volumes_move_at_once() {
    const NAMES: [&str; 3] = ["one", "two", "three"];
    play(|scene| {
        let mut guests = Vec::new();
        for name in NAMES {
            let size = DISK_BYTES.to_string();
            let create = ["volume", "create", name, "--store", "a", "--size", &size];
            let volume: api::Volume = scene.ask(&create)?;
            guests.push(guest::start(&volume.uri.parse()?, DISK_BYTES)?);
        }
        for store in ["b", "a"] {
            let started = NAMES.map(|name| scene.command(["migrate", name, "--to", store])?.start());
            for migrating in started {
                migrating?.wait()?.success()?;
            }
        }
        guests.into_iter().try_for_each(|guest| guest::stop_and_verify(guest).map(drop))?;
        ensure!(scene.images("a")?.len() == NAMES.len() && scene.images("b")?.is_empty());
        Ok(())
    });
}
