//! Two hosts agree on a pair of incarnations: the two lives of a session that belong together.
//!
//! An incarnation is a random number that one side gives one life of a session. It changes when the process is restarted, and
//! when the session is closed and opened again. All numbers of frames and all credit belong to one *pair*. A side that meets an
//! unknown incarnation of the peer begins anew, **under a new incarnation of its own**. So a pair never comes back, whatever is
//! delayed, and neither side can take old state for the other's new one.
//!
//! ```text
//!   dialler                                    called
//!     snapshot ── Hello(mine, expected) ──►     snapshot; offer()
//!     accept() ◄── Welcome(offered) ───────
//!        └──────── Ready ─────────────────►     settle()
//! ```
//!
//! Several connections do this at once. Each change compares with the snapshot first. If another connection has changed the pair
//! meanwhile, this connection is given up and dialled again. *Ready* proves that the dialler lives: bytes that a dead process
//! left in a socket cannot end the life of its successor.

/// One life of one side of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) local: Incarnation,
    pub(crate) remote: Option<Incarnation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The pair is unchanged: its frames continue.
    Same,
    /// This is the first pair: the queued messages are for it.
    First,
    /// The peer has another life than `before`: everything of that one is lost.
    Restarted { before: Incarnation },
    /// Another connection has changed the pair meanwhile: give this one up.
    Superseded,
}

#[derive(Debug)]
pub(crate) struct Pairing {
    now: Snapshot,
    /// The dialler's new incarnation and the one offered to it, so that all its connections get the same.
    offered: Option<(Incarnation, Incarnation)>,
}

impl Pairing {
    pub(crate) fn new(local: Incarnation) -> Self {
        Self { now: Snapshot { local, remote: None }, offered: None }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.now
    }

    /// Called side, at *Hello*: returns the incarnation under which the dialler gets a session. `fresh` is unused so far.
    pub(crate) fn offer(
        &mut self,
        dialler: Incarnation,
        expected: Option<Incarnation>,
        fresh: Incarnation,
    ) -> Incarnation {
        let same =
            self.now.remote == Some(dialler) && expected.is_none_or(|expected| expected == self.now.local);
        if same || self.now.remote.is_none() {
            return self.now.local;
        }
        match self.offered {
            Some((to, offered)) if to == dialler => offered,
            _ => {
                self.offered = Some((dialler, fresh));
                fresh
            }
        }
    }

    /// Called side, at *Ready*: makes the offered pair the session's.
    pub(crate) fn settle(
        &mut self,
        at_hello: Snapshot,
        offered: Incarnation,
        dialler: Incarnation,
    ) -> Outcome {
        let pair = Snapshot { local: offered, remote: Some(dialler) };
        if self.now == pair {
            return Outcome::Same;
        }
        if self.now != at_hello || self.now.remote.is_none() && self.now.local != offered {
            return Outcome::Superseded;
        }
        self.become_pair(pair)
    }

    /// Dialler, at *Welcome*: accepts the offered incarnation.
    pub(crate) fn accept(&mut self, at_hello: Snapshot, offered: Incarnation) -> Outcome {
        if self.now.local != at_hello.local {
            return Outcome::Superseded;
        }
        if self.now.remote == Some(offered) {
            return Outcome::Same;
        }
        if self.now != at_hello {
            return Outcome::Superseded;
        }
        self.become_pair(Snapshot { remote: Some(offered), ..self.now })
    }

