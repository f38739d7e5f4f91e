//! Writes a connection: pulls the most urgent message from the session, one part at a time.
//!
//! A long message is sent in parts, and a more urgent one may be sent between two parts. Of each priority at most one message is
//! unfinished. Small frames are gathered and sent together.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncWriteExt, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::speed::Speed;
use super::{Connection, Ended};
use crate::compression::Packer;
use crate::frame::{self, Control, FRAME_BYTES_MAX, PART_BYTES_MAX, Start};
use crate::message::{ChannelId, Priority};
use crate::outgoing::{Next, Taken, UnderWay};

/// Limit of the bytes gathered before sending: as many as TLS takes at once.
const GATHERED_BYTES: usize = 64 << 10;

/// A part of this length or more is sent from where it is, without a copy.
const COPIED_BYTES_MAX: usize = 8 << 10;

/// Shortest part, so that a frame does not cost more than it carries.
const PART_BYTES_MIN: usize = 16 << 10;

/// Time that a part may take on the link: a more urgent message waits for it.
const PART_TIME: Duration = Duration::from_millis(2);

const GOODBYE_WITHIN: Duration = Duration::from_millis(500);

type Stream = WriteHalf<TlsStream<TcpStream>>;

pub(super) async fn run(connection: &Connection, mut stream: Stream) -> Ended {
    let mut writer = Writer {
        connection,
        packer: Packer::new(connection.compression),
        unfinished: Default::default(),
        gathered: BytesMut::with_capacity(FRAME_BYTES_MAX),
        is_amid_frame: false,
        pings: 0,
        speed: Speed::default(),
    };
    loop {
        let work = connection.session.work.notified();
        let wake = connection.heartbeat.wake.notified();
        tokio::pin!(work, wake);
        // From here on no wake-up is missed, whatever is checked before waiting for it.
        work.as_mut().enable();
        let round = async {
            let has_sent = writer.round(&mut stream).await?;
            if !has_sent {
                stream.flush().await?;
                writer.speed.idle();
                tokio::select! {
                    () = &mut work => {}
                    () = &mut wake => {}
                }
            }
            Ok(())
        };
        let ended = tokio::select! {
            // A frame that has just gone out is not cut off: the goodbye can follow it.
            biased;
            result = round => match result {
                Ok(()) => continue,
                Err(error) => Ended::Io(error),
            },
            () = connection.stop.notified() => Ended::Stopped,
        };
        if matches!(ended, Ended::Stopped) && !writer.is_amid_frame {
            goodbye(&mut stream).await;
        }
        return ended;
    }
}

/// Says goodbye, if the connection takes it. The peer drops a message that was cut off, with the connection.
async fn goodbye(stream: &mut Stream) {
    let mut bytes = BytesMut::new();
    frame::encode_control(&Control::Goodbye, &mut bytes);
    let words = async {
        stream.write_all(&bytes).await?;
        stream.shutdown().await
    };
    drop(tokio::time::timeout(GOODBYE_WITHIN, words).await);
}

struct Writer<'a> {
    connection: &'a Connection,
    packer: Packer,
    unfinished: [Option<Unfinished>; Priority::ALL.len()],
    gathered: BytesMut,
    /// Whether a frame is sent in part: no other can be sent before its end.
    is_amid_frame: bool,
    pings: u64,
    speed: Speed,
}

struct Unfinished {
    number: u64,
    channel: ChannelId,
    left: Bytes,
}

impl Writer<'_> {
    /// Sends what there is, up to about a part. Returns `false` if there was nothing.
    async fn round(&mut self, stream: &mut Stream) -> std::io::Result<bool> {
        self.speed.busy(Instant::now());
        self.gather_control();
        while self.gathered.len() < GATHERED_BYTES {
            let part = match self.next_part() {
                Some(part) => part,
                None => break,
            };
            if part.len() < COPIED_BYTES_MAX {
                self.gathered.extend_from_slice(&part);
            } else {
                self.send(stream, part).await?;
                return Ok(true);
            }
        }
        let has_something = !self.gathered.is_empty();
        if has_something {
            self.send(stream, Bytes::new()).await?;
        }
        Ok(has_something)
    }

    fn gather_control(&mut self) {
        let heartbeat = &self.connection.heartbeat;
        if heartbeat.ping_due.swap(false, Ordering::Relaxed) {
            self.pings += 1;
            heartbeat.sent(self.pings, Instant::now());
            frame::encode_control(&Control::Ping(self.pings), &mut self.gathered);
        }
        let pong = heartbeat.pong_due.swap(0, Ordering::Relaxed);
        if pong > 0 {
            frame::encode_control(&Control::Pong(pong - 1), &mut self.gathered);
        }
        if let Some(report) = self.connection.session.take_report(self.connection.id) {
            frame::encode_control(&Control::Acknowledgement(report), &mut self.gathered);
        }
    }

    /// Encodes the next frame up to its part, which it returns. Returns `None` if there is nothing to send.
    fn next_part(&mut self) -> Option<Bytes> {
        let begun: UnderWay = self
            .unfinished
            .each_ref()
            .map(|unfinished| unfinished.as_ref().map(|unfinished| unfinished.channel));
        match self.connection.session.next(self.connection.id, &begun)? {
            Next::Begin(taken) => Some(self.first_part(taken)),
            Next::GoOn(priority) => self.another_part(priority),
        }
    }

    fn another_part(&mut self, priority: Priority) -> Option<Bytes> {
        let place = &mut self.unfinished[priority.index()];
        let mut next = place.take()?;
        let part = next.left.split_to(part_bytes(&self.packer).min(next.left.len()));
        frame::encode_next(next.number, &part, &mut self.gathered);
        if next.left.has_remaining() {
            *place = Some(next);
        }
        Some(part)
    }

    fn first_part(&mut self, taken: Taken) -> Bytes {
        let Taken { number, after, message, .. } = taken;
        let (channel, priority) = (message.channel(), message.priority());
        let payload_bytes = message.payload().len();
        let (codec, mut left) = self.packer.pack(message.payload());
        self.connection.counters.packed(payload_bytes, left.len());
        let start = Start {
            number,
            channel: channel.0,
            priority,
            codec,
            after,
            head_bytes: message.head().len(),
            payload_bytes,
            wire_bytes: left.len(),
        };
        let part = left.split_to(part_bytes(&self.packer).min(left.len()));
        frame::encode_first(&start, message.head(), &part, &mut self.gathered);
        if left.has_remaining() {
            self.unfinished[priority.index()] = Some(Unfinished { number, channel, left });
        }
        part
    }

    async fn send(&mut self, stream: &mut Stream, part: Bytes) -> std::io::Result<()> {
        let bytes = self.gathered.len() + part.len();
        let begun = Instant::now();
        let mut both = (&mut self.gathered).chain(part);
        self.is_amid_frame = true;
        stream.write_all_buf(&mut both).await?;
        self.is_amid_frame = false;
        self.gathered.clear();
        self.connection.counters.sent(bytes as u64);
        if let Some(measured) = self.speed.sent(bytes, begun, Instant::now()) {
            self.packer.measured(measured.link_ns_per_byte);
            let rate = measured.bytes_per_second as u64;
            self.connection.counters.bytes_per_second.store(rate, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn part_bytes(packer: &Packer) -> usize {
    let bytes = packer.link_ns_per_byte().map(|cost| PART_TIME.as_nanos() as f64 / cost.max(0.001));
    bytes.map_or(PART_BYTES_MIN, |bytes| (bytes as usize).clamp(PART_BYTES_MIN, PART_BYTES_MAX))
}
