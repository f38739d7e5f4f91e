//! Runs programs for tests. Missing programs are clear errors, no process is left running, and each wait has a deadline.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

use crate::wait::DEADLINE;

/// The variable with the path of the program under test.
const STERNA_VARIABLE: &str = "STERNA_BIN";
/// Time between two checks whether a program has ended.
const INTERVAL: Duration = Duration::from_millis(2);
/// Longest wait for the last words of a program that was killed.
const AFTER_THE_END: Duration = Duration::from_secs(1);

/// Returns the program under test: `STERNA_BIN`, or else `release/sterna` in cargo's target folder.
///
/// # Errors
/// If it does not exist; the message says how to build it.
pub fn sterna() -> anyhow::Result<PathBuf> {
    let path = match std::env::var_os(STERNA_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => target_folder()?.join("release/sterna"),
    };
    ensure!(
        path.is_file(),
        "there is no {}: cargo build --release -p sterna makes it, or {STERNA_VARIABLE} names another one",
        path.display()
    );
    Ok(path)
}

/// Returns cargo's target folder. This program is `TARGET/PROFILE/deps/NAME-HASH`, or `TARGET/PROFILE/NAME`.
///
/// # Errors
/// If the path of this program is unknown.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let profile = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
    let target = profile.and_then(Path::parent).context("this program is in no target folder of cargo")?;
    Ok(target.to_owned())
}

/// A program to run.
#[derive(Debug)]
pub struct Program {
    command: Command,
    /// Name of the program in messages.
    name: String,
    /// The Debian package of the program, if it is not Sterna's own.
    package: Option<&'static str>,
    deadline: Duration,
}

impl Program {
    /// Returns a program of a package, found in `PATH`.
    pub fn of_package(name: &str, package: &'static str) -> Self {
        Self {
            command: Command::new(name),
            name: name.to_owned(),
            package: Some(package),
            deadline: DEADLINE,
        }
    }

    /// Returns a program at a path.
    pub fn at(path: &Path) -> Self {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Self { command: Command::new(path), name, package: None, deadline: DEADLINE }
    }

    /// Returns `qemu-img`.
    pub fn qemu_img() -> Self {
        Self::of_package("qemu-img", "qemu-utils")
    }

    /// Returns `qemu-io`.
    pub fn qemu_io() -> Self {
        Self::of_package("qemu-io", "qemu-utils")
    }

    /// Returns the command, for a caller that starts it in another way.
    pub fn into_command(self) -> Command {
        self.command
    }

    /// Adds an argument at the end.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    /// Adds arguments at the end.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.command.args(arguments);
        self
    }

    /// Gives it this time to end, instead of that of all programs.
    #[must_use]
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts it in another folder.
    #[must_use]
    pub fn in_folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// If it cannot be started, or does not end in time. The outcome has its exit code.
    pub fn run(self) -> anyhow::Result<Outcome> {
        self.start()?.wait()
    }

    /// Runs it to its end, which must be a success, and returns its output.
    ///
    /// # Errors
    /// Those of [`Program::run`], and if it fails; the message has its output.
    pub fn succeed(self) -> anyhow::Result<String> {
        self.run()?.success()
    }

    /// Starts it without waiting.
    ///
    /// # Errors
    /// If it cannot be started; the message names the package.
    pub fn start(mut self) -> anyhow::Result<Running> {
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| match self.package {
                Some(package) => format!(
                    "{} cannot be started: package {package} has it, and scripts/install-packages test installs it",
                    self.name
                ),
                None => format!("{} cannot be started", self.name),
            })?;
        let stdout = child.stdout.take().map(Words::of);
        let stderr = child.stderr.take().map(Words::of);
        let command = format!("{:?}", self.command);
        Ok(Running { child, stdout, stderr, command, give_up_at: Instant::now() + self.deadline })
    }
}

impl From<Command> for Program {
    fn from(command: Command) -> Self {
        let program = Self::at(Path::new(command.get_program()));
        Self { command, ..program }
    }
}

/// A program that runs.
///
/// Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: Option<Words>,
    stderr: Option<Words>,
    command: String,
    give_up_at: Instant,
}

