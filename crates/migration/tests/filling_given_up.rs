//! Tests a volume whose former host is lost: reads of missing blocks are refused instead of held.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

#[path = "filling/support.rs"]
mod support;

use std::time::Duration;

use chronicle::{ByteRange, Generation};
use migration::filling::{Filling, FillingAction, FillingEvent, Manifest, Refusal, RequestId, UNIT_BYTES};
use migration::journal::{
    Entry, ExportSettings, Hollow, ImageLocation, MigratingVolume, Outcome, Record, Side, State, Summary,
    VolumeRecord,
};
use migration::{Attempt, HostId, MigrationId, PacingSettings, VolumeId};
use support::{UNITS, units};

const NOW: Duration = Duration::from_secs(1);

fn refuse(request: u64) -> FillingAction {
    FillingAction::Refuse { request: RequestId(request), why: Refusal::Unreadable }
}

/// Carries out all actions except fetches, because the former host never answers. Returns the rest.
fn carry_out(filling: &mut Filling) -> Vec<FillingAction> {
    let mut rest = Vec::new();
    while let Some(action) = filling.poll_action() {
        let event = match action {
            FillingAction::Note { note, .. } => FillingEvent::Noted { note, result: Ok(()) },
            FillingAction::FlushStore { recording, .. } => {
                FillingEvent::StoreFlushed { recording, result: Ok(()) }
            }
            FillingAction::Record { recording, .. } => FillingEvent::Recorded { recording, result: Ok(()) },
            FillingAction::Fetch { .. } => continue,
            other => {
                rest.push(other);
                continue;
            }
        };
        filling.handle_event(NOW, event);
    }
    rest
}

fn read(filling: &mut Filling, request: u64, range: ByteRange) -> Vec<FillingAction> {
    let request = RequestId(request);
    filling.handle_event(NOW, FillingEvent::ReadArrived { request, range });
    carry_out(filling)
}

#[test]
fn who_waits_for_what_was_given_up_is_refused_and_who_overwrites_it_is_not() {
    let mut filling = support::filling(PacingSettings::default());
    filling.handle_timeout(NOW);
    assert!(read(&mut filling, 1, units(3, 4)).is_empty(), "it waits");
    filling.handle_event(NOW, FillingEvent::MissingGivenUp);
    assert_eq!(carry_out(&mut filling), [refuse(1)]);
    assert_eq!(read(&mut filling, 2, units(0, 2)), [refuse(2)]);
    assert_eq!(read(&mut filling, 3, units(0, 1)), [FillingAction::Admit { request: RequestId(3) }]);
    assert_eq!(filling.first_missing(9), [units(1, UNITS)]);
    assert!(filling.progress().is_given_up && filling.progress().waits_for.is_none());

    let mut said = Vec::new();
    for start in 1..UNITS {
        let (request, range) = (RequestId(10 + start), units(start, start + 1));
        filling.handle_event(NOW, FillingEvent::WriteArrived { request, range });
        assert_eq!(carry_out(&mut filling), [FillingAction::Admit { request }]);
        filling.handle_event(NOW, FillingEvent::WriteEnded { request, result: Ok(()) });
        let done = carry_out(&mut filling);
        assert!(done.contains(&FillingAction::Written { request }), "{done:?}");
        said.extend(done.into_iter().filter(|action| *action == FillingAction::Whole));
    }
    // **N.B.** No time has passed: the last units are recorded at once.
    assert_eq!(said, [FillingAction::Whole], "nothing is missing, although the former host never answered");
}

const FORMER: HostId = HostId([7; 32]);
const DISK: VolumeId = VolumeId([1; 16]);

fn apply(state: &mut State, records: Vec<Record>) {
    state.apply(&Entry { at_unix_ms: 0, records }).expect("the records fit the state");
}

fn comes(state: &mut State, remote: MigrationId, lacks: Option<Manifest>) {
    let (migration, attempt) = (MigrationId(state.next_migration), Attempt(1));
    let image = |store: &str| ImageLocation::raw_file(store, format!("/{store}"));
    let generation = Generation(migration.0);
    let record = VolumeRecord {
        volume: DISK,
        name: "v".to_owned(),
        size_bytes: UNITS * UNIT_BYTES,
        block_size_bytes: 4096,
        image: image("b"),
        generation,
        export: ExportSettings::default(),
    };
    let side = Side::Incoming { peer: FORMER, peer_name: "a".to_owned(), remote, volumes: vec![record] };
    let volumes = vec![MigratingVolume { volume: DISK, source: image("a"), target: image("b") }];
    apply(state, vec![Record::MigrationStarted { migration, volumes, keep_source: false, side }]);
    let hollow = lacks.map(|manifest| Hollow { attempt, manifests: vec![(DISK, manifest)] });
    let hollow = hollow.map(|hollow| Record::Hollow { migration, hollow });
    apply(state, hollow.into_iter().chain([Record::TargetPrepared { migration, attempt }]).collect());
    apply(state, vec![Record::Owned { migration, attempt, generations: vec![(DISK, generation.next())] }]);
    let (outcome, summary) = (Outcome::Moved { left_over: String::new() }, Summary::default());
    apply(state, vec![Record::MigrationEnded { migration, outcome, summary }]);
}

#[test]
fn what_was_given_up_is_remembered_and_never_said_to_be_whole() {
    let mut state = State::default();
    let remote = MigrationId(5);
    comes(&mut state, remote, Some(Manifest { units: 3, checksum: 1 }));
    assert!(!state.fillings[&DISK].is_given_up);
    apply(&mut state, vec![Record::MissingGivenUp { volume: DISK }]);
    assert!(state.fillings[&DISK].is_given_up);

    // A new journal file, and a restart.
    let snapshot = state.snapshot();
    let mut state = State::default();
    apply(&mut state, snapshot);
    assert!(state.fillings[&DISK].is_given_up);

    // The former host asks, and must not delete what may be the only copy.
    apply(&mut state, vec![Record::VolumeRemoved { volume: DISK }]);
    assert!(state.fillings_from(FORMER, remote).next().is_some());

    // The volume is here once more, complete.
    comes(&mut state, MigrationId(6), None);
    assert!(state.fillings.is_empty());
}
