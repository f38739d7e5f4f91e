//! Which messages are sent first, which are sent again, and which are not sent at all.

use super::{NeverSent, Next, Outgoing, Taken, UnderWay};
use crate::credit::{CLASSES, class, cost};
use crate::frame::Acknowledgement;
use crate::message::{ChannelId, Message, Priority, PriorityBoost};

fn message(priority: Priority, length: usize) -> Message {
    message_on(ChannelId(1), priority, length)
}

fn message_on(channel: ChannelId, priority: Priority, length: usize) -> Message {
    Message::new(channel, priority, "", vec![0; length]).unwrap()
}

fn news(floor: u64, ranges: &[(u64, u64)], granted: u64) -> Acknowledgement {
    Acknowledgement { floor, ranges: ranges.to_vec(), granted: [granted; CLASSES] }
}

/// Returns queues with all the credit, and a message of each of these priorities.
fn with(priorities: &[Priority]) -> Outgoing {
    let mut outgoing = Outgoing::new(0);
    outgoing.acknowledge(&news(1, &[], u64::MAX / 2)).unwrap();
    priorities.iter().for_each(|priority| outgoing.push(message(*priority, 10)));
    outgoing
}

fn take(outgoing: &mut Outgoing, connection: u64) -> Option<(u64, Priority)> {
    begin(outgoing, connection).map(|taken| (taken.number, taken.message.priority()))
}

/// Takes the next message for a connection that has begun nothing.
fn begin(outgoing: &mut Outgoing, connection: u64) -> Option<Taken> {
    match outgoing.next(connection, &UnderWay::default())? {
        Next::Begin(taken) => Some(taken),
        Next::GoOn(priority) => panic!("nothing of {priority:?} has been begun"),
    }
}

/// Returns what a connection does next that has begun a message of this priority on the channel: begin another one, or go on.
fn amid(outgoing: &mut Outgoing, channel: ChannelId, priority: Priority) -> (&'static str, Priority) {
    let mut begun = UnderWay::default();
    begun[priority.index()] = Some(channel);
    match outgoing.next(1, &begun).unwrap() {
        Next::Begin(taken) => ("begin", taken.message.priority()),
        Next::GoOn(priority) => ("go on", priority),
    }
}

#[test]
fn the_most_urgent_goes_first_and_what_was_lost_before_what_is_new() {
    let mut outgoing = with(&[Priority::Bulk, Priority::Control, Priority::Bulk, Priority::Control]);
    assert_eq!(take(&mut outgoing, 1), Some((1, Priority::Control)));
    assert_eq!(take(&mut outgoing, 2), Some((2, Priority::Control)));
    assert_eq!(take(&mut outgoing, 1), Some((3, Priority::Bulk)));
    assert_eq!(outgoing.take_back(1), 2);
    assert_eq!(take(&mut outgoing, 2), Some((1, Priority::Control)));
    assert_eq!(take(&mut outgoing, 2), Some((3, Priority::Bulk)));
    assert_eq!(take(&mut outgoing, 2), Some((4, Priority::Bulk)));
    assert_eq!(take(&mut outgoing, 2), None);
}

#[test]
fn what_was_acknowledged_is_not_sent_again() {
    let mut outgoing = with(&[Priority::Bulk; 4]);
    (1..=4).for_each(|number| assert_eq!(take(&mut outgoing, 1), Some((number, Priority::Bulk))));
    outgoing.acknowledge(&news(2, &[(3, 3)], 0)).unwrap();
    assert_eq!(outgoing.unacknowledged_bytes(), 20);
    outgoing.take_back(1);
    outgoing.acknowledge(&news(3, &[], 0)).unwrap();
    assert_eq!(take(&mut outgoing, 2), Some((4, Priority::Bulk)));
    assert_eq!(take(&mut outgoing, 2), None);
}

