//! Runs a daemon as a child process.

mod requests;

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, anyhow, bail, ensure};
use api::{Client, Migration};
use rustix::process::Signal;
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use crate::folder::Folder;
use crate::program::{code, signal_child};
use crate::wait::{DEADLINE, INTERVAL, until};

/// Exit code of a daemon that is killed, or kills itself at a fail point.
pub const KILLED: i32 = 137;
/// Number of log lines that a failure shows.
const LOG_LINES_SHOWN: usize = 60;

/// A started daemon, until its end was seen.
///
/// Dropping it kills the process.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    client: Client,
    log: PathBuf,
    /// Bytes of the log that [`Self::wait_for_log`] has read, or that an earlier daemon has written.
    log_seen: u64,
}

impl Daemon {
    /// Starts `serve` on a folder and waits until it answers. The daemon's arguments are added to `command`, which is
    /// the program or executes it.
    ///
    /// # Errors
    /// If it does not start or answer; the message ends with its log.
    pub async fn start(command: Command, folder: &Folder) -> anyhow::Result<Self> {
        let mut daemon = Self::spawn(command, folder)?;
        match daemon.answers().await {
            Ok(()) => Ok(daemon),
            Err(error) => Err(daemon.with_log(error)),
        }
    }

    /// Starts it as [`Self::start`], but does not wait.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn spawn(command: Command, folder: &Folder) -> anyhow::Result<Self> {
        Self::spawn_with(command, folder, &[])
    }

    /// Starts it as [`Self::spawn`], with more arguments.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn spawn_with(
        mut command: Command,
        folder: &Folder,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let log = File::options().create(true).append(true).open(folder.log());
        let log = log.context("make the daemon's log")?;
        let log_seen = log.metadata().context("look at the daemon's log")?.len();
        let child = command
            .arg("serve")
            .arg("--config")
            .arg(folder.configuration())
            .args(arguments)
            .env_remove("STERNA_HOST")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the daemon's log")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self { child, client: Client::new(folder.address()?), log: folder.log(), log_seen })
    }

    /// Waits until it answers, without a runtime.
    ///
    /// # Errors
    /// If it ends instead, or does not answer in time.
    pub(crate) fn wait_for_answer(&mut self) -> anyhow::Result<()> {
        runtime()?.block_on(self.answers())
    }

    /// Waits for the end of a migration, without a runtime.
    ///
    /// # Errors
    /// If it does not end in time, or is unknown.
    pub(crate) fn wait_for_migration(&self, id: &str) -> anyhow::Result<Migration> {
        let ended = async { timeout(DEADLINE, self.ended(id)).await };
        runtime()?.block_on(ended).with_context(|| format!("migration {id} has not ended"))?
    }

    async fn answers(&mut self) -> anyhow::Result<()> {
        let answered = timeout(DEADLINE, async {
            loop {
                self.ensure_alive()?;
                if self.client.host().await.is_ok() {
                    return anyhow::Ok(());
                }
                sleep(INTERVAL).await;
            }
        });
        answered.await.unwrap_or_else(|_| Err(anyhow!("the daemon did not answer in time")))
    }

    /// Returns a client of its API.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the number of its process.
    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the daemon.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal_child(&self.child, signal)
    }

    /// Returns its exit code as shells do; `None` while it runs.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn exit_code(&mut self) -> anyhow::Result<Option<i32>> {
        Ok(self.child.try_wait().context("look after the daemon")?.map(code))
    }

    /// Waits for its end; returns its exit code.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn wait_for_end(&mut self) -> anyhow::Result<i32> {
        until("the daemon ends", || self.exit_code())
    }

    /// Checks that it has not ended.
    ///
    /// # Errors
    /// If the daemon has ended.
    pub fn ensure_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("look after the daemon")? {
            None => Ok(()),
            Some(status) => bail!("the daemon has ended: {status}"),
        }
    }

    /// Waits for the next log line with these words, and returns false if the daemon ends first.
    ///
    /// # Errors
    /// If it does neither in time.
    pub fn wait_for_log(&mut self, words: &str) -> anyhow::Result<bool> {
        until(&format!("the daemon logs \"{words}\""), || {
            // N.B. The exit code is read before the log, because an ended daemon logs nothing more.
            let has_ended = self.exit_code()?.is_some();
            let mut log = File::open(&self.log)?;
            log.seek(SeekFrom::Start(self.log_seen))?;
            let mut unseen = Vec::new();
            log.read_to_end(&mut unseen)?;
            for line in unseen.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
                self.log_seen += line.len() as u64;
                if String::from_utf8_lossy(line).contains(words) {
                    return Ok(Some(true));
                }
            }
            Ok(has_ended.then_some(false))
        })
    }

    /// Stops it in order, and waits for its end.
    ///
    /// # Errors
    /// If it does not end in time (it is killed), or ends with an error; the message ends with its log.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let stopped = async {
            self.signal(Signal::TERM)?;
            loop {
                if let Some(code) = self.exit_code()? {
                    ensure!(code == 0, "the daemon ended with {code}");
                    return Ok(());
                }
                sleep(INTERVAL).await;
            }
        };
        let stopped = timeout(DEADLINE, stopped).await;
        let stopped =
            stopped.unwrap_or_else(|_| Err(anyhow!("the daemon did not end in time and was killed")));
        stopped.map_err(|error| self.with_log(error))
    }

    /// Returns its resident memory, in bytes.
    ///
    /// # Errors
    /// If it does not run.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process_id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kibibytes: u64 = line.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kibibytes << 10)
    }

    /// Returns the name of each thread with the kernel function that it waits in, and for root the kernel's stack.
    pub fn threads(&self) -> String {
        let tasks = format!("/proc/{}/task", self.process_id());
        let entries = std::fs::read_dir(tasks).into_iter().flatten().flatten();
        let told = entries.map(|entry| {
            let read = |file: &str| {
                let text = std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
                text.lines().map(str::trim).collect::<Vec<_>>().join(" < ")
            };
            format!("  {}: {} {}\n", read("comm"), read("wchan"), read("stack"))
        });
        told.collect()
    }

    /// Adds the end of its log to an error.
    pub fn with_log(&self, error: anyhow::Error) -> anyhow::Error {
        let log = std::fs::read(&self.log).unwrap_or_default();
        with_tail(error, "the daemon's log", &String::from_utf8_lossy(&log))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Adds the last lines of a log to an error, because the folder is removed.
pub fn with_tail(error: anyhow::Error, name: &str, log: &str) -> anyhow::Error {
    let lines: Vec<&str> = log.lines().collect();
    let tail = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
    if tail.is_empty() {
        return error;
    }
    anyhow!("{error:#}\n{name} ends with:\n  {}", tail.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_that_does_not_start_shows_its_log() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create(parent.path(), ["a", "b"]).unwrap();
        // `ls` does not know the daemon's arguments.
        let error = Daemon::start(Command::new("/bin/ls"), &folder).await.unwrap_err().to_string();
        assert!(
            error.contains("exit status: 2") && error.contains("  /bin/ls: unrecognized option"),
            "{error}"
        );
    }

    #[test]
    fn only_the_end_of_a_log_is_shown() {
        let log: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let error = with_tail(anyhow!("it failed"), "the log", &log).to_string();
        assert!(
            error.starts_with("it failed\nthe log ends with:\n  line 40\n") && error.ends_with("line 99")
        );
        assert_eq!(with_tail(anyhow!("it failed"), "the log", "").to_string(), "it failed");
    }
}
