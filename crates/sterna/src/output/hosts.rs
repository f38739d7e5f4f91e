//! Text output of `sterna host`.

use std::time::{Duration, SystemTime};

use api::{Host, Identity, Invitation, Peer, PeerConnection};

use super::{dash, lines, properties, table};
use console::units::{bytes, duration};

/// Digits of an identifier that are shown in a table.
const SHORT_DIGITS: usize = 12;

/// Returns this host's identity as lines of properties.
pub(crate) fn identity(identity: &Identity) -> String {
    let listening = match identity.listening.as_slice() {
        [] if identity.problem.is_some() => dash(),
        [] => {
            "nowhere: this host can connect to others, but not be reached (hosts.listen in the configuration)"
                .to_owned()
        }
        addresses => addresses.join(", "),
    };
    let mut rows =
        vec![("host", identity.name.clone()), ("id", identity.id.clone()), ("listening", listening)];
    rows.extend(identity.problem.clone().map(|problem| ("problem", problem)));
    rows.extend(identity.refused.iter().map(|refused| ("refused", refused.clone())));
    properties(&rows)
}

/// Returns an invitation, with the command for the other host.
pub(crate) fn invitation(invitation: &Invitation) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let left = Duration::from_millis(invitation.expires_unix_ms).saturating_sub(now);
    let minutes = left.as_secs().div_ceil(60);
    let address = invitation.addresses.first().map_or("HOST:PORT", String::as_str);
    let token = &invitation.token;
    format!(
        "on the other host, within {minutes} min:\n\nsterna host join {address}\n\nand enter this invitation at its \
         prompt:\n\n{token}\n"
    )
}

pub(crate) fn joined(peer: &Peer) -> String {
    let mut text = format!("{} ({}) and this host know each other\n", peer.name, short(&peer.id));
    if let Some(name) = &peer.calls_itself {
        text.push_str(&format!(
            "another host, or this one, has the name {name} here already: the new host is called {} here\n",
            peer.name
        ));
    }
    text.push_str(&trust(peer));
    text
}

pub(crate) fn trust(peer: &Peer) -> String {
    match peer.machines {
        true => format!("{} may bring VMs, which run here\n", peer.name),
        false => {
            format!("{0} may bring no VMs here (sterna host set {0} --allow-machines)\n", peer.name)
        }
    }
}

/// Returns where another host is reached.
pub(crate) fn reached(peer: &Peer) -> String {
    let addresses: Vec<&str> = peer.links.iter().map(|link| link.address.as_str()).collect();
    format!(
        "{} is called at {}; to see whether it answers: sterna host show {0}\n",
        peer.name,
        addresses.join(", ")
    )
}

/// Returns that this host takes nothing new; empty: it does.
pub(crate) fn drained(host: &Host) -> String {
    match (host.evacuating, host.drained) {
        (true, _) => {
            "this host is being evacuated, and takes nothing new: sterna evacuate --status\n".to_owned()
        }
        (false, true) => {
            "this host is drained, and takes nothing new; to end that: sterna host undrain\n".to_owned()
        }
        (false, false) => String::new(),
    }
}

pub(crate) fn undrained(host: &Host) -> String {
    match host.evacuating {
        true => drained(host),
        false => "this host takes volumes and VMs again\n".to_owned(),
    }
}

pub(crate) fn peers(peers: &Vec<Peer>) -> String {
    if peers.is_empty() {
        return "no other hosts; on both of two: sterna host init; then on one of them: sterna host invite\n"
            .to_owned();
    }
    let mut table = table(
        &["HOST", "ID", "VERSION", "STATE", "CONNECTIONS", "SENDS", "RECEIVES", "MACHINES", "WHERE"],
        &[4, 5, 6],
    );
    for peer in peers {
        let up = peer.connections.iter().filter(|connection| connection.up).count();
        let links: Vec<&str> = peer.links.iter().map(|link| link.address.as_str()).collect();
        table.add_row([
            peer.name.clone(),
            short(&peer.id),
            peer.program_version.clone().unwrap_or_else(dash),
            state(peer),
            format!("{up} of {}", peer.connections.len()),
            rate(Some(peer.bytes_sent_per_second).filter(|_| peer.connected)),
            rate(Some(peer.bytes_received_per_second).filter(|_| peer.connected)),
            if peer.machines { "allowed" } else { "denied" }.to_owned(),
            links.join(", "),
        ]);
    }
    lines(&table)
}

