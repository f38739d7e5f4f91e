//! A session: everything between this host and one peer, over any number of connections.
//!
//! ```text
//!   callers ── send() ──► Outgoing ──┬─► connection ═══ link ═══► …
//!                                    ├─► connection ═══ link ═══► …
//!   Receiver ◄─ delivered() ─ Incoming ◄─┘  (dial.rs and accept.rs make them; they come and go)
//! ```
//!
//! There are two locks. `state` is held for a few instructions. `gate` is for calls that must not overlap: deliveries hold it to
//! read, changes of the pair or of the connections hold it to write. So *restarted* is never reported during a delivery of the
//! earlier life, and no such delivery follows it.

mod flow;
mod handshake;
mod status;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub(crate) use handshake::Joining;
pub use status::{ConnectionStatus, SessionStatus};
pub(crate) use status::{Counters, Slot};

use crate::connection::End;
use crate::context::Context;
use crate::credit::{Credit, class, cost_of};
use crate::frame::{Acknowledgement, Begun, Start};
use crate::host_id::HostId;
use crate::incoming::{Arrival, Due, Incoming, Violation};
use crate::large_messages::ADVICE;
use crate::message::{ChannelId, Delivery, Message, Priority, PriorityBoost};
use crate::outgoing::{ConnectionId, NeverSent, Next, Outgoing, Taken, UnderWay};
use crate::pairing::{Incarnation, Pairing};
use crate::peer::Peer;

/// Time for which a few deliveries may wait to be acknowledged: only the peer's memory depends on it.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_millis(5);

/// Lost connections that are remembered until the peer knows that it must not deliver anything of them.
const FENCED_MAX: usize = 64;

/// Everything between this host and one peer. A handle: cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Session {
    pub(crate) shared: Arc<Shared>,
}

impl Session {
    /// Sends a message to the peer.
    ///
    /// It never blocks, and a lost link is no failure: the message waits, and is delivered exactly once while both processes
    /// live. It is dropped when the peer has another process (see
    /// [`Receiver::restarted`](crate::Receiver::restarted)) or the session is closed. Only the callers bound the queue: they
    /// watch [`Session::queued_bytes`] and wait for [`Receiver::drained`](crate::Receiver::drained).
    pub fn send(&self, message: Message) {
        self.shared.send(message);
    }

    /// Changes the boost of a channel, for messages queued already and for later ones.
    ///
    /// It is forgotten when the peer's process is another one, as the queued messages are.
    pub fn set_boost(&self, channel: ChannelId, boost: PriorityBoost) {
        self.shared.lock().outgoing.set_boost(channel, boost);
    }

    /// Returns the bytes of a priority that no connection has begun to send yet.
    #[must_use]
    pub fn queued_bytes(&self, priority: Priority) -> u64 {
        self.shared.lock().outgoing.queued_bytes(priority)
    }

    /// Returns the bytes that have been sent and not acknowledged, at most the peer's window.
    #[must_use]
    pub fn unacknowledged_bytes(&self) -> u64 {
        self.shared.lock().outgoing.unacknowledged_bytes()
    }

    /// Returns the host at the other end.
    #[must_use]
    pub fn peer(&self) -> HostId {
        self.shared.peer
    }

    /// Returns the present life of the peer; `None` before the first connection.
    #[must_use]
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.shared.lock().pairing.snapshot().remote
    }

    /// Describes the session for the status.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        status::describe(&self.shared)
    }
}

/// Compares whether both are handles of one session. Two sessions with one peer differ: the earlier one was closed.
impl PartialEq for Session {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Session {}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Session({:?})", self.shared.peer)
    }
}

pub(crate) struct Shared {
    pub(crate) peer: HostId,
    receiver: Arc<dyn crate::Receiver>,
    gate: RwLock<()>,
    state: Mutex<SessionState>,
    pub(crate) work: Notify,
    /// Wakes diallers that wait for a change of connections.
    pub(crate) changed: Notify,
    /// Wakes the task that bounds how long acknowledgements wait.
    report_wanted: Arc<Notify>,
}

pub(crate) struct SessionState {
    pairing: Pairing,
    /// Counts pairs: credit of an earlier one is worthless.
    generation: u64,
    outgoing: Outgoing,
    incoming: Incoming,
    window_bytes: u64,
    connections: BTreeMap<ConnectionId, Entry>,
    /// Connections given up that have not been reported to the peer yet.
    fenced: VecDeque<ConnectionId>,
    /// Whether a connection should carry the report of [`Incoming`].
    report_due: bool,
    is_closed: bool,
    /// The peer as it was dialled last, and the tasks that dial it.
    dialled: Option<Peer>,
    diallers: Vec<JoinHandle<()>>,
    reporter: Option<JoinHandle<()>>,
    slots: Vec<Arc<Slot>>,
    since: Instant,
    last_error: Option<String>,
}

struct Entry {
    counters: Arc<Counters>,
    stop: Arc<Notify>,
    is_inbound: bool,
    /// Its heartbeats are not answered: it gets nothing more to send while there are others.
    is_suspected: bool,
}

