//! Which hooks run: each once, never two at a time for one VM, and never an undo while what it undoes still runs.
//!
//! ```text
//!   wanted ──► Prepare: a process that waits ──► Record: which one it is, durably ──► Release: it runs the program
//!     │ another hook of the VM runs                 │ cannot be recorded: it ends      │
//!     └─ waits its turn                             └ without having run anything      └──► Ended ──► Tell
//!
//!   before ──ended──► after          after is wanted while before runs: it waits for its end, also after a restart
//! ```
//! A program is started behind a gate. So a daemon that is killed at any instant leaves one of three: nothing was begun, a process
//! that is recorded and runs, or one that has ended and left word. The next daemon finds out which, and goes on from there.
//!
//! What a hook is told, and how a process is recognised, is the daemon's business.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::identity::MigrationId;
use crate::planted::{Bug, broken};

/// Pause before something is recorded again that could not be.
const RECORD_RETRY: Duration = Duration::from_secs(1);

/// When a hook is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// Before a VM, or volumes without one, change hands.
    Before,
    /// After that, or when it has come to nothing.
    After,
}

/// A process, so that no other is taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookProcess {
    /// Its number.
    pub id: i32,
    /// When it began, as the kernel counts.
    pub started: u64,
    /// The boot in which that was.
    pub boot: u128,
}

/// How a hook ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookEnd {
    /// It succeeded, or there is none.
    Good,
    /// It did not, and why.
    Bad(String),
}

/// How far one hook of a migration has come, as it is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HookCourse {
    /// It was not begun.
    #[default]
    NotBegun,
    /// This process runs it, or has.
    Begun(HookProcess),
    /// It is over.
    Ended(HookEnd),
}

/// Why a hook is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// It took longer than it may.
    Overdue,
    /// Nobody waits for it any more.
    Unwanted,
}

