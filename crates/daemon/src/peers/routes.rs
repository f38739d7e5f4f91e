//! Ways between lanes and the sessions with other hosts: which lane hears what comes on a channel, and over which session
//! it speaks there.
//!
//! ```text
//!   lane ──Channel──► SessionChannel ──┐ the session of now           Peers ──tell──► route ──► lane
//!                                └──► session ══► other host
//!   paired again ──► another session ──► lead_over: every line of that host speaks over it, and is told "restarted"
//! ```
//! A session that was closed, because its host was removed, carries nothing any more, and says so to nobody. What its lines
//! had asked for is as unknown as after a restart of the other host, and is dealt with in the same way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_channel::mpsc;
use lane::peer::{Capabilities, Channel, ChannelEvent, PriorityBoost, RequestPriority};
use migration::{HostId, MigrationId, VolumeIndex};
use transport::{ChannelId, Priority, Session};

use super::channel::{Kind, Subject};
use super::{host_id, lock, send};
use crate::vms::moving;

/// The version of the protocol from which on hosts know the fences of volumes.
const FENCES_SINCE: u16 = 2;
/// The version from which on owners take any range of bytes of a volume.
const PARTS_SINCE: u16 = 3;
/// The first version that takes what copies at other hosts lack.
const COPIES_SINCE: u16 = 6;

/// The first version that tells hosts which lead clients on how large a volume is.
const SIZES_SINCE: u16 = 8;

/// Lanes by the channels that lead to them.
#[derive(Default)]
pub(super) struct Routes {
    by_key: Mutex<BTreeMap<RouteKey, Route>>,
}

type RouteKey = (HostId, ChannelId);

/// One lane's end of a channel.
struct Route {
    arrivals: mpsc::UnboundedSender<ChannelEvent>,
    /// What its line speaks over.
    session: Arc<Mutex<Session>>,
}

/// What the lines of a host spoke over before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Former {
    /// The same session, or there are no lines.
    Same,
    /// At least one of them over a session that has been closed since.
    Closed,
}

impl Routes {
    /// The sending end of a channel, and what comes over it from now on.
    pub(super) fn open(
        self: &Arc<Self>,
        session: &Session,
        channel: ChannelId,
    ) -> (SessionChannel, mpsc::UnboundedReceiver<ChannelEvent>) {
        let (sender, arrivals) = mpsc::unbounded();
        let key = (host_id(session.peer()), channel);
        let session = Arc::new(Mutex::new(session.clone()));
        let route = Route { arrivals: sender.clone(), session: Arc::clone(&session) };
        lock(&self.by_key).insert(key, route);
        (SessionChannel { session, key, routes: Arc::clone(self), arrivals: sender }, arrivals)
    }

    /// The lane that hears what comes on a channel.
    pub(super) fn get(
        &self,
        peer: HostId,
        channel: ChannelId,
    ) -> Option<mpsc::UnboundedSender<ChannelEvent>> {
        lock(&self.by_key).get(&(peer, channel)).map(|route| route.arrivals.clone())
    }

    /// Nobody hears any more what comes on a channel.
    pub(super) fn close(&self, peer: HostId, channel: ChannelId) {
        lock(&self.by_key).remove(&(peer, channel));
    }

    /// Tells all lanes that have to do with a host.
    pub(super) fn tell(&self, peer: HostId, news: impl Fn() -> ChannelEvent) {
        for (_, route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            // A lane that has just ended hears nothing.
            let _ = route.arrivals.unbounded_send(news());
        }
    }

    /// A host is not known any more: those that have to do with it only because of clients know nothing of it either.
    pub(super) fn forget_clients(&self, peer: HostId, own: HostId) {
        for ((_, channel), route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            let subject = Subject::of(*channel, own, peer);
            if subject.is_some_and(|subject| subject.kind == Kind::Forwarding) {
                let _ = route.arrivals.unbounded_send(ChannelEvent::PeerRestarted);
            }
        }
    }

