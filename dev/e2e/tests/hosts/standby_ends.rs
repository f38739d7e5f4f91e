//! Tests of orders that stop or end a standby, in the wrong moment: both hosts always know who has the volumes.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, ensure};
use api::{Standby, StandbyState, Volume};
use e2e::{Host, Pair, play_pair, until};

use crate::standbys::{BLOCK_BYTES, DISK_BYTES, EVERY, add, connect, read, until_current, write};

/// Kills alpha, and waits until beta would promote, and until alpha would ask before it serves again.
pub(crate) fn lose_alpha(pair: &mut Pair, standby: &str) -> anyhow::Result<()> {
    lose_alpha_with(pair, &[standby])
}

/// Does the same with more of an order to promote.
fn lose_alpha_with(pair: &mut Pair, order: &[&str]) -> anyhow::Result<()> {
    pair.alpha.kill()?;
    // Only a host that was away for so long asks.
    std::thread::sleep(3 * EVERY);
    until("the loss is noticed", || {
        let refused = pair.beta.sterna([&["standby", "promote"], order].concat())?;
        Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
    })
}

pub(crate) fn until_replaced(host: &Host) -> anyhow::Result<()> {
    until("the source knows of the promotion", || {
        let standby: Standby = host.ask(&["standby", "show", "v"])?;
        Ok((standby.state == StandbyState::Promoted).then_some(()))
    })
}

#[test]
fn a_standby_that_is_paused_while_it_is_sent_stands_still_and_goes_on() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = connect(&pair.alpha, "v")?;
        for number in 0..2048 {
            write(&mut client, number * BLOCK_BYTES as u64, number + 1)?;
        }
        let limited = ["standby", "add", "v", "--to", "beta:a", "--every", "1s", "--bandwidth", "1MiB/s"];
        pair.alpha.sterna(limited)?.success()?;
        let sent = |host: &Host| -> anyhow::Result<u64> {
            let standby: Standby = host.ask(&["standby", "show", "v"])?;
            Ok(standby.bytes_sent.unwrap_or(0))
        };
        until("a part is sent", || Ok((sent(&pair.alpha)? > 0).then_some(())))?;
        pair.alpha.sterna(["standby", "pause", "v"])?.success()?;
        // The share of the limited rate comes back meanwhile.
        std::thread::sleep(std::time::Duration::from_secs(3));
        let paused: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
        ensure!(paused.state == StandbyState::Paused, "{paused:?}");
        pair.alpha.sterna(["standby", "set", "v", "--bandwidth", "none"])?.success()?;
        pair.alpha.sterna(["standby", "resume", "v"])?.success()?;
        until_current(&pair.alpha).map(drop)
    });
}

#[test]
fn a_promotion_is_known_at_the_source_although_the_standby_was_removed() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 1)?;
        add(pair, &["v"])?;
        let kept = pair.alpha.sterna(["volume", "remove", "v"])?;
        ensure!(kept.code == 4 && kept.stderr.contains("sterna standby remove v@beta"), "{kept:?}");
        let points: Standby = pair.beta.ask(&["standby", "show", "v"])?;
        let newest = points.points.last().context("there is a recovery point")?.name.clone();
        lose_alpha(pair, "v")?;
        // The newest point has a name like others.
        pair.beta
            .sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha", "--point", &newest])?
            .success()?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        pair.beta.sterna(["standby", "remove", "v"])?.success()?;
        let left: Vec<Standby> = pair.beta.ask(&["standby", "list"])?;
        ensure!(left.is_empty(), "{left:?}");
        for _ in 0..2 {
            pair.alpha.start()?;
            until_replaced(&pair.alpha)?;
            pair.alpha.kill()?;
            // Beta remembers, too.
            pair.beta.kill()?;
            pair.beta.start()?;
        }
        pair.alpha.start()?;
        until_replaced(&pair.alpha)?;
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        let there: Volume = pair.beta.ask(&["volume", "show", "v"])?;
        ensure!(there.size_bytes == DISK_BYTES, "{there:?}");
        until("beta has forgotten it", || {
            let is_empty = std::fs::read_dir(pair.beta.path("data/standbys"))?.next().is_none();
            Ok(is_empty.then_some(()))
        })
    });
}

#[test]
fn a_copy_that_its_source_has_forgotten_goes_before_another_is_kept() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 1)?;
        add(pair, &["v"])?;
        // The source forgets it while its host is away.
        pair.beta.kill()?;
        pair.alpha.sterna(["standby", "remove", "v", "--force"])?.success()?;
        pair.beta.start()?;
        // Two copies would be two that can be promoted.
        until("the other host says what it has", || {
            let refused = pair.alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?;
            ensure!(refused.code != 0, "{refused:?}");
            Ok(refused.stderr.contains("sterna standby remove v@alpha --force").then_some(()))
        })?;
        pair.beta.sterna(["standby", "remove", "v@alpha", "--force"])?.success()?;
        add(pair, &["v"]).map(drop)
    });
}

