//! Matches commands and answers by identity, over any transport.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::Events;
use super::reader::Lines;
use super::wire::{self, Event, Message, Refusal};
use crate::qemu::error::QmpError;

pub(in crate::qemu) use super::wire::Band;

/// The limit of commands that wait to be written. QEMU carries out one after the other anyway.
const COMMANDS_QUEUED_MAX: usize = 16;
/// How many events a listener may be behind before it misses some. A migration has about ten; a guest that opens and closes ports
/// of a console may cause many.
pub(super) const EVENTS_KEPT: usize = 256;

/// The meaning of a line that is no object of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qemu) enum Garbled {
    /// It is no monitor after all: the exchange ends.
    Ends,
    /// An earlier reader has begun to read the line: the rest is skipped.
    IsSkipped,
}

#[derive(Debug)]
pub(in crate::qemu) struct Exchange {
    pub(super) shared: Arc<Shared>,
    lines: mpsc::Sender<Vec<u8>>,
    next_identity: AtomicU64,
    tasks: [AbortHandle; 2],
}

#[derive(Debug)]
pub(super) struct Shared {
    /// The waiting callers, by the identity of their command. None is added once `gone` is set.
    waiting: Mutex<HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>>,
    events: broadcast::Sender<Event>,
    gone: watch::Sender<Option<String>>,
}

impl Exchange {
    pub(in crate::qemu) fn begin(
        input: Lines<impl AsyncRead + Unpin + Send + 'static>,
        output: impl AsyncWrite + Unpin + Send + 'static,
        first_identity: u64,
        garbled: Garbled,
    ) -> Self {
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (gone, _) = watch::channel(None);
        let shared = Arc::new(Shared { waiting: Mutex::default(), events, gone });
        let (lines, queued) = mpsc::channel(COMMANDS_QUEUED_MAX);
        let reader = tokio::spawn(listen(input, Arc::clone(&shared), garbled)).abort_handle();
        let writer = tokio::spawn(speak(output, queued, Arc::clone(&shared))).abort_handle();
        Self { shared, lines, next_identity: AtomicU64::new(first_identity), tasks: [reader, writer] }
    }

    /// Runs a command, and returns its result. Fails if QEMU refuses it, does not answer until `deadline` is over, or is gone.
    pub(in crate::qemu) async fn execute(
        &self,
        band: Band,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let identity = self.next_identity.fetch_add(1, Ordering::Relaxed);
        let mut answer = self.wait_for(identity, command)?;
        let begun = Instant::now();
        let exchange = async {
            let gone = |_| self.gone_during(command);
            self.lines.send(wire::encode(band, command, &arguments, identity)).await.map_err(gone)?;
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

    pub(super) fn events(&self) -> Events {
        Events { receiver: self.shared.events.subscribe(), gone: self.shared.gone.subscribe() }
    }

    pub(super) async fn closed(&self) -> String {
        let mut gone = self.shared.gone.subscribe();
        let reason = gone.wait_for(Option::is_some).await;
        reason.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    fn wait_for(&self, identity: u64, command: &str) -> Result<Waiting<'_>, QmpError> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.shared.waiting();
        // Checked under the lock: the reader sets `gone` before it takes the lock to drop the waiting callers.
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

impl Drop for Exchange {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

struct Waiting<'a> {
    shared: &'a Shared,
    identity: u64,
    receiver: oneshot::Receiver<Result<Value, Refusal>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.waiting().remove(&self.identity);
    }
}

impl Shared {
    /// A panic elsewhere leaves the map valid.
    pub(super) fn waiting(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
                // Its deadline may be over, so that no caller waits.
                if let Some(sender) = self.waiting().remove(&identity) {
                    let _ = sender.send(answer);
                }
            }
            // There may be no listener.
            Message::Event(event) => drop(self.events.send(event)),
            Message::Unknown => tracing::debug!("QEMU sent a message of an unknown kind"),
        }
    }
}

async fn listen(mut lines: Lines<impl AsyncRead + Unpin>, shared: Arc<Shared>, garbled: Garbled) {
    let reason = loop {
        match lines.next().await {
            Ok(line) => match (wire::decode(&line), garbled) {
                (Ok(message), _) => shared.take(message),
                (Err(garbled), Garbled::Ends) => break garbled.to_string(),
                (Err(_), Garbled::IsSkipped) => {}
            },
            Err(error) => break error.to_string(),
        }
    };
    shared.end(reason);
}

async fn speak(mut output: impl AsyncWrite + Unpin, mut lines: mpsc::Receiver<Vec<u8>>, shared: Arc<Shared>) {
    while let Some(line) = lines.recv().await {
        if let Err(error) = output.write_all(&line).await {
            return shared.end(format!("QEMU has stopped listening: {error}"));
        }
    }
}
