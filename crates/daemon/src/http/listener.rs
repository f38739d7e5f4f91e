//! A listener that takes a bounded number of connections; the others wait to be accepted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// API connections at a time: many times the people and scripts that look at one host, and few enough for the files
/// that a process may have open.
const CONNECTIONS_MAX: usize = 256;

/// A unix listener with at most [`CONNECTIONS_MAX`] connections.
pub(crate) struct BoundedListener {
    listener: UnixListener,
    free: Arc<Semaphore>,
}

/// A connection that gives its place back when it is dropped.
pub(crate) struct BoundedStream {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

impl BoundedListener {
    /// Bounds a listener.
    pub(crate) fn new(listener: UnixListener) -> Self {
        Self { listener, free: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&self.free).acquire_owned().await else { continue };
            // Its own `accept` waits a little when files run out, and tries again.
            let (stream, address) = Listener::accept(&mut self.listener).await;
            return (BoundedStream { stream, _place: place }, address);
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl AsyncRead for BoundedStream {
    /// Passthrough.
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for BoundedStream {
    /// Passthrough.
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    /// Passthrough.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Passthrough.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
