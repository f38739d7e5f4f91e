//! Turns: what may begin, in which order, and that nothing waits for ever.

use std::sync::Arc;

use migration::journal::ImageLocation;
use migration::{MigrationId, VolumeId};
use proptest::prelude::*;

use super::{Need, Obstacle, Outlook, Queue, Turn, UnderWay, Wish, Withdrawal, judge};
use crate::config::QueueLimits;
use crate::migrations::view::queued;

const LIMITS: QueueLimits = QueueLimits { per_host: 3, per_store: 2 };

fn need(stores: &str) -> Need {
    Need { stores: stores.chars().map(String::from).collect() }
}

fn needs(stores: &[&str]) -> Vec<Need> {
    stores.iter().map(|stores| need(stores)).collect()
}

fn judged(limits: QueueLimits, under_way: &[&str], waiting: &[&str]) -> String {
    let judged = judge(limits, &needs(under_way), &needs(waiting));
    let word = |obstacle: Option<Obstacle>| match obstacle {
        None => "go".to_owned(),
        Some(Obstacle::Host { .. }) => "host".to_owned(),
        Some(Obstacle::Store { store, .. }) => store,
    };
    judged.into_iter().map(word).collect::<Vec<_>>().join(" ")
}

fn wish(volume: u8, stores: &str) -> Wish {
    let (order, source) = (api::MigrateVolume::to("b"), ImageLocation::raw_file("a", "/a/v.img"));
    let shown = Box::new(queued("v", &source, "b", &order, 0));
    let volumes = vec![VolumeId([volume; 16])];
    Wish { name: format!("v{volume}"), order, volumes, need: need(stores), shown }
}

fn under_way(volume: u8, stores: &str) -> UnderWay {
    UnderWay { volumes: vec![VolumeId([volume; 16])], need: need(stores) }
}

#[test]
fn what_has_room_begins_in_order_and_what_waits_names_what_is_full() {
    assert_eq!(judged(LIMITS, &[], &["ab", "cd", "ef", "gh"]), "go go go host");
    assert_eq!(judged(LIMITS, &["ab"], &["ac", "ad", "ef"]), "go a go");
    assert_eq!(judged(LIMITS, &["ab", "ab", "cd"], &["ef"]), "host");
    assert_eq!(judged(LIMITS, &["", ""], &["", ""]), "go host");
}

#[test]
fn nobody_overtakes_into_a_store_that_somebody_waits_for() {
    // The first waits for a and b: the second would take the last place in b.
    let limits = QueueLimits { per_host: 9, ..LIMITS };
    assert_eq!(judged(limits, &["a", "a"], &["ab", "b", "b"]), "a go b");
    // What needs neither goes on.
    assert_eq!(judged(limits, &["a", "a"], &["ab", "ab", "cd"]), "a a go");
}

#[test]
fn an_admission_counts_once_until_it_is_dropped() {
    let queue = Arc::new(Queue::new(QueueLimits { per_host: 1, per_store: 1 }));
    let Turn::Now(admission) = queue.ask(&wish(1, "ab"), Vec::new) else { panic!("there is room") };
    assert!(matches!(queue.ask(&wish(2, "cd"), Vec::new), Turn::Later));
    // It is known to be under way as well.
    let limits = QueueLimits { per_host: 2, per_store: 2 };
    let wider = Arc::new(Queue::new(limits));
    let Turn::Now(_both) = wider.ask(&wish(1, "ab"), Vec::new) else { panic!("there is room") };
    assert!(matches!(wider.ask(&wish(2, "cd"), || vec![under_way(1, "ab")]), Turn::Now(_)));
    drop(admission);
    assert!(matches!(queue.ask(&wish(2, "cd"), || vec![under_way(1, "ab")]), Turn::Later));
    assert!(matches!(queue.ask(&wish(2, "cd"), Vec::new), Turn::Now(_)));
}

