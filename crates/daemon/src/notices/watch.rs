//! Decides what is told: a machine without I/O that is shown the host's condition now and then.
//!
//! A condition is told once it has lasted for a while, so that a restart of another host tells nothing, and its end once it has been
//! away for as long. With each return that time doubles: what comes and goes all the time has begun, and is not told again and again.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{NoticeEvent, NoticeLevel, Part};
use serde::{Deserialize, Serialize};

/// How long a condition lasts before it is told, and how long it is away before its end is, at first.
const SETTLES_IN: Duration = Duration::from_secs(10);
/// How often the second time doubles: up to eleven minutes.
const DOUBLINGS_MAX: u32 = 6;
/// A condition that stays away for so long comes as a new one.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// What a condition is about. Its words may change while it lasts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Subject {
    pub(super) level: NoticeLevel,
    pub(super) part: Part,
    pub(super) name: Option<String>,
}

/// Something to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct News {
    pub(super) event: NoticeEvent,
    pub(super) subject: Subject,
    pub(super) message: String,
}

/// The conditions of a host, and which of them were told.
#[derive(Debug, Default)]
pub(super) struct Watch {
    conditions: BTreeMap<Subject, Condition>,
}

#[derive(Debug)]
struct Condition {
    message: String,
    is_present: bool,
    /// Since when it is there, or away.
    since: Duration,
    is_told: bool,
    /// Whether it was told since it is known.
    was_told: bool,
    /// How often it has come back after it was told.
    returns: u32,
}

impl Watch {
    /// Returns a watch that knows what an earlier one has told.
    pub(super) fn with_told(told: impl IntoIterator<Item = (Subject, String)>) -> Self {
        let conditions = told.into_iter().map(|(subject, message)| {
            let since = Duration::ZERO;
            (
                subject,
                Condition { message, is_present: false, since, is_told: true, was_told: true, returns: 0 },
            )
        });
        Self { conditions: conditions.collect() }
    }

    /// Returns the conditions that were told and have not ended.
    pub(super) fn told(&self) -> impl Iterator<Item = (&Subject, &str)> {
        let told = self.conditions.iter().filter(|(_, condition)| condition.is_told);
        told.map(|(subject, condition)| (subject, condition.message.as_str()))
    }

    /// Takes all present conditions, and returns what is to be told. `now` never goes back.
    pub(super) fn look(&mut self, now: Duration, present: BTreeMap<Subject, String>) -> Vec<News> {
        for (subject, condition) in &mut self.conditions {
            if condition.is_present && !present.contains_key(subject) {
                (condition.is_present, condition.since) = (false, now);
            }
        }
        for (subject, message) in present {
            let condition = self.conditions.entry(subject).or_insert_with(|| Condition {
                message: String::new(),
                is_present: true,
                since: now,
                is_told: false,
                was_told: false,
                returns: 0,
            });
            if !condition.is_present {
                (condition.is_present, condition.since) = (true, now);
                condition.returns = condition.returns.saturating_add(1);
            }
            condition.message = message;
        }
        let mut news = Vec::new();
        for (subject, condition) in &mut self.conditions {
            let doublings = if condition.is_present { 0 } else { condition.returns.min(DOUBLINGS_MAX) };
            let settles_in = SETTLES_IN * 2_u32.pow(doublings);
            let is_settled = now.saturating_sub(condition.since) >= settles_in;
            if is_settled && condition.is_present != condition.is_told {
                condition.is_told = condition.is_present;
                condition.was_told = true;
                let event = if condition.is_told { NoticeEvent::Begun } else { NoticeEvent::Ended };
                news.push(News { event, subject: subject.clone(), message: condition.message.clone() });
            }
        }
        self.conditions.retain(|_, condition| {
            let is_old = now.saturating_sub(condition.since) >= FORGOTTEN_AFTER;
            condition.is_present || condition.is_told || condition.was_told && !is_old
        });
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> Subject {
        Subject { level: NoticeLevel::Problem, part: Part::Standby, name: Some("v@beta".to_owned()) }
    }

    /// Looks once a second while the condition is as it is said, and returns the seconds at which something was told.
    fn tell(
        watch: &mut Watch,
        seconds: std::ops::Range<u64>,
        is_there: impl Fn(u64) -> bool,
    ) -> Vec<(u64, NoticeEvent)> {
        let mut told = Vec::new();
        for second in seconds {
            let present = is_there(second).then(|| (subject(), "behind".to_owned()));
            let news = watch.look(Duration::from_secs(second), present.into_iter().collect());
            told.extend(news.into_iter().map(|news| (second, news.event)));
        }
        told
    }

    #[test]
    fn a_condition_is_told_when_it_has_lasted_and_when_it_has_ended() {
        let told = tell(&mut Watch::default(), 0..200, |second| (50..100).contains(&second));
        assert_eq!(told, [(60, NoticeEvent::Begun), (110, NoticeEvent::Ended)]);
    }

    #[test]
    fn a_moment_is_not_told() {
        assert_eq!(tell(&mut Watch::default(), 0..100, |second| (50..59).contains(&second)), []);
    }

    #[test]
    fn what_comes_and_goes_has_begun() {
        let told = tell(&mut Watch::default(), 0..3600, |second| second % 30 < 15);
        assert_eq!(told, [(10, NoticeEvent::Begun), (25, NoticeEvent::Ended), (40, NoticeEvent::Begun)]);
        // What lasts is told each time.
        let told = tell(&mut Watch::default(), 0..36_000, |second| second % 3000 < 1500);
        assert_eq!(told.len(), 24, "{told:?}");
    }

    #[test]
    fn a_restart_tells_nothing_twice_and_forgets_no_end() {
        let mut watch = Watch::default();
        assert_eq!(tell(&mut watch, 0..60, |_| true), [(10, NoticeEvent::Begun)]);
        let told = || watch.told().map(|(subject, message)| (subject.clone(), message.to_owned()));
        let mut next = Watch::with_told(told());
        assert_eq!(tell(&mut next, 0..60, |second| second > 3), []);
        let mut next = Watch::with_told(told());
        assert_eq!(tell(&mut next, 0..60, |_| false), [(10, NoticeEvent::Ended)]);
    }

    #[test]
    fn what_has_gone_for_good_is_forgotten() {
        let mut watch = Watch::default();
        tell(&mut watch, 0..20_000, |second| second % 30 < 15 && second < 10_000);
        assert!(watch.conditions.is_empty(), "{watch:?}");
    }
}
