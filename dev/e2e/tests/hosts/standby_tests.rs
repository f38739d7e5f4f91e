//! Tests of `sterna standby test`: volumes under other names that are a recovery point, for a time, beside a standby that goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{Standby, StandbyState, StandbyTest, StandbyTestState, Volume};
use e2e::{Host, Pair, play_pair, until};
use rustix::process::Signal;

use crate::standbys::{BLOCK_BYTES, DISK_BYTES, add, compare, connect, read, until_current, write};

/// Blocks that are written one after the other, again and again.
const BLOCKS: u64 = 64;

fn shown(host: &Host) -> anyhow::Result<StandbyTest> {
    let standby: Standby = host.ask(&["standby", "show", "v"])?;
    standby.test.context("it has a test")
}

/// Checks that nothing of a test is left at beta.
fn nothing_is_left(pair: &Pair) -> anyhow::Result<()> {
    let volumes: Vec<Volume> = pair.beta.ask(&["volume", "list"])?;
    ensure!(volumes.is_empty(), "{volumes:?}");
    let mut folders = vec![pair.beta.path("a")];
    folders.extend(
        std::fs::read_dir(pair.beta.path("a/.sterna-standbys"))?.map_while(Result::ok).map(|at| at.path()),
    );
    for folder in folders {
        for entry in std::fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(!name.contains("test") && !name.contains("clone"), "{name} is left");
        }
    }
    Ok(())
}

/// Writes numbers until it is told to end. Each is answered before the next is written.
fn write_numbers(host: &Host, last: &AtomicU64, is_over: &AtomicBool) -> anyhow::Result<()> {
    let mut client = connect(host, "v")?;
    while !is_over.load(Ordering::Relaxed) {
        let number = last.load(Ordering::Relaxed) + 1;
        write(&mut client, number % BLOCKS * BLOCK_BYTES as u64, number)?;
        last.store(number, Ordering::Relaxed);
    }
    Ok(())
}

/// Returns the last number of a volume, which has all before it, and none after it.
fn last_number(host: &Host, volume: &str) -> anyhow::Result<u64> {
    let mut client = connect(host, volume)?;
    let held: anyhow::Result<Vec<u64>> =
        (0..BLOCKS).map(|block| read(&mut client, block * BLOCK_BYTES as u64)).collect();
    let held = held?;
    let last = held.iter().copied().max().unwrap_or(0);
    for number in last.saturating_sub(BLOCKS - 1).max(1)..=last {
        let there = held[(number % BLOCKS) as usize];
        ensure!(there == number, "of {last} numbers, {there} is where {number} has to be");
    }
    Ok(last)
}

#[test]
fn a_test_is_one_moment_of_the_volume_and_the_standby_goes_on_beside_it() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let standby = add(pair, &["v"])?;
        let (last, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let tested = std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_numbers(&pair.alpha, &last, &is_over));
            let tested = (|| {
                let mut points = until("there are points", || {
                    let standby: Standby = pair.beta.ask(&["standby", "show", "v"])?;
                    Ok((standby.points.len() >= 3).then_some(standby.points))
                })?;
                points.remove(0);
                let mut newest = 0;
                for (number, point) in [Some(points[0].name.clone()), None].into_iter().enumerate() {
                    let name = format!("try{number}");
                    let mut order = vec!["standby", "test", "v", "--name", &name];
                    order.extend(point.iter().flat_map(|point| ["--point", point]));
                    let test: Standby = pair.beta.ask(&order)?;
                    let test = test.test.context("there is a test")?;
                    ensure!(test.state == StandbyTestState::Running && test.volumes.len() == 1, "{test:?}");
                    ensure!(point.is_none() || test.point == point, "{test:?}");
                    let there = last_number(&pair.beta, &name)?;
                    ensure!(there > newest, "the newest state is older than a point before");
                    newest = there;
                    // It is a volume like others, and stays as it is while epochs are applied.
                    let before = last.load(Ordering::Relaxed);
                    until("epochs are applied", || {
                        let standby: Standby = pair.beta.ask(&["standby", "show", "v"])?;
                        let is_newer = standby
                            .points
                            .last()
                            .is_some_and(|newest| Some(&newest.name) != test.point.as_ref());
                        Ok((is_newer && last.load(Ordering::Relaxed) > before).then_some(()))
                    })?;
                    ensure!(last_number(&pair.beta, &name)? == there, "the test has changed");
                    let mut client = connect(&pair.beta, &name)?;
                    for block in 0..2 * BLOCKS {
                        write(&mut client, block * BLOCK_BYTES as u64, u64::MAX)?;
                    }
                    let second = pair.beta.sterna(["standby", "test", "v"])?;
                    ensure!(second.code == 4 && second.stderr.contains("--end"), "{second:?}");
                    drop(client);
                    pair.beta.sterna(["standby", "test", "v", "--end"])?.success()?;
                    nothing_is_left(pair)?;
                }
                anyhow::Ok(())
            })();
            is_over.store(true, Ordering::Relaxed);
            writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
            tested
        });
        tested?;
        compare(pair, &standby)
    });
}

