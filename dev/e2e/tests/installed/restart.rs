//! Tests of restarts of the unit by systemd, under load: sockets and connections of clients outlive the daemon.

use std::time::Duration;

use anyhow::ensure;
use e2e::throw_away_root::{ThrowAwayRoot, repository};
use e2e::{guest, program, until};
use tempfile::TempDir;
use testbed::nbd_client::{Address, Client, ClientOptions, Operation};

const RESTARTS: u32 = 20;
/// Size of the volume, and bytes that the guest fills at first.
const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 8 << 20;

/// Installs the unit, and makes the volume.
const BEGIN: &str = "groupadd --force sterna; install -d -m 755 /run/sterna /etc/sterna
    sed 's|@BINDIR@|/mnt|' /mnt/sterna.service >/etc/systemd/system/sterna.service
    systemctl daemon-reload && systemctl start sterna";

/// A system in which the unit runs, dropped before its folder.
fn system() -> anyhow::Result<Option<(ThrowAwayRoot, TempDir)>> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, to boot a system that is thrown away");
        return Ok(None);
    }
    let given = tempfile::tempdir()?;
    std::fs::copy(program::sterna()?, given.path().join("sterna"))?;
    std::fs::copy(repository().join("packaging/sterna.service"), given.path().join("sterna.service"))?;
    let root = ThrowAwayRoot::boot(given.path())?;
    root.succeed(BEGIN)?;
    root.succeed(&format!("/mnt/sterna volume create v --size {DISK_BYTES}"))?;
    Ok(Some((root, given)))
}

fn export(root: &ThrowAwayRoot) -> Address {
    Address::new(root.path("/run/sterna/volumes/v.sock"), "v")
}

fn kept(root: &ThrowAwayRoot) -> anyhow::Result<String> {
    let kept = root.succeed("systemctl show --value --property NFileDescriptorStore sterna")?;
    Ok(kept.trim().to_owned())
}

#[test]
fn twenty_restarts_break_no_connection_and_lose_nothing() -> anyhow::Result<()> {
    let Some((root, _given)) = system()? else { return Ok(()) };
    let guest = guest::start_without_reconnects(&export(&root), FILL_BYTES)?;
    let mut waits = Vec::new();
    for number in 0..RESTARTS {
        let before = guest.mark();
        root.succeed("systemctl restart sterna")?;
        ensure!(guest.failure().is_none(), "restart {number}: {:?}", guest.failure());
        guest::until_worked(&guest, 10)?;
        waits.push(guest.between(&before, &guest.mark()).longest_stall);
        // systemd keeps the socket always, and the connection only while no daemon runs.
        ensure!(kept(&root)? == "1");
    }
    waits.sort();
    println!("{RESTARTS} restarts; the guest waited {waits:?}");
    // QEMU would wait for a second before its second attempt, each time. The figures themselves depend on the machine.
    ensure!(waits[waits.len() / 2] < Duration::from_secs(1), "{waits:?}");
    guest::stop_and_verify(guest)?;
    root.succeed("/mnt/sterna volume remove v")?;
    until("nothing is kept of a volume that is gone", || Ok((kept(&root)? == "0").then_some(())))
}

#[test]
fn after_a_kill_whoever_connects_waits_for_the_next_daemon_and_is_refused_by_nobody() -> anyhow::Result<()> {
    let Some((root, _given)) = system()? else { return Ok(()) };
    let guest = guest::start(&export(&root), FILL_BYTES)?;
    for _ in 0..3 {
        // A killed process may still accept a connection until it has ended, because its ring does.
        root.succeed(
            "daemon=$(systemctl show --property MainPID --value sterna); systemctl kill --signal KILL sterna; \
             while kill -0 $daemon 2> /dev/null; do sleep 0.01; done",
        )?;
        let options = ClientOptions { reconnect_deadline: Duration::ZERO, ..ClientOptions::default() };
        let mut client = Client::connect(&export(&root), options)?;
        client.perform(Operation::Flush)?;
        root.succeed("until /mnt/sterna health; do sleep 0.1; done")?;
        ensure!(kept(&root)? == "1", "a connection would be in the midst of a request");
    }
    guest::stop_and_verify(guest)?;
    // The daemon is stopped in order, for good.
    root.succeed("systemctl stop sterna")?;
    ensure!(kept(&root)? == "0");
    ensure!(Client::connect(&export(&root), ClientOptions::default()).is_err());
    root.succeed("systemctl start sterna")?;
    Client::connect(&export(&root), ClientOptions::default())?;
    Ok(())
}
