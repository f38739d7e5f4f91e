//! Sessions over real TCP: messages arrive, whatever happens to the connections.

use crate::support::{Host, message, two_hosts};
use transport::Priority;

#[test]
fn messages_arrive_whole_in_both_directions() {
    let (source, target) = two_hosts(|_| {});
    let there = source.endpoint.session(&target.peer());
    for length in [0, 1, 10_000, 1 << 20] {
        there.send(message(Priority::Bulk, "head", vec![length as u8; length]));
    }
    let mut lengths: Vec<usize> = target
        .inbox
        .deliveries(4)
        .iter()
        .map(|delivery| {
            let message = &delivery.message;
            assert_eq!(message.head(), "head");
            assert!(message.payload().iter().all(|byte| *byte == message.payload().len() as u8));
            message.payload().len()
        })
        .collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [0, 1, 10_000, 1 << 20]);
    let back = target.endpoint.existing_session(source.identity.id()).unwrap();
    back.send(message(Priority::Control, "answer", ""));
    assert_eq!(source.inbox.deliveries(1)[0].message.head(), "answer");
    assert_eq!(back.incarnation(), Some(target.inbox.connected()));
}

#[test]
fn a_process_that_is_started_again_is_another_life() {
    // No other test uses this address, so the port stays free while nobody listens on it.
    let (source, target) = two_hosts(|settings| settings.listen = vec!["127.73.0.1:0".parse().unwrap()]);
    let session = source.endpoint.session(&target.peer());
    session.send(message(Priority::Control, "first", ""));
    drop(target.inbox.deliveries(1));
    let first = source.inbox.connected();
    let address = target.endpoint.addresses()[0];
    let Host { endpoint, known, identity, .. } = target;
    endpoint.stop();
    source.inbox.disconnected();
    session.send(message(Priority::Control, "for the first", ""));
    let target = Host::start_as(identity, known, |settings| settings.listen = vec![address]);
    let (before, now) = source.inbox.restarted();
    assert_eq!(before, first);
    source.inbox.connected();
    assert_ne!(now, first);
    session.send(message(Priority::Control, "for the second", ""));
    assert_eq!(target.inbox.deliveries(1)[0].message.head(), "for the second");
}