/// Returns another host as lines of properties, with a table of connections.
pub(crate) fn peer(peer: &Peer) -> String {
    let speed = |speed: u64| format!(" ({} Mbit/s)", speed / 1_000_000);
    let links = peer
        .links
        .iter()
        .map(|link| format!("{}{}", link.address, link.speed_bits_per_second.map(speed).unwrap_or_default()));
    let mut rows = vec![
        ("host", called(peer)),
        ("id", peer.id.clone()),
        ("machines", if peer.machines { "may bring some" } else { "may bring none" }.to_owned()),
        ("where", links.collect::<Vec<_>>().join(", ")),
        ("version", version(peer)),
        ("state", state(peer)),
        (
            "queued",
            format!("{}, and {} arriving", bytes(peer.queued_bytes), bytes(peer.unacknowledged_bytes)),
        ),
    ];
    if peer.connected {
        let (sent, received) = (peer.bytes_sent_per_second, peer.bytes_received_per_second);
        rows.push(("at present", format!("{}/s sent, {}/s received", bytes(sent), bytes(received))));
    }
    rows.extend(peer.last_error.clone().map(|error| ("last lost", error)));
    if !peer.connected {
        let way = format!(
            "its daemon must run; if both hosts have other addresses than before: sterna host set {} --address HOST:PORT",
            peer.name
        );
        rows.push(("to mend", way));
    }
    if peer.refused_requests > 0 {
        rows.push((
            "refused",
            format!("{} requests of that host, for which it had no permission", peer.refused_requests),
        ));
    }
    let mut text = properties(&rows);
    if !peer.connections.is_empty() {
        text.push('\n');
        text.push_str(&connections(&peer.connections));
    }
    text
}

fn called(peer: &Peer) -> String {
    match &peer.calls_itself {
        None => peer.name.clone(),
        Some(name) => format!("{} (calls itself {name})", peer.name),
    }
}

fn connections(connections: &[PeerConnection]) -> String {
    let header = [
        "HERE",
        "THERE",
        "STATE",
        "SENT",
        "RECEIVED",
        "SENDS",
        "RECEIVES",
        "ROUND TRIP",
        "CAN SEND",
        "PACKED TO",
        "WHY",
    ];
    let mut table = table(&header, &[3, 4, 5, 6, 7, 8, 9]);
    for connection in connections {
        let direction = if connection.inbound { "in" } else { "out" };
        let state = if connection.up { "up" } else { "down" };
        table.add_row([
            connection.local.clone(),
            connection.remote.clone(),
            format!("{state} {} ({direction})", duration(seconds(connection.since_ms))),
            bytes(connection.bytes_sent),
            bytes(connection.bytes_received),
            rate(connection.bytes_sent_per_second),
            rate(connection.bytes_received_per_second),
            connection.round_trip_us.map_or_else(dash, |time| format!("{:.1} ms", time as f64 / 1000.0)),
            rate(connection.bytes_per_second),
            format!("{} %", connection.packed_per_mille / 10),
            connection.last_error.clone().unwrap_or_default(),
        ]);
    }
    lines(&table)
}

fn version(peer: &Peer) -> String {
    let program = peer.program_version.clone().unwrap_or_else(|| "it does not say".to_owned());
    peer.protocol_version.map_or(program.clone(), |protocol| format!("{program} (protocol {protocol})"))
}

fn rate(bytes_per_second: Option<u64>) -> String {
    bytes_per_second.map_or_else(dash, |rate| format!("{}/s", bytes(rate)))
}

fn state(peer: &Peer) -> String {
    let since = peer.since_ms.map(|time| format!(" for {}", duration(seconds(time)))).unwrap_or_default();
    match (peer.connected, peer.since_ms) {
        (true, _) => format!("connected{since}"),
        (false, Some(_)) => format!("not connected{since}"),
        (false, None) => "not called".to_owned(),
    }
}

fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

fn short(id: &str) -> String {
    id.chars().take(SHORT_DIGITS).collect()
}
