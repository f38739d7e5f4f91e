//! Serves the API over TLS. The port is open to a network: until a client's key is known, everything is limited
//! and no request is read.
//!
//! ```text
//!   accept ─► place for a handshake ─► TLS, within HANDSHAKE_WAIT_MAX ─► place of a connection ─► requests (`server`)
//!              │ HANDSHAKES_MAX in all: the oldest gives way             └─ the key's rights, checked for each
//!              │ and a limit for one network: its oldest gives way
//!              └─ not known: an alert
//! ```
//! Unknown and known clients have places of their own, apart from those of the API's socket.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use transport::HostId;
use transport::pinned::{Acceptor, Refused, ServerStream};

use super::Caller;
use super::places::{Place, Places};
use super::server::{ACCEPT_RETRY, BoundedStream, Server};
use crate::audit::By;
use crate::grants::{Granted, Grants, Standing};

const HANDSHAKES_MAX: usize = 64;
/// The number of these from one network: an address, or with IPv6 a /64.
const HANDSHAKES_PER_NETWORK_MAX: usize = 16;
/// The longest duration of a handshake: two round trips over a very slow line.
const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long a refused client may take to close the connection, and how many of its bytes are read meanwhile. Closing a
/// connection with unread bytes would discard the alert.
const FAREWELL_MAX: Duration = Duration::from_millis(500);
const FAREWELL_BYTES_MAX: usize = 64 << 10;
/// The time between two log lines about unknown keys, because any client can cause them.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Serves connections of clients with known keys, until `stop` resolves; returns when the remaining ones have got their answers.
pub(crate) async fn serve(
    listener: TcpListener,
    acceptor: Acceptor,
    grants: Arc<Grants>,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let (handshakes, strangers) = (Places::with(HANDSHAKES_MAX), Arc::<Strangers>::default());
    let connections = GracefulShutdown::new();
    let shared = Arc::new(Shared { acceptor, grants, server: Server::new(router), log: Log::default() });
    // Dropping the sender signals the end.
    let (ending, serving) = watch::channel(());
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection of the API over TLS");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let stranger = strangers.admit(from.ip());
        let handshake = tokio::select! {
            handshake = handshakes.take() => handshake,
            () = &mut stop => break,
        };
        let newcomer = Newcomer { stream, from, stranger, handshake };
        let (shared, watcher, serving) = (Arc::clone(&shared), connections.watcher(), serving.clone());
        tokio::spawn(async move {
            let Some((stream, key, place)) = shared.let_in(newcomer, serving).await else { return };
            let stream = BoundedStream::new(stream, Arc::clone(&place));
            let grants = Arc::clone(&shared.grants);
            shared.server.converse(stream, place, watcher, move || Caller(grants.who(key))).await;
        });
    }
    drop((listener, ending));
    connections.shutdown().await;
}

/// A connection of an unknown client.
struct Newcomer {
    stream: TcpStream,
    from: SocketAddr,
    stranger: Stranger,
    handshake: Arc<Place>,
}

struct Shared {
    acceptor: Acceptor,
    grants: Arc<Grants>,
    server: Server,
    log: Log,
}

impl Shared {
    /// Identifies a client, and gives it a place if its key is known. Until then it gives way to new connections.
    async fn let_in(
        &self,
        newcomer: Newcomer,
        mut serving: watch::Receiver<()>,
    ) -> Option<(ServerStream<TcpStream>, HostId, Arc<Place>)> {
        let Newcomer { stream, from, stranger, handshake } = newcomer;
        // Answers are complete, so delaying them costs a round trip.
        let _ = stream.set_nodelay(true);
        let known = async {
            let Ok(accepted) = timeout(HANDSHAKE_WAIT_MAX, self.acceptor.accept(stream)).await else {
                tracing::debug!(%from, "a handshake takes too long");
                return None;
            };
            match accepted {
                Ok((stream, key)) => Some((stream, key, self.server.place().await)),
                Err(mut refused) => {
                    self.log.refused(from, &refused);
                    let _ = timeout(FAREWELL_MAX, farewell(&mut refused.stream)).await;
                    None
                }
            }
        };
        tokio::select! {
            biased;
            known = known => known,
            () = handshake.wanted() => None,
            () = stranger.gives_way() => None,
            _ = serving.changed() => None,
        }
    }
}

