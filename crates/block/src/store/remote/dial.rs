//! Connects to a server, with a limit on every wait. Blocking: for control and helper threads.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nbd_protocol::{NbdUri, Security, Server, transmission_flag};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::error::RemoteError;
use super::handshake;
use super::image::RemoteOptions;
use super::terms::Terms;
use crate::store::image::Access;

/// The time limit for further connections to a server that has already answered. A server that announces several but takes only
/// one must not delay the working one.
const FURTHER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a TCP connection may show no sign of life. Requests to a hanging server do not count: its system answers for it.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// How long a TCP connection is idle before it is probed, and between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES_MAX: u32 = 2;

#[derive(Clone)]
pub(super) struct Dialer {
    pub(super) uri: NbdUri,
    pub(super) access: Access,
    pub(super) options: RemoteOptions,
}

pub(super) struct Line {
    pub(super) socket: OwnedFd,
    pub(super) terms: Terms,
}

pub(super) struct Lines {
    pub(super) first: Line,
    pub(super) further: Vec<Line>,
}

impl Lines {
    pub(super) fn terms(&self) -> &Terms {
        &self.first.terms
    }
}

impl Dialer {
    /// Connects and negotiates: once, and if the server takes several connections, as often as the options say.
    pub(super) fn dial(&self) -> Result<Lines, RemoteError> {
        let first = self.dial_once(self.options.connect_timeout)?;
        let mut further = Vec::new();
        while first.terms.has(transmission_flag::CAN_MULTI_CONN)
            && further.len() + 1 < self.options.connections_max
        {
            match self.dial_once(self.options.connect_timeout.min(FURTHER_TIMEOUT)) {
                Ok(line) if line.terms == first.terms => further.push(line),
                Ok(_) => break,
                Err(error) => {
                    tracing::debug!(uri = %self.uri, %error, further = further.len(), "no further connection");
                    break;
                }
            }
        }
        Ok(Lines { first, further })
    }

    fn dial_once(&self, timeout: Duration) -> Result<Line, RemoteError> {
        if self.uri.security == Security::Tls {
            return Err(RemoteError::Tls { uri: self.uri.to_string() });
        }
        let deadline = Instant::now() + timeout;
        let fail = |operation| {
            move |source| RemoteError::Unreachable { operation, uri: self.uri.to_string(), source }
        };
        let mut stream = match &self.uri.server {
            Server::Unix(path) => connect_unix(path, timeout).map(Stream::Unix),
            Server::Tcp { host, port } => connect_tcp(host, *port, deadline).map(Stream::Tcp),
        }
        .map_err(fail("connect to"))?;
        let offer = handshake::negotiate(&mut Timed { stream: &mut stream, deadline }, &self.uri)?;
        let terms = Terms::new(&self.uri, &offer, self.access)?;
        let socket = stream.into_socket().map_err(fail("prepare the connection to"))?;
        Ok(Line { socket, terms })
    }
}

/// Connects to a unix socket. `connect` waits while the server's backlog is full, so the socket gets a limit first.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

fn connect_tcp(host: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left_until(deadline)?) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                watch(&stream)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn watch(stream: &TcpStream) -> io::Result<()> {
    let socket = stream.as_fd();
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, PROBES_MAX)?;
    sockopt::set_tcp_user_timeout(socket, SILENCE_MAX.as_millis() as u32)?;
    Ok(())
}

/// Returns the time left for a socket timeout: never zero, which would mean no limit.
fn left_until(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn into_socket(self) -> io::Result<OwnedFd> {
        self.set_timeouts(None)?;
        Ok(match self {
            Self::Unix(stream) => stream.into(),
            Self::Tcp(stream) => stream.into(),
        })
    }

    fn set_timeouts(&self, timeout: Option<Duration>) -> io::Result<()> {
        let socket = match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        };
        sockopt::set_socket_timeout(socket, Timeout::Recv, timeout)?;
        sockopt::set_socket_timeout(socket, Timeout::Send, timeout)?;
        Ok(())
    }
}

/// A stream with an overall deadline, even if the other end sends byte by byte.
struct Timed<'a> {
    stream: &'a mut Stream,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_timeouts(Some(left_until(self.deadline)?))?;
        let read = match self.stream {
            Stream::Unix(stream) => stream.read(bytes),
            Stream::Tcp(stream) => stream.read(bytes),
        };
        read.map_err(name_timeout)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_timeouts(Some(left_until(self.deadline)?))?;
        let written = match self.stream {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        };
        written.map_err(name_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces EAGAIN, by which a socket reports a timeout, by a readable error.
fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}
