//! Tests of hooks before and after a VM or a volume moves: on both sides, with their variables, and their failures.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState};
use e2e::{Host, Pair, guest, until, vm};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;

/// Script of every hook: it records its call, and then runs the commands of a file that is named after its moment.
const HOOK: &str = r#"#!/bin/sh
here=$(dirname "$0")
echo "$STERNA_HOOK $STERNA_SIDE $STERNA_VM $STERNA_VOLUMES $STERNA_SOURCE_HOST $STERNA_TARGET_HOST $STERNA_OUTCOME" >> "$here/told"
[ -e "$here/$STERNA_HOOK" ] && . "$here/$STERNA_HOOK"
exit 0
"#;

/// Timeout of a hook that should succeed, also on a busy machine, in seconds.
const PATIENCE_S: u32 = 20;
/// Timeout of a hook that hangs, in seconds. Other hooks end at once.
const IMPATIENCE_S: u32 = 6;

/// Makes two hosts with hooks with this timeout, and a VM at alpha.
fn play(timeout_s: u32, test: impl FnOnce(&mut Pair, &vm::Vm) -> anyhow::Result<()>) {
    play_with_hooks(timeout_s, |pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start(&pair.alpha, FILL_BYTES)?;
        test(pair, &console)
    });
}

/// Makes two hosts with hooks with this timeout.
fn play_with_hooks(timeout_s: u32, test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    e2e::play_pair(|pair| {
        for scene in [&mut pair.alpha, &mut pair.beta] {
            let hook = scene.path("hook");
            // Another process writes it. A file that this process has open for writing may also be open in a child of another
            // test, and then it cannot be executed.
            let mut writer =
                Command::new("tee").arg(&hook).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
            writer.stdin.take().context("tee reads")?.write_all(HOOK.as_bytes())?;
            ensure!(writer.wait()?.success(), "the hook is not written");
            std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755))?;
            let hook = hook.display();
            scene.configure(&format!(
                "[hooks]\nbefore = '{hook}'\nafter = '{hook}'\ntimeout_s = {timeout_s}\n"
            ))?;
            scene.stop()?;
            scene.start()?;
        }
        test(pair)
    });
}

fn told(scene: &Host) -> anyhow::Result<Vec<String>> {
    let told = std::fs::read_to_string(scene.path("told")).unwrap_or_default();
    Ok(told.lines().map(|line| line.trim_end().to_owned()).collect())
}

fn until_told(scene: &Host, expected: &[&str]) -> anyhow::Result<()> {
    until("the hooks are told", || {
        let told = told(scene)?;
        ensure!(told.len() <= expected.len(), "{told:?} instead of {expected:?}");
        Ok((told == expected).then_some(()))
    })
}

/// Moves the VM, and waits for the end.
fn travel(pair: &Pair) -> anyhow::Result<Migration> {
    let begun: Migration = pair.alpha.ask(&["migrate", vm::NAME, "--to", "beta:a", "--detach"])?;
    pair.alpha.wait_for_migration(&begun.id)
}

#[test]
fn hooks_run_on_both_sides_and_a_failing_one_keeps_the_machine_where_it_is() {
    play(IMPATIENCE_S, |pair, console| {
        // The hook fails at the source, fails at the target, or hangs there.
        let failures = [
            ("alpha", "source", "echo no way >&2; exit 7"),
            ("beta", "target", "exit 8"),
            ("beta", "target", "sleep 1000"),
        ];
        let killed = format!("(target) was killed: it took longer than {IMPATIENCE_S} s");
        let words = [
            "(source) ended with exit status 7, and said last: no way",
            "(target) ended with exit status 8",
            &killed,
        ];
        for ((host, _, script), expected) in failures.iter().zip(words) {
            let scene = if *host == "alpha" { &pair.alpha } else { &pair.beta };
            std::fs::write(scene.path("before"), script)?;
            let failed = travel(pair)?;
            ensure!(failed.state == MigrationState::Failed, "{failed:?}");
            ensure!(failed.failure.as_deref() == Some("machine-stayed"), "{failed:?}");
            let message = failed.message.unwrap_or_default();
            ensure!(message.contains(expected) && message.contains("/hook "), "{message}");
            vm::check_works_at(&pair.alpha, &pair.beta, console)?;
            std::fs::remove_file(scene.path("before"))?;
        }
        // The target's hook runs first, so the source's hook has run only once.
        let before = "before source web1 v alpha beta";
        until_told(&pair.alpha, &[before, "after source web1 v alpha beta failed"])?;
        let before = "before target web1 v alpha beta";
        let after = "after target web1 v alpha beta failed";
        until_told(&pair.beta, &[before, after, before, after, before, after])
    });
}

