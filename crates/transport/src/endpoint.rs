//! An endpoint: a host's end of all its sessions. It listens, dials, and owns the threads for both.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime};

use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;

use crate::context::Context;
use crate::credit::WINDOW_BYTES_MIN;
use crate::dial;
use crate::host_id::HostId;
use crate::invitation::{self, JoinError, Token};
use crate::listening::Listening;
use crate::peer::{Peer, Peers};
use crate::receiver::Receiver;
use crate::session::Session;
use crate::settings::Settings;
use crate::tls::Tls;

const STOP_WITHIN: Duration = Duration::from_secs(1);

/// Interval of the checks whether all were.
const STOP_POLL: Duration = Duration::from_millis(5);

/// A host's end of all its sessions; one for each daemon.
///
/// It has threads of its own, named `transport`: TLS, checksums and compression run there and never on a caller's thread. None of
/// its methods needs an async runtime around it. Dropping it stops it.
pub struct Endpoint {
    context: Arc<Context>,
    /// `None` once it has been stopped.
    runtime: Mutex<Option<Runtime>>,
    listening: Vec<Arc<Listening>>,
}

impl Endpoint {
    /// Starts an endpoint: it listens on all addresses that exist, on the others as soon as they do, and can dial.
    ///
    /// # Errors
    ///
    /// A limit is too low, or the system gives no threads.
    pub fn start(
        settings: Settings,
        peers: Arc<dyn Peers>,
        receiver: Arc<dyn Receiver>,
    ) -> Result<Self, StartError> {
        if settings.limits.window_bytes < WINDOW_BYTES_MIN {
            return Err(StartError::Window { window_bytes: settings.limits.window_bytes });
        }
        let tls = Tls::new(&settings.identity).map_err(|source| StartError::Tls { source })?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(settings.limits.threads.max(1))
            .thread_name("transport")
            .enable_all()
            .build()
            .map_err(|source| StartError::Threads { source })?;
        let listen = settings.listen.clone();
        let context = Context::new(settings, tls, peers, receiver, runtime.handle().clone());
        let listening = listen.into_iter().map(|address| Listening::begin(&context, address)).collect();
        Ok(Self { context, runtime: Mutex::new(Some(runtime)), listening })
    }

