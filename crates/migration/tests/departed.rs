//! Tests of orders that end a departure at its source: the host that the volumes left for is lost, or has lost them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BranchId, Generation};
use migration::authority::{Denied, Request, Role, judge};
use migration::filling::Manifest;
use migration::journal::{
    Entry, ExportSettings, Forwarding, Hollow, ImageLocation, Inconsistent, MigratingVolume, Outcome,
    Promotion, Record, Side, Stage, State, Summary, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::named_image::{NotAccepted, Role as ImageRole, named_image};
use migration::orders;
use migration::promotion::{
    LeftImages, NotRemovable, Removal, departed, departed_named, departures, is_owned_there, removable,
};
use migration::recovery::{Step, answer_as_source, recover};
use migration::restoration::{Knowledge, Whereabouts};
use migration::source::{Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::{TargetAction, TargetEvent};
use migration::{Attempt, HostId, MigrationId, Phase, Source, Target, VolumeId, VolumeIndex};

const VOLUME: VolumeId = VolumeId([1; 16]);
const TWO: HostId = HostId([2; 32]);
const LEFT: MigrationId = MigrationId(0);
const BACK: MigrationId = MigrationId(1);
const BRANCH: BranchId = BranchId([9; 16]);

fn apply(state: &mut State, records: Vec<Record>) {
    state.apply(&Entry { at_unix_ms: 5, records }).unwrap();
}

fn record(path: &str) -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image: ImageLocation::raw_file("a", path),
        generation: Generation(1),
        export: ExportSettings::default(),
    }
}

/// Returns the journal of a source that has begun to hand a volume over, completely or not.
fn leaving(missing: Option<u64>) -> State {
    let mut state = State::default();
    let side = Side::Outgoing {
        peer: TWO,
        peer_name: "two".to_owned(),
        store: String::new(),
        forwarding: Forwarding::WhileConnected,
    };
    let (source, target) = (ImageLocation::raw_file("a", "/a/v"), ImageLocation::raw_file("b", "/b/v"));
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    let started = Record::MigrationStarted { migration: LEFT, volumes, keep_source: false, side };
    apply(&mut state, vec![Record::VolumeAdded(record("/a/v")), started]);
    let manifests = missing.map(|units| vec![(VOLUME, Manifest { units, checksum: 1 })]);
    let hollow = manifests.map(|manifests| Hollow { attempt: Attempt(1), manifests });
    apply(&mut state, hollow.map(|hollow| Record::Hollow { migration: LEFT, hollow }).into_iter().collect());
    state
}

fn released(missing: Option<u64>) -> State {
    let mut state = leaving(missing);
    let (migration, attempt, generations) = (LEFT, Attempt(1), vec![(VOLUME, Generation(2))]);
    apply(&mut state, vec![Record::Released { migration, attempt, generations }]);
    state
}

fn by_force() -> Promotion {
    Promotion::Force { branches: vec![(VOLUME, BRANCH)] }
}

#[test]
fn a_departure_is_ended_by_order_and_the_volume_is_served_here_as_a_branch() {
    for missing in [None, Some(4)] {
        let mut state = released(missing);
        let reads = |state: &State| {
            let role = Role::Filler { migration: LEFT, volume: VolumeIndex(0) };
            judge(state, TWO, role, Request::Reservoir(VolumeIndex(0)))
        };
        assert_eq!(reads(&state), Ok(()));
        let order = departed_named(&state, "v").unwrap();
        assert_eq!(departures(&state).count(), 1);
        assert!(order.advice().contains("sterna volume promote v --force"), "{}", order.advice());
        apply(&mut state, order.records(by_force()));
        let here = &state.volumes[&VOLUME].record;
        assert!(
            here.generation > Generation(5 - 1),
            "above every one that the other host may have: {here:?}"
        );
        assert_eq!(here.image, record("/a/v").image);
        assert!(state.moved.is_empty() && !state.is_reservoir("/a/v"));
        assert_eq!(state.branches[&VOLUME][0].from, Generation(1));
        assert!(matches!(state.migrations[&LEFT].stage, Stage::Ended(Outcome::HandedBack { .. })));
        // The other host, if it comes back, gets nothing more of it, and deletes a copy that it never owned.
        assert_eq!(reads(&state), Err(Denied::Over));
        let asked = ToSource::Query(Attempt(1));
        assert_eq!(answer_as_source(&state, TWO, LEFT, &asked), Some(ToTarget::Discard));
        assert_eq!(departed(&state, LEFT), None, "once");
        // A new journal file knows as much.
        let mut again = State::default();
        apply(&mut again, state.snapshot());
        assert_eq!(again, state);
    }
}

