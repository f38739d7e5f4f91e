//! How a client's requests reach its daemon: by a unix socket, or by a [`Connect`] of the program.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use crate::Address;

/// An open connection with a daemon.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Makes connections with a daemon that is not reached by a unix socket. It is displayed as the daemon's address.
///
/// An error of the kind [`io::ErrorKind::PermissionDenied`], at connecting or at a read, means that the daemon was
/// reached and refuses this client.
pub trait Connect: fmt::Display + Send + Sync {
    /// Makes a connection for one request.
    fn connect(&self) -> Connecting<'_>;

    /// Returns the value of the requests' `Host` header.
    fn host(&self) -> String;
}

#[derive(Clone)]
pub(super) enum Way {
    Unix(Address),
    Other(Arc<dyn Connect>),
}

impl Way {
    pub(super) async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Unix(address) => Ok(Box::new(UnixStream::connect(address.path()).await?)),
            Self::Other(other) => other.connect().await,
        }
    }

    pub(super) fn host(&self) -> String {
        match self {
            // The address is a file, but HTTP/1.1 needs a name.
            Self::Unix(_) => "sterna".to_owned(),
            Self::Other(other) => other.host(),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(address) => address.fmt(f),
            Self::Other(other) => other.fmt(f),
        }
    }
}
