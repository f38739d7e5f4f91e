//! Decides which hooks run. Each runs once, a VM has one at a time, and an undo waits for the end of the hook that it undoes.
//!
//! ```text
//!   wanted ──► Prepare: a process that waits ──► Record: which one it is, durably ──► Release: it runs the program
//!     │ another hook of the VM runs                 │ cannot be recorded: it ends      │
//!     └─ waits its turn                             └ without having run anything      └──► Ended ──► Tell
//!
//!   before ──ended──► after          after is wanted while before runs: it waits for its end, also after a restart
//! ```
//! A program is started behind a gate. So a daemon killed at any instant leaves one of three states. Nothing was begun, a
//! recorded process runs, or a process has ended and left its result. The next daemon finds out which, and continues from there.
//!
//! The daemon decides what a hook receives as input, and how a process is recognised.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::identity::MigrationId;
use crate::planted::{Bug, broken};

const RECORD_RETRY: Duration = Duration::from_secs(1);

/// The time at which a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// Before a VM, or volumes without a VM, change hands.
    Before,
    /// After the handover, or after the migration has failed.
    After,
}

/// The identity of a process, which no other process shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookProcess {
    /// The process id of the hook.
    pub id: i32,
    /// When the process began, as the kernel counts.
    pub started: u64,
    /// The boot in which the process began.
    pub boot: u128,
}

/// The result of a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookEnd {
    /// The hook succeeded, or there is none.
    Good,
    /// The hook failed, for this reason.
    Bad(String),
}

/// The recorded course of one hook of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HookCourse {
    /// The hook has not begun.
    #[default]
    NotBegun,
    /// This process runs the hook, or has run it.
    Begun(HookProcess),
    /// The hook has ended with this result.
    Ended(HookEnd),
}

/// The reason why a hook is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// The hook has exceeded its time limit.
    Overdue,
    /// The migration does not need the hook.
    Unwanted,
}

/// The record of a migration's hooks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookRecord {
    /// The VM or the volumes of the hooks. Hooks whose subjects overlap run one at a time.
    pub subject: BTreeSet<String>,
    /// The course of the hook before the handover.
    pub before: HookCourse,
    /// The course of the hook after the handover.
    pub after: HookCourse,
}

/// An event of a migration's hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookEvent {
    /// A hook is requested. The hook after the handover is requested only if one before it was.
    Wanted(Moment),
    /// The hook before the handover is not needed.
    Unwanted,
    /// A process waits behind its gate.
    Prepared(Moment, HookProcess),
    /// No process could be made, or there is nothing to run.
    NotPrepared(Moment, HookEnd),
    /// The gate of a process was opened: its time counts from here.
    Begun(Moment),
    /// A record is durable, or could not be made durable.
    Recorded {
        /// The number of the record.
        record: u64,
        /// Whether the record is durable.
        is_durable: bool,
    },
    /// A hook's process has ended.
    Ended(Moment, HookEnd),
    /// A process is gone and never passed its gate.
    NeverBegan(Moment),
}

/// An action for the hooks of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookAction {
    /// Start a process that waits behind a gate, then report [`HookEvent::Prepared`] or [`HookEvent::NotPrepared`].
    Prepare(MigrationId, Moment),
    /// Make this record durable under its number, after those before it, then report [`HookEvent::Recorded`].
    Record(MigrationId, u64, HookRecord),
    /// Let the process run the program. Report [`HookEvent::Begun`] then, and [`HookEvent::Ended`] at its end.
    Release(MigrationId, Moment),
    /// Find a process of an earlier daemon, then report [`HookEvent::Ended`] at its end, or [`HookEvent::NeverBegan`].
    Find(MigrationId, Moment, HookProcess),
    /// Kill the process and everything it has started. Its end is reported as usual: [`HookEvent::NeverBegan`] behind its gate.
    Kill(MigrationId, Moment, KillReason),
    /// Report the result to the requester of the hook.
    Tell(MigrationId, Moment, HookEnd),
    /// Delete the record of the migration: nothing is left to do.
    Forget(MigrationId),
}

/// The hooks of all migrations of a host.
#[derive(Debug)]
pub struct HookBook {
    limit: Duration,
    entries: BTreeMap<MigrationId, Entry>,
    actions: VecDeque<HookAction>,
}

