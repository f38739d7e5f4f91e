//! TLS for the API: both sides are known by their keys, as between hosts, and no authority is involved.
//!
//! ```text
//!   client                                     server
//!     knows the server's key   ── TLS 1.3 ──►   knows the clients' keys
//! ```
//! Unlike between hosts (`tls.rs`), the key is checked *within* the handshake: an unknown client gets an alert, and reaches
//! nothing that reads requests. This module knows nothing of the requests. The caller limits the number and time of connections.

mod token;

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::{AlertDescription, CertificateError, Error};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::host_id::HostId;
use crate::identity::Identity;
use crate::tls;

pub use self::token::{AccessToken, GarbledAccessToken};

/// The protocol's name in the handshake (ALPN), which HTTP clients offer.
const PROTOCOL: &[u8] = b"http/1.1";

/// The server's side of a connection.
pub type ServerStream<S> = tokio_rustls::server::TlsStream<S>;
/// The client's side of a connection.
pub type ClientStream<S> = tokio_rustls::client::TlsStream<S>;

/// Begins TLS with clients whose keys are known.
#[derive(Clone)]
pub struct Acceptor(TlsAcceptor);

/// Begins TLS with a server whose key is known.
#[derive(Clone)]
pub struct Connector(TlsConnector);

/// Why a client is refused.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<S> {
    /// The key that it has shown, if any.
    pub key: Option<HostId>,
    /// The error of the handshake.
    pub error: io::Error,
    /// The connection. Closing it while bytes are unread takes the alert away from the client.
    pub stream: S,
}

impl Acceptor {
    /// Makes the acceptor of the server `identity`, which accepts the keys for which `knows` returns `true`.
    ///
    /// # Errors
    /// The identity cannot be used for TLS.
    pub fn new(
        identity: &Identity,
        knows: impl Fn(HostId) -> bool + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let judge =
            move |key| if knows(key) { Ok(()) } else { Err(WrongKey { key, is_server: false }.into()) };
        let config = tls::server_config(identity, PROTOCOL, Box::new(judge)).map_err(io::Error::other)?;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Accepts a client, and returns its key. The future may be dropped.
    ///
    /// # Errors
    /// [`Refused`], after the client was informed.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<(ServerStream<S>, HostId), Refused<S>> {
        let accepted = self.0.accept(stream).into_fallible().await;
        let stream =
            accepted.map_err(|(error, stream)| Refused { key: refused_key(&error), error, stream })?;
        match tls::host_of(stream.get_ref().1.peer_certificates()) {
            Some(key) => Ok((stream, key)),
            // The verifier lets nobody through without a key.
            None => {
                let error = io::ErrorKind::InvalidData.into();
                Err(Refused { key: None, error, stream: stream.into_inner().0 })
            }
        }
    }
}

impl Connector {
    /// Makes the connector of the client `identity`, for the server that has the key `server`.
    ///
    /// # Errors
    /// The identity cannot be used for TLS.
    pub fn new(identity: &Identity, server: HostId) -> io::Result<Self> {
        let judge =
            move |key| if key == server { Ok(()) } else { Err(WrongKey { key, is_server: true }.into()) };
        let config = tls::client_config(identity, PROTOCOL, Box::new(judge)).map_err(io::Error::other)?;
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Begins TLS. The first read shows whether the server knows this client.
    ///
    /// # Errors
    /// The server has another key, or speaks no TLS.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<ClientStream<S>> {
        let name = tls::server_name().map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}

/// Returns whether the error means that the server does not know the client's key.
#[must_use]
pub fn is_refusal(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|cause| cause.downcast_ref::<Error>());
    matches!(
        error,
        Some(Error::AlertReceived(
            AlertDescription::AccessDenied
                | AlertDescription::CertificateRequired
                | AlertDescription::CertificateUnknown
                | AlertDescription::BadCertificate
        ))
    )
}

/// Returns the key of the called server, if it is not the expected one.
#[must_use]
pub fn other_server(error: &io::Error) -> Option<HostId> {
    wrong_key(error).filter(|wrong| wrong.is_server).map(|wrong| wrong.key)
}

fn refused_key(error: &io::Error) -> Option<HostId> {
    wrong_key(error).filter(|wrong| !wrong.is_server).map(|wrong| wrong.key)
}

fn wrong_key(error: &io::Error) -> Option<&WrongKey> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::InvalidCertificate(CertificateError::Other(other)) => other.0.downcast_ref(),
        _ => None,
    }
}

#[derive(Debug)]
struct WrongKey {
    key: HostId,
    is_server: bool,
}

impl fmt::Display for WrongKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key {} is not known", self.key)
    }
}

impl std::error::Error for WrongKey {}

impl From<WrongKey> for Error {
    fn from(wrong: WrongKey) -> Self {
        CertificateError::Other(rustls::OtherError(Arc::new(wrong))).into()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Runs a handshake between `client`, which expects the key `expected`, and `server`, which knows `known`.
    async fn check(
        server: &Identity,
        known: HostId,
        client: &Identity,
        expected: HostId,
    ) -> (Result<HostId, Option<HostId>>, io::Result<u8>) {
        let (near, far) = tokio::io::duplex(1 << 16);
        let acceptor = Acceptor::new(server, move |key| key == known).unwrap();
        let connector = Connector::new(client, expected).unwrap();
        let serve = async {
            match acceptor.accept(far).await {
                Ok((mut stream, key)) => {
                    stream.write_all(&[7]).await.unwrap();
                    stream.flush().await.unwrap();
                    Ok(key)
                }
                Err(refused) => Err(refused.key),
            }
        };
        let call = async { connector.connect(near).await?.read_u8().await };
        tokio::join!(serve, call)
    }

    #[tokio::test]
    async fn only_keys_that_are_known_are_let_in_and_only_the_expected_server_is_spoken_to() {
        let [server, client, other] = ["s", "c", "o"].map(|name| Identity::in_memory(name).unwrap());
        let (let_in, read) = check(&server, client.id(), &client, server.id()).await;
        assert_eq!((let_in, read.unwrap()), (Ok(client.id()), 7));
        let (let_in, read) = check(&server, client.id(), &other, server.id()).await;
        assert_eq!(let_in, Err(Some(other.id())), "it is known who was refused");
        assert!(is_refusal(&read.unwrap_err()));
        let (let_in, read) = check(&other, client.id(), &client, server.id()).await;
        assert_eq!(let_in, Err(None));
        let error = read.unwrap_err();
        assert_eq!((other_server(&error), is_refusal(&error)), (Some(other.id()), false));
    }

    #[tokio::test]
    async fn a_key_is_made_of_a_secret_always_the_same() {
        let [one, again] = [[5; 32]; 2].map(|secret| Identity::of_secret("invited", &secret).unwrap());
        let other = Identity::of_secret("invited", &[6; 32]).unwrap();
        assert!(one.id() == again.id() && one.id() != other.id());
        let server = Identity::in_memory("s").unwrap();
        let (let_in, read) = check(&server, one.id(), &again, server.id()).await;
        assert_eq!((let_in, read.unwrap()), (Ok(one.id()), 7));
    }
}
