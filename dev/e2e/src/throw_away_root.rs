//! A disposable copy of this system with its own systemd, in which tests install packages and run services.
//!
//! ```text
//!   test ──► scripts/throw-away-root ──► unshare ──► systemd on an overlay of /
//!     └───────── nsenter: commands ──────────────────────┘      no network, FOLDER at /mnt
//! ```
//! It ends when it is dropped, or with the test's process: the script ends it when its standard input is closed.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use testbed::{Outcome, Program, program};

/// A system that is running.
#[derive(Debug)]
pub struct ThrowAwayRoot {
    script: Child,
    /// Number of its first process, in this system.
    init: String,
}

impl ThrowAwayRoot {
    /// Boots a system with `folder` read-only at `/mnt`. This needs root.
    ///
    /// # Errors
    /// If it does not boot; the message has the error.
    pub fn boot(folder: &Path) -> anyhow::Result<Self> {
        let script = repository().join("scripts/throw-away-root");
        let mut script = Command::new(&script)
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be started", script.display()))?;
        let mut said = BufReader::new(script.stdout.take().context("its output is ours")?);
        let mut init = String::new();
        said.read_line(&mut init).context("the number of its first process")?;
        let root = Self { script, init: init.trim().to_owned() };
        ensure!(!root.init.is_empty(), "a system to throw away does not boot: its words are above");
        Ok(root)
    }

    /// Returns the path in this system of a path in the other one, for files and sockets.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Runs bash commands in it, and stops at the first that fails.
    ///
    /// # Errors
    /// If they do not end in time. The outcome has their exit code.
    pub fn run(&self, commands: &str) -> anyhow::Result<Outcome> {
        let enter = ["--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--", "env", "-i"];
        let environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"];
        Program::of_package("nsenter", "util-linux")
            .args(["--target", &self.init])
            .args(enter)
            .args(environment)
            .args([
                "DEBIAN_FRONTEND=noninteractive",
                "LC_ALL=C.UTF-8",
                "bash",
                "-euo",
                "pipefail",
                "-c",
                commands,
            ])
            .run()
    }

    /// Runs bash commands in it, which must succeed, and returns their output.
    ///
    /// # Errors
    /// Those of [`Self::run`], and if a command fails; the message has its output.
    pub fn succeed(&self, commands: &str) -> anyhow::Result<String> {
        self.run(commands)?.success().with_context(|| commands.to_owned())
    }
}

impl Drop for ThrowAwayRoot {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        // The script has printed its error.
        let _ = self.script.wait();
    }
}

/// Makes a package of the program under test with this version.
///
/// # Errors
/// If there is no program, or making the package fails.
pub fn package(version: &str, folder: &Path) -> anyhow::Result<()> {
    Program::at(&repository().join("scripts/deb"))
        .arg(program::sterna()?)
        .arg(folder)
        .arg(version)
        // The package stays on this machine.
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .succeed()?;
    Ok(())
}

/// Returns the folder of the sources of this test.
pub fn repository() -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder.ancestors().nth(2).unwrap_or(crate_folder).to_owned()
}
