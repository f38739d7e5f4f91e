//! Two hosts on loopback, a receiver that keeps its events, and a proxy that breaks connections.

pub(crate) mod proxy;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use transport::{
    ChannelId, Delivery, Endpoint, HostId, Identity, Incarnation, Link, Message, Peer, Peers, Priority,
    Receiver, Session, Settings,
};

/// Time after which a test gives up waiting. It only bounds a failure, so it is long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain: {what}");
        // An interval of looks at the condition.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Default)]
pub(crate) struct Known(Mutex<HashMap<HostId, Peer>>);

impl Known {
    pub(crate) fn add(&self, peer: Peer) {
        self.0.lock().unwrap().insert(peer.id, peer);
    }
}

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.0.lock().unwrap().get(&id).cloned()
    }

    fn is_at(&self, address: std::net::IpAddr) -> bool {
        let known = self.0.lock().unwrap();
        let mut links = known.values().flat_map(|peer| &peer.links);
        links.any(|link| link.address.parse().is_ok_and(|link: SocketAddr| link.ip() == address))
    }

    fn joined(&self, peer: &Peer, _: transport::InvitationId) -> Result<(), String> {
        self.add(peer.clone());
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    Connected(Incarnation),
    Delivered(Delivery),
    Disconnected(String),
    Restarted { before: Incarnation, now: Incarnation },
    Drained,
}

#[derive(Default)]
pub(crate) struct Inbox {
    events: Mutex<Vec<Event>>,
    arrived: Condvar,
}

impl Inbox {
    fn put(&self, event: Event) {
        self.events.lock().unwrap().push(event);
        self.arrived.notify_all();
    }

    /// Waits for an event that `pick` accepts, and takes it out.
    pub(crate) fn wait<T>(&self, what: &str, pick: impl Fn(&Event) -> Option<T>) -> T {
        self.try_wait(PATIENCE, pick)
            .unwrap_or_else(|| panic!("waited in vain for {what}: {:?}", self.events))
    }

    /// Waits like [`wait`](Self::wait), but gives up after a time.
    pub(crate) fn try_wait<T>(&self, time: Duration, pick: impl Fn(&Event) -> Option<T>) -> Option<T> {
        let events = self.events.lock().unwrap();
        let is_missing = |events: &mut Vec<Event>| !events.iter().any(|event| pick(event).is_some());
        let (mut events, _) = self.arrived.wait_timeout_while(events, time, is_missing).unwrap();
        let place = events.iter().position(|event| pick(event).is_some())?;
        let picked = pick(&events[place]);
        events.remove(place);
        picked
    }

    /// Waits for a number of deliveries and takes them out, in the order of arrival.
    pub(crate) fn deliveries(&self, count: usize) -> Vec<Delivery> {
        let is_delivery = |event: &Event| matches!(event, Event::Delivered(_));
        let events = self.events.lock().unwrap();
        let is_short =
            |events: &mut Vec<Event>| events.iter().filter(|event| is_delivery(event)).count() < count;
        let (mut events, timeout) = self.arrived.wait_timeout_while(events, PATIENCE, is_short).unwrap();
        assert!(!timeout.timed_out(), "waited in vain for {count} deliveries: {}", events.len());
        let (deliveries, others) = std::mem::take(&mut *events).into_iter().partition(is_delivery);
        *events = others;
        let delivery = |event| if let Event::Delivered(delivery) = event { Some(delivery) } else { None };
        Vec::into_iter(deliveries).filter_map(delivery).collect()
    }

    pub(crate) fn connected(&self) -> Incarnation {
        self.wait("a connection", |event| if let Event::Connected(now) = event { Some(*now) } else { None })
    }

    pub(crate) fn disconnected(&self) -> String {
        self.wait("the end of all connections", |event| {
            if let Event::Disconnected(reason) = event { Some(reason.clone()) } else { None }
        })
    }

    pub(crate) fn restarted(&self) -> (Incarnation, Incarnation) {
        self.wait("another life", |event| {
            if let Event::Restarted { before, now } = event { Some((*before, *now)) } else { None }
        })
    }
}

impl Receiver for Inbox {
    fn connected(&self, _session: &Session, incarnation: Incarnation) {
        self.put(Event::Connected(incarnation));
    }

    fn delivered(&self, _session: &Session, delivery: Delivery) {
        self.put(Event::Delivered(delivery));
    }

    fn disconnected(&self, _peer: HostId, reason: &str) {
        self.put(Event::Disconnected(reason.to_owned()));
    }

    fn restarted(&self, _session: &Session, before: Incarnation, now: Incarnation) {
        self.put(Event::Restarted { before, now });
    }

    fn drained(&self, _session: &Session, _priority: Priority) {
        self.put(Event::Drained);
    }
}

pub(crate) struct Host {
    pub(crate) endpoint: Endpoint,
    pub(crate) known: Arc<Known>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) identity: Identity,
}

impl Host {
    /// Starts a host on loopback; `change` may change its settings.
    pub(crate) fn start(name: &str, change: impl FnOnce(&mut Settings)) -> Self {
        Self::start_as(Identity::in_memory(name).unwrap(), Arc::default(), change)
    }

    /// Starts a host again, with its earlier identity and known hosts.
    pub(crate) fn start_as(
        identity: Identity,
        known: Arc<Known>,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let inbox = Arc::new(Inbox::default());
        Self::start_with(identity, known, Arc::clone(&inbox) as Arc<dyn Receiver>, inbox, change)
    }

    /// Starts a host with a receiver of its own; `inbox` stays empty then.
    pub(crate) fn start_with(
        identity: Identity,
        known: Arc<Known>,
        receiver: Arc<dyn Receiver>,
        inbox: Arc<Inbox>,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let mut settings = Settings::new(identity.clone());
        settings.listen = vec!["127.0.0.1:0".parse().unwrap()];
        settings.limits.threads = 2;
        change(&mut settings);
        let endpoint = Endpoint::start(settings, Arc::clone(&known) as Arc<dyn Peers>, receiver).unwrap();
        Self { endpoint, known, inbox, identity }
    }

    pub(crate) fn peer(&self) -> Peer {
        self.peer_at(&self.endpoint.addresses())
    }

    pub(crate) fn peer_at(&self, addresses: &[SocketAddr]) -> Peer {
        let links = addresses.iter().map(|address| Link::new(address.to_string())).collect();
        Peer { id: self.identity.id(), name: self.identity.name().to_owned(), links }
    }

    pub(crate) fn knows(&self, other: &Self) {
        self.known.add(Peer { links: Vec::new(), ..other.peer() });
    }
}

/// Starts two hosts that know each other, with the same changes to their settings.
pub(crate) fn two_hosts(change: impl Fn(&mut Settings)) -> (Host, Host) {
    let (source, target) = (Host::start("source", &change), Host::start("target", &change));
    source.knows(&target);
    target.knows(&source);
    (source, target)
}

pub(crate) fn message(priority: Priority, head: impl Into<Vec<u8>>, payload: impl Into<Vec<u8>>) -> Message {
    Message::new(ChannelId(1), priority, head.into(), payload.into()).unwrap()
}
