//! The owner of the journal file: makes records durable, and holds the durable state.
//!
//! ```text
//!   lanes, API ──commit(records)──► queue ──► journal thread: queued commits become one frame
//!                                                │ one durable write into preallocated space (`file`)
//!   callers    ◄──── Ok, or a CommitFault ───────┤
//!   readers    ◄──── State, as far as it is durable
//! ```
//!
//! `migration::journal` defines the meaning and the encoding of records. One frame is in flight at a time, so a crash can tear
//! only the last one, which was never acknowledged. Damage anywhere else is refused at the start.

mod examine;
mod export;
mod figures;
mod file;
mod restore;
mod writer;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, PoisonError, RwLock};

use migration::journal::{CodecError, Inconsistent, Record, State};
use migration::{CommitFault, MigrationId};
use tokio::sync::oneshot;

use crate::files::lock::FolderLock;
pub use examine::{JournalExamination, JournalMigration, JournalOwner, JournalVolume};
pub(crate) use figures::Figures;
use figures::SharedFigures;
pub(crate) use file::now_unix_ms;
use file::{JournalFile, ReplaceFault};
pub use restore::{HostToAsk, HostsSaid, Replacing, RestoreError, RestoredJournal, restore_journal};
pub(crate) use writer::step_of;
use writer::{Request, Writer};

/// The name of the journal in the data folder.
pub const JOURNAL_FILE: &str = "journal";

/// The journal; a clone is another handle to it. Dropping the last one ends its thread, and unlocks the data folder.
#[derive(Clone)]
pub(crate) struct Journal {
    requests: mpsc::Sender<Request>,
    durable: Arc<RwLock<State>>,
    changes: Arc<AtomicU64>,
    figures: SharedFigures,
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read or made.
    #[error("the journal {path} cannot be {operation}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The failed operation, as a participle.
        operation: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is too large for a journal.
    #[error("the journal {path} has {bytes} bytes, more than any journal: it is another file")]
    TooLarge {
        /// The path of the file.
        path: PathBuf,
        /// The size of the file.
        bytes: u64,
    },
    /// The file is no journal of this version.
    #[error("the journal {path} cannot be read; {}", advice(.source))]
    Codec {
        /// The path of the file.
        path: PathBuf,
        /// The fault of the encoding.
        source: CodecError,
    },
    /// A newer program wrote records that this one cannot decode.
    #[error(
        "the journal {path} has records of a newer program at byte {position}: start the program that wrote it, or \
         a newer one"
    )]
    Newer {
        /// The path of the file.
        path: PathBuf,
        /// The position of the first such record.
        position: usize,
    },
    /// Acknowledged records are behind a damaged part.
    #[error(
        "the journal {path} is damaged at byte {position}, with more records behind it: do not use it; restore a backup: sterna \
         journal restore"
    )]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The position of the damage.
        position: usize,
    },
    /// The records contradict each other.
    #[error("the journal {path} contradicts itself: do not use it; restore a backup: sterna journal restore")]
    Inconsistent {
        /// The path of the file.
        path: PathBuf,
        /// The contradiction that was found.
        source: Inconsistent,
    },
}

/// Decodes the bytes of a journal; `path` is for messages. Changes nothing.
///
/// # Errors
/// [`JournalError`]: a daemon would not start with it.
pub fn read_journal(path: &Path, bytes: &[u8]) -> Result<State, JournalError> {
    file::fold(path, bytes).map(|found| found.state)
}

impl Journal {
    /// Opens the journal of the data folder, or begins one, and starts the journal's thread. Drops a commit that a crash cut
    /// off. Rewrites the file as one snapshot, if the disk has room for it. After an error the content is unchanged.
    pub(crate) fn open(data_dir: &Path, lock: FolderLock) -> Result<Self, JournalError> {
        let path = data_dir.join(JOURNAL_FILE);
        let found = file::read(&path, &*path)?;
        let state = found.as_ref().map(|found| found.state.clone()).unwrap_or_default();
        let failed = |source| JournalError::Io { path: path.clone(), operation: "written", source };
        let file = match (JournalFile::create(&path, &state), found) {
            (Ok(file), _) => file,
            // A full disk must not keep guests from their volumes; the old file still has room.
            (Err(ReplaceFault::Kept(error)), Some(found)) => {
                tracing::warn!(%error, "cannot compact the journal; it remains in use");
                JournalFile::reopen(&path, &found).map_err(failed)?
            }
            (Err(ReplaceFault::Kept(error) | ReplaceFault::Unknown(error)), _) => return Err(failed(error)),
        };
        let durable = Arc::new(RwLock::new(state.clone()));
        let (requests, queue) = mpsc::channel();
        let writer = Writer::new(file, state, Arc::clone(&durable));
        let (changes, figures) = (writer.changes(), writer.figures());
        std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || {
                writer.run(&queue);
                drop(lock);
            })
            .map_err(failed)?;
        Ok(Self { requests, durable, changes, figures })
    }

    /// Makes the records durable, all or none. The commits of one caller are applied in the order of its calls.
    /// Records that do not follow from the present state are refused as [`CommitFault::NotWritten`]. Dropping the future
    /// changes nothing: the records are written all the same. It may be awaited on any executor.
    pub(crate) fn commit(
        &self,
        records: Vec<Record>,
    ) -> impl Future<Output = Result<(), CommitFault>> + Send + use<> + 'static {
        let (reply, answer) = oneshot::channel();
        let queued = self.requests.send(Request { records, reply });
        async move {
            match queued {
                Ok(()) => answer.await.unwrap_or(Err(CommitFault::Unknown)),
                // The thread has ended, so it never had the request.
                Err(_) => Err(CommitFault::NotWritten),
            }
        }
    }

    /// Commits as [`Journal::commit`] does, for threads that may sleep.
    pub(crate) fn commit_now(&self, records: Vec<Record>) -> Result<(), CommitFault> {
        let committed = std::pin::pin!(self.commit(records));
        block_on(committed)
    }

    /// Returns a number that changes with the durable state.
    pub(crate) fn version(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(crate) fn figures(&self) -> Figures {
        self.figures.read()
    }

    /// Calls `look` with the durable state. Commits wait for the lock meanwhile, so it should only copy.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.durable.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when a migration began.
    pub(crate) fn begun_unix_ms(&self, migration: MigrationId) -> Option<u64> {
        self.read(|state| state.migrations.get(&migration).map(|known| known.started_unix_ms))
    }
}

/// Waits for a future that needs no runtime.
fn block_on<T>(mut future: std::pin::Pin<&mut impl Future<Output = T>>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

fn advice(error: &CodecError) -> &'static str {
    match error {
        CodecError::Version { .. } => "nothing of it was changed: start the program that wrote it",
        _ => "is this the right data folder? If so, restore a backup: sterna journal restore",
    }
}

#[cfg(test)]
mod tests;
