//! One connection of a session at work: a reader, a writer and a watchdog, in one task that ends as a whole.

mod reader;
mod speed;
mod writer;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
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

/// Unanswered heartbeats after which a connection is suspected: its messages are given to other connections, long before it is
/// known to be dead. A guest's write may wait for one of them; this is half a second by default.
const HEARTBEATS_UNANSWERED: u32 = 2;

/// Round trips that are added to that time: a link with long queues is slow, not dead.
const ROUND_TRIPS_UNANSWERED: u32 = 4;

/// A connection that has joined its session, and leaves it when this is dropped.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) session: Arc<Shared>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) stop: Arc<Notify>,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) compression: Compression,
    reason: String,
    end: End,
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Either side has closed it.
    Closed,
    /// The path, or the peer, has broken it.
    Lost,
}

#[derive(Default)]
pub(crate) struct Heartbeat {
    ping_due: AtomicBool,
    /// Number of the ping to answer, plus one; 0 if none.
    pong_due: AtomicU64,
    /// Pings sent and not answered, each with its time: on a long link there are several.
    pinged: Mutex<VecDeque<(u64, Instant)>>,
    wake: Notify,
}

impl Heartbeat {
    fn sent(&self, ping: u64, now: Instant) {
        let mut pinged = self.pinged.lock().unwrap_or_else(PoisonError::into_inner);
        // The oldest ping is dropped: a connection this far behind is dead, or nearly so.
        if pinged.len() == HEARTBEATS as usize {
            pinged.pop_front();
        }
        pinged.push_back((ping, now));
    }

    /// Returns how long the answer to a ping took. Answers come in order, so earlier pings are dropped.
    fn answered(&self, ping: u64, now: Instant) -> Option<Duration> {
        let mut pinged = self.pinged.lock().unwrap_or_else(PoisonError::into_inner);
        let place = pinged.iter().position(|(sent, _)| *sent == ping)?;
        let (_, at) = pinged.drain(..=place).next_back()?;
        Some(now.saturating_duration_since(at))
    }
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
        Self {
            id,
            session,
            counters,
            stop,
            heartbeat: Heartbeat::default(),
            compression,
            reason,
            end: End::Closed,
        }
    }

    /// Works until the connection ends, and returns the cause. `read` holds the bytes read after the handshake.
    pub(crate) async fn run(
        mut self,
        stream: TlsStream<TcpStream>,
        read: BytesMut,
        silence_max: Duration,
    ) -> Ended {
        let (mut read_half, write_half) = split(stream);
        let ended = tokio::select! {
            ended = reader::run(&self, &mut read_half, read) => ended,
            ended = writer::run(&self, write_half) => ended,
            ended = self.watch(silence_max) => ended,
        };
        if matches!(ended, Ended::Stopped) {
            reader::discard_rest(&mut read_half).await;
        }
        self.reason = ended.to_string();
        if matches!(ended, Ended::Io(_) | Ended::Closed | Ended::Silent { .. }) {
            self.end = End::Lost;
        }
        ended
    }

    /// Sends heartbeats, has the connection suspected when they are not answered, and ends when nothing arrives at all.
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
        self.session.detach(self.id, &self.reason, self.end);
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
    #[error("its daemon was stopped, or has closed the connection in order")]
    Goodbye,
    #[error("nothing was received from the peer for {:.1} s", silence.as_secs_f64())]
    Silent { silence: Duration },
    #[error("the peer sent {0}")]
    Malformed(#[from] Malformed),
    #[error("{0}")]
    Fault(#[from] Fault),
    #[error("the peer sent a frame that is not allowed in a session")]
    Unexpected,
    #[error("the session closed it")]
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_measured_also_where_it_is_longer_than_the_time_between_two_pings() {
        let heartbeat = Heartbeat::default();
        let began = Instant::now();
        let after = |milliseconds| began + Duration::from_millis(milliseconds);
        for ping in 1..=3 {
            heartbeat.sent(ping, after(250 * ping));
        }
        assert_eq!(heartbeat.answered(1, after(850)), Some(Duration::from_millis(600)));
        // The second answer was overtaken by a newer one: a host answers the newest ping.
        assert_eq!(heartbeat.answered(3, after(1350)), Some(Duration::from_millis(600)));
        assert_eq!(heartbeat.answered(2, after(1350)), None);
        for ping in 4..1000 {
            heartbeat.sent(ping, after(2000));
        }
        assert_eq!(heartbeat.pinged.lock().unwrap().len(), HEARTBEATS as usize);
    }
}
