//! Tests of a daemon whose log cannot be written: a closed pipe, a full disk, a reader that does not read.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::scene::program;

/// Longer than a daemon takes to begin, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ask(folder: &Path, arguments: &[&str]) -> Option<String> {
    let socket = format!("unix:{}", folder.join("run/api.sock").display());
    let output = Command::new(program()).args(["--host", &socket]).args(arguments).output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

fn lost(folder: &Path) -> u64 {
    let metrics = folder.join("run/api.sock");
    let said = Command::new("curl")
        .args(["-s", "--unix-socket"])
        .arg(metrics)
        .arg("http://sterna/metrics")
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let line = said.lines().find_map(|line| line.strip_prefix("sterna_log_lines_lost_total "));
    line.and_then(|count| count.parse().ok()).unwrap_or_default()
}

#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let full = File::options().write(true).open("/dev/full").unwrap();
    for errors in [Stdio::from(closed), Stdio::from(full)] {
        let folder = tempfile::tempdir().unwrap();
        let (data, api) = (folder.path().join("data"), folder.path().join("run/api.sock"));
        let mut command = Command::new(program());
        command.args(["--log", "trace", "serve", "--data-dir"]).arg(data);
        command.arg("--api").arg(format!("unix:{}", api.display()));
        command.env_remove("JOURNAL_STREAM").env("XDG_CONFIG_HOME", folder.path());
        let mut daemon = Daemon(command.stdin(Stdio::null()).stderr(errors).spawn().unwrap());
        let began = Instant::now();
        while ask(folder.path(), &["health"]).is_none() {
            assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon has ended");
            assert!(began.elapsed() < PATIENCE, "the daemon does not begin");
        }
        let made = ask(folder.path(), &["volume", "create", "v", "--size", "1MiB"]);
        assert!(made.is_some_and(|made| made.contains("is served at")));
        assert!(lost(folder.path()) > 0);
        assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon has ended");
    }
}
