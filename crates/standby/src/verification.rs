//! Decides which standby of a host is compared with its volumes next, and when: one at a time, the oldest comparison first.
//!
//! ```text
//!   each standby: when it was compared ─► due, or not yet ─┐
//!   one is being compared, or one began a moment ago ──────┴─► next: the one to begin with
//! ```
//! Times are milliseconds since 1970, because they outlive the daemon. A time that lies ahead is one of a clock that was wrong: it
//! counts as none, and a comparison too many is the worst that follows.

use serde::{Deserialize, Serialize};

use crate::record::Record;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// A comparison that has ended early is tried again after this part of the interval, and an hour at most.
const RETRY_PART: u64 = 8;
/// A standby that has differed is compared again after the same part, and a day at most: was it mended, and is it the disk?
const AGAIN_PART: u64 = 8;
/// A clock may be set back by so much.
const AHEAD_MAX_MS: u64 = HOUR_MS;
/// The longest reason that is stored, in bytes.
const REASON_BYTES_MAX: usize = 1000;

/// A comparison of all blocks of a standby with those of its volumes. Counts are of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// When it was begun.
    pub begun_ms: u64,
    /// When it has ended; `None`: it is under way, or was when the daemon ended.
    pub ended_ms: Option<u64>,
    /// Why it has ended before everything was compared.
    pub interrupted: Option<String>,
    /// Whether it was interrupted because blocks cannot be read.
    pub is_failed: bool,
    /// Whether an administrator has ordered it.
    pub is_ordered: bool,
    /// The blocks of the volumes.
    pub total: u64,
    /// The blocks that were compared.
    pub done: u64,
    /// Of these, what the standby lacked just then or guests wrote meanwhile: it is sent anyway.
    pub left_out: u64,
    /// Of these, what differed without such a reason.
    pub differing: u64,
}

impl Comparison {
    /// Returns one that begins now.
    pub fn begin(now_ms: u64, total: u64, is_ordered: bool) -> Self {
        Self {
            begun_ms: now_ms,
            ended_ms: None,
            interrupted: None,
            is_failed: false,
            is_ordered,
            total,
            done: 0,
            left_out: 0,
            differing: 0,
        }
    }

    /// Ends it early, unless it has ended.
    pub fn interrupt(&mut self, now_ms: u64, reason: &str, is_failed: bool) {
        if self.ended_ms.is_none() {
            let end = (0..=reason.len().min(REASON_BYTES_MAX)).rfind(|end| reason.is_char_boundary(*end));
            self.interrupted = Some(reason[..end.unwrap_or(0)].to_owned());
            (self.ended_ms, self.is_failed) = (Some(now_ms), is_failed);
        }
    }
}

/// A comparison that has reached its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whole {
    /// When it ended.
    pub ended_ms: u64,
    /// The number of blocks that differed. They were sent again.
    pub differing: u64,
}

/// What is kept of the comparisons of a standby. One that is lost or damaged says: it was never compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    /// The last one, which may be under way.
    pub last: Option<Comparison>,
    /// The last one that has reached its end.
    pub whole: Option<Whole>,
}

impl Record for Compared {
    const HEADER: [u8; 8] = *b"STERNAC\x01";
}

impl Compared {
    /// Takes a comparison that has ended, or begins.
    pub fn note(&mut self, comparison: Comparison) {
        if let (Some(ended_ms), None) = (comparison.ended_ms, &comparison.interrupted) {
            self.whole = Some(Whole { ended_ms, differing: comparison.differing });
        }
        self.last = Some(comparison);
    }

    /// Ends what was under way when the daemon ended. Nothing else has changed since then.
    pub fn restarted(&mut self) {
        if let Some(last) = &mut self.last {
            let begun_ms = last.begun_ms;
            last.interrupt(begun_ms, "the daemon of this host was restarted", false);
        }
    }

    /// Returns whether it is being compared.
    fn is_under_way(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.ended_ms.is_none())
    }

    /// Returns from when on it is to be compared; zero: it never was.
    fn due_ms(&self, every_ms: u64, now_ms: u64) -> u64 {
        let past = |ms: u64| ms <= now_ms.saturating_add(AHEAD_MAX_MS);
        let whole = self.whole.filter(|whole| past(whole.ended_ms));
        let due = whole.map_or(0, |Whole { ended_ms, differing }| {
            let after = if differing > 0 { (every_ms / AGAIN_PART).min(DAY_MS) } else { every_ms };
            ended_ms.saturating_add(after)
        });
        let failed = self.last.as_ref().filter(|last| last.interrupted.is_some());
        let ended = failed.map(|last| last.ended_ms.unwrap_or(last.begun_ms)).filter(|ended| past(*ended));
        let retry = (every_ms / RETRY_PART).min(HOUR_MS);
        due.max(ended.map_or(0, |ended| ended.saturating_add(retry)))
    }

    /// Returns whether it was not compared to the end for two intervals. One that never was is not judged: it may be new.
    pub fn is_overdue(&self, every_ms: u64, now_ms: u64) -> bool {
        let is_old = |whole: Whole| now_ms.saturating_sub(whole.ended_ms) > every_ms.saturating_mul(2);
        self.whole.is_some_and(is_old)
    }
}

