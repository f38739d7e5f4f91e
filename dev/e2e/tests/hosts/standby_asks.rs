//! Tests of hosts that come back: they ask before they serve what may have been promoted meanwhile.

use std::time::Duration;

use anyhow::ensure;
use api::{RemovedVolume, Standby, StandbyState, Volume, VolumeState};
use e2e::{Host, Pair, Program, play_pair, until};
use rustix::process::Signal;

use crate::standby_ends::{lose_alpha, until_replaced};
use crate::standbys::{DISK_BYTES, add, connect, read, until_current, write};

/// Longer than two intervals: a host that was away for so long asks.
const LONG: Duration = Duration::from_secs(3);

fn until_waiting(host: &Host, words: &str) -> anyhow::Result<()> {
    until("the volume waits", || {
        let volume: Volume = host.ask(&["volume", "show", "v"])?;
        ensure!(volume.state != VolumeState::Serving, "{volume:?}");
        Ok(volume.message.is_some_and(|reason| reason.contains(words)).then_some(()))
    })
}

fn until_served(host: &Host) -> anyhow::Result<()> {
    until("the volume is served", || {
        let volume: Volume = host.ask(&["volume", "show", "v"])?;
        Ok((volume.state == VolumeState::Serving).then_some(()))
    })
}

/// Makes a volume with a standby, which has one write.
fn begin(pair: &Pair) -> anyhow::Result<()> {
    pair.alpha.create_volume(DISK_BYTES)?;
    write(&mut connect(&pair.alpha, "v")?, 0, 1)?;
    add(pair, &["v"])?;
    // The write may follow the first copy.
    std::thread::sleep(LONG);
    until_current(&pair.alpha).map(drop)
}

#[test]
fn a_host_that_comes_back_after_a_promotion_serves_nothing_and_can_yield() {
    play_pair(|pair| {
        begin(pair)?;
        lose_alpha(pair, "v")?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        write(&mut connect(&pair.beta, "v")?, 0, 2)?;
        pair.alpha.start()?;
        until_replaced(&pair.alpha)?;
        until_waiting(&pair.alpha, "sterna volume yield v")?;
        // Without the standby nothing would hold it.
        let removed = pair.alpha.sterna(["standby", "remove", "v", "--force"])?;
        ensure!(removed.code == 4 && removed.stderr.contains("sterna volume yield v"), "{removed:?}");
        let unasked = pair.alpha.sterna(["volume", "promote", "v", "--unasked"])?;
        ensure!(unasked.code == 4 && unasked.stderr.contains("--force"), "{unasked:?}");
        // It is recorded: nobody has to be asked again.
        pair.beta.kill()?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until_waiting(&pair.alpha, "sterna volume yield v")?;
        pair.beta.start()?;
        // The hosts have to be connected again for that.
        let given_up: Vec<RemovedVolume> =
            until("it is given up", || Ok(pair.alpha.ask(&["volume", "yield", "v"]).ok()))?;
        ensure!(given_up.len() == 1 && std::fs::exists(&given_up[0].image)?, "{given_up:?}");
        let left: Vec<Standby> = pair.alpha.ask(&["standby", "list"])?;
        ensure!(left.is_empty(), "{left:?}");
        let found = read(&mut connect(&pair.beta, "v")?, 0)?;
        ensure!(found == 2, "{found}");
        until("beta has heard it", || {
            let standby: Standby = pair.beta.ask(&["standby", "show", "v"])?;
            Ok(standby.reason.is_some_and(|reason| reason.contains("sterna standby reprotect")).then_some(()))
        })?;
        // Nobody has to be told any more.
        pair.beta.sterna(["standby", "remove", "v"])?.success()?;
        let left: Vec<Standby> = pair.beta.ask(&["standby", "list"])?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    });
}