/// What is recorded of a migration's hooks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookRecord {
    /// What they are about: a VM, or volumes. Of those that have something in common one runs at a time.
    pub subject: BTreeSet<String>,
    /// That before.
    pub before: HookCourse,
    /// That after.
    pub after: HookCourse,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookEvent {
    /// A hook is to be run. That after comes only after one before.
    Wanted(Moment),
    /// Nobody waits any more for the hook before.
    Unwanted,
    /// A process waits behind its gate.
    Prepared(Moment, HookProcess),
    /// None could be made, or there is nothing to run.
    NotPrepared(Moment, HookEnd),
    /// A record is durable, or could not be made so.
    Recorded {
        /// Its number.
        record: u64,
        /// Whether it is.
        is_durable: bool,
    },
    /// A hook has ended.
    Ended(Moment, HookEnd),
    /// A process that was recorded never got past its gate.
    NeverBegan(Moment),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookAction {
    /// Start a process that waits, then say [`HookEvent::Prepared`] or [`HookEvent::NotPrepared`].
    Prepare(MigrationId, Moment),
    /// Make this durable under its number, after those before it, then say [`HookEvent::Recorded`].
    Record(MigrationId, u64, HookRecord),
    /// Let the process run the program, and say [`HookEvent::Ended`] when it has ended.
    Release(MigrationId, Moment),
    /// Look for a process of a daemon before, then say [`HookEvent::Ended`] when it has ended, or [`HookEvent::NeverBegan`].
    Find(MigrationId, Moment, HookProcess),
    /// Kill the process with all that it has started; its end is said as ever.
    Kill(MigrationId, Moment, KillReason),
    /// Tell whoever wanted it.
    Tell(MigrationId, Moment, HookEnd),
    /// Nothing is left to be done for the migration: its record may go.
    Forget(MigrationId),
}

/// The hooks of a host.
#[derive(Debug)]
pub struct HookBook {
    /// How long one may take.
    limit: Duration,
    entries: BTreeMap<MigrationId, Entry>,
    actions: VecDeque<HookAction>,
}

#[derive(Debug)]
struct Entry {
    subject: BTreeSet<String>,
    before: Step,
    after: Step,
    /// Nobody waits for what runs before: it is killed as soon as it can be.
    is_unwanted: bool,
    /// Records that were asked for.
    records: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    NotWanted,
    Wanted,
    Preparing,
    /// It waits behind its gate until that is durable, or is tried again.
    Recording {
        process: HookProcess,
        record: u64,
        retry_at: Option<Duration>,
    },
    Runs {
        process: HookProcess,
        until: Option<Duration>,
    },
    Ended(HookEnd),
}

impl HookBook {
    /// Nothing runs; each may take so long.
    pub fn new(limit: Duration) -> Self {
        Self { limit, entries: BTreeMap::new(), actions: VecDeque::new() }
    }

    /// Takes up what a daemon before has recorded.
    pub fn load(&mut self, now: Duration, migration: MigrationId, record: HookRecord) {
        let HookRecord { subject, before, after } = record;
        let mut step = |course, moment| match course {
            HookCourse::NotBegun => Step::NotWanted,
            HookCourse::Begun(process) => {
                self.actions.push_back(HookAction::Find(migration, moment, process));
                Step::Runs { process, until: Some(now + self.limit) }
            }
            HookCourse::Ended(end) => Step::Ended(end),
        };
        let (before, after) = (step(before, Moment::Before), step(after, Moment::After));
        self.entries.insert(migration, Entry { subject, before, after, is_unwanted: false, records: 0 });
    }

    /// A migration has hooks, about this.
    pub fn expect(&mut self, migration: MigrationId, subject: BTreeSet<String>) {
        let (before, after) = (Step::NotWanted, Step::NotWanted);
        self.entries.entry(migration).or_insert(Entry {
            subject,
            before,
            after,
            is_unwanted: false,
            records: 0,
        });
    }

    /// Migrations of which something is recorded, or runs.
    pub fn migrations(&self) -> impl Iterator<Item = MigrationId> {
        self.entries.keys().copied()
    }

    /// Takes what has happened to a migration's hooks. What does not fit is late, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, migration: MigrationId, event: HookEvent) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        match event {
            HookEvent::Wanted(moment) => self.wanted(migration, moment),
            HookEvent::Unwanted => {
                entry.is_unwanted = true;
                match &entry.before {
                    Step::Wanted => entry.before = Step::NotWanted,
                    Step::Runs { .. } | Step::Recording { .. } => {
                        self.actions.push_back(HookAction::Kill(
                            migration,
                            Moment::Before,
                            KillReason::Unwanted,
                        ));
                    }
                    _ => {}
                }
            }
            HookEvent::Prepared(moment, process) => {
                if *entry.step(moment) != Step::Preparing {
                    return;
                }
                let record = entry.records;
                *entry.step_mut(moment) = Step::Recording { process, record, retry_at: None };
                if moment == Moment::Before && entry.is_unwanted {
                    self.actions.push_back(HookAction::Kill(migration, moment, KillReason::Unwanted));
                } else if broken(Bug::HookBegunUnrecorded) {
                    self.recorded(now, migration, record, true);
                } else {
                    self.record(migration);
                }
            }
            HookEvent::NotPrepared(moment, end) | HookEvent::Ended(moment, end) => {
                self.ended(migration, moment, end);
            }
            HookEvent::Recorded { record, is_durable } => self.recorded(now, migration, record, is_durable),
            HookEvent::NeverBegan(moment) => {
                if entry.step(moment).is_busy() {
                    let again = if moment == Moment::After { Step::Wanted } else { Step::NotWanted };
                    *entry.step_mut(moment) = again;
                }
            }
        }
        self.let_begin();
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        let mut again = Vec::new();
        for (id, entry) in &mut self.entries {
            for moment in [Moment::Before, Moment::After] {
                match entry.step_mut(moment) {
                    Step::Runs { until, .. } if until.is_some_and(|until| until <= now) => {
                        *until = None;
                        self.actions.push_back(HookAction::Kill(*id, moment, KillReason::Overdue));
                    }
                    Step::Recording { retry_at, .. } if retry_at.is_some_and(|at| at <= now) => {
                        again.push(*id);
                    }
                    _ => {}
                }
            }
        }
        for migration in again {
            if let Some(entry) = self.entries.get_mut(&migration) {
                entry.record_again();
            }
            self.record(migration);
        }
    }

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<HookAction> {
        self.actions.pop_front()
    }

    /// When [`HookBook::handle_timeout`] is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let steps = self.entries.values().flat_map(|entry| [&entry.before, &entry.after]);
        let due = steps.filter_map(|step| match step {
            Step::Runs { until, .. } => Some(((*until)?, "a hook to end")),
            Step::Recording { retry_at, .. } => Some(((*retry_at)?, "that a hook is begun to be recorded")),
            _ => None,
        });
        due.min()
    }

    fn wanted(&mut self, migration: MigrationId, moment: Moment) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        match (moment, entry.step(moment).clone()) {
            // There is nothing that it would come after.
            (Moment::After, Step::NotWanted) if entry.before == Step::NotWanted => {
                self.actions.push_back(HookAction::Tell(migration, moment, HookEnd::Good));
                self.forget(migration);
            }
            (_, Step::NotWanted) => *entry.step_mut(moment) = Step::Wanted,
            (_, Step::Ended(end)) => self.actions.push_back(HookAction::Tell(migration, moment, end)),
            // Whoever wants it is told when it has ended.
            _ => {}
        }
    }

    fn ended(&mut self, migration: MigrationId, moment: Moment, end: HookEnd) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        if !entry.step(moment).is_busy() {
            return;
        }
        *entry.step_mut(moment) = Step::Ended(end.clone());
        self.actions.push_back(HookAction::Tell(migration, moment, end));
        match moment {
            Moment::Before => self.record(migration),
            Moment::After => self.forget(migration),
        }
    }

    fn recorded(&mut self, now: Duration, migration: MigrationId, recorded: u64, is_durable: bool) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        for moment in [Moment::Before, Moment::After] {
            let Step::Recording { process, record, retry_at: None } = *entry.step(moment) else { continue };
            if record != recorded {
                continue;
            }
            *entry.step_mut(moment) = if is_durable {
                self.actions.push_back(HookAction::Release(migration, moment));
                Step::Runs { process, until: Some(now + self.limit) }
            } else {
                // N.B. what cannot be recorded is not begun: its process waits behind the gate.
                Step::Recording { process, record, retry_at: Some(now + RECORD_RETRY) }
            };
        }
    }

    /// Begins what has its turn: in the order of migrations, and of each what is before first.
    fn let_begin(&mut self) {
        let ids: Vec<MigrationId> = self.entries.keys().copied().collect();
        for id in ids {
            for moment in [Moment::Before, Moment::After] {
                if self.may_begin(id, moment)
                    && let Some(entry) = self.entries.get_mut(&id)
                {
                    *entry.step_mut(moment) = Step::Preparing;
                    self.actions.push_back(HookAction::Prepare(id, moment));
                }
            }
        }
    }

    fn may_begin(&self, migration: MigrationId, moment: Moment) -> bool {
        let Some(entry) = self.entries.get(&migration) else { return false };
        if *entry.step(moment) != Step::Wanted {
            return false;
        }
        let waits_for_before =
            moment == Moment::After && !matches!(entry.before, Step::Ended(_) | Step::NotWanted);
        if waits_for_before && !broken(Bug::UndoWhileBeforeRuns) {
            return false;
        }
        let is_of_it = |other: &&Entry| !other.subject.is_disjoint(&entry.subject);
        let others = self.entries.iter().filter(|(id, _)| **id != migration).map(|(_, other)| other);
        let is_busy = others.filter(is_of_it).any(|other| other.before.is_busy() || other.after.is_busy());
        !is_busy || broken(Bug::HooksOfOneVmTogether)
    }

    fn record(&mut self, migration: MigrationId) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        let number = entry.records;
        entry.records += 1;
        let record = HookRecord {
            subject: entry.subject.clone(),
            before: entry.before.course(),
            after: entry.after.course(),
        };
        self.actions.push_back(HookAction::Record(migration, number, record));
    }

    fn forget(&mut self, migration: MigrationId) {
        self.entries.remove(&migration);
        self.actions.push_back(HookAction::Forget(migration));
    }
}

impl Entry {
    /// What could not be recorded is asked for under the next number.
    fn record_again(&mut self) {
        for step in [&mut self.before, &mut self.after] {
            if let Step::Recording { record, retry_at, .. } = step {
                (*record, *retry_at) = (self.records, None);
            }
        }
    }

    fn step(&self, moment: Moment) -> &Step {
        match moment {
            Moment::Before => &self.before,
            Moment::After => &self.after,
        }
    }

    fn step_mut(&mut self, moment: Moment) -> &mut Step {
        match moment {
            Moment::Before => &mut self.before,
            Moment::After => &mut self.after,
        }
    }
}

impl Step {
    /// Whether a process runs, or is about to.
    fn is_busy(&self) -> bool {
        matches!(self, Self::Preparing | Self::Recording { .. } | Self::Runs { .. })
    }

    fn course(&self) -> HookCourse {
        match self {
            Self::NotWanted | Self::Wanted | Self::Preparing => HookCourse::NotBegun,
            Self::Recording { process, .. } | Self::Runs { process, .. } => HookCourse::Begun(*process),
            Self::Ended(end) => HookCourse::Ended(end.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
