//! Tests that guests' reads do not wait for limits of the background fetches, and what returns to the former host.

#![expect(clippy::panic, reason = "a test fails by panicking")]

#[path = "filling/support.rs"]
mod support;

use std::time::Duration;

use chronicle::{BlockRange, BlockSize, ByteRange, LayeredBitmap};
use migration::PacingSettings;
use migration::filling::{
    FetchFault, FetchId, Filling, FillingAction, FillingEvent, FillingSettings, Manifest, RequestId,
    StoreFault, Told, UNIT_BYTES, UnitMap, Urgency, units_of,
};
use support::{UNITS, units};

const NOW: Duration = Duration::from_secs(1);

/// Returns a filling that requests all missing units in the background at once.
fn filling() -> Filling {
    support::filling(PacingSettings { depth: 4, chunk_bytes: UNITS * UNIT_BYTES, bytes_per_second: None })
}

fn tell(filling: &mut Filling, event: FillingEvent) -> Vec<FillingAction> {
    filling.handle_event(NOW, event);
    std::iter::from_fn(|| filling.poll_action()).collect()
}

fn read(filling: &mut Filling, request: u64, range: ByteRange) -> Vec<FillingAction> {
    tell(filling, FillingEvent::ReadArrived { request: RequestId(request), range })
}

fn fetched(filling: &mut Filling, fetch: FetchId) -> Vec<FillingAction> {
    tell(filling, FillingEvent::Fetched { fetch, result: Ok(()) })
}

fn fetches(actions: &[FillingAction], wanted: Urgency) -> Vec<(FetchId, ByteRange)> {
    let fetches = actions.iter().filter_map(|action| match action {
        FillingAction::Fetch { fetch, range, urgency } if *urgency == wanted => Some((*fetch, *range)),
        _ => None,
    });
    fetches.collect()
}

fn stores(actions: &[FillingAction]) -> Vec<ByteRange> {
    let stores = actions.iter().filter_map(|action| match action {
        FillingAction::Store { parts, .. } => Some(parts.clone()),
        _ => None,
    });
    stores.flatten().collect()
}

/// Everything is requested in the background, and a guest reads two units of it.
fn pulled() -> (Filling, FetchId, FetchId) {
    let mut filling = filling();
    filling.handle_timeout(NOW);
    let begun: Vec<_> = std::iter::from_fn(|| filling.poll_action()).collect();
    let [(pushed, _)] = fetches(&begun, Urgency::Background)[..] else { panic!("{begun:?}") };
    let actions = read(&mut filling, 1, units(3, 5));
    let [(pulled, range)] = fetches(&actions, Urgency::Urgent)[..] else { panic!("{actions:?}") };
    assert_eq!(range, units(3, 5), "only what the guest waits for crosses the link twice");
    (filling, pushed, pulled)
}

#[test]
fn what_is_on_its_way_in_the_background_is_pulled_by_who_waits_for_it() {
    let (mut filling, pushed, pulled) = pulled();
    assert!(fetches(&read(&mut filling, 2, units(4, 5)), Urgency::Urgent).is_empty(), "it is pulled already");
    assert_eq!(stores(&fetched(&mut filling, pulled)), [units(3, 5)]);
    let done = tell(&mut filling, FillingEvent::Stored { fetch: pulled, result: Ok(()) });
    for request in [1, 2] {
        assert!(done.contains(&FillingAction::Admit { request: RequestId(request) }), "{done:?}");
    }
    assert_eq!(stores(&fetched(&mut filling, pushed)), [units(1, 3), units(5, UNITS)]);
}

#[test]
fn of_two_that_bring_a_unit_one_is_stored_and_no_write_of_the_guest_lies_between() {
    let (mut filling, pushed, pulled) = pulled();
    assert_eq!(stores(&fetched(&mut filling, pulled)), [units(3, 5)]);
    assert_eq!(
        stores(&fetched(&mut filling, pushed)),
        [units(1, 3), units(5, UNITS)],
        "that is being stored"
    );
    let write = FillingEvent::WriteArrived { request: RequestId(9), range: units(4, 5) };
    assert!(tell(&mut filling, write).is_empty(), "it waits for what is being stored there");
    let done = tell(&mut filling, FillingEvent::Stored { fetch: pulled, result: Ok(()) });
    assert!(done.contains(&FillingAction::Admit { request: RequestId(9) }), "{done:?}");
    assert!(stores(&done).is_empty());
}

