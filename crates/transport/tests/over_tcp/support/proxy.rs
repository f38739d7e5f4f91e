//! A TCP proxy between two hosts, which closes connections, lets them go silent, or lets them go silent one way.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Pass,
    /// The bytes vanish, both ways; the connection stays open.
    BlackHole,
    /// Bytes towards the target vanish.
    HalfOpen,
    Close,
    /// A large packet towards the target vanishes, again and again, and so does everything behind it.
    LargeVanishThere,
    /// The same towards the dialler.
    LargeVanishBack,
}

/// Bytes of a small packet.
const SMALL_BYTES: usize = 1400;
/// A read of more bytes has a large packet among them: no flight of the handshake before that is as long.
const LARGE_BYTES: usize = 6000;

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    connections: Arc<Mutex<Vec<watch::Sender<Fate>>>>,
    new: Arc<Mutex<Fate>>,
    _runtime: Runtime,
}

impl Proxy {
    pub(crate) fn start(target: SocketAddr) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let connections: Arc<Mutex<Vec<watch::Sender<Fate>>>> = Arc::default();
        let new = Arc::new(Mutex::new(Fate::Pass));
        let (made, fate_of_new) = (Arc::clone(&connections), Arc::clone(&new));
        runtime.spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (sender, fate) = watch::channel(*fate_of_new.lock().unwrap());
                made.lock().unwrap().push(sender);
                if let Ok(far) = TcpStream::connect(target).await {
                    tokio::spawn(carry(near, far, fate));
                }
            }
        });
        Self { address, connections, new, _runtime: runtime }
    }

    /// Decides the fate of one live connection, chosen by a number. Returns `false` if there is none.
    pub(crate) fn hit(&self, number: usize, fate: Fate) -> bool {
        let mut connections = self.connections.lock().unwrap();
        connections.retain(|connection| connection.receiver_count() > 0);
        let count = connections.len();
        if count > 0 {
            connections[number % count].send_replace(fate);
        }
        count > 0
    }

    pub(crate) fn hit_all(&self, fate: Fate, new: Fate) {
        *self.new.lock().unwrap() = new;
        for connection in self.connections.lock().unwrap().iter() {
            connection.send_replace(fate);
        }
    }
}

async fn carry(near: TcpStream, far: TcpStream, mut fate: watch::Receiver<Fate>) {
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let closed = {
        let mut fate = fate.clone();
        async move { drop(fate.wait_for(|fate| *fate == Fate::Close).await) }
    };
    fate.mark_unchanged();
    tokio::select! {
        () = closed => {}
        () = pump(near_read, far_write, fate.clone(), &[Fate::BlackHole, Fate::HalfOpen], Fate::LargeVanishThere) => {}
        () = pump(far_read, near_write, fate, &[Fate::BlackHole], Fate::LargeVanishBack) => {}
    }
}

/// Carries bytes one way, and drops them while the fate is one of those given.
async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    fate: watch::Receiver<Fate>,
    vanish: &[Fate],
    large_vanish: Fate,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut is_stuck = false;
    while let Ok(mut count @ 1..) = from.read(&mut buffer).await {
        let is_gone = is_stuck || vanish.contains(&fate.borrow());
        if count > LARGE_BYTES && *fate.borrow() == large_vanish {
            is_stuck = true;
            count = SMALL_BYTES;
        }
        if !is_gone && to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
