//! Counters of the journal's thread since it began, for monitoring.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lane::Latencies;

#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) commits: u64,
    pub(crate) records: u64,
    /// Commits that were refused, or that may not be durable.
    pub(crate) failures: u64,
    /// Whether the latest valid commit could be made durable.
    pub(crate) is_writable: bool,
    pub(crate) file_bytes: u64,
    /// The durations of durable writes; several commits may share one.
    pub(crate) writes: Latencies,
}

impl Default for Figures {
    fn default() -> Self {
        let writes = Latencies::default();
        Self { commits: 0, records: 0, failures: 0, is_writable: true, file_bytes: 0, writes }
    }
}

/// Counters that the journal's thread changes and other threads read.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedFigures(Arc<Mutex<Figures>>);

impl SharedFigures {
    pub(super) fn read(&self) -> Figures {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds the duration of a durable write.
    pub(super) fn wrote(&self, took: Duration) {
        self.change(|figures| figures.writes.add(took));
    }

    /// Counts answered commits, and sets the end of the file.
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

    /// Counts a commit that contradicts the state.
    pub(super) fn refused(&self) {
        self.change(|figures| figures.failures += 1);
    }

    pub(super) fn ends_at(&self, file_bytes: usize) {
        self.change(|figures| figures.file_bytes = file_bytes as u64);
    }

    fn change(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
