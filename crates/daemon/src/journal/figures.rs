//! What the journal's thread has done since it began, for who looks at the host.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lane::Latencies;

/// Figures of a journal.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    /// Commits that became durable.
    pub(crate) commits: u64,
    pub(crate) records: u64,
    /// Commits that were refused, or of which it is not known whether they are durable.
    pub(crate) failures: u64,
    /// Whether the latest commit that fitted could be made durable.
    pub(crate) is_writable: bool,
    /// Bytes of the file that hold something.
    pub(crate) file_bytes: u64,
    /// How long durable writes took; several commits may share one.
    pub(crate) writes: Latencies,
}

impl Default for Figures {
    fn default() -> Self {
        let writes = Latencies::default();
        Self { commits: 0, records: 0, failures: 0, is_writable: true, file_bytes: 0, writes }
    }
}

/// Figures that the journal's thread changes and anybody reads.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedFigures(Arc<Mutex<Figures>>);

impl SharedFigures {
    pub(super) fn read(&self) -> Figures {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A durable write took so long.
    pub(super) fn wrote(&self, took: Duration) {
        self.change(|figures| figures.writes.add(took));
    }

    /// So many commits of so many records were answered, and the file ends here.
    pub(super) fn answered(&self, result: Result<usize, ()>, commits: usize, file_bytes: usize) {
        self.change(|figures| {
            figures.is_writable = result.is_ok();
            match result {
                Ok(records) => {
                    figures.commits += commits as u64;
                    figures.records += records as u64;
                }
                Err(()) => figures.failures += commits as u64,
            }
            figures.file_bytes = file_bytes as u64;
        });
    }

    /// A commit contradicts what is true.
    pub(super) fn refused(&self) {
        self.change(|figures| figures.failures += 1);
    }

    /// The file ends here.
    pub(super) fn ends_at(&self, file_bytes: usize) {
        self.change(|figures| figures.file_bytes = file_bytes as u64);
    }

    fn change(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
