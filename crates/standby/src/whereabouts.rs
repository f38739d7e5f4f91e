//! Which hosts may have the group of a standby, as the standby's host knows it (case 18).
//!
//! ```text
//!   at A ──A: the group leaves for C──► at A or C ──C: I have it──► at C
//!                                          └─────────A: it stays──► at A
//! ```
//! A says so before anything is handed over. So at every moment one of the hosts that are named here has the group, unless it has
//! moved on from C before C came.

use serde::{Deserialize, Serialize};

use crate::planted::{Bug, broken};

/// Where the group of a standby is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts<H> {
    /// The host that has sent the standby so far.
    pub at: H,
    /// The host that it is leaving for, or has left for.
    pub leaving_for: Option<H>,
}

/// A host that has no part in a standby has said something about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stranger;

impl<H: Copy + Eq> Whereabouts<H> {
    /// The group is at this host.
    pub fn at(at: H) -> Self {
        Self { at, leaving_for: None }
    }

    /// A host says that the group is about to leave it. Errors: [`Stranger`].
    pub fn leaves(&mut self, speaker: H, to: H) -> Result<(), Stranger> {
        if speaker != self.at {
            return Err(Stranger);
        }
        self.leaving_for = (to != speaker).then_some(to);
        Ok(())
    }

    /// A host says that the group has not left it after all. Errors: [`Stranger`].
    pub fn stays(&mut self, speaker: H) -> Result<(), Stranger> {
        self.leaves(speaker, speaker)
    }

    /// A host says that it has the group now. Errors: [`Stranger`]: the host before has not named it.
    pub fn arrived(&mut self, speaker: H) -> Result<(), Stranger> {
        if speaker == self.at && self.leaving_for.is_none() {
            return Ok(());
        }
        if self.leaving_for != Some(speaker) && !broken(Bug::AnybodyArrives) {
            return Err(Stranger);
        }
        *self = Self::at(speaker);
        Ok(())
    }

    /// Returns whether a host may have the group. Such a host gets an answer when it asks whether the standby was promoted.
    pub fn may_be_at(&self, host: H) -> bool {
        self.hosts().any(|known| known == host)
    }

    /// Returns the hosts that may have the group. An administrator has to know of all of them that they are off before the standby is
    /// promoted: one that cannot be reached is not off.
    pub fn hosts(&self) -> impl Iterator<Item = H> + use<H> {
        std::iter::once(self.at).chain(self.leaving_for.filter(|_| !broken(Bug::DepartureForgotten)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_that_has_the_group_names_the_next_one() {
        let mut of = Whereabouts::at('a');
        assert_eq!(of.leaves('c', 'c'), Err(Stranger));
        assert_eq!(of.arrived('c'), Err(Stranger));
        assert_eq!(of.leaves('a', 'c'), Ok(()));
        assert!(of.may_be_at('a') && of.may_be_at('c') && !of.may_be_at('d'));
        assert_eq!(of.arrived('d'), Err(Stranger));
        assert_eq!(of.arrived('c'), Ok(()));
        assert_eq!(of, Whereabouts::at('c'));
        // The former host is a stranger now.
        assert_eq!((of.stays('a'), of.leaves('a', 'd')), (Err(Stranger), Err(Stranger)));
        // It is repeated if its answer was lost.
        assert_eq!(of.arrived('c'), Ok(()));
    }

    #[test]
    fn a_group_that_stays_is_where_it_was() {
        let mut of = Whereabouts::at('a');
        of.leaves('a', 'c').unwrap();
        assert_eq!(of.hosts().collect::<Vec<_>>(), ['a', 'c']);
        of.stays('a').unwrap();
        assert_eq!((of, of.arrived('c')), (Whereabouts::at('a'), Err(Stranger)));
        of.leaves('a', 'd').unwrap();
        of.leaves('a', 'e').unwrap();
        assert_eq!(of.hosts().collect::<Vec<_>>(), ['a', 'e']);
        // A host that the group has come back to before another one had it.
        assert_eq!(of.arrived('a'), Err(Stranger));
    }
}
