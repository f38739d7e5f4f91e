//! Who is at the other end of a connection, as far as its socket tells.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;

use crate::nbd::limits::Limits;

/// A network connection on which nothing has been heard for so long is asked whether the client is still there: it may
/// be idle for days, but a host that has lost its power must not keep a place for ever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Time between such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Questions without an answer after which the client is gone.
const KEEPALIVE_COUNT: u32 = 6;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// A process of this host, over a unix socket.
    Local,
    /// A host, over TCP.
    Host(IpAddr),
}

impl Client {
    pub(super) fn of(socket: &OwnedFd) -> Self {
        let peer = rustix::net::getpeername(socket).ok().flatten();
        match peer.map(SocketAddr::try_from) {
            // One host is one client, whichever way it wrote its address.
            Some(Ok(address)) => Self::Host(address.ip().to_canonical()),
            _ => Self::Local,
        }
    }

    /// Tells whether this client may have one more connection than those that `count` finds.
    ///
    /// Who may open a unix socket is trusted by its mode, so its clients share the common limit only.
    pub(super) fn may_have_another(self, limits: &Limits, count: impl FnOnce() -> usize) -> bool {
        match self {
            Self::Local => true,
            Self::Host(_) => count() < limits.connections_per_host_max,
        }
    }

    /// Sets up a socket for this client. What the system refuses is no reason to refuse the client.
    pub(super) fn prepare(self, socket: &OwnedFd) {
        if self == Self::Local {
            return;
        }
        // Replies go out whole, so there is nothing to wait for.
        let _ = sockopt::set_tcp_nodelay(socket, true);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE);
        let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT);
    }
}

impl fmt::Display for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => formatter.write_str("a process of this host"),
            Self::Host(address) => address.fmt(formatter),
        }
    }
}
