//! Tests the return of an incomplete volume to its reservoir: both journals at each step.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::authority::{Denied, Request, Role, judge};
use migration::filling::Manifest;
use migration::journal::{
    Entry, ExportSettings, Forwarding, Hollow, ImageLocation, LaneLeft, MigratingVolume, Outcome, Record,
    Side, Stage, State, Summary, Users, VolumeRecord, Way,
};
use migration::recovery::{Step, recover};
use migration::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};

const HERE: HostId = HostId([1; 32]);
const THERE: HostId = HostId([2; 32]);
const DISK: VolumeId = VolumeId([1; 16]);
const OTHER_DISK: VolumeId = VolumeId([2; 16]);
const ATTEMPT: Attempt = Attempt(1);
/// The departure and the return, in both hosts' numbering.
const DEPARTURE: MigrationId = MigrationId(0);
const RETURN: MigrationId = MigrationId(1);

fn apply(state: &mut State, records: Vec<Record>) {
    state.apply(&Entry { at_unix_ms: 5, records }).expect("the records fit the state");
}

fn record(image: ImageLocation, generation: u64) -> VolumeRecord {
    VolumeRecord {
        volume: DISK,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image,
        generation: Generation(generation),
        export: ExportSettings::default(),
    }
}

fn home() -> ImageLocation {
    ImageLocation::raw_file("a", "/a/v.img")
}

fn away() -> ImageLocation {
    ImageLocation::raw_file("b", "/b/v.img")
}

fn moving(source: ImageLocation, target: ImageLocation) -> Vec<MigratingVolume> {
    vec![MigratingVolume { volume: DISK, source, target }]
}

fn hollow(migration: MigrationId) -> Record {
    let manifests = vec![(DISK, Manifest { units: 3, checksum: 1 })];
    Record::Hollow { migration, hollow: Hollow { attempt: ATTEMPT, manifests } }
}

