//! Tests of standbys whose volumes move to a third host: they follow, and nobody promotes beside the host that has the volumes.

use anyhow::ensure;
use api::{Migration, MigrationState, Standby, StandbyState};
use e2e::trio::play_trio;
use e2e::{Host, until};
use testbed::nbd_client::{Operation, WriteDurability};

use crate::standby_ends::until_replaced;
use crate::standbys::{DISK_BYTES, EVERY, connect, read, until_current, write};

const FILL_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// Less than a tenth of what a whole copy sends.
const DIFFERENCE_BYTES_MAX: u64 = 1 << 20;

/// Makes a volume with content at the first host, and a standby of it at the second one.
fn begin(alpha: &Host) -> anyhow::Result<()> {
    alpha.create_volume(DISK_BYTES)?;
    let mut client = connect(alpha, "v")?;
    for offset in (0..FILL_BYTES).step_by(CHUNK_BYTES) {
        let data = vec![u8::try_from(offset >> 20)?; CHUNK_BYTES];
        client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
    }
    drop(client);
    alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?.success()?;
    until_current(alpha).map(drop)
}

fn shown(host: &Host) -> anyhow::Result<Standby> {
    host.ask(&["standby", "show", "v"])
}

/// Waits until a host is the source of the standby, and that has everything.
fn until_followed(host: &Host) -> anyhow::Result<Standby> {
    until("the standby has followed", || Ok((!sources(host)?.is_empty()).then_some(())))?;
    until_current(host)
}

fn sources(host: &Host) -> anyhow::Result<Vec<Standby>> {
    host.ask(&["standby", "list"])
}

/// Compares the image of the volume's present host with that of the standby.
fn compare(owner: &Host, beta: &Host, id: &str) -> anyhow::Result<()> {
    until_current(owner)?;
    let there = beta.path("a").join(".sterna-standbys").join(id).join("image-0");
    let same = std::fs::read(owner.path("a/v.img"))? == std::fs::read(there)?;
    ensure!(same, "the standby differs");
    Ok(())
}

#[test]
fn a_standby_follows_its_volume_to_a_third_host_and_back_and_is_sent_only_the_difference() {
    play_trio(|[alpha, beta, gamma]| {
        begin(alpha)?;
        let id = shown(alpha)?.id;
        write(&mut connect(alpha, "v")?, 0, 1)?;
        alpha.sterna(["migrate", "v", "--to", "gamma:a"])?.success()?;
        let followed = until_followed(gamma)?;
        let sent = followed.bytes_sent.unwrap_or(u64::MAX);
        ensure!(followed.id == id && sent < DIFFERENCE_BYTES_MAX, "{followed:?}");
        ensure!(sources(alpha)?.is_empty(), "{:?}", sources(alpha)?);
        let kept = shown(beta)?;
        ensure!(kept.host == "gamma" && !kept.points.is_empty(), "{kept:?}");
        write(&mut connect(gamma, "v")?, 4096, 2)?;
        // The write is in the next cut.
        std::thread::sleep(2 * EVERY);
        compare(gamma, beta, &id)?;
        // A host that comes back asks there, too.
        gamma.kill()?;
        // Longer than two intervals: it asks.
        std::thread::sleep(3 * EVERY);
        gamma.start()?;
        until_current(gamma)?;
        gamma.sterna(["migrate", "v", "--to", "alpha:a"])?.success()?;
        let back = until_followed(alpha)?;
        ensure!(back.bytes_sent.unwrap_or(u64::MAX) < DIFFERENCE_BYTES_MAX, "{back:?}");
        write(&mut connect(alpha, "v")?, 8192, 3)?;
        // The write is in the next cut.
        std::thread::sleep(2 * EVERY);
        compare(alpha, beta, &id)?;
        // It may move to the standby's host, too.
        alpha.sterna(["migrate", "v", "--to", "beta:a"])?.success()?;
        let found = read(&mut connect(beta, "v")?, 8192)?;
        ensure!(found == 3, "{found}");
        Ok(())
    });
}

#[test]
fn a_promotion_is_asked_about_the_host_that_has_the_volume_now() {
    play_trio(|[alpha, beta, gamma]| {
        begin(alpha)?;
        alpha.sterna(["migrate", "v", "--to", "gamma:a"])?.success()?;
        until_followed(gamma)?;
        alpha.kill()?;
        let beside = beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
        ensure!(beside.code == 4, "{beside:?}");
        gamma.kill()?;
        until("the loss is noticed", || {
            let refused = beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off gamma").then_some(()))
        })?;
        let beside = beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
        ensure!(beside.code == 4 && beside.stderr.contains("are at host \"gamma\""), "{beside:?}");
        beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "gamma"])?.success()?;
        drop(connect(beta, "v")?);
        // The lost host hears of it, and serves nothing.
        // Longer than two intervals: it asks.
        std::thread::sleep(3 * EVERY);
        gamma.start()?;
        until_replaced(gamma)?;
        gamma.sterna(["volume", "yield", "v"])?.success()?;
        alpha.start()?;
        ensure!(sources(alpha)?.is_empty(), "{:?}", sources(alpha)?);
        Ok(())
    });
}

