//! Priorities and credit: which messages go first, and how much may be in flight.

use std::time::Duration;

use crate::support::{Event, message, two_hosts};
use transport::{Priority, Settings, WINDOW_BYTES_MIN};

/// Share of the smallest window for messages in the background: half of it.
const BACKGROUND_BYTES: u64 = WINDOW_BYTES_MIN / 2;

fn small_window(settings: &mut Settings) {
    settings.limits.window_bytes = WINDOW_BYTES_MIN;
}

#[test]
fn what_is_urgent_overtakes_what_is_queued() {
    let (source, target) = two_hosts(small_window);
    let session = source.endpoint.session(&target.peer());
    for _ in 0..400 {
        session.send(message(Priority::Bulk, "bulk", vec![1; 1 << 20]));
    }
    for priority in [Priority::Memory, Priority::Control, Priority::Pulled] {
        session.send(message(priority, "urgent", vec![2; 100_000]));
    }
    // All deliveries are held, so most of the bulk cannot be sent; urgent messages have credit of their own.
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(target.inbox.wait("what is urgent", |event| match event {
            Event::Delivered(delivery) if delivery.message.head() == "urgent" => {
                Some(delivery.message.priority())
            }
            _ => None,
        }));
    }
    held.sort_unstable();
    assert_eq!(held, [Priority::Control, Priority::Pulled, Priority::Memory]);
    assert!(session.queued_bytes(Priority::Bulk) >= 380 << 20);
    assert_eq!(session.queued_bytes(Priority::Control), 0);
}

#[test]
fn a_receiver_that_holds_deliveries_holds_back_the_sender() {
    let (source, target) = two_hosts(small_window);
    let session = source.endpoint.session(&target.peer());
    for _ in 0..64 {
        session.send(message(Priority::Bulk, "", vec![1; 1 << 20]));
    }
    let room = (BACKGROUND_BYTES / ((1 << 20) + 256)) as usize;
    let held = target.inbox.deliveries(room);
    let one_more = |event: &Event| matches!(event, Event::Delivered(_)).then_some(());
    assert_eq!(target.inbox.try_wait(Duration::from_millis(200), one_more), None);
    drop(held);
    drop(target.inbox.deliveries(room));
    drop(target.inbox.deliveries(room));
    drop(target.inbox.deliveries(room));
    drop(target.inbox.deliveries(64 - 4 * room));
}

#[test]
fn a_queue_that_has_run_low_is_reported() {
    let (source, target) = two_hosts(|settings| settings.limits.low_water_bytes = 100_000);
    let session = source.endpoint.session(&target.peer());
    for _ in 0..5 {
        session.send(message(Priority::Memory, "", vec![1; 50_000]));
    }
    drop(target.inbox.deliveries(5));
    source.inbox.wait("a drained queue", |event| matches!(event, Event::Drained).then_some(()));
}
