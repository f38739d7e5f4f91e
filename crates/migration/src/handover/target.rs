//! The target's side of a handover.
//!
//! ```text
//!   Receiving ──Prepare──► Flushing ──► Promising ──► Prepared ──Commit──► Owning ──► Starting ──► Active
//!       ▲                      │            │            │    └─promoted──►┘             │
//!       └────── Abort ─────────┴────────────┴────────────┘                 could not start, nothing written
//!       │                                                                                ▼
//!       └──────────────Discard──────────────► Discarding ──► Gone ◄──Discard── HandedBack ◄── HandingBack
//! ```
//! A VM that moves runs before the volumes are reported as in use: its disks are opened for it. If it does not run, and has
//! written nothing, the disks return as if they had not been started.
//!
//! **N.B.** From *Prepared* on the target never leaves by itself, however long it waits (hard case 1). The source may have
//! released the volumes, and then no other host has them.
//!
//! On one host the source's records are in the same journal. A target whose host has a journal of its own
//! ([`Target::between_hosts`]) makes three more commits. It records the abort of a promised attempt before anything is copied or
//! deleted because of it, the deletion of images before it begins, and the end.

mod answer;
mod event;

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;

use crate::filling::Manifest;
use crate::handover::message::ToSource;
use crate::handover::source::Moves;
use crate::identity::{Attempt, CommitId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{FailureCode, Hollow, MigrationState, Outcome, Promotion, Record, Side, Stage, Summary};
use crate::planted::{Bug, broken};

pub use event::{FlushResult, TargetAction, TargetEvent, Wrote};

/// The time between two questions of a prepared target about the outcome of the attempt.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two questions of a receiving target: its source may have ended the migration unnoticed.
const ASK_INTERVAL: Duration = Duration::from_secs(30);
/// How long a receiving target waits for a silent source. Nothing is lost afterwards: the source has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourcePatience {
    /// The limit while the source's host can be reached. A source that continues answers each question.
    pub silent_max: Duration,
    /// The limit while it cannot be reached: the host or its network may recover.
    pub away_max: Duration,
}

const COMMIT_RETRY: Duration = Duration::from_millis(200);
/// When planted bug 1 makes a prepared target leave.
const PLANTED_PATIENCE: Duration = Duration::from_millis(50);

/// The machine of a migration's target, over all volumes.
#[derive(Debug)]
pub struct Target {
    migration: MigrationId,
    volumes: usize,
    /// The identities of the volumes; set only between hosts, where they may matter.
    identities: Vec<VolumeId>,
    moves: Moves,
    journal: Journal,
    state: State,
    aborted: Attempt,
    /// The latest attempt with incomplete volumes, and the manifest of each volume.
    hollow: Option<(Attempt, Vec<Manifest>)>,
    /// Whether the source has said that its administrator cancels.
    is_cancelled_there: bool,
    /// Whether a restart of the daemon came between.
    is_resumed: bool,
    /// When the source is asked next; used with a journal of its own.
    ask_at: Duration,
    /// `None`: the target waits without limit.
    patience: Option<SourcePatience>,
    /// When the source last sent a message, or its host was lost or came back; `None` before the first timeout.
    heard_at: Option<Duration>,
    is_away: bool,
    /// The commit that the state waits for is the latest one; answers to others belong to earlier states.
    last_commit: CommitId,
    /// Whether a cancellation is durable.
    is_cancelled: bool,
    actions: VecDeque<TargetAction>,
}

/// Whose records are in the journal that the target commits to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Journal {
    Shared,
    Own,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Receiving,
    /// The abort of a promised attempt is being made durable. Only with a journal of its own.
    Withdrawing {
        attempt: Attempt,
        retry_at: Option<Duration>,
    },
    Flushing {
        attempt: Attempt,
        left: Vec<VolumeIndex>,
    },
    Promising {
        attempt: Attempt,
        retry_at: Option<Duration>,
    },
    Prepared {
        attempt: Attempt,
        ask_at: Duration,
        since: Duration,
    },
    Owning {
        own: Ownership,
        began: Duration,
        retry_at: Option<Duration>,
    },
    Starting {
        own: Ownership,
        took: Duration,
        left: Vec<VolumeIndex>,
    },
    /// The volumes are open for the VM, which has been started. Only with a VM.
    Running {
        own: Ownership,
        took: Duration,
    },
    Active {
        own: Ownership,
        took: Duration,
        end: End,
    },
    HandingBack {
        own: Ownership,
        detail: String,
        retry_at: Option<Duration>,
    },
    HandedBack {
        own: Ownership,
        detail: String,
    },
    /// The deletion of the images is being made durable, before they are deleted. Only with a journal of its own.
    Aborting {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    Discarding {
        outcome: Outcome,
    },
    Gone {
        outcome: Outcome,
        left_over: String,
        end: End,
    },
}

