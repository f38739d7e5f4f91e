//! The bytes of one connection, encrypted or not.
//!
//! ```text
//!   negotiation, exchange
//!        │ receive, send
//!   Stream::Plain ──────────────► engine       as if this layer were not there
//!   Stream::Tls ──► Session ────► engine       encrypts and decrypts between the two
//! ```

mod tls;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::engine::{Engine, Interrupt, Received};
use block::{Buffer, IoError, IoFuture};
use rustls::ServerConnection;

use tls::Session;
pub(super) use tls::TlsFailure;

/// The bytes of one connection.
#[derive(Clone)]
pub(super) enum Stream {
    /// As they are on the socket.
    Plain(Rc<dyn Engine>, Arc<OwnedFd>),
    /// Encrypted on the socket.
    Tls(Rc<Session>),
}

impl Stream {
    /// Receives what is there, at most the length of `buffer`; the count is 0 at the end of the stream.
    pub(super) fn receive(&self, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        match self {
            Self::Plain(engine, socket) => engine.receive(socket, buffer),
            Self::Tls(session) => {
                let session = Rc::clone(session);
                Box::pin(async move { session.receive(buffer).await })
            }
        }
    }

    /// The same, and on a plain stream only until `interrupt` is raised: [`Engine::receive_unless`].
    pub(super) fn receive_unless(
        &self,
        interrupt: &Interrupt,
        buffer: Buffer,
    ) -> IoFuture<'static, Received> {
        match self {
            Self::Plain(engine, socket) => engine.receive_unless(interrupt, socket, buffer),
            Self::Tls(_) => {
                let receiving = self.receive(buffer);
                Box::pin(async move { receiving.await.map(|(buffer, count)| Received::Bytes(buffer, count)) })
            }
        }
    }

    /// Sends all of `pieces`, in order, and only one after the other: the next when this has ended.
    pub(super) fn send(&self, pieces: Vec<Buffer>) -> IoFuture<'static, ()> {
        match self {
            Self::Plain(engine, socket) => engine.send(socket, pieces),
            Self::Tls(session) => {
                let session = Rc::clone(session);
                Box::pin(async move { session.send(&pieces).await })
            }
        }
    }

    /// Lets the client begin TLS on a plain stream, of which every byte so far has been used.
    pub(super) async fn begin_tls(&self, connection: ServerConnection) -> Result<Self, TlsFailure> {
        let Self::Plain(engine, socket) = self else { return Err(TlsFailure::Begun) };
        let session = Session::new(Rc::clone(engine), Arc::clone(socket), connection);
        session.handshake().await?;
        Ok(Self::Tls(Rc::new(session)))
    }

    /// Tells the client that nothing follows, where that can be told apart from a connection that was cut.
    pub(super) async fn end(&self) -> Result<(), IoError> {
        match self {
            Self::Plain(..) => Ok(()),
            Self::Tls(session) => session.end().await,
        }
    }

    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self, Self::Tls(_))
    }
}