fn ended(migration: MigrationId, outcome: Outcome) -> Record {
    Record::MigrationEnded { migration, outcome, summary: Summary::default() }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

/// Returns the journal of the host that the volume has left incomplete.
fn reservoir() -> State {
    let mut state = State::default();
    let side = Side::Outgoing {
        peer: THERE,
        peer_name: "b".to_owned(),
        store: String::new(),
        forwarding: Forwarding::WhileConnected,
    };
    let volumes = moving(home(), away());
    let started = Record::MigrationStarted { migration: DEPARTURE, volumes, keep_source: false, side };
    apply(&mut state, vec![Record::VolumeAdded(record(home(), 1)), started]);
    let generations = vec![(DISK, Generation(2))];
    let released = Record::Released { migration: DEPARTURE, attempt: ATTEMPT, generations };
    apply(&mut state, vec![hollow(DEPARTURE), released]);
    state
}

/// Begins the return of the volume to the image that it has left.
fn begin_return(state: &mut State, migration: MigrationId) {
    let volumes = vec![record(home(), 2)];
    let side = Side::Incoming { peer: THERE, peer_name: "b".to_owned(), remote: migration, volumes };
    let volumes = moving(away(), home());
    apply(state, vec![Record::MigrationStarted { migration, volumes, keep_source: false, side }]);
}

fn own(state: &mut State, migration: MigrationId) {
    apply(state, vec![Record::TargetPrepared { migration, attempt: ATTEMPT }]);
    let generations = vec![(DISK, Generation(3))];
    apply(state, vec![Record::Owned { migration, attempt: ATTEMPT, generations }]);
}

/// Returns whether the volume's new host may read missing blocks here.
fn reads_what_is_missing(state: &State) -> Result<(), Denied> {
    let filler = Role::Filler { migration: DEPARTURE, volume: VolumeIndex(0) };
    judge(state, THERE, filler, Request::Reservoir(VolumeIndex(0)))
}

#[test]
fn only_what_left_together_comes_back_and_only_from_where_it_went() {
    let state = reservoir();
    assert_eq!(state.reservoir_for(THERE, &[DISK]), Some(DEPARTURE));
    assert_eq!(state.reservoir_for(HERE, &[DISK]), None, "another host has not got it");
    assert_eq!(state.reservoir_for(THERE, &[DISK, OTHER_DISK]), None);
    assert_eq!(state.reservoir_for(THERE, &[]), None);
    let mut state = state;
    apply(&mut state, vec![ended(DEPARTURE, moved())]);
    assert_eq!(state.reservoir_for(THERE, &[DISK]), None, "it lacks nothing there");
}

#[test]
fn the_departure_is_over_when_the_volume_is_back_for_good() {
    let mut state = reservoir();
    assert_eq!(state.taken_back_by(DEPARTURE), None);
    begin_return(&mut state, RETURN);
    assert_eq!((state.taken_back_by(DEPARTURE), state.takes_back(RETURN)), (Some(RETURN), Some(DEPARTURE)));
    assert_eq!(reads_what_is_missing(&state), Ok(()), "it is read while it is written");
    own(&mut state, RETURN);
    assert_eq!(reads_what_is_missing(&state), Err(Denied::Over), "what is read would be of another time");
    assert_eq!(state.taken_back_by(DEPARTURE), Some(RETURN), "it may be handed back yet");
    apply(&mut state, vec![ended(RETURN, moved())]);
    assert_eq!(state.migrations[&DEPARTURE].stage, Stage::Ended(Outcome::TakenBack));
    assert_eq!(state.migrations[&DEPARTURE].ended_unix_ms, Some(5));
    assert!(state.moved.is_empty() && recover(&state).is_empty());

    // A new journal file says the same.
    let mut again = State::default();
    apply(&mut again, state.snapshot());
    assert_eq!(again, state);
}

#[test]
fn a_reservoir_is_deleted_by_nothing_that_comes_to_nothing() {
    let mut state = reservoir();
    assert!(state.is_reservoir("/a/v.img") && !state.is_reservoir("/b/v.img"));
    begin_return(&mut state, RETURN);
    apply(&mut state, vec![Record::Discarding { migration: RETURN, outcome: Outcome::Cancelled }]);
    let steps = recover(&state);
    assert!(steps.iter().all(|step| !matches!(step, Step::Discard(_))), "{steps:?}");
    assert!(steps.contains(&Step::Resume(DEPARTURE)), "{steps:?}");
    apply(&mut state, vec![ended(RETURN, Outcome::Cancelled)]);
    assert!(state.is_reservoir("/a/v.img"));
    assert_eq!(state.taken_back_by(DEPARTURE), None, "the departure goes on");
    assert_eq!(state.migrations[&DEPARTURE].stage, Stage::Released(ATTEMPT));

    // Handed back, the image is a reservoir once more.
    begin_return(&mut state, MigrationId(2));
    own(&mut state, MigrationId(2));
    assert!(!state.is_reservoir("/a/v.img"), "it is the volume's own image");
    let generations = vec![(DISK, Generation(4))];
    apply(&mut state, vec![Record::HandedBack { migration: MigrationId(2), generations }]);
    assert!(state.is_reservoir("/a/v.img"));
    assert_eq!(reads_what_is_missing(&state), Ok(()));
}

#[test]
fn what_it_lacked_need_not_come_once_it_has_gone_back() {
    let mut state = State::default();
    let volumes = vec![record(away(), 1)];
    let side = Side::Incoming { peer: HERE, peer_name: "a".to_owned(), remote: DEPARTURE, volumes };
    let volumes = moving(home(), away());
    apply(
        &mut state,
        vec![Record::MigrationStarted { migration: DEPARTURE, volumes, keep_source: false, side }],
    );
    apply(
        &mut state,
        vec![hollow(DEPARTURE), Record::TargetPrepared { migration: DEPARTURE, attempt: ATTEMPT }],
    );
    let generations = vec![(DISK, Generation(2))];
    apply(&mut state, vec![Record::Owned { migration: DEPARTURE, attempt: ATTEMPT, generations }]);
    apply(&mut state, vec![ended(DEPARTURE, moved())]);
    assert!(state.fillings.contains_key(&DISK));
    assert!(!state.keeps_source(true, [DISK].into_iter()), "what lacks blocks is no copy");
    assert!(state.keeps_source(true, [OTHER_DISK].into_iter()));

    let side = Side::Outgoing {
        peer: HERE,
        peer_name: "a".to_owned(),
        store: String::new(),
        forwarding: Forwarding::WhileConnected,
    };
    let volumes = moving(away(), home());
    apply(
        &mut state,
        vec![Record::MigrationStarted { migration: RETURN, volumes, keep_source: false, side }],
    );
    let generations = vec![(DISK, Generation(3))];
    apply(&mut state, vec![Record::Released { migration: RETURN, attempt: ATTEMPT, generations }]);
    assert!(state.fillings.contains_key(&DISK), "it may be handed back, and lacks as much as before");
    apply(&mut state, vec![ended(RETURN, moved())]);
    assert!(state.fillings.is_empty());
}

#[test]
fn a_vm_that_is_noted_to_come_is_seen_to_by_what_comes_and_not_by_what_has_left() {
    let names = ["v".to_owned()];
    let ways = |state: &State| [Way::Here, Way::Elsewhere].map(|way| state.is_under_way(&names, way));
    let mut state = reservoir();
    assert_eq!(ways(&state), [false, true]);
    begin_return(&mut state, RETURN);
    assert_eq!(ways(&state), [true, true]);
    apply(&mut state, vec![Record::Discarding { migration: RETURN, outcome: Outcome::Cancelled }]);
    apply(&mut state, vec![ended(RETURN, Outcome::Cancelled)]);
    assert_eq!(ways(&state), [false, true], "a VM that did not come is noted by a start not to have come");
    assert!(!state.is_under_way(&["w".to_owned()], Way::Elsewhere), "another volume");
}

#[test]
fn what_came_together_goes_back_together_also_if_some_of_it_lacks_nothing() {
    let disks = [DISK, OTHER_DISK];
    let image = |store: &str, disk: VolumeId| ImageLocation::raw_file(store, format!("/{store}/{disk}"));
    let mut state = State::default();
    let records = disks.map(|volume| VolumeRecord {
        volume,
        name: volume.to_string(),
        ..record(image("b", volume), 1)
    });
    let volumes = disks.map(|volume| MigratingVolume {
        volume,
        source: image("a", volume),
        target: image("b", volume),
    });
    let side = Side::Incoming {
        peer: HERE,
        peer_name: "a".to_owned(),
        remote: DEPARTURE,
        volumes: records.to_vec(),
    };
    let volumes = volumes.to_vec();
    apply(
        &mut state,
        vec![Record::MigrationStarted { migration: DEPARTURE, volumes, keep_source: false, side }],
    );
    let manifests = disks.map(|disk| (disk, Manifest { units: 3, checksum: 1 })).to_vec();
    let hollow = Record::Hollow { migration: DEPARTURE, hollow: Hollow { attempt: ATTEMPT, manifests } };
    apply(&mut state, vec![hollow, Record::TargetPrepared { migration: DEPARTURE, attempt: ATTEMPT }]);
    let generations = disks.map(|disk| (disk, Generation(2))).to_vec();
    apply(&mut state, vec![Record::Owned { migration: DEPARTURE, attempt: ATTEMPT, generations }]);
    apply(&mut state, vec![ended(DEPARTURE, moved()), Record::Filled { volume: OTHER_DISK }]);
    assert_eq!(state.came_with(&state.fillings[&DISK]), disks);
}

fn lane_left(state: &State, users: Users<'_>) -> LaneLeft {
    state.lane_left(DISK, users)
}

#[test]
fn the_lane_that_a_volume_has_left_is_needed_while_anybody_lacks_what_it_has_or_comes_through_it() {
    let (nobody, unneeded) = (Users::default(), LaneLeft::Unneeded { host: "b".to_owned() });
    let mut state = reservoir();
    let gone = state.moved[&DISK].clone();
    assert_eq!(
        lane_left(&state, nobody),
        LaneLeft::Needed,
        "the other host fetches from it, without being connected"
    );
    assert!(!state.begins_with_lane(&gone, true, true), "whoever goes on with the departure makes it");
    begin_return(&mut state, RETURN);
    assert_eq!(lane_left(&state, nobody), LaneLeft::Needed, "it comes home to it");
    assert!(state.begins_with_lane(&gone, false, false));
    apply(&mut state, vec![Record::Discarding { migration: RETURN, outcome: Outcome::Cancelled }]);
    apply(&mut state, vec![ended(RETURN, Outcome::Cancelled), ended(DEPARTURE, moved())]);

    let led = |led_here_by| Users { led_here_by, ..nobody };
    for (users, left) in [
        (nobody, unneeded.clone()),
        (Users { clients: 1, ..nobody }, LaneLeft::Needed),
        (Users { has_vm: true, ..nobody }, LaneLeft::Needed),
        (led(&[HERE]), LaneLeft::Needed),
        // The host that has the volume itself.
        (led(&[THERE]), unneeded),
    ] {
        assert_eq!(lane_left(&state, users), left, "{users:?}");
    }
    let begins = [(false, false), (true, false), (false, true)];
    let begins = begins.map(|(clients, vm)| state.begins_with_lane(&gone, clients, vm));
    assert_eq!(begins, [false, true, true]);
    assert_eq!(state.lane_left(OTHER_DISK, nobody), LaneLeft::Over);
}

#[test]
fn a_volume_that_goes_on_being_served_here_keeps_its_lane() {
    let mut state = State::default();
    let (volumes, forwarding) = (moving(home(), away()), Forwarding::Always);
    let side = Side::Outgoing { peer: THERE, peer_name: "b".to_owned(), store: String::new(), forwarding };
    let started = Record::MigrationStarted { migration: DEPARTURE, volumes, keep_source: false, side };
    apply(&mut state, vec![Record::VolumeAdded(record(home(), 1)), started]);
    let generations = vec![(DISK, Generation(2))];
    apply(&mut state, vec![Record::Released { migration: DEPARTURE, attempt: ATTEMPT, generations }]);
    apply(&mut state, vec![ended(DEPARTURE, moved())]);
    assert_eq!(lane_left(&state, Users::default()), LaneLeft::Needed);
    assert!(state.begins_with_lane(&state.moved[&DISK], false, false));
}