#[test]
fn only_what_is_more_urgent_interrupts() {
    let mut outgoing = with(&[Priority::Bulk, Priority::Memory]);
    let channel = ChannelId(1);
    assert_eq!(amid(&mut outgoing, channel, Priority::Memory), ("go on", Priority::Memory));
    assert_eq!(amid(&mut outgoing, channel, Priority::Asynchronous), ("begin", Priority::Memory));
    assert_eq!(amid(&mut outgoing, channel, Priority::Bulk), ("go on", Priority::Bulk));
}

#[test]
fn what_is_hastened_goes_before_memory_whether_it_was_queued_before_or_after() {
    let (boosted, other) = (ChannelId(1), ChannelId(2));
    let mut outgoing = with(&[Priority::Memory, Priority::Bulk, Priority::Asynchronous]);
    outgoing.push(message_on(other, Priority::Asynchronous, 10));
    outgoing.set_boost(boosted, PriorityBoost::AboveMemory);
    outgoing.push(message_on(boosted, Priority::Bulk, 10));
    outgoing.push(message_on(boosted, Priority::Control, 10));
    let mut order = Vec::new();
    while let Some(taken) = begin(&mut outgoing, 1) {
        order.push((taken.message.channel(), taken.message.priority()));
    }
    let expected = [
        (boosted, Priority::Control),
        (boosted, Priority::Asynchronous),
        (boosted, Priority::Bulk),
        (boosted, Priority::Bulk),
        (boosted, Priority::Memory),
        (other, Priority::Asynchronous),
    ];
    assert_eq!(order, expected);
    assert_eq!(outgoing.queued_bytes(Priority::Bulk), 0);
    outgoing.set_boost(boosted, PriorityBoost::Off);
    outgoing.push(message_on(boosted, Priority::Bulk, 10));
    outgoing.push(message_on(boosted, Priority::Memory, 10));
    assert_eq!(begin(&mut outgoing, 1).unwrap().message.priority(), Priority::Memory);
}

#[test]
fn what_was_begun_before_its_channel_was_hastened_is_hastened_too() {
    let (boosted, other) = (ChannelId(1), ChannelId(2));
    let mut outgoing = with(&[Priority::Memory]);
    outgoing.set_boost(boosted, PriorityBoost::AboveMemory);
    assert_eq!(amid(&mut outgoing, boosted, Priority::Bulk), ("go on", Priority::Bulk));
    // Of two messages with one priority a connection ends the first, whatever waits for it.
    outgoing.push(message_on(boosted, Priority::Bulk, 10));
    assert_eq!(amid(&mut outgoing, other, Priority::Bulk), ("go on", Priority::Bulk));
    assert_eq!(amid(&mut outgoing, other, Priority::Asynchronous), ("begin", Priority::Bulk));
    assert_eq!(amid(&mut outgoing, other, Priority::Asynchronous), ("begin", Priority::Memory));
}

#[test]
fn what_is_hastened_uses_the_credit_of_its_own_class() {
    let mut outgoing = Outgoing::new(0);
    let mut granted = [u64::MAX / 2; CLASSES];
    granted[class(Priority::Bulk)] = cost(0, 10);
    outgoing.acknowledge(&Acknowledgement { floor: 1, ranges: Vec::new(), granted }).unwrap();
    outgoing.set_boost(ChannelId(1), PriorityBoost::AboveMemory);
    for priority in [Priority::Bulk, Priority::Bulk, Priority::Memory] {
        outgoing.push(message(priority, 10));
    }
    assert_eq!(take(&mut outgoing, 1), Some((1, Priority::Bulk)));
    assert_eq!(take(&mut outgoing, 1), Some((2, Priority::Memory)));
    assert_eq!(take(&mut outgoing, 1), None);
}