#[test]
fn a_kill_between_the_two_records_leaves_a_handback_to_be_told() {
    let mut state = released(None);
    let records = departed(&state, LEFT).unwrap().records(by_force());
    apply(&mut state, records[..1].to_vec());
    assert_eq!(state.migrations[&LEFT].stage, Stage::HandedBack);
    assert!(state.volumes.contains_key(&VOLUME));
    assert_eq!(recover(&state), [Step::Resume(LEFT)]);
}

#[test]
fn nothing_is_taken_back_before_its_release_after_its_end_or_from_a_mixture_of_two_times() {
    assert_eq!(departed_named(&leaving(Some(4)), "v"), None);
    let mut state = released(None);
    let (outcome, summary) = (Outcome::Moved { left_over: String::new() }, Summary::default());
    apply(&mut state, vec![Record::MigrationEnded { migration: LEFT, outcome, summary }]);
    assert_eq!(departed_named(&state, "v"), None);
    let mut state = released(Some(4));
    let side = Side::Incoming {
        peer: TWO,
        peer_name: "two".to_owned(),
        remote: MigrationId(7),
        volumes: vec![record("/a/v")],
    };
    let (source, target) = (ImageLocation::raw_file("b", "/b/v"), ImageLocation::raw_file("a", "/a/v"));
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    let started = Record::MigrationStarted { migration: BACK, volumes, keep_source: false, side };
    apply(&mut state, vec![started]);
    assert_eq!(departed_named(&state, "v"), None, "it is returning into the image that it left");
}

#[test]
fn what_a_return_has_begun_to_overwrite_is_served_only_by_the_order_that_says_so() {
    let mut state = released(Some(4));
    assert_eq!(departed_named(&state, "v").unwrap().images, LeftImages::AsTheyLeft);
    let side = Side::Incoming {
        peer: TWO,
        peer_name: "two".to_owned(),
        remote: MigrationId(7),
        volumes: vec![record("/a/v")],
    };
    let (source, target) = (ImageLocation::raw_file("b", "/b/v"), ImageLocation::raw_file("a", "/a/v"));
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    let started = Record::MigrationStarted { migration: BACK, volumes, keep_source: false, side };
    let (outcome, summary) = (Outcome::Cancelled, Summary::default());
    apply(&mut state, vec![started, Record::MigrationEnded { migration: BACK, outcome, summary }]);
    let departed = departed_named(&state, "v").unwrap();
    assert_eq!(departed.images, LeftImages::Mixed);
    assert!(departed.advice().contains("promote v --force --without-missing"), "{}", departed.advice());
}

#[test]
fn a_source_that_has_its_volumes_again_does_not_wait_for_a_lost_target() {
    let state = released(None);
    let settings = SourceSettings {
        migration: LEFT,
        volumes: vec![(VOLUME, Generation(1))],
        switch_over_max: Duration::from_secs(1),
        peer: Peer::OtherHost,
        moves: Moves::Volumes,
    };
    let mut source = Source::resume(Duration::ZERO, settings, &state.migrations[&LEFT]).unwrap();
    let commits = |source: &mut Source| {
        let actions: Vec<_> = std::iter::from_fn(|| source.poll_action()).collect();
        let mut commits = actions.into_iter().filter_map(|action| match action {
            SourceAction::Commit { commit, records } => Some((commit, records)),
            _ => None,
        });
        commits.next_back()
    };
    commits(&mut source);
    let (attempt, generations) = (Attempt(1), vec![(VOLUME, Generation(3))]);
    let handed_back = ToSource::HandedBack { attempt, generations, detail: "EIO".to_owned() };
    source.handle_event(Duration::ZERO, SourceEvent::Received(handed_back));
    let (commit, _) = commits(&mut source).unwrap();
    source.handle_event(Duration::ZERO, SourceEvent::Committed { commit, result: Ok(()) });
    source.handle_timeout(Duration::from_secs(9));
    assert_eq!((source.phase(), commits(&mut source)), (Phase::Discarding, None));
    source.handle_timeout(Duration::from_secs(10));
    let (_, records) = commits(&mut source).unwrap();
    let [Record::MigrationEnded { outcome: Outcome::HandedBack { detail }, .. }] = &records[..] else {
        panic!("{records:?}")
    };
    assert!(detail.contains("has not confirmed"), "{detail}");
}

