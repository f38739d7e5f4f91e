//! Other hosts: this host's identity, pairing, and the connections.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The identity of the daemon's host for other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Digest of its public key, 64 hexadecimal digits, by which other hosts know it.
    pub id: String,
    /// Name of the host.
    pub name: String,
    /// Addresses on which it listens for other hosts.
    pub listening: Vec<String>,
    /// Why it cannot be reached or reach others; `None` if it can.
    #[serde(default)]
    pub problem: Option<String>,
    /// The latest refused connections, oldest first, each with its reason.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// Makes the host's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewIdentity {
    /// Name of the host: letters, digits, '.', '-' and '_'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
}

/// Makes an invitation for one other host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewInvitation {
    /// Life of the invitation, in seconds.
    #[schema(minimum = 1, maximum = 604800)]
    pub lifetime_s: u64,
    /// Whether the host that redeems it may bring VMs, which run on this one.
    #[serde(default)]
    pub allow_machines: bool,
}

/// A host invitation, which pairs one other host with this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Invitation {
    /// The token for the other host. **It holds a secret.**
    pub token: String,
    /// Addresses at which the other host can reach this one, the best first.
    pub addresses: Vec<String>,
    /// End of its life, in milliseconds since 1970.
    pub expires_unix_ms: u64,
}

/// Redeems another host's invitation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinHost {
    /// The token that the other host has made.
    pub token: String,
    /// Address and port of the other host; `None`: those in the token.
    #[serde(default)]
    pub address: Option<String>,
    /// Whether the other host may bring VMs, which run on this one; `None`: as before, or no for a new host.
    #[serde(default)]
    pub allow_machines: Option<bool>,
}

/// Changes what this host knows of another one. What is left out stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetPeer {
    /// Whether it may bring VMs, which run on this one.
    #[serde(default)]
    pub allow_machines: Option<bool>,
    /// Addresses and ports at which it can be reached, the best first; none: it has to connect to this host.
    #[serde(default)]
    pub addresses: Option<Vec<String>>,
}

/// Another host that this one is paired with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Its name at this host.
    pub name: String,
    /// Digest of its public key, 64 hexadecimal digits.
    pub id: String,
    /// The addresses at which it is dialled.
    pub links: Vec<PeerLink>,
    /// Whether there is at least one connection.
    pub connected: bool,
    /// Milliseconds since the first connection was made, or the last one was lost; `None` while it is not dialled.
    #[serde(default)]
    pub since_ms: Option<u64>,
    /// Every connection, and every pair of links that is being dialled.
    #[serde(default)]
    pub connections: Vec<PeerConnection>,
    /// Bytes that are queued for it.
    #[serde(default)]
    pub queued_bytes: u64,
    /// Bytes that were sent and not acknowledged.
    #[serde(default)]
    pub unacknowledged_bytes: u64,
    /// Why a connection was last lost.
    #[serde(default)]
    pub last_error: Option<String>,
    /// Whether it may bring VMs, which run on this host.
    #[serde(default)]
    pub machines: bool,
    /// Its own name, if that was used here already.
    #[serde(default)]
    pub calls_itself: Option<String>,
    /// Version of its program; `None`: not yet known.
    #[serde(default)]
    pub program_version: Option<String>,
    /// Version of the protocol that both speak; `None` before the first connection.
    #[serde(default)]
    pub protocol_version: Option<u16>,
    /// Present rate of sending over all connections, in bytes a second.
    #[serde(default)]
    pub bytes_sent_per_second: u64,
    /// Present rate of receiving over all connections, in bytes a second.
    #[serde(default)]
    pub bytes_received_per_second: u64,
    /// Number of its requests that were refused since the daemon began, because no migration gave it the right.
    #[serde(default)]
    pub refused_requests: u64,
}

/// An address of another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerLink {
    /// Address and port of the link.
    pub address: String,
    /// Speed of its network in bits a second, if known.
    #[serde(default)]
    pub speed_bits_per_second: Option<u64>,
}

/// A connection to another host, or a pair of links that should have one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerConnection {
    /// Address at this host.
    pub local: String,
    /// Address at the other host.
    pub remote: String,
    /// Whether the connection is up.
    pub up: bool,
    /// Whether the other host has dialled it.
    pub inbound: bool,
    /// Milliseconds since it went up or down.
    pub since_ms: u64,
    /// Bytes sent on the wire so far.
    pub bytes_sent: u64,
    /// Bytes received on the wire so far.
    pub bytes_received: u64,
    /// Present rate of sending in bytes a second; `None` while there is no connection, or it has just begun.
    #[serde(default)]
    pub bytes_sent_per_second: Option<u64>,
    /// Present rate of receiving in bytes a second; `None` as above.
    #[serde(default)]
    pub bytes_received_per_second: Option<u64>,
    /// The latest round trip, in microseconds.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
    /// Its rate in bytes a second when it was last fully used.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Size of the data after compression, in thousandths of its size before.
    pub packed_per_mille: u64,
    /// Why the connection was last lost, or could not be made.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// Forgets another host; sent as the query of a DELETE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemovePeer {
    /// Remove it even if migrations or forwarded volumes depend on it; they wait until the two hosts are paired again.
    #[serde(default)]
    pub force: bool,
}

/// A host that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedPeer {
    /// Its former name at this host.
    pub name: String,
    /// Digest of its public key, 64 hexadecimal digits.
    pub id: String,
}