#[test]
fn credit_is_spent_once_for_each_message() {
    let mut outgoing = Outgoing::new(0);
    (0..2).for_each(|_| outgoing.push(message(Priority::Bulk, 10)));
    assert_eq!(take(&mut outgoing, 1), None);
    outgoing.acknowledge(&news(1, &[], cost(0, 10))).unwrap();
    assert_eq!(take(&mut outgoing, 1), Some((1, Priority::Bulk)));
    outgoing.take_back(1);
    assert_eq!(take(&mut outgoing, 1), Some((1, Priority::Bulk)));
    assert_eq!(take(&mut outgoing, 1), None);
    // An older acknowledgement takes nothing back.
    outgoing.acknowledge(&news(2, &[], 2 * cost(0, 10))).unwrap();
    outgoing.acknowledge(&news(1, &[], 0)).unwrap();
    assert_eq!(take(&mut outgoing, 1), Some((2, Priority::Bulk)));
}

#[test]
fn acknowledgements_of_what_was_never_sent_are_noticed() {
    let mut outgoing = with(&[Priority::Bulk; 2]);
    take(&mut outgoing, 1);
    for (floor, ranges) in
        [(3, &[][..]), (1, &[(2, 2)]), (1, &[(1, 0)]), (u64::MAX, &[]), (1, &[(1, u64::MAX)])]
    {
        assert_eq!(outgoing.acknowledge(&news(floor, ranges, 0)), Err(NeverSent), "{floor} {ranges:?}");
    }
    assert_eq!(outgoing.acknowledge(&news(2, &[], 0)), Ok(()));
}

#[test]
fn ordered_messages_name_the_one_before_them_until_that_has_arrived() {
    let mut outgoing = with(&[]);
    (0..3).for_each(|_| outgoing.push(message(Priority::Memory, 1).ordered()));
    let after = |outgoing: &mut Outgoing| begin(outgoing, 1).unwrap().after;
    assert_eq!([after(&mut outgoing), after(&mut outgoing)], [Some(0), Some(1)]);
    outgoing.acknowledge(&news(3, &[], 0)).unwrap();
    assert_eq!(after(&mut outgoing), Some(0));
}

#[test]
fn guests_requests_leave_a_part_of_the_link_to_what_is_less_urgent() {
    const LENGTH: usize = 64 << 10;
    let mut outgoing = with(&[]);
    (0..200).for_each(|_| outgoing.push(message(Priority::Pulled, LENGTH)));
    (0..40).for_each(|_| outgoing.push(message(Priority::Bulk, LENGTH)));
    let taken: Vec<_> = (0..90).map(|_| take(&mut outgoing, 1).unwrap().1).collect();
    let bulk = taken.iter().filter(|priority| **priority == Priority::Bulk).count();
    assert!((9..=11).contains(&bulk), "one in nine messages: {taken:?}");
    outgoing.push(message(Priority::Control, 10));
    assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Control, "nothing goes before that");
}

#[test]
fn what_is_sent_in_its_turn_is_sent_to_its_end_and_then_it_is_the_guests_turn() {
    let mut outgoing =
        with(&[Priority::Pulled, Priority::Pulled, Priority::Pulled, Priority::Bulk, Priority::Bulk]);
    assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Pulled);
    assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Bulk, "it is owed");
    assert_eq!(amid(&mut outgoing, ChannelId(1), Priority::Bulk), ("go on", Priority::Bulk));
    assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Pulled);
    // It has had its turn: a request interrupts it.
    assert_eq!(amid(&mut outgoing, ChannelId(1), Priority::Bulk), ("begin", Priority::Pulled));
}

#[test]
fn what_has_had_the_link_for_itself_is_owed_nothing() {
    let mut outgoing = with(&[]);
    (0..4).for_each(|_| outgoing.push(message(Priority::Bulk, 1 << 20)));
    (0..3).for_each(|_| assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Bulk));
    (0..100).for_each(|_| outgoing.push(message(Priority::Pulled, 64 << 10)));
    (0..100).for_each(|_| assert_eq!(take(&mut outgoing, 1).unwrap().1, Priority::Pulled));
}