/// Returns the journal of a target that has promised to wait for a volume, which lacks blocks or not.
fn waits(missing: Option<u64>) -> State {
    let mut state = State::default();
    let (peer_name, volumes) = ("two".to_owned(), vec![record("/a/v")]);
    let side = Side::Incoming { peer: TWO, peer_name, remote: MigrationId(7), volumes };
    let (source, target) = (ImageLocation::raw_file("b", "/b/v"), ImageLocation::raw_file("a", "/a/v"));
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    let started = Record::MigrationStarted { migration: LEFT, volumes, keep_source: false, side };
    let manifests = missing.map(|units| vec![(VOLUME, Manifest { units, checksum: 1 })]);
    let hollow = manifests.map(|manifests| Hollow { attempt: Attempt(1), manifests });
    let hollow = hollow.map(|hollow| Record::Hollow { migration: LEFT, hollow });
    let prepared = Record::TargetPrepared { migration: LEFT, attempt: Attempt(1) };
    apply(&mut state, [started].into_iter().chain(hollow).chain([prepared]).collect());
    state
}

#[test]
fn an_incomplete_promise_is_given_up_when_its_source_is_removed_and_a_complete_one_is_not() {
    assert_eq!(orders::give_up(&waits(None), LEFT), None);
    let mut state = waits(Some(4));
    let mut target = Target::resume(Duration::ZERO, LEFT, &state.migrations[&LEFT]).unwrap();
    while target.poll_action().is_some() {}
    let records = orders::give_up(&state, LEFT).unwrap();
    apply(&mut state, records);
    // A handover that comes too late is overtaken, and is no defect.
    let generations = vec![(VOLUME, Generation(2))];
    let owned = Record::Owned { migration: LEFT, attempt: Attempt(1), generations };
    let late = state.clone().apply(&Entry { at_unix_ms: 5, records: vec![owned] });
    assert_eq!(late, Err(Inconsistent::Overtaken(LEFT)));
    target.handle_event(Duration::ZERO, TargetEvent::Cancel);
    assert_eq!(target.poll_action(), Some(TargetAction::Discard));
    assert!(matches!(&recover(&state)[..], [Step::Discard(_), Step::Commit(_)]));
}

#[test]
fn a_target_that_was_restarted_says_so_when_its_source_gives_up() {
    for is_resumed in [false, true] {
        let mut target = match is_resumed {
            true => Target::resume(Duration::ZERO, LEFT, &waits(None).migrations[&LEFT]).unwrap(),
            false => Target::between_hosts(LEFT, 1),
        };
        target.handle_event(Duration::ZERO, TargetEvent::Received(ToTarget::Discard));
        let noted = std::iter::from_fn(|| target.poll_action()).find_map(|action| match action {
            TargetAction::Commit { records, .. } => Some(records),
            _ => None,
        });
        let Some([Record::Discarding { outcome: Outcome::Failed { detail, .. }, .. }]) = noted.as_deref()
        else {
            panic!("{noted:?}")
        };
        assert_eq!(detail.contains("daemon was restarted"), is_resumed, "{detail}");
    }
}

#[test]
fn a_cancelled_target_deletes_nothing_before_its_journal_has_more_than_the_end_of_a_promise() {
    let mut target = Target::resume(Duration::ZERO, LEFT, &waits(Some(4)).migrations[&LEFT]).unwrap();
    let mut act = |event| {
        target.handle_event(Duration::ZERO, event);
        std::iter::from_fn(|| target.poll_action()).collect::<Vec<_>>()
    };
    let withdrawn = act(TargetEvent::Received(ToTarget::Abort(Attempt(1))));
    let aborts = |action: &TargetAction| match action {
        TargetAction::Commit { records, .. } => matches!(records[..], [Record::AttemptAborted { .. }]),
        _ => false,
    };
    assert!(withdrawn.iter().any(aborts), "{withdrawn:?}");
    let cancelled = act(TargetEvent::Cancel);
    let commit = cancelled.iter().find_map(|action| match action {
        TargetAction::Commit { commit, records } => {
            matches!(records[..], [Record::Discarding { .. }]).then_some(*commit)
        }
        _ => None,
    });
    assert!(!cancelled.contains(&TargetAction::Discard), "{cancelled:?}");
    let recorded = act(TargetEvent::Committed { commit: commit.unwrap(), result: Ok(()) });
    assert!(recorded.contains(&TargetAction::Discard), "{recorded:?}");
}