    /// There is a connection in this session: all lines of its host speak over it from now on. Those that spoke over another
    /// one are told that what they sent may be lost.
    pub(super) fn lead_over(&self, session: &Session) -> Former {
        let (peer, mut former) = (host_id(session.peer()), Former::Same);
        for (_, route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            let mut spoken_over = lock(&route.session);
            if *spoken_over == *session {
                continue;
            }
            // N.B. first: what is asked again goes over the new one.
            *spoken_over = session.clone();
            former = Former::Closed;
            let _ = route.arrivals.unbounded_send(ChannelEvent::PeerRestarted);
        }
        former
    }
}

/// The sending end of a line: one channel of the session with a host.
pub(super) struct SessionChannel {
    session: Arc<Mutex<Session>>,
    key: RouteKey,
    routes: Arc<Routes>,
    /// The way back, to know it by.
    arrivals: mpsc::UnboundedSender<ChannelEvent>,
}

impl SessionChannel {
    fn session(&self) -> Session {
        lock(&self.session).clone()
    }

    fn channel(&self) -> ChannelId {
        self.key.1
    }
}

impl Channel for SessionChannel {
    fn send(&self, priority: RequestPriority, head: Bytes, payload: Bytes) {
        let priority = match priority {
            RequestPriority::Control => Priority::Control,
            RequestPriority::Awaited => Priority::Pulled,
            RequestPriority::Mirrored => Priority::Asynchronous,
            RequestPriority::Bulk => Priority::Bulk,
        };
        send(&self.session(), self.channel(), priority, head, payload);
    }

    fn set_boost(&self, boost: PriorityBoost) {
        self.session().set_boost(
            self.channel(),
            match boost {
                PriorityBoost::Off => transport::PriorityBoost::Off,
                PriorityBoost::AboveMemory => transport::PriorityBoost::AboveMemory,
            },
        );
    }

    fn capabilities(&self) -> Capabilities {
        match self.session().version() {
            None => Capabilities::Unknown,
            Some(version) if version < FENCES_SINCE => Capabilities::Calls,
            Some(version) if version < PARTS_SINCE => Capabilities::FencingTokens,
            Some(version) if version < COPIES_SINCE => Capabilities::Parts,
            Some(version) if version < SIZES_SINCE => Capabilities::Copies,
            Some(_) => Capabilities::Sizes,
        }
    }
}

impl moving::channel::Send for SessionChannel {
    fn send(&self, priority: Priority, head: Bytes, payload: Bytes) {
        match transport::Message::new(self.channel(), priority, head, payload) {
            // A stream is one thing after the other.
            Ok(message) => self.session().send(message.ordered()),
            Err(error) => tracing::error!(%error, "a piece of a VM's memory is left out"),
        }
    }
}

/// The channels that are about one VM.
pub(super) struct SessionStreams {
    pub(super) session: Session,
    pub(super) routes: Arc<Routes>,
    /// Where its migration began.
    pub(super) source: HostId,
    pub(super) target: HostId,
    pub(super) migration: MigrationId,
}

impl moving::channel::VmStreams for SessionStreams {
    fn open(&self, stream: u8) -> (Arc<dyn moving::channel::Send>, mpsc::UnboundedReceiver<ChannelEvent>) {
        let (source, migration, volume) = (self.source, self.migration, VolumeIndex(u32::from(stream)));
        let channel = Subject { kind: Kind::Vm, source, migration, volume }.channel(self.target);
        let (line, arrivals) = self.routes.open(&self.session, channel);
        (Arc::new(line), arrivals)
    }
}

impl Drop for SessionChannel {
    fn drop(&mut self) {
        let mut routes = lock(&self.routes.by_key);
        // A later line about the same has taken its place.
        if routes.get(&self.key).is_some_and(|route| route.arrivals.same_receiver(&self.arrivals)) {
            routes.remove(&self.key);
        }
    }
}
