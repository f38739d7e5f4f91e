//! Who is at the other end of a connection, as far as its socket tells.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::net::sockopt;

use crate::nbd::limits::Limits;

/// A network connection on which nothing has been heard for so long is asked whether the client is still there: it may
/// be idle for days, but a host that has lost its power must not keep a place for ever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Time between such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Questions without an answer after which the client is gone.
const KEEPALIVE_COUNT: u32 = 6;

/// Groups of 16 bits of an IPv6 address that name its network.
const NETWORK_SEGMENTS: usize = 4;

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

    /// Tells whether two addresses count as one client: with IPv6 a host has as many as it likes in its network.
    pub(super) fn counts_as(self, other: Self) -> bool {
        match (self, other) {
            (Self::Host(IpAddr::V6(one)), Self::Host(IpAddr::V6(other))) => {
                one.segments()[..NETWORK_SEGMENTS] == other.segments()[..NETWORK_SEGMENTS]
            }
            _ => self == other,
        }
    }

    /// Tells whether two clients take places from each other: processes of this host and other hosts are counted apart, so
    /// that strangers on the network never keep a guest of this host out.
    pub(super) fn shares_places_with(self, other: Self) -> bool {
        (self == Self::Local) == (other == Self::Local)
    }

    /// Tells whether this client may have one more connection than those that `count` finds.
    ///
    /// Who may open a unix socket is trusted by its mode, so its clients have a common limit only.
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

/// A process of this host that has connected by a unix socket, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientProcess {
    /// Its number when it connected. **N.B.** A number is given again: compare the user as well.
    pub id: i32,
    /// The user that it ran as then.
    pub user: u32,
}

impl ClientProcess {
    /// Asks the kernel; `None`: it came over the network, or from a name space whose processes have no numbers here.
    ///
    /// That is of the socket, and stays true of one that another server has passed on.
    pub(super) fn of(socket: &OwnedFd) -> Option<Self> {
        // Not by rustix: its number of a process cannot be the 0 that the kernel says of one that cannot be seen.
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
