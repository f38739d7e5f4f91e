//! Tests of `sterna top` in a real terminal: drawing, keys, restarts of the daemon, and the terminal afterwards.

use anyhow::ensure;
use e2e::terminal::Terminal;
use e2e::{Host, Program, guest, play};
use rustix::process::Signal;

const DISK_BYTES: u64 = 64 << 20;

/// Starts a terminal with `sterna top`, after which the state of the terminal is printed.
fn terminal(scene: &Host, columns: u16, rows: u16) -> anyhow::Result<Terminal> {
    let (program, address) = (e2e::program::sterna()?, scene.address()?);
    let line = format!("STERNA_HOST={address} {} top; echo ended with $?; stty -a; cat", program.display());
    Terminal::start(&line, columns, rows)
}

/// Checks that the terminal echoes lines again, with its former screen.
fn ensure_restored(terminal: &Terminal) -> anyhow::Result<()> {
    let screen =
        terminal.until("it ends", |screen| screen.contains("ended with 0") && screen.contains("echoke"))?;
    let words = |word: &str| screen.split_whitespace().any(|found| found.trim_end_matches(';') == word);
    ensure!(words("icanon") && words("echo") && words("isig"), "{screen}");
    ensure!(!screen.contains("VOLUME "), "{screen}");
    Ok(())
}

#[test]
fn top_draws_answers_keys_and_sizes_and_outlives_the_daemon() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let working = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let terminal = terminal(scene, 80, 24)?;
        // An idle guest has no latency.
        let has_rates = |screen: &str| {
            let row = screen.lines().find(|line| line.starts_with("v "));
            row.is_some_and(|row| row.contains("serving") && (row.contains(" ms") || row.contains(" µs")))
        };
        let screen = terminal.until("the guest's work is shown", has_rates)?;
        ensure!(
            screen.lines().count() <= 24 && screen.lines().all(|line| line.chars().count() <= 80),
            "{screen}"
        );
        ensure!(screen.contains("q quit"), "{screen}");

        let moving = scene.begin_to_migrate("b", Some("1MiB/s"))?;
        terminal.until("the migration is shown", |screen| {
            screen.contains("v a → b") && screen.contains("copying")
        })?;
        terminal.press(&["Tab", "Tab", "Tab"])?;
        terminal.until("stores are shown", |screen| screen.contains("STORE") && screen.contains("PATH"))?;
        terminal.resize(132, 40)?;
        let is_at_the_end =
            |screen: &str| screen.lines().nth(39).is_some_and(|line| line.starts_with("q quit"));
        terminal.until("the whole of a larger screen is used", is_at_the_end)?;
        terminal.press(&["1", "/", "z", "z", "Enter"])?;
        terminal.until("nothing passes the filter", |screen| screen.contains("no row contains that"))?;
        terminal.press(&["Escape"])?;
        scene.sterna(["migration", "cancel", &moving.id])?.success()?;
        scene.wait_for_migration(&moving.id)?;

        scene.kill()?;
        terminal.until("the daemon is missed", |screen| screen.contains("the daemon does not answer"))?;
        scene.start()?;
        let is_back = |screen: &str| !screen.contains("does not answer") && screen.contains("serving");
        terminal.until("the daemon is back", is_back)?;
        terminal.press(&["q"])?;
        ensure_restored(&terminal)?;
        guest::stop_and_verify(working)?;
        Ok(())
    });
}

#[test]
fn a_signal_ends_top_and_the_terminal_is_as_before() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
            let terminal = terminal(scene, 80, 24)?;
            terminal.until("it draws", |screen| screen.contains("serving"))?;
            let shell = terminal.shell()?.to_string();
            let children =
                Program::of_package("pgrep", "procps").args(["-P", &shell, "-x", "sterna"]).succeed()?;
            testbed::signal(children.trim().parse()?, signal)?;
            ensure_restored(&terminal)?;
        }
        Ok(())
    });
}

#[test]
fn top_without_a_terminal_says_what_to_do_and_prints_once_what_it_would_show() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let refused = scene.sterna(["top"])?;
        refused.expect(2)?;
        ensure!(refused.stderr.contains("sterna top --once"), "{refused:?}");
        let printed = scene.sterna(["top", "--once"])?.success()?;
        for part in ["no migrations", "VOLUME", "serving", "STORE", "no other hosts"] {
            ensure!(printed.contains(part), "\"{part}\" is missing: {printed}");
        }
        let told: api::Overview = scene.ask(&["top"])?;
        ensure!(told.volumes.len() == 1 && told.volumes[0].activity.is_some(), "{told:?}");
        scene.stop()?;
        scene.sterna(["top", "--once"])?.expect(7)?;
        Ok(())
    });
}
