//! The share of each other host in this one: arriving migrations, their volumes and bytes, and the rate of offers.
//!
//! ```text
//!   offered ──► a part of the host's share is taken, at the moment of the check ──► arrives ──► over ─┐
//!                 └─ too little is left: refused, with the limit that is used up                      │
//!               ◄───────────────────────────── given back, whatever the outcome ◄─────────────────────┘
//! ```
//! A share belongs to a key, not to a name: a host that is removed and paired again has the same share. Volumes that have
//! arrived count towards their host's share until they are removed or leave.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use chronicle::StayId;

use crate::identity::HostId;
use crate::journal::{Side, State};
use crate::planted::{Bug, broken};

/// The limits of one host's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// The most arriving migrations at a time.
    pub migrations: u32,
    /// The most volumes: of arriving migrations, and arrived ones that are still here.
    pub volumes: u32,
    /// The most bytes of arriving volumes; `None`: the room in the stores.
    pub bytes: Option<u64>,
    /// The most offers in a burst.
    pub offers: u32,
    /// The time after which one more offer is permitted.
    pub offer_interval: Duration,
}

/// The amount that an offer takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// The number of volumes.
    pub volumes: u32,
    /// The bytes of all volumes together.
    pub bytes: u64,
}

/// The limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsedUp {
    /// The limit of arriving migrations.
    Migrations(u32),
    /// The limit of the host's volumes.
    Volumes(u32),
    /// The limit of arriving bytes.
    Bytes(u64),
    /// The limit of offers; another one is permitted after this time.
    Offers(Duration),
}

/// A part of a host's share, by its number, until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part(u64);

/// The shares of all hosts.
#[derive(Debug)]
pub struct Shares {
    limits: ShareLimits,
    parts: BTreeMap<Part, Taken>,
    next: u64,
    /// When the burst of each host with recent offers will be replenished.
    offers: BTreeMap<HostId, Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    peer: HostId,
    amount: Amount,
    at: Duration,
}

impl fmt::Display for UsedUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Migrations(limit) => write!(
                f,
                "{limit} migrations from this host are under way here, and limits.peer_migrations allows no more"
            ),
            Self::Volumes(limit) => write!(
                f,
                "this host would have more volumes here than limits.peer_volumes allows: {limit}, counting arriving and arrived \
                 ones"
            ),
            Self::Bytes(limit) => write!(
                f,
                "the volumes arriving from this host would have more bytes than limits.peer_space_bytes allows: {limit}"
            ),
            Self::Offers(wait) => write!(
                f,
                "this host offers migrations too often; the next one may come in {} s",
                wait.as_secs().max(1)
            ),
        }
    }
}

impl Shares {
    /// Returns shares of which nothing is taken.
    pub fn new(limits: ShareLimits) -> Self {
        Self { limits, parts: BTreeMap::new(), next: 0, offers: BTreeMap::new() }
    }

    /// Changes the limits. Parts beyond them stay.
    pub fn set_limits(&mut self, limits: ShareLimits) {
        self.limits = limits;
    }

    /// Takes a part of a host's share for its offer; `here` counts its arrived volumes that are still here.
    ///
    /// **N.B.** There is no query without taking: free room is taken in the same step.
    ///
    /// # Errors
    /// [`UsedUp`]: nothing is taken.
    pub fn take(&mut self, now: Duration, peer: HostId, amount: Amount, here: u32) -> Result<Part, UsedUp> {
        self.may_offer(now, peer)?;
        self.fits(now, peer, amount, here)?;
        Ok(self.put(now, peer, amount))
    }

    /// Takes a part for a migration under way that a restart resumes, regardless of the limits.
    pub fn resume(&mut self, peer: HostId, amount: Amount) -> Part {
        self.put(Duration::ZERO, peer, amount)
    }

    /// Gives a part of a share back.
    pub fn give_back(&mut self, part: Part) {
        if !broken(Bug::ShareNotGivenBack) {
            self.parts.remove(&part);
        }
    }

    /// Returns the number of a host's arriving migrations, and the amount that they take.
    pub fn used_by(&self, peer: HostId) -> (u32, Amount) {
        sum(self.parts.values().filter(|taken| taken.peer == peer))
    }

    fn put(&mut self, at: Duration, peer: HostId, amount: Amount) -> Part {
        let part = Part(self.next);
        self.next += 1;
        self.parts.insert(part, Taken { peer, amount, at });
        part
    }

