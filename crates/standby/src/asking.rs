//! Asks the host of a standby whether it was promoted, before its group is served again (law 29).
//!
//! ```text
//!   served until a moment ago ──────────────────────────────────► permitted ──Promoted──► permitted, and recorded
//!   recorded as replaced ───────────────────────────────────────► replaced
//!   asking ──NotPromoted, Yielded, or an order──────────────────► permitted
//!     ├─────no word, and IfSilent::Serve────────────────────────► permitted
//!     └─────Promoted──► replaced, and recorded ──Yielded, or an order that knows of it──► permitted
//! ```
//! Unknown is never "no": whatever the host does not say for certain leaves the group waiting (law 37). A permission ends with its
//! time: a group whose image was locked meanwhile asks again, because its standby may have been promoted since.

use std::time::Duration;

use chronicle::Epoch;
use serde::{Deserialize, Serialize};

use crate::identity::{LifeId, StandbyId};
use crate::outbox::Outbox;
use crate::planted::{Bug, broken};

/// The time between two questions.
pub const ASK_AGAIN: Duration = Duration::from_secs(5);
/// How long [`IfSilent::Serve`] waits for a word.
pub const SILENT_MAX: Duration = Duration::from_secs(15);
/// A group that was served so many intervals ago needs no permission, so a restart of the daemon makes no guest wait.
const AWAY_INTERVALS: u32 = 2;
/// It needs one after this time, however long the interval is.
const AWAY_MAX: Duration = Duration::from_secs(30);
/// How long a permission counts, unless an administrator has given it.
pub const PERMIT_MAX: Duration = Duration::from_secs(5);

/// What the owner asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The standby.
    pub standby: StandbyId,
    /// The life of the owner's history, and the newest epoch that the owner knows to be acknowledged. A standby of a restored journal
    /// compares them with its own.
    pub life: LifeId,
    /// See `life`.
    pub acknowledged: Option<Epoch>,
}

/// What the host of a standby says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// It keeps the standby, and has not promoted it.
    NotPromoted,
    /// A migration has the standby's images. The owner's journal says whether that has the group.
    Used,
    /// The standby was promoted there, durably.
    Promoted,
    /// It was promoted there, and an administrator has given that up.
    Yielded,
    /// The host cannot say: it is promoting, its journal was restored, or it does not know the standby.
    Unsure,
}

/// What follows if the host of a standby says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IfSilent {
    /// The group waits for an order.
    #[default]
    Wait,
    /// It is served after [`SILENT_MAX`].
    Serve,
}

/// What is known when the group is to be served.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// How long ago this host served it last; `None`: it has booted since, or it is not known.
    pub away: Option<Duration>,
    /// The time between two cuts.
    pub every: Duration,
    /// Whether a record says that the standby was promoted ([`Action::Record`]).
    pub is_replaced: bool,
    /// Whether an administrator has begun to give the group up here.
    pub is_given_up: bool,
    /// Whether this host's journal is its own, and not one of a backup.
    pub knows_history: bool,
    /// What silence means.
    pub if_silent: IfSilent,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The standby's host can be reached.
    Connected,
    /// It has said something, also without being asked: an answer to an offer counts.
    Said(Word),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the question, if the standby's host can be reached.
    Ask,
    /// Make durable whether the standby was promoted.
    Record {
        /// Whether it was.
        is_replaced: bool,
    },
    /// Serve the group.
    Permit,
}

/// Whether a group may be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// The standby's host has not said for certain that it was not promoted.
    Asking,
    /// The standby was promoted: another host has the group.
    Replaced,
    /// It may be served, if that begins soon ([`Asking::may_begin`]).
    Permitted,
}

/// The standby was promoted, and the order does not say that this is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promoted;

/// Asks before a group is served.
#[derive(Debug)]
pub struct Asking {
    known: Known,
    permission: Permission,
    /// The last word; `None`: none since this began.
    word: Option<Word>,
    asks_at: Duration,
    /// When silence counts as permission; `None`: never.
    silent_until: Option<Duration>,
    /// When the permission ends; `None`: an administrator has given it.
    permitted_until: Option<Duration>,
    outbox: Outbox<Action>,
}

impl Asking {
    /// Begins when a group is to be served.
    pub fn begin(now: Duration, known: Known) -> Self {
        let mut asking = Self {
            known,
            permission: Permission::Asking,
            word: None,
            asks_at: now + ASK_AGAIN,
            silent_until: (known.if_silent == IfSilent::Serve).then_some(now + SILENT_MAX),
            permitted_until: None,
            outbox: Outbox::new(),
        };
        let away_max = known.every.saturating_mul(AWAY_INTERVALS).min(AWAY_MAX);
        let was_just_served = known.away.is_some_and(|away| away <= away_max);
        // A group that both hosts have served until a moment ago is served on: who has it is for an administrator to say.
        if known.is_given_up {
            asking.permission = Permission::Replaced;
        } else if was_just_served || broken(Bug::ServesUnasked) {
            asking.permit(Some(now));
        } else if known.is_replaced && !broken(Bug::ReplacedForgotten) {
            asking.permission = Permission::Replaced;
        }
        asking.outbox.push(Action::Ask);
        asking
    }