#[test]
fn a_volume_does_not_leave_unheard_unless_that_is_ordered_and_its_standby_follows_later() {
    play_trio(|[alpha, beta, gamma]| {
        begin(alpha)?;
        beta.kill()?;
        until("the host of the standby is missed", || {
            let refused = alpha.sterna(["migrate", "v", "--to", "gamma:a"])?;
            ensure!(refused.code == 4 && refused.stderr.contains("--standby-untold"), "{refused:?}");
            let dry = alpha.sterna(["migrate", "v", "--to", "gamma:a", "--dry-run"])?;
            Ok(dry.stdout.contains("--standby-untold").then_some(()))
        })?;
        alpha.sterna(["migrate", "v", "--to", "gamma:a", "--standby-untold"])?.success()?;
        until("it says what it waits for", || {
            let reason = shown(alpha)?.reason.unwrap_or_default();
            Ok(reason.contains("have left for host \"gamma\"").then_some(()))
        })?;
        alpha.kill()?;
        beta.start()?;
        alpha.start()?;
        until_followed(gamma)?;
        until("the former host has forgotten it", || Ok(sources(alpha)?.is_empty().then_some(())))
    });
}

#[test]
fn a_migration_that_is_cancelled_leaves_the_standby_where_it_is() {
    play_trio(|[alpha, beta, _]| {
        begin(alpha)?;
        let begun: Migration =
            alpha.ask(&["migrate", "v", "--to", "gamma:a", "--bandwidth", "1MiB/s", "--detach"])?;
        until("it is known at beta", || {
            let reason = shown(beta)?.reason.unwrap_or_default();
            Ok(reason.contains("are leaving for host \"gamma\"").then_some(()))
        })?;
        // Neither may have it now.
        let early = beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha,gamma"])?;
        ensure!(early.code == 4 && early.stderr.contains("can be reached"), "{early:?}");
        alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        until("it is over", || {
            let migration: Migration = alpha.ask(&["migration", "show", &begun.id])?;
            Ok((migration.state == MigrationState::Cancelled).then_some(()))
        })?;
        until("beta has heard it", || {
            let kept = shown(beta)?;
            Ok((kept.reason.is_none() && kept.state == StandbyState::Current).then_some(()))
        })?;
        ensure!(shown(alpha)?.state == StandbyState::Current, "{:?}", shown(alpha)?);
        Ok(())
    });
}

#[test]
fn nothing_is_promoted_while_any_host_that_can_be_reached_has_the_volume() {
    play_trio(|[alpha, beta, _]| {
        begin(alpha)?;
        beta.kill()?;
        alpha.sterna(["migrate", "v", "--to", "gamma:a", "--standby-untold"])?.success()?;
        alpha.kill()?;
        beta.start()?;
        // All that beta knows is that the volume was at alpha, which is off.
        until("gamma is connected", || {
            let refused = beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
            ensure!(refused.code == 4, "{refused:?}");
            Ok(refused.stderr.contains("host \"gamma\" has its volumes").then_some(()))
        })
    });
}

#[test]
fn of_a_move_that_has_not_ended_both_hosts_have_to_be_off() {
    play_trio(|[alpha, beta, gamma]| {
        begin(alpha)?;
        alpha.sterna(["migrate", "v", "--to", "gamma:a", "--bandwidth", "1MiB/s", "--detach"])?.success()?;
        until("it is known at beta", || {
            Ok(shown(beta)?.reason.is_some_and(|reason| reason.contains("are leaving for")).then_some(()))
        })?;
        gamma.kill()?;
        alpha.kill()?;
        until("both losses are noticed", || {
            let refused = beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha,gamma").then_some(()))
        })?;
        let one = beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "gamma"])?;
        ensure!(one.code == 4 && one.stderr.contains("does not suffice"), "{one:?}");
        beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "gamma,alpha"])?.success()?;
        drop(connect(beta, "v")?);
        Ok(())
    });
}

#[test]
fn a_standby_follows_a_volume_whose_blocks_follow_after_the_handover() {
    play_trio(|[alpha, beta, gamma]| {
        begin(alpha)?;
        let id = shown(alpha)?.id;
        alpha.sterna(["migrate", "v", "--to", "gamma:a", "--strategy", "post-copy"])?.success()?;
        until_followed(gamma)?;
        write(&mut connect(gamma, "v")?, 4096, 2)?;
        // The write is in the next cut.
        std::thread::sleep(2 * EVERY);
        compare(gamma, beta, &id)
    });
}

#[test]
fn a_host_that_keeps_a_standby_is_not_removed_unless_that_is_ordered() {
    play_trio(|[alpha, _, _]| {
        begin(alpha)?;
        let refused = alpha.sterna(["host", "remove", "beta"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("it keeps standbys of v"), "{refused:?}");
        alpha.sterna(["host", "remove", "beta", "--force"])?.success()?;
        Ok(())
    });
}
