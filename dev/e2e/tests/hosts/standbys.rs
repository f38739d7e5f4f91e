//! Tests of standbys: copies at another host that are seconds old, and what a promotion brings back.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::{Migration, MigrationState, Standby, StandbyState, Volume};
use e2e::{Host, Pair, guest, play_pair, until};
use testbed::nbd_client::{Address, Client, ClientOptions, Operation, WriteDurability};

pub(crate) const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 16 << 20;
pub(crate) const BLOCK_BYTES: usize = 4096;
/// The interval between two cuts.
pub(crate) const EVERY: Duration = Duration::from_secs(1);

pub(crate) fn add(pair: &Pair, volumes: &[&str]) -> anyhow::Result<Standby> {
    let arguments = [&["standby", "add"], volumes, &["--to", "beta:a", "--every", "1s"]].concat();
    let added: Standby = pair.alpha.ask(&arguments)?;
    until_current(&pair.alpha)?;
    Ok(added)
}

/// Waits until the standby of `v` has everything.
pub(crate) fn until_current(host: &Host) -> anyhow::Result<Standby> {
    until("the standby is current", || {
        let standby: Standby = host.ask(&["standby", "show", "v"])?;
        let has_all = standby.state == StandbyState::Current && standby.bytes_waiting.unwrap_or(0) == 0;
        Ok(has_all.then_some(standby))
    })
}

/// Returns the image of a standby at beta, by its number in the group.
fn image(pair: &Pair, standby: &Standby, number: usize) -> PathBuf {
    pair.beta.path("a").join(".sterna-standbys").join(&standby.id).join(format!("image-{number}"))
}

pub(crate) fn connect(host: &Host, volume: &str) -> anyhow::Result<Client> {
    let shown: Volume = host.ask(&["volume", "show", volume])?;
    let export: Address = shown.uri.parse()?;
    Ok(Client::connect(&export, ClientOptions::default())?)
}

pub(crate) fn write(client: &mut Client, offset: u64, number: u64) -> anyhow::Result<()> {
    let mut data = vec![1; BLOCK_BYTES];
    data[..8].copy_from_slice(&number.to_le_bytes());
    client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
    Ok(())
}

pub(crate) fn read(client: &mut Client, offset: u64) -> anyhow::Result<u64> {
    match client.perform(Operation::Read { offset, buffer: vec![0; BLOCK_BYTES] })? {
        Operation::Read { buffer, .. } => Ok(u64::from_le_bytes(buffer[..8].try_into()?)),
        other => bail!("{other:?}"),
    }
}

/// Compares the images of `v` at both hosts, while nothing is written.
pub(crate) fn compare(pair: &Pair, standby: &Standby) -> anyhow::Result<()> {
    until_current(&pair.alpha)?;
    let (here, there) = (std::fs::read(pair.alpha.path("a/v.img"))?, std::fs::read(image(pair, standby, 0))?);
    let differs =
        here.chunks(BLOCK_BYTES).zip(there.chunks(BLOCK_BYTES)).position(|(here, there)| here != there);
    ensure!(here.len() == there.len() && differs.is_none(), "block {differs:?} differs");
    Ok(())
}

#[test]
fn a_log_and_its_data_on_two_volumes_are_of_one_moment_after_the_loss_and_hardly_older() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        pair.alpha
            .sterna(["volume", "create", "w", "--store", "a", "--size", &DISK_BYTES.to_string()])?
            .success()?;
        let (mut log, mut data) = (connect(&pair.alpha, "v")?, connect(&pair.alpha, "w")?);
        add(pair, &["v", "w"])?;
        // The log is written before the data, and each write is answered before the next one begins.
        let (began, mut answered) = (Instant::now(), Vec::new());
        while began.elapsed() < 6 * EVERY {
            let number = answered.len() as u64 + 1;
            write(&mut log, number % 64 * BLOCK_BYTES as u64, number)?;
            write(&mut data, number % 64 * BLOCK_BYTES as u64, number)?;
            answered.push(began.elapsed());
        }
        pair.alpha.kill()?;
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        let promoted: Standby =
            pair.beta.ask(&["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
        ensure!(promoted.state == StandbyState::Promoted, "{promoted:?}");
        let newest = |host: &Host, volume| -> anyhow::Result<u64> {
            let mut client = connect(host, volume)?;
            let all: anyhow::Result<Vec<u64>> =
                (0..64).map(|block| read(&mut client, block * BLOCK_BYTES as u64)).collect();
            Ok(all?.into_iter().max().unwrap_or(0))
        };
        let (log, data) = (newest(&pair.beta, "v")?, newest(&pair.beta, "w")?);
        ensure!(log == data || log == data + 1, "the log has {log}, the data {data}");
        let lost = answered
            .iter()
            .skip(log as usize)
            .copied()
            .min()
            .map(|first| began.elapsed().saturating_sub(first));
        let in_time =
            answered.last().copied().zip(answered.get(log as usize)).map(|(last, first)| last - *first);
        ensure!(in_time.is_none_or(|lost| lost <= 3 * EVERY), "lost {in_time:?} of {lost:?}: {log}");
        ensure!(log > 0, "nothing came");
        Ok(())
    });
}

