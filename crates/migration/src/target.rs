//! The target's side of a handover.
//!
//! ```text
//!   Receiving ──Prepare──► Flushing ──► Promising ──► Prepared ──Commit──► Owning ──► Starting ──► Active
//!       ▲                      │            │            │                               │
//!       └────── Abort ─────────┴────────────┴────────────┘                 could not start, nothing written
//!       │                                                                                ▼
//!       └──────────────Discard──────────────► Discarding ──► Gone ◄──Discard── HandedBack ◄── HandingBack
//! ```
//! **N.B.** From *Prepared* on the target never leaves by itself, however long it waits (hard case 1): the source may
//! have released the volumes, and then nobody else has them.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::identity::{Attempt, CommitId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::Record;
use crate::message::{ToSource, ToTarget};
use crate::planted::{Bug, broken};

/// Time between two questions of a prepared target about what became of the try.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before a commit that the journal did not take is tried again.
const COMMIT_RETRY: Duration = Duration::from_millis(200);
/// When the planted bug 1 makes a prepared target leave.
const PLANTED_PATIENCE: Duration = Duration::from_millis(50);

/// What happened at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// The source says something.
    Received(ToTarget),
    /// A flush of a volume's store has ended.
    Flushed {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A commit has ended.
    Committed {
        /// Which.
        commit: CommitId,
        /// Whether the records are durable.
        result: Result<(), CommitFault>,
    },
    /// A volume answers from the target's store; its gate lets nothing through yet.
    Started(VolumeIndex),
    /// A volume does not answer from the target's store.
    StartFailed {
        /// Which.
        volume: VolumeIndex,
        /// Why.
        detail: String,
    },
    /// All images have been dealt with.
    Discarded {
        /// What could not be deleted; empty if all is gone.
        left_over: String,
    },
}

/// Whether a flush succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushResult {
    /// Everything that had been applied is durable.
    Durable,
    /// It failed; nothing is known.
    Failed,
}

/// What is to be done at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction {
    /// Flush a volume's store.
    Flush {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// Make records durable, all or none.
    Commit {
        /// For the answer.
        commit: CommitId,
        /// What has become true.
        records: Vec<Record>,
    },
    /// Tell the source.
    Send(ToSource),
    /// Put a volume onto the target's store and see whether that answers, before any guest is let through.
    Start(VolumeIndex),
    /// Let a volume's writes through.
    Open(VolumeIndex),
    /// Serve nothing of a volume any more.
    Close(VolumeIndex),
    /// Delete all images.
    Discard,
}

/// The machine of the target's side, over all volumes of a migration.
#[derive(Debug)]
pub struct Target {
    migration: MigrationId,
    volumes: usize,
    state: State,
    /// The latest try known to be aborted.
    aborted: Attempt,
    /// The commit that the state waits for is the last one asked for; answers to others are of states gone by.
    last_commit: CommitId,
    actions: VecDeque<TargetAction>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Receiving,
    Flushing { attempt: Attempt, left: Vec<VolumeIndex> },
    Promising { attempt: Attempt, retry_at: Option<Duration> },
    Prepared { attempt: Attempt, ask_at: Duration, since: Duration },
    Owning { own: Ownership, began: Duration, retry_at: Option<Duration> },
    Starting { own: Ownership, took: Duration, left: Vec<VolumeIndex> },
    Active { own: Ownership, took: Duration },
    HandingBack { own: Ownership, detail: String, retry_at: Option<Duration> },
    HandedBack { own: Ownership, detail: String },
    Discarding,
    Gone { left_over: String },
}

/// A try that has been committed, and the generations that came with it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ownership {
    attempt: Attempt,
    generations: Vec<(VolumeId, Generation)>,
}

impl Target {
    /// Makes the machine of a target that is being copied to.
    pub fn new(migration: MigrationId, volumes: usize) -> Self {
        Self {
            migration,
            volumes,
            state: State::Receiving,
            aborted: Attempt::NONE,
            last_commit: CommitId(0),
            actions: VecDeque::new(),
        }
    }

