//! The journal's thread: combines queued commits into one frame, and answers them when it is durable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use migration::journal::{Entry, Inconsistent, Record, State, encode};
use migration::{CommitFault, MigrationId, VolumeId};
use tokio::sync::oneshot;

use super::figures::SharedFigures;
use super::file::{COMPACT_BYTES, JournalFile, NextFrame, ReplaceFault, Storage, now_unix_ms};
use crate::fail_point::{self, Step};

/// The largest number of commits in one frame.
const GROUP_MAX: usize = 64;

/// Records to make durable, and the channel for the answer.
pub(super) struct Request {
    pub(super) records: Vec<Record>,
    pub(super) reply: oneshot::Sender<Result<(), CommitFault>>,
}

pub(super) struct Writer<S> {
    storage: S,
    next: NextFrame,
    /// The state including the frame that is being built.
    state: State,
    /// The durable state, which other threads read.
    durable: Arc<RwLock<State>>,
    /// Grows with each change of the durable state.
    changes: Arc<AtomicU64>,
    figures: SharedFigures,
    /// The length of a frame that may or may not be in the file, because its write failed, and wiping it out failed too. Until
    /// it is wiped out, nothing is written, and every answer is *unknown*.
    doubtful: Option<usize>,
    /// Set when two files may be found after a crash. Both have the same state, as long as nothing more is written.
    is_closed: bool,
    /// Set when compacting has failed, until it succeeds, so that this is logged once.
    compaction_failed: bool,
}

impl Writer<JournalFile> {
    pub(super) fn new(file: JournalFile, state: State, durable: Arc<RwLock<State>>) -> Self {
        let next = file.next();
        Self::over(file, next, state, durable)
    }
}

impl<S: Storage> Writer<S> {
    pub(super) fn over(storage: S, next: NextFrame, state: State, durable: Arc<RwLock<State>>) -> Self {
        let (changes, figures) = (Arc::default(), SharedFigures::default());
        figures.ends_at(next.position);
        Self {
            storage,
            next,
            state,
            durable,
            changes,
            figures,
            doubtful: None,
            is_closed: false,
            compaction_failed: false,
        }
    }

