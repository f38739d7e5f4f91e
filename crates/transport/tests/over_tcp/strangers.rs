//! Hosts with the wrong identity, unknown ones, other protocols, and far too many connections.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::{Host, message, two_hosts, wait_until};
use transport::{Identity, Peer, Priority, Session, Settings, VERSION, Versions};

/// Waits until the session's status has an error that contains all of these.
fn expect_error(session: &Session, parts: &[&str]) {
    wait_until(&format!("the session shows {parts:?}"), || {
        let mut errors = session.status().connections.into_iter().filter_map(|it| it.last_error);
        errors.any(|error| parts.iter().all(|part| error.contains(part)))
    });
}

/// Waits until a host has refused a connection with these words.
fn expect_refusal(host: &Host, parts: &[&str]) {
    wait_until(&format!("somebody is refused with {parts:?}"), || {
        host.endpoint.refused().iter().any(|text| parts.iter().all(|part| text.contains(part)))
    });
}

#[test]
fn a_wrong_key_is_named_on_both_sides() {
    let (source, target) = two_hosts(|_| {});
    let expected = Identity::in_memory("expected").unwrap().id();
    let session = source.endpoint.session(&Peer { id: expected, ..target.peer() });
    let [expected, came] = [expected.to_string(), target.identity.id().to_string()];
    expect_error(&session, &["expected host", &expected, &came]);
    expect_refusal(&target, &["expecting host", &expected, &came]);
}

/// This is a host whose data folder was lost: the error must not say that it has stopped in order.
#[test]
fn a_host_that_called_and_has_another_key_since_is_called_and_found_out() {
    let (source, target) = (Host::start("source", |_| {}), Host::start("target", |_| {}));
    let successor = Host::start("successor", |_| {});
    source.knows(&target);
    target.known.add(source.peer_at(&successor.endpoint.addresses()));
    let session = source.endpoint.session(&target.peer());
    session.send(message(Priority::Control, "here", ""));
    drop(target.inbox.deliveries(1));
    source.endpoint.stop();
    let seen = target.endpoint.existing_session(source.identity.id()).unwrap();
    let [expected, came] = [source.identity.id().to_string(), successor.identity.id().to_string()];
    expect_error(&seen, &["expected host", &expected, &came]);
}

#[test]
fn a_host_that_is_not_known_is_refused_on_both_sides() {
    let (source, target) = (Host::start("source", |_| {}), Host::start("target", |_| {}));
    let session = source.endpoint.session(&target.peer());
    expect_error(&session, &["does not know this host"]);
    expect_refusal(&target, &["not known here", &source.identity.id().to_string()]);
}

fn check_versions(source: Versions, target: Versions) -> (Host, Host, Session) {
    let source = Host::start("source", |settings| settings.versions = source);
    let target = Host::start("target", |settings| settings.versions = target);
    source.knows(&target);
    target.knows(&source);
    let session = source.endpoint.session(&target.peer());
    (source, target, session)
}

#[test]
fn old_and_new_versions_understand_each_other_where_they_overlap() {
    let [old, new] = [Versions { lowest: 1, highest: 1 }, Versions { lowest: 1, highest: 9 }];
    for (one, other) in [(old, new), (new, old)] {
        let (_source, target, session) = check_versions(one, other);
        session.send(message(Priority::Control, "understood", ""));
        assert_eq!(target.inbox.deliveries(1)[0].message.head(), "understood");
    }
}

#[test]
fn a_host_of_a_newer_protocol_is_refused_by_name_on_both_sides() {
    let newer = Versions { lowest: VERSION + 1, highest: VERSION + 2 };
    let (_source, target, session) = check_versions(Versions::default(), newer);
    let [first, next, last] = [VERSION, VERSION + 1, VERSION + 2];
    let said =
        format!("this host speaks {first} to {first}, the other {next} to {last}: update the older one");
    expect_error(&session, &[&said]);
    expect_refusal(&target, &[&format!("this host speaks {next} to {last}, the other {first} to {first}")]);
}

#[test]
fn garbage_is_dropped_and_harms_nobody() {
    let (source, target) = two_hosts(|_| {});
    let address = target.endpoint.addresses()[0];
    let garbage: [&[u8]; 4] = [b"", b"GET / HTTP/1.1\r\n\r\n", &[0; 5000], &[22, 3, 1, 255, 255, 1]];
    for bytes in garbage {
        let mut stream = TcpStream::connect(address).unwrap();
        // At each step the host may have hung up already; whatever comes back, the connection ends.
        let _hung_up = stream
            .write_all(bytes)
            .and_then(|()| stream.shutdown(std::net::Shutdown::Write))
            .and_then(|()| stream.read_to_end(&mut Vec::new()));
    }
    source.endpoint.session(&target.peer()).send(message(Priority::Control, "fine", ""));
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "fine");
}

#[test]
fn thousands_of_silent_strangers_do_not_keep_a_peer_out() {
    let hasty = |settings: &mut Settings| settings.limits.handshake_max = Duration::from_secs(1);
    let (source, target) = (Host::start("source", |_| {}), Host::start("target", hasty));
    source.knows(&target);
    target.knows(&source);
    let address = target.endpoint.addresses()[0];
    let strangers: Vec<TcpStream> = (0..3000).map(|_| TcpStream::connect(address).unwrap()).collect();
    source.endpoint.session(&target.peer()).send(message(Priority::Control, "in", ""));
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "in");
    drop(strangers);
}

fn stranger(runtime: &tokio::runtime::Runtime, address: std::net::SocketAddr) -> TcpStream {
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        socket.connect(address).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn strangers_who_take_all_places_do_not_keep_a_known_host_out() {
    let few = |settings: &mut Settings| {
        settings.limits.unauthenticated_max = 8;
        settings.limits.unauthenticated_reserved = 4;
        // No place becomes free again while the test runs.
        settings.limits.handshake_max = Duration::from_secs(600);
    };
    let (source, target) = (Host::start("source", |_| {}), Host::start("target", few));
    source.knows(&target);
    target.known.add(source.peer());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let address = target.endpoint.addresses()[0];
    let _silent: Vec<TcpStream> = (0..4).map(|_| stranger(&runtime, address)).collect();
    // The strangers' places are taken: one more is closed, and never gets a reserved one.
    let mut one_more = stranger(&runtime, address);
    assert_eq!(one_more.read(&mut [0]).unwrap_or(0), 0);
    source.endpoint.session(&target.peer()).send(message(Priority::Control, "in", ""));
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "in");
}

#[test]
fn silent_connections_of_an_address_do_not_keep_a_known_host_out_that_comes_from_there() {
    let few = |settings: &mut Settings| {
        settings.limits.unauthenticated_per_address_max = 4;
        settings.limits.handshake_max = Duration::from_secs(600);
    };
    let (source, target) = (Host::start("source", |_| {}), Host::start("target", few));
    source.knows(&target);
    target.known.add(source.peer());
    let address = target.endpoint.addresses()[0];
    // These come from the known host's address.
    let mut silent: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(address).unwrap()).collect();
    source.endpoint.session(&target.peer()).send(message(Priority::Control, "in", ""));
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "in");
    assert_eq!(silent[0].read(&mut [0]).unwrap_or(0), 0);
}
