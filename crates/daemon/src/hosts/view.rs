//! Descriptions of this host and of others.

use std::sync::Arc;

use lane::ByHost;
use migration::HostId;
use transport::ConnectionStatus;

use super::{Acquaintance, EndpointState, Hosts, HostsError};

impl Hosts {
    pub(crate) fn describe_identity(&self) -> Result<api::Identity, HostsError> {
        let (identity, endpoint, mut problem) = match &*self.lock() {
            EndpointState::Running(endpoint, identity) => {
                (identity.clone(), Some(Arc::clone(endpoint)), None)
            }
            EndpointState::Failed { identity: Some(identity), problem } => {
                (identity.clone(), None, Some(problem.clone()))
            }
            EndpointState::Failed { identity: None, problem } => {
                return Err(HostsError::Unusable(problem.clone()));
            }
            EndpointState::NoIdentity => return Err(HostsError::NoIdentity),
            EndpointState::Stopped => {
                return Err(HostsError::Unusable("the daemon is shutting down".to_owned()));
            }
        };
        let (mut listening, mut refused) = (Vec::new(), Vec::new());
        if let Some(endpoint) = endpoint {
            listening = endpoint.addresses().iter().map(ToString::to_string).collect();
            refused = endpoint.refused();
            problem = unheard(&endpoint);
        }
        let (id, name) = (identity.id().to_string(), identity.name().to_owned());
        Ok(api::Identity { id, name, listening, problem, refused })
    }

    /// Returns clients at other hosts by these hosts' names. Clients may be forwarded here by way of another host: an unknown
    /// host is shown by the beginning of its identity.
    pub(crate) fn clients_by_name(&self, clients: &ByHost) -> Vec<(String, u32)> {
        let known = self.known().map(|known| known.list()).unwrap_or_default();
        let name_of = |host: HostId| {
            let peer = known.iter().find(|peer| peer.id.0 == host.0);
            peer.map_or_else(
                || transport::HostId(host.0).to_string()[..8].to_owned(),
                |peer| peer.name.clone(),
            )
        };
        clients.iter().map(|(host, clients)| (name_of(host), clients)).collect()
    }

    pub(crate) fn describe_all(&self) -> Result<Vec<api::Peer>, HostsError> {
        Ok(self.known()?.acquaintances().iter().map(|known| self.describe(known)).collect())
    }

    pub(crate) fn describe_one(&self, name: &str) -> Result<api::Peer, HostsError> {
        let known = self.known()?.acquaintance(name).ok_or_else(|| HostsError::NotFound(name.to_owned()))?;
        Ok(self.describe(&known))
    }

    pub(crate) fn describe(&self, known: &Acquaintance) -> api::Peer {
        let peer = &known.peer;
        let session = self.endpoint().ok().and_then(|endpoint| endpoint.existing_session(peer.id));
        let protocol_version =
            session.as_ref().and_then(transport::Session::incarnation).map(|_| transport::VERSION);
        let status = session.map(|session| session.status());
        let link = |link: &transport::Link| api::PeerLink {
            address: link.address.clone(),
            speed_bits_per_second: link.speed_bits_per_second,
        };
        let mut described = api::Peer {
            name: peer.name.clone(),
            id: peer.id.to_string(),
            links: peer.links.iter().map(link).collect(),
            connected: false,
            since_ms: None,
            connections: Vec::new(),
            queued_bytes: 0,
            unacknowledged_bytes: 0,
            last_error: None,
            machines: known.trust.machines && self.config.machines,
            calls_itself: known.calls_itself.clone(),
            program_version: None,
            protocol_version: None,
            bytes_sent_per_second: 0,
            bytes_received_per_second: 0,
            refused_requests: 0,
        };
        if let Some(status) = status {
            described.connected = status.is_connected;
            described.since_ms = Some(milliseconds(status.since));
            let sum = |rate: fn(&ConnectionStatus) -> Option<u64>| -> u64 {
                status.connections.iter().filter_map(rate).sum()
            };
            described.bytes_sent_per_second = sum(|connection| connection.sent_per_second);
            described.bytes_received_per_second = sum(|connection| connection.received_per_second);
            described.protocol_version = protocol_version;
            described.connections = status.connections.into_iter().map(connection).collect();
            described.queued_bytes = status.queued_bytes.iter().sum();
            described.unacknowledged_bytes = status.unacknowledged_bytes;
            described.last_error = status.last_error;
        }
        described
    }
}

/// Returns at which addresses others cannot reach this host yet, and why.
fn unheard(endpoint: &transport::Endpoint) -> Option<String> {
    let addresses = endpoint
        .unheard()
        .into_iter()
        .map(|(address, problem)| format!("cannot listen on {address} yet, trying every second: {problem}"));
    let addresses: Vec<String> = addresses.collect();
    (!addresses.is_empty()).then(|| addresses.join("; "))
}

fn connection(status: ConnectionStatus) -> api::PeerConnection {
    api::PeerConnection {
        local: status.local,
        remote: status.remote,
        up: status.is_up,
        inbound: status.is_inbound,
        since_ms: milliseconds(status.since),
        bytes_sent: status.bytes_sent,
        bytes_received: status.bytes_received,
        bytes_sent_per_second: status.sent_per_second,
        bytes_received_per_second: status.received_per_second,
        round_trip_us: status.round_trip.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        bytes_per_second: status.bytes_per_second,
        packed_per_mille: status.packed_per_mille,
        last_error: status.last_error,
    }
}

fn milliseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