#[test]
fn an_after_hook_that_fails_is_a_warning_and_the_machine_has_moved() {
    play(PATIENCE_S, |pair, console| {
        for scene in [&pair.alpha, &pair.beta] {
            std::fs::write(scene.path("after"), "echo no route >&2; exit 9")?;
        }
        let moved = travel(pair)?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(50)?;
        until_told(
            &pair.alpha,
            &["before source web1 v alpha beta", "after source web1 v alpha beta moved"],
        )?;
        until_told(&pair.beta, &["before target web1 v alpha beta", "after target web1 v alpha beta moved"])?;
        for (scene, side) in [(&pair.alpha, "source"), (&pair.beta, "target")] {
            let expected = format!("({side}) ended with exit status 9, and said last: no route");
            until("the warning is in the migration's message", || {
                let shown: Vec<Migration> = scene.ask(&["migration", "list"])?;
                let last = shown.last().context("a migration is remembered")?;
                ensure!(matches!(last.state, MigrationState::Moved | MigrationState::Running), "{last:?}");
                Ok(last.message.as_ref().filter(|message| message.contains(&expected)).map(drop))
            })?;
        }
        console.verify()
    });
}

#[test]
fn hooks_run_for_a_volume_without_a_machine_and_its_guest_works_meanwhile() {
    play_with_hooks(PATIENCE_S, |pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        std::fs::write(pair.beta.path("before"), "echo no tunnel >&2; exit 8")?;
        let begun = pair.alpha.begin_to_migrate("beta:a", None)?;
        let failed = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(failed.failure.as_deref() == Some("hook-failed"), "{failed:?}");
        let message = failed.message.as_deref().unwrap_or_default();
        ensure!(message.contains("(target) ended with exit status 8, and said last: no tunnel"), "{message}");
        pair.alpha.check_place("a")?;
        until_told(&pair.beta, &["before target  v alpha beta", "after target  v alpha beta failed"])?;
        // The source's hook did not run, so there is no `after` hook.
        ensure!(told(&pair.alpha)?.is_empty(), "{:?}", told(&pair.alpha)?);
        // The daemon is killed during a slow hook. The next daemon waits for it, and does not run it again.
        std::fs::write(
            pair.beta.path("before"),
            "until [ -e \"$here/go\" ] || [ ! -e \"$here\" ]; do sleep 0.1; done",
        )?;
        let begun = pair.alpha.begin_to_migrate("beta:a", None)?;
        until("the hook is run", || Ok((told(&pair.beta)?.len() == 3).then_some(())))?;
        until("it is said that they are waited for", || {
            let waits = pair.alpha.migration(&begun.id)?.waiting_for;
            Ok(waits.filter(|waits| waits.reason.contains("hooks")))
        })?;
        guest::until_worked(&guest, 200)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        guest::until_worked(&guest, 200)?;
        ensure!(told(&pair.beta)?.len() == 3, "{:?}", told(&pair.beta)?);
        std::fs::write(pair.beta.path("go"), "")?;
        let moved = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        pair.check_at(&pair.beta, &pair.alpha)?;
        until_told(&pair.alpha, &["before source  v alpha beta", "after source  v alpha beta moved"])?;
        until("the target is told", || {
            Ok((told(&pair.beta)?.last().map(String::as_str) == Some("after target  v alpha beta moved"))
                .then_some(()))
        })?;
        // Between two stores of one host there is only one side.
        let other: Migration = pair.beta.ask(&["migrate", "v", "--to", "b"])?;
        ensure!(other.state == MigrationState::Moved, "{other:?}");
        until("it is told once before and once after", || {
            let told = told(&pair.beta)?;
            let last: Vec<&str> = told.iter().rev().take(2).map(String::as_str).collect();
            Ok((last == ["after both  v beta beta moved", "before both  v beta beta"]).then_some(()))
        })?;
        guest::stop_and_verify(guest).map(drop)
    });
}
