//! Messages are delivered once, and in order where that was requested; a peer that breaks the rules is detected.

use proptest::prelude::*;

use super::{Arrival, Incoming, Violation};
use crate::credit::{WINDOW_BYTES_MIN, class, cost_of};
use crate::message::{ChannelId, Message, PAYLOAD_BYTES_MAX, Priority};
use crate::sequence_set::SPAN_MAX;

fn message(priority: Priority, length: usize) -> Message {
    Message::new(ChannelId(1), priority, "", vec![0; length]).unwrap()
}

/// Lets one message arrive, and returns the numbers delivered by that.
fn arrive(incoming: &mut Incoming, number: u64, after: Option<u64>) -> Vec<u64> {
    let mut delivered = Vec::new();
    match incoming.arrive(number, after, message(Priority::Control, 0)).unwrap() {
        Arrival::Deliver(_) => delivered.push(number),
        Arrival::DeliverOrdered(_) => {
            let mut next = Some(number);
            while let Some(number) = next {
                delivered.push(number);
                next = incoming.passed(number).map(|(number, _)| number);
            }
        }
        Arrival::Waits | Arrival::Known => {}
    }
    delivered
}

#[test]
fn a_sender_without_credit_is_noticed() {
    let mut incoming = Incoming::new(WINDOW_BYTES_MIN);
    let large = message(Priority::Bulk, PAYLOAD_BYTES_MAX);
    let room = WINDOW_BYTES_MIN / 2 / cost_of(&large);
    for number in 1..=room {
        incoming.arrive(number, None, large.clone()).unwrap();
    }
    assert_eq!(incoming.arrive(room + 1, None, large.clone()).unwrap_err(), Violation::Credit);
    // More urgent messages have credit of their own.
    incoming.arrive(room + 2, None, message(Priority::Control, 100)).unwrap();
    incoming.release(class(Priority::Bulk), cost_of(&large));
    incoming.arrive(room + 1, None, large).unwrap();
}

#[test]
fn numbers_and_places_that_cannot_be_are_noticed() {
    let mut incoming = Incoming::new(WINDOW_BYTES_MIN);
    let mut check = |number, after| incoming.arrive(number, after, message(Priority::Control, 0)).map(|_| ());
    assert_eq!(check(SPAN_MAX + 1, None), Err(Violation::Span));
    assert_eq!(check(SPAN_MAX + 1, Some(1)), Err(Violation::Span));
    assert_eq!(check(3, Some(1)), Ok(()));
    assert_eq!(check(4, Some(1)), Err(Violation::Order));
}

proptest! {
    /// Every message is delivered once, however often and in whichever order it comes, and a chain in its order.
    #[test]
    fn each_is_delivered_once_and_a_chain_in_order(order in proptest::collection::vec(0usize..20, 0..60)) {
        let mut incoming = Incoming::new(WINDOW_BYTES_MIN);
        let mut delivered = Vec::new();
        // Even numbers are a chain; then everything comes once more, so that nothing is missing.
        for place in order.into_iter().chain(0..20) {
            let number = place as u64 + 1;
            let after = number.is_multiple_of(2).then(|| number - 2);
            delivered.extend(arrive(&mut incoming, number, after));
        }
        let chain: Vec<u64> = delivered.iter().copied().filter(|number| number.is_multiple_of(2)).collect();
        prop_assert!(chain.is_sorted());
        delivered.sort_unstable();
        prop_assert_eq!(delivered, (1..=20).collect::<Vec<u64>>());
        prop_assert_eq!(incoming.state().floor, 21);
    }
}
