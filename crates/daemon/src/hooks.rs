//! Runs what an administrator has configured before and after a VM, or volumes without one, change their host or
//! their store: routes, DNS, overlays.
//!
//! ```text
//!            disks copied                                                          ended
//!   source ───────┬─── before ─── memory ─── stands ══ commit ══ its QEMU ended ────┬─── after
//!   target ───────┴ before ─ QEMU started ── loaded ══════════════ runs ── after    └ (after, if it does not run there)
//! ```
//! A hook gets its context in its environment, and is killed with all that it has started if it takes too long.
//! Nothing of a VM is decided here: a hook's failure is an answer like any other.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use migration::MigrationId;
use migration::journal::Outcome;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, ChildStderr, Command};

use crate::config::HooksConfig;

/// Bytes of what a hook says last that are kept: they become a part of a message.
const WORDS_BYTES_MAX: usize = 2 << 10;
/// Lines of that.
const LINES_MAX: usize = 5;
/// How long the end of its words is waited for when a hook has ended: what it has left running may hold the pipe.
const WORDS_TIMEOUT: Duration = Duration::from_millis(200);

/// On which side of a VM's way a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HookSide {
    /// The VM leaves it.
    Source,
    /// The VM comes to it.
    Target,
    /// Both: volumes move between its stores.
    Both,
}

/// What a hook is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HookContext {
    /// The migration, by the number that it has at this host.
    pub(crate) migration: MigrationId,
    /// Name of the VM; empty: volumes move without one.
    pub(crate) vm: String,
    /// Names of its volumes.
    pub(crate) volumes: Vec<String>,
    /// Which side this host is.
    pub(crate) side: HookSide,
    /// What this host calls itself.
    pub(crate) own: String,
    /// What the other host is called here.
    pub(crate) other: String,
}

/// Why a hook was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookFault {
    /// It could not be started.
    #[error("the hook {program} ({side}) cannot be started: {source}")]
    Start {
        /// Which.
        program: PathBuf,
        /// Where.
        side: &'static str,
        /// What the system answered.
        source: std::io::Error,
    },
    /// It failed.
    #[error("the hook {program} ({side}) ended with {status}{}", said(words))]
    Failed {
        /// Which.
        program: PathBuf,
        /// Where.
        side: &'static str,
        /// How it ended, for people.
        status: String,
        /// What it said last.
        words: String,
    },
    /// It took too long.
    #[error(
        "the hook {program} ({side}) was killed: it took longer than {} s (hooks.timeout_s){}",
        limit.as_secs(), said(words)
    )]
    Overdue {
        /// Which.
        program: PathBuf,
        /// Where.
        side: &'static str,
        /// How long it might take.
        limit: Duration,
        /// What it said last.
        words: String,
    },
}

/// The hooks of one VM on its way, at one host: `before` once, and then `after` once.
pub(crate) struct HookRunner {
    hooks: HooksConfig,
    context: HookContext,
    /// Whether there is something that `after` comes after.
    has_begun: AtomicBool,
    /// Whether `after` has been run, or is being run.
    is_over: AtomicBool,
    /// Told when `after` fails.
    warn: Box<dyn Fn(String) + Send + Sync>,
}

/// Whether `before` was run by an earlier daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// It was not.
    No,
    /// It may have been.
    Perhaps,
}

impl HookSide {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Target => "target",
            Self::Both => "both",
        }
    }
}

impl HookRunner {
    /// Notes something besides that went wrong, for people.
    pub(crate) fn note(&self, warning: String) {
        (self.warn)(warning);
    }