    /// Takes what happened. What does not fit the state changes nothing: it is late, or repeated.
    pub fn handle_event(&mut self, now: Duration, event: TargetEvent) {
        match event {
            TargetEvent::Received(message) => self.received(now, message),
            TargetEvent::Flushed { volume, attempt, result } => self.flushed(volume, attempt, result),
            TargetEvent::Committed { commit, result } => {
                if commit == self.last_commit {
                    self.committed(now, result);
                }
            }
            TargetEvent::Started(volume) => self.started(volume),
            TargetEvent::StartFailed { volume, detail } => self.start_failed(volume, detail),
            TargetEvent::Discarded { left_over } => {
                if self.state == State::Discarding {
                    self.say(ToSource::Discarded { left_over: left_over.clone() });
                    self.state = State::Gone { left_over };
                }
            }
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        match &mut self.state {
            State::Prepared { attempt, ask_at, since } => {
                let attempt = *attempt;
                let leaves = broken(Bug::PreparedTargetLeaves) && now >= *since + PLANTED_PATIENCE;
                if leaves {
                    self.discard();
                } else if now >= *ask_at {
                    *ask_at = now + QUERY_INTERVAL;
                    self.say(ToSource::Query(attempt));
                }
            }
            State::Promising { retry_at, .. }
            | State::Owning { retry_at, .. }
            | State::HandingBack { retry_at, .. }
                if retry_at.is_some_and(|at| at <= now) =>
            {
                *retry_at = None;
                self.commit();
            }
            _ => {}
        }
    }

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<TargetAction> {
        self.actions.pop_front()
    }

    /// When `handle_timeout` is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match &self.state {
            State::Prepared { ask_at, since, .. } => {
                let at = if broken(Bug::PreparedTargetLeaves) {
                    (*ask_at).min(*since + PLANTED_PATIENCE)
                } else {
                    *ask_at
                };
                Some((at, "the source to say what became of the handover"))
            }
            State::Promising { retry_at, .. }
            | State::Owning { retry_at, .. }
            | State::HandingBack { retry_at, .. } => Some(((*retry_at)?, "the journal")),
            _ => None,
        }
    }

    /// Tells whether the volumes are in use here.
    pub fn is_active(&self) -> bool {
        matches!(self.state, State::Active { .. })
    }

    /// Tells whether nothing of the migration is left here.
    pub fn is_gone(&self) -> bool {
        matches!(self.state, State::Gone { .. })
    }

    fn received(&mut self, now: Duration, message: ToTarget) {
        match message {
            ToTarget::Prepare(attempt) => self.prepare(attempt),
            ToTarget::Abort(attempt) => {
                self.aborted = self.aborted.max(attempt);
                if self.attempt_under_way().is_some_and(|under_way| under_way <= attempt) {
                    self.state = State::Receiving;
                }
            }
            ToTarget::Commit { attempt, generations } => match &self.state {
                State::Prepared { attempt: prepared, .. } if *prepared == attempt => {
                    let own = Ownership { attempt, generations };
                    self.state = State::Owning { own, began: now, retry_at: None };
                    self.commit();
                }
                State::Active { own, took } if own.attempt == attempt => {
                    let message = ToSource::Active { attempt, own: *took };
                    self.say(message);
                }
                State::HandedBack { own, detail } if own.attempt == attempt => {
                    let message = handed_back(own, detail);
                    self.say(message);
                }
                _ => {}
            },
            ToTarget::Discard => match &self.state {
                State::Gone { left_over } => {
                    let left_over = left_over.clone();
                    self.say(ToSource::Discarded { left_over });
                }
                // N.B. once the volumes are owned here, only a hand-back makes the images worthless.
                State::Owning { .. }
                | State::Starting { .. }
                | State::Active { .. }
                | State::HandingBack { .. } => {}
                State::Discarding => {}
                _ => self.discard(),
            },
        }
    }

    fn prepare(&mut self, attempt: Attempt) {
        match self.state {
            State::Prepared { attempt: prepared, .. } if prepared == attempt => {
                self.say(ToSource::Prepared(attempt));
                return;
            }
            State::Receiving | State::Flushing { .. } | State::Promising { .. } | State::Prepared { .. } => {}
            _ => return,
        }
        // An older try than the one under way, or one that is known to be aborted, is a message that came late.
        if attempt <= self.aborted || self.attempt_under_way().is_some_and(|under_way| under_way >= attempt) {
            return;
        }
        self.state = State::Flushing { attempt, left: VolumeIndex::all(self.volumes).collect() };
        let flushes = VolumeIndex::all(self.volumes).map(|volume| TargetAction::Flush { volume, attempt });
        self.actions.extend(flushes);
    }

    fn flushed(&mut self, volume: VolumeIndex, flushed: Attempt, result: FlushResult) {
        let State::Flushing { attempt, left } = &mut self.state else { return };
        let attempt = *attempt;
        if flushed != attempt {
            return;
        }
        if result == FlushResult::Failed {
            // The source gives the try up when its time is over; the mirror meets the fault by itself.
            self.state = State::Receiving;
            return;
        }
        left.retain(|waiting| *waiting != volume);
        if left.is_empty() {
            self.state = State::Promising { attempt, retry_at: None };
            self.commit();
        }
    }

    /// Submits the commit that the state calls for.
    fn commit(&mut self) {
        let migration = self.migration;
        let record = match &self.state {
            State::Promising { attempt, .. } => Record::TargetPrepared { migration, attempt: *attempt },
            State::Owning { own, .. } => {
                let (attempt, generations) = (own.attempt, own.generations.clone());
                Record::Owned { migration, attempt, generations }
            }
            State::HandingBack { own, .. } => {
                Record::HandedBack { migration, generations: own.generations.clone() }
            }
            _ => return,
        };
        self.last_commit = CommitId(self.last_commit.0 + 1);
        self.actions.push_back(TargetAction::Commit { commit: self.last_commit, records: vec![record] });
    }

    fn committed(&mut self, now: Duration, result: Result<(), CommitFault>) {
        if result.is_err() {
            if let State::Promising { retry_at, .. }
            | State::Owning { retry_at, .. }
            | State::HandingBack { retry_at, .. } = &mut self.state
            {
                *retry_at = Some(now + COMMIT_RETRY);
            }
            return;
        }
        match std::mem::replace(&mut self.state, State::Receiving) {
            State::Promising { attempt, .. } => {
                self.state = State::Prepared { attempt, ask_at: now + QUERY_INTERVAL, since: now };
                self.say(ToSource::Prepared(attempt));
            }
            State::Owning { own, began, .. } => {
                let left = VolumeIndex::all(self.volumes).collect();
                self.state = State::Starting { own, took: now.saturating_sub(began), left };
                self.actions.extend(VolumeIndex::all(self.volumes).map(TargetAction::Start));
            }
            State::HandingBack { own, detail, .. } => {
                let message = handed_back(&own, &detail);
                self.state = State::HandedBack { own, detail };
                self.say(message);
            }
            other => self.state = other,
        }
    }

    fn started(&mut self, volume: VolumeIndex) {
        let State::Starting { own, took, left } = &mut self.state else { return };
        left.retain(|waiting| *waiting != volume);
        if left.is_empty() {
            let (own, took) = (own.clone(), *took);
            let message = ToSource::Active { attempt: own.attempt, own: took };
            self.state = State::Active { own, took };
            self.actions.extend(VolumeIndex::all(self.volumes).map(TargetAction::Open));
            self.say(message);
        }
    }

    /// No gate has let a write through yet: the volumes can go back (design §5.14).
    fn start_failed(&mut self, volume: VolumeIndex, detail: String) {
        let State::Starting { own, left, .. } = &mut self.state else { return };
        if !left.contains(&volume) {
            return;
        }
        let generations = own.generations.iter().map(|(id, generation)| (*id, generation.next())).collect();
        let own = Ownership { attempt: own.attempt, generations };
        self.state = State::HandingBack { own, detail, retry_at: None };
        self.actions.extend(VolumeIndex::all(self.volumes).map(TargetAction::Close));
        self.commit();
    }

    fn discard(&mut self) {
        self.state = State::Discarding;
        self.actions.push_back(TargetAction::Discard);
    }

    fn say(&mut self, message: ToSource) {
        self.actions.push_back(TargetAction::Send(message));
    }

    fn attempt_under_way(&self) -> Option<Attempt> {
        match &self.state {
            State::Flushing { attempt, .. }
            | State::Promising { attempt, .. }
            | State::Prepared { attempt, .. } => Some(*attempt),
            _ => None,
        }
    }
}

fn handed_back(own: &Ownership, detail: &str) -> ToSource {
    ToSource::HandedBack {
        attempt: own.attempt,
        generations: own.generations.clone(),
        detail: detail.to_owned(),
    }
}
