//! What hosts say to each other: the receiver of all sessions.
//!
//! Nothing is said yet: hosts are paired and connected, and whatever a newer host sends is dropped, which returns its
//! credit.

use transport::{Delivery, HostId, Incarnation, Receiver, Session};

/// Takes what arrives from other hosts.
pub(crate) struct PeerMessages;

impl Receiver for PeerMessages {
    fn connected(&self, session: &Session, _incarnation: Incarnation) {
        tracing::info!(peer = %session.peer().short(), "another host is connected");
    }

    fn delivered(&self, session: &Session, delivery: Delivery) {
        let channel = delivery.message.channel().0;
        tracing::debug!(peer = %session.peer().short(), channel, "a message for nobody is dropped");
    }

    fn disconnected(&self, peer: HostId, reason: &str) {
        tracing::info!(peer = %peer.short(), reason, "another host is not connected any more");
    }

    fn restarted(&self, session: &Session, _before: Incarnation, _now: Incarnation) {
        tracing::info!(peer = %session.peer().short(), "another host was started again");
    }
}
