//! The audit log: who has ordered what of this host, a line of JSON a piece, in a file that only the daemon's user reads.
//!
//! ```text
//!   http: every request that is not safe, when it is answered ──┐
//!   peers: what other hosts offer                              ─┼─try_send─► queue ─► thread ─► audit.log, audit.log.1 …
//!   hosts: who has joined by an invitation                     ─┘    └─ full: counted as lost
//! ```
//! Nobody waits for it: an order is carried out whether or not it can be written down. What was lost is said in the daemon's log and
//! counted. It decides nothing, and nothing is read from it.

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

/// Name of the file in the data folder.
pub(crate) const FILE: &str = "audit.log";
/// Lines that wait to be written: some seconds' worth of orders as fast as the API takes them, and little memory.
const QUEUE_MAX: usize = 1024;
/// Longest that the end of the daemon waits for lines to be written.
const END_WAIT_MAX: Duration = Duration::from_secs(2);

/// The audit log of a daemon. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    queue: SyncSender<Message>,
    state: Arc<State>,
}

/// What the writer is told.
#[derive(Debug)]
enum Message {
    /// A line, with its end.
    Line(Vec<u8>),
    /// All lines before have been written when this is answered.
    Flush(SyncSender<()>),
}

/// What has become of lines.
#[derive(Debug, Default)]
pub(crate) struct State {
    written: AtomicU64,
    lost: AtomicU64,
    /// Whether the latest line was lost: the log says so once.
    is_losing: AtomicBool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum By {
    /// A process of this host, as the kernel knew it when it connected to the API's socket.
    Process {
        /// Number of its user.
        uid: u32,
        /// Number of its group.
        gid: u32,
        /// Its number; it may have ended since. `None`: the kernel does not say.
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<i32>,
    },
    /// Whoever has a key that may use the API over TLS.
    Grant {
        /// What he is called.
        grant: String,
        /// The digest of his key.
        #[serde(serialize_with = "as_text")]
        key: HostId,
        /// What he may do; `None`: he was invited.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<api::Role>,
    },
    Host {
        /// The identity by which it is known.
        #[serde(rename = "host", serialize_with = "as_text")]
        id: HostId,
    },
}

#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    /// Who orders; `None`: the kernel does not say.
    pub(crate) by: Option<By>,
    /// What is ordered: a method of HTTP, or what another host does.
    pub(crate) order: String,
    /// What it is about: a path of the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// How: what `details` lets through.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub(crate) details: Map<String, Value>,
    /// Status of the answer; `None`: the client did not wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// How it ended: `done`, `unanswered`, or why it was refused.
    pub(crate) outcome: String,
    /// How long it took.
    pub(crate) seconds: f64,
}

/// An entry with the time at which it was made.
#[derive(Serialize)]
struct Line<'a> {
    time_unix_ms: u64,
    #[serde(flatten)]
    entry: &'a Entry,
}

impl Audit {
    /// Begins the log in a data folder. A file that cannot be opened is tried again with each line.
    pub(crate) fn begin(data_dir: &Path) -> Self {
        let (queue, lines) = sync_channel(QUEUE_MAX);
        let audit = Self { queue, state: Arc::default() };
        let (path, state) = (data_dir.join(FILE), Arc::clone(&audit.state));
        let thread = std::thread::Builder::new().name("audit".to_owned());
        if let Err(error) = thread.spawn(move || writer::run(&path, &lines, &state)) {
            tracing::warn!(%error, "there is no thread for the audit log: nothing will be written there");
        }
        audit
    }

    /// Writes an entry down, soon. Never waits.
    pub(crate) fn note(&self, entry: &Entry) {
        let Ok(mut line) = serde_json::to_vec(&Line { time_unix_ms: now_unix_ms(), entry }) else {
            self.state.lose(1, "it cannot be written as JSON");
            return;
        };
        line.push(b'\n');
        match self.queue.try_send(Message::Line(line)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.state.lose(1, "its disk does not keep up"),
            Err(TrySendError::Disconnected(_)) => self.state.lose(1, "it has no thread"),
        }
    }

    /// Lines that were written, and lines that were lost.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.state.written.load(Ordering::Relaxed), self.state.lost.load(Ordering::Relaxed))
    }

    /// Waits a little until what was noted is written. It sleeps.
    pub(crate) fn flush(&self) {
        let (flushed, is_flushed) = sync_channel(1);
        // A queue that is full has lost lines already.
        if self.queue.try_send(Message::Flush(flushed)).is_ok() {
            let _ = is_flushed.recv_timeout(END_WAIT_MAX);
        }
    }
}

impl State {
    /// So many lines are on the disk.
    fn write(&self, lines: u64) {
        self.written.fetch_add(lines, Ordering::Relaxed);
        if self.is_losing.swap(false, Ordering::Relaxed) {
            let lost = self.lost.load(Ordering::Relaxed);
            tracing::warn!(lost, "the audit log is written again; entries are missing from it");
        }
    }

    /// So many lines are not.
    fn lose(&self, lines: u64, reason: &str) {
        self.lost.fetch_add(lines, Ordering::Relaxed);
        if !self.is_losing.swap(true, Ordering::Relaxed) {
            tracing::warn!(reason, "the audit log cannot be written: orders are carried out all the same");
        }
    }
}

fn as_text<S: serde::Serializer>(id: &HostId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&transport::HostId(id.0))
}

#[cfg(test)]
mod tests;
