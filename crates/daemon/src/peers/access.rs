//! Checks by the journal whether another host may send a request, before anything else is done for it, and counts refusals.
//! [`authority::judge`] decides. The decision is cached until the journal changes, because a forwarded client sends the same
//! kind of request many thousand times a second.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use migration::authority::{self, Denied, Request, Role};
use migration::{HostId, MigrationId};
use transport::ChannelId;

use super::channel::{Kind, Subject};
use super::{Peers, lock};
use crate::journal::Journal;

/// The number of cached decisions: channels that are in use at a time.
const REMEMBERED_MAX: usize = 4096;

/// Cached decisions, and refusals.
#[derive(Default)]
pub(super) struct Access {
    /// By host, channel, and whether the request is a change, because clients' reads and changes alternate.
    allowed: Mutex<BTreeMap<(HostId, ChannelId, bool), Allowed>>,
    refused: Mutex<BTreeMap<HostId, Refused>>,
    /// When data was last stored for a host's arrival, by the migration's number there.
    progress: Mutex<BTreeMap<(HostId, MigrationId), Instant>>,
}

/// A request that was allowed at a given state of the journal.
struct Allowed {
    request: Request,
    version: u64,
}

#[derive(Default)]
struct Refused {
    count: u64,
    /// Each kind is logged once, whatever a host sends.
    said: BTreeSet<(u64, Denied)>,
}

impl Peers {
    /// Returns how many requests of another host were refused since this daemon began.
    pub(crate) fn refused_to(&self, peer: HostId) -> u64 {
        self.access.refused_to(peer)
    }

    /// Returns for how long nothing has been stored for an arrival of another host; `None`: nothing was since this daemon began.
    pub(crate) fn idle_for(&self, peer: HostId, migration: MigrationId) -> Option<Duration> {
        self.access.idle_for(peer, migration)
    }
}

impl Access {
    /// Decides whether `peer` may send a request on a channel.
    pub(super) fn judge(
        &self,
        journal: &Journal,
        peer: HostId,
        channel: ChannelId,
        subject: Subject,
        request: Request,
    ) -> Result<(), Denied> {
        let is_change = matches!(request, Request::Change(_));
        let (version, key) = (journal.version(), (peer, channel, is_change));
        let is_allowed = |allowed: &Allowed| allowed.version == version && allowed.request == request;
        if lock(&self.allowed).get(&key).is_some_and(is_allowed) {
            return Ok(());
        }
        let judged = journal.read(|state| authority::judge(state, peer, subject.role_of(peer), request));
        let mut allowed = lock(&self.allowed);
        match judged {
            Ok(()) => {
                if allowed.len() >= REMEMBERED_MAX {
                    allowed.clear();
                }
                allowed.insert(key, Allowed { request, version });
            }
            Err(_) => drop(allowed.remove(&key)),
        }
        drop(allowed);
        judged
    }

    /// Notes that data was stored for an arrival.
    pub(super) fn goes_on(&self, peer: HostId, migration: MigrationId) {
        let mut progress = lock(&self.progress);
        if progress.len() >= REMEMBERED_MAX {
            progress.clear();
        }
        progress.insert((peer, migration), Instant::now());
    }

    pub(super) fn idle_for(&self, peer: HostId, migration: MigrationId) -> Option<Duration> {
        lock(&self.progress).get(&(peer, migration)).map(Instant::elapsed)
    }

    /// Counts a refusal, and logs the first of its kind.
    pub(super) fn refused(&self, peer: HostId, channel: ChannelId, denied: Denied) {
        let mut refused = lock(&self.refused);
        let refused = refused.entry(peer).or_default();
        refused.count += 1;
        if refused.said.insert((channel.0 & super::channel::KIND_MASK, denied)) {
            tracing::warn!(%peer, channel = channel.0, reason = %denied, "refused a request of a host that had no right to it; \
                further ones are only counted");
        }
    }

    pub(super) fn refused_to(&self, peer: HostId) -> u64 {
        lock(&self.refused).get(&peer).map_or(0, |refused| refused.count)
    }
}

impl Subject {
    /// Returns the role that the peer claims by using the channel of this subject.
    fn role_of(self, peer: HostId) -> Role {
        let Self { kind, source, migration, volume } = self;
        match (kind, source == peer) {
            (Kind::Migration | Kind::Vm, true) => Role::Source { migration, volume },
            (Kind::Migration | Kind::Vm, false) => Role::Target { migration },
            // The source only answers on this channel.
            (Kind::Reservoir, true) => Role::Source { migration, volume },
            (Kind::Reservoir, false) => Role::Filler { migration, volume },
            (Kind::Forwarding, true) => Role::FormerOwner { migration },
            (Kind::Forwarding, false) => Role::NewOwner { migration },
            // The journal knows no standby: `Standbys` decides.
            (Kind::Standby, _) => Role::Target { migration },
        }
    }
}