    fn become_pair(&mut self, pair: Snapshot) -> Outcome {
        let before = self.now.remote;
        self.now = pair;
        self.offered = None;
        before.map_or(Outcome::First, |before| Outcome::Restarted { before })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::{Incarnation, Outcome, Pairing, Snapshot};

    #[test]
    fn connections_of_one_life_share_a_pair() {
        let (mut dialler, mut called) = (Pairing::new(Incarnation(1)), Pairing::new(Incarnation(2)));
        let hello = dialler.snapshot();
        for expected in [Outcome::First, Outcome::Same] {
            // Both have greeted before either was answered.
            let at_hello = Snapshot { local: Incarnation(2), remote: None };
            let offered = called.offer(hello.local, hello.remote, Incarnation(9));
            assert_eq!(dialler.accept(hello, offered), expected);
            assert_eq!(called.settle(at_hello, offered, hello.local), expected);
        }
    }

    #[test]
    fn a_restarted_called_side_is_noticed_by_the_dialler_and_the_other_way_round() {
        let (mut dialler, mut called) = (Pairing::new(Incarnation(1)), Pairing::new(Incarnation(2)));
        let connect = |dialler: &mut Pairing, called: &mut Pairing, fresh| {
            let (hello, at_hello) = (dialler.snapshot(), called.snapshot());
            let offered = called.offer(hello.local, hello.remote, Incarnation(fresh));
            (dialler.accept(hello, offered), called.settle(at_hello, offered, hello.local))
        };
        assert_eq!(connect(&mut dialler, &mut called, 10), (Outcome::First, Outcome::First));
        called = Pairing::new(Incarnation(3));
        let before = Incarnation(2);
        assert_eq!(connect(&mut dialler, &mut called, 11), (Outcome::Restarted { before }, Outcome::First));
        dialler = Pairing::new(Incarnation(4));
        let before = Incarnation(1);
        assert_eq!(connect(&mut dialler, &mut called, 12), (Outcome::First, Outcome::Restarted { before }));
        assert_eq!(called.snapshot().local, Incarnation(12));
        assert_eq!(connect(&mut dialler, &mut called, 13), (Outcome::Same, Outcome::Same));
    }

    #[test]
    fn what_a_dead_dialler_left_behind_changes_nothing() {
        let (mut dialler, mut called) = (Pairing::new(Incarnation(1)), Pairing::new(Incarnation(2)));
        let hello = dialler.snapshot();
        let offered = called.offer(hello.local, hello.remote, Incarnation(10));
        let at_hello = called.snapshot();
        dialler.accept(hello, offered);
        called.settle(at_hello, offered, hello.local);
        // A hello of another life is read, but no Ready follows.
        assert_eq!(called.offer(Incarnation(99), None, Incarnation(11)), Incarnation(11));
        let offered = called.offer(Incarnation(1), Some(Incarnation(2)), Incarnation(12));
        assert_eq!(offered, Incarnation(2));
        assert_eq!(dialler.accept(dialler.snapshot(), offered), Outcome::Same);
    }

    /// A step of one of several handshakes between two hosts that may be restarted.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Hello { connection: usize, from: usize },
        Advance { connection: usize },
        Restart { side: usize },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0usize..4, 0usize..2).prop_map(|(connection, from)| Step::Hello { connection, from }),
            8 => (0usize..4).prop_map(|connection| Step::Advance { connection }),
            1 => (0usize..2).prop_map(|side| Step::Restart { side }),
        ];
        proptest::collection::vec(step, 0..60)
    }

    #[derive(Clone, Copy)]
    enum Handshake {
        Greeted { from: usize, hello: Snapshot },
        Offered { from: usize, hello: Snapshot, at_hello: Snapshot, offered: Incarnation },
        Agreed { from: usize, at_hello: Snapshot, offered: Incarnation, dialler: Incarnation },
    }

    proptest! {
        /// A pair that a side has left never becomes its pair again: state of one life never meets another's.
        #[test]
        fn a_pair_never_comes_back(steps in steps()) {
            let mut next = 0;
            let mut fresh = || { next += 1; Incarnation(next) };
            let mut sides = [Pairing::new(fresh()), Pairing::new(fresh())];
            let mut lives: [u32; 2] = [0, 0];
            let mut left: [BTreeSet<(u64, Option<u64>)>; 2] = Default::default();
            let mut handshakes: BTreeMap<usize, (Handshake, [u32; 2])> = BTreeMap::new();
            for step in steps {
                let before = [sides[0].snapshot(), sides[1].snapshot()];
                match step {
                    Step::Hello { connection, from } => {
                        handshakes.insert(connection, (Handshake::Greeted { from, hello: before[from] }, lives));
                    }
                    Step::Restart { side } => {
                        sides[side] = Pairing::new(fresh());
                        lives[side] += 1;
                    }
                    Step::Advance { connection } => {
                        let Some((handshake, of)) = handshakes.remove(&connection) else { continue };
                        // A process that has ended answers nothing; bytes that it sent may still be read.
                        let alive = |side: usize| lives[side] == of[side];
                        match handshake {
                            Handshake::Greeted { from, hello } if alive(1 - from) => {
                                let at_hello = before[1 - from];
                                let offered = sides[1 - from].offer(hello.local, hello.remote, fresh());
                                let offer = Handshake::Offered { from, hello, at_hello, offered };
                                handshakes.insert(connection, (offer, of));
                            }
                            Handshake::Offered { from, hello, at_hello, offered } if alive(from) => {
                                let outcome = sides[from].accept(hello, offered);
                                if outcome != Outcome::Superseded {
                                    let dialler = hello.local;
                                    let agreed = Handshake::Agreed { from, at_hello, offered, dialler };
                                    handshakes.insert(connection, (agreed, of));
                                }
                            }
                            Handshake::Agreed { from, at_hello, offered, dialler } if alive(1 - from) => {
                                sides[1 - from].settle(at_hello, offered, dialler);
                            }
                            _ => {}
                        }
                    }
                }
                for side in 0..2 {
                    let (was, now) = (before[side], sides[side].snapshot());
                    let key = |it: Snapshot| (it.local.0, it.remote.map(|remote| remote.0));
                    if was != now {
                        left[side].insert(key(was));
                        prop_assert!(!left[side].contains(&key(now)), "{:?} again", now);
                    }
                }
            }
        }
    }
}