#[derive(Debug)]
struct Entry {
    subject: BTreeSet<String>,
    before: Step,
    after: Step,
    /// Somebody waits for the hook before. Otherwise it is killed as soon as possible.
    is_awaited: bool,
    records: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    NotWanted,
    Wanted,
    Preparing,
    /// The process waits behind its gate until its record is durable; a failed record is tried again at `retry_at`.
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
    /// Returns a book without hooks; `limit` is the time limit of each hook.
    pub fn new(limit: Duration) -> Self {
        Self { limit, entries: BTreeMap::new(), actions: VecDeque::new() }
    }

    /// Restores the record of an earlier daemon.
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
        self.entries.insert(migration, Entry { subject, before, after, is_awaited: false, records: 0 });
    }

    /// Announces that a migration has hooks, with this subject.
    pub fn expect(&mut self, migration: MigrationId, subject: BTreeSet<String>) {
        let (before, after) = (Step::NotWanted, Step::NotWanted);
        self.entries.entry(migration).or_insert(Entry {
            subject,
            before,
            after,
            is_awaited: false,
            records: 0,
        });
    }

    /// Returns the migrations with recorded or running hooks.
    pub fn migrations(&self) -> impl Iterator<Item = MigrationId> {
        self.entries.keys().copied()
    }

    /// Handles an event of a migration's hooks. An event that does not fit is late, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, migration: MigrationId, event: HookEvent) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        match event {
            HookEvent::Wanted(moment) => self.wanted(migration, moment),
            HookEvent::Unwanted => {
                entry.is_awaited = false;
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
                if moment == Moment::Before && !entry.is_awaited {
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
            HookEvent::Begun(moment) => {
                if let Step::Runs { until, .. } = entry.step_mut(moment) {
                    *until = Some(now + self.limit);
                }
            }
            HookEvent::NeverBegan(moment) if broken(Bug::GatedCountsAsRun) => {
                self.ended(migration, moment, HookEnd::Bad("it never began".to_owned()));
            }
            HookEvent::NeverBegan(moment) => entry.never_began(moment),
        }
        self.drop_needless();
        self.let_begin();
    }

    /// Handles everything that is due.
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

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<HookAction> {
        self.actions.pop_front()
    }

    /// Returns the latest time to call [`HookBook::handle_timeout`], and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let steps = self.entries.values().flat_map(|entry| [&entry.before, &entry.after]);
        let due = steps.filter_map(|step| match step {
            Step::Runs { until, .. } => Some(((*until)?, "a hook to end")),
            Step::Recording { retry_at, .. } => Some(((*retry_at)?, "the start of a hook to be recorded")),
            _ => None,
        });
        due.min()
    }

    fn wanted(&mut self, migration: MigrationId, moment: Moment) {
        let Some(entry) = self.entries.get_mut(&migration) else { return };
        entry.is_awaited |= moment == Moment::Before;
        match entry.step(moment).clone() {
            Step::NotWanted => *entry.step_mut(moment) = Step::Wanted,
            Step::Ended(end) => self.actions.push_back(HookAction::Tell(migration, moment, end)),
            // The requester learns the result at the end.
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
                let until = broken(Bug::HookTimedBehindGate).then_some(now + self.limit);
                Step::Runs { process, until }
            } else {
                // **N.B.** A hook that cannot be recorded is not begun: its process waits behind the gate.
                Step::Recording { process, record, retry_at: Some(now + RECORD_RETRY) }
            };
        }
    }

    /// Drops each hook after a migration whose hook before never began.
    fn drop_needless(&mut self) {
        let is_needless = |entry: &Entry| entry.before == Step::NotWanted && entry.after == Step::Wanted;
        let needless = self.entries.iter().filter(|(_, entry)| is_needless(entry)).map(|(id, _)| *id);
        for migration in needless.collect::<Vec<_>>() {
            self.actions.push_back(HookAction::Tell(migration, Moment::After, HookEnd::Good));
            self.forget(migration);
        }
    }

    /// Begins the hooks whose turn it is: in the order of migrations, and the hook before first.
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
    fn record_again(&mut self) {
        for step in [&mut self.before, &mut self.after] {
            if let Step::Recording { record, retry_at, .. } = step {
                (*record, *retry_at) = (self.records, None);
            }
        }
    }

    /// A process that did not pass its gate has run nothing: its hook begins anew if it is still wanted.
    fn never_began(&mut self, moment: Moment) {
        let is_wanted = match moment {
            Moment::Before => self.is_awaited && self.after == Step::NotWanted,
            Moment::After => true,
        };
        if self.step(moment).is_busy() {
            *self.step_mut(moment) = if is_wanted { Step::Wanted } else { Step::NotWanted };
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