impl Running {
    /// Returns whether it still runs.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn is_running(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait().with_context(|| format!("look after {}", self.command))?.is_none())
    }

    /// Returns the number of its process.
    ///
    /// # Errors
    /// If the number is out of range.
    pub fn number(&self) -> anyhow::Result<i32> {
        i32::try_from(self.child.id()).with_context(|| format!("number of {}", self.command))
    }

    /// Sends a signal to the program.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal_child(&self.child, signal).with_context(|| format!("signal {}", self.command))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it does not end in time; it is then killed.
    pub fn wait(mut self) -> anyhow::Result<Outcome> {
        let status = loop {
            if let Some(status) =
                self.child.try_wait().with_context(|| format!("wait for {}", self.command))?
            {
                break status;
            }
            if Instant::now() >= self.give_up_at {
                let _ = self.child.kill();
                let words = self.words();
                bail!("{} did not end in time and was killed: {words:?}", self.command);
            }
            std::thread::sleep(INTERVAL);
        };
        let (stdout, stderr) = self.words();
        Ok(Outcome { code: code(status), stdout, stderr, command: self.command.clone() })
    }

    /// Returns its standard output and standard error. It waits for their end, but no longer than for the program's.
    fn words(&mut self) -> (String, String) {
        let by = self.give_up_at.max(Instant::now() + AFTER_THE_END);
        let words = |pipe: Option<Words>| pipe.map(|pipe| pipe.until(by)).unwrap_or_default();
        (words(self.stdout.take()), words(self.stderr.take()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The program may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The outcome of a program.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its exit code; 128 and the signal's number if one ended it.
    pub code: i32,
    /// Its standard output, as text.
    pub stdout: String,
    /// Its standard error, as text.
    pub stderr: String,
    command: String,
}

impl Outcome {
    /// Returns its output if it succeeded.
    ///
    /// # Errors
    /// If it failed; the message has its output.
    pub fn success(self) -> anyhow::Result<String> {
        self.expect(0)?;
        Ok(self.stdout)
    }

    /// Checks the exit code.
    ///
    /// # Errors
    /// If it is another one; the message has the program's output.
    pub fn expect(&self, code: i32) -> anyhow::Result<()> {
        if self.code == code {
            return Ok(());
        }
        let Self { command, stdout, stderr, .. } = self;
        Err(anyhow!("{command} ended with {} instead of {code}:\n{stdout}{stderr}", self.code))
    }

    /// Parses its output as JSON.
    ///
    /// # Errors
    /// If it is not the expected JSON; the message has the program's output.
    pub fn json<T: DeserializeOwned>(&self) -> anyhow::Result<T> {
        let Self { command, stdout, stderr, .. } = self;
        serde_json::from_str(stdout).with_context(|| format!("{command} printed: {stdout}{stderr}"))
    }
}

/// Sends a signal to a process. The caller knows that the number is still its own.
///
/// # Errors
/// If there is no such process, or the system refuses.
pub fn signal(process: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw).context("a process without a number")?;
    Ok(kill_process(pid, signal)?)
}

/// Sends a signal to a child that was not yet waited for, so that its number is still its own.
pub(crate) fn signal_child(child: &Child, signal: Signal) -> anyhow::Result<()> {
    self::signal(child.id(), signal)
}

/// Returns the exit code as shells do.
pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// What comes from a pipe, which a thread reads so that its writer never waits.
#[derive(Debug)]
struct Words(Mutex<Receiver<Vec<u8>>>);

impl Words {
    fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // After an error the bytes read so far count.
            while let Ok(length @ 1..) = pipe.read(&mut piece) {
                let Some(read) = piece.get(..length) else { break };
                if sender.send(read.to_vec()).is_err() {
                    break;
                }
            }
        });
        // A program that runs may be looked at by several threads.
        Self(Mutex::new(receiver))
    }

    /// Returns all of it, or what has come until then: a child of the program may outlive it with the pipe open.
    fn until(self, by: Instant) -> String {
        let mut bytes = Vec::new();
        let receiver = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        while let Ok(piece) = receiver.recv_timeout(by.saturating_duration_since(Instant::now())) {
            bytes.extend(piece);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_program_names_its_package() {
        let error = Program::of_package("no-such-program", "no-such-package").run().unwrap_err();
        assert!(error.to_string().contains("package no-such-package has it"), "{error}");
    }

    #[test]
    fn outcome_has_code_and_words() {
        let shell = |script: &str| Program::of_package("sh", "dash").args(["-c", script]);
        let outcome = shell("echo out; echo err >&2; exit 3").run().unwrap();
        assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (3, "out\n", "err\n"));
        let error = outcome.success().unwrap_err().to_string();
        assert!(error.contains("ended with 3 instead of 0") && error.contains("err"), "{error}");
        assert_eq!(shell("kill -9 $$").run().unwrap().code, 137);
    }

    #[test]
    fn program_that_does_not_end_is_killed() {
        let mut program = Program::of_package("sleep", "coreutils").arg("1000");
        program.deadline = Duration::from_millis(20);
        let error = program.run().unwrap_err().to_string();
        assert!(error.contains("did not end in time"), "{error}");
    }

    #[test]
    fn child_that_outlives_a_killed_program_with_its_pipes_is_not_waited_for() {
        let mut program = Program::of_package("sh", "dash").args(["-c", "echo begun; sleep 20; echo ended"]);
        program.deadline = Duration::from_millis(200);
        let begun_at = Instant::now();
        let error = program.run().unwrap_err().to_string();
        assert!(error.contains(r"begun\n") && !error.contains(r"ended\n"), "{error}");
        assert!(begun_at.elapsed() < Duration::from_secs(20));
    }
}
