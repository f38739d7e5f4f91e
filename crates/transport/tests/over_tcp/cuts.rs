//! Connections are cut, go silent, or go silent one way: every message is still delivered, and only once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::proxy::{Fate, Proxy};
use crate::support::{Host, Inbox, PATIENCE, message, two_hosts, wait_until};
use transport::{
    ChannelId, Delivery, HostId, Identity, Incarnation, Message, Peer, Priority, Receiver, Session, Settings,
};

/// Messages of the long test: enough that cuts meet every state of a connection.
const MESSAGES: usize = 100_000;

struct Counting {
    seen: Vec<AtomicU32>,
    total: AtomicUsize,
    next: [AtomicUsize; 3],
}

impl Receiver for Counting {
    fn connected(&self, _session: &Session, _incarnation: Incarnation) {}

    fn delivered(&self, _session: &Session, delivery: Delivery) {
        let head: [u8; 8] = delivery.message.head()[..].try_into().unwrap();
        let number = u64::from_le_bytes(head) as usize;
        assert_eq!(delivery.message.payload().len(), payload_bytes(number));
        self.seen[number].fetch_add(1, Ordering::Relaxed);
        if delivery.message.channel() != ChannelId(0) {
            let next = &self.next[delivery.message.channel().0 as usize];
            let expected = next.swap(number + 1, Ordering::Relaxed);
            assert!(number >= expected, "{number} of an ordered channel came after {expected}");
        }
        self.total.fetch_add(1, Ordering::Relaxed);
    }

    fn disconnected(&self, _peer: HostId, _reason: &str) {}

    fn restarted(&self, _session: &Session, _before: Incarnation, _now: Incarnation) {
        panic!("nobody was started again");
    }
}

/// Returns a length: mostly small, and sometimes long enough for several parts.
fn payload_bytes(number: usize) -> usize {
    if number % 500 == 499 { 300_000 } else { number % 3000 }
}

