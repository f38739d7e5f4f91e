//! Reads a connection: decodes frames, assembles messages, and gives them to the session.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, ReadHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::{Connection, Ended};
use crate::frame::{self, Assembly, Control, Frame};

const READ_BYTES: usize = 256 << 10;

/// Time for which a stopped connection waits until the peer closes it, too.
const REST_WITHIN: Duration = Duration::from_millis(500);

type Stream = ReadHalf<TlsStream<TcpStream>>;

pub(super) async fn run(connection: &Connection, stream: &mut Stream, mut buffer: BytesMut) -> Ended {
    let mut assembly = Assembly::default();
    loop {
        if let Err(ended) = frame::drain(&mut buffer, |frame| take(connection, &mut assembly, frame)) {
            return ended;
        }
        buffer.reserve(READ_BYTES);
        match stream.read_buf(&mut buffer).await {
            Ok(0) => return Ended::Closed,
            Ok(count) => connection.counters.received(count as u64),
            // The stream ended without a TLS goodbye, as that of a killed process does.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ended::Closed,
            Err(error) => return error.into(),
        }
    }
}

/// Reads what the peer still sends after our goodbye, until it closes the connection.
///
/// A socket that is closed with bytes in it resets the connection, and the peer's kernel then drops what the peer has not read:
/// the goodbye.
pub(super) async fn discard_rest(stream: &mut Stream) {
    let mut rest = BytesMut::with_capacity(READ_BYTES);
    let until_closed = async {
        while matches!(stream.read_buf(&mut rest).await, Ok(count) if count > 0) {
            rest.clear();
        }
    };
    drop(tokio::time::timeout(REST_WITHIN, until_closed).await);
}

fn take(connection: &Connection, assembly: &mut Assembly, frame: Frame<'_>) -> Result<(), Ended> {
    let session = &connection.session;
    let whole = match frame {
        Frame::First { start, head, part } => {
            let begun = session.begin(connection.id, &start)?;
            assembly.first(start, head, part, begun)?
        }
        Frame::Next { number, part } => assembly.next(number, part)?,
        Frame::Control(control) => return take_control(connection, &control),
        Frame::Greeting(_) => return Err(Ended::Unexpected),
    };
    if let Some((start, message)) = whole {
        session.arrived(connection.id, start.number, start.after, message)?;
    }
    Ok(())
}

fn take_control(connection: &Connection, control: &Control) -> Result<(), Ended> {
    let heartbeat = &connection.heartbeat;
    match control {
        Control::Acknowledgement(news) => connection.session.acknowledged(connection.id, news)?,
        Control::Ping(number) => {
            heartbeat.pong_due.store(number.wrapping_add(1), Ordering::Relaxed);
            heartbeat.wake.notify_one();
        }
        Control::Pong(number) => {
            if let Some(took) = heartbeat.answered(*number, Instant::now()) {
                connection.counters.round_trip(took);
            }
            connection.counters.answered();
            connection.session.trust(connection.id);
        }
        Control::Goodbye => return Err(Ended::Goodbye),
        _ => return Err(Ended::Unexpected),
    }
    Ok(())
}
