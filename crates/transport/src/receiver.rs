//! The callers' side of a session, to which events are reported.

use crate::host_id::HostId;
use crate::message::{Delivery, Priority};
use crate::pairing::Incarnation;
use crate::session::Session;

/// Receives all events in the sessions of an endpoint.
///
/// It is called on transport threads, and the session waits meanwhile. It must not block, close sessions or stop the endpoint.
/// Sending is allowed. For one session, calls other than *delivered* and *drained* never overlap with anything. Deliveries may
/// overlap with each other, as several connections deliver.
pub trait Receiver: Send + Sync {
    /// A connection exists, the first one or again after [`Receiver::disconnected`]; the peer has this incarnation.
    fn connected(&self, session: &Session, incarnation: Incarnation);

    /// A message has arrived, exactly once. The peer's credit for it is held until the delivery is dropped.
    fn delivered(&self, session: &Session, delivery: Delivery);

    /// The last connection is lost: messages wait for the next one.
    fn disconnected(&self, peer: HostId, reason: &str);

    /// The peer has another life: its process was restarted, or it has closed the session.
    ///
    /// **N.B.** Everything sent and queued before this is dropped, whether the peer has delivered it or not. Nothing from the
    /// earlier life is delivered after this. [`Receiver::connected`] follows if there was no connection.
    fn restarted(&self, session: &Session, before: Incarnation, now: Incarnation);

    /// The queue of a priority has fallen below [`Limits::low_water_bytes`](crate::Limits::low_water_bytes): a waiting sender may
    /// continue. It is called while the session works, so it must return quickly.
    fn drained(&self, session: &Session, priority: Priority) {
        let _ = (session, priority);
    }
}