/// Whether the end is in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The end is recorded, or the source records it.
    Recorded,
    Committing {
        retry_at: Option<Duration>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Ownership {
    attempt: Attempt,
    generations: Vec<(VolumeId, Generation)>,
    /// The reason of a takeover without COMMIT; otherwise `None`.
    promotion: Option<Promotion>,
}

impl Target {
    /// Makes the machine of a receiving target whose source is on the same host.
    pub fn new(migration: MigrationId, volumes: usize) -> Self {
        Self::with_journal(migration, volumes, Journal::Shared)
    }

    /// Makes the machine of a target whose source is another host. It records its steps in a journal of its own, under its own
    /// host's number of the migration.
    pub fn between_hosts(migration: MigrationId, volumes: usize) -> Self {
        Self::with_journal(migration, volumes, Journal::Own)
    }

    /// Sets the identities of the volumes in order. Without them no incomplete volume is taken over.
    #[must_use]
    pub fn of_volumes(self, identities: Vec<VolumeId>) -> Self {
        Self { identities, ..self }
    }

    /// Sets that a VM moves with the volumes.
    #[must_use]
    pub fn with_vm(self) -> Self {
        Self { moves: Moves::Vm, ..self }
    }

    /// Sets how long the source may be silent before anything is promised; without limit by default.
    #[must_use]
    pub fn with_patience(self, patience: SourcePatience) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Makes the machine of an incoming migration that a restart interrupted. Returns `None` if no machine is needed
    /// ([`crate::recovery`] says what is left then).
    pub fn resume(now: Duration, migration: MigrationId, recorded: &MigrationState) -> Option<Self> {
        let Side::Incoming { volumes, .. } = &recorded.side else { return None };
        let identities = recorded.volumes.iter().map(|moving| moving.volume).collect();
        let mut target = Self::between_hosts(migration, recorded.volumes.len()).of_volumes(identities);
        target.aborted = recorded.aborted;
        target.is_resumed = true;
        target.hollow = recorded
            .hollow
            .as_ref()
            .map(|hollow| (hollow.attempt, hollow.manifests.iter().map(|(_, manifest)| *manifest).collect()));
        target.state = match &recorded.stage {
            Stage::Copying => State::Receiving,
            Stage::Prepared(_) if broken(Bug::PromiseForgotten) => State::Receiving,
            Stage::Prepared(attempt) => State::Prepared { attempt: *attempt, ask_at: now, since: now },
            Stage::HandedBack => {
                // The generation grew by one at the arrival of the volumes, and by one at their return.
                let back = volumes.iter().map(|record| (record.volume, record.generation.next().next()));
                let own = Ownership { attempt: Attempt::NONE, generations: back.collect(), promotion: None };
                let detail = "the volume could not be started at the target".to_owned();
                State::HandedBack { own, detail }
            }
            Stage::Released(_) | Stage::Owned(_) | Stage::Discarding(_) | Stage::Ended(_) => return None,
        };
        target.ask();
        Some(target)
    }

    fn with_journal(migration: MigrationId, volumes: usize, journal: Journal) -> Self {
        Self {
            migration,
            volumes,
            identities: Vec::new(),
            moves: Moves::Volumes,
            journal,
            state: State::Receiving,
            aborted: Attempt::NONE,
            hollow: None,
            is_cancelled_there: false,
            is_resumed: false,
            ask_at: Duration::ZERO,
            patience: None,
            heard_at: None,
            is_away: false,
            last_commit: CommitId(0),
            is_cancelled: false,
            actions: VecDeque::new(),
        }
    }

    /// Handles an event. An event that does not fit the state is late or repeated, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: TargetEvent) {
        if matches!(event, TargetEvent::Received(_) | TargetEvent::LinkBack | TargetEvent::LinkLost) {
            self.heard_at = Some(now);
            self.is_away = event == TargetEvent::LinkLost;
        }
        match event {
            TargetEvent::LinkLost => {}
            TargetEvent::Received(message) => self.received(now, message),
            TargetEvent::Flushed { volume, attempt, result } => self.flushed(volume, attempt, result),
            TargetEvent::Committed { commit, result } => {
                if commit == self.last_commit {
                    self.committed(now, result);
                }
            }
            TargetEvent::Started(volume) => self.started(volume),
            TargetEvent::StartFailed { volume, detail } => self.start_failed(volume, detail),
            TargetEvent::VmRuns => self.vm_runs(),
            TargetEvent::VmFailed { detail, wrote } => self.vm_failed(detail, wrote),
            TargetEvent::ChangeHeld => self.change_held(),
            TargetEvent::LinkBack => self.ask(),
            // On one host the source ends the migration.
            TargetEvent::Cancel => self.is_cancelled = self.journal == Journal::Own,
            TargetEvent::Promote { attempt, generations, promotion } => {
                self.promote(now, attempt, generations, promotion);
            }
            TargetEvent::Discarded { left_over } => self.discarded(left_over),
        }
        self.end_if_cancelled();
    }

    /// **N.B.** The cancellation is durable, so no promise is or will be: the journal refuses one that is under way. A promise
    /// of incomplete volumes is given up by [`crate::orders::give_up`], whose record is durable as well.
    fn end_if_cancelled(&mut self) {
        if !self.is_cancelled {
            return;
        }
        match &self.state {
            State::Receiving | State::Flushing { .. } | State::Promising { .. } => {
                self.discard(Outcome::Cancelled);
            }
            // The journal has withdrawn the promise at most: the images go only after a record of that.
            State::Withdrawing { .. } if self.hollow.is_some() => self.discard(Outcome::Cancelled),
            State::Prepared { .. } | State::Owning { .. } if self.hollow.is_some() => {
                self.delete(Outcome::Cancelled);
            }
            State::HandedBack { detail, .. } if self.hollow.is_some() => {
                self.delete(Outcome::HandedBack { detail: detail.clone() });
            }
            _ => return,
        }
        self.is_cancelled = false;
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.heard_at.get_or_insert(now);
        if self.gives_up_at().is_some_and(|at| at <= now) {
            self.discard(self.abandoned());
        } else if let State::Prepared { attempt, ask_at, since } = &mut self.state {
            let attempt = *attempt;
            let leaves = broken(Bug::PreparedTargetLeaves) && now >= *since + PLANTED_PATIENCE;
            if leaves {
                self.discard(self.given_up());
            } else if now >= *ask_at {
                *ask_at = now + QUERY_INTERVAL;
                self.say(ToSource::Query(attempt));
            }
        } else if let Some(retry_at) = self.state.retry_at()
            && retry_at.is_some_and(|at| at <= now)
        {
            *retry_at = None;
            self.commit();
        } else if self.waits_for_source() && now >= self.ask_at {
            self.ask_at = now + ASK_INTERVAL;
            self.ask();
        }
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<TargetAction> {
        self.actions.pop_front()
    }

    /// Returns the latest time to call `handle_timeout`, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match &self.state {
            State::Prepared { ask_at, since, .. } => {
                let at = if broken(Bug::PreparedTargetLeaves) {
                    (*ask_at).min(*since + PLANTED_PATIENCE)
                } else {
                    *ask_at
                };
                Some((at, "the source to report the outcome of the handover"))
            }
            State::Withdrawing { retry_at, .. }
            | State::Promising { retry_at, .. }
            | State::Owning { retry_at, .. }
            | State::HandingBack { retry_at, .. }
            | State::Aborting { retry_at, .. }
            | State::Active { end: End::Committing { retry_at }, .. }
            | State::Gone { end: End::Committing { retry_at }, .. } => Some(((*retry_at)?, "the journal")),
            State::Receiving | State::HandedBack { .. } if self.journal == Journal::Own => {
                let at = self.gives_up_at().map_or(self.ask_at, |at| at.min(self.ask_at));
                Some((at, "the source to continue, or to end it"))
            }
            _ => None,
        }
    }

    /// Returns whether the volumes are in use at the target.
    pub fn is_active(&self) -> bool {
        matches!(self.state, State::Active { .. })
    }

    /// Returns whether the target is receiving, with nothing promised or about to be.
    pub fn is_receiving(&self) -> bool {
        self.state == State::Receiving
    }

    /// Returns whether the attempt waits for the flush of its target stores. Work for a flush takes time, and the attempt may be
    /// over when it ends.
    pub fn is_flushing(&self, attempt: Attempt) -> bool {
        matches!(self.state, State::Flushing { attempt: flushing, .. } if flushing == attempt)
    }

    /// Returns whether a volume waits for its start.
    pub fn is_starting(&self, volume: VolumeIndex) -> bool {
        matches!(&self.state, State::Starting { left, .. } if left.contains(&volume))
    }

    /// Returns whether nothing of the migration is left here.
    pub fn is_gone(&self) -> bool {
        matches!(self.state, State::Gone { .. })
    }

    /// Returns the promised attempt that waits for the source's decision: a promotion would take this one over.
    pub fn prepared(&self) -> Option<Attempt> {
        match self.state {
            State::Prepared { attempt, .. } => Some(attempt),
            _ => None,
        }
    }

    fn commit(&mut self) {
        let migration = self.migration;
        let ended = |outcome: Outcome| {
            let summary = Summary::default();
            vec![Record::MigrationEnded { migration, outcome, summary }]
        };
        let records = match &self.state {
            State::Withdrawing { attempt, .. } => {
                vec![Record::AttemptAborted { migration, attempt: *attempt }]
            }
            State::Promising { attempt, .. } => {
                let prepared = Record::TargetPrepared { migration, attempt: *attempt };
                self.hollow_record(*attempt).into_iter().chain([prepared]).collect()
            }
            State::Owning { own, .. } => vec![own.record(migration)],
            State::HandingBack { own, .. } => {
                vec![Record::HandedBack { migration, generations: own.generations.clone() }]
            }
            // **N.B.** Durable before the deletion: a crash must not leave a half-deleted image that is promised, or could be.
            State::Aborting { outcome, .. } => {
                vec![Record::Discarding { migration, outcome: outcome.clone() }]
            }
            State::Active { .. } => ended(Outcome::Moved { left_over: String::new() }),
            State::Gone { outcome, left_over, .. } => ended(outcome.clone().with_left_over(left_over)),
            _ => return,
        };
        self.last_commit = CommitId(self.last_commit.0 + 1);
        self.actions.push_back(TargetAction::Commit { commit: self.last_commit, records });
    }

    /// Returns the record that this attempt has incomplete volumes, if it has.
    fn hollow_record(&self, attempt: Attempt) -> Option<Record> {
        let (_, manifests) = self.hollow.as_ref().filter(|(of, _)| *of == attempt)?;
        let manifests = self.identities.iter().copied().zip(manifests.iter().copied()).collect();
        Some(Record::Hollow { migration: self.migration, hollow: Hollow { attempt, manifests } })
    }

    fn say(&mut self, message: ToSource) {
        self.actions.push_back(TargetAction::Send(message));
    }

    /// Asks for the outcome of the attempt under way, or of the migration. A source that continues ignores the question; a
    /// source that has ended answers.
    fn ask(&mut self) {
        if self.waits_for_source() {
            self.say(ToSource::Query(self.attempt_under_way().unwrap_or(Attempt::NONE)));
        }
    }

    /// Returns when the target gives up because its source is silent; only before anything is promised.
    fn gives_up_at(&self) -> Option<Duration> {
        let patience =
            self.patience.filter(|_| self.journal == Journal::Own && self.state == State::Receiving)?;
        let wait = if self.is_away { patience.away_max } else { patience.silent_max };
        self.heard_at.map(|heard| heard + wait).filter(|_| !broken(Bug::SilentArrivalStays))
    }

    fn abandoned(&self) -> Outcome {
        let patience =
            self.patience.unwrap_or(SourcePatience { silent_max: Duration::ZERO, away_max: Duration::ZERO });
        let detail = match self.is_away {
            true => format!("its source could not be reached for {} s", patience.away_max.as_secs()),
            false => format!("its source said nothing for {} s", patience.silent_max.as_secs()),
        };
        let detail = detail + "; the volume is unchanged there";
        Outcome::Failed { code: FailureCode::GivenUp, detail }
    }

    /// Returns the outcome of a migration that its source has given up. A restart is the reason if a running VM moves with the
    /// volumes: its description was in the memory of the former daemon. This daemon does not know whether there was one.
    fn given_up(&self) -> Outcome {
        let detail = match self.is_resumed {
            true => {
                "this host's daemon was restarted meanwhile, which ends the move of a running VM, and the source gave the migration up"
            }
            false => "the source gave the migration up",
        };
        let detail = detail.to_owned();
        Outcome::Failed { code: FailureCode::GivenUp, detail }
    }

    fn waits_for_source(&self) -> bool {
        let waits = matches!(
            self.state,
            State::Receiving
                | State::Withdrawing { .. }
                | State::Flushing { .. }
                | State::Prepared { .. }
                | State::HandedBack { .. }
        );
        waits && self.journal == Journal::Own
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

impl State {
    /// Returns when the state's commit is made again; the inner `None` if it is under way.
    fn retry_at(&mut self) -> Option<&mut Option<Duration>> {
        match self {
            Self::Withdrawing { retry_at, .. }
            | Self::Promising { retry_at, .. }
            | Self::Owning { retry_at, .. }
            | Self::HandingBack { retry_at, .. }
            | Self::Aborting { retry_at, .. }
            | Self::Active { end: End::Committing { retry_at }, .. }
            | Self::Gone { end: End::Committing { retry_at }, .. } => Some(retry_at),
            _ => None,
        }
    }
}

impl Ownership {
    fn record(&self, migration: MigrationId) -> Record {
        let (attempt, generations) = (self.attempt, self.generations.clone());
        match self.promotion.clone() {
            None => Record::Owned { migration, attempt, generations },
            Some(promotion) => Record::Promoted { migration, attempt, generations, promotion },
        }
    }
}