#[test]
fn daemons_that_are_killed_send_only_what_the_standby_lacks() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        let standby = add(pair, &["v"])?;
        compare(pair, &standby)?;
        for round in 1..=3 {
            let mut client = connect(&pair.alpha, "v")?;
            write(&mut client, round * 2 * BLOCK_BYTES as u64, round)?;
            client.perform(Operation::Flush)?;
            drop(client);
            pair.alpha.kill()?;
            pair.alpha.start()?;
            compare(pair, &standby)?;
            let sent = until_current(&pair.alpha)?.bytes_sent.context("it sends")?;
            ensure!(sent < FILL_BYTES / 4, "sent {sent} bytes again");
            pair.beta.kill()?;
            let mut client = connect(&pair.alpha, "v")?;
            write(&mut client, 1 << 20, round)?;
            drop(client);
            pair.beta.start()?;
            compare(pair, &standby)?;
        }
        Ok(())
    });
}

#[test]
fn a_planned_move_to_the_standby_s_host_sends_only_what_it_lacks() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        add(pair, &["v"])?;
        pair.alpha.sterna(["standby", "pause", "v"])?.success()?;
        let mut client = connect(&pair.alpha, "v")?;
        write(&mut client, 8 << 20, 77)?;
        drop(client);
        let moved: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        let sent = moved.bytes_moved + moved.bytes_zero;
        ensure!((4096..FILL_BYTES / 4).contains(&sent), "{moved:?}");
        let mut client = connect(&pair.beta, "v")?;
        ensure!(read(&mut client, 8 << 20)? == 77, "the last write is not there");
        drop(client);
        let used: Standby = pair.beta.ask(&["standby", "show", "v"])?;
        ensure!(used.state == StandbyState::Used, "{used:?}");
        // Its remains are removed at both hosts.
        pair.alpha.sterna(["standby", "remove", "v"])?.success()?;
        let left: Vec<Standby> = pair.beta.ask(&["standby", "list"])?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    });
}

#[test]
fn a_planned_move_that_is_cancelled_leaves_the_standby_what_it_has() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        drop(stopped.client);
        let standby = add(pair, &["v"])?;
        pair.alpha.sterna(["standby", "pause", "v"])?.success()?;
        let mut client = connect(&pair.alpha, "v")?;
        for block in 0..256 {
            write(&mut client, (8 << 20) + block * BLOCK_BYTES as u64, 77)?;
        }
        let begun = pair.alpha.begin_to_migrate("beta:a", Some("64KiB/s"))?;
        until("the source knows that the standby is used", || {
            let shown: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
            Ok((shown.state == StandbyState::Used).then_some(()))
        })?;
        // It may come back: it is neither promoted nor deleted by the way.
        let orders = [
            (&["promote", "v", "--force", "--source-is-off", "alpha"][..], "sterna migration cancel"),
            (&["remove", "v"], "--force"),
        ];
        for (order, words) in orders {
            let refused = pair.beta.sterna([&["standby"], order].concat())?;
            ensure!(refused.code == 4 && refused.stderr.contains(words), "{refused:?}");
            ensure!(refused.stderr.contains("has begun with it"), "{refused:?}");
        }
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        pair.alpha.sterna(["standby", "resume", "v"])?.success()?;
        write(&mut client, 0, 78)?;
        drop(client);
        let before = until_current(&pair.alpha)?.bytes_sent.context("it sends")?;
        compare(pair, &standby)?;
        let sent = until_current(&pair.alpha)?.bytes_sent.context("it sends")?;
        ensure!(sent < 2 * FILL_BYTES, "sent {before}, then {sent} bytes");
        ensure!(pair.beta.images("a")?.is_empty(), "images of the migration are left over");
        Ok(())
    });
}