    /// Returns the counter of changes of the durable state.
    pub(super) fn changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.changes)
    }

    pub(super) fn figures(&self) -> SharedFigures {
        self.figures.clone()
    }

    /// Writes queued commits until all senders are gone.
    pub(super) fn run(mut self, queue: &mpsc::Receiver<Request>) {
        while let Ok(first) = queue.recv() {
            let group = std::iter::once(first).chain(queue.try_iter().take(GROUP_MAX - 1)).collect();
            self.write_group(group);
            // After the answers, and without a migration, so that no commit of a migration waits for this.
            let is_idle = self.doubtful.is_none() && self.state.unfinished().next().is_none();
            if self.next.position > COMPACT_BYTES && is_idle {
                self.compact();
            }
        }
    }

    /// Makes one frame of the valid commits, and answers all.
    pub(super) fn write_group(&mut self, group: Vec<Request>) {
        let mut records = Vec::new();
        let mut waiting = Vec::new();
        let at_unix_ms = now_unix_ms();
        for request in group {
            match self.accept(at_unix_ms, &request.records) {
                Ok(()) => {
                    records.extend(request.records);
                    waiting.push(request.reply);
                }
                // The opposite order was committed first.
                Err(Inconsistent::Overtaken(migration)) => {
                    tracing::info!(%migration, "refused a handover or its cancellation: the journal has the other one");
                    answer(request.reply, Err(CommitFault::NotWritten));
                }
                Err(error) => {
                    tracing::error!(%error, records = ?request.records, "a commit contradicts the journal");
                    self.figures.refused();
                    answer(request.reply, Err(CommitFault::NotWritten));
                }
            }
        }
        if waiting.is_empty() {
            return;
        }
        let steps: Vec<Step> = records.iter().filter_map(step_of).collect();
        steps.iter().copied().for_each(fail_point::before);
        let count = records.len();
        let result = self.write(&Entry { at_unix_ms, records });
        self.figures.answered(result.map(|()| count).map_err(drop), waiting.len(), self.next.position);
        match result {
            Ok(()) => steps.iter().copied().for_each(fail_point::after),
            // Discards the state of the failed frame.
            Err(_) => self.state.clone_from(&self.durable.read().unwrap_or_else(PoisonError::into_inner)),
        }
        for reply in waiting {
            answer(reply, result);
        }
    }

    /// Applies records that do not contradict the state.
    fn accept(&mut self, at_unix_ms: u64, records: &[Record]) -> Result<(), Inconsistent> {
        let entry = Entry { at_unix_ms, records: records.to_vec() };
        // A contradiction is found on a copy of the affected parts, so it leaves no half of a commit behind.
        excerpt(&self.state, records).apply(&entry)?;
        self.state.apply(&entry)
    }

    fn write(&mut self, entry: &Entry) -> Result<(), CommitFault> {
        // N.B. a caller that got *unknown* asks again, and takes *not written* as the answer about the first attempt. That is
        // answered only once the doubtful frame is wiped out.
        if let Some(length) = self.doubtful {
            self.wipe(length)?;
        }
        if self.is_closed {
            return Err(CommitFault::NotWritten);
        }
        let frame = self.frame(entry)?;
        let began = Instant::now();
        let written = self.storage.write_at(self.next.position, &frame);
        self.figures.wrote(began.elapsed());
        if let Err(error) = written {
            tracing::error!(%error, "the journal cannot be written");
            self.wipe(frame.len())?;
            return Err(CommitFault::NotWritten);
        }
        self.next.position += frame.len();
        self.next.sequence += 1;
        let mut durable = self.durable.write().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = durable.apply(entry) {
            // It was applied to the same state before it was written.
            tracing::error!(%error, "a commit was durable before it contradicted the journal");
        }
        // N.B. under the lock, so that a reader of the number sees its state or a later one.
        self.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Makes certain that there is no frame at that place, where `length` bytes may be.
    fn wipe(&mut self, length: usize) -> Result<(), CommitFault> {
        match self.storage.write_at(self.next.position, &vec![0; length]) {
            Ok(()) => {
                self.doubtful = None;
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "whether the last commit was written is unknown");
                self.doubtful = Some(length);
                Err(CommitFault::Unknown)
            }
        }
    }

    /// Returns the frame of `entry`, after making room for it.
    fn frame(&mut self, entry: &Entry) -> Result<Vec<u8>, CommitFault> {
        let encoded = |sequence| {
            let mut frame = Vec::new();
            encode(sequence, entry, &mut frame).map(|()| frame).map_err(|error| {
                tracing::error!(%error, "a commit cannot be encoded");
                CommitFault::NotWritten
            })
        };
        let frame = encoded(self.next.sequence)?;
        if self.next.position + frame.len() <= self.storage.capacity() {
            return Ok(frame);
        }
        self.compact();
        if self.next.position + frame.len() <= self.storage.capacity() && !self.is_closed {
            return encoded(self.next.sequence);
        }
        tracing::error!(bytes = frame.len(), "the journal has no room for a commit");
        Err(CommitFault::NotWritten)
    }

    /// Replaces the file by a snapshot of the durable state; after a failure the old file remains in use.
    fn compact(&mut self) {
        let state = self.durable.read().unwrap_or_else(PoisonError::into_inner).clone();
        match self.storage.replace(&state) {
            Ok((storage, next)) => {
                tracing::debug!(
                    bytes_before = self.next.position,
                    bytes_after = next.position,
                    "journal compacted"
                );
                (self.storage, self.next) = (storage, next);
                self.compaction_failed = false;
                self.figures.ends_at(next.position);
            }
            Err(ReplaceFault::Kept(error)) => {
                if !self.compaction_failed {
                    tracing::warn!(%error, "cannot compact the journal; it remains in use");
                }
                self.compaction_failed = true;
            }
            // N.B. A power cut may bring either file back. Both have the same state only as long as nothing is written.
            Err(ReplaceFault::Unknown(error)) => {
                tracing::error!(%error, "the journal's folder cannot be made durable; restart the daemon");
                self.is_closed = true;
            }
        }
    }
}