/// A standby of this host's volumes.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What is known of its comparisons.
    pub compared: Compared,
    /// Whether it can be compared: it is current. One that is not does not hold others up.
    pub is_ready: bool,
}

/// Returns the position of the standby whose comparison is to begin now; `None`: of none yet.
///
/// Comparisons begin at least half an interval, divided by the number of standbys, apart. So what became due together is spread,
/// and all of them have their turn within half an interval. What administrators order beside is no reason to wait longer.
pub fn next(every_ms: u64, now_ms: u64, standbys: &[Candidate]) -> Option<usize> {
    if standbys.iter().any(|candidate| candidate.is_ready && candidate.compared.is_under_way()) {
        return None;
    }
    let begun = standbys.iter().filter_map(|candidate| candidate.compared.last.as_ref());
    let begun = begun.filter(|last| !last.is_ordered).map(|last| last.begun_ms);
    let newest = begun.filter(|begun| *begun <= now_ms.saturating_add(AHEAD_MAX_MS)).max();
    let apart = every_ms / 2 / (standbys.len() as u64).max(1);
    if newest.is_some_and(|newest| now_ms < newest.saturating_add(apart)) {
        return None;
    }
    let due = |candidate: &Candidate| candidate.compared.due_ms(every_ms, now_ms);
    let ready = standbys.iter().enumerate().filter(|(_, candidate)| {
        candidate.is_ready && !candidate.compared.is_under_way() && due(candidate) <= now_ms
    });
    ready.min_by_key(|(_, candidate)| due(candidate)).map(|(position, _)| position)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEEK_MS: u64 = 7 * DAY_MS;
    /// Some day of 2026.
    const NOW_MS: u64 = 1_790_000_000_000;

    fn whole(begun_ms: u64, took_ms: u64, differing: u64) -> Compared {
        let mut compared = Compared::default();
        let ended_ms = Some(begun_ms + took_ms);
        compared.note(Comparison { ended_ms, differing, ..Comparison::begin(begun_ms, 10, false) });
        compared
    }

    fn ready(compared: Compared) -> Candidate {
        Candidate { compared, is_ready: true }
    }

    fn interrupted(begun_ms: u64, is_ordered: bool) -> Compared {
        let mut comparison = Comparison::begin(begun_ms, 10, is_ordered);
        comparison.interrupt(begun_ms + 1, "why", false);
        Compared { last: Some(comparison), whole: None }
    }

    #[test]
    fn one_that_never_was_compared_comes_first_and_then_the_oldest() {
        let old = ready(whole(NOW_MS - 2 * WEEK_MS, 1, 0));
        let older = ready(whole(NOW_MS - 3 * WEEK_MS, 1, 0));
        let new = ready(whole(NOW_MS - HOUR_MS, 1, 0));
        let never = ready(Compared::default());
        assert_eq!(
            next(WEEK_MS, NOW_MS, &[old.clone(), older.clone(), new.clone()]),
            None,
            "one has just begun"
        );
        let later = NOW_MS + WEEK_MS / 2;
        assert_eq!(next(WEEK_MS, later, &[old.clone(), older.clone(), new.clone()]), Some(1));
        assert_eq!(next(WEEK_MS, later, &[old, older, new.clone(), never]), Some(3));
        assert_eq!(next(WEEK_MS, NOW_MS, &[new]), None);
        assert_eq!(next(WEEK_MS, NOW_MS, &[]), None);
    }

    #[test]
    fn one_at_a_time_and_what_cannot_be_compared_holds_nobody_up() {
        let never = ready(Compared::default());
        let begun = Comparison::begin(NOW_MS - WEEK_MS, 10, true);
        let mut under_way = ready(Compared { last: Some(begun), whole: None });
        assert_eq!(next(WEEK_MS, NOW_MS, &[under_way.clone(), never.clone()]), None);
        under_way.is_ready = false;
        assert_eq!(next(WEEK_MS, NOW_MS, &[under_way.clone(), never]), Some(1));
        assert_eq!(next(WEEK_MS, NOW_MS, &[under_way]), None);
        let away = Candidate { compared: Compared::default(), is_ready: false };
        assert_eq!(next(WEEK_MS, NOW_MS, &[away]), None);
    }

    #[test]
    fn thirty_that_are_due_together_are_spread_and_each_has_its_turn_every_interval() {
        let mut standbys = vec![ready(Compared::default()); 30];
        let (mut begun, mut turns) = (Vec::new(), vec![Vec::new(); 30]);
        for minute in 0..4 * 7 * 24 * 60 {
            let now_ms = NOW_MS + minute * 60_000;
            if let Some(position) = next(WEEK_MS, now_ms, &standbys) {
                begun.push(now_ms);
                turns[position].push(now_ms);
                standbys[position].compared = whole(now_ms, HOUR_MS, 0);
            }
        }
        assert!(begun.windows(2).all(|two| two[1] - two[0] >= WEEK_MS / 60), "{begun:?}");
        for turns in turns {
            assert!(turns[0] < NOW_MS + WEEK_MS / 2 + HOUR_MS, "{turns:?}");
            assert!(turns.windows(2).all(|two| two[1] - two[0] <= WEEK_MS + 2 * HOUR_MS), "{turns:?}");
            assert_eq!(turns.len(), 4, "{turns:?}");
        }
    }

    #[test]
    fn one_that_has_failed_is_tried_again_and_lets_others_go_first() {
        let at = NOW_MS - WEEK_MS / 4;
        let failed = ready(interrupted(at, false));
        assert_eq!(next(WEEK_MS, NOW_MS + WEEK_MS / 2, std::slice::from_ref(&failed)), Some(0));
        assert_eq!(next(WEEK_MS, NOW_MS + WEEK_MS / 2, &[failed, ready(Compared::default())]), Some(1));
        let ordered = ready(interrupted(NOW_MS, true));
        assert_eq!(next(WEEK_MS, NOW_MS + HOUR_MS - 1, std::slice::from_ref(&ordered)), None);
        assert_eq!(next(WEEK_MS, NOW_MS + HOUR_MS + 1, &[ordered]), Some(0));
    }

    #[test]
    fn one_that_has_differed_is_compared_again_within_a_day() {
        let differed = [ready(whole(NOW_MS, 0, 3)), ready(whole(NOW_MS, 0, 0))];
        // N.B. Two standbys begin a quarter of the interval apart.
        let quarter = WEEK_MS / 4;
        assert_eq!(next(WEEK_MS, NOW_MS + quarter - 1, &differed), None);
        assert_eq!(next(WEEK_MS, NOW_MS + quarter, &differed), Some(0));
        let many = vec![ready(whole(NOW_MS, 0, 3)); 30];
        assert_eq!(next(WEEK_MS, NOW_MS + WEEK_MS / 8 - 1, &many), None);
        assert_eq!(next(WEEK_MS, NOW_MS + WEEK_MS / 8, &many), Some(0));
    }

    #[test]
    fn orders_of_administrators_make_nobody_wait() {
        let comparison = Comparison { ended_ms: Some(NOW_MS), ..Comparison::begin(NOW_MS - 1, 10, true) };
        let mut ordered = Compared::default();
        ordered.note(comparison);
        assert_eq!(next(WEEK_MS, NOW_MS, &[ready(ordered), ready(Compared::default())]), Some(1));
    }

    #[test]
    fn a_clock_that_was_wrong_counts_as_none() {
        let ahead = ready(whole(NOW_MS + 10 * WEEK_MS, 1, 0));
        assert_eq!(next(WEEK_MS, NOW_MS, &[ahead]), Some(0));
        let a_little = ready(whole(NOW_MS + 1000, 1, 0));
        assert_eq!(next(WEEK_MS, NOW_MS, &[a_little]), None);
        for now_ms in [0, u64::MAX] {
            for every_ms in [0, 1, u64::MAX] {
                next(every_ms, now_ms, &[ready(whole(NOW_MS, 0, 1)), ready(interrupted(NOW_MS, false))]);
            }
        }
    }

    #[test]
    fn what_was_under_way_at_a_restart_is_interrupted_and_the_last_whole_one_stays_known() {
        let mut compared = whole(NOW_MS, 5, 2);
        compared.note(Comparison::begin(NOW_MS + 10, 10, false));
        let mut read = Compared::decode(&compared.encode()).unwrap();
        assert_eq!(read, compared);
        read.restarted();
        let last = read.last.clone().unwrap();
        assert!(last.interrupted.is_some() && last.ended_ms == Some(NOW_MS + 10) && !last.is_failed);
        assert_eq!(read.whole, Some(Whole { ended_ms: NOW_MS + 5, differing: 2 }));
        let again = read.clone();
        read.restarted();
        assert_eq!(read, again);
        let bytes = compared.encode();
        assert!((0..bytes.len()).all(|length| Compared::decode(&bytes[..length]).is_none()));
    }

    #[test]
    fn it_is_overdue_after_two_intervals() {
        let compared = whole(NOW_MS, 0, 0);
        assert!(!compared.is_overdue(WEEK_MS, NOW_MS + 2 * WEEK_MS));
        assert!(compared.is_overdue(WEEK_MS, NOW_MS + 2 * WEEK_MS + 1));
        assert!(!Compared::default().is_overdue(WEEK_MS, NOW_MS));
    }

    #[test]
    fn a_long_reason_is_cut_between_letters() {
        let mut comparison = Comparison::begin(0, 1, false);
        comparison.interrupt(1, &"ä".repeat(2000), true);
        assert_eq!(comparison.interrupted.unwrap().chars().count(), REASON_BYTES_MAX / 2);
    }
}
