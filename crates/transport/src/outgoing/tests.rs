//! What is sent first, what is sent again, and what is not sent at all.

use super::{NeverSent, Outgoing};
use crate::credit::{CLASSES, cost};
use crate::frame::Acknowledgement;
use crate::message::{ChannelId, Message, Priority};

fn message(priority: Priority, length: usize) -> Message {
    Message::new(ChannelId(1), priority, "", vec![0; length]).unwrap()
}

fn news(floor: u64, ranges: &[(u64, u64)], granted: u64) -> Acknowledgement {
    Acknowledgement { floor, ranges: ranges.to_vec(), granted: [granted; CLASSES] }
}

/// Queues with all the credit that there is, and a message of each of these priorities.
fn with(priorities: &[Priority]) -> Outgoing {
    let mut outgoing = Outgoing::new(0);
    outgoing.acknowledge(&news(1, &[], u64::MAX / 2)).unwrap();
    priorities.iter().for_each(|priority| outgoing.push(message(*priority, 10)));
    outgoing
}

fn take(outgoing: &mut Outgoing, connection: u64) -> Option<(u64, Priority)> {
    outgoing.take(connection, None).map(|taken| (taken.number, taken.message.priority()))
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
    assert!(outgoing.take(1, Some(Priority::Memory)).is_none());
    assert!(outgoing.take(1, Some(Priority::Asynchronous)).is_some());
    assert!(outgoing.take(1, Some(Priority::Bulk)).is_none());
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
    let after = |outgoing: &mut Outgoing| outgoing.take(1, None).unwrap().after;
    assert_eq!([after(&mut outgoing), after(&mut outgoing)], [Some(0), Some(1)]);
    outgoing.acknowledge(&news(3, &[], 0)).unwrap();
    assert_eq!(after(&mut outgoing), Some(0));
}