#[test]
fn an_older_recovery_point_is_promoted_when_it_is_named() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = connect(&pair.alpha, "v")?;
        write(&mut client, 0, 1)?;
        add(pair, &["v"])?;
        let first: Standby = pair.beta.ask(&["standby", "show", "v"])?;
        let first = first.points.last().context("there is a recovery point")?.name.clone();
        for number in 2..4 {
            write(&mut client, 0, number)?;
            write(&mut client, number * BLOCK_BYTES as u64, number)?;
            until_current(&pair.alpha)?;
            // Until the next cut: each number is to be in an epoch of its own.
            std::thread::sleep(EVERY);
        }
        pair.alpha.kill()?;
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        let wrong = pair.beta.sterna([
            "standby",
            "promote",
            "v",
            "--force",
            "--source-is-off",
            "alpha",
            "--point",
            "yesterday",
        ])?;
        ensure!(wrong.code == 4 && wrong.stderr.contains("no name of a recovery point"), "{wrong:?}");
        pair.beta
            .sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha", "--point", &first])?
            .success()?;
        let mut client = connect(&pair.beta, "v")?;
        let found = (read(&mut client, 0)?, read(&mut client, 2 * BLOCK_BYTES as u64)?);
        ensure!(found == (1, 0), "{found:?}");
        // When the lost host comes back, it asks before it serves, because it was away for so long.
        std::thread::sleep(3 * EVERY);
        pair.alpha.start()?;
        until("the source knows of the promotion", || {
            let standby: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
            Ok((standby.state == StandbyState::Promoted).then_some(()))
        })
    });
}

#[test]
fn orders_that_cannot_be_carried_out_say_what_to_do() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let refused = |host: &Host, arguments: &[&str], code, words: &str| -> anyhow::Result<()> {
            let outcome = host.sterna(arguments)?;
            ensure!(outcome.code == code && outcome.stderr.contains(words), "{arguments:?}: {outcome:?}");
            Ok(())
        };
        refused(&pair.alpha, &["standby", "add", "v", "--to", "gamma"], 3, "no host \"gamma\"")?;
        refused(&pair.alpha, &["standby", "add", "x", "--to", "beta:a"], 3, "no volume \"x\"")?;
        refused(&pair.alpha, &["standby", "add", "v", "--to", "beta:nowhere"], 4, "no store \"nowhere\"")?;
        refused(
            &pair.alpha,
            &["standby", "add", "v", "--to", "beta:a", "--every", "0s"],
            2,
            "the interval is 1 s",
        )?;
        refused(&pair.alpha, &["standby", "show", "v"], 3, "sterna standby list")?;
        add(pair, &["v"])?;
        pair.alpha.sterna(["standby", "check"])?.success()?;
        refused(
            &pair.alpha,
            &["standby", "add", "v", "--to", "beta:a"],
            4,
            "has a standby at host \"beta\" already",
        )?;
        refused(&pair.alpha, &["standby", "promote", "v"], 4, "give this order at host \"beta\"")?;
        refused(
            &pair.beta,
            &["standby", "promote", "v", "--force", "--source-is-off", "alpha"],
            4,
            "can be reached",
        )?;
        refused(&pair.beta, &["standby", "pause", "v"], 4, "give this order there")?;
        pair.alpha.sterna(["standby", "pause", "v"])?.success()?;
        let late = pair.alpha.sterna(["standby", "check"])?;
        ensure!(late.code == 10 && late.stdout.contains("v@beta is paused"), "{late:?}");
        pair.alpha.sterna(["standby", "resume", "v"])?.success()?;
        pair.beta.kill()?;
        refused(&pair.alpha, &["standby", "remove", "v"], 4, "--force")?;
        pair.alpha.sterna(["standby", "remove", "v", "--force"])?.success()?;
        pair.beta.start()?;
        let left: Standby = pair.beta.ask(&["standby", "show", "v"])?;
        ensure!(left.state != StandbyState::Promoted, "{left:?}");
        pair.beta.sterna(["standby", "remove", "v", "--force"])?.success()?;
        ensure!(
            std::fs::read_dir(pair.beta.path("a/.sterna-standbys"))?.next().is_none(),
            "files are left over"
        );
        Ok(())
    });
}