#[test]
fn a_volume_whose_name_is_taken_is_promoted_under_another_one() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 7)?;
        add(pair, &["v"])?;
        pair.beta.create_volume(DISK_BYTES)?;
        lose_alpha_with(pair, &["v", "--name", "other"])?;
        let taken = pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
        ensure!(taken.code == 4 && taken.stderr.contains("\"v\""), "{taken:?}");
        for wrong in ["v", "w=other", "v=in/valid"] {
            let refused = pair.beta.sterna([
                "standby",
                "promote",
                "v",
                "--force",
                "--source-is-off",
                "alpha",
                "--name",
                wrong,
            ])?;
            ensure!(refused.code != 0, "{wrong}: {refused:?}");
        }
        let promoted: Standby = pair.beta.ask(&[
            "standby",
            "promote",
            "v",
            "--force",
            "--source-is-off",
            "alpha",
            "--name",
            "other",
        ])?;
        ensure!(promoted.volumes == ["other"], "{promoted:?}");
        // The name is durable, and the order again finds everything done.
        pair.beta.kill()?;
        pair.beta.start()?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        let renamed = pair.beta.sterna([
            "standby",
            "promote",
            "v",
            "--force",
            "--source-is-off",
            "alpha",
            "--name",
            "third",
        ])?;
        ensure!(renamed.code == 4, "{renamed:?}");
        let there = until("it is served again", || Ok(connect(&pair.beta, "other").ok()));
        ensure!(read(&mut there?, 0)? == 7, "it has another content");
        ensure!(read(&mut connect(&pair.beta, "v")?, 0)? == 0, "the other volume has changed");
        Ok(())
    });
}

#[test]
fn a_program_that_switches_the_lost_host_off_runs_last_and_has_to_succeed() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 7)?;
        add(pair, &["v"])?;
        let (program, ran) = (pair.beta.path("fence"), pair.beta.path("fenced"));
        let fence = |status: i32| -> anyhow::Result<()> {
            let script = format!("#!/bin/sh\necho \"$*\" >>{}\nexit {status}\n", ran.display());
            std::fs::write(&program, script)?;
            Ok(std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?)
        };
        fence(1)?;
        let path = program.to_str().context("a path in UTF-8")?;
        let order = ["standby", "promote", "v", "--force", "--fence", path];
        // A host that answers is not switched off.
        let refused = pair.beta.sterna(order)?;
        ensure!(refused.code == 4 && refused.stderr.contains("can be reached"), "{refused:?}");
        lose_alpha(pair, "v")?;
        let unproved = pair.beta.sterna(["standby", "promote", "v", "--force"])?;
        ensure!(unproved.code == 2 && unproved.stderr.contains("--source-is-off"), "{unproved:?}");
        let wrong = ["standby", "promote", "v", "--force", "--source-is-off", "gamma"];
        let refused = pair.beta.sterna(wrong)?;
        ensure!(refused.code == 4 && refused.stderr.contains("\"alpha\""), "{refused:?}");
        // One that would be refused anyway switches nothing off.
        let refused = pair.beta.sterna([&order[..], &["--older-than-ok", "1s"]].concat())?;
        ensure!(refused.code == 4 && refused.stderr.contains("s old"), "{refused:?}");
        ensure!(!ran.exists(), "a program ran in vain");

        let failed = pair.beta.sterna(order)?;
        ensure!(failed.code == 4 && failed.stderr.contains("nothing is promoted"), "{failed:?}");
        ensure!(std::fs::read_to_string(&ran)? == "alpha\n");
        let standby: Standby = pair.beta.ask(&["standby", "show", "v"])?;
        ensure!(standby.state != StandbyState::Promoted, "{standby:?}");
        fence(0)?;
        let promoted: Standby = pair.beta.ask(&order)?;
        ensure!(promoted.state == StandbyState::Promoted, "{promoted:?}");
        // What is promoted is promoted: nothing is switched off again.
        let _: Standby = pair.beta.ask(&order)?;
        ensure!(std::fs::read_to_string(&ran)? == "alpha\nalpha\n");
        let served = until("it is served", || Ok(connect(&pair.beta, "v").ok()));
        ensure!(read(&mut served?, 0)? == 7, "it has another content");
        Ok(())
    });
}