#[test]
fn a_promotion_that_is_given_up_lets_the_first_host_serve() {
    play_pair(|pair| {
        begin(pair)?;
        let early = pair.beta.sterna(["volume", "yield", "v"])?;
        ensure!(early.code == 4 && early.stderr.contains("was not promoted here"), "{early:?}");
        lose_alpha(pair, "v")?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        pair.alpha.start()?;
        until_replaced(&pair.alpha)?;
        pair.beta.sterna(["volume", "yield", "v"])?.success()?;
        until_served(&pair.alpha)?;
        let found = read(&mut connect(&pair.alpha, "v")?, 0)?;
        ensure!(found == 1, "{found}");
        // What was recorded of the promotion is gone as well.
        pair.alpha.kill()?;
        // Only a host that was away for so long asks.
        std::thread::sleep(LONG);
        pair.alpha.start()?;
        until_served(&pair.alpha)?;
        pair.alpha.sterna(["standby", "remove", "v"])?.success()?;
        std::fs::remove_file(pair.beta.path("a/v.img"))?;
        add(pair, &["v"]).map(drop)
    });
}

#[test]
fn a_host_waits_for_the_silent_host_of_a_standby_or_for_an_order() {
    play_pair(|pair| {
        begin(pair)?;
        let lose_both = |pair: &mut Pair| -> anyhow::Result<()> {
            pair.beta.kill()?;
            pair.alpha.kill()?;
            // Only a host that was away for so long asks.
            std::thread::sleep(LONG);
            pair.alpha.start()?;
            until_waiting(&pair.alpha, "has not answered")
        };
        lose_both(pair)?;
        pair.beta.start()?;
        until_served(&pair.alpha)?;
        lose_both(pair)?;
        pair.alpha.sterna(["volume", "promote", "v", "--unasked"])?.success()?;
        until_served(&pair.alpha)?;
        let again = pair.alpha.sterna(["volume", "promote", "v", "--unasked"])?;
        ensure!(again.code == 4 && again.stderr.contains("waits for no host"), "{again:?}");
        pair.alpha.sterna(["standby", "set", "v", "--if-silent", "serve"])?.success()?;
        pair.beta.start()?;
        lose_both(pair)?;
        until_served(&pair.alpha)
    });
}

#[test]
fn a_daemon_that_was_away_for_a_moment_asks_nobody() {
    play_pair(|pair| {
        begin(pair)?;
        pair.alpha.sterna(["standby", "set", "v", "--every", "60s"])?.success()?;
        pair.beta.kill()?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        until_served(&pair.alpha)
    });
}

/// Stops alpha's daemon with a signal until it counts as lost, and promotes beta's standby meanwhile.
fn promote_while_frozen(pair: &Pair, meanwhile: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    pair.alpha.signal(Signal::STOP)?;
    until("the loss is noticed", || {
        let refused = pair.beta.sterna(["standby", "promote", "v"])?;
        Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
    })?;
    meanwhile()?;
    pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
    pair.alpha.signal(Signal::CONT)
}

#[test]
fn a_permission_ends_while_an_image_is_locked() {
    play_pair(|pair| {
        begin(pair)?;
        pair.alpha.kill()?;
        // Only a host that was away for so long asks.
        std::thread::sleep(LONG);
        let image = pair.alpha.path("a/v.img");
        let socket = pair.alpha.path("other.sock");
        let other = Program::of_package("qemu-nbd", "qemu-utils")
            .args(["--format", "raw", "--persistent", "--socket"])
            .args([&socket, &image])
            .start()?;
        until("another program has the image", || Ok(socket.exists().then_some(())))?;
        pair.alpha.start()?;
        until_waiting(&pair.alpha, "in use by")?;
        promote_while_frozen(pair, || {
            // A permission counts for five seconds.
            std::thread::sleep(Duration::from_secs(6));
            drop(other);
            Ok(())
        })?;
        until_waiting(&pair.alpha, "sterna volume yield v")
    });
}

#[test]
fn volumes_wait_if_what_is_known_of_standbys_is_damaged() {
    play_pair(|pair| {
        begin(pair)?;
        pair.beta.kill()?;
        pair.alpha.kill()?;
        for entry in std::fs::read_dir(pair.alpha.path("data/standbys"))? {
            let path = entry?.path();
            if path.to_str().is_some_and(|path| path.ends_with(".source.json")) {
                std::fs::write(path, "garbage")?;
            }
        }
        // Only a host that was away for so long asks.
        std::thread::sleep(LONG);
        pair.alpha.start()?;
        until_waiting(&pair.alpha, "cannot be read")?;
        // What is made now was promoted nowhere.
        pair.alpha.sterna(["volume", "create", "w", "--store", "a", "--size", "1MiB"])?.success()?;
        drop(connect(&pair.alpha, "w")?);
        pair.alpha.sterna(["volume", "promote", "v", "--unasked"])?.success()?;
        until_served(&pair.alpha)
    });
}

