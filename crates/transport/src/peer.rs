//! Who is known: peers, the links that lead to them, and where they are looked up.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::host_id::HostId;
use crate::invitation::InvitationId;

/// Another host that this one has been paired with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The digest of its public key: what is checked whenever a connection is made.
    pub id: HostId,
    /// What people call it.
    pub name: String,
    /// Where it listens. Without any it must call us.
    pub links: Vec<Link>,
}

/// One way into a host: an address that it listens on, and how fast the network there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Host (name or address) and port, as in `10.0.0.2:7423` or `[fd00::2]:7423`.
    pub address: String,
    /// Bits per second that the link carries, where somebody knows it. It only decides which links are paired with
    /// which; how much a connection gets to carry is measured.
    pub speed_bits_per_second: Option<u64>,
}

impl Link {
    /// Makes a link whose speed nobody knows.
    pub fn new(address: impl Into<String>) -> Self {
        Self { address: address.into(), speed_bits_per_second: None }
    }
}

/// Looks peers up: the daemon's list of known hosts.
///
/// It is asked at each handshake, so a peer that was removed is refused from then on. It is called on transport threads
/// and must not block for long.
pub trait Peers: Send + Sync {
    /// Finds a peer by its identifier; `None` refuses it.
    fn find(&self, id: HostId) -> Option<Peer>;

    /// Tells whether a known host has a link at this address. It is asked when strangers have taken their places.
    fn is_at(&self, address: IpAddr) -> bool;

    /// Stores a host that has redeemed this invitation of ours, durably. The same one may do so again.
    ///
    /// # Errors
    ///
    /// A reason, which the other host is told too: it is not paired then, and the invitation stays good.
    fn joined(&self, peer: &Peer, by: InvitationId) -> Result<(), String>;
}