async fn farewell(stream: &mut TcpStream) {
    // The client may have disconnected.
    let _ = stream.shutdown().await;
    let mut rest = stream.take(FAREWELL_BYTES_MAX as u64);
    let mut bytes = [0; 1024];
    while rest.read(&mut bytes).await.is_ok_and(|length| length > 0) {}
}

impl From<&Granted> for By {
    fn from(who: &Granted) -> Self {
        let role = match who.standing {
            Standing::Invited => None,
            Standing::Has(role) => Some(role),
        };
        Self::Grant { grant: who.name.clone(), key: migration::HostId(who.key.0), role }
    }
}

/// Logs unknown keys, at a limited rate.
#[derive(Default)]
struct Log(Mutex<Option<Instant>>);

impl Log {
    fn refused<S>(&self, from: SocketAddr, refused: &Refused<S>) {
        let Some(key) = refused.key else {
            return tracing::debug!(%from, error = %refused.error, "a handshake has failed");
        };
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            tracing::info!(%from, %key, "a client of the API is not known by its key: sterna access grant NAME --role ROLE --key …");
        }
    }
}

/// The running handshakes by network.
#[derive(Default)]
struct Strangers(Mutex<Newcomers>);

#[derive(Default)]
struct Newcomers {
    next: u64,
    by_network: HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>,
}

/// A running handshake, which is counted until it is dropped.
struct Stranger {
    all: Arc<Strangers>,
    network: IpAddr,
    number: u64,
    wanted: Arc<Notify>,
}

impl Strangers {
    /// Admits a handshake. If its network has reached the limit, its oldest one gives way, so that silent connections do not
    /// block others from the same address.
    fn admit(self: &Arc<Self>, from: IpAddr) -> Stranger {
        let network = transport::network(from);
        let mut newcomers = self.lock();
        let (number, wanted) = (newcomers.next, Arc::<Notify>::default());
        newcomers.next += 1;
        let taken = newcomers.by_network.entry(network).or_default();
        if taken.len() >= HANDSHAKES_PER_NETWORK_MAX
            && let Some((_, oldest)) = taken.pop_first()
        {
            oldest.notify_one();
        }
        taken.insert(number, Arc::clone(&wanted));
        Stranger { all: Arc::clone(self), network, number, wanted }
    }

    fn lock(&self) -> MutexGuard<'_, Newcomers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stranger {
    /// Resolves when another connection from the same network needs the place.
    async fn gives_way(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut newcomers = self.all.lock();
        if let Some(taken) = newcomers.by_network.get_mut(&self.network) {
            taken.remove(&self.number);
            if taken.is_empty() {
                newcomers.by_network.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_oldest_of_a_network_gives_way_and_another_network_keeps_its_own() {
        let strangers = Arc::<Strangers>::default();
        let admit = |from: &str| strangers.admit(from.parse().unwrap());
        let gives_way = |stranger: &Stranger| stranger.gives_way().now_or_never().is_some();
        let other = admit("192.0.2.2");
        let taken: Vec<_> = (0..HANDSHAKES_PER_NETWORK_MAX).map(|_| admit("192.0.2.1")).collect();
        assert!(!taken.iter().any(gives_way));
        let newcomer = admit("::ffff:192.0.2.1");
        assert_eq!(taken.iter().map(gives_way).filter(|gives| *gives).count(), 1);
        let _another = admit("192.0.2.1");
        assert!(gives_way(&taken[1]) && !gives_way(&taken[2]) && !gives_way(&newcomer) && !gives_way(&other));
        let networks: Vec<_> =
            (0..HANDSHAKES_PER_NETWORK_MAX).map(|i| admit(&format!("2001:db8::{i:x}"))).collect();
        let _last = admit("2001:db8::ffff");
        assert!(gives_way(&networks[0]), "a network has as many addresses as it likes");
        drop((other, taken, newcomer, _another, networks, _last));
        assert!(strangers.lock().by_network.is_empty(), "nothing is left of who has gone");
    }
}
