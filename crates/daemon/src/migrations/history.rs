//! Histories of migrations for reports: recorded while a migration runs, kept in the data folder afterwards.
//!
//! ```text
//!   lane thread ──Report::Recorded──► Recording, in memory ──► a file, now and then and at the end
//!                                          └──► API ◄────────────┘
//! ```
//! No decision depends on a history. A history that is lost, or cannot be written or read, is missing in a report and nowhere
//! else. So it is not in the journal, and no operation waits for it.

mod file;
mod recording;
mod tallies;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lane::Recorded;
use migration::MigrationId;

use crate::migrations::history::file::Folder;
use crate::migrations::history::recording::Recording;

pub(crate) use recording::Facts;
pub(crate) use tallies::Tallies;

/// The time between two writes of a running migration's history: a crash loses at most this much.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
const FOLDER: &str = "history";

#[derive(Debug)]
pub(crate) struct Histories {
    folder: Arc<Mutex<Folder>>,
    live: Mutex<BTreeMap<MigrationId, Live>>,
    tallies: Mutex<Tallies>,
}

#[derive(Debug)]
struct Live {
    recording: Recording,
    saved: Instant,
}

impl Histories {
    pub(crate) fn new(data_dir: &Path) -> Self {
        let folder = Arc::new(Mutex::new(Folder::new(data_dir.join(FOLDER))));
        Self { folder, live: Mutex::default(), tallies: Mutex::default() }
    }

    /// Begins the history of a migration. Data of migrations without a history is dropped.
    pub(crate) fn begin(&self, migration: MigrationId, facts: Facts) {
        let live = Live { recording: Recording::new(facts), saved: Instant::now() };
        self.lock().insert(migration, live);
    }

    /// Adds recorded data; called on lane threads. Writes files on `helpers`.
    pub(crate) fn record(
        &self,
        migration: MigrationId,
        recorded: Recorded,
        helpers: &tokio::runtime::Handle,
    ) {
        self.tallies.lock().unwrap_or_else(PoisonError::into_inner).add(&recorded);
        let mut histories = self.lock();
        let Some(live) = histories.get_mut(&migration) else { return };
        live.recording.add(recorded);
        if live.saved.elapsed() >= SAVE_INTERVAL {
            live.saved = Instant::now();
            self.save(migration, live.recording.clone(), helpers);
        }
    }

    /// Returns what all migrations of this daemon have moved and how long they waited.
    pub(crate) fn tallies(&self) -> Tallies {
        self.tallies.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that a migration has ended: later data belongs to the time after it.
    pub(crate) fn migration_ended(&self, migration: MigrationId, helpers: &tokio::runtime::Handle) {
        let mut histories = self.lock();
        let Some(live) = histories.get_mut(&migration) else { return };
        live.recording.end();
        self.save(migration, live.recording.clone(), helpers);
    }

    /// Notes that the recording has ended: from then on only the file exists.
    pub(crate) fn recording_ended(
        self: &Arc<Self>,
        migration: MigrationId,
        helpers: &tokio::runtime::Handle,
    ) {
        let Some(recording) = self.lock().get(&migration).map(|live| live.recording.clone()) else { return };
        let histories = Arc::clone(self);
        helpers.spawn_blocking(move || {
            histories.write(migration, &recording);
            // Removed from memory only after the file was written, so that the recording is available at any time.
            histories.lock().remove(&migration);
        });
    }

    /// Forgets a migration that no lane ever had.
    pub(crate) fn forget(&self, migration: MigrationId) {
        self.lock().remove(&migration);
    }

    /// Returns the recording of a migration that began at `started_unix_ms`. May block, because it reads a file.
    pub(crate) fn get(&self, migration: MigrationId, started_unix_ms: u64) -> Option<api::Recording> {
        let live = self.lock().get(&migration).map(|live| live.recording.clone());
        match live {
            Some(recording) => Some(recording.describe()),
            None => self.folder().read(migration, started_unix_ms),
        }
    }

    /// Returns at most the latest `most` samples of a running migration; empty if nothing is recorded at present.
    pub(crate) fn latest(&self, migration: MigrationId, most: usize) -> Vec<api::HistorySample> {
        self.lock().get(&migration).map(|live| live.recording.latest(most)).unwrap_or_default()
    }

    /// Returns the migrations that have recordings. May block, because it reads a folder.
    pub(crate) fn recorded(&self) -> BTreeSet<MigrationId> {
        let mut recorded = self.folder().list();
        recorded.extend(self.lock().keys().copied());
        recorded
    }

    fn save(&self, migration: MigrationId, recording: Recording, helpers: &tokio::runtime::Handle) {
        let folder = Arc::clone(&self.folder);
        helpers.spawn_blocking(move || {
            let folder = folder.lock().unwrap_or_else(PoisonError::into_inner);
            folder.write(migration, recording.started_unix_ms(), &recording.describe());
        });
    }

    fn write(&self, migration: MigrationId, recording: &Recording) {
        self.folder().write(migration, recording.started_unix_ms(), &recording.describe());
    }

    fn folder(&self) -> std::sync::MutexGuard<'_, Folder> {
        self.folder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<MigrationId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
