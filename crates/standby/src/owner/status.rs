//! The state of a replication, as an administrator sees it.

use std::time::Duration;

use chronicle::Epoch;

use super::{Phase, Replication};
use crate::reprotection::BASE;
use crate::wire::RefusedBecause;

/// The state of a replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The standby has never had everything.
    Seeding,
    /// The standby is younger than the `rpo`.
    Current,
    /// The standby is older than the `rpo`.
    Behind(BehindBecause),
    /// An administrator has paused it.
    Paused,
    /// The standby has lost its recovery points.
    NoRecoveryPoint,
    /// A migration to the standby's host uses it, or has used it.
    Used,
    /// The standby was promoted, and the group is served here as well. An administrator decides.
    Diverged,
}

/// Why a standby is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BehindBecause {
    /// Its host has not answered since this process began.
    NoAnswer,
    /// Its host takes no epoch.
    Refused(RefusedBecause),
    /// Blocks are still fetched after a handover.
    Incomplete,
    /// The link, or what it may use, is too slow for what guests write.
    Slow,
}

/// How old the standby is, and why.
#[derive(Debug, Default)]
pub(super) struct Ages {
    /// The cut that the standby has, or a later moment up to which nothing was written; `None`: not known.
    pub(super) as_of: Option<Duration>,
    /// The newest epoch that the standby has confirmed to this process.
    pub(super) acknowledged: Option<Epoch>,
    /// Whether it had a recovery point when it last told.
    pub(super) has_point: bool,
    /// Whether a migration used it when it last told.
    pub(super) is_used: bool,
    /// Why it has refused the last epoch.
    pub(super) refused: Option<RefusedBecause>,
    told: Option<State>,
}

impl Ages {
    /// Returns a state that was not told before.
    pub(super) fn changed(&mut self, state: State) -> Option<State> {
        (self.told != Some(state)).then(|| *self.told.insert(state))
    }
}

impl Replication {
    /// Returns the moment whose state a promotion would bring back; `None`: not known.
    pub fn as_of(&self) -> Option<Duration> {
        self.ages.as_of
    }

    /// Returns the state.
    pub fn state(&self, now: Duration) -> State {
        let ages = &self.ages;
        let is_old = ages.as_of.is_none_or(|as_of| now.saturating_sub(as_of) > self.settings.rpo);
        let has_answered = self.stream.as_ref().is_some_and(super::sending::Stream::is_heard);
        // The base of a turned direction is no state that the standby has.
        let is_state = |epoch: Epoch| epoch > BASE;
        let had_all = self.record.acknowledged.max(ages.acknowledged).is_some_and(is_state);
        match self.phase {
            Phase::Diverged => State::Diverged,
            Phase::Serving if ages.is_used => State::Used,
            Phase::Serving if self.pauses.is_ordered => State::Paused,
            Phase::Serving if has_answered && !ages.has_point && had_all => State::NoRecoveryPoint,
            Phase::Serving if !had_all && !ages.has_point => State::Seeding,
            Phase::Serving if !is_old => State::Current,
            Phase::Serving => State::Behind(self.behind_because(has_answered)),
        }
    }

    fn behind_because(&self, has_answered: bool) -> BehindBecause {
        match self.ages.refused {
            _ if self.pauses.is_filling => BehindBecause::Incomplete,
            Some(reason) => BehindBecause::Refused(reason),
            None if has_answered => BehindBecause::Slow,
            None => BehindBecause::NoAnswer,
        }
    }
}