#[test]
fn a_hundred_thousand_messages_are_delivered_once_through_random_cuts() {
    let counting = Arc::new(Counting {
        seen: (0..MESSAGES).map(|_| AtomicU32::new(0)).collect(),
        total: AtomicUsize::new(0),
        next: Default::default(),
    });
    let change = |settings: &mut Settings| settings.limits.silence_max = Duration::from_millis(800);
    let source = Host::start("source", change);
    let target = Host::start_with(
        Identity::in_memory("target").unwrap(),
        Arc::default(),
        Arc::clone(&counting) as Arc<dyn Receiver>,
        Arc::new(Inbox::default()),
        change,
    );
    source.knows(&target);
    target.knows(&source);
    let proxies: Vec<Proxy> = (0..3).map(|_| Proxy::start(target.endpoint.addresses()[0])).collect();
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address).collect();
    let session = source.endpoint.session(&target.peer_at(&addresses));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| cut_at_random(&proxies, &is_over));
        for number in 0..MESSAGES {
            let priority = Priority::ALL[number % 6];
            let payload = vec![number as u8; payload_bytes(number)];
            // A third of two priorities' messages keep their order.
            let channel = if number % 6 < 2 && number % 18 < 6 { number % 6 + 1 } else { 0 };
            let message = Message::new(
                ChannelId(channel as u64),
                priority,
                (number as u64).to_le_bytes().to_vec(),
                payload,
            );
            let message = message.unwrap();
            session.send(if channel > 0 { message.ordered() } else { message });
            while session.queued_bytes(priority) > 1 << 20 {
                // This only paces the sender; the result does not depend on it.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let begun = Instant::now();
        while counting.total.load(Ordering::Relaxed) < MESSAGES && begun.elapsed() < PATIENCE {
            // An interval of looks at the counter.
            std::thread::sleep(Duration::from_millis(5));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let missing = counting.seen.iter().filter(|count| count.load(Ordering::Relaxed) == 0).count();
    let twice = counting.seen.iter().filter(|count| count.load(Ordering::Relaxed) > 1).count();
    assert_eq!((missing, twice), (0, 0), "{:#?}", session.status());
    source.endpoint.stop();
    target.endpoint.stop();
}

/// Cuts a connection every few milliseconds, in varying ways.
fn cut_at_random(proxies: &[Proxy], is_over: &AtomicBool) {
    let mut random = 1u64;
    while !is_over.load(Ordering::Relaxed) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (random >> 33) as usize;
        let fate = match number % 10 {
            0 => Fate::BlackHole,
            1 => Fate::HalfOpen,
            _ => Fate::Close,
        };
        proxies[number % proxies.len()].hit(number / 7, fate);
        // The time between two cuts: connections live for some of it.
        std::thread::sleep(Duration::from_millis(5 + (number % 64) as u64));
    }
}

/// Sends through a proxy whose connection meets a fate, and expects everything to arrive over the next one.
fn check(fate: Fate) {
    let (source, target) =
        two_hosts(|settings: &mut Settings| settings.limits.silence_max = Duration::from_millis(400));
    let proxy = Proxy::start(target.endpoint.addresses()[0]);
    let session = source.endpoint.session(&target.peer_at(&[proxy.address]));
    session.send(message(Priority::Control, "before", ""));
    drop(target.inbox.deliveries(1));
    proxy.hit_all(fate, Fate::Pass);
    for _ in 0..10 {
        session.send(message(Priority::Bulk, "after", vec![1; 100_000]));
    }
    let delivered = target.inbox.deliveries(10);
    assert!(delivered.iter().all(|delivery| delivery.message.head() == "after"));
    target.inbox.connected();
    source.inbox.connected();
    source.inbox.disconnected();
    source.inbox.connected();
}

#[test]
fn a_closed_connection_is_made_again() {
    check(Fate::Close);
}

#[test]
fn a_black_holed_connection_is_noticed_and_made_again() {
    check(Fate::BlackHole);
}

#[test]
fn a_connection_that_is_silent_one_way_is_noticed_and_made_again() {
    check(Fate::HalfOpen);
}

#[test]
fn a_path_that_swallows_large_packets_makes_no_connection_and_both_hosts_name_it() {
    for (fate, said_here, said_there) in [
        (Fate::LargeVanishThere, "large packets of this host", "large packets of the other side"),
        (Fate::LargeVanishBack, "large packets of the other side", "large packets of this host"),
    ] {
        let (source, target) = two_hosts(|_| {});
        let proxy = Proxy::start(target.endpoint.addresses()[0]);
        proxy.hit_all(fate, fate);
        let session = source.endpoint.session(&target.peer_at(&[proxy.address]));
        wait_until("the dialler names the path", || {
            let connections = session.status().connections;
            let told = connections.iter().filter_map(|connection| connection.last_error.as_ref());
            told.into_iter().any(|error| error.contains(said_here) && error.contains("mtu"))
        });
        wait_until("the called host names the path", || {
            target.endpoint.refused().iter().any(|error| error.contains(said_there) && error.contains("mtu"))
        });
        assert!(!session.status().is_connected);
        // The path is mended.
        proxy.hit_all(Fate::Close, Fate::Pass);
        source.inbox.connected();
        session.send(message(Priority::Bulk, "large", vec![1; 100_000]));
        drop(target.inbox.deliveries(1));
    }
}

#[test]
fn one_lost_link_of_two_is_no_loss() {
    // Long enough that the other link is not taken for lost as well on a busy machine.
    let (source, target) =
        two_hosts(|settings: &mut Settings| settings.limits.silence_max = Duration::from_secs(5));
    let proxies = [(); 2].map(|()| Proxy::start(target.endpoint.addresses()[0]));
    let session = source.endpoint.session(&target.peer_at(&[proxies[0].address, proxies[1].address]));
    source.inbox.connected();
    wait_up(&session, 2);
    proxies[0].hit_all(Fate::BlackHole, Fate::BlackHole);
    for _ in 0..200 {
        session.send(message(Priority::Bulk, "", vec![1; 50_000]));
    }
    drop(target.inbox.deliveries(200));
    wait_up(&session, 1);
    let disconnected =
        |event: &crate::support::Event| matches!(event, crate::support::Event::Disconnected(_)).then_some(());
    assert_eq!(source.inbox.try_wait(Duration::ZERO, disconnected), None);
}

fn wait_up(session: &Session, count: usize) {
    let is_up = || session.status().connections.iter().filter(|it| it.is_up).count() == count;
    wait_until(&format!("{count} connections are up"), is_up);
}

#[test]
fn what_a_silent_link_carries_goes_over_the_other_before_it_is_known_to_be_dead() {
    // An eighth of it passes before the link is suspected; half of it is enough on any machine.
    let silence_max = Duration::from_secs(40);
    let (source, target) = two_hosts(|settings: &mut Settings| settings.limits.silence_max = silence_max);
    let proxies = [(); 2].map(|()| Proxy::start(target.endpoint.addresses()[0]));
    let session = source.endpoint.session(&target.peer_at(&[proxies[0].address, proxies[1].address]));
    wait_up(&session, 2);
    proxies[0].hit_all(Fate::BlackHole, Fate::BlackHole);
    let begun = Instant::now();
    for _ in 0..200 {
        session.send(message(Priority::Synchronous, "", vec![1; 1000]));
    }
    drop(target.inbox.deliveries(200));
    assert!(begun.elapsed() < silence_max / 2, "{:?}", begun.elapsed());
    assert_eq!(session.status().connections.iter().filter(|it| it.is_up).count(), 2);
}

#[test]
fn a_stopped_endpoint_leaves_nothing_behind() {
    // Heartbeats are frequent here: many meet the goodbye on its way.
    let (source, target) =
        two_hosts(|settings: &mut Settings| settings.limits.silence_max = Duration::from_secs(2));
    let session = source.endpoint.session(&target.peer());
    session.send(message(Priority::Bulk, "", vec![1; 1 << 20]));
    drop(target.inbox.deliveries(1));
    // A goodbye cannot follow half a frame.
    wait_until("all is acknowledged", || session.unacknowledged_bytes() == 0);
    drop(session);
    let Host { endpoint, inbox, known, .. } = source;
    endpoint.stop();
    drop(endpoint);
    // Every thread, task, connection and session held these; a busy machine ends threads late.
    wait_until("nobody holds them", || (Arc::strong_count(&inbox), Arc::strong_count(&known)) == (1, 1));
    let reason = target.inbox.disconnected();
    assert!(reason.contains("closed the connection in order"), "{reason}");
}

#[test]
fn a_closed_session_begins_anew() {
    let (source, target) = two_hosts(|_| {});
    let peer: Peer = target.peer();
    let session = source.endpoint.session(&peer);
    session.send(message(Priority::Control, "first", ""));
    drop(target.inbox.deliveries(1));
    let first = target.inbox.connected();
    source.endpoint.close(peer.id);
    session.send(message(Priority::Control, "too late", ""));
    target.inbox.disconnected();
    source.endpoint.session(&peer).send(message(Priority::Control, "second", ""));
    let (before, now) = target.inbox.restarted();
    assert_eq!(before, first);
    assert_ne!(now, first);
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "second");
}
