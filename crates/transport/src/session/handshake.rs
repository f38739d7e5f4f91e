//! A session's part in the handshake of a connection.
//!
//! The two sides exchange what was acknowledged on earlier connections, and which of these are given up, before the first frame.
//! This is the fence of a reconnect.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use super::{Counters, Entry, Fault, Session, SessionState, Shared};
use crate::frame::{Acknowledgement, Hello, Welcome};
use crate::incoming::Incoming;
use crate::outgoing::ConnectionId;
use crate::pairing::{Incarnation, Outcome, Snapshot};

/// The called side's offer, until the dialler is ready.
pub(crate) struct Offer {
    at_hello: Snapshot,
    offered: Incarnation,
    hello: Hello,
    told: Vec<ConnectionId>,
}

pub(crate) struct Joining {
    pub(crate) connection: ConnectionId,
    pub(crate) counters: Arc<Counters>,
    pub(crate) stop: Arc<Notify>,
    pub(crate) is_inbound: bool,
}

impl Shared {
    pub(crate) fn hello(&self, connection: ConnectionId) -> (Hello, Snapshot) {
        let state = self.lock();
        let snapshot = state.pairing.snapshot();
        let hello = Hello {
            connection,
            incarnation: snapshot.local.0,
            expected: snapshot.remote.map(|remote| remote.0),
            fenced: state.fenced.iter().copied().collect(),
            acknowledgement: state.incoming.state(),
        };
        (hello, snapshot)
    }

    pub(crate) fn welcome(&self, hello: Hello, fresh: Incarnation) -> (Welcome, Offer) {
        let mut state = self.lock();
        let at_hello = state.pairing.snapshot();
        let dialler = Incarnation(hello.incarnation);
        let offered = state.pairing.offer(dialler, hello.expected.map(Incarnation), fresh);
        let is_current = at_hello == Snapshot { local: offered, remote: Some(dialler) };
        let acknowledgement =
            if is_current { state.incoming.state() } else { Incoming::new(state.window_bytes).state() };
        let told: Vec<ConnectionId> = state.fenced.iter().copied().collect();
        let welcome = Welcome { incarnation: offered.0, fenced: told.clone(), acknowledgement };
        (welcome, Offer { at_hello, offered, hello, told })
    }

    /// Dialler: joins the connection to the session, if the pair is still the agreed one. Returns `false` if another connection
    /// was faster: dial again. Fails if the peer breaks the rules.
    pub(crate) fn accept(
        self: &Arc<Self>,
        hello: &Hello,
        snapshot: Snapshot,
        welcome: &Welcome,
        joining: Joining,
    ) -> Result<bool, Fault> {
        let offered = Incarnation(welcome.incarnation);
        let agree = |state: &mut SessionState| state.pairing.accept(snapshot, offered);
        // The called side's acknowledgement belongs to the pair that it offers.
        self.join(agree, &hello.fenced, &welcome.fenced, Some(&welcome.acknowledgement), joining)
    }

    /// Called side: joins the connection to the session, once the dialler is ready. Returns and fails like [`Shared::accept`].
    pub(crate) fn settle(self: &Arc<Self>, offer: &Offer, joining: Joining) -> Result<bool, Fault> {
        let dialler = Incarnation(offer.hello.incarnation);
        let agree = |state: &mut SessionState| state.pairing.settle(offer.at_hello, offer.offered, dialler);
        // The dialler's acknowledgement belongs to the pair that it knew then: this one, or none yet.
        let is_of_pair = offer.hello.expected.is_none_or(|expected| expected == offer.offered.0);
        let acknowledgement = is_of_pair.then_some(&offer.hello.acknowledgement);
        self.join(agree, &offer.told, &offer.hello.fenced, acknowledgement, joining)
    }

    fn join(
        self: &Arc<Self>,
        agree: impl FnOnce(&mut SessionState) -> Outcome,
        told: &[ConnectionId],
        fenced: &[ConnectionId],
        acknowledgement: Option<&Acknowledgement>,
        joining: Joining,
    ) -> Result<bool, Fault> {
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        if state.is_closed {
            return Ok(false);
        }
        let outcome = agree(&mut state);
        if outcome == Outcome::Superseded {
            return Ok(false);
        }
        if let Outcome::Restarted { .. } = outcome {
            begin_anew(&mut state);
        }
        if let Some(acknowledgement) = acknowledgement {
            state.outgoing.acknowledge(acknowledgement)?;
        }
        // The peer knows all that this handshake carried.
        state.fenced.retain(|connection| !told.contains(connection));
        let is_first = state.connections.is_empty();
        let Joining { connection, counters, stop, is_inbound } = joining;
        state.connections.insert(connection, Entry { counters, stop, is_inbound, is_suspected: false });
        // Grants that the peer cannot know from the handshake reach it with the first frame.
        state.report_due = true;
        if is_first {
            state.since = Instant::now();
        }
        let remote = state.pairing.snapshot().remote;
        drop(state);
        for given_up in fenced.iter().filter(|given_up| **given_up != connection) {
            self.detach_behind_gate(&gate, *given_up, "the peer has closed it");
        }
        let session = Session { shared: Arc::clone(self) };
        if let (Outcome::Restarted { before }, Some(now)) = (outcome, remote) {
            self.receiver.restarted(&session, before, now);
        }
        if let (true, Some(now)) = (is_first, remote) {
            self.receiver.connected(&session, now);
        }
        drop(gate);
        self.work.notify_waiters();
        self.changed.notify_waiters();
        Ok(true)
    }
}

/// Drops all that belongs to the earlier life of the peer, its connections too.
fn begin_anew(state: &mut SessionState) {
    state.generation += 1;
    state.outgoing.reset();
    state.incoming = Incoming::new(state.window_bytes);
    for (_, entry) in std::mem::take(&mut state.connections) {
        entry.stop.notify_one();
    }
    state.fenced.clear();
}
