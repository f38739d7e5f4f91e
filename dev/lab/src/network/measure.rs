//! The throughput of plain TCP over a link, and the time of a round trip: the reference of all other measurements.
//!
//! The sender writes and the receiver reads, with the kernel's own buffers, up to the namespace's limits ([`Namespace`]). Nothing
//! is tuned, and nothing is read from a disk.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::NetworkError;
use super::namespace::Namespace;
use super::rate::BitRate;

const CHUNK_BYTES: usize = 1 << 20;
const ROUND_TRIP_MAX: Duration = Duration::from_secs(10);

/// A connection that carries as much as it can, or a given number of bytes. Dropping it ends it.
#[derive(Debug)]
pub struct Flow {
    streams: [TcpStream; 2],
    received_bytes: Arc<AtomicU64>,
    /// The sender, then the receiver; empty once they have been joined.
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Flow {
    /// Connects `source` to `address`, an address of `target`, and begins to send. Ends after `bytes`, if given.
    pub fn start(
        source: &Namespace,
        target: &Namespace,
        address: Ipv4Addr,
        bytes: Option<u64>,
    ) -> Result<Self, NetworkError> {
        let [sender, receiver] = connect(source, target, address)?;
        let clone =
            |stream: &TcpStream| stream.try_clone().map_err(NetworkError::system("share a connection"));
        let streams = [clone(&sender)?, clone(&receiver)?];
        let received_bytes = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&received_bytes);
        let threads = vec![
            std::thread::spawn(move || send(&sender, bytes.unwrap_or(u64::MAX))),
            std::thread::spawn(move || receive(&receiver, &counter)),
        ];
        Ok(Self { streams, received_bytes, threads })
    }

    /// Returns the bytes of payload that the receiver has read.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether everything was received, or the connection failed: then [`Flow::wait`] returns at once.
    pub fn has_ended(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits until everything was received; returns the number of bytes.
    pub fn wait(mut self) -> Result<u64, NetworkError> {
        for thread in self.threads.drain(..) {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            ended.map_err(NetworkError::system("carry bytes over a connection"))?;
        }
        Ok(self.received_bytes())
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        for stream in &self.streams {
            // The connection may have ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // The shutdown above makes it fail.
            let _ = thread.join();
        }
    }
}

/// Returns the payload rate of one connection to each of `addresses` together, after `warm_up`, during `window`.
pub fn throughput(
    source: &Namespace,
    target: &Namespace,
    addresses: &[Ipv4Addr],
    warm_up: Duration,
    window: Duration,
) -> Result<BitRate, NetworkError> {
    let flows = addresses.iter().map(|&address| Flow::start(source, target, address, None));
    let flows = flows.collect::<Result<Vec<_>, _>>()?;
    let received = || flows.iter().map(Flow::received_bytes).sum::<u64>();
    std::thread::sleep(warm_up);
    let (begun, before) = (Instant::now(), received());
    std::thread::sleep(window);
    let (bytes, seconds) = (received() - before, begun.elapsed().as_secs_f64());
    Ok(BitRate::bits((bytes as f64 * 8.0 / seconds) as u64))
}

/// Sends a byte there and back, `count` times, one after the other; returns the time of each. Fails if one
/// takes longer than 10 s.
pub fn round_trips(
    source: &Namespace,
    target: &Namespace,
    address: Ipv4Addr,
    count: usize,
) -> Result<Vec<Duration>, NetworkError> {
    let [mut near, mut far] = connect(source, target, address)?;
    let failed = || NetworkError::system("send a byte there and back");
    for stream in [&near, &far] {
        stream.set_nodelay(true).map_err(failed())?;
        stream.set_read_timeout(Some(ROUND_TRIP_MAX)).map_err(failed())?;
    }
    let echo = std::thread::spawn(move || {
        let mut byte = [0];
        for _ in 0..count {
            far.read_exact(&mut byte)?;
            far.write_all(&byte)?;
        }
        io::Result::Ok(())
    });
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        near.write_all(&[1]).map_err(failed())?;
        near.read_exact(&mut [0]).map_err(failed())?;
        times.push(begun.elapsed());
    }
    let echoed = echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    echoed.map_err(failed())?;
    Ok(times)
}

/// Returns the median of `times`; zero without times.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Returns both ends of a connection: the source's and the target's.
fn connect(
    source: &Namespace,
    target: &Namespace,
    address: Ipv4Addr,
) -> Result<[TcpStream; 2], NetworkError> {
    let failed = || NetworkError::system("connect two hosts of the lab");
    let listener = target.run(|| TcpListener::bind((address, 0)))?.map_err(failed())?;
    let local = listener.local_addr().map_err(failed())?;
    let near = source.run(|| TcpStream::connect(local))?.map_err(failed())?;
    let (far, _) = listener.accept().map_err(failed())?;
    Ok([near, far])
}

fn send(mut stream: &TcpStream, mut bytes: u64) -> io::Result<()> {
    let chunk = vec![0x5a; CHUNK_BYTES];
    while bytes > 0 {
        let length = bytes.min(CHUNK_BYTES as u64);
        stream.write_all(&chunk[..length as usize])?;
        bytes -= length;
    }
    stream.shutdown(Shutdown::Write)
}

fn receive(mut stream: &TcpStream, received_bytes: &AtomicU64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(()),
            length => received_bytes.fetch_add(length as u64, Ordering::Relaxed),
        };
    }
}