impl SessionState {
    fn may_carry(&self, connection: ConnectionId) -> bool {
        match self.connections.get(&connection) {
            None => false,
            Some(entry) => !entry.is_suspected || self.connections.values().all(|other| other.is_suspected),
        }
    }
}

impl Shared {
    pub(crate) fn new(context: &Arc<Context>, peer: HostId) -> Arc<Self> {
        let limits = &context.settings.limits;
        let state = SessionState {
            pairing: Pairing::new(context.fresh_incarnation()),
            generation: 0,
            outgoing: Outgoing::new(limits.low_water_bytes),
            incoming: Incoming::new(limits.window_bytes),
            window_bytes: limits.window_bytes,
            connections: BTreeMap::new(),
            fenced: VecDeque::new(),
            report_due: false,
            is_closed: false,
            dialled: None,
            diallers: Vec::new(),
            reporter: None,
            slots: Vec::new(),
            since: Instant::now(),
            last_error: None,
        };
        let shared = Arc::new(Self {
            peer,
            receiver: Arc::clone(&context.receiver),
            gate: RwLock::new(()),
            state: Mutex::new(state),
            work: Notify::new(),
            changed: Notify::new(),
            report_wanted: Arc::new(Notify::new()),
        });
        let reporter = context.runtime.spawn(Self::report_in_time(Arc::downgrade(&shared)));
        shared.lock().reporter = Some(reporter);
        shared
    }

