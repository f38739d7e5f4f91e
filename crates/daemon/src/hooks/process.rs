//! Processes of hooks: started behind a gate, found again by the next daemon, killed with all that they have started.
//!
//! ```text
//!   daemon ──"go"──► sh, behind its gate ── BASE.begun ──► the program ──its status──► BASE.ended
//!      └ gone: the gate closes, and sh ends without having run anything
//! ```
//! The shell leads a process group of its own and outlives the daemon. Its standard output is the reading end of the pipe for
//! the program's standard error. So the pipe does not break with the daemon, and the next one reads on by `/proc`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use migration::hooks::{HookEnd, HookProcess};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::{OpenOptions, Receiver};
use tokio::process::{Child, ChildStdin, Command};

use crate::vms::process::Process;

/// The script of the shell; its arguments are the program and the common part of its files' names.
const SCRIPT: &str = r#"read -r go && [ "$go" = go ] || exit 0
: > "$2.begun" || exit 126
"$1" < /dev/null > /dev/null
status=$?
echo "$status" > "$2.part" && mv "$2.part" "$2.ended"
exit "$status""#;
/// The line that opens the gate.
const GO: &[u8] = b"go\n";
/// How many bytes of a hook's last output are kept, for a message.
const WORDS_BYTES_MAX: usize = 2 << 10;
const LINES_MAX: usize = 5;
/// How long the end of an ended hook's output is waited for: its child processes may hold the pipe.
const WORDS_TIMEOUT: Duration = Duration::from_millis(200);
const FILES: [&str; 3] = ["begun", "part", "ended"];
/// A shell's status above this is the signal that has ended its program.
const SIGNALS: i32 = 128;

pub(super) struct Gated {
    pub(super) process: HookProcess,
    child: Child,
    gate: ChildStdin,
    words: Words,
}

pub(super) struct Running {
    child: Child,
    words: Words,
}

/// The state of an earlier daemon's process.
pub(super) enum Found {
    /// It has run the program, or was killed by others.
    Ended(HookEnd),
    NeverBegan,
}

impl Gated {
    /// Starts a process that waits behind its gate.
    pub(super) fn start(program: &Path, variables: &[(&str, String)], base: &Path) -> io::Result<Self> {
        check(program)?;
        forget(base);
        let (reader, writer) = io::pipe()?;
        let words = Words::of(Receiver::from_owned_fd(OwnedFd::from(reader.try_clone()?)).ok());
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", SCRIPT, "sterna-hook"])
            .args([program, base])
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::from(OwnedFd::from(reader)))
            .stderr(Stdio::from(OwnedFd::from(writer)))
            .process_group(0);
        let mut child = command.spawn()?;
        let gate = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let id = child.id().and_then(|id| i32::try_from(id).ok()).ok_or(io::ErrorKind::NotFound)?;
        let process = HookProcess { id, started: started(id)?, boot: boot()? };
        Ok(Self { process, child, gate, words })
    }

    /// Opens the gate: the program begins.
    pub(super) async fn open(mut self) -> Running {
        // A process that was killed behind its gate reads nothing.
        let _ = self.gate.write_all(GO).await;
        Running { child: self.child, words: self.words }
    }

    /// Ends the process before it has run anything.
    pub(super) async fn close(mut self) {
        drop(self.gate);
        // Its status says nothing: the program did not run.
        let _ = self.child.wait().await;
    }
}

impl Running {
    pub(super) async fn ended(mut self) -> HookEnd {
        let status = loop {
            tokio::select! {
                status = self.child.wait() => break status,
                () = self.words.listen() => {}
            }
        };
        self.words.rest().await;
        use std::os::unix::process::ExitStatusExt as _;
        match status {
            Ok(status) => {
                end(status.code().or(status.signal().map(|signal| SIGNALS + signal)), &self.words.tail())
            }
            Err(error) => HookEnd::Bad(format!("cannot be waited for: {error}")),
        }
    }
}

