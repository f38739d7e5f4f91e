//! The parts that both hosts of the model have: a clock, a journal, and commits under way.

use std::collections::VecDeque;
use std::time::Duration;

use migration::journal::{Entry, Inconsistent, Record, Stage, State};
use migration::orders;
use migration::recovery::{self, Step};
use migration::{CommitFault, CommitId, MigrationId};

use crate::random::Random;

pub(crate) struct Books {
    pub(crate) now: Duration,
    pub(crate) state: State,
    pub(crate) commits: VecDeque<(Option<CommitId>, Vec<Record>)>,
}

impl Books {
    pub(crate) fn apply(&mut self, records: Vec<Record>) {
        self.accept(records).unwrap();
    }

    /// Applies records that no order has overtaken; like a daemon's journal, all or none.
    fn accept(&mut self, records: Vec<Record>) -> Result<(), Inconsistent> {
        let mut next = self.state.clone();
        next.apply(&Entry { at_unix_ms: 1, records })?;
        self.state = next;
        Ok(())
    }

    /// Cancels the migration; returns whether that was early enough, and is durable.
    pub(crate) fn order_cancel(&mut self, id: MigrationId) -> bool {
        orders::cancel(&self.state, id).is_ok_and(|records| self.accept(records).is_ok())
    }

    pub(crate) fn is_cancelled(&self, id: MigrationId) -> bool {
        self.state.migrations[&id].is_cancelled
    }

    pub(crate) fn journal_acts(
        &mut self,
        random: &mut Random,
        faulty: bool,
    ) -> Option<(CommitId, Result<(), CommitFault>)> {
        let (commit, records) = self.commits.pop_front()?;
        let fate = if faulty { random.below(12) } else { 12 };
        if fate > 1 {
            match self.accept(records) {
                Err(Inconsistent::Overtaken(_)) => return Some((commit?, Err(CommitFault::NotWritten))),
                accepted => accepted.unwrap(),
            }
        }
        let result = match fate {
            0 => Err(CommitFault::NotWritten),
            1 | 2 => Err(CommitFault::Unknown),
            _ => Ok(()),
        };
        Some((commit?, result))
    }

    /// Keeps the first commits under way in the journal, and drops the others.
    pub(crate) fn crash(&mut self, random: &mut Random) {
        let kept = random.below(self.commits.len() as u64 + 1);
        let commits = std::mem::take(&mut self.commits);
        for (_, records) in commits.into_iter().take(kept as usize) {
            match self.accept(records) {
                Err(Inconsistent::Overtaken(_)) => {}
                accepted => accepted.unwrap(),
            }
        }
    }

    pub(crate) fn stage(&self, id: MigrationId) -> Stage {
        self.state.migrations[&id].stage.clone()
    }

    /// Runs the recovery before serving; returns whether a VM is to resume, and whether images were deleted.
    pub(crate) fn recover(&mut self) -> (bool, bool) {
        let (mut resumes, mut discards) = (false, false);
        for step in recovery::recover(&self.state) {
            match step {
                Step::Commit(records) => self.apply(records),
                Step::Resume(_) => resumes = true,
                Step::Discard(_) => discards = true,
                step @ Step::Retire(..) => panic!("between hosts: {step:?}"),
            }
        }
        (resumes, discards)
    }
}