    /// Returns the addresses that it listens on, in the order of the settings; a port of 0 is replaced by the real one.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listening.iter().filter_map(|listening| listening.state().ok()).collect()
    }

    /// Returns the addresses that it cannot listen on yet, each with the reason.
    #[must_use]
    pub fn unheard(&self) -> Vec<(SocketAddr, String)> {
        self.listening.iter().filter_map(|listening| listening.state().err()).collect()
    }

    /// Returns the identifier of this host.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.context.id()
    }

    /// Returns the session with a peer.
    ///
    /// The peer is dialled from the first call on, and again whenever a connection is lost. The links given here
    /// replace those of the last call. If the peer dials too, its connections belong to the same session; then the host
    /// with the smaller identifier dials.
    #[must_use]
    pub fn session(&self, peer: &Peer) -> Session {
        let session = self.context.session(peer.id);
        session.shared.dial(peer, || dial::start(&self.context, &session.shared, peer));
        session
    }

    /// Returns the session with a peer, if there is one. It neither begins nor dials one.
    #[must_use]
    pub fn existing_session(&self, peer: HostId) -> Option<Session> {
        self.context.existing_session(peer)
    }

    /// Closes the session with a peer: queued messages are dropped, and nothing more is delivered.
    ///
    /// The peer sees the next session as another life of this host. To keep it from dialling, remove it from
    /// [`Peers`] first.
    ///
    /// **N.B.** It waits until the receiver has returned from all its calls for this session. The caller must hold no lock
    /// that the receiver takes.
    pub fn close(&self, peer: HostId) {
        if let Some(session) = self.context.take_session(peer) {
            session.close("the session was closed");
        }
    }

    /// Ends the invitations that a host has redeemed. Call it before the host is removed from [`Peers`], so that it cannot come
    /// back by one of them.
    pub fn end_invitations_of(&self, peer: HostId) {
        self.context.invitations.lock().unwrap_or_else(PoisonError::into_inner).end_of(peer);
    }

    /// Invites one host to be paired with this one, within a time.
    ///
    /// # Errors
    ///
    /// This host does not listen, so nobody could reach it, or too many invitations are open.
    pub fn invite(&self, lifetime: Duration) -> Result<Token, JoinError> {
        invitation::invite(&self.context, &self.addresses(), SystemTime::now(), lifetime)
    }

    /// Redeems another host's invitation: proves its secret there, and learns the identity of that host.
    ///
    /// It blocks until the other host has answered, and has stored this host. The caller stores the returned peer. The same host
    /// may redeem the same token again until it expires or the host is removed.
    ///
    /// # Errors
    ///
    /// The token has expired, the host cannot be reached, or another host answers.
    pub fn join(&self, token: &Token) -> Result<Peer, JoinError> {
        self.joining(token.clone()).wait()
    }

    /// Begins to redeem another host's invitation, for callers that must not hold the endpoint while they wait.
    #[must_use]
    pub fn joining(&self, token: Token) -> PendingJoin {
        let context = Arc::clone(&self.context);
        let addresses = self.addresses();
        let (answer, answered) = mpsc::channel();
        self.context.runtime.spawn(async move {
            // The caller may be gone.
            drop(answer.send(invitation::join(&context, &addresses, &token).await));
        });
        PendingJoin { answered }
    }

    /// Returns the last connections that were refused, oldest first, each with its reason, for the status.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        self.context.refused()
    }

    /// Stops the endpoint: says goodbye to all peers, and ends all threads. Later requests have no effect.
    ///
    /// Like [`Endpoint::close`], it waits for the receiver.
    pub fn stop(&self) {
        let runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(runtime) = runtime else { return };
        let sessions = self.context.take_all_sessions();
        sessions.iter().for_each(|session| session.close("this host is being stopped"));
        let farewell = async move {
            let is_gone = async {
                while sessions.iter().any(|session| Arc::strong_count(session) > 1) {
                    sleep(STOP_POLL).await;
                }
            };
            drop(tokio::time::timeout(STOP_WITHIN, is_gone).await);
        };
        // A runtime cannot be ended on a thread of another runtime, which this one may be.
        let ended = std::thread::Builder::new().name("transport-stop".into()).spawn(move || {
            runtime.block_on(farewell);
            runtime.shutdown_timeout(STOP_WITHIN);
        });
        match ended {
            // A panic of that thread has been printed; nothing is left to end.
            Ok(thread) => drop(thread.join()),
            Err(error) => tracing::warn!(%error, "failed to start a thread to stop the transport"),
        }
    }
}

/// An invitation that is being redeemed.
pub struct PendingJoin {
    answered: mpsc::Receiver<Result<Peer, JoinError>>,
}

impl PendingJoin {
    /// Blocks until the other host has answered, or the endpoint is stopped.
    ///
    /// # Errors
    ///
    /// The same as those of [`Endpoint::join`].
    pub fn wait(self) -> Result<Peer, JoinError> {
        // The task ends without an answer only when the endpoint is stopped.
        self.answered.recv().unwrap_or(Err(JoinError::Stopped))
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why an endpoint cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The window is smaller than the minimum.
    #[error("a window of {window_bytes} bytes is too small: it takes at least {WINDOW_BYTES_MIN}")]
    Window {
        /// The window in the settings, in bytes.
        window_bytes: u64,
    },
    /// The identity cannot be used for TLS.
    #[error("failed to use the identity for TLS")]
    Tls {
        /// The error that TLS reported.
        #[source]
        source: rustls::Error,
    },
    /// The system gives no threads.
    #[error("failed to start threads")]
    Threads {
        /// The error that the system reported.
        #[source]
        source: io::Error,
    },
}
