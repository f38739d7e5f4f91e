//! A client of QEMU's machine protocol. It knows how commands, answers and events travel, and none by its meaning.
//!
//! ```text
//!   execute() ──► lines ──► writer task ──► socket ──► reader task ──┬─► by identity: the one that waits
//!      ▲                                                              │
//!      └──────────────── answer, silence, or gone ◄───────────────────┴─► events(), to everybody who listens
//! ```
//!
//! Each command waits for its own answer, until its own deadline; an answer that comes later is dropped. Lines are
//! written by a task of its own, so a caller that gives up in the middle leaves no half a line behind.

mod reader;
mod wire;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::error::QmpError;
use super::state::Version;
use reader::Lines;
use wire::Message;

pub use wire::Event;

/// How long a monitor may take to greet. QEMU does so at once when it serves nobody else; while it starts, or waits for
/// a disk, it may take seconds.
const GREETING_DEADLINE: Duration = Duration::from_secs(10);
/// How many commands may wait to be written. QEMU carries out one after the other anyway.
const COMMANDS_QUEUED_MAX: usize = 16;
/// How many events a listener may be behind before it misses some. A migration has about ten; a guest that opens and
/// closes ports of a console may cause many.
const EVENTS_KEPT: usize = 256;

/// A connection to one monitor. Dropping it closes the connection, and QEMU serves the next client.
#[derive(Debug)]
pub struct Qmp {
    version: Version,
    /// The process that listens, if the kernel told.
    process: Option<i32>,
    shared: Arc<Shared>,
    lines: mpsc::Sender<Vec<u8>>,
    next_identity: AtomicU64,
    tasks: [AbortHandle; 2],
}

/// What the reader shares with those that wait.
#[derive(Debug)]
struct Shared {
    /// Those that wait for an answer, by the identity of their command. No command is added once `gone` is told.
    waiting: Mutex<HashMap<u64, oneshot::Sender<Result<Value, wire::Refusal>>>>,
    events: broadcast::Sender<Event>,
    /// Why the connection has ended, once it has.
    gone: watch::Sender<Option<String>>,
}

impl Qmp {
    /// Connects to a monitor, hears its greeting and agrees on capabilities.
    ///
    /// # Errors
    /// If nobody listens there, it is no monitor, or it serves somebody else.
    pub async fn connect(socket: &Path) -> Result<Self, QmpError> {
        Self::connect_within(socket, GREETING_DEADLINE).await
    }

    /// Connects; the monitor may take so long to greet.
    async fn connect_within(socket: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let connect = |source| QmpError::Connect { socket: socket.to_owned(), source };
        let stream = UnixStream::connect(socket).await.map_err(connect)?;
        let process = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
        let (input, output) = stream.into_split();
        let mut input = Lines::new(input);
        let greeting = timeout(deadline, input.next()).await;
        let silent = |_| QmpError::NoGreeting { socket: socket.to_owned(), waited: deadline };
        let greeting = greeting.map_err(silent)?;
        let version = greeting.ok().as_deref().and_then(wire::decode_greeting);
        let version = version.ok_or_else(|| QmpError::NotAMonitor { socket: PathBuf::from(socket) })?;
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (gone, _) = watch::channel(None);
        let shared = Arc::new(Shared { waiting: Mutex::default(), events, gone });
        let (lines, queued) = mpsc::channel(COMMANDS_QUEUED_MAX);
        let reader = tokio::spawn(listen(input, Arc::clone(&shared))).abort_handle();
        let writer = tokio::spawn(speak(output, queued, Arc::clone(&shared))).abort_handle();
        let next_identity = AtomicU64::new(1);
        let qmp = Self { version, process, shared, lines, next_identity, tasks: [reader, writer] };
        qmp.execute("qmp_capabilities", json!({}), GREETING_DEADLINE).await?;
        Ok(qmp)
    }

    /// The version that QEMU greeted with.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// The process that listens at the socket; `None` if the kernel does not tell.
    ///
    /// It is the one that bound the socket: QEMU, unless somebody else did so for it.
    pub fn process(&self) -> Option<i32> {
        self.process
    }

    /// Has a command carried out, and returns what it returns.
    ///
    /// `arguments` is an object. Several commands may wait at the same time; QEMU carries them out in order. If the
    /// future is dropped the command may be carried out or not.
    ///
    /// # Errors
    /// If QEMU refuses it, does not answer until `deadline` is over, or is gone.
    pub async fn execute(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let identity = self.next_identity.fetch_add(1, Ordering::Relaxed);
        let mut answer = self.wait_for(identity, command)?;
        let begun = Instant::now();
        let exchange = async {
            let gone = |_| self.gone_during(command);
            self.lines.send(wire::encode(command, &arguments, identity)).await.map_err(gone)?;
            (&mut answer.receiver).await.map_err(|_| self.gone_during(command))
        };
        match timeout(deadline, exchange).await {
            Ok(answer) => answer?.map_err(|refusal| QmpError::Refused {
                command: command.to_owned(),
                class: refusal.class,
                description: refusal.description,
            }),
            Err(_) => Err(QmpError::Silent { command: command.to_owned(), waited: begun.elapsed() }),
        }
    }

