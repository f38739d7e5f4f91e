//! Checks that no guest request fails, or waits too long, because of a migration.
//!
//! A request may wait for its owner's disk, the journal or the messengers, which get faults on purpose: those times are
//! *excused*. The rest must stay below the limits of the migration.

use std::collections::BTreeMap;
use std::time::Duration;

use block::IoError;
use lane::TimeLimits;
use rustix::io::Errno;

use crate::disk::FOREIGN_ERRNO;

/// What the simulated disks and the executor may add to a migration's limits.
const SLACK: Duration = Duration::from_millis(100);
/// Shorter requests are not checked.
const NOT_WORTH_A_LOOK: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
pub(crate) struct Excuses {
    intervals: Vec<(Duration, Duration)>,
    open: BTreeMap<usize, Duration>,
    /// Numbered excuses that have ended: a request that began to wait in one may wait longer.
    ended: Vec<(Duration, Duration)>,
}

impl Excuses {
    pub(crate) fn add(&mut self, from: Duration, to: Duration) {
        self.intervals.push((from, to));
    }

    /// Begins an excuse with this number: requests are served by another host.
    pub(crate) fn begin(&mut self, number: usize, now: Duration) {
        self.open.entry(number).or_insert(now);
    }

    pub(crate) fn end(&mut self, number: usize, now: Duration) {
        if let Some(began) = self.open.remove(&number) {
            self.add(began, now);
            self.ended.push((began, now));
        }
    }

    /// Returns until when the migration is to blame for a wait: from the first instant of another host's ownership, the request
    /// may be at a host that is out of reach.
    fn until_elsewhere(&self, from: Duration, to: Duration) -> Duration {
        let open = self.open.values().map(|began| (*began, Duration::MAX));
        let elsewhere = self.ended.iter().copied().chain(open);
        let meanwhile = elsewhere.filter(|(began, ended)| *began < to && *ended >= from);
        meanwhile.map(|(began, _)| began.max(from)).min().unwrap_or(to)
    }

    fn unexcused(&self, from: Duration, to: Duration) -> Duration {
        let clip = |(start, end): &(Duration, Duration)| ((*start).max(from), (*end).min(to));
        let open: Vec<_> = self.open.values().map(|began| (*began, Duration::MAX)).collect();
        let mut excused: Vec<_> =
            self.intervals.iter().chain(&open).map(clip).filter(|(start, end)| start < end).collect();
        excused.sort_unstable();
        let mut covered_until = from;
        let mut excused_time = Duration::ZERO;
        for (start, end) in excused {
            excused_time += end.saturating_sub(start.max(covered_until));
            covered_until = covered_until.max(end);
        }
        (to - from).saturating_sub(excused_time)
    }
}

pub(crate) fn too_long(
    excuses: &Excuses,
    limits: &TimeLimits,
    from: Duration,
    to: Duration,
) -> Option<String> {
    if to - from < NOT_WORTH_A_LOOK {
        return None;
    }
    let to = excuses.until_elsewhere(from, to);
    let waited = excuses.unexcused(from, to);
    let allowed = limits.mirror_wait_max + limits.switch_over_max + SLACK;
    (waited > allowed).then(|| {
        format!("a guest request of {from:?} took {:?}, {waited:?} of it without an excuse; {allowed:?} are allowed", to - from)
    })
}

/// Returns whether a guest may see this error: only its volume's owner may fail.
pub(crate) fn is_owners_fault(error: &IoError) -> bool {
    match error {
        IoError::Os { errno: Errno::NOSPC | Errno::TIMEDOUT, .. } => false,
        IoError::Os { errno, .. } => errno.raw_os_error() < FOREIGN_ERRNO,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_is_not_excused_counts() {
        let mut excuses = Excuses::default();
        excuses.add(SECOND * 2, SECOND * 4);
        excuses.add(SECOND * 3, SECOND * 5);
        excuses.add(SECOND * 9, SECOND * 20);
        assert_eq!(excuses.unexcused(SECOND, SECOND * 10), SECOND * 5);
        excuses.begin(1, SECOND * 6);
        assert_eq!(excuses.unexcused(SECOND, SECOND * 10), SECOND * 2);
        excuses.end(1, SECOND * 7);
        assert_eq!(excuses.unexcused(SECOND, SECOND * 10), SECOND * 4);
        assert_eq!(excuses.until_elsewhere(SECOND, SECOND * 10), SECOND * 6);
        assert_eq!(excuses.until_elsewhere(SECOND, SECOND * 5), SECOND * 5);
        assert_eq!(excuses.until_elsewhere(SECOND * 7, SECOND * 10), SECOND * 7);
        assert_eq!(excuses.until_elsewhere(SECOND * 8, SECOND * 10), SECOND * 10);
    }

    #[test]
    fn a_guest_that_waits_for_more_than_the_limits_is_noticed() {
        let limits = TimeLimits::default();
        let mut excuses = Excuses::default();
        assert!(too_long(&excuses, &limits, SECOND, SECOND * 2).is_none());
        assert!(too_long(&excuses, &limits, SECOND, SECOND * 3).is_some());
        excuses.add(SECOND, SECOND * 2);
        assert!(too_long(&excuses, &limits, SECOND, SECOND * 3).is_none());
    }

    #[test]
    fn a_targets_fault_must_not_reach_a_guest() {
        let os = |errno| IoError::os("write", Errno::from_raw_os_error(errno));
        assert!(is_owners_fault(&os(1003)));
        assert!(!is_owners_fault(&os(2003)));
        assert!(!is_owners_fault(&IoError::os("write", Errno::NOSPC)));
        assert!(!is_owners_fault(&IoError::Closed));
    }
}