#[test]
fn two_hosts_that_serve_the_same_volume_both_say_so_until_one_gives_it_up() {
    play_pair(|pair| {
        begin(pair)?;
        promote_while_frozen(pair, || Ok(()))?;
        for host in [&pair.alpha, &pair.beta] {
            until("it is said", || {
                let standby: Standby = host.ask(&["standby", "show", "v"])?;
                Ok((standby.state == StandbyState::Diverged).then_some(()))
            })?;
            let health = host.sterna(["health"])?;
            ensure!(health.code == 10 && health.stdout.contains("sterna volume yield v"), "{health:?}");
            let removed = host.sterna(["standby", "remove", "v"])?;
            ensure!(removed.code == 4 && removed.stderr.contains("sterna volume yield v"), "{removed:?}");
        }
        pair.alpha.sterna(["volume", "yield", "v"])?.success()?;
        until("nothing is wrong any more", || Ok((pair.beta.sterna(["health"])?.code == 0).then_some(())))?;
        let last = pair.beta.sterna(["volume", "yield", "v"])?;
        ensure!(last.code == 4 && last.stderr.contains("these are the only ones"), "{last:?}");
        Ok(())
    });
}

#[test]
fn a_host_that_serves_hears_that_the_other_one_has_given_up_and_does_not_give_up_as_well() {
    play_pair(|pair| {
        begin(pair)?;
        promote_while_frozen(pair, || Ok(()))?;
        until("it is said", || {
            let standby: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
            Ok((standby.state == StandbyState::Diverged).then_some(()))
        })?;
        pair.beta.sterna(["volume", "yield", "v"])?.success()?;
        let both = pair.alpha.sterna(["volume", "yield", "v"])?;
        ensure!(both.code == 4 && both.stderr.contains("it has given them up itself"), "{both:?}");
        until("alpha has heard it", || {
            let standby: Standby = pair.alpha.ask(&["standby", "show", "v"])?;
            let reason = standby.reason.unwrap_or_default();
            Ok((standby.state != StandbyState::Diverged && reason.contains("has given up")).then_some(()))
        })?;
        let found = read(&mut connect(&pair.alpha, "v")?, 0)?;
        ensure!(found == 1, "{found}");
        pair.alpha.sterna(["standby", "remove", "v"])?.success()?;
        std::fs::remove_file(pair.beta.path("a/v.img"))?;
        add(pair, &["v"])?;
        until_current(&pair.alpha).map(drop)
    });
}

#[test]
fn nothing_is_given_up_for_a_host_that_does_not_have_the_volumes_any_more() {
    play_pair(|pair| {
        begin(pair)?;
        lose_alpha(pair, "v")?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        pair.alpha.start()?;
        until_replaced(&pair.alpha)?;
        pair.beta.sterna(["volume", "remove", "v", "--keep-image"])?.success()?;
        for how in [&["volume", "yield", "v"][..], &["volume", "yield", "v", "--unasked"]] {
            let refused = pair.alpha.sterna(how)?;
            ensure!(refused.code == 4 && refused.stderr.contains("does not have the volume"), "{refused:?}");
        }
        // The content that is left is served by order.
        pair.alpha.sterna(["volume", "promote", "v", "--unasked", "--force"])?.success()?;
        until_served(&pair.alpha)
    });
}

#[test]
fn nothing_is_given_up_while_the_other_host_is_silent_unless_that_is_ordered() {
    play_pair(|pair| {
        begin(pair)?;
        lose_alpha(pair, "v")?;
        pair.beta.sterna(["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?.success()?;
        pair.alpha.start()?;
        until_replaced(&pair.alpha)?;
        pair.beta.kill()?;
        until("beta is missed", || {
            let early = pair.alpha.sterna(["volume", "yield", "v"])?;
            ensure!(early.code == 4 && early.stderr.contains("--unasked"), "{early:?}");
            Ok((!early.stderr.contains("within")).then_some(()))
        })?;
        pair.alpha.sterna(["volume", "yield", "v", "--unasked"])?.success()?;
        pair.beta.start()?;
        let found = read(&mut connect(&pair.beta, "v")?, 0)?;
        ensure!(found == 1, "{found}");
        Ok(())
    });
}
