//! Accepts connections. Anybody can open one, so everything is limited until the other side is known.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsStream};

use crate::connection::Connection;
use crate::context::Context;
use crate::dial::{self, ends};
use crate::frame::{Control, Hello, Refusal};
use crate::greeting::{HandshakeError, RefusalReason, Wire};
use crate::invitation;
use crate::session::{Counters, Joining};
use crate::socket;

/// Pause when the system has no more descriptors: accepting again at once would only burn the processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(crate) async fn run(context: Arc<Context>, listener: TcpListener) {
    let strangers = Arc::clone(&context.strangers);
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Beyond the limits a connection is closed without a message, which would cost more than it is worth.
        if let Some(admitted) = strangers.admit(from.ip(), &context) {
            context.runtime.spawn(serve(Arc::clone(&context), stream, from, admitted));
        }
    }
}

async fn serve(context: Arc<Context>, stream: TcpStream, from: SocketAddr, admitted: Admitted) {
    let limits = &context.settings.limits;
    let handshake = timeout(limits.handshake_max, shake_hands(&context, stream));
    let handshake = tokio::select! {
        biased;
        handshake = handshake => handshake.unwrap_or(Err(HandshakeError::Timeout)),
        // The caller was too slow. Nothing is logged: a caller that fills the places would fill the log.
        () = admitted.gives_way() => return,
    };
    drop(admitted);
    match handshake {
        Ok(Some((wire, connection))) => {
            context.strangers.trust(from.ip());
            let ended = connection.run(wire.stream, wire.buffer, limits.silence_max).await;
            tracing::info!(%from, %ended, "a connection ended");
        }
        Ok(None) => {}
        Err(error) => {
            tracing::info!(%from, %error, "a connection was refused");
            context.note_refusal(format!("{from}: {error}"));
        }
    }
}

/// Finds out who calls and why. Returns `None` if the connection needs nothing more.
async fn shake_hands(
    context: &Arc<Context>,
    stream: TcpStream,
) -> Result<Option<(Wire, Connection)>, HandshakeError> {
    socket::prepare(&stream, context.settings.limits.silence_max)?;
    let acceptor = TlsAcceptor::from(Arc::clone(&context.tls.server));
    let mut wire = Wire::new(TlsStream::Server(acceptor.accept(stream).await?))?;
    wire.greet(context.settings.versions).await?;
    match wire.read_control().await {
        Ok(Control::Hello(hello)) => join_session(context, wire, hello).await.map(Some),
        Ok(Control::Join(request)) => invitation::welcome(context, wire, request).await.map(|()| None),
        Err(HandshakeError::Refused { by, refusal: RefusalReason::WrongHost { expected } }) => {
            Err(HandshakeError::WrongHostCalled { by, expected, this: context.id() })
        }
        Err(error) => Err(error),
        Ok(_) => {
            wire.refuse(Refusal::Protocol).await;
            Err(HandshakeError::Unexpected)
        }
    }
}

async fn join_session(
    context: &Arc<Context>,
    mut wire: Wire,
    hello: Hello,
) -> Result<(Wire, Connection), HandshakeError> {
    let came = wire.host;
    let Some(peer) = context.peers.find(came) else {
        wire.refuse(Refusal::UnknownHost).await;
        return Err(HandshakeError::UnknownHost { came });
    };
    let session = context.session(came).shared;
    if session.connection_count() >= context.settings.limits.connections_per_peer_max {
        wire.refuse(Refusal::TooMany).await;
        return Err(HandshakeError::TooMany { came });
    }
    let id = hello.connection;
    let (welcome, offer) = session.welcome(hello, context.fresh_incarnation());
    wire.write(&Control::Welcome(welcome)).await?;
    let Control::Ready = wire.read_control().await? else { return Err(HandshakeError::Unexpected) };
    let (local, remote) = ends(&wire);
    let counters = Arc::new(Counters::new(local, remote));
    let stop = Arc::new(Notify::new());
    let joining = Joining {
        connection: id,
        counters: Arc::clone(&counters),
        stop: Arc::clone(&stop),
        is_inbound: true,
    };
    if !session.settle(&offer, joining)? {
        return Err(HandshakeError::Superseded);
    }
    // A peer that has called is called from here after it is gone. It may be unable to call, or run elsewhere by then.
    session.dial(&peer, || dial::start(context, &session, &peer));
    Ok((wire, Connection::new(id, session, counters, stop, context.settings.compression)))
}

/// Connections whose other side is not known yet, by address, on all listeners.
///
/// A part of the places is reserved for the addresses of known hosts, so strangers cannot keep these out. When an address has all
/// its places, its oldest connection gives way to the next: a silent one keeps nobody out.
#[derive(Default)]
pub(crate) struct Strangers {
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    by_network: HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>,
    next: u64,
    unknown: usize,
    all: usize,
    trusted: HashSet<IpAddr>,
}

/// Addresses that are remembered: more than any host has peers.
const TRUSTED_MAX: usize = 4096;

impl Strangers {
    fn admit(self: &Arc<Self>, from: IpAddr, context: &Context) -> Option<Admitted> {
        let (limits, network) = (&context.settings.limits, network(from));
        let mut places = self.lock();
        if let Some(taken) = places.by_network.get_mut(&network)
            && taken.len() >= limits.unauthenticated_per_address_max
            && let Some((_, oldest)) = taken.pop_first()
        {
            oldest.notify_one();
        }
        if places.all >= limits.unauthenticated_max {
            return None;
        }
        let open = limits.unauthenticated_max.saturating_sub(limits.unauthenticated_reserved);
        let is_known = places.trusted.contains(&network);
        // This lookup is made only when it matters.
        let is_known = is_known || places.unknown >= open && context.peers.is_at(from);
        if !is_known && places.unknown >= open {
            return None;
        }
        let (number, wanted) = (places.next, Arc::<Notify>::default());
        places.next += 1;
        places.by_network.entry(network).or_default().insert(number, Arc::clone(&wanted));
        places.all += 1;
        places.unknown += usize::from(!is_known);
        Some(Admitted { strangers: Arc::clone(self), network, number, wanted, is_known })
    }

    fn trust(&self, from: IpAddr) {
        let mut places = self.lock();
        if places.trusted.len() >= TRUSTED_MAX {
            places.trusted.clear();
        }
        places.trusted.insert(network(from));
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns what counts as one address: with IPv6 a host can have any number of addresses in its network.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [one, two, three, four, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(one, two, three, four, 0, 0, 0, 0))
        }
        address @ IpAddr::V4(_) => address,
    }
}

/// A stranger's place, which is freed when this is dropped.
struct Admitted {
    strangers: Arc<Strangers>,
    network: IpAddr,
    number: u64,
    wanted: Arc<Notify>,
    is_known: bool,
}

impl Admitted {
    /// Resolves when another connection from the same address needs the place.
    async fn gives_way(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut places = self.strangers.lock();
        places.all -= 1;
        places.unknown -= usize::from(!self.is_known);
        if let Some(taken) = places.by_network.get_mut(&self.network) {
            taken.remove(&self.number);
            if taken.is_empty() {
                places.by_network.remove(&self.network);
            }
        }
    }
}
