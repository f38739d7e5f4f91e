//! Peers, the links that lead to them, and the list in which they are looked up.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::host_id::HostId;
use crate::invitation::InvitationId;

/// The largest number of links of a host.
pub const LINKS_MAX: usize = 16;
/// The longest address of a link, in characters: a host name has 253, and a port follows.
const ADDRESS_LENGTH_MAX: usize = 260;

/// Another host that this one has been paired with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The digest of its public key, which is checked whenever a connection is made.
    pub id: HostId,
    /// The display name of the host.
    pub name: String,
    /// The addresses that it listens on. If there are none, it must dial this host.
    pub links: Vec<Link>,
}

/// One way into a host: an address that it listens on, and how fast the network there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Host (name or address) and port, as in `10.0.0.2:7423` or `[fd00::2]:7423`.
    pub address: String,
    /// Bits per second that the link carries, if configured. It only decides how links are paired; the share of
    /// each connection is measured.
    pub speed_bits_per_second: Option<u64>,
}

impl Link {
    /// Makes a link of unknown speed.
    pub fn new(address: impl Into<String>) -> Self {
        Self { address: address.into(), speed_bits_per_second: None }
    }

    /// Makes a link of unknown speed from what a person has typed; `None`: it is no host with a port.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        // An address of IPv6 has colons of its own, so it needs brackets.
        let is_host =
            !host.is_empty() && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'));
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        let link = Self::new(text);
        (is_host && is_port && link.is_plain()).then_some(link)
    }

    /// Returns whether its address can be printed and is short enough.
    pub(crate) fn is_plain(&self) -> bool {
        self.address.len() <= ADDRESS_LENGTH_MAX
            && self.address.chars().all(|character| character.is_ascii_graphic())
    }
}

/// Looks peers up: the daemon's list of known hosts.
///
/// It is called at each handshake, so a removed peer is refused from then on. The calls come on transport threads and must
/// not block for long.
pub trait Peers: Send + Sync {
    /// Finds a peer by its identifier; `None` refuses it.
    fn find(&self, id: HostId) -> Option<Peer>;

    /// Returns whether a known host has a link at this address. It is called when strangers have taken their places.
    fn is_at(&self, address: IpAddr) -> bool;

    /// Stores a host that has redeemed this invitation, durably. The same host may do so again.
    ///
    /// # Errors
    ///
    /// The reason, which is sent to the other host too. It is not paired then, and the invitation stays valid.
    fn joined(&self, peer: &Peer, by: InvitationId) -> Result<(), String>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for (text, expected) in [
            ("10.0.0.2:7423", true),
            ("[fd00::2]:7423", true),
            ("rack3-b.example:7423", true),
            ("fd00::2:7423", false),
            ("10.0.0.2", false),
            ("10.0.0.2:0", false),
            ("10.0.0.2:70000", false),
            (":7423", false),
            ("rack 3:7423", false),
        ] {
            assert_eq!(Link::parse(text).is_some(), expected, "{text}");
        }
        assert!(Link::parse(&format!("{}:1", "a".repeat(ADDRESS_LENGTH_MAX))).is_none());
    }
}
