//! The programs that benchmarks run: whether they are installed, their versions, and the packages that are missing.

use std::ffi::OsStr;
use std::process::Stdio;

use anyhow::{Context as _, anyhow, bail, ensure};
use tokio::process::Command;

use crate::network::Namespace;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tool {
    pub(super) program: &'static str,
    package: &'static str,
}

pub(super) const FIO: Tool = Tool { program: "fio", package: "fio" };
/// The peer: an NBD server that mirrors.
pub(super) const STORAGE_DAEMON: Tool =
    Tool { program: "qemu-storage-daemon", package: "qemu-system-common" };

/// Runs VMs, and moves them without their disks.
pub(super) const SYSTEM_EMULATOR: Tool = Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" };

/// The best off-line copy.
pub(super) const QEMU_IMG: Tool = Tool { program: "qemu-img", package: "qemu-utils" };
/// The usual off-line copy.
pub(super) const CP: Tool = Tool { program: "cp", package: "coreutils" };

impl Tool {
    /// Returns a command that dies with the benchmark and receives nothing from the terminal.
    pub(super) fn command(self) -> Command {
        Self::quiet(Command::new(self.program))
    }

    /// Returns the same command inside a host of the lab.
    pub(super) fn command_in(self, host: &Namespace) -> Command {
        Self::quiet(host.command(self.program).into())
    }

    fn quiet(mut command: Command) -> Command {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A group of its own: Ctrl-C is for the benchmark, which then ends what it has started.
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    /// Returns the program's own version; if it is missing, the error names the package to install.
    pub(super) async fn version(self) -> anyhow::Result<String> {
        Ok(version_in(&self.output(&["--version"]).await?))
    }

    /// Runs the program to its end; the error of a failure holds its output.
    pub(super) async fn run(self, arguments: &[&OsStr]) -> anyhow::Result<()> {
        let output = self.command().args(arguments).stderr(Stdio::piped()).output().await;
        let output = output.map_err(|error| self.explain(error))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} ended with {}: {}", self.program, output.status, said.trim());
        Ok(())
    }

    async fn output(self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.command().args(arguments).stdout(Stdio::piped()).output().await;
        let output = output.map_err(|error| self.explain(error))?;
        ensure!(
            output.status.success(),
            "{} {} ended with {}",
            self.program,
            arguments.join(" "),
            output.status
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Says what to do about a program that does not start.
    pub(super) fn explain(self, error: std::io::Error) -> anyhow::Error {
        let Self { program, package } = self;
        if error.kind() == std::io::ErrorKind::NotFound {
            return anyhow!(
                "{program} is needed and not installed: on Debian it is in the package {package} \
                 (apt-get install {package})"
            );
        }
        anyhow::Error::new(error).context(format!("start {program}"))
    }
}

/// Checks that fio supports NBD and io_uring; the error says how to install them.
pub(super) async fn check_fio_engines() -> anyhow::Result<()> {
    let help = FIO.output(&["--enghelp"]).await.context("ask fio for its engines")?;
    for engine in ["nbd", "io_uring"] {
        if !help.lines().any(|line| line.trim() == engine) {
            bail!(
                "this fio has no engine {engine}: install a build that has, such as the package fio of Debian 12"
            );
        }
    }
    Ok(())
}

/// Returns the first word that begins with a digit: of `fio-3.33`, and of `qemu-img version 7.2.22 (Debian …)`.
fn version_in(output: &str) -> String {
    let first = output.lines().next().unwrap_or_default().trim();
    let words = first.split([' ', '-']);
    let version = words.into_iter().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    version.unwrap_or(first).to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Tool, version_in};

    #[test]
    fn versions_are_found_in_what_programs_say() {
        assert_eq!(version_in("fio-3.33\n"), "3.33");
        let qemu = "qemu-storage-daemon version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright (c) 2003-2022\n";
        assert_eq!(version_in(qemu), "7.2.22");
        assert_eq!(version_in("cp (GNU coreutils) 9.1\n"), "9.1");
        assert_eq!(version_in("odd"), "odd");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named_with_its_package() {
        let tool = Tool { program: "no-such-program", package: "the-package" };
        let error = tool.version().await.unwrap_err().to_string();
        assert!(error.contains("no-such-program is needed") && error.contains("apt-get install the-package"));
    }
}
