//! Tests of the queue that tasks share.

use std::sync::Arc;

use migration::journal::{ImageLocation, MigratingVolume};
use migration::queue::{Need, Party, QueueLimits, Turn, UnderWay, Withdrawal};
use migration::{MigrationId, VolumeId};

use super::{Queue, Wish, place_shown};
use crate::migrations::view::queued;

fn need(stores: &str) -> Need {
    let image = |store: char| ImageLocation::raw_file(store.to_string(), "/v.img");
    let moving =
        |store| MigratingVolume { volume: VolumeId([0; 16]), source: image(store), target: image(store) };
    Need::of(&stores.chars().map(moving).collect::<Vec<_>>())
}

fn wish(volume: u8, stores: &str) -> Wish {
    let (order, source) = (api::MigrateVolume::to("b"), ImageLocation::raw_file("a", "/a/v.img"));
    let shown = Box::new(queued("v", &source, "b", &order, 0));
    let volumes = vec![VolumeId([volume; 16])];
    Wish { name: format!("v{volume}"), order, volumes, need: need(stores), copied_to: None, shown }
}

fn under_way(volume: u8, stores: &str) -> UnderWay {
    UnderWay::Migration { of: Party::Own, volumes: vec![VolumeId([volume; 16])], need: need(stores) }
}

#[test]
fn an_admission_counts_once_until_it_is_dropped() {
    let queue = Arc::new(Queue::new(QueueLimits { per_host: 1, per_store: 1 }));
    let Turn::Now(admission) = queue.ask(&wish(1, "ab"), Vec::new) else { panic!("there is room") };
    assert!(matches!(queue.ask(&wish(2, "cd"), Vec::new), Turn::Later(_)));
    // It is also known as running.
    let limits = QueueLimits { per_host: 2, per_store: 2 };
    let wider = Arc::new(Queue::new(limits));
    let Turn::Now(_both) = wider.ask(&wish(1, "ab"), Vec::new) else { panic!("there is room") };
    assert!(matches!(wider.ask(&wish(2, "cd"), || vec![under_way(1, "ab")]), Turn::Now(_)));
    drop(admission);
    assert!(matches!(queue.ask(&wish(2, "cd"), || vec![under_way(1, "ab")]), Turn::Later(_)));
    assert!(matches!(queue.ask(&wish(2, "cd"), Vec::new), Turn::Now(_)));
}

#[test]
fn those_that_wait_begin_in_order_keep_their_numbers_and_can_be_withdrawn() {
    let queue = Arc::new(Queue::new(QueueLimits { per_host: 1, per_store: 1 }));
    let busy = || vec![under_way(9, "ab")];
    for (id, volume) in [(4, 1), (5, 2), (6, 3)] {
        assert!(matches!(queue.ask(&wish(volume, "ab"), busy), Turn::Later(_)));
        assert!(queue.join(MigrationId(id), wish(volume, "ab")));
    }
    assert!(matches!(queue.ask(&wish(2, "cd"), busy), Turn::Waits(MigrationId(5))));
    assert!(matches!(queue.outlook(&wish(2, "cd"), busy), Turn::Waits(MigrationId(5))));
    let Turn::Later(place) = queue.outlook(&wish(7, "ab"), busy) else { panic!("it would wait") };
    assert_eq!((place.place, place.waiting), (4, 4));
    assert!(place_shown(place).reason.contains("one migration under way"));
    assert!(matches!(queue.outlook(&wish(7, "ab"), busy), Turn::Later(_)), "nothing is left of the first");
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