    /// What happens from now on.
    pub fn events(&self) -> Events {
        Events { receiver: self.shared.events.subscribe(), gone: self.shared.gone.subscribe() }
    }

    /// Waits until the connection has ended, and says how.
    pub async fn closed(&self) -> String {
        let mut gone = self.shared.gone.subscribe();
        let reason = gone.wait_for(Option::is_some).await;
        reason.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    /// Enters a command among those that wait.
    fn wait_for(&self, identity: u64, command: &str) -> Result<Waiting<'_>, QmpError> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.shared.waiting();
        // Under the lock: the reader tells that it has ended before it takes the lock to drop those that wait.
        if self.shared.gone.borrow().is_some() {
            drop(waiting);
            return Err(self.gone_during(command));
        }
        waiting.insert(identity, sender);
        Ok(Waiting { shared: &self.shared, identity, receiver })
    }

    fn gone_during(&self, command: &str) -> QmpError {
        let reason = self.shared.gone.borrow().clone();
        QmpError::Gone {
            command: command.to_owned(),
            reason: reason.unwrap_or_else(|| "the connection was closed".to_owned()),
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// One that waits for an answer. Dropping it ends the wait.
struct Waiting<'a> {
    shared: &'a Shared,
    identity: u64,
    receiver: oneshot::Receiver<Result<Value, wire::Refusal>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.waiting().remove(&self.identity);
    }
}

impl Shared {
    /// A panic elsewhere does not make the map wrong.
    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Result<Value, wire::Refusal>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every wait. The first reason is the one that is told.
    fn end(&self, reason: String) {
        self.gone.send_if_modified(|gone| {
            let is_first = gone.is_none();
            gone.get_or_insert(reason);
            is_first
        });
        self.waiting().clear();
    }

    fn take(&self, message: Message) {
        match message {
            Message::Answer { identity, answer } => {
                // Nobody waits any more if its deadline was over.
                if let Some(sender) = self.waiting().remove(&identity) {
                    let _ = sender.send(answer);
                }
            }
            // Nobody may be listening.
            Message::Event(event) => drop(self.events.send(event)),
            Message::Unknown => tracing::debug!("QEMU sent a message of an unknown kind"),
        }
    }
}

/// What happens in a QEMU, for one listener.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Event>,
    gone: watch::Receiver<Option<String>>,
}

/// What a listener hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// The next event.
    Event(Event),
    /// The listener was too slow: so many events are lost to it. What it waits for may have been among them.
    Missed(u64),
    /// The connection has ended; nothing will be heard any more.
    Gone,
}

impl Events {
    /// Waits for the next event. Dropping the future loses none.
    pub async fn next(&mut self) -> Heard {
        let received = tokio::select! {
            biased;
            received = self.receiver.recv() => received,
            // What came before the end is heard before it.
            _ = self.gone.wait_for(Option::is_some) => match self.receiver.try_recv() {
                Ok(event) => Ok(event),
                Err(broadcast::error::TryRecvError::Lagged(missed)) => {
                    Err(broadcast::error::RecvError::Lagged(missed))
                }
                Err(_) => Err(broadcast::error::RecvError::Closed),
            },
        };
        match received {
            Ok(event) => Heard::Event(event),
            Err(broadcast::error::RecvError::Lagged(missed)) => Heard::Missed(missed),
            Err(broadcast::error::RecvError::Closed) => Heard::Gone,
        }
    }
}

/// Reads until the connection ends.
async fn listen(mut lines: Lines, shared: Arc<Shared>) {
    let reason = loop {
        match lines.next().await {
            Ok(line) => match wire::decode(&line) {
                Ok(message) => shared.take(message),
                Err(garbled) => break garbled.to_string(),
            },
            Err(error) => break error.to_string(),
        }
    };
    shared.end(reason);
}

/// Writes what is queued until the connection ends.
async fn speak(mut output: OwnedWriteHalf, mut lines: mpsc::Receiver<Vec<u8>>, shared: Arc<Shared>) {
    while let Some(line) = lines.recv().await {
        if let Err(error) = output.write_all(&line).await {
            return shared.end(format!("QEMU does not listen any more: {error}"));
        }
    }
}

#[cfg(test)]
mod tests;