    /// A runner of `hooks` with this context. `warn` is told of an `after` that fails.
    pub(crate) fn new(
        hooks: HooksConfig,
        context: HookContext,
        begun: Begun,
        warn: impl Fn(String) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            hooks,
            context,
            has_begun: AtomicBool::new(begun == Begun::Perhaps),
            is_over: AtomicBool::new(false),
            warn: Box::new(warn),
        })
    }

    /// Before the VM is stopped, or is started to be loaded: if this fails, it is to stay. Dropping the future kills
    /// what runs.
    ///
    /// # Errors
    /// [`HookFault`], which names the hook and what it said.
    pub(crate) async fn before(&self) -> Result<(), HookFault> {
        self.has_begun.store(true, Ordering::SeqCst);
        match &self.hooks.before {
            None => Ok(()),
            Some(program) => self.run(program, "before", None).await,
        }
    }

    /// After the VM has moved, or has not; the first call counts. Nothing is undone by a failure.
    pub(crate) async fn after(&self, outcome: &Outcome) {
        if !self.has_begun.load(Ordering::SeqCst) || self.is_over.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(program) = &self.hooks.after else { return };
        if let Err(fault) = self.run(program, "after", Some(outcome)).await {
            let warning = fault.to_string();
            tracing::warn!(migration = %self.context.migration, vm = %self.context.vm, %warning, "a hook failed");
            (self.warn)(warning);
        }
    }

    async fn run(
        &self,
        program: &Path,
        moment: &'static str,
        outcome: Option<&Outcome>,
    ) -> Result<(), HookFault> {
        let HookContext { migration, vm, volumes, side, own, other } = &self.context;
        let (source, target) = match side {
            HookSide::Source => (own, other),
            HookSide::Target => (other, own),
            HookSide::Both => (own, own),
        };
        let mut command = Command::new(program);
        command
            .env("STERNA_HOOK", moment)
            .env("STERNA_SIDE", side.name())
            .env("STERNA_MIGRATION", migration.to_string())
            .env("STERNA_VM", vm)
            .env("STERNA_VOLUMES", volumes.join(" "))
            .env("STERNA_SOURCE_HOST", source)
            .env("STERNA_TARGET_HOST", target);
        if let Some(outcome) = outcome {
            command.env("STERNA_OUTCOME", outcome_name(outcome));
        }
        tracing::info!(%migration, %vm, hook = %program.display(), moment, side = side.name(), "a hook is run");
        run(command, program, side.name(), self.hooks.timeout).await
    }
}

/// Runs a program to its end, or kills it with all that it has started.
async fn run(
    mut command: Command,
    program: &Path,
    side: &'static str,
    limit: Duration,
) -> Result<(), HookFault> {
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0);
    let program = program.to_owned();
    let mut child =
        command.spawn().map_err(|source| HookFault::Start { program: program.clone(), side, source })?;
    let group = Group::of(&child);
    let mut words = Words { pipe: child.stderr.take(), last: Vec::new() };
    let ended = tokio::time::timeout(limit, words.while_it_runs(&mut child)).await;
    match ended {
        Ok(Ok(status)) => {
            group.leave();
            words.rest().await;
            match status.success() {
                true => Ok(()),
                false => {
                    let status = status_name(status);
                    Err(HookFault::Failed { program, side, status, words: words.tail() })
                }
            }
        }
        Ok(Err(source)) => Err(HookFault::Start { program, side, source }),
        Err(_) => {
            drop(group);
            // It is dead: only to leave no zombie behind.
            let _ = child.wait().await;
            Err(HookFault::Overdue { program, side, limit, words: words.tail() })
        }
    }
}

/// A hook and all that it has started, until it has ended by itself: dropping it kills them.
struct Group {
    leader: Option<Pid>,
}

impl Group {
    fn of(child: &Child) -> Self {
        Self { leader: child.id().and_then(|id| Pid::from_raw(id.cast_signed())) }
    }

    /// The leader has ended and was waited for: its number may be somebody else's from now on.
    fn leave(mut self) {
        self.leader = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            // It may just have ended.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// What a hook says on its standard error: the last of it.
struct Words {
    pipe: Option<ChildStderr>,
    last: Vec<u8>,
}

impl Words {
    /// Listens until the child has ended.
    async fn while_it_runs(&mut self, child: &mut Child) -> std::io::Result<ExitStatus> {
        loop {
            tokio::select! {
                status = child.wait() => return status,
                () = self.listen() => {}
            }
        }
    }

    /// Takes what is left in the pipe.
    async fn rest(&mut self) {
        let rest = async {
            while self.pipe.is_some() {
                self.listen().await;
            }
        };
        // Whoever still holds it may have more to say, and nobody who listens.
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

    /// The last lines, in one.
    fn tail(&self) -> String {
        let text = String::from_utf8_lossy(&self.last);
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(LINES_MAX)..].join(" | ")
    }
}

fn said(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!(", and said last: {words}") }
}

fn status_name(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown status".to_owned(),
    }
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Moved { .. } | Outcome::TakenBack => "moved",
        Outcome::Cancelled | Outcome::CancelledThere => "cancelled",
        Outcome::Failed { .. } => "failed",
        Outcome::HandedBack { .. } => "handed-back",
    }
}

#[cfg(test)]
mod tests;
