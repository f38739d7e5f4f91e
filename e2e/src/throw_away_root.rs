//! A system that is thrown away: a copy of this one with a systemd of its own, in which packages are installed and services run.
//!
//! ```text
//!   test ──► scripts/throw-away-root ──► unshare ──► systemd on an overlay of /
//!     └───────── nsenter: commands ──────────────────────┘      no network, FOLDER at /mnt
//! ```
//! It goes with its value, or with the process of the test: the script ends it when nobody holds its standard input any more.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use testbed::{Outcome, Program, program};

/// A system that is running.
#[derive(Debug)]
pub struct ThrowAwayRoot {
    script: Child,
    /// Its first process, as this system counts.
    init: String,
}

impl ThrowAwayRoot {
    /// Boots one, with `folder` at `/mnt`, read-only. Needs root.
    ///
    /// # Errors
    /// If it does not boot; the message has the words of what failed.
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

    /// Where a path of it is for this system: files can be read there, and sockets connected to.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Runs commands of bash there; the first that fails ends them.
    ///
    /// # Errors
    /// If they do not end in time; how they end is in the outcome.
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

    /// Runs commands of bash there, which must succeed; returns what they printed.
    ///
    /// # Errors
    /// As [`Self::run`], and if one fails; the message has its words.
    pub fn succeed(&self, commands: &str) -> anyhow::Result<String> {
        self.run(commands)?.success().with_context(|| commands.to_owned())
    }
}

impl Drop for ThrowAwayRoot {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        // It has told what keeps it.
        let _ = self.script.wait();
    }
}

/// Makes the package of a version, of the program under test.
///
/// # Errors
/// If there is no program; the words of what failed.
pub fn package(version: &str, folder: &Path) -> anyhow::Result<()> {
    Program::at(&repository().join("scripts/deb"))
        .arg(program::sterna()?)
        .arg(folder)
        .arg(version)
        // Nobody sends it anywhere.
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .succeed()?;
    Ok(())
}

/// The folder of the sources that this was built from.
pub fn repository() -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder.parent().unwrap_or(crate_folder).to_owned()
}