    /// Returns whether the group may be served.
    pub fn permission(&self) -> Permission {
        self.permission
    }

    /// Returns whether serving may begin at `now`. If not, and the group is not served yet, another machine has to ask.
    pub fn may_begin(&self, now: Duration) -> bool {
        let counts = self.permitted_until.is_none_or(|until| now <= until) || broken(Bug::OldPermission);
        self.permission == Permission::Permitted && counts
    }

    /// Returns whether it is known that the standby was promoted, and not given up since.
    pub fn is_replaced(&self) -> bool {
        self.known.is_replaced
    }

    /// Returns what the standby's host has said last.
    pub fn word(&self) -> Option<Word> {
        self.word
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.outbox.pop()
    }

    /// Returns when [`Asking::handle_timeout`] is due; `None`: it waits for nothing.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let is_waiting = self.permission == Permission::Asking;
        let silent = self.silent_until.filter(|_| is_waiting);
        (self.permission != Permission::Permitted)
            .then_some(silent.map_or(self.asks_at, |at| at.min(self.asks_at)))
    }

    /// Handles an event.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::Connected if self.permission != Permission::Permitted => self.outbox.push(Action::Ask),
            Event::Connected => {}
            Event::Said(word) => self.hear(now, word),
        }
    }

    /// Handles a deadline of [`Asking::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Duration) {
        if self.permission != Permission::Permitted && now >= self.asks_at {
            self.asks_at = now + ASK_AGAIN;
            self.outbox.push(Action::Ask);
        }
        if self.permission == Permission::Asking && self.silent_until.is_some_and(|until| now >= until) {
            self.permit(Some(now));
        }
    }

    /// An administrator orders to serve the group. Errors: [`Promoted`], unless the order says that this is known.
    pub fn order(&mut self, knows_of_promotion: bool) -> Result<(), Promoted> {
        match self.permission {
            Permission::Replaced if !knows_of_promotion => return Err(Promoted),
            Permission::Replaced | Permission::Asking | Permission::Permitted => self.permit(None),
        }
        Ok(())
    }

    fn hear(&mut self, now: Duration, word: Word) {
        self.word = Some(word);
        match word {
            Word::Promoted => {
                // N.B. Also of a group that is served: then both hosts have it, and the next start waits.
                if !std::mem::replace(&mut self.known.is_replaced, true) {
                    self.outbox.push(Action::Record { is_replaced: true });
                    // What was not known when it was permitted ends that, if the group is not served yet.
                    self.permitted_until = Some(Duration::ZERO);
                }
                if self.permission == Permission::Asking {
                    self.permission = Permission::Replaced;
                }
            }
            Word::Yielded => {
                if std::mem::take(&mut self.known.is_replaced) {
                    self.outbox.push(Action::Record { is_replaced: false });
                }
                self.permit(Some(now));
            }
            // A record that says otherwise is newer than what that host knows: its journal was restored.
            Word::NotPromoted if self.permission == Permission::Asking => self.permit(Some(now)),
            // This journal has released the group to that migration before another host could own it, or it has not.
            Word::Used if self.permission == Permission::Asking && self.known.knows_history => {
                self.permit(Some(now));
            }
            Word::NotPromoted | Word::Used | Word::Unsure => {}
        }
    }

    /// Permits, since `now`, or by an administrator's order.
    fn permit(&mut self, now: Option<Duration>) {
        self.permitted_until = now.map(|now| now + PERMIT_MAX);
        if self.permission != Permission::Permitted {
            self.permission = Permission::Permitted;
            self.outbox.push(Action::Permit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(10);

    fn known() -> Known {
        Known {
            away: None,
            every: EVERY,
            is_replaced: false,
            is_given_up: false,
            knows_history: true,
            if_silent: IfSilent::Wait,
        }
    }

    fn actions(asking: &mut Asking) -> Vec<Action> {
        std::iter::from_fn(|| asking.poll_action()).collect()
    }

    fn after(known: Known, words: &[Word]) -> (Permission, Vec<Action>) {
        let mut asking = Asking::begin(Duration::ZERO, known);
        words.iter().for_each(|word| asking.handle_event(Duration::ZERO, Event::Said(*word)));
        (asking.permission(), actions(&mut asking))
    }

    #[test]
    fn a_group_is_served_at_once_only_if_it_was_served_a_moment_ago() {
        let begun = |away| after(Known { away, ..known() }, &[]).0;
        assert_eq!(begun(None), Permission::Asking);
        assert_eq!(begun(Some(2 * EVERY)), Permission::Permitted);
        assert_eq!(begun(Some(2 * EVERY + Duration::from_millis(1))), Permission::Asking);
        let daily = Known { away: Some(AWAY_MAX * 2), every: Duration::from_secs(86_400), ..known() };
        assert_eq!(after(daily, &[]).0, Permission::Asking);
        let replaced = |away| after(Known { away, is_replaced: true, ..known() }, &[]).0;
        assert_eq!(replaced(Some(EVERY)), Permission::Permitted);
        assert_eq!(replaced(Some(3 * EVERY)), Permission::Replaced);
        // What an administrator gives up is not served, however short the interruption was.
        let given_up = Known { away: Some(Duration::ZERO), is_replaced: true, is_given_up: true, ..known() };
        assert_eq!(after(given_up, &[]).0, Permission::Replaced);
    }

    #[test]
    fn only_a_certain_word_permits() {
        let (ask, permit) = (Action::Ask, Action::Permit);
        let record = |is_replaced| Action::Record { is_replaced };
        let said = |words: &[Word]| after(known(), words);
        assert_eq!(said(&[Word::NotPromoted]), (Permission::Permitted, vec![ask, permit]));
        assert_eq!(said(&[Word::Unsure]), (Permission::Asking, vec![ask]));
        assert_eq!(said(&[Word::Promoted]), (Permission::Replaced, vec![ask, record(true)]));
        assert_eq!(said(&[Word::Promoted, Word::NotPromoted]).0, Permission::Replaced);
        let yielded = said(&[Word::Promoted, Word::Yielded]);
        assert_eq!(yielded, (Permission::Permitted, vec![ask, record(true), record(false), permit]));
        assert_eq!(said(&[Word::Used]).0, Permission::Permitted);
        assert_eq!(after(Known { knows_history: false, ..known() }, &[Word::Used]).0, Permission::Asking);
    }

    #[test]
    fn a_promotion_is_recorded_also_while_the_group_is_served() {
        let served = Known { away: Some(Duration::ZERO), ..known() };
        let (permission, given) = after(served, &[Word::Promoted, Word::Promoted]);
        assert_eq!(permission, Permission::Permitted);
        assert_eq!(given, [Action::Permit, Action::Ask, Action::Record { is_replaced: true }]);
    }

    #[test]
    fn silence_permits_where_that_is_ordered_and_never_after_a_promotion() {
        let silent = |if_silent, words: &[Word]| {
            let mut asking = Asking::begin(Duration::ZERO, Known { if_silent, ..known() });
            words.iter().for_each(|word| asking.handle_event(Duration::ZERO, Event::Said(*word)));
            while let Some(at) = asking.poll_timeout().filter(|at| *at <= 2 * SILENT_MAX) {
                asking.handle_timeout(at);
            }
            (
                asking.permission(),
                actions(&mut asking).iter().filter(|action| **action == Action::Ask).count(),
            )
        };
        assert_eq!(silent(IfSilent::Serve, &[]), (Permission::Permitted, 4));
        assert_eq!(silent(IfSilent::Serve, &[Word::Promoted]).0, Permission::Replaced);
        assert_eq!(silent(IfSilent::Wait, &[]), (Permission::Asking, 7));
    }

    #[test]
    fn a_permission_ends_and_an_order_does_not() {
        let later = PERMIT_MAX + Duration::from_millis(1);
        let permitted = |known: Known, event: fn(&mut Asking)| {
            let mut asking = Asking::begin(Duration::ZERO, known);
            event(&mut asking);
            assert!(asking.may_begin(Duration::ZERO));
            (asking.may_begin(PERMIT_MAX), asking.may_begin(later))
        };
        let said = |asking: &mut Asking| asking.handle_event(Duration::ZERO, Event::Said(Word::NotPromoted));
        assert_eq!(permitted(known(), said), (true, false));
        let just_served = Known { away: Some(Duration::ZERO), ..known() };
        assert_eq!(permitted(just_served, |_: &mut Asking| {}), (true, false));
        assert_eq!(permitted(known(), |asking: &mut Asking| asking.order(false).unwrap()), (true, true));
        assert!(!Asking::begin(Duration::ZERO, known()).may_begin(Duration::ZERO));
        let mut promoted = Asking::begin(Duration::ZERO, just_served);
        promoted.handle_event(Duration::from_secs(1), Event::Said(Word::Promoted));
        assert!(!promoted.may_begin(Duration::from_secs(1)));
    }

    #[test]
    fn an_order_has_to_know_of_a_promotion() {
        let mut asking = Asking::begin(Duration::ZERO, known());
        asking.handle_event(Duration::ZERO, Event::Said(Word::Promoted));
        assert_eq!(asking.order(false), Err(Promoted));
        assert_eq!(asking.permission(), Permission::Replaced);
        assert_eq!(asking.order(true), Ok(()));
        assert_eq!(asking.permission(), Permission::Permitted);
        let mut silent = Asking::begin(Duration::ZERO, known());
        assert_eq!(silent.order(false), Ok(()));
        assert_eq!(silent.permission(), Permission::Permitted);
    }
}
