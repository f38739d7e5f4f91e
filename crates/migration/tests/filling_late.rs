//! Tests a volume whose former host is silent, with guests that prefer an error to an endless wait.

#[path = "filling/support.rs"]
mod support;

use std::time::Duration;

use chronicle::ByteRange;
use migration::PacingSettings;
use migration::filling::{
    FetchFault, FetchId, Filling, FillingAction, FillingEvent, Refusal, RequestId, StoreFault, UNIT_BYTES,
    Urgency,
};
use support::units;

const WAIT_MAX: Duration = Duration::from_secs(20);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns a filling that fetches one unit at a time in the background.
fn filling() -> Filling {
    support::filling(PacingSettings { depth: 1, chunk_bytes: UNIT_BYTES, bytes_per_second: None })
}

/// Returns the current actions, without those for durability.
fn asked(filling: &mut Filling, now: Duration) -> Vec<FillingAction> {
    filling.handle_timeout(now);
    let mut actions = Vec::new();
    while let Some(action) = filling.poll_action() {
        match action {
            FillingAction::FlushStore { .. } | FillingAction::Record { .. } | FillingAction::Note { .. } => {}
            action => actions.push(action),
        }
    }
    actions
}

fn read(filling: &mut Filling, now: Duration, request: u64, range: ByteRange) {
    filling.handle_event(now, FillingEvent::ReadArrived { request: RequestId(request), range });
}

fn refuses(actions: &[FillingAction]) -> Vec<u64> {
    let refused = actions.iter().filter_map(|action| match action {
        FillingAction::Refuse { request, why: Refusal::Late } => Some(request.0),
        _ => None,
    });
    refused.collect()
}

fn pulls(actions: &[FillingAction]) -> Vec<(FetchId, ByteRange)> {
    let pulled = actions.iter().filter_map(|action| match action {
        FillingAction::Fetch { fetch, range, urgency: Urgency::Urgent } => Some((*fetch, *range)),
        _ => None,
    });
    pulled.collect()
}

fn arrives(filling: &mut Filling, now: Duration, fetch: FetchId) {
    filling.handle_event(now, FillingEvent::Fetched { fetch, result: Ok(()) });
    filling.handle_event(now, FillingEvent::Stored { fetch, result: Ok(()) });
}

#[test]
fn reads_wait_for_ever_unless_that_is_limited() {
    let mut filling = filling();
    read(&mut filling, at(0), 1, units(4, 5));
    assert!(refuses(&asked(&mut filling, at(100_000))).is_empty());
    // Reads that have waited long enough already are refused at once.
    filling.handle_event(at(100_000), FillingEvent::WaitsLimited { to: Some(WAIT_MAX) });
    assert_eq!(refuses(&asked(&mut filling, at(100_000))), [1]);
}

#[test]
fn a_read_is_refused_when_the_reservoir_has_said_nothing_for_so_long_and_finds_its_bytes_when_it_comes_back()
{
    let mut filling = filling();
    filling.handle_event(at(0), FillingEvent::WaitsLimited { to: Some(WAIT_MAX) });
    read(&mut filling, at(1), 1, units(4, 6));
    let pulled = pulls(&asked(&mut filling, at(1)));
    assert_eq!(pulled.iter().map(|(_, range)| *range).collect::<Vec<_>>(), [units(4, 6)]);
    assert_eq!(filling.poll_timeout().map(|(when, _)| when), Some(at(21)));
    assert!(refuses(&asked(&mut filling, at(20))).is_empty());
    assert_eq!(refuses(&asked(&mut filling, at(21))), [1]);
    let progress = filling.progress();
    assert_eq!((progress.reads_late, progress.units_owed, progress.requests_waiting), (1, 2, 0));
    assert_eq!(filling.poll_timeout(), None, "nobody waits");

    // The host was restarted meanwhile: the same units are fetched again with the same urgency, although no guest waits.
    let (fetch, _) = pulled[0];
    filling.handle_event(at(60), FillingEvent::Fetched { fetch, result: Err(FetchFault::Away) });
    let again = pulls(&asked(&mut filling, at(61)));
    assert_eq!(again.iter().map(|(_, range)| *range).collect::<Vec<_>>(), [units(4, 6)]);
    arrives(&mut filling, at(62), again[0].0);
    assert_eq!(filling.progress().units_owed, 0);
    read(&mut filling, at(63), 2, units(4, 6));
    assert!(asked(&mut filling, at(63)).contains(&FillingAction::Admit { request: RequestId(2) }));
}

#[test]
fn a_reservoir_that_answers_somebody_is_not_away() {
    let mut filling = filling();
    filling.handle_event(at(0), FillingEvent::WaitsLimited { to: Some(WAIT_MAX) });
    read(&mut filling, at(0), 1, units(4, 5));
    read(&mut filling, at(0), 2, units(6, 7));
    let pulled = pulls(&asked(&mut filling, at(0)));
    arrives(&mut filling, at(19), pulled[0].0);
    assert!(refuses(&asked(&mut filling, at(38))).is_empty());
    assert_eq!(refuses(&asked(&mut filling, at(39))), [2]);
}

#[test]
fn what_waits_for_this_hosts_own_store_is_not_refused() {
    let mut filling = filling();
    filling.handle_event(at(0), FillingEvent::WaitsLimited { to: Some(WAIT_MAX) });
    // A unit that a guest is about to write.
    let write = RequestId(1);
    filling.handle_event(at(0), FillingEvent::WriteArrived { request: write, range: units(7, 8) });
    read(&mut filling, at(0), 2, units(7, 8));
    // A unit that has arrived, and is being stored.
    read(&mut filling, at(0), 3, units(4, 5));
    let pulled = pulls(&asked(&mut filling, at(0)));
    filling.handle_event(at(0), FillingEvent::Fetched { fetch: pulled[0].0, result: Ok(()) });
    assert!(refuses(&asked(&mut filling, at(60))).is_empty());
    filling.handle_event(at(60), FillingEvent::Stored { fetch: pulled[0].0, result: Err(StoreFault) });
    assert!(refuses(&asked(&mut filling, at(60))).is_empty(), "the store takes nothing");
    filling.handle_event(at(60), FillingEvent::WriteEnded { request: write, result: Ok(()) });
    let actions: Vec<_> = std::iter::from_fn(|| filling.poll_action()).collect();
    let is_admitted =
        |actions: &[FillingAction]| actions.contains(&FillingAction::Admit { request: RequestId(2) });
    assert!(!is_admitted(&actions), "it would see what a kill takes back");
    let note = actions.iter().find_map(|action| match action {
        FillingAction::Note { note, .. } => Some(*note),
        _ => None,
    });
    filling.handle_event(at(60), FillingEvent::Noted { note: note.expect("a note"), result: Ok(()) });
    assert!(is_admitted(&asked(&mut filling, at(60))));
}

#[test]
fn what_is_given_up_or_overwritten_is_owed_to_nobody() {
    let mut filling = filling();
    filling.handle_event(at(0), FillingEvent::WaitsLimited { to: Some(WAIT_MAX) });
    read(&mut filling, at(0), 1, units(4, 7));
    assert_eq!(refuses(&asked(&mut filling, at(20))), [1]);
    let write = RequestId(2);
    filling.handle_event(at(20), FillingEvent::WriteArrived { request: write, range: units(4, 5) });
    filling.handle_event(at(20), FillingEvent::WriteEnded { request: write, result: Ok(()) });
    assert_eq!(filling.progress().units_owed, 2);
    filling.handle_event(at(20), FillingEvent::MissingGivenUp);
    assert_eq!(filling.progress().units_owed, 0);
}
