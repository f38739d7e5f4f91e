//! The audit log: who has ordered what of this host, one line of JSON each, in a file that only the daemon's user can read.
//!
//! ```text
//!   http: every request that is not safe, when it is answered ──┐
//!   peers: offers of other hosts                               ─┼─try_send─► queue ─► thread ─► audit.log, audit.log.1 …
//!   hosts: hosts that have joined by an invitation             ─┘    └─ full: counted as lost
//! ```
//! No operation waits for it: an order is carried out whether or not it can be logged. Lost entries are reported in the
//! daemon's log and counted. Nothing is decided by it, and the daemon never reads it.

pub(crate) mod details;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use migration::HostId;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::journal::now_unix_ms;

pub(crate) const FILE: &str = "audit.log";
/// The number of lines in the queue: some seconds of orders at the API's full rate, and little memory.
const QUEUE_MAX: usize = 1024;
/// The longest time that the end of the daemon waits for lines to be written.
const END_WAIT_MAX: Duration = Duration::from_secs(2);

/// The audit log of a daemon. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    queue: SyncSender<Message>,
    state: Arc<LogCounters>,
}

#[derive(Debug)]
enum Message {
    /// A line, with its line end.
    Line(Vec<u8>),
    /// Answered when all earlier lines have been written.
    Flush(SyncSender<()>),
}

#[derive(Debug, Default)]
pub(crate) struct LogCounters {
    written: AtomicU64,
    lost: AtomicU64,
    /// Whether the latest line was lost, so that the loss is logged once.
    is_losing: AtomicBool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum By {
    /// A process of this host, as the kernel knew it when it connected to the API's socket.
    Process {
        uid: u32,
        gid: u32,
        /// Its process number; it may have ended since. `None`: the kernel does not say.
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<i32>,
    },
    /// A client with a key for the API over TLS.
    Grant {
        grant: String,
        #[serde(serialize_with = "as_text")]
        key: HostId,
        /// The client's role; `None`: it has an access token.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<api::Role>,
    },
    Host {
        #[serde(rename = "host", serialize_with = "as_text")]
        id: HostId,
    },
}

#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    /// The client; `None`: the kernel does not say.
    pub(crate) by: Option<By>,
    /// The order: an HTTP method, or the action of another host.
    pub(crate) order: String,
    /// The object: a path of the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// The parameters that `details` lets through.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub(crate) details: Map<String, Value>,
    /// The status of the answer; `None`: the client did not wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// The outcome: `done`, `unanswered`, or why it was refused.
    pub(crate) outcome: String,
    pub(crate) seconds: f64,
}

#[derive(Serialize)]
struct Line<'a> {
    time_unix_ms: u64,
    #[serde(flatten)]
    entry: &'a Entry,
}

impl Audit {
    /// Begins the log in a data folder. If the file cannot be opened, each line tries again.
    pub(crate) fn begin(data_dir: &Path) -> Self {
        let (queue, lines) = sync_channel(QUEUE_MAX);
        let audit = Self { queue, state: Arc::default() };
        let (path, state) = (data_dir.join(FILE), Arc::clone(&audit.state));
        let thread = std::thread::Builder::new().name("audit".to_owned());
        if let Err(error) = thread.spawn(move || writer::run(&path, &lines, &state)) {
            tracing::warn!(%error, "cannot start the thread of the audit log: no entries will be written");
        }
        audit
    }

    /// Queues an entry without waiting.
    pub(crate) fn note(&self, entry: &Entry) {
        let Ok(mut line) = serde_json::to_vec(&Line { time_unix_ms: now_unix_ms(), entry }) else {
            self.state.lose(1, "it cannot be written as JSON");
            return;
        };
        line.push(b'\n');
        match self.queue.try_send(Message::Line(line)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.state.lose(1, "its disk is too slow"),
            Err(TrySendError::Disconnected(_)) => self.state.lose(1, "it has no thread"),
        }
    }

    /// Returns the numbers of written and of lost lines.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.state.written.load(Ordering::Relaxed), self.state.lost.load(Ordering::Relaxed))
    }

    /// Waits for a limited time until queued entries are written. Blocks.
    pub(crate) fn flush(&self) {
        let (flushed, is_flushed) = sync_channel(1);
        // A full queue has lost lines already.
        if self.queue.try_send(Message::Flush(flushed)).is_ok() {
            let _ = is_flushed.recv_timeout(END_WAIT_MAX);
        }
    }
}

impl LogCounters {
    fn write(&self, lines: u64) {
        self.written.fetch_add(lines, Ordering::Relaxed);
        if self.is_losing.swap(false, Ordering::Relaxed) {
            let lost = self.lost.load(Ordering::Relaxed);
            tracing::warn!(lost, "the audit log can be written again; it lacks entries");
        }
    }

    fn lose(&self, lines: u64, reason: &str) {
        self.lost.fetch_add(lines, Ordering::Relaxed);
        if !self.is_losing.swap(true, Ordering::Relaxed) {
            tracing::warn!(reason, "cannot write the audit log; orders are carried out without entries");
        }
    }
}

fn as_text<S: serde::Serializer>(id: &HostId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&transport::HostId(id.0))
}

#[cfg(test)]
mod tests;
