//! Metrics of other hosts and of the links with them.
//! The port at the dialling end changes with each connection, so a link is identified by the addresses of its ends.

use std::collections::BTreeMap;

use api::{Peer, PeerConnection};

use crate::metrics::Exposition;

#[derive(Default)]
struct Link {
    is_up: bool,
    bytes_sent: u64,
    bytes_received: u64,
    round_trip_us: Option<u64>,
    bytes_per_second: Option<u64>,
}

/// The other host's name, the local address, and the remote address.
type Ends<'a> = (&'a str, &'a str, &'a str);

pub(crate) fn add(told: &mut Exposition, peers: &[Peer]) {
    let mut family = told.gauge("sterna_host_connected", "Whether there is a connection with another host.");
    peers.iter().for_each(|peer| family.flag(&[("host", &peer.name)], peer.connected));
    let mut family = told.gauge("sterna_host_queued_bytes", "What waits to be sent to another host.");
    peers.iter().for_each(|peer| family.count(&[("host", &peer.name)], peer.queued_bytes));
    let mut family =
        told.gauge("sterna_host_unacknowledged_bytes", "What was sent and not yet acknowledged.");
    peers.iter().for_each(|peer| family.count(&[("host", &peer.name)], peer.unacknowledged_bytes));

    let links = links(peers);
    let mut family = told.gauge("sterna_link_up", "Whether there is a connection over a link.");
    links.iter().for_each(|(ends, link)| family.flag(&labels(ends), link.is_up));
    let mut family =
        told.counter("sterna_link_sent_bytes_total", "Sent over a link since it was connected, on the wire.");
    links.iter().for_each(|(ends, link)| family.count(&labels(ends), link.bytes_sent));
    let mut family = told.counter(
        "sterna_link_received_bytes_total",
        "Received over a link since it was connected, on the wire.",
    );
    links.iter().for_each(|(ends, link)| family.count(&labels(ends), link.bytes_received));
    let mut family = told.gauge("sterna_link_round_trip_seconds", "The newest round trip of a link.");
    for (ends, link) in &links {
        link.round_trip_us.iter().for_each(|us| family.add(&labels(ends), *us as f64 / 1e6));
    }
    let mut family =
        told.gauge("sterna_link_rate_bytes_per_second", "What a link carried when it had enough to do last.");
    for (ends, link) in &links {
        link.bytes_per_second.iter().for_each(|rate| family.count(&labels(ends), *rate));
    }
}

fn links(peers: &[Peer]) -> BTreeMap<Ends<'_>, Link> {
    let mut links = BTreeMap::<Ends, Link>::new();
    for peer in peers {
        for connection in &peer.connections {
            let PeerConnection { local, remote, .. } = connection;
            let link = links.entry((&peer.name, address(local), address(remote))).or_default();
            link.is_up |= connection.up;
            link.bytes_sent += connection.bytes_sent;
            link.bytes_received += connection.bytes_received;
            link.round_trip_us = link.round_trip_us.into_iter().chain(connection.round_trip_us).min();
            link.bytes_per_second =
                link.bytes_per_second.into_iter().chain(connection.bytes_per_second).max();
        }
    }
    links
}

fn labels<'a>((host, local, remote): &Ends<'a>) -> [(&'static str, &'a str); 3] {
    [("host", host), ("local", local), ("remote", remote)]
}

fn address(end: &str) -> &str {
    end.rsplit_once(':').map_or(end, |(address, _)| address)
}

#[cfg(test)]
mod tests {
    use api::{Peer, PeerConnection};

    use super::add;
    use crate::metrics::Exposition;

    fn connection(remote: &str, bytes_sent: u64) -> PeerConnection {
        PeerConnection {
            local: "10.0.0.1:7423".to_owned(),
            remote: remote.to_owned(),
            up: bytes_sent > 0,
            inbound: true,
            since_ms: 0,
            bytes_sent,
            bytes_received: 1,
            bytes_sent_per_second: None,
            bytes_received_per_second: None,
            round_trip_us: Some(bytes_sent),
            bytes_per_second: None,
            packed_per_mille: 1000,
            last_error: None,
        }
    }

    #[test]
    fn connections_between_the_same_addresses_are_one_link_whatever_their_ports() {
        let peer = Peer {
            name: "two".to_owned(),
            id: String::new(),
            links: Vec::new(),
            connected: true,
            since_ms: None,
            connections: vec![connection("[fd00::2]:41234", 5), connection("[fd00::2]:41235", 0)],
            queued_bytes: 0,
            unacknowledged_bytes: 0,
            last_error: None,
            machines: false,
            calls_itself: None,
            program_version: None,
            protocol_version: None,
            bytes_sent_per_second: 0,
            bytes_received_per_second: 0,
            refused_requests: 0,
        };
        let mut told = Exposition::default();
        add(&mut told, &[peer]);
        let text = told.text().unwrap();
        let link = "{host=\"two\",local=\"10.0.0.1\",remote=\"[fd00::2]\"}";
        assert!(text.contains(&format!("\nsterna_link_sent_bytes_total{link} 5\n")), "{text}");
        assert!(text.contains(&format!("\nsterna_link_up{link} 1\n")), "{text}");
        assert_eq!(text.matches("sterna_link_up{").count(), 1, "{text}");
    }
}
