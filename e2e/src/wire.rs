//! A wire between two hosts: a TCP proxy on loopback that can be cut, or swallow everything.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;

/// How often a direction that is black-holed looks whether it still is.
const LOOK: Duration = Duration::from_millis(20);
/// By how much what is late is late, in each direction.
const DELAY: Duration = Duration::from_millis(150);
/// Bytes that are taken at a time.
const PIECE_BYTES: usize = 64 << 10;

/// What passes in a second when it is slow.
const SLOW_BYTES_PER_S: f64 = 10e6;

/// What becomes of what is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// It arrives.
    Whole,
    /// Connections are closed, and new ones too.
    Cut,
    /// Connections stay, and nothing arrives.
    BlackHole,
    /// It arrives, 10 MB a second in each direction.
    Slow,
    /// It arrives late, each piece by 150 ms.
    Late,
}

/// A TCP proxy.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    state: AtomicU8,
    carried: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

impl Wire {
    /// Makes a wire that leads to an address of this machine.
    ///
    /// # Errors
    /// If nothing can be listened on.
    pub fn to(target: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen for the wire")?;
        let address = listener.local_addr()?;
        let state = AtomicU8::new(State::Whole as u8);
        let shared = Arc::new(Shared { target, state, carried: AtomicU64::new(0), open: Mutex::default() });
        let accepting = Arc::clone(&shared);
        // Ends with the process: a test has few of them.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if accepting.state() != State::Cut {
                    accepting.connect(near);
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that it has carried so far, both ways.
    pub fn carried_bytes(&self) -> u64 {
        self.shared.carried.load(Ordering::SeqCst)
    }

    /// Changes what becomes of what is sent.
    pub fn set(&self, state: State) {
        self.shared.state.store(state as u8, Ordering::SeqCst);
        if state == State::Cut {
            let mut open = self.shared.open.lock().unwrap_or_else(PoisonError::into_inner);
            for stream in open.drain(..) {
                // It may have ended.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Shared {
    fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Whole,
            1 => State::Cut,
            2 => State::BlackHole,
            3 => State::Slow,
            _ => State::Late,
        }
    }

    fn connect(self: &Arc<Self>, near: TcpStream) {
        let Ok(far) = TcpStream::connect(self.target) else { return };
        let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { return };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.extend([&near, &far].into_iter().filter_map(|stream| stream.try_clone().ok()));
        drop(open);
        for (from, to) in [(near, far), (far_too, near_too)] {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.carry(from, to));
        }
    }

    fn carry(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(length @ 1..) = from.read(&mut piece) {
            while self.state() == State::BlackHole {
                thread::sleep(LOOK);
            }
            if self.state() == State::Slow {
                thread::sleep(Duration::from_secs_f64(length as f64 / SLOW_BYTES_PER_S));
            }
            if self.state() == State::Late {
                thread::sleep(DELAY);
            }
            if to.write_all(&piece[..length]).is_err() {
                break;
            }
            self.carried.fetch_add(length as u64, Ordering::SeqCst);
        }
        for stream in [from, to] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
