//! Reads a connection: decodes frames, assembles messages, and gives them to the session.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, ReadHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::{Connection, Ended};
use crate::frame::{self, Assembly, Control, Frame};

const READ_BYTES: usize = 256 << 10;

pub(super) async fn run(
    connection: &Connection,
    mut stream: ReadHalf<TlsStream<TcpStream>>,
    mut buffer: BytesMut,
) -> Ended {
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
