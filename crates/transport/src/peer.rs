//! Peers, the links that lead to them, and the list in which they are looked up.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::host_id::HostId;
use crate::invitation::InvitationId;

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