#[test]
fn those_that_wait_begin_in_order_keep_their_numbers_and_can_be_withdrawn() {
    let queue = Arc::new(Queue::new(QueueLimits { per_host: 1, per_store: 1 }));
    let busy = || vec![under_way(9, "ab")];
    for (id, volume) in [(4, 1), (5, 2), (6, 3)] {
        assert!(matches!(queue.ask(&wish(volume, "ab"), busy), Turn::Later));
        assert!(queue.join(MigrationId(id), wish(volume, "ab")));
    }
    assert!(matches!(queue.ask(&wish(2, "cd"), busy), Turn::Waits(MigrationId(5))));
    assert!(matches!(queue.outlook(&wish(2, "cd"), busy), Outlook::Waits(MigrationId(5))));
    let Outlook::Later(place) = queue.outlook(&wish(7, "ab"), busy) else { panic!("it would wait") };
    assert_eq!((place.place, place.waiting), (4, 4));
    assert!(matches!(queue.outlook(&wish(7, "ab"), busy), Outlook::Later(_)), "nothing is left of the first");
    assert_eq!((queue.next_free(), queue.of(VolumeId([3; 16]))), (7, Some(MigrationId(6))));
    let place = queue.show(MigrationId(6), busy).unwrap().queue.unwrap();
    assert_eq!((place.place, place.waiting), (3, 3));
    assert!(place.reason.contains("one migration under way"), "{place:?}");
    assert!(queue.next(busy).is_empty());

    assert!(matches!(queue.withdraw(MigrationId(5)), Withdrawal::Withdrawn(_)));
    let begun = queue.next(Vec::new);
    assert_eq!(begun.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [MigrationId(4)]);
    assert!(matches!(queue.withdraw(MigrationId(4)), Withdrawal::Begins { .. }));
    assert!(queue.next(Vec::new).is_empty(), "the first one is counted");
    queue.wait_again(MigrationId(4));
    drop(begun);
    assert_eq!(queue.next(Vec::new).first().map(|(id, ..)| *id), Some(MigrationId(4)));
    queue.leave(MigrationId(4));
    assert_eq!(queue.ids(), [MigrationId(6)]);
    assert!(matches!(queue.withdraw(MigrationId(4)), Withdrawal::Unknown));
}

proptest! {
    /// However many are ordered for whatever stores: no limit is passed, and each begins in the end, and before all that
    /// were ordered later for the same stores.
    #[test]
    fn limits_hold_and_everybody_gets_a_turn(
        orders in prop::collection::vec("[a-d]{1,2}", 1..20),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 20),
    ) {
        let mut waiting: Vec<(usize, Need)> = orders.iter().map(|stores| need(stores)).enumerate().collect();
        let mut running: Vec<(usize, Need)> = Vec::new();
        let mut begun = Vec::new();
        for end in ends {
            let used: Vec<Need> = running.iter().map(|(_, need)| need.clone()).collect();
            let line: Vec<Need> = waiting.iter().map(|(_, need)| need.clone()).collect();
            let verdicts = judge(LIMITS, &used, &line);
            let mut verdicts = verdicts.iter();
            waiting.retain(|one| {
                let goes = verdicts.next().is_some_and(Option::is_none);
                if goes {
                    running.push(one.clone());
                    begun.push(one.clone());
                }
                !goes
            });
            prop_assert!(running.len() <= 3);
            for store in ["a", "b", "c", "d"] {
                prop_assert!(running.iter().filter(|(_, need)| need.stores.contains(store)).count() <= 2);
            }
            prop_assert!(!running.is_empty() || waiting.is_empty(), "somebody always has a turn");
            if !running.is_empty() {
                running.remove(end.index(running.len()));
            }
        }
        prop_assert!(waiting.is_empty(), "each end lets at least one begin");
        for (at, (number, need)) in begun.iter().enumerate() {
            let overtaken = begun[at..].iter().any(|(later, other)| later < number && other.stores == need.stores);
            prop_assert!(!overtaken, "{begun:?}");
        }
    }
}
