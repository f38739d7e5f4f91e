//! A small web server: it answers each request with the number of requests answered before.
//!
//! The number is in the VM's memory, so a client sees that the same VM answers. A connection lasts until its client closes it.
//! Requests may be sent ahead of answers; only the end of a request is read.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Limit of connections: the demo has one.
const CONNECTIONS_MAX: usize = 16;
const CHUNK_BYTES: usize = 4096;
const END: &[u8] = b"\r\n\r\n";

/// Serves on `port` of all addresses, on its own threads, until the program ends.
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
                // A broken connection is its client's affair.
                let _ = answer(stream, &answered);
                connections.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    Ok(())
}

fn answer(mut stream: TcpStream, answered: &AtomicU64) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut chunk = [0; CHUNK_BYTES];
    // Bytes of the request's end that have been seen.
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
