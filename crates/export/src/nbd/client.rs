//! The client of a connection, as far as its socket shows.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::net::sockopt;

use crate::nbd::limits::Limits;

/// Silence on a network connection after which it is probed. A client may be idle for days, but a host that has lost power must
/// not keep a place.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 6;

/// Groups of 16 bits of an IPv6 address that name its network.
const NETWORK_SEGMENTS: usize = 4;

/// The kind of a connection's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// A process of this host, over a unix socket.
    Local,
    /// A host, connected over TCP.
    Host(IpAddr),
}

impl Client {
    pub(super) fn of(socket: &OwnedFd) -> Self {
        let peer = rustix::net::getpeername(socket).ok().flatten();
        match peer.map(SocketAddr::try_from) {
            // One host is one client, in whichever form its address came.
            Some(Ok(address)) => Self::Host(address.ip().to_canonical()),
            _ => Self::Local,
        }
    }

    /// Returns whether two addresses count as one client: with IPv6 a host can have any number of addresses in its network.
    pub(super) fn counts_as(self, other: Self) -> bool {
        match (self, other) {
            (Self::Host(IpAddr::V6(one)), Self::Host(IpAddr::V6(other))) => {
                one.segments()[..NETWORK_SEGMENTS] == other.segments()[..NETWORK_SEGMENTS]
            }
            _ => self == other,
        }
    }

    /// Returns whether two clients compete for places. Local processes and other hosts are counted separately, so that strangers
    /// on the network never keep a guest of this host out.
    pub(super) fn shares_places_with(self, other: Self) -> bool {
        (self == Self::Local) == (other == Self::Local)
    }

    /// Returns whether this client may have one more connection than those that `count` finds. A unix socket's mode decides who
    /// may open it, so its clients have a common limit only.
    pub(super) fn may_have_another(self, limits: &Limits, count: impl FnOnce() -> usize) -> bool {
        match self {
            Self::Local => true,
            Self::Host(_) => count() < limits.connections_per_host_max,
        }
    }

    /// Sets up a socket for this client. If the system refuses an option, the client is served all the same.
    pub(super) fn prepare(self, socket: &OwnedFd) {
        if self == Self::Local {
            return;
        }
        // Replies are sent whole, so there is nothing to wait for.
        let _ = sockopt::set_tcp_nodelay(socket, true);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE);
        let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT);
    }
}

/// A process of this host that has connected by a unix socket, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientProcess {
    /// Its process id when it connected. **N.B.** Ids are reused: compare the user as well.
    pub id: i32,
    /// The user that it ran as then.
    pub user: u32,
}

impl ClientProcess {
    /// Gets it from the kernel. Returns `None` for a network connection, or for a process of a name space that has no ids here.
    ///
    /// It belongs to the socket, and stays true of one that another server has passed on.
    pub(super) fn of(socket: &OwnedFd) -> Option<Self> {
        // rustix cannot be used: its process id cannot be the 0 that the kernel reports for an invisible process.
        let told = getsockopt(socket, PeerCredentials).ok()?;
        (told.pid() > 0).then(|| Self { id: told.pid(), user: told.uid() })
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn host(address: &str) -> Client {
        Client::Host(address.parse().unwrap())
    }

    #[test]
    fn a_host_is_one_client_by_its_address_or_its_network() {
        assert!(host("192.0.2.1").counts_as(host("192.0.2.1")));
        assert!(!host("192.0.2.1").counts_as(host("192.0.2.2")));
        assert!(host("2001:db8:1:2::3").counts_as(host("2001:db8:1:2:ffff::4")));
        assert!(!host("2001:db8:1:2::3").counts_as(host("2001:db8:1:3::3")));
        assert!(!host("192.0.2.1").counts_as(Client::Local));
        assert!(Client::Local.counts_as(Client::Local));
    }

    #[test]
    fn the_kernel_says_which_process_has_connected() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let _client = UnixStream::connect(folder.path().join("socket")).unwrap();
        let accepted = listener.accept().unwrap().0.into();
        let us = rustix::process::getpid().as_raw_nonzero().get();
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(ClientProcess::of(&accepted), Some(ClientProcess { id: us, user }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(ClientProcess::of(&listener.accept().unwrap().0.into()), None);
    }

    #[test]
    fn processes_of_this_host_share_the_common_limit_only() {
        let limits = Limits { connections_per_host_max: 2, ..Limits::STANDARD };
        assert!(host("192.0.2.1").may_have_another(&limits, || 1));
        assert!(!host("192.0.2.1").may_have_another(&limits, || 2));
        assert!(Client::Local.may_have_another(&limits, || 60));
    }
}