#[test]
fn a_test_ends_after_its_time_also_if_the_daemon_is_killed_meanwhile() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 5)?;
        add(pair, &["v"])?;
        let test: Standby = pair.beta.ask(&["standby", "test", "v", "--for", "1h"])?;
        ensure!(test.test.is_some_and(|test| test.name == "v-test"), "it has another name");
        let (taken, unknown) = (
            pair.beta.sterna(["standby", "test", "v", "--name", "w"])?,
            pair.beta.sterna(["standby", "test", "other"])?,
        );
        ensure!(taken.code == 4 && unknown.code == 3, "{taken:?} {unknown:?}");
        pair.beta.kill()?;
        pair.beta.start()?;
        ensure!(shown(&pair.beta)?.state == StandbyTestState::Running, "it does not go on");
        let there = until("it is served again", || Ok(connect(&pair.beta, "v-test").ok()));
        ensure!(read(&mut there?, 0)? == 5, "the test has another content");
        pair.beta.sterna(["standby", "test", "v", "--end"])?.success()?;
        let none = pair.beta.sterna(["standby", "test", "v", "--end"])?;
        ensure!(none.code == 3, "{none:?}");
        // A promotion would find the name taken.
        let named = pair.beta.sterna(["standby", "test", "v", "--name", "v"])?;
        ensure!(named.code == 4 && named.stderr.contains("give the test another one"), "{named:?}");
        pair.beta.sterna(["standby", "test", "v", "--for", "3s"])?.success()?;
        pair.beta.kill()?;
        // Its time passes while no daemon runs.
        std::thread::sleep(Duration::from_secs(3));
        pair.beta.start()?;
        until(
            "its time is over",
            || Ok((shown(&pair.beta)?.state == StandbyTestState::Ended).then_some(())),
        )?;
        nothing_is_left(pair)?;
        let ended = shown(&pair.beta)?;
        ensure!(ended.reason.is_some_and(|reason| reason.contains("time was over")), "it says nothing");
        until_current(&pair.alpha).map(drop)
    });
}

#[test]
fn a_test_whose_making_is_interrupted_leaves_nothing_or_goes_on() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let mut client = connect(&pair.alpha, "v")?;
        for number in 0..DISK_BYTES / BLOCK_BYTES as u64 {
            write(&mut client, number * BLOCK_BYTES as u64, number + 1)?;
        }
        let standby = add(pair, &["v"])?;
        for round in 0..10 {
            std::thread::scope(|scope| {
                let order = scope.spawn(|| pair.beta.sterna(["standby", "test", "v"]));
                let state = || shown(&pair.beta).ok().map(|test| test.state);
                let is_begun = |state| !matches!(state, None | Some(StandbyTestState::Ended));
                until("it begins", || Ok(is_begun(state()).then_some(())))?;
                // Each round is killed at another moment.
                std::thread::sleep(Duration::from_millis(round * 15));
                pair.beta.signal(Signal::KILL)?;
                // Its daemon is gone.
                let _ = order.join();
                anyhow::Ok(())
            })?;
            pair.beta.wait_for_end()?;
            pair.beta.start()?;
            let test = until("the test goes on, or is gone", || {
                let test = shown(&pair.beta)?;
                let is_settled = matches!(test.state, StandbyTestState::Running | StandbyTestState::Ended);
                Ok(is_settled.then_some(test))
            })?;
            if test.state == StandbyTestState::Running {
                // It was complete before: a file system with reflinks is quick.
                pair.beta.sterna(["standby", "test", "v", "--end"])?.success()?;
            }
            nothing_is_left(pair)?;
        }
        compare(pair, &standby)
    });
}

#[test]
fn a_promotion_or_removal_ends_the_test_first() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        write(&mut connect(&pair.alpha, "v")?, 0, 5)?;
        add(pair, &["v"])?;
        pair.beta.sterna(["standby", "test", "v"])?.success()?;
        pair.alpha.sterna(["standby", "remove", "v"])?.success()?;
        let volumes: Vec<Volume> = pair.beta.ask(&["volume", "list"])?;
        ensure!(volumes.is_empty(), "{volumes:?}");
        add(pair, &["v"])?;
        pair.beta.sterna(["standby", "test", "v"])?.success()?;
        pair.alpha.kill()?;
        until("the loss is noticed", || {
            let refused = pair.beta.sterna(["standby", "promote", "v"])?;
            Ok(refused.stderr.contains("--source-is-off alpha").then_some(()))
        })?;
        // A refused promotion has left it alone.
        ensure!(shown(&pair.beta)?.state == StandbyTestState::Running, "the test has ended");
        let promoted: Standby =
            pair.beta.ask(&["standby", "promote", "v", "--force", "--source-is-off", "alpha"])?;
        ensure!(promoted.state == StandbyState::Promoted, "{promoted:?}");
        let volumes: Vec<Volume> = pair.beta.ask(&["volume", "list"])?;
        ensure!(volumes.len() == 1 && volumes[0].name == "v", "{volumes:?}");
        ensure!(read(&mut connect(&pair.beta, "v")?, 0)? == 5, "it has another content");
        let refused = pair.beta.sterna(["standby", "test", "v"])?;
        ensure!(refused.code == 4, "{refused:?}");
        Ok(())
    });
}
