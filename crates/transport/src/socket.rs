//! Sets up a connection's TCP socket.
//!
//! **Buffers.** At a round trip of 180 ms a gigabit link holds 22 MB. The kernel grows a socket's buffers by itself, to
//! `tcp_wmem` and `tcp_rmem` (4 and 6 MB as a rule). A size that is set stays fixed, and is cut to `wmem_max` and `rmem_max` (208
//! KiB as a rule; root may exceed them). So a size is set only where it ends up larger than what the kernel would grow to.
//!
//! **Unsent bytes.** A more urgent message cannot overtake bytes that the kernel has taken. `TCP_NOTSENT_LOWAT` makes it take
//! only a little more than it can send at once; it does not limit the bytes in flight.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

/// Bytes that the kernel may hold unsent: a millisecond at a gigabit.
const NOT_SENT_BYTES: u32 = 128 << 10;

/// Bytes of buffers where the system allows as much: 180 ms of 1.4 Gbit.
const BUFFER_BYTES: usize = 32 << 20;

/// Connects from an address of this host, or from one that the kernel chooses.
pub(crate) async fn connect(source: Option<IpAddr>, target: SocketAddr) -> io::Result<TcpStream> {
    let socket = if target.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(source) = source.filter(|source| source.is_ipv4() == target.is_ipv4()) {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    enlarge(&socket);
    socket.connect(target).await
}

/// Prepares a connection; `silence_max` is how long it may stay without an answer.
pub(crate) fn prepare(stream: &TcpStream, silence_max: Duration) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(silence_max))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_BYTES)
}

/// Listens; accepted connections have the listener's buffers.
pub(crate) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // Otherwise it would take the port of an IPv4 listener beside it.
        socket.set_only_v6(true)?;
    }
    enlarge(&socket);
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Connections that the kernel holds before they are accepted.
const LISTEN_BACKLOG: i32 = 256;

/// Sets buffers where that makes them larger than the kernel would by itself.
///
/// Root may exceed the limits of others (`SO_SNDBUFFORCE`). Where neither helps, the kernel's own sizes stay.
fn enlarge(descriptor: &impl AsFd) {
    let socket = SockRef::from(descriptor);
    let allows = |limit: &str| last_number(limit) >= Some(BUFFER_BYTES);
    let grows_less = |limit: &str| last_number(limit) < Some(BUFFER_BYTES);
    if grows_less("/proc/sys/net/ipv4/tcp_wmem")
        && sockopt::set_socket_send_buffer_size_force(descriptor, BUFFER_BYTES).is_err()
        && allows("/proc/sys/net/core/wmem_max")
    {
        drop(socket.set_send_buffer_size(BUFFER_BYTES));
    }
    if grows_less("/proc/sys/net/ipv4/tcp_rmem")
        && sockopt::set_socket_recv_buffer_size_force(descriptor, BUFFER_BYTES).is_err()
        && allows("/proc/sys/net/core/rmem_max")
    {
        drop(socket.set_recv_buffer_size(BUFFER_BYTES));
    }
}

fn last_number(path: &str) -> Option<usize> {
    fs::read_to_string(path).ok()?.split_whitespace().last()?.parse().ok()
}
