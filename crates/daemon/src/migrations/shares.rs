//! The shares of other hosts, for this host's tasks: a part of a share is released when it is dropped. [`migration::shares`]
//! decides what a host may use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use migration::HostId;
use migration::shares::{self, Amount, ShareLimits, UsedUp};

#[derive(Debug)]
pub(crate) struct Shares {
    began: Instant,
    shares: Mutex<shares::Shares>,
}

/// A part of a host's share, until it is dropped.
#[derive(Debug)]
pub(crate) struct Part {
    shares: Arc<Shares>,
    part: shares::Part,
}

impl Shares {
    pub(crate) fn new(limits: ShareLimits) -> Self {
        Self { began: Instant::now(), shares: Mutex::new(shares::Shares::new(limits)) }
    }

    pub(crate) fn set_limits(&self, limits: ShareLimits) {
        self.lock().set_limits(limits);
    }

    /// Takes a part for an offer, or fails with [`UsedUp`]. `here` is the number of volumes that are here from that host.
    pub(crate) fn take(self: &Arc<Self>, peer: HostId, amount: Amount, here: u32) -> Result<Part, UsedUp> {
        let part = self.lock().take(self.began.elapsed(), peer, amount, here)?;
        Ok(Part { shares: Arc::clone(self), part })
    }

    /// Takes a part for a migration that a restart resumes.
    pub(crate) fn resume(self: &Arc<Self>, peer: HostId, amount: Amount) -> Part {
        let part = self.lock().resume(peer, amount);
        Part { shares: Arc::clone(self), part }
    }

    /// Returns how many migrations of a host run here, and what they use.
    pub(crate) fn used_by(&self, peer: HostId) -> (u32, Amount) {
        self.lock().used_by(peer)
    }

    fn lock(&self) -> MutexGuard<'_, shares::Shares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.shares.lock().give_back(self.part);
    }
}
