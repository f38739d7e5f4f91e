//! Raises what guests may lose to a copying as far as its deadline demands, and lowers it again once there is time.
//!
//! It looks once a second at the expected end. After a change it waits until the measured rate tells what that did.

use std::time::Duration;

use pacer::Impact;

use crate::progress::Hurry;

/// How often it looks.
const LOOK: Duration = Duration::from_secs(1);
/// How long a change takes to show in the measured rate, which covers five seconds.
const SETTLES: Duration = Duration::from_secs(5);
/// The time that everything behind the copying needs: the last round, flushes, the handover.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// The part of the expected time that is added: rates fall as well.
const RESERVE: f64 = 0.1;
/// The impact is lowered while the time left is this many times the time needed.
const AMPLE: f64 = 1.5;
/// The most that one change raises the impact, as a multiple.
const RAISE_MAX: f64 = 2.0;

/// What is known of a copying when its deadline is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outlook {
    /// The time until the copying ends, at the slowest recent rate; `None`: nothing has been measured.
    pub(super) rest: Option<Duration>,
    /// Whether guests limit it, so that a greater impact makes it faster.
    pub(super) gives_way: bool,
}

/// The deadline of one copying.
#[derive(Debug)]
pub(super) struct Deadline {
    at: Duration,
    /// What was ordered.
    ordered: Impact,
    /// What holds at present; `None`: full speed.
    in_force: Option<Impact>,
    is_late: bool,
    /// When the impact was changed last: until some time later measured rates are those of before.
    changed: Duration,
    next_look: Duration,
}

impl Deadline {
    /// Makes the deadline of a copying that begins now, with the ordered impact.
    pub(super) fn new(now: Duration, at: Duration, ordered: Impact) -> Self {
        Self { at, ordered, in_force: Some(ordered), is_late: false, changed: now, next_look: now + SETTLES }
    }

    /// Returns when [`Deadline::look`] is due.
    pub(super) fn next_look(&self) -> Duration {
        self.next_look
    }

    /// Judges the expected end, and returns the impact from now on if it changes; `None` in it: full speed.
    pub(super) fn look(&mut self, now: Duration, outlook: Outlook) -> Option<Option<Impact>> {
        if now < self.next_look {
            return None;
        }
        self.next_look = now + LOOK;
        let left = self.at.saturating_sub(now).as_secs_f64();
        let rest = outlook.rest.map_or(f64::INFINITY, |rest| rest.as_secs_f64());
        let needed = rest * (1.0 + RESERVE) + AFTERWARDS.as_secs_f64();
        let is_short = needed > left;
        // What nobody has measured is not called late before its time.
        let is_known = outlook.rest.is_some() && now >= self.changed + 2 * SETTLES;
        self.is_late = left == 0.0 || rest > left && is_known && !self.can_hurry(outlook);
        let wanted = if is_short && self.can_hurry(outlook) {
            let factor = (needed / left.max(f64::MIN_POSITIVE)).min(RAISE_MAX);
            self.in_force.and_then(|impact| impact.times(factor))
        } else if needed * AMPLE < left {
            self.lowered()
        } else {
            self.in_force
        };
        if wanted == self.in_force {
            return None;
        }
        (self.in_force, self.changed) = (wanted, now);
        self.next_look = now + SETTLES;
        Some(wanted)
    }

    /// Returns what it does at present.
    pub(super) fn hurry(&self) -> Hurry {
        Hurry { impact: self.in_force, is_raised: self.in_force != Some(self.ordered), is_late: self.is_late }
    }

    fn can_hurry(&self, outlook: Outlook) -> bool {
        self.in_force.is_some() && (outlook.gives_way || outlook.rest.is_none())
    }

    fn lowered(&self) -> Option<Impact> {
        let lower = match self.in_force {
            None => Impact::MOST,
            Some(impact) => impact.times(1.0 / RAISE_MAX).unwrap_or(self.ordered),
        };
        Some(if lower > self.ordered { lower } else { self.ordered })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A disk whose copies get the part of `full` bytes a second that guests may lose; nobody measures it exactly.
    fn run(bytes: f64, full: f64, deadline: u32, percent: u8) -> (Duration, f64, bool) {
        let ordered = Impact::percent(percent).unwrap();
        let mut machine = Deadline::new(Duration::ZERO, SECOND * deadline, ordered);
        let (mut now, mut left, mut rate) = (Duration::ZERO, bytes, 0.0);
        let (mut lost, mut was_late) = (0.0, false);
        while left > 0.0 {
            let part = machine.in_force.map_or(1.0, Impact::part);
            // The meter covers five seconds.
            rate += (full * part - rate) / 5.0;
            left -= full * part;
            lost += part;
            now += SECOND;
            let rest = Duration::from_secs_f64(left.max(0.0) / rate);
            machine.look(now, Outlook { rest: Some(rest), gives_way: true });
            was_late |= machine.hurry().is_late;
            assert!(now < SECOND * 100_000, "it does not end");
        }
        (now, lost / now.as_secs_f64(), was_late)
    }

    #[test]
    fn a_deadline_is_met_and_guests_lose_no_more_than_it_costs() {
        // At what was ordered it takes 500 s, at full speed 100.
        for deadline in [130, 150, 200, 300, 400] {
            let (end, lost, was_late) = run(1e10, 1e8, deadline, 20);
            assert!(end <= SECOND * deadline && !was_late, "{end:?} of {deadline} s");
            let least = 100.0 / f64::from(deadline);
            assert!(
                lost < least * 1.35,
                "guests lost {lost:.2}, and {least:.2} would have done for {deadline} s"
            );
        }
    }

    #[test]
    fn with_time_enough_the_ordered_impact_holds() {
        let (_, lost, was_late) = run(1e10, 1e8, 700, 20);
        assert!((lost - 0.2).abs() < 0.01 && !was_late, "{lost}");
    }

    #[test]
    fn what_cannot_be_met_is_said_and_copied_at_full_speed() {
        let (end, lost, was_late) = run(1e10, 1e8, 50, 20);
        assert!(was_late && lost > 0.8, "{lost}");
        assert!(end < SECOND * 130, "{end:?}");
    }

    #[test]
    fn where_guests_do_not_limit_it_they_lose_nothing_to_its_haste() {
        let ordered = Impact::percent(20).unwrap();
        let mut machine = Deadline::new(Duration::ZERO, SECOND * 60, ordered);
        let outlook = Outlook { rest: Some(SECOND * 600), gives_way: false };
        for second in 1..30 {
            assert_eq!(machine.look(SECOND * second, outlook), None);
        }
        assert_eq!(machine.hurry(), Hurry { impact: Some(ordered), is_raised: false, is_late: true });
    }

    #[test]
    fn the_impact_falls_again_when_there_is_time() {
        let ordered = Impact::percent(10).unwrap();
        let mut machine = Deadline::new(Duration::ZERO, SECOND * 1000, ordered);
        let long = Outlook { rest: Some(SECOND * 5000), gives_way: true };
        let mut now = Duration::ZERO;
        while machine.hurry().impact.is_some() {
            now += SECOND;
            machine.look(now, long);
        }
        let short = Outlook { rest: Some(SECOND * 10), gives_way: true };
        while machine.hurry().is_raised {
            now += SECOND;
            machine.look(now, short);
        }
        assert!(now < SECOND * 100, "{now:?}");
    }
}
