//! The bytes of one connection, encrypted or not.
//!
//! ```text
//!   negotiation, exchange
//!        │ receive, send
//!   Stream::Plain ──────────────► engine       passes bytes through
//!   Stream::Tls ──► Session ────► engine       encrypts and decrypts
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

#[derive(Clone)]
pub(super) enum Stream {
    Plain(Rc<dyn Engine>, Arc<OwnedFd>),
    Tls(Rc<Session>),
}

impl Stream {
    /// Receives the available bytes, at most the length of `buffer`; the count is 0 at the end of the stream.
    pub(super) fn receive(&self, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        match self {
            Self::Plain(engine, socket) => engine.receive(socket, buffer),
            Self::Tls(session) => {
                let session = Rc::clone(session);
                Box::pin(async move { session.receive(buffer).await })
            }
        }
    }

    /// Receives, on a plain stream only until `interrupt` is raised: [`Engine::receive_unless`].
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

    /// Sends all of `pieces`, in order. The next send must begin only after this has ended.
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

    /// Tells the client that nothing follows, where that differs from a cut connection.
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