/// Returns only the volumes and migrations that the records name, which is little, however large the state.
fn excerpt(state: &State, records: &[Record]) -> State {
    let mut volumes = BTreeSet::<VolumeId>::new();
    let mut migrations = BTreeSet::<MigrationId>::new();
    for record in records {
        match record {
            Record::Snapshot(_)
            | Record::ReservationLifted { .. }
            | Record::ImageKnown { .. }
            | Record::ImageForgotten { .. }
            | Record::Restored(_)
            | Record::RestoredMore(_) => {}
            Record::VolumeAdded(record) => volumes.extend([record.volume]),
            Record::VolumeRemoved { volume }
            | Record::ResizeBegun { volume, .. }
            | Record::Resized { volume, .. }
            | Record::MovedForgotten { volume }
            | Record::GrewElsewhere { volume, .. }
            | Record::FillingKnown { volume, .. }
            | Record::Filled { volume }
            | Record::MissingGivenUp { volume }
            | Record::Reinstated { volume, .. }
            | Record::RestoredForgotten { volume }
            | Record::DepartureConfirmed { volume }
            | Record::AttachmentGiven { volume, .. }
            | Record::AttachmentEnded { volume, .. }
            | Record::Detached { volume }
            | Record::SnapshotKnown { volume, .. }
            | Record::Reverted { volume }
            | Record::OriginKnown { volume, .. } => {
                volumes.extend([*volume]);
            }
            Record::Attached(attached) => volumes.extend([attached.record.volume]),
            Record::RevertBegun { reverts } => volumes.extend(reverts.iter().map(|(volume, _)| *volume)),
            Record::MigrationStarted { migration, volumes: moving, .. } => {
                migrations.extend([*migration]);
                volumes.extend(moving.iter().map(|moving| moving.volume));
            }
            Record::TargetPrepared { migration, .. }
            | Record::AttemptAborted { migration, .. }
            | Record::Discarding { migration, .. }
            | Record::CancelOrdered { migration }
            | Record::Released { migration, .. }
            | Record::Hollow { migration, .. }
            | Record::Owned { migration, .. }
            | Record::Promoted { migration, .. }
            | Record::HandedBack { migration, .. }
            | Record::MigrationEnded { migration, .. } => migrations.extend([*migration]),
        }
    }
    let migrations: Vec<_> =
        migrations.iter().filter_map(|id| Some((*id, state.migrations.get(id)?.clone()))).collect();
    volumes
        .extend(migrations.iter().flat_map(|(_, migration)| &migration.volumes).map(|moving| moving.volume));
    State {
        volumes: volumes.iter().filter_map(|id| Some((*id, state.volumes.get(id)?.clone()))).collect(),
        migrations: migrations.into_iter().collect(),
        next_migration: state.next_migration,
        moved: volumes.iter().filter_map(|id| Some((*id, state.moved.get(id)?.clone()))).collect(),
        // No record contradicts a fence, a branch, an origin, or what an image is.
        reservations: BTreeMap::new(),
        branches: BTreeMap::new(),
        origins: BTreeMap::new(),
        fillings: BTreeMap::new(),
        images: BTreeMap::new(),
        given: BTreeMap::new(),
        snapshots: BTreeMap::new(),
        reverts: BTreeMap::new(),
        attached: volumes.iter().filter_map(|id| Some((*id, state.attached.get(id)?.clone()))).collect(),
        restored: state.restored.clone(),
    }
}

/// Returns the fail point that a record passes.
pub(crate) fn step_of(record: &Record) -> Option<Step> {
    Some(match record {
        Record::VolumeAdded(_) => Step::Added,
        Record::VolumeRemoved { .. } => Step::Removed,
        Record::MigrationStarted { .. } => Step::Started,
        Record::TargetPrepared { .. } => Step::Prepared,
        Record::AttemptAborted { .. } => Step::Aborted,
        Record::Discarding { .. } => Step::Discarding,
        Record::Released { .. } => Step::Released,
        Record::Owned { .. } | Record::Promoted { .. } => Step::Owned,
        Record::HandedBack { .. } => Step::HandedBack,
        Record::MigrationEnded { .. } => Step::Ended,
        Record::ResizeBegun { .. } => Step::ResizeBegun,
        Record::Resized { .. } => Step::Resized,
        Record::RevertBegun { .. } => Step::RevertBegun,
        Record::Reverted { .. } => Step::Reverted,
        Record::Snapshot(_)
        | Record::SnapshotKnown { .. }
        | Record::ReservationLifted { .. }
        | Record::MovedForgotten { .. }
        | Record::CancelOrdered { .. }
        | Record::GrewElsewhere { .. }
        | Record::Hollow { .. }
        | Record::FillingKnown { .. }
        | Record::Filled { .. }
        | Record::MissingGivenUp { .. }
        | Record::Restored(_)
        | Record::Reinstated { .. }
        | Record::RestoredForgotten { .. }
        | Record::RestoredMore(_)
        | Record::DepartureConfirmed { .. }
        | Record::ImageKnown { .. }
        | Record::ImageForgotten { .. }
        | Record::AttachmentGiven { .. }
        | Record::AttachmentEnded { .. }
        | Record::Attached(_)
        | Record::Detached { .. }
        | Record::OriginKnown { .. } => return None,
    })
}

fn answer(reply: oneshot::Sender<Result<(), CommitFault>>, result: Result<(), CommitFault>) {
    // The caller may be gone; the journal is the same in any case.
    let _ = reply.send(result);
}