    fn fits(&self, now: Duration, peer: HostId, amount: Amount, here: u32) -> Result<(), UsedUp> {
        // The planted bug ignores parts taken at the same instant.
        let counts = |taken: &&Taken| taken.peer == peer && (!broken(Bug::ShareTakenLate) || taken.at < now);
        let (migrations, used) = sum(self.parts.values().filter(counts));
        let limits = &self.limits;
        if migrations >= limits.migrations {
            return Err(UsedUp::Migrations(limits.migrations));
        }
        if used.volumes.saturating_add(here).saturating_add(amount.volumes) > limits.volumes {
            return Err(UsedUp::Volumes(limits.volumes));
        }
        match limits.bytes {
            Some(limit) if used.bytes.saturating_add(amount.bytes) > limit => Err(UsedUp::Bytes(limit)),
            _ => Ok(()),
        }
    }

    fn may_offer(&mut self, now: Duration, peer: HostId) -> Result<(), UsedUp> {
        self.offers.retain(|_, paid_at| *paid_at > now);
        let interval = self.limits.offer_interval;
        let paid_at = self.offers.get(&peer).copied().unwrap_or(now) + interval;
        let ahead = paid_at.saturating_sub(now);
        let burst = interval * self.limits.offers;
        if ahead > burst {
            return Err(UsedUp::Offers(ahead - burst));
        }
        self.offers.insert(peer, paid_at);
        Ok(())
    }
}

fn sum<'a>(parts: impl Iterator<Item = &'a Taken>) -> (u32, Amount) {
    parts.fold((0, Amount::default()), |(count, sum), Taken { amount, .. }| {
        let volumes = sum.volumes.saturating_add(amount.volumes);
        (count + 1, Amount { volumes, bytes: sum.bytes.saturating_add(amount.bytes) })
    })
}

/// Returns the number of volumes here that a host has brought.
pub fn brought(state: &State, peer: HostId) -> u32 {
    let is_of = |stay: StayId| match stay {
        StayId::Arrived(migration) => {
            let arrival = state.migrations.get(&crate::identity::MigrationId(migration));
            arrival
                .is_some_and(|known| matches!(known.side, Side::Incoming { peer: from, .. } if from == peer))
        }
        _ => false,
    };
    let count = state.volumes.values().filter(|known| is_of(known.stay)).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ShareLimits = ShareLimits {
        migrations: 3,
        volumes: 8,
        bytes: Some(1000),
        offers: 5,
        offer_interval: Duration::from_secs(1),
    };
    const A: HostId = HostId([1; 32]);
    const B: HostId = HostId([2; 32]);
    const SMALL: Amount = Amount { volumes: 1, bytes: 10 };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn each_host_has_its_own_share_and_what_ends_gives_its_part_back() {
        let mut shares = Shares::new(LIMITS);
        let parts: Vec<_> = (0..3).map(|_| shares.take(at(0), A, SMALL, 0).unwrap()).collect();
        assert_eq!(shares.take(at(0), A, SMALL, 0), Err(UsedUp::Migrations(3)));
        assert!(shares.take(at(0), B, SMALL, 0).is_ok());
        shares.give_back(parts[1]);
        shares.give_back(parts[1]);
        assert_eq!(shares.used_by(A), (2, Amount { volumes: 2, bytes: 20 }));
        assert!(shares.take(at(0), A, SMALL, 0).is_ok());
    }

    #[test]
    fn volumes_that_are_here_and_bytes_that_are_promised_count() {
        let mut shares = Shares::new(LIMITS);
        let many = Amount { volumes: 6, bytes: 600 };
        assert_eq!(shares.take(at(0), A, many, 3), Err(UsedUp::Volumes(8)));
        shares.take(at(0), A, many, 2).unwrap();
        assert_eq!(shares.take(at(0), A, Amount { volumes: 1, bytes: 401 }, 0), Err(UsedUp::Bytes(1000)));
        assert_eq!(
            shares.take(at(0), A, Amount { volumes: u32::MAX, bytes: u64::MAX }, u32::MAX),
            Err(UsedUp::Volumes(8))
        );
    }

    #[test]
    fn offers_in_a_loop_are_slowed_down_whatever_becomes_of_them() {
        let mut shares = Shares::new(LIMITS);
        let mut taken = 0;
        for _ in 0..1000 {
            if let Ok(part) = shares.take(at(0), A, SMALL, 0) {
                shares.give_back(part);
                taken += 1;
            }
        }
        assert_eq!(taken, 5);
        assert_eq!(shares.take(at(0), A, SMALL, 0), Err(UsedUp::Offers(at(1))));
        assert!(shares.take(at(0), B, SMALL, 0).is_ok());
        assert!(shares.take(at(1), A, SMALL, 0).is_ok());
        shares.take(at(1000), B, SMALL, 0).unwrap();
        assert_eq!(shares.offers.len(), 1, "of who offers nothing any more nothing is kept");
    }

    #[test]
    fn what_a_restart_goes_on_with_counts_and_is_never_refused() {
        let mut shares = Shares::new(LIMITS);
        for _ in 0..5 {
            shares.resume(A, SMALL);
        }
        assert_eq!(shares.take(at(0), A, SMALL, 0), Err(UsedUp::Migrations(3)));
    }
}
