//! Who may ask for what: each request of another host is judged by the journal before anything else is done about it, and
//! what is refused is counted.
//!
//! The judgement itself is [`authority::judge`]'s. It is remembered until the journal changes, for a forwarded client asks
//! for the same thing many thousand times a second.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use migration::authority::{self, Denied, Request, Role};
use migration::{HostId, MigrationId};
use transport::ChannelId;

use super::channel::{Kind, Subject};
use super::{Peers, lock};
use crate::journal::Journal;

/// Judgements that are remembered: channels that are in use at a time.
const REMEMBERED_MAX: usize = 4096;

/// What has been judged, and what refused.
#[derive(Default)]
pub(super) struct Access {
    allowed: Mutex<BTreeMap<(HostId, ChannelId), Allowed>>,
    refused: Mutex<BTreeMap<HostId, Refused>>,
    /// When something was stored last for an arrival of a host, by its number there.
    progress: Mutex<BTreeMap<(HostId, MigrationId), Instant>>,
}

/// A request that was allowed when the journal was as it was.
struct Allowed {
    request: Request,
    version: u64,
}

/// What one host asked for and was not given.
#[derive(Default)]
struct Refused {
    count: u64,
    /// Each kind is said once in the log, whatever a host sends.
    said: BTreeSet<(u64, Denied)>,
}

impl Peers {
    /// How many requests of another host were refused since this daemon began.
    pub(crate) fn refused_to(&self, peer: HostId) -> u64 {
        self.access.refused_to(peer)
    }

    /// How long nothing has been stored for an arrival of another host; `None`: nothing was since this daemon began.
    pub(crate) fn idle_for(&self, peer: HostId, migration: MigrationId) -> Option<Duration> {
        self.access.idle_for(peer, migration)
    }
}

impl Access {
    /// Judges what `peer` asks for on a channel.
    pub(super) fn judge(
        &self,
        journal: &Journal,
        peer: HostId,
        channel: ChannelId,
        subject: Subject,
        request: Request,
    ) -> Result<(), Denied> {
        let (version, key) = (journal.version(), (peer, channel));
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

    /// Notes that an arrival goes on: its source has something stored.
    pub(super) fn goes_on(&self, peer: HostId, migration: MigrationId) {
        let mut progress = lock(&self.progress);
        if progress.len() >= REMEMBERED_MAX {
            progress.clear();
        }
        progress.insert((peer, migration), Instant::now());
    }

    /// How long nothing has been stored for an arrival; `None`: nothing was since this daemon began.
    pub(super) fn idle_for(&self, peer: HostId, migration: MigrationId) -> Option<Duration> {
        lock(&self.progress).get(&(peer, migration)).map(Instant::elapsed)
    }

    /// Counts something that a host was refused, and says so the first time.
    pub(super) fn refused(&self, peer: HostId, channel: ChannelId, denied: Denied) {
        let mut refused = lock(&self.refused);
        let refused = refused.entry(peer).or_default();
        refused.count += 1;
        if refused.said.insert((channel.0 & super::channel::KIND_MASK, denied)) {
            tracing::warn!(%peer, channel = channel.0, reason = %denied, "a host asked for what it may not have; it is counted from now on");
        }
    }

    /// How much a host has been refused since this daemon began.
    pub(super) fn refused_to(&self, peer: HostId) -> u64 {
        lock(&self.refused).get(&peer).map_or(0, |refused| refused.count)
    }
}

impl Subject {
    /// What the peer claims to be by using the channel of this subject.
    fn role_of(self, peer: HostId) -> Role {
        let Self { kind, source, migration, volume } = self;
        match (kind, source == peer) {
            (Kind::Migration | Kind::Vm, true) => Role::Source { migration, volume },
            (Kind::Migration | Kind::Vm, false) => Role::Target { migration },
            // Its source asks for nothing there: it answers.
            (Kind::Reservoir, true) => Role::Source { migration, volume },
            (Kind::Reservoir, false) => Role::Filler { migration, volume },
            (Kind::Forwarding, true) => Role::FormerOwner { migration },
            (Kind::Forwarding, false) => Role::NewOwner { migration },
        }
    }
}
