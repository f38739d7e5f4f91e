//! What an endpoint is told when it is started: who it is, where it listens, and every limit with its reason.

use std::net::SocketAddr;
use std::time::Duration;

use crate::compression::Compression;
use crate::identity::Identity;
use crate::peer::Link;

/// What an endpoint is started with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Who this host is.
    pub identity: Identity,
    /// Addresses to listen on. Without any, only this host can dial.
    pub listen: Vec<SocketAddr>,
    /// This host's links as peers reach them: told to those who are paired with it, and paired with a peer's links by
    /// speed. A connection over a link begins at the link's address, if that is an IP address. Without any, peers are
    /// told the port, and find the address by themselves.
    pub links: Vec<Link>,
    /// What it may use.
    pub limits: Limits,
    /// Whether payloads are packed.
    pub compression: Compression,
    /// Versions of the protocol that are offered. Another than the default is for tests alone.
    pub versions: Versions,
}

impl Settings {
    /// Settings with every limit at its default, listening nowhere.
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

/// What an endpoint may use, and for how long it waits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes that a peer may have on their way to this host's stores. It must fill the longest link: 64 MiB is 180 ms
    /// of 3 Gbit. At least [`WINDOW_BYTES_MIN`](crate::WINDOW_BYTES_MIN).
    pub window_bytes: u64,
    /// A queue that falls below this many bytes is reported to [`Receiver::drained`](crate::Receiver::drained).
    pub low_water_bytes: u64,
    /// Connections for each pair of links. More than one helps where the kernel's buffers are smaller than what a long
    /// link holds, or where one core cannot encrypt as fast as the link sends.
    pub connections_per_pair: usize,
    /// A connection on which nothing comes for so long is dead: four heartbeats in a row were missed.
    pub silence_max: Duration,
    /// How long connecting and the handshake may take together: TCP, TLS and two exchanges at 180 ms take a second.
    pub handshake_max: Duration,
    /// Connections that may be in their handshake, from anywhere and from one address. They cost memory and an
    /// expensive signature each, and anybody can open them.
    pub unauthenticated_max: usize,
    /// Those of them that only addresses of known hosts have: strangers do not keep these out, from however many addresses.
    pub unauthenticated_reserved: usize,
    /// Connections in their handshake from one address, or one IPv6 network: so one stranger does not keep all others out. The oldest gives way.
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

/// The oldest version of the protocol that this program speaks.
const OLDEST: u16 = 1;
/// The newest one. What came with which: 2, calls on a volume's owner that bear its fence; 3, looks ahead that give no
/// volume's identity away, calls on a volume's owner about any range of bytes, and words of the clients that are led there; 4, offers that say whose the
/// content of their volumes was; 5, offers that say by which strategy they are copied; 6, volumes that come with blocks missing; 7, words of which program
/// runs; 8, words of how large a volume is at its owner.
const NEWEST: u16 = 8;

/// Versions of the protocol, from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub lowest: u16,
    /// The newest.
    pub highest: u16,
}

impl Default for Versions {
    fn default() -> Self {
        Self { lowest: OLDEST, highest: NEWEST }
    }
}

impl Versions {
    /// The newest version that both speak.
    pub(crate) fn agree(self, other: Self) -> Option<u16> {
        let newest = self.highest.min(other.highest);
        (newest >= self.lowest && newest >= other.lowest).then_some(newest)
    }
}

#[cfg(test)]
mod tests {
    use super::Versions;

    #[test]
    fn the_newest_version_of_both_is_spoken() {
        let versions = |lowest, highest| Versions { lowest, highest };
        assert_eq!(versions(1, 1).agree(versions(1, 3)), Some(1));
        assert_eq!(versions(2, 5).agree(versions(1, 3)), Some(3));
        assert_eq!(versions(2, 3).agree(versions(1, 1)), None);
        assert_eq!(versions(1, 1).agree(versions(2, 3)), None);
    }
}
