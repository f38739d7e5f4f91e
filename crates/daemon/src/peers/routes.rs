//! Routes between lanes and the sessions with other hosts: which lane receives a channel's messages, and
//! over which session it sends.
//!
//! ```text
//!   lane ──Channel──► SessionChannel ──┐ the present session         Peers ──tell──► route ──► lane
//!                                └──► session ══► other host
//!   paired again ──► another session ──► lead_over: all channels of that host use it, and receive "restarted"
//! ```
//! The session of a removed host carries nothing and reports no error. The results of requests on its channels are as unknown
//! as after a restart of the other host, and handled in the same way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_channel::mpsc;
use lane::peer::{Channel, ChannelEvent, PriorityBoost, RequestPriority};
use migration::{HostId, MigrationId, VolumeIndex};
use transport::{ChannelId, Priority, Session};

use super::channel::{Kind, Subject};
use super::{host_id, lock, send};
use crate::vms::moving;

/// Lanes by the channels that lead to them.
#[derive(Default)]
pub(super) struct Routes {
    by_key: Mutex<BTreeMap<RouteKey, Route>>,
}

type RouteKey = (HostId, ChannelId);

/// One lane's end of a channel.
struct Route {
    arrivals: mpsc::UnboundedSender<ChannelEvent>,
    /// The session over which its channel sends.
    session: Arc<Mutex<Session>>,
}

/// Tells whether a host's channels used an earlier session before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Former {
    /// All channels used the present session already, or there are no channels.
    Same,
    /// A channel used a session that has been closed since.
    Closed,
}

impl Routes {
    /// Opens a channel: returns its sending end and its receiving end.
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

    /// Returns the lane that receives a channel's messages.
    pub(super) fn get(
        &self,
        peer: HostId,
        channel: ChannelId,
    ) -> Option<mpsc::UnboundedSender<ChannelEvent>> {
        lock(&self.by_key).get(&(peer, channel)).map(|route| route.arrivals.clone())
    }

    pub(super) fn close(&self, peer: HostId, channel: ChannelId) {
        lock(&self.by_key).remove(&(peer, channel));
    }

    /// Notifies all lanes that have a channel to a host.
    pub(super) fn tell(&self, peer: HostId, news: impl Fn() -> ChannelEvent) {
        for (_, route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            // A lane that has just ended receives nothing.
            let _ = route.arrivals.unbounded_send(news());
        }
    }

    /// Tells the channels that exist only for clients of a removed host that it knows nothing of them.
    pub(super) fn forget_clients(&self, peer: HostId, own: HostId) {
        for ((_, channel), route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            let subject = Subject::of(*channel, own, peer);
            if subject.is_some_and(|subject| subject.kind == Kind::Forwarding) {
                let _ = route.arrivals.unbounded_send(ChannelEvent::PeerRestarted);
            }
        }
    }

    /// Switches all channels of a host to this session, which has a connection. Channels of another session learn that
    /// their requests may be lost.
    pub(super) fn lead_over(&self, session: &Session) -> Former {
        let (peer, mut former) = (host_id(session.peer()), Former::Same);
        for (_, route) in lock(&self.by_key).iter().filter(|((host, _), _)| *host == peer) {
            let mut spoken_over = lock(&route.session);
            if *spoken_over == *session {
                continue;
            }
            // N.B. first: repeated requests use the new session.
            *spoken_over = session.clone();
            former = Former::Closed;
            let _ = route.arrivals.unbounded_send(ChannelEvent::PeerRestarted);
        }
        former
    }
}

/// The sending end of a channel of the session with a host.
pub(super) struct SessionChannel {
    session: Arc<Mutex<Session>>,
    key: RouteKey,
    routes: Arc<Routes>,
    /// The receiving end, to identify the route by.
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
}

impl moving::channel::Send for SessionChannel {
    fn send(&self, priority: Priority, head: Bytes, payload: Bytes) {
        match transport::Message::new(self.channel(), priority, head, payload) {
            // Pieces of a stream must arrive in order.
            Ok(message) => self.session().send(message.ordered()),
            Err(error) => tracing::error!(%error, "dropped a part of a VM's memory"),
        }
    }
}

/// The channels about one VM.
pub(super) struct SessionStreams {
    pub(super) session: Session,
    pub(super) routes: Arc<Routes>,
    /// The host where its migration began.
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
        // A later channel with the same subject has replaced it.
        if routes.get(&self.key).is_some_and(|route| route.arrivals.same_receiver(&self.arrivals)) {
            routes.remove(&self.key);
        }
    }
}
