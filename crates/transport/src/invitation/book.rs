//! The invitations that a host has made: which are valid, which are over, who has redeemed them. They are kept in memory only: an
//! invitation lives for minutes, and none outlives a restart.
//!
//! ```text
//!   open ──redeem──► of one host ──end_of──► over
//!     └────────── its time ─────────────────►┘
//! ```
//! A host may redeem its invitation again until it is removed, for the answer may have been lost.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use crate::context::random;
use crate::host_id::HostId;

const INVITATIONS_MAX: usize = 1000;

/// Time for which an invitation is remembered after it expires, so that it can be reported as expired or used.
const REMEMBERED: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Default)]
pub(crate) struct Book {
    invitations: HashMap<[u8; 16], Invitation>,
}

struct Invitation {
    secret: [u8; 32],
    expires: SystemTime,
    redeemed_by: Option<HostId>,
    /// The host that redeemed it has been removed since.
    is_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Good { secret: [u8; 32] },
    Unknown,
    Expired,
    Used,
}

impl Book {
    /// Makes an invitation, and returns its name and secret. Returns `None` if there are too many.
    pub(crate) fn add(&mut self, now: SystemTime, expires: SystemTime) -> Option<([u8; 16], [u8; 32])> {
        self.invitations.retain(|_, invitation| invitation.expires + REMEMBERED > now);
        if self.invitations.len() >= INVITATIONS_MAX {
            return None;
        }
        let (name, secret) = (random(), random());
        self.invitations.insert(name, Invitation { secret, expires, redeemed_by: None, is_over: false });
        Some((name, secret))
    }

    pub(crate) fn judge(&self, name: &[u8; 16], by: HostId, now: SystemTime) -> Judgement {
        match self.invitations.get(name) {
            None => Judgement::Unknown,
            Some(Invitation { redeemed_by: Some(other), is_over, .. }) if *other != by || *is_over => {
                Judgement::Used
            }
            Some(Invitation { expires, .. }) if *expires < now => Judgement::Expired,
            Some(Invitation { secret, .. }) => Judgement::Good { secret: *secret },
        }
    }

    /// Notes who has redeemed an invitation; the first host stays.
    pub(crate) fn redeemed(&mut self, name: &[u8; 16], by: HostId) {
        if let Some(invitation) = self.invitations.get_mut(name) {
            invitation.redeemed_by.get_or_insert(by);
        }
    }

    /// Ends the invitations that a removed host has redeemed.
    pub(crate) fn end_of(&mut self, host: HostId) {
        let redeemed =
            self.invitations.values_mut().filter(|invitation| invitation.redeemed_by == Some(host));
        redeemed.for_each(|invitation| invitation.is_over = true);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::{Book, Judgement};
    use crate::host_id::HostId;

    #[test]
    fn an_invitation_is_for_one_host_and_for_a_time() {
        let [one, other] = [HostId([1; 32]), HostId([2; 32])];
        let now = SystemTime::now();
        let late = now + Duration::from_secs(61);
        let mut book = Book::default();
        let (name, secret) = book.add(now, now + Duration::from_secs(60)).unwrap();
        assert_eq!(book.judge(&[0; 16], one, now), Judgement::Unknown);
        assert_eq!(book.judge(&name, one, now), Judgement::Good { secret });
        assert_eq!(book.judge(&name, one, late), Judgement::Expired);
        book.redeemed(&name, one);
        assert_eq!(book.judge(&name, one, now), Judgement::Good { secret });
        assert_eq!(book.judge(&name, other, now), Judgement::Used);
        assert_eq!(book.judge(&name, other, late), Judgement::Used);
        book.end_of(other);
        assert_eq!(book.judge(&name, one, now), Judgement::Good { secret });
        book.end_of(one);
        assert_eq!(book.judge(&name, one, now), Judgement::Used);
    }

    #[test]
    fn old_invitations_are_forgotten_and_open_ones_limited() {
        let now = SystemTime::now();
        let mut book = Book::default();
        while book.add(now, now).is_some() {}
        assert_eq!(book.invitations.len(), super::INVITATIONS_MAX);
        assert!(book.add(now + super::REMEMBERED, now).is_some());
    }
}
