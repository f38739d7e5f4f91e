//! Dials a peer: one task for each connection makes it, runs it, and makes it again when it is lost.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsConnector, TlsStream};

use crate::connection::Connection;
use crate::context::{Context, random_number};
use crate::frame::{Control, Refusal};
use crate::greeting::{HandshakeError, Wire};
use crate::host_id::HostId;
use crate::links;
use crate::peer::{Link, Peer};
use crate::session::{Counters, Joining, Shared, Slot};
use crate::socket;
use crate::tls;

/// Wait after the first failure, and the longest wait. A returning peer is noticed soon, and calling an absent one costs little.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(3);

pub(crate) fn start(
    context: &Arc<Context>,
    session: &Arc<Shared>,
    peer: &Peer,
) -> Vec<(Arc<Slot>, JoinHandle<()>)> {
    let anywhere = [Link::new("any address")];
    let own = if context.settings.links.is_empty() { &anywhere[..] } else { &context.settings.links };
    let mut diallers = Vec::new();
    for pair in links::pair(own, &peer.links) {
        let (Some(source), Some(target)) = (own.get(pair.source), peer.links.get(pair.target)) else {
            continue;
        };
        for _ in 0..context.settings.limits.connections_per_pair.max(1) {
            let slot = Arc::new(Slot::new(source.address.clone(), target.address.clone()));
            let dialler = Dialler {
                context: Arc::clone(context),
                session: Arc::clone(session),
                slot: Arc::clone(&slot),
                source: source.address.parse().ok().map(|address: SocketAddr| address.ip()),
                target: target.address.clone(),
            };
            diallers.push((slot, context.runtime.spawn(dialler.run())));
        }
    }
    diallers
}

struct Dialler {
    context: Arc<Context>,
    session: Arc<Shared>,
    slot: Arc<Slot>,
    /// Local address of the connection; `None`: the kernel chooses.
    source: Option<IpAddr>,
    target: String,
}

impl Dialler {
    async fn run(self) {
        let mut backoff = BACKOFF_MIN;
        loop {
            self.wait_for_turn().await;
            let limits = &self.context.settings.limits;
            let result =
                timeout(limits.handshake_max, self.connect()).await.unwrap_or(Err(HandshakeError::Timeout));
            match result {
                Ok((wire, connection)) => {
                    self.slot.up();
                    backoff = BACKOFF_MIN;
                    // The connection has its own task, so it says goodbye in order after the dialler was ended.
                    let work = connection.run(wire.stream, wire.buffer, limits.silence_max);
                    let ended = match self.context.runtime.spawn(work).await {
                        Ok(ended) => ended.to_string(),
                        Err(error) => error.to_string(),
                    };
                    tracing::info!(peer = %self.session.peer.short(), target = self.target, %ended, "a connection ended");
                    self.slot.failed(ended);
                }
                Err(error) => {
                    tracing::debug!(peer = %self.session.peer.short(), target = self.target, %error, "dialling failed");
                    self.slot.failed(error.to_string());
                }
            }
            // Half of the wait is random: two hosts that dial each other do not stay in step.
            sleep(backoff / 2 + backoff.mul_f64((random_number() % 512) as f64 / 1024.0)).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn wait_for_turn(&self) {
        loop {
            let changed = self.session.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.session.leaves_dialling_to_peer(self.context.id()) {
                return;
            }
            self.slot.left_to_peer();
            changed.await;
        }
    }

    async fn connect(&self) -> Result<(Wire, Connection), HandshakeError> {
        let mut wire = call(&self.context, self.source, &self.target, self.session.peer).await?;
        let (local, remote) = ends(&wire);
        let (hello, snapshot) = self.session.hello(random_number());
        wire.write(&Control::Hello(hello.clone())).await?;
        let Control::Welcome(welcome) = wire.read_control().await? else {
            return Err(HandshakeError::Unexpected);
        };
        let counters = Arc::new(Counters::new(local, remote));
        let stop = Arc::new(Notify::new());
        let joining = Joining {
            connection: hello.connection,
            counters: Arc::clone(&counters),
            stop: Arc::clone(&stop),
            is_inbound: false,
        };
        if !self.session.accept(&hello, snapshot, &welcome, joining)? {
            return Err(HandshakeError::Superseded);
        }
        let session = Arc::clone(&self.session);
        let compression = self.context.settings.compression;
        let connection = Connection::new(hello.connection, session, counters, stop, compression);
        wire.write(&Control::Ready).await?;
        Ok((wire, connection))
    }
}

/// Connects to an address and checks that the expected host answers.
pub(crate) async fn call(
    context: &Context,
    source: Option<IpAddr>,
    target: &str,
    expected: HostId,
) -> Result<Wire, HandshakeError> {
    let resolved = lookup_host(target).await.ok().and_then(|mut addresses| addresses.next());
    let address = resolved.ok_or_else(|| HandshakeError::Resolve { address: target.to_owned() })?;
    let stream = socket::connect(source, address).await?;
    socket::prepare(&stream, context.settings.limits.silence_max)?;
    let name = tls::server_name().map_err(std::io::Error::other)?;
    let connector = TlsConnector::from(Arc::clone(&context.tls.client));
    let stream = TlsStream::Client(connector.connect(name, stream).await?);
    let mut wire = Wire::new(stream)?;
    wire.greet(context.settings.versions).await?;
    let came = wire.host;
    if came != expected {
        wire.refuse(Refusal::WrongHost { expected: expected.0 }).await;
        return Err(HandshakeError::WrongHost { expected, came });
    }
    Ok(wire)
}

pub(crate) fn ends(wire: &Wire) -> (String, String) {
    let stream = wire.stream.get_ref().0;
    let text =
        |address: std::io::Result<SocketAddr>| address.map_or_else(|_| "?".into(), |it| it.to_string());
    (text(stream.local_addr()), text(stream.peer_addr()))
}
