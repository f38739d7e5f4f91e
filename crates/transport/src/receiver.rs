//! Who is told what arrives: the callers' side of a session.

use crate::host_id::HostId;
use crate::message::{Delivery, Priority};
use crate::pairing::Incarnation;
use crate::session::Session;

/// Is told of everything that happens in the sessions of an endpoint.
///
/// It is called on transport threads, and nothing of a session goes on meanwhile: it must not block, and must not close
/// sessions or stop the endpoint. Sending is allowed. Of one session, calls other than *delivered* and *drained* never
/// overlap with anything; deliveries may overlap with each other, as several connections deliver.
pub trait Receiver: Send + Sync {
    /// There is a connection, the first one or again after [`Receiver::disconnected`]; the peer is in this life.
    fn connected(&self, session: &Session, incarnation: Incarnation);

    /// A message has arrived, exactly once. The peer's credit for it is held until the delivery is dropped.
    fn delivered(&self, session: &Session, delivery: Delivery);

    /// The last connection is lost: messages wait for the next one.
    fn disconnected(&self, peer: HostId, reason: &str);

    /// The peer is in another life: its process was started again, or it has closed the session.
    ///
    /// **N.B.** Everything sent and queued before this is dropped, whether the peer has delivered it or not; nothing that
    /// was sent in the earlier life is delivered after this. [`Receiver::connected`] follows if there was no connection.
    fn restarted(&self, session: &Session, before: Incarnation, now: Incarnation);

    /// The queue of a priority has fallen below [`Limits::low_water_bytes`](crate::Limits::low_water_bytes): whoever
    /// waits with more may go on. It is called while the session works; do little in it.
    fn drained(&self, session: &Session, priority: Priority) {
        let _ = (session, priority);
    }
}
