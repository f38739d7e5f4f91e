//! Settings of an endpoint: its identity, its addresses, and every limit with its reason.

use std::net::SocketAddr;
use std::time::Duration;

use crate::compression::Compression;
use crate::identity::Identity;
use crate::peer::Link;

/// The settings with which an endpoint is started.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The identity of this host.
    pub identity: Identity,
    /// Addresses to listen on. Without any, only this host can dial.
    pub listen: Vec<SocketAddr>,
    /// This host's links as peers reach them. They are sent to paired hosts, and paired with a peer's links by speed. A
    /// connection over a link begins at the link's address, if that is an IP address. Without any, peers are sent the port, and
    /// find the address by themselves.
    pub links: Vec<Link>,
    /// The limits of the endpoint.
    pub limits: Limits,
    /// Whether payloads are packed.
    pub compression: Compression,
    /// Versions of the protocol that are offered. Only tests change the default.
    pub versions: Versions,
}

impl Settings {
    /// Makes settings with every limit at its default, which listen nowhere.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            listen: Vec::new(),
            links: Vec::new(),
            limits: Limits::default(),
            compression: Compression::default(),
            versions: Versions::default(),
        }
    }
}

/// What an endpoint may use, and how long it waits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes that a peer may have on their way to this host's stores. It must fill the longest link: 64 MiB is 180 ms of 3
    /// Gbit. At least [`WINDOW_BYTES_MIN`](crate::WINDOW_BYTES_MIN).
    pub window_bytes: u64,
    /// A queue that falls below this many bytes is reported to [`Receiver::drained`](crate::Receiver::drained).
    pub low_water_bytes: u64,
    /// Connections for each pair of links. More than one helps where the kernel's buffers are smaller than what a long link
    /// holds, or where one core cannot encrypt as fast as the link sends.
    pub connections_per_pair: usize,
    /// Time without any bytes after which a connection is dead: sixteen heartbeats in a row were missed.
    pub silence_max: Duration,
    /// Time for connecting and the handshake together: TCP, TLS and two exchanges at 180 ms take a second.
    pub handshake_max: Duration,
    /// Connections that may be in their handshake. They cost memory and an expensive signature each, and anybody can open them.
    pub unauthenticated_max: usize,
    /// Places among them for addresses of known hosts only: strangers do not keep these out, from any number of addresses.
    pub unauthenticated_reserved: usize,
    /// Connections in their handshake from one address, or one IPv6 network, so that one stranger does not keep all others out.
    /// The oldest gives way.
    pub unauthenticated_per_address_max: usize,
    /// Connections that one peer may have.
    pub connections_per_peer_max: usize,
    /// Threads for TLS, checksums and compression.
    pub threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            window_bytes: 64 << 20,
            low_water_bytes: 4 << 20,
            connections_per_pair: 1,
            silence_max: Duration::from_secs(4),
            handshake_max: Duration::from_secs(10),
            unauthenticated_max: 256,
            unauthenticated_reserved: 64,
            unauthenticated_per_address_max: 32,
            connections_per_peer_max: 64,
            threads: std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8)),
        }
    }
}

/// The version of the protocol between hosts. It grows with each change that a peer of the version before would not understand.
pub const VERSION: u16 = 10;

/// Versions of the protocol, from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version spoken.
    pub lowest: u16,
    /// The newest version spoken.
    pub highest: u16,
}

impl Default for Versions {
    fn default() -> Self {
        Self { lowest: VERSION, highest: VERSION }
    }
}

impl Versions {
    /// Returns whether there is a version that both speak.
    pub(crate) fn overlap(self, other: Self) -> bool {
        self.lowest <= other.highest && other.lowest <= self.highest
    }
}
