//! Tests of hooks as real processes: their environment, their failures, and that no process is left.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use migration::MigrationId;
use migration::journal::Outcome;

use super::{HookContext, HookRunner, HookSide, Hooks};
use crate::config::HooksConfig;

/// More than any hook of these tests takes, however busy the processors are.
const PATIENCE: Duration = Duration::from_secs(120);

struct Scene {
    folder: tempfile::TempDir,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), warnings: Arc::default() }
    }

    /// Makes a program of these lines; the folder is its `$HERE`.
    fn hook(&self, name: &str, lines: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let text = format!("#!/bin/sh\nHERE='{}'\n{lines}\n", self.folder.path().display());
        // N.B. written by another process: a child of another test may inherit a descriptor of this process that is open for
        // writing, and then the program cannot be executed.
        let tee =
            std::process::Command::new("tee").arg(&path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let mut tee = tee.unwrap();
        tee.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(tee.wait().unwrap().success());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        path
    }

    fn runner(&self, before: Option<PathBuf>, after: Option<PathBuf>, timeout: Duration) -> Arc<HookRunner> {
        HookRunner::new(&self.hooks(before, after, timeout), context())
    }

    fn hooks(&self, before: Option<PathBuf>, after: Option<PathBuf>, timeout: Duration) -> Arc<Hooks> {
        let hooks = Hooks::open(HooksConfig { before, after, timeout }, self.folder.path().join("records"));
        let warnings = Arc::clone(&self.warnings);
        hooks.warn_of(move |_, warning| warnings.lock().unwrap().push(warning));
        hooks
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

fn context() -> HookContext {
    HookContext {
        migration: MigrationId(7),
        vm: "web1".to_owned(),
        volumes: vec!["root".to_owned(), "data".to_owned()],
        side: HookSide::Target,
        own: "beta".to_owned(),
        other: "alpha".to_owned(),
        outcome: None,
    }
}

/// Returns hooks whose records do not outlast the test.
pub(crate) fn alone(config: HooksConfig, context: HookContext) -> Arc<HookRunner> {
    let folder = tempfile::tempdir().unwrap();
    let hooks = Hooks::open(config, folder.path().join("records"));
    // The closure holds the folder as long as there are hooks.
    hooks.warn_of(move |_, _| assert!(folder.path().exists()));
    HookRunner::new(&hooks, context)
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

#[tokio::test]
async fn hooks_are_told_their_occasion() {
    let scene = Scene::new();
    let hook = scene.hook(
        "hook",
        r#"echo "$STERNA_HOOK $STERNA_SIDE $STERNA_MIGRATION $STERNA_VM [$STERNA_VOLUMES] $STERNA_SOURCE_HOST \
           $STERNA_TARGET_HOST ${STERNA_OUTCOME-none} $(pwd)" >> "$HERE/told""#,
    );
    let runner = scene.runner(Some(hook.clone()), Some(hook), PATIENCE);
    runner.before().await.unwrap();
    runner.after(&moved()).await;
    runner.after(&Outcome::Cancelled).await;
    let told = scene.read("told").split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "before target m7 web1 [root data] alpha beta none / \
                    after target m7 web1 [root data] alpha beta moved /";
    assert_eq!(told, expected);
    assert!(scene.warnings.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_hook_that_fails_is_named_with_its_status_and_its_last_words() {
    let scene = Scene::new();
    let check = async |lines: &str, expected: &str| {
        // Each hook of a migration runs once, so each run has a daemon of its own.
        let scene = Scene::new();
        let hook = scene.hook("hook", lines);
        let fault = scene.runner(Some(hook), None, PATIENCE).before().await.unwrap_err().to_string();
        assert!(fault.ends_with(expected), "{fault}");
        assert!(fault.contains("/hook (target)"), "{fault}");
    };
    check("exit 3", "ended with exit status 3").await;
    check("kill -9 $$", "ended with signal 9, and said last: Killed").await;
    let lines = "for n in 1 2 3 4 5 6 7; do echo line $n >&2; done; echo out; exit 1";
    check(lines, "exit status 1, and said last: line 3 | line 4 | line 5 | line 6 | line 7").await;
    // It leaves a process that holds its standard error.
    check("sleep 1000 & echo gone >&2; exit 4", "exit status 4, and said last: gone").await;
    let missing = scene.folder.path().join("missing");
    let fault = scene.runner(Some(missing), None, PATIENCE).before().await.unwrap_err().to_string();
    assert!(fault.contains("cannot be started: No such file"), "{fault}");
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_with_all_that_it_has_started() {
    let scene = Scene::new();
    let lines =
        "echo waiting >&2; (echo $$ > \"$HERE/started\"; exec 9>\"$HERE/held\"; flock 9; sleep 1000) & wait";
    let hook = scene.hook("hook", lines);
    let limit = Duration::from_millis(300);
    let fault = scene.runner(Some(hook), None, limit).before().await.unwrap_err().to_string();
    assert!(fault.contains("was killed: it took longer than 0 s (hooks.timeout_s)"), "{fault}");
    // All processes that it had started are gone, or never began: none holds its lock.
    let held = scene.folder.path().join("held");
    let held = std::fs::File::options().write(true).create(true).truncate(false).open(held).unwrap();
    let free = async {
        use rustix::fs::{FlockOperation, flock};
        while flock(&held, FlockOperation::NonBlockingLockExclusive).is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, free).await.unwrap();
}

#[tokio::test]
async fn an_after_hook_that_fails_is_a_warning_and_comes_only_after_something() {
    let scene = Scene::new();
    let hook = scene.hook("hook", "echo no route >&2; exit 1");
    let runner = scene.runner(None, Some(hook), PATIENCE);
    runner.after(&Outcome::Cancelled).await;
    assert!(scene.warnings.lock().unwrap().is_empty(), "it was cancelled before the switch began");
    runner.before().await.unwrap();
    runner.after(&moved()).await;
    let warnings = scene.warnings.lock().unwrap();
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert!(warning.contains("exit status 1, and said last: no route"), "{warning}");
}

#[tokio::test]
async fn a_migration_that_is_given_up_kills_the_hook_that_it_waits_for() {
    let scene = Scene::new();
    let hook = scene.hook("hook", "exec 9>\"$HERE/held\"; flock 9; echo > \"$HERE/up\"; sleep 1000");
    let runner = scene.runner(Some(hook), None, PATIENCE);
    let up = scene.folder.path().join("up");
    tokio::select! {
        ended = runner.before() => panic!("{ended:?}"),
        () = async { while !up.exists() { tokio::task::yield_now().await; } } => {}
    }
    use rustix::fs::{FlockOperation, flock};
    let held = std::fs::File::options().write(true).open(scene.folder.path().join("held")).unwrap();
    let free = async {
        while flock(&held, FlockOperation::NonBlockingLockExclusive).is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, free).await.unwrap();
}

/// Waits until a file exists.
async fn appears(path: &std::path::Path) {
    let there = async {
        while !path.exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, there).await.unwrap();
}

#[tokio::test]
async fn the_next_daemon_waits_for_what_runs_before_it_undoes_anything_and_runs_nothing_twice() {
    let scene = Scene::new();
    let lines = "echo \"begin $STERNA_HOOK [$STERNA_VM]\" >> \"$HERE/told\"; [ $STERNA_HOOK = after ] || { echo > \"$HERE/up\"; \
                 while [ ! -e \"$HERE/go\" ]; do sleep 0.01; done; }; echo late >&2; echo \"end $STERNA_HOOK\" >> \"$HERE/told\"";
    let hook = scene.hook("hook", lines);
    let hooks = || scene.hooks(Some(hook.clone()), Some(hook.clone()), PATIENCE);
    {
        // A daemon that is stopped while the hook runs kills nothing.
        let first = hooks();
        let runner = HookRunner::new(&first, context());
        let waits = tokio::spawn(async move { runner.before().await });
        appears(&scene.folder.path().join("up")).await;
        first.stop(Duration::ZERO).await;
        waits.abort();
        assert!(waits.await.is_err());
    }
    let second = hooks();
    assert_eq!(second.migrations(), [MigrationId(7)]);
    let unnamed = HookContext { vm: String::new(), ..context() };
    let runner = HookRunner::new(&second, unnamed);
    let after = tokio::spawn({
        let runner = Arc::clone(&runner);
        async move { runner.after(&moved()).await }
    });
    tokio::task::yield_now().await;
    assert_eq!(scene.read("told"), "begin before [web1]\n");
    std::fs::write(scene.folder.path().join("go"), "").unwrap();
    tokio::time::timeout(PATIENCE, after).await.unwrap().unwrap();
    assert_eq!(scene.read("told"), "begin before [web1]\nend before\nbegin after [web1]\nend after\n");
    assert!(second.migrations().is_empty());
    // Its record is deleted too.
    let records = scene.folder.path().join("records");
    let gone = async {
        while std::fs::read_dir(&records).is_ok_and(|left| left.count() > 0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
}

#[tokio::test]
async fn a_process_whose_daemon_is_gone_before_its_gate_opens_runs_nothing() {
    let scene = Scene::new();
    let hook = scene.hook("hook", "echo run >> \"$HERE/told\"");
    let base = scene.folder.path().join("m7.before");
    let gated = super::process::Gated::start(&hook, &[], &base).unwrap();
    let process = gated.process;
    drop(gated);
    let found = tokio::time::timeout(PATIENCE, super::process::find(process, &base)).await.unwrap();
    assert!(matches!(found, super::process::Found::NeverBegan));
    assert_eq!(scene.read("told"), "");
}