    fn send(&self, message: Message) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        state.outgoing.push(message);
        drop(state);
        self.work.notify_one();
    }

    pub(crate) fn next(self: &Arc<Self>, connection: ConnectionId, begun: &UnderWay) -> Option<Next> {
        let mut state = self.lock();
        if !state.may_carry(connection) {
            // The peer drops the message that it has begun; it ends soon.
            let begun = Priority::ALL.into_iter().find(|priority| begun[priority.index()].is_some());
            return begun.map(Next::GoOn);
        }
        let next = state.outgoing.next(connection, begun);
        drop(state);
        if let Some(Next::Begin(Taken { drained: true, message, .. })) = &next {
            self.receiver.drained(&Session { shared: Arc::clone(self) }, message.priority());
        }
        next
    }

    /// Returns the report that a connection should carry, if it is due.
    pub(crate) fn take_report(&self, connection: ConnectionId) -> Option<Acknowledgement> {
        let mut state = self.lock();
        if !state.report_due || !state.may_carry(connection) {
            return None;
        }
        state.report_due = false;
        Some(state.incoming.report())
    }

    pub(crate) fn acknowledged(&self, connection: ConnectionId, news: &Acknowledgement) -> Result<(), Fault> {
        let mut state = self.lock();
        if !state.connections.contains_key(&connection) {
            return Err(Fault::Fenced);
        }
        state.outgoing.acknowledge(news)?;
        drop(state);
        self.work.notify_waiters();
        Ok(())
    }

    pub(crate) fn begin(&self, connection: ConnectionId, start: &Start) -> Result<Begun, Fault> {
        let state = self.lock();
        if !state.connections.contains_key(&connection) {
            return Err(Fault::Fenced);
        }
        Ok(state.incoming.begin(start)?)
    }

    pub(crate) fn arrived(
        self: &Arc<Self>,
        connection: ConnectionId,
        number: u64,
        after: Option<u64>,
        message: Message,
    ) -> Result<(), Fault> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        // The fence: bytes read from a connection that has been given up are ignored.
        if !state.connections.contains_key(&connection) {
            return Err(Fault::Fenced);
        }
        let generation = state.generation;
        let arrival = state.incoming.arrive(number, after, message)?;
        drop(state);
        match arrival {
            Arrival::Deliver(message) => self.deliver(generation, message),
            Arrival::DeliverOrdered(message) => {
                let mut next = Some((number, message));
                while let Some((number, message)) = next {
                    self.deliver(generation, message);
                    next = self.lock().incoming.passed(number);
                }
            }
            Arrival::Waits | Arrival::Known => {}
        }
        self.report_if_due();
        Ok(())
    }

    fn deliver(self: &Arc<Self>, generation: u64, message: Message) {
        let (class, cost) = (class(message.priority()), cost_of(&message));
        let credit = Credit::new(Arc::downgrade(self), generation, class, cost);
        self.receiver.delivered(&Session { shared: Arc::clone(self) }, Delivery { message, credit });
    }

    pub(crate) fn return_credit(&self, generation: u64, class: usize, cost: u64) {
        let mut state = self.lock();
        if state.generation == generation {
            state.incoming.release(class, cost);
            drop(state);
            self.report_if_due();
        }
    }

    fn report_if_due(&self) {
        let mut state = self.lock();
        if state.report_due {
            return;
        }
        match state.incoming.report_due() {
            Due::Now => {
                state.report_due = true;
                drop(state);
                self.work.notify_one();
            }
            Due::Soon => self.report_wanted.notify_one(),
            Due::Never => {}
        }
    }

    /// Has a few deliveries acknowledged within a short time too.
    async fn report_in_time(shared: Weak<Self>) {
        while let Some(wanted) = shared.upgrade().map(|shared| Arc::clone(&shared.report_wanted)) {
            wanted.notified().await;
            tokio::time::sleep(ACKNOWLEDGE_WITHIN).await;
            let Some(strong) = shared.upgrade() else { return };
            let mut state = strong.lock();
            state.report_due |= state.incoming.report_due() != Due::Never;
            drop(state);
            strong.work.notify_one();
        }
    }

    /// Gives a connection's messages to the others, if there are any: its heartbeats are not answered.
    ///
    /// It may be alive: a message that it delivers anyway is delivered once, and the others' copy dropped.
    pub(crate) fn suspect(&self, connection: ConnectionId) {
        let mut state = self.lock();
        let has_others = state.connections.iter().any(|(id, other)| *id != connection && !other.is_suspected);
        let Some(entry) = state.connections.get_mut(&connection) else { return };
        if entry.is_suspected || !has_others {
            return;
        }
        entry.is_suspected = true;
        let count = state.outgoing.take_back(connection);
        // An acknowledgement that it carries may not arrive either.
        state.incoming.report_lost();
        state.report_due = true;
        drop(state);
        tracing::info!(peer = %self.peer.short(), count, "a connection does not answer; its traffic moves to others");
        self.work.notify_waiters();
    }

    /// Gives a connection work again, since it answers.
    pub(crate) fn trust(&self, connection: ConnectionId) {
        let mut state = self.lock();
        if let Some(entry) = state.connections.get_mut(&connection).filter(|entry| entry.is_suspected) {
            entry.is_suspected = false;
            drop(state);
            self.work.notify_waiters();
        }
    }

    /// Removes a connection: the others send its messages, and nothing more is taken from it.
    pub(crate) fn detach(&self, connection: ConnectionId, reason: &str, end: End) {
        let only_small_pass = end == End::Lost && self.lock().outgoing.lost(connection);
        let advised = only_small_pass.then(|| format!("{reason}; {ADVICE}"));
        let reason = advised.as_deref().unwrap_or(reason);
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.detach_behind_gate(&gate, connection, reason);
    }

    fn detach_behind_gate(&self, _gate: &RwLockWriteGuard<'_, ()>, connection: ConnectionId, reason: &str) {
        let mut state = self.lock();
        let Some(entry) = state.connections.remove(&connection) else { return };
        entry.stop.notify_one();
        state.outgoing.take_back(connection);
        // The acknowledgement that it was to carry may be lost with it.
        state.incoming.report_lost();
        state.report_due = true;
        if state.fenced.len() == FENCED_MAX {
            state.fenced.pop_front();
        }
        state.fenced.push_back(connection);
        state.last_error = Some(reason.to_owned());
        let is_last = state.connections.is_empty();
        if is_last {
            state.since = Instant::now();
        }
        drop(state);
        self.work.notify_waiters();
        self.changed.notify_waiters();
        if is_last {
            self.receiver.disconnected(self.peer, reason);
        }
    }

    /// Returns whether this host should leave dialling to the peer: it dials already, and one of the two is enough.
    pub(crate) fn leaves_dialling_to_peer(&self, own: HostId) -> bool {
        own > self.peer && self.lock().connections.values().any(|entry| entry.is_inbound)
    }

    pub(crate) fn connection_count(&self) -> usize {
        self.lock().connections.len()
    }

    /// Replaces the tasks that dial the peer, if it is dialled over other links than now.
    pub(crate) fn dial(&self, peer: &Peer, start: impl FnOnce() -> Vec<(Arc<Slot>, JoinHandle<()>)>) {
        let mut state = self.lock();
        if state.is_closed || state.dialled.as_ref().is_some_and(|dialled| dialled.links == peer.links) {
            return;
        }
        state.diallers.drain(..).for_each(|dialler| dialler.abort());
        // These connections may use links that the peer has lost. Their messages go over the new ones.
        let outbound = state.connections.values().filter(|entry| !entry.is_inbound);
        outbound.for_each(|entry| entry.stop.notify_one());
        state.dialled = Some(peer.clone());
        (state.slots, state.diallers) = start().into_iter().unzip();
    }

    /// Ends everything: queued messages are dropped, connections closed.
    pub(crate) fn close(&self, reason: &str) {
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        state.is_closed = true;
        state.generation += 1;
        state.outgoing.reset();
        state.diallers.drain(..).for_each(|dialler| dialler.abort());
        if let Some(reporter) = state.reporter.take() {
            reporter.abort();
        }
        let connections: Vec<ConnectionId> = state.connections.keys().copied().collect();
        drop(state);
        connections.into_iter().for_each(|connection| self.detach_behind_gate(&gate, connection, reason));
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("it was replaced by another connection")]
    Fenced,
    #[error("the peer broke the rules: {0}")]
    Violation(#[from] Violation),
    #[error("the peer sent {0}")]
    NeverSent(#[from] NeverSent),
}
