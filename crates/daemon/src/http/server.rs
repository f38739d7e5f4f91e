//! Serves the connections of the API and of the page: a limited number, with time limits.
//!
//! ```text
//!   accept ──► place (at most CONNECTIONS_MAX; an idle one gives way to a new one, see `places`)
//!                └─► head within HEAD_WAIT_MAX ──► body (its limits: `http`) ──► answer, taken within ANSWER_WAIT_MAX
//!                      ▲                                                              │
//!                      └────────────────────── the next request ◄─────────────────────┘
//! ```

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::http::Extensions;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Sleep, sleep};

use super::Caller;
use super::places::{Place, Places};
use crate::audit::By;

/// The longest time for the head of a request, counted from the connection or the previous answer: an idle client must not keep
/// a place that another needs.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes: method, path and headers. Usual ones have some hundred.
const HEAD_BYTES_MAX: usize = 16 << 10;
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// The longest time that a client may read nothing of an answer.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(10);
/// The pause after a failed accept: most often the process has no descriptors left.
pub(super) const ACCEPT_RETRY: Duration = Duration::from_millis(100);

pub(crate) trait Listener {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Returns the next connection, and its peer as far as the kernel knows it.
    fn next(&self) -> impl Future<Output = io::Result<(Self::Stream, Option<By>)>>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<(UnixStream, Option<By>)> {
        let (stream, _) = self.accept().await?;
        let peer = stream.peer_cred().ok();
        let by = peer.map(|peer| By::Process { uid: peer.uid(), gid: peer.gid(), pid: peer.pid() });
        Ok((stream, by))
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Option<By>)> {
        let (stream, _) = self.accept().await?;
        Ok((stream, None))
    }
}

/// The client of a connection, which is attached to its requests.
pub(super) trait Asker {
    /// Adds the client to a request's extensions.
    fn mark(&self, extensions: &mut Extensions);
}

impl Asker for Option<By> {
    fn mark(&self, extensions: &mut Extensions) {
        if let Some(by) = self {
            extensions.insert(by.clone());
        }
    }
}

/// A client over TLS. Its requests are marked as such even if its key was revoked.
impl Asker for Caller {
    fn mark(&self, extensions: &mut Extensions) {
        if let Some(who) = &self.0 {
            extensions.insert(By::from(who));
        }
        extensions.insert(self.clone());
    }
}

pub(super) struct Server {
    places: Arc<Places>,
    http: http1::Builder,
    router: Router,
}

/// Serves connections until `stop` resolves; returns when the remaining ones have got their answers.
pub(crate) async fn serve(listener: impl Listener, router: Router, stop: impl Future<Output = ()>) {
    let (server, connections) = (Server::new(router), GracefulShutdown::new());
    let mut stop = pin!(stop);
    loop {
        let (stream, by, place) = tokio::select! {
            accepted = accept(&listener, &server) => accepted,
            () = &mut stop => break,
        };
        let stream = BoundedStream::new(stream, Arc::clone(&place));
        tokio::spawn(server.converse(stream, place, connections.watcher(), move || by.clone()));
    }
    // From here on new connections are refused.
    drop(listener);
    connections.shutdown().await;
}

impl Server {
    pub(super) fn new(router: Router) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT_MAX);
        http.max_header_size(HEAD_BYTES_MAX).max_buf_size(BUFFER_BYTES_MAX);
        Self { places: Places::new(), http, router }
    }

    /// Returns a place for a connection, that of the oldest idle one if there is no other.
    pub(super) async fn place(&self) -> Arc<Place> {
        self.places.take().await
    }

    /// Answers the requests of a connection until its end, or until `watcher` ends it. Determines the client for each request.
    pub(super) fn converse<W: Asker>(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        place: Arc<Place>,
        watcher: Watcher,
        who: impl Fn() -> W + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let routed = TowerToHyperService::new(self.router.clone());
        let service = {
            let place = Arc::clone(&place);
            service_fn(move |mut request: hyper::Request<_>| {
                who().mark(request.extensions_mut());
                let asked = place.is_asked();
                let answer = routed.call(request);
                async move {
                    let answer = answer.await;
                    drop(asked);
                    answer
                }
            })
        };
        let connection = watcher.watch(self.http.serve_connection(TokioIo::new(stream), service));
        async move {
            tokio::select! {
                biased;
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%error, "a connection of the API broke off");
                },
                () = place.wanted() => tracing::debug!("an idle connection of the API makes room"),
            }
        }
    }
}

async fn accept<L: Listener>(listener: &L, server: &Server) -> (L::Stream, Option<By>, Arc<Place>) {
    loop {
        match listener.next().await {
            Ok((stream, by)) => return (stream, by, server.place().await),
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection of the API");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// A connection that fails when its client reads nothing for too long, and releases its place when it is dropped.
pub(super) struct BoundedStream<S> {
    stream: S,
    /// The deadline for the client to read something; `None` while nothing is to be sent.
    untaken: Option<Pin<Box<Sleep>>>,
    place: Arc<Place>,
}

impl<S> BoundedStream<S> {
    pub(super) fn new(stream: S, place: Arc<Place>) -> Self {
        Self { stream, untaken: None, place }
    }

    /// Fails if a write has waited for too long.
    fn check<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.untaken = None;
            return written;
        }
        let deadline = self.untaken.get_or_insert_with(|| Box::pin(sleep(ANSWER_WAIT_MAX)));
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    /// Waiting for a request with nothing left to send means being idle.
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_pending() && self.untaken.is_none() {
            self.place.waits();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Flushed data was written to the TLS layer, and may wait there.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.check(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check(context, ended)
    }
}
