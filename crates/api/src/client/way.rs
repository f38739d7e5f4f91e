//! How a client's requests reach its daemon: by a unix socket, or however the program has it connect.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use crate::Address;

/// A connection with a daemon.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Makes connections with a daemon that is not reached by a unix socket; it is written as people name the daemon.
///
/// An error of the kind [`io::ErrorKind::PermissionDenied`], of connecting or of a read, says that the daemon is reached and lets
/// this client do nothing.
pub trait Connect: fmt::Display + Send + Sync {
    /// Makes one, for one request.
    fn connect(&self) -> Connecting<'_>;

    /// What requests call the host.
    fn host(&self) -> String;
}

/// How requests reach a daemon.
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
            // The address is a file; HTTP/1.1 wants a name all the same.
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