#[test]
fn an_incomplete_volume_that_cannot_be_served_is_removed_only_if_its_source_is_silent_or_has_taken_it_back() {
    let there =
        |generation, whereabouts| Some(Some(Knowledge { generation: Generation(generation), whereabouts }));
    let cases = [
        (None, Removal::Plain, Err(NotRemovable::Unforced)),
        (None, Removal::Forced, Ok(())),
        (Some(None), Removal::Forced, Err(NotRemovable::NotTakenBack)),
        (there(5, Whereabouts::Here), Removal::Forced, Ok(())),
        (there(5, Whereabouts::Here), Removal::Plain, Err(NotRemovable::Unforced)),
        (there(2, Whereabouts::Here), Removal::Forced, Err(NotRemovable::NotTakenBack)),
        (there(5, Whereabouts::WithYou), Removal::Forced, Err(NotRemovable::NotTakenBack)),
    ];
    for (there, removal, expected) in cases {
        assert_eq!(removable(Generation(2), there, removal), expected, "{there:?}, {removal:?}");
    }
}

#[test]
fn nothing_is_taken_back_from_a_host_that_answers_that_it_has_it() {
    let there = |whereabouts| Some(Some(Knowledge { generation: Generation(2), whereabouts }));
    for (there, expected) in [
        (None, false),
        (Some(None), false),
        (there(Whereabouts::Here), true),
        (there(Whereabouts::AtAThird), true),
        // It owns the volume, and cannot serve it.
        (there(Whereabouts::HereUnconfirmed), false),
        (there(Whereabouts::Waits), false),
        (there(Whereabouts::Elsewhere), false),
    ] {
        assert_eq!(is_owned_there(there), expected, "{there:?}");
    }
}

#[test]
fn an_order_can_name_another_image_at_both_sides_of_a_handover_that_waits() {
    let role = |state: &State| named_image(state, "v").map(|named| named.map(|named| named.role));
    // At the source: before *released* the volume is here, then it waits for the other host.
    assert_eq!(role(&leaving(None)), Ok(Some(ImageRole::Served)));
    assert_eq!(role(&released(None)), Ok(Some(ImageRole::Left(LEFT))));
    assert!(matches!(role(&released(Some(4))), Ok(Some(ImageRole::Reservoir(_)))));
    let mut state = released(None);
    let (outcome, summary) = (Outcome::Moved { left_over: String::new() }, Summary::default());
    apply(&mut state, vec![Record::MigrationEnded { migration: LEFT, outcome, summary }]);
    assert_eq!(role(&state), Ok(None));
    // At the target: a complete copy, and nothing that lacks blocks.
    assert_eq!(role(&waits(None)), Ok(Some(ImageRole::Copy(LEFT))));
    assert_eq!(role(&waits(Some(4))), Err(NotAccepted::Hollow));
    let mut state = waits(None);
    apply(&mut state, vec![Record::AttemptAborted { migration: LEFT, attempt: Attempt(1) }]);
    assert_eq!(role(&state), Err(NotAccepted::Copied(LEFT)), "it is being copied again");
    let mut state = waits(None);
    let (migration, attempt, generations) = (LEFT, Attempt(1), vec![(VOLUME, Generation(2))]);
    apply(&mut state, vec![Record::Owned { migration, attempt, generations }]);
    assert_eq!(role(&state), Ok(Some(ImageRole::Served)));
    let generations = vec![(VOLUME, Generation(3))];
    apply(&mut state, vec![Record::HandedBack { migration, generations }]);
    assert_eq!(role(&state), Ok(Some(ImageRole::Copy(LEFT))));
}
