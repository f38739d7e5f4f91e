//! A small web server: each request on a connection is answered with how many have been answered before.
//!
//! The number is one of the VM's memory, so whoever asks sees that it is the same VM that answers. A connection
//! is kept until its client closes it, and requests may be sent ahead of answers. Nothing of a request is read but its end.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Connections at a time: the demo has one.
const CONNECTIONS_MAX: usize = 16;
/// Bytes that are read at a time.
const CHUNK_BYTES: usize = 4096;
/// What a request ends with.
const END: &[u8] = b"\r\n\r\n";

/// Serves on `port` of all addresses, on threads of its own, for as long as the program lives.
///
/// # Errors
/// If the port cannot be listened on.
pub(crate) fn start(port: u16) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    std::thread::spawn(move || {
        let (answered, connections) = (Arc::<AtomicU64>::default(), Arc::<AtomicUsize>::default());
        for stream in listener.incoming().flatten() {
            if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (answered, connections) = (Arc::clone(&answered), Arc::clone(&connections));
            std::thread::spawn(move || {
                // What breaks a connection is its client's affair.
                let _ = answer(stream, &answered);
                connections.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    Ok(())
}

/// Answers the requests of a connection, in order.
fn answer(mut stream: TcpStream, answered: &AtomicU64) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut chunk = [0; CHUNK_BYTES];
    // How much of the end of a request has been seen.
    let mut matched = 0;
    loop {
        let length = stream.read(&mut chunk)?;
        if length == 0 {
            return Ok(());
        }
        for byte in &chunk[..length] {
            matched = match *byte {
                byte if byte == END[matched] => matched + 1,
                b'\r' => 1,
                _ => 0,
            };
            if matched == END.len() {
                matched = 0;
                let number = answered.fetch_add(1, Ordering::Relaxed);
                let body = format!("{number:010}\n");
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                stream.write_all((head + &body).as_bytes())?;
            }
        }
    }
}
