//! A link between two hosts: a TCP proxy on loopback that can be cut, silent, slow or late.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Interval at which a silent direction checks its state.
const LOOK: Duration = Duration::from_millis(20);
const DELAY: Duration = Duration::from_millis(150);
const PIECE_BYTES: usize = 64 << 10;
/// Rate of a slow link, in bytes a second.
const SLOW_BYTES_PER_S: f64 = 10e6;
/// Unused time that may be made up for later, because timers are exact only to a millisecond.
const BURST_TIME: Duration = Duration::from_millis(5);

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Data passes at once.
    Up,
    /// All connections are closed, also new ones.
    Cut,
    /// Connections stay open, but no data passes.
    BlackHole,
    /// Data passes at 10 MB a second in each direction.
    Slow,
    /// Data passes with a delay of 150 ms.
    Late,
}

/// A TCP proxy. Dropping it closes its connections.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Rate of each direction; `None`: unlimited.
    bytes_per_s: Option<f64>,
    now: Mutex<Now>,
    /// When each direction has sent all of its data.
    free_at: [Mutex<Instant>; 2],
}

/// The part that may change while it is in use.
#[derive(Debug)]
struct Now {
    /// The target; `None`: connections are refused.
    target: Option<SocketAddr>,
    state: LinkState,
    carried_bytes: u64,
    open: Vec<TcpStream>,
}

impl Link {
    /// Makes a link that leads to an address of this machine, as fast as loopback.
    ///
    /// # Errors
    /// If nothing can be listened on.
    pub fn to(target: SocketAddr) -> anyhow::Result<Self> {
        let link = Self::new(None)?;
        link.lead_to(target);
        Ok(link)
    }

    /// Makes a link with this rate in each direction. It has no target before [`Self::lead_to`].
    ///
    /// # Errors
    /// If nothing can be listened on.
    pub fn new(bytes_per_s: Option<f64>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen for the link")?;
        let address = listener.local_addr()?;
        let now = Now { target: None, state: LinkState::Up, carried_bytes: 0, open: Vec::new() };
        let free_at = [Instant::now(); 2].map(Mutex::new);
        let shared = Arc::new(Shared { bytes_per_s, now: Mutex::new(now), free_at });
        let accepting = Arc::clone(&shared);
        // The thread ends with the process, which has few links.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                accepting.connect(near);
            }
        });
        Ok(Self { address, shared })
    }

    /// Returns the address of its near end.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the target of the link.
    pub fn lead_to(&self, target: SocketAddr) {
        self.shared.now().target = Some(target);
    }

    /// Returns the bytes that it has carried, in both directions.
    pub fn carried_bytes(&self) -> u64 {
        self.shared.now().carried_bytes
    }

    /// Changes the state of the link.
    pub fn set(&self, state: LinkState) {
        let mut now = self.shared.now();
        now.state = state;
        if state == LinkState::Cut {
            for stream in now.open.drain(..) {
                // The connection may have ended.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.set(LinkState::Cut);
    }
}

impl Shared {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(self: &Arc<Self>, near: TcpStream) {
        let Some(target) = self.now().target else { return };
        if self.now().state == LinkState::Cut {
            return;
        }
        let Ok(far) = TcpStream::connect(target) else { return };
        let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { return };
        let mut now = self.now();
        // The link may have been cut meanwhile.
        if now.state == LinkState::Cut {
            return;
        }
        for stream in [&near, &far] {
            // The link also works without this option, only slower.
            let _ = stream.set_nodelay(true);
            now.open.extend(stream.try_clone().ok());
        }
        drop(now);
        for (direction, (from, to)) in [(near, far), (far_too, near_too)].into_iter().enumerate() {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.carry(from, to, direction));
        }
    }

    fn carry(&self, mut from: TcpStream, mut to: TcpStream, direction: usize) {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(length @ 1..) = from.read(&mut piece) {
            while self.now().state == LinkState::BlackHole {
                thread::sleep(LOOK);
            }
            let bytes_per_s = match self.now().state {
                LinkState::Slow => Some(SLOW_BYTES_PER_S),
                LinkState::Late => {
                    thread::sleep(DELAY);
                    self.bytes_per_s
                }
                _ => self.bytes_per_s,
            };
            if let Some(bytes_per_s) = bytes_per_s {
                self.pace(direction, Duration::from_secs_f64(length as f64 / bytes_per_s));
            }
            if to.write_all(&piece[..length]).is_err() {
                break;
            }
            self.now().carried_bytes += length as u64;
        }
        for stream in [from, to] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits until a direction, which all connections share, has carried a piece that takes `time`.
    fn pace(&self, direction: usize, time: Duration) {
        let now = Instant::now();
        let mut free_at = self.free_at[direction].lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST_TIME).unwrap_or(now);
        *free_at = (*free_at).max(earliest) + time;
        let carried_at = *free_at;
        drop(free_at);
        thread::sleep(carried_at.saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a link to an echo server.
    fn link(bytes_per_s: f64) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Link::new(Some(bytes_per_s)).unwrap();
        link.lead_to(listener.local_addr().unwrap());
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut stream));
            }
        });
        link
    }

    fn echo(stream: &TcpStream, bytes: usize) -> std::io::Result<()> {
        let sent = vec![7; bytes];
        let mut received = vec![0; bytes];
        let (mut output, mut input) = (stream, stream);
        thread::scope(|scope| {
            let sending = scope.spawn(|| output.write_all(&sent));
            input.read_exact(&mut received)?;
            sending.join().unwrap()
        })?;
        assert_eq!(received, sent);
        Ok(())
    }

    #[test]
    fn what_is_cut_is_closed_and_can_be_made_again() {
        let link = link(1e9);
        let first = TcpStream::connect(link.address()).unwrap();
        echo(&first, 1 << 20).unwrap();
        link.set(LinkState::Cut);
        echo(&first, 1).unwrap_err();
        let second = TcpStream::connect(link.address()).unwrap();
        echo(&second, 1).unwrap_err();
        link.set(LinkState::Up);
        let third = TcpStream::connect(link.address()).unwrap();
        echo(&third, 1 << 20).unwrap();
    }

    #[test]
    fn all_connections_share_the_rate() {
        let link = link(10e6);
        let streams = [(); 2].map(|()| TcpStream::connect(link.address()).unwrap());
        let began = Instant::now();
        thread::scope(|scope| {
            for stream in &streams {
                scope.spawn(|| echo(stream, 1 << 20).unwrap());
            }
        });
        // 2 MiB at 10 MB/s, less the burst.
        assert!(began.elapsed() > Duration::from_millis(190), "{:?}", began.elapsed());
    }
}
