//! Prints what a session carries over loopback on this machine: bytes and messages a second, with TLS and checksums. It also
//! prints how long an urgent message takes while bulk is queued.
//!
//! Run it in release: `cargo run --release -p transport --example throughput`. Both ends share the processors.

#![expect(clippy::unwrap_used, reason = "an example ends by panicking")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use transport::{
    ChannelId, Delivery, Endpoint, HostId, Identity, Incarnation, Link, Message, Peer, Peers, Priority,
    Receiver, Session, Settings,
};

const MEASURED: Duration = Duration::from_secs(2);
/// Limit of the bytes, and of the messages, that are kept queued.
const QUEUED_BYTES: u64 = 16 << 20;
const QUEUED_MESSAGES: u64 = 4096;

#[derive(Default)]
struct Known(Mutex<HashMap<HostId, Peer>>);

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.0.lock().unwrap().get(&id).cloned()
    }

    fn is_at(&self, _: std::net::IpAddr) -> bool {
        false
    }

    fn joined(&self, _: &Peer, _: transport::InvitationId) -> Result<(), String> {
        Ok(())
    }
}

#[derive(Default)]
struct Counting {
    bytes: AtomicU64,
    messages: AtomicU64,
    urgent: Mutex<Option<mpsc::Sender<Instant>>>,
}

impl Receiver for Counting {
    fn connected(&self, _session: &Session, _incarnation: Incarnation) {}

    fn delivered(&self, _session: &Session, delivery: Delivery) {
        self.bytes.fetch_add(delivery.message.len() as u64, Ordering::Relaxed);
        self.messages.fetch_add(1, Ordering::Relaxed);
        if delivery.message.priority() == Priority::Control
            && let Some(urgent) = &*self.urgent.lock().unwrap()
        {
            let _ = urgent.send(Instant::now());
        }
    }

    fn disconnected(&self, _peer: HostId, _reason: &str) {}

    fn restarted(&self, _session: &Session, _before: Incarnation, _now: Incarnation) {}
}

fn host(name: &str, connections: usize) -> (Endpoint, Arc<Known>, Arc<Counting>, Identity) {
    let identity = Identity::in_memory(name).unwrap();
    let (known, counting) = (Arc::<Known>::default(), Arc::<Counting>::default());
    let mut settings = Settings::new(identity.clone());
    settings.listen = vec!["127.0.0.1:0".parse().unwrap()];
    settings.limits.connections_per_pair = connections;
    let endpoint = Endpoint::start(
        settings,
        Arc::clone(&known) as Arc<dyn Peers>,
        Arc::clone(&counting) as Arc<dyn Receiver>,
    );
    (endpoint.unwrap(), known, counting, identity)
}

fn main() {
    for connections in [1, 2] {
        for length in [0, 4 << 10, 64 << 10, 1 << 20] {
            measure(connections, length);
        }
    }
}

fn measure(connections: usize, length: usize) {
    let (source, source_knows, _, source_identity) = host("source", connections);
    let (target, target_knows, counting, target_identity) = host("target", connections);
    let links = vec![Link::new(target.addresses()[0].to_string())];
    let peer = Peer { id: target_identity.id(), name: "target".into(), links };
    source_knows.0.lock().unwrap().insert(peer.id, peer.clone());
    let back = Peer { id: source_identity.id(), name: "source".into(), links: Vec::new() };
    target_knows.0.lock().unwrap().insert(back.id, back);
    let session = source.session(&peer);
    let (urgent, arrived) = mpsc::channel();
    *counting.urgent.lock().unwrap() = Some(urgent);
    // The first message waits for the connection; it is not measured.
    session.send(message(Priority::Control, 0));
    arrived.recv().unwrap();
    let payload_message = message(Priority::Bulk, length);
    let queued_bytes = QUEUED_BYTES.min(payload_message.len() as u64 * QUEUED_MESSAGES);
    let begun = Instant::now();
    let mut delays = Vec::new();
    let mut next_urgent = begun + Duration::from_millis(200);
    while begun.elapsed() < MEASURED {
        while session.queued_bytes(Priority::Bulk) < queued_bytes {
            session.send(payload_message.clone());
        }
        if Instant::now() >= next_urgent {
            let sent = Instant::now();
            session.send(message(Priority::Control, 0));
            delays.push(arrived.recv().unwrap() - sent);
            next_urgent += Duration::from_millis(20);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    delays.sort_unstable();
    println!(
        "{connections} connection(s), {length:>7} bytes: {:6.3} GB/s, {:8.0} messages/s; urgent: median {:?}, worst {:?}",
        counting.bytes.load(Ordering::Relaxed) as f64 / seconds / 1e9,
        counting.messages.load(Ordering::Relaxed) as f64 / seconds,
        delays.get(delays.len() / 2).copied().unwrap_or_default(),
        delays.last().copied().unwrap_or_default(),
    );
    source.stop();
    target.stop();
}

fn message(priority: Priority, length: usize) -> Message {
    // Bytes that do not pack.
    let mut random = 7u64;
    let payload: Vec<u8> = std::iter::repeat_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as u8
    })
    .take(length)
    .collect();
    Message::new(ChannelId(1), priority, "a head of some bytes", payload).unwrap()
}
