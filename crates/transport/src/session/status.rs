//! The status of a session: its connections, their links and figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::flow::Flow;
use crate::host_id::HostId;
use crate::message::Priority;

/// A session at one moment.
#[derive(Clone, Debug)]
pub struct SessionStatus {
    /// The host at the other end.
    pub peer: HostId,
    /// Whether there is any connection.
    pub is_connected: bool,
    /// Time for which there has been a connection, or none.
    pub since: Duration,
    /// Every connection, and every pair of links that is being dialled.
    pub connections: Vec<ConnectionStatus>,
    /// Bytes that no connection has begun to send, by priority in the order of [`Priority::ALL`].
    pub queued_bytes: [u64; Priority::ALL.len()],
    /// Bytes that were sent and not acknowledged.
    pub unacknowledged_bytes: u64,
    /// Why a connection was lost last.
    pub last_error: Option<String>,
}

/// One connection, or a pair of links that should have one.
#[derive(Clone, Debug)]
pub struct ConnectionStatus {
    /// The address at this end: of the link, or of the connection.
    pub local: String,
    /// The address at the other end.
    pub remote: String,
    /// Whether there is a connection.
    pub is_up: bool,
    /// Whether the peer has dialled it.
    pub is_inbound: bool,
    /// Time for which it has been up or down.
    pub since: Duration,
    /// Bytes sent, as they were on the wire.
    pub bytes_sent: u64,
    /// Bytes received, as they were on the wire.
    pub bytes_received: u64,
    /// Bytes sent per second at present; `None` without a connection, or when it has just begun.
    pub sent_per_second: Option<u64>,
    /// Bytes received per second at present; `None` as above.
    pub received_per_second: Option<u64>,
    /// The newest round trip; `None` before the first.
    pub round_trip: Option<Duration>,
    /// Bytes per second that the connection carried when it last had enough to send; `None` before that.
    pub bytes_per_second: Option<u64>,
    /// Ratio of packed to plain payload bytes, in thousandths; 1000 when nothing is packed.
    pub packed_per_mille: u64,
    /// Why the connection was lost, or not made, last.
    pub last_error: Option<String>,
}

pub(crate) struct Counters {
    pub(crate) local: String,
    pub(crate) remote: String,
    since: Instant,
    sent: Flow,
    received: Flow,
    /// Bytes of payload before and after packing.
    pub(crate) payload_bytes: AtomicU64,
    pub(crate) packed_bytes: AtomicU64,
    /// Microseconds; 0 before the first.
    round_trip_us: AtomicU64,
    /// 0 before the first measurement.
    pub(crate) bytes_per_second: AtomicU64,
    /// Milliseconds from `since` to the last received bytes.
    received_ms: AtomicU64,
    /// Milliseconds from `since` to the last answered heartbeat.
    answered_ms: AtomicU64,
}

impl Counters {
    pub(crate) fn new(local: String, remote: String) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            local,
            remote,
            since: Instant::now(),
            sent: Flow::default(),
            received: Flow::default(),
            payload_bytes: zero(),
            packed_bytes: zero(),
            round_trip_us: zero(),
            bytes_per_second: zero(),
            received_ms: zero(),
            answered_ms: zero(),
        }
    }

    pub(crate) fn received(&self, bytes: u64) {
        let now_ms = self.now_ms();
        self.received.add(bytes, now_ms);
        self.received_ms.store(now_ms, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, bytes: u64) {
        self.sent.add(bytes, self.now_ms());
    }

    fn now_ms(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }

    pub(crate) fn silence(&self) -> Duration {
        let received = Duration::from_millis(self.received_ms.load(Ordering::Relaxed));
        self.since.elapsed().saturating_sub(received)
    }

    pub(crate) fn answered(&self) {
        self.answered_ms.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn unanswered(&self) -> Duration {
        let answered = Duration::from_millis(self.answered_ms.load(Ordering::Relaxed));
        self.since.elapsed().saturating_sub(answered)
    }

    pub(crate) fn latest_round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_us.load(Ordering::Relaxed))
    }

    pub(crate) fn packed(&self, payload_bytes: usize, packed_bytes: usize) {
        self.payload_bytes.fetch_add(payload_bytes as u64, Ordering::Relaxed);
        self.packed_bytes.fetch_add(packed_bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn round_trip(&self, took: Duration) {
        self.round_trip_us.store((took.as_micros() as u64).max(1), Ordering::Relaxed);
    }

    fn describe(&self, is_inbound: bool) -> ConnectionStatus {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let measured = |value: u64| (value > 0).then_some(value);
        let payload_bytes = load(&self.payload_bytes);
        ConnectionStatus {
            local: self.local.clone(),
            remote: self.remote.clone(),
            is_up: true,
            is_inbound,
            since: self.since.elapsed(),
            bytes_sent: self.sent.total(),
            bytes_received: self.received.total(),
            sent_per_second: self.sent.per_second(self.now_ms()),
            received_per_second: self.received.per_second(self.now_ms()),
            round_trip: measured(load(&self.round_trip_us)).map(Duration::from_micros),
            bytes_per_second: measured(load(&self.bytes_per_second)),
            packed_per_mille: (load(&self.packed_bytes) * 1000).checked_div(payload_bytes).unwrap_or(1000),
            last_error: None,
        }
    }
}

pub(crate) struct Slot {
    local: String,
    remote: String,
    down: Mutex<Down>,
}

struct Down {
    /// Time since which there is no connection; `None` while there is one.
    since: Option<Instant>,
    last_error: Option<String>,
}

impl Slot {
    pub(crate) fn new(local: String, remote: String) -> Self {
        let down = Down { since: Some(Instant::now()), last_error: None };
        Self { local, remote, down: Mutex::new(down) }
    }

    pub(crate) fn up(&self) {
        self.down.lock().unwrap_or_else(PoisonError::into_inner).since = None;
    }

    /// Notes that the peer is left to dial: no connection is missing.
    pub(crate) fn left_to_peer(&self) {
        self.up();
    }

    pub(crate) fn failed(&self, error: String) {
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        down.since.get_or_insert_with(Instant::now);
        down.last_error = Some(error);
    }

    fn describe(&self) -> Option<ConnectionStatus> {
        let down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        let since = down.since?;
        Some(ConnectionStatus {
            local: self.local.clone(),
            remote: self.remote.clone(),
            is_up: false,
            is_inbound: false,
            since: since.elapsed(),
            bytes_sent: 0,
            bytes_received: 0,
            sent_per_second: None,
            received_per_second: None,
            round_trip: None,
            bytes_per_second: None,
            packed_per_mille: 1000,
            last_error: down.last_error.clone(),
        })
    }
}

pub(super) fn describe(shared: &Arc<Shared>) -> SessionStatus {
    let state = shared.lock();
    let up = state.connections.values().map(|entry| entry.counters.describe(entry.is_inbound));
    let down = state.slots.iter().filter_map(|slot| slot.describe());
    SessionStatus {
        peer: shared.peer,
        is_connected: !state.connections.is_empty(),
        since: state.since.elapsed(),
        connections: up.chain(down).collect(),
        queued_bytes: Priority::ALL.map(|priority| state.outgoing.queued_bytes(priority)),
        unacknowledged_bytes: state.outgoing.unacknowledged_bytes(),
        last_error: state.last_error.clone(),
    }
}
