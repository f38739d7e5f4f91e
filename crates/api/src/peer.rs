//! Other hosts: who this one is to them, how they are paired, and how the connections are.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Who the daemon's host is to others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Digest of its public key, 64 hexadecimal digits: what other hosts know it by.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// Addresses that it listens on for other hosts.
    pub listening: Vec<String>,
    /// Why it cannot be reached or call others; `None` if it can.
    #[serde(default)]
    pub problem: Option<String>,
    /// The latest connections that were refused, oldest first, each with its reason.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// Makes the host's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewIdentity {
    /// What people call the host: letters, digits, '.', '-' and '_'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
}

/// Asks for an invitation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewInvitation {
    /// How long it is good, in seconds.
    #[schema(minimum = 1, maximum = 604800)]
    pub lifetime_s: u64,
    /// Whether the host that redeems it may bring VMs, which run on this one.
    #[serde(default)]
    pub allow_machines: bool,
}

/// An invitation: with it one other host can be paired with this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Invitation {
    /// What the other host is given. **It holds a secret.**
    pub token: String,
    /// Addresses that the other host can call, the best first.
    pub addresses: Vec<String>,
    /// Until when it is good, in milliseconds since 1970.
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
    /// Whether the other host may bring VMs, which run on this one; `None`: as before, and not if it was not known.
    #[serde(default)]
    pub allow_machines: Option<bool>,
}

/// Changes what another host is trusted with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetPeer {
    /// Whether it may bring VMs, which run on this one.
    pub allow_machines: bool,
}

/// Another host that this one is paired with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// What it is called here.
    pub name: String,
    /// Digest of its public key, 64 hexadecimal digits.
    pub id: String,
    /// Where it is called.
    pub links: Vec<PeerLink>,
    /// Whether there is any connection.
    pub connected: bool,
    /// For how long there has been one, or none, in milliseconds; `None` while it is not called.
    #[serde(default)]
    pub since_ms: Option<u64>,
    /// Every connection, and every pair of links that is being dialled.
    #[serde(default)]
    pub connections: Vec<PeerConnection>,
    /// Bytes that wait to be sent.
    #[serde(default)]
    pub queued_bytes: u64,
    /// Bytes that were sent and not acknowledged.
    #[serde(default)]
    pub unacknowledged_bytes: u64,
    /// Why a connection was lost last.
    #[serde(default)]
    pub last_error: Option<String>,
    /// Whether it may bring VMs, which run on this host.
    #[serde(default)]
    pub machines: bool,
    /// What it calls itself, if another host had that name when it came.
    #[serde(default)]
    pub calls_itself: Option<String>,
    /// Version of the program that runs there, as it says; `None`: it has not said; an older one does not.
    #[serde(default)]
    pub program_version: Option<String>,
    /// Version of the protocol that both speak; `None` before the first connection.
    #[serde(default)]
    pub protocol_version: Option<u16>,
    /// Bytes sent in a second at present, over all connections.
    #[serde(default)]
    pub bytes_sent_per_second: u64,
    /// Bytes received in a second at present, over all connections.
    #[serde(default)]
    pub bytes_received_per_second: u64,
    /// How many of its requests were refused since this daemon began, because no migration gave it a right to them.
    #[serde(default)]
    pub refused_requests: u64,
}

/// One address of another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerLink {
    /// Host and port.
    pub address: String,
    /// Bits per second, where known.
    #[serde(default)]
    pub speed_bits_per_second: Option<u64>,
}

/// One connection to another host, or a pair of links that should have one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerConnection {
    /// The end here.
    pub local: String,
    /// The end there.
    pub remote: String,
    /// Whether there is a connection.
    pub up: bool,
    /// Whether the other host has dialled it.
    pub inbound: bool,
    /// For how long it has been up or down, in milliseconds.
    pub since_ms: u64,
    /// Bytes sent on the wire.
    pub bytes_sent: u64,
    /// Bytes received on the wire.
    pub bytes_received: u64,
    /// Bytes sent in a second at present; `None` while there is no connection, or it has just begun.
    #[serde(default)]
    pub bytes_sent_per_second: Option<u64>,
    /// Bytes received in a second at present; as above.
    #[serde(default)]
    pub bytes_received_per_second: Option<u64>,
    /// The newest round trip in microseconds.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
    /// Bytes that the connection can carry in a second: what it did when there was enough to send last.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// What compression left of the data, in thousandths.
    pub packed_per_mille: u64,
    /// Why there was no connection the last time.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// Forgets another host; sent as the query of a DELETE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemovePeer {
    /// Also when migrations or forwarded volumes depend on it: they wait until the two hosts are paired again.
    #[serde(default)]
    pub force: bool,
}

/// What has become of a host that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedPeer {
    /// What it was called here.
    pub name: String,
    /// Digest of its public key.
    pub id: String,
}
