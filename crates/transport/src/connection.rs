//! One connection of a session at work: a reader, a writer and a watchdog, in one task that ends as a whole.

mod reader;
mod writer;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::io::split;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsStream;

use crate::compression::Compression;
use crate::frame::Malformed;
use crate::outgoing::ConnectionId;
use crate::session::{Counters, Fault, Shared};

/// Heartbeats in the time after which a silent connection counts as dead.
const HEARTBEATS: u32 = 16;

/// How many of them may stay without an answer before the connection is suspected: what it carries is given to others
/// then, long before it is known to be dead. Half a second, where a guest's write may be held for one.
const HEARTBEATS_UNANSWERED: u32 = 2;

/// Round trips that an answer may take besides: a link whose queues are long is slow, not dead.
const ROUND_TRIPS_UNANSWERED: u32 = 4;

/// A connection that has joined its session. Dropping it takes it out again.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) session: Arc<Shared>,
    pub(crate) counters: Arc<Counters>,
    /// Asks the connection to end.
    pub(crate) stop: Arc<Notify>,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) compression: Compression,
    /// Why it ended, once it has.
    reason: String,
}

/// What reader, writer and watchdog tell each other.
#[derive(Default)]
pub(crate) struct Heartbeat {
    /// A ping should be sent.
    ping_due: AtomicBool,
    /// The number of the ping to answer, plus one; 0 if none.
    pong_due: AtomicU64,
    /// The ping that was sent last, and when.
    pinged: std::sync::Mutex<Option<(u64, Instant)>>,
    /// Wakes the writer.
    wake: Notify,
}

impl Connection {
    pub(crate) fn new(
        id: ConnectionId,
        session: Arc<Shared>,
        counters: Arc<Counters>,
        stop: Arc<Notify>,
        compression: Compression,
    ) -> Self {
        let reason = "it was dropped".to_owned();
        Self { id, session, counters, stop, heartbeat: Heartbeat::default(), compression, reason }
    }

    /// Works until the connection ends, and says why it did. `read` is what has been read behind the handshake.
    pub(crate) async fn run(
        mut self,
        stream: TlsStream<TcpStream>,
        read: BytesMut,
        silence_max: Duration,
    ) -> Ended {
        let (read_half, write_half) = split(stream);
        let ended = tokio::select! {
            ended = reader::run(&self, read_half, read) => ended,
            ended = writer::run(&self, write_half) => ended,
            ended = self.watch(silence_max) => ended,
        };
        self.reason = ended.to_string();
        ended
    }

    /// Sends heartbeats, has the connection suspected when they are not answered, and ends when nothing comes at all.
    async fn watch(&self, silence_max: Duration) -> Ended {
        let mut ticks = tokio::time::interval(silence_max / HEARTBEATS);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let silence = self.counters.silence();
            if silence >= silence_max {
                return Ended::Silent { silence };
            }
            let patience = ticks.period() * HEARTBEATS_UNANSWERED
                + self.counters.latest_round_trip() * ROUND_TRIPS_UNANSWERED;
            if self.counters.unanswered() > patience {
                self.session.suspect(self.id);
            }
            self.heartbeat.ping_due.store(true, Ordering::Relaxed);
            self.heartbeat.wake.notify_one();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.session.detach(self.id, &self.reason);
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
    #[error("the peer said goodbye: it is being stopped, or has closed the session")]
    Goodbye,
    #[error("nothing was heard of the peer for {:.1} s", silence.as_secs_f64())]
    Silent { silence: Duration },
    #[error("the peer sent {0}")]
    Malformed(#[from] Malformed),
    #[error("{0}")]
    Fault(#[from] Fault),
    #[error("the peer sent a frame that has no place in a session")]
    Unexpected,
    #[error("the session gave it up")]
    Stopped,
}
