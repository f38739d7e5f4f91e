//! Tests that the source of incomplete volumes is informed without asking: of their completeness, and until then of the missing
//! units.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{Generation, ReplicaOf};
use migration::filling::Manifest;
use migration::journal::{
    Entry, ExportSettings, Forwarding, Hollow, ImageLocation, MigratingVolume, Outcome, Record, Side, State,
    Summary, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::recovery::{answer_as_target, asked_by_itself, nothing_kept_of};
use migration::source::{Following, Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::{Attempt, HostId, MigrationId, Phase, Source, VolumeId};

const FORMER: HostId = HostId([7; 32]);
const DISKS: [VolumeId; 2] = [VolumeId([1; 16]), VolumeId([2; 16])];
const REMOTE: MigrationId = MigrationId(5);
const HERE: MigrationId = MigrationId(0);
const ATTEMPT: Attempt = Attempt(3);
const NOW: Duration = Duration::from_secs(1);

fn apply(state: &mut State, records: &[Record]) {
    state.apply(&Entry { at_unix_ms: 0, records: records.to_vec() }).expect("the records fit the state");
}

fn moving() -> Vec<MigratingVolume> {
    let image = |store: &str, volume: VolumeId| ImageLocation::raw_file(store, format!("/{store}/{volume}"));
    let moving = |volume| MigratingVolume { volume, source: image("a", volume), target: image("b", volume) };
    DISKS.map(moving).to_vec()
}

fn record(volume: VolumeId, image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume,
        name: volume.to_string(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image,
        generation: Generation(1),
        export: ExportSettings::default(),
    }
}

fn hollow(migration: MigrationId) -> Record {
    hollow_of(migration, 4)
}

fn hollow_of(migration: MigrationId, units: u64) -> Record {
    let manifests = DISKS.map(|volume| (volume, Manifest { units, checksum: 1 })).to_vec();
    Record::Hollow { migration, hollow: Hollow { attempt: ATTEMPT, manifests } }
}

fn next_generations() -> Vec<(VolumeId, Generation)> {
    DISKS.map(|volume| (volume, Generation(2))).to_vec()
}

fn ended(migration: MigrationId) -> Record {
    let outcome = Outcome::Moved { left_over: String::new() };
    Record::MigrationEnded { migration, outcome, summary: Summary::default() }
}

/// Returns the journal of a host that owns both disks, and lacks some of each.
fn owner() -> State {
    let mut state = State::default();
    let volumes = moving().into_iter().map(|moving| record(moving.volume, moving.target)).collect();
    let side = Side::Incoming { peer: FORMER, peer_name: "a".to_owned(), remote: REMOTE, volumes };
    let started = Record::MigrationStarted { migration: HERE, volumes: moving(), keep_source: false, side };
    apply(&mut state, &[started]);
    apply(&mut state, &[hollow(HERE), Record::TargetPrepared { migration: HERE, attempt: ATTEMPT }]);
    let owned = Record::Owned { migration: HERE, attempt: ATTEMPT, generations: next_generations() };
    apply(&mut state, &[owned]);
    state
}

/// Returns the messages sent unasked when these records become durable.
fn said(state: &mut State, records: &[Record]) -> Vec<ToSource> {
    let asked = asked_by_itself(state, records);
    apply(state, records);
    let answer = |(peer, remote, asked): &(HostId, MigrationId, ToTarget)| {
        assert_eq!((*peer, *remote), (FORMER, REMOTE));
        answer_as_target(state, *peer, *remote, asked)
    };
    asked.iter().filter_map(answer).collect()
}

#[test]
fn it_is_said_unasked_once_all_is_there_and_not_before() {
    let [one, other] = DISKS.map(|volume| Record::Filled { volume });
    let mut state = owner();
    assert_eq!(said(&mut state, &[ended(HERE)]), []);
    assert_eq!(said(&mut state, std::slice::from_ref(&one)), [], "the other disk lacks something");
    // A new journal file knows as much.
    let mut again = State::default();
    apply(&mut again, &state.snapshot());
    assert_eq!(again, state);
    assert_eq!(said(&mut state, std::slice::from_ref(&other)), [ToSource::Whole(ATTEMPT)]);
    assert!(state.migrations[&HERE].hollow.is_none(), "nobody needs it any more");

    // The last block may arrive before the end of the migration is durable. It is reported with that end.
    let mut state = owner();
    assert_eq!(said(&mut state, &[one, other]), []);
    assert_eq!(said(&mut state, &[ended(HERE)]), [ToSource::Whole(ATTEMPT)]);
}

#[test]
fn what_is_recorded_for_a_way_back_is_forgotten_once_nothing_is_missing_and_nothing_kept() {
    let mut state = owner();
    apply(&mut state, &[ended(HERE), Record::Filled { volume: DISKS[0] }]);
    assert_eq!(nothing_kept_of(&state, FORMER, REMOTE), [], "the other disk may go back to what it lacks");
    apply(&mut state, &[Record::Filled { volume: DISKS[1] }]);
    assert_eq!(nothing_kept_of(&state, HostId([9; 32]), REMOTE), [], "a host that it is not from");
    let copy = ReplicaOf::Host { host: FORMER.0, departure: REMOTE.0 };
    assert_eq!(nothing_kept_of(&state, FORMER, REMOTE), DISKS.map(|disk| (disk, copy)));
    let said = answer_as_target(&state, FORMER, REMOTE, &ToTarget::NothingKept(ATTEMPT));
    assert_eq!(said, None, "nobody waits for an answer");
    apply(&mut state, &[Record::VolumeRemoved { volume: DISKS[0] }]);
    assert_eq!(nothing_kept_of(&state, FORMER, REMOTE), [(DISKS[1], copy)]);
}

fn settings() -> SourceSettings {
    SourceSettings {
        migration: REMOTE,
        volumes: DISKS.map(|volume| (volume, Generation(2))).to_vec(),
        switch_over_max: Duration::from_secs(1),
        peer: Peer::OtherHost,
        moves: Moves::Volumes,
    }
}

/// Returns the source of both disks after a restart, once its target is active.
fn restarted() -> Source {
    restarted_with(4)
}

fn restarted_with(units: u64) -> Source {
    let mut state = State::default();
    let added = moving().into_iter().map(|moving| Record::VolumeAdded(record(moving.volume, moving.source)));
    apply(&mut state, &added.collect::<Vec<_>>());
    let mut numbers = 0;
    // The number is the one by which the other host knows it.
    while state.next_migration < REMOTE.0 {
        let side = Side::OneHost;
        let migration = MigrationId(state.next_migration);
        let started = Record::MigrationStarted { migration, volumes: moving(), keep_source: false, side };
        let outcome = Outcome::Cancelled;
        apply(
            &mut state,
            &[started, Record::MigrationEnded { migration, outcome, summary: Summary::default() }],
        );
        numbers += 1;
        assert!(numbers < 100);
    }
    let side = Side::Outgoing {
        peer: HostId([8; 32]),
        peer_name: "b".to_owned(),
        store: String::new(),
        forwarding: Forwarding::WhileConnected,
    };
    let started = Record::MigrationStarted { migration: REMOTE, volumes: moving(), keep_source: false, side };
    apply(&mut state, &[started]);
    let released = Record::Released { migration: REMOTE, attempt: ATTEMPT, generations: next_generations() };
    apply(&mut state, &[hollow_of(REMOTE, units), released]);
    let mut source = Source::resume(NOW, settings(), &state.migrations[&REMOTE]).expect("it goes on");
    assert_eq!(source.following(), Some(Following { units_at_handover: 2 * units, units_missing: None }));
    hears(&mut source, ToSource::Active { attempt: ATTEMPT, own: Duration::ZERO });
    assert_eq!(source.phase(), Phase::Filling);
    source
}

fn hears(source: &mut Source, said: ToSource) {
    source.handle_event(NOW, SourceEvent::Received(said));
}

#[test]
fn a_restarted_source_asks_at_once_and_knows_what_is_missing_when_it_was_said() {
    let mut source = restarted();
    let missing = |source: &Source| source.following().map(|following| following.units_missing);
    assert_eq!(missing(&source), Some(None), "nobody has said it");
    source.handle_timeout(NOW);
    let asks = SourceAction::Send(ToTarget::IsWhole(ATTEMPT));
    assert!(std::iter::from_fn(|| source.poll_action()).any(|action| action == asks), "it asks at once");
    hears(&mut source, ToSource::Lacks { attempt: Attempt(2), units: 1 });
    assert_eq!(missing(&source), Some(None), "that is of another try");
    hears(&mut source, ToSource::Lacks { attempt: ATTEMPT, units: 5 });
    assert_eq!(missing(&source), Some(Some(5)));
    hears(&mut source, ToSource::Lacks { attempt: ATTEMPT, units: u64::MAX });
    assert_eq!(missing(&source), Some(Some(8)), "no more than was left behind");
    hears(&mut source, ToSource::Whole(ATTEMPT));
    assert_eq!((missing(&source), source.phase()), (None, Phase::Retiring));
}

#[test]
fn what_left_with_nothing_missing_is_not_whole_before_its_target_says_so() {
    let mut source = restarted_with(0);
    for units in [1, 0] {
        hears(&mut source, ToSource::Lacks { attempt: ATTEMPT, units });
        assert_eq!(source.following(), Some(Following { units_at_handover: 0, units_missing: Some(1) }));
    }
}

#[test]
fn what_was_given_up_at_the_target_ends_the_departure_and_the_image_is_kept() {
    let mut state = owner();
    apply(&mut state, &[ended(HERE)]);
    let word = |state: &State| answer_as_target(state, FORMER, REMOTE, &ToTarget::IsWhole(ATTEMPT));
    apply(&mut state, &[Record::MissingGivenUp { volume: DISKS[0] }]);
    assert_eq!(word(&state), None, "the other disk is still read at the source");
    apply(&mut state, &[Record::MissingGivenUp { volume: DISKS[1] }]);
    assert_eq!(word(&state), Some(ToSource::GivenUp(ATTEMPT)));
    apply(&mut state, &DISKS.map(|volume| Record::VolumeRemoved { volume }));
    assert_eq!(word(&state), Some(ToSource::GivenUp(ATTEMPT)), "also after their removal");

    let mut source = restarted();
    hears(&mut source, ToSource::GivenUp(Attempt(2)));
    assert_eq!(source.phase(), Phase::Filling, "that is of another attempt");
    hears(&mut source, ToSource::GivenUp(ATTEMPT));
    assert_eq!(source.phase(), Phase::Retiring);
    let actions: Vec<_> = std::iter::from_fn(|| source.poll_action()).collect();
    assert!(
        actions.contains(&SourceAction::KeepImages) && !actions.contains(&SourceAction::Retire),
        "{actions:?}"
    );
    source.handle_event(NOW, SourceEvent::Retired { left_over: String::new() });
    let ends = |action: SourceAction| match action {
        SourceAction::Commit { records, .. } => Some(records),
        _ => None,
    };
    let records = std::iter::from_fn(|| source.poll_action()).find_map(ends).expect("the end is recorded");
    let [Record::MigrationEnded { outcome: Outcome::Moved { left_over }, .. }] = &records[..] else {
        panic!("{records:?}")
    };
    assert!(left_over.contains("is kept here"), "{left_over}");
}