/// Waits for the end of an earlier daemon's process, and returns its state.
pub(super) async fn find(process: HookProcess, base: &Path) -> Found {
    let mut words = Words::of(None);
    if lives(process)
        && let Ok(held) = Process::open(process.id)
        && lives(process)
    {
        words = Words::of(OpenOptions::new().open_receiver(format!("/proc/{}/fd/1", process.id)).ok());
        loop {
            tokio::select! {
                () = held.ended() => break,
                () = words.listen() => {}
            }
        }
        words.rest().await;
    }
    let said = words.tail();
    let status = std::fs::read_to_string(with(base, "ended")).ok().and_then(|text| text.trim().parse().ok());
    match status {
        Some(status) => Found::Ended(end(Some(status), &said)),
        None if boot().is_ok_and(|boot| boot != process.boot) => {
            Found::Ended(HookEnd::Bad("ran when this host went down: its result is unknown".to_owned()))
        }
        None if !with(base, "begun").exists() => Found::NeverBegan,
        None => Found::Ended(end(None, &said)),
    }
}

/// Kills a process with all that it has started, if it is still the recorded one.
pub(super) fn kill(process: HookProcess) {
    if lives(process)
        && let Some(leader) = Pid::from_raw(process.id)
    {
        // It may just have ended.
        let _ = kill_process_group(leader, Signal::KILL);
    }
}

pub(super) fn forget(base: &Path) {
    for file in FILES {
        // Usually it does not exist.
        let _ = std::fs::remove_file(with(base, file));
    }
}

/// Checks whether the program can be run, because the shell's messages about that are worse.
fn check(program: &Path) -> io::Result<()> {
    let metadata = std::fs::metadata(program)?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

fn with(base: &Path, file: &str) -> PathBuf {
    let mut name = base.as_os_str().to_owned();
    name.push(".");
    name.push(file);
    PathBuf::from(name)
}

fn end(status: Option<i32>, said: &str) -> HookEnd {
    let ended = match status {
        Some(0) => return HookEnd::Good,
        Some(status) if (1..=64).contains(&(status - SIGNALS)) => {
            format!("ended with signal {}", status - SIGNALS)
        }
        Some(status) => format!("ended with exit status {status}"),
        None => "was ended by another program: its result is unknown".to_owned(),
    };
    HookEnd::Bad(ended + &after_its_words(said))
}

/// Returns its last output, for the end of a message.
pub(super) fn after_its_words(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(", and said last: {said}") }
}

/// Returns whether a process is the recorded one, and runs.
fn lives(process: HookProcess) -> bool {
    boot().is_ok_and(|boot| boot == process.boot)
        && started(process.id).is_ok_and(|started| started == process.started)
}

/// Returns when a process began, in ticks since the boot.
fn started(id: i32) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    // Its name, in brackets, may contain anything.
    let (_, fields) = status.rsplit_once(')').ok_or(io::ErrorKind::InvalidData)?;
    let started = fields.split_whitespace().nth(19).and_then(|field| field.parse().ok());
    started.ok_or(io::ErrorKind::InvalidData.into())
}

fn boot() -> io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_err(io::Error::other)
}

/// The end of a hook's standard error.
struct Words {
    pipe: Option<Receiver>,
    last: Vec<u8>,
}

impl Words {
    fn of(pipe: Option<Receiver>) -> Self {
        Self { pipe, last: Vec::new() }
    }

    /// Reads what is left in the pipe.
    async fn rest(&mut self) {
        let rest = async {
            while self.pipe.is_some() {
                self.listen().await;
            }
        };
        // A process that still holds the pipe may write more, which is ignored.
        let _ = tokio::time::timeout(WORDS_TIMEOUT, rest).await;
    }

    async fn listen(&mut self) {
        let mut piece = [0; 1024];
        let Some(pipe) = &mut self.pipe else { return std::future::pending().await };
        match pipe.read(&mut piece).await {
            Ok(0) | Err(_) => self.pipe = None,
            Ok(bytes) => {
                self.last.extend_from_slice(&piece[..bytes]);
                let too_many = self.last.len().saturating_sub(WORDS_BYTES_MAX);
                self.last.drain(..too_many);
            }
        }
    }

    /// Returns the last lines as one line.
    fn tail(&self) -> String {
        words::clean_lines(&String::from_utf8_lossy(&self.last), LINES_MAX)
    }
}