#[test]
fn a_pull_that_fails_is_made_again_although_the_same_is_on_its_way() {
    let (mut filling, _, pulled) = pulled();
    let away = FillingEvent::Fetched { fetch: pulled, result: Err(FetchFault::Away) };
    assert!(fetches(&tell(&mut filling, away), Urgency::Urgent).is_empty(), "not at once");
    filling.handle_timeout(NOW * 2);
    let again: Vec<_> = std::iter::from_fn(|| filling.poll_action()).collect();
    assert!(
        matches!(fetches(&again, Urgency::Urgent)[..], [(_, range)] if range == units(3, 5)),
        "{again:?}"
    );
}

#[test]
fn what_is_missing_here_is_not_lacking_there_unless_a_part_of_its_block_is_here() {
    let filling = filling();
    let runs =
        |lacking: LayeredBitmap| lacking.runs().map(|run| (run.start.0, run.end.0)).collect::<Vec<_>>();
    let units_alone = filling.lacking_there(None, BlockSize::new(4 << 10).unwrap());
    assert_eq!(runs(units_alone), [(0, 1)], "all but what is missing");
    // Of the first block one unit is here, of the second none.
    let blocks = BlockSize::new(16 << 10).unwrap();
    assert_eq!(runs(filling.lacking_there(None, blocks)), [(0, 1)]);
    let mut written = LayeredBitmap::new(blocks.blocks_of(UNITS * UNIT_BYTES));
    assert!(filling.lacking_there(Some(written.clone()), blocks).is_empty());
    written.insert(BlockRange::new(0, 2));
    assert_eq!(runs(filling.lacking_there(Some(written), blocks)), [(0, 1)]);
}

#[test]
fn a_read_passes_by_a_store_that_takes_nothing_and_the_store_is_tried_again() {
    let is_passed = |action: &FillingAction| matches!(action, FillingAction::PassBy { .. });
    let mut filling = filling();
    let (fetch, _) = fetches(&read(&mut filling, 1, units(0, 3)), Urgency::Urgent)[0];
    fetched(&mut filling, fetch);
    let failed = tell(&mut filling, FillingEvent::Stored { fetch, result: Err(StoreFault) });
    let Some(FillingAction::PassBy { fetch, parts }) = failed.into_iter().find(is_passed) else {
        panic!("the read waits for the store")
    };
    assert_eq!(parts, [units(1, 3)], "what is present is read from the store");
    let passed = tell(&mut filling, FillingEvent::Passed { fetch, result: Ok(()) });
    assert!(passed.contains(&FillingAction::AdmitWith { request: RequestId(1), fetch }));
    assert_eq!(filling.progress().units_missing, UNITS - 1, "nothing of it is kept");

    // The next read does not wait for a try to store anything.
    assert!(read(&mut filling, 2, units(4, 5)).iter().any(is_passed));
    let (later, _) = filling.poll_timeout().expect("the store is tried again");
    filling.handle_timeout(later);
    let actions: Vec<_> = std::iter::from_fn(|| filling.poll_action()).collect();
    assert!(!fetches(&actions, Urgency::Background).is_empty());
}

#[test]
fn a_start_that_finds_nothing_missing_is_whole_once_what_was_noted_is_written_again_and_durable() {
    let size_bytes = UNITS * UNIT_BYTES;
    let empty = || LayeredBitmap::new(units_of(size_bytes));
    let mut volatile = empty();
    volatile.insert(BlockRange::new(2, 3));
    let known = UnitMap { missing: empty(), late: empty(), volatile, manifest: Manifest::NOTHING };
    let settings = FillingSettings { size_bytes, pacing: PacingSettings::default() };
    let mut filling = Told::new(size_bytes, Some(known)).begin(settings);
    let actions = tell(&mut filling, FillingEvent::WaitsLimited { to: None });
    let [FillingAction::Rewrite { rewrite, range }] = actions[..] else { panic!("{actions:?}") };
    assert_eq!(range, units(2, 3), "a flush before the start may have lost it");
    let actions = tell(&mut filling, FillingEvent::Rewritten { rewrite, result: Ok(()) });
    let [FillingAction::FlushStore { recording, .. }] = actions[..] else { panic!("{actions:?}") };
    let actions = tell(&mut filling, FillingEvent::StoreFlushed { recording, result: Ok(()) });
    assert_eq!(actions, [FillingAction::Record { recording, units: vec![BlockRange::new(2, 3)] }]);
    let actions = tell(&mut filling, FillingEvent::Recorded { recording, result: Ok(()) });
    assert_eq!(actions, [FillingAction::Whole]);
}
