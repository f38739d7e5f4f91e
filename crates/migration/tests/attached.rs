//! Tests volumes that are attached at hosts which never owned them: what either journal says, and what the other host may ask for.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::authority::{Denied, Request, Role, judge};
use migration::journal::{
    AttachedVolume, Entry, ExportAccess, ExportSettings, Forwarding, GivenAttachment, ImageFormat,
    ImageLocation, Inconsistent, LaneLeft, MigratingVolume, Outcome, Place, Record, Side, State, Summary,
    Users, VolumeRecord,
};
use migration::wire::{Message, OfferedAttachment, Refusal, RefusalCode, WireError, decode, encode};
use migration::{Attempt, HostId, MigrationId, VolumeId};

const A: HostId = HostId([1; 32]);
const B: HostId = HostId([2; 32]);
const C: HostId = HostId([3; 32]);
const DISK: VolumeId = VolumeId([7; 16]);
const OTHER: VolumeId = VolumeId([8; 16]);
/// Any number: only the channels of the attached host depend on it.
const NUMBER: MigrationId = MigrationId(3);
const ATTEMPT: Attempt = Attempt(1);

fn record(place: Place) -> VolumeRecord {
    VolumeRecord {
        volume: DISK,
        name: "v".into(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image: ImageLocation { store: "a".into(), place, format: ImageFormat::Raw },
        generation: Generation(1),
        export: ExportSettings::default(),
    }
}

fn apply(state: &mut State, record: Record) {
    state.apply(&Entry { at_unix_ms: 5, records: vec![record] }).unwrap();
}

/// Returns the state that a restart reads from a compacted journal.
fn restarted(state: &State) -> State {
    let mut again = State::default();
    again.apply(&Entry { at_unix_ms: 5, records: state.snapshot() }).unwrap();
    assert_eq!(&again, state, "a restart changes nothing");
    again
}

fn given(access: ExportAccess) -> Record {
    let given =
        GivenAttachment { host: B, host_name: "b".into(), access, is_confirmed: true, has_gone_there: false };
    Record::AttachmentGiven { volume: DISK, given: Box::new(given) }
}

/// Returns the journal of a host that has the volume, and has attached it at B.
fn owner(access: ExportAccess) -> State {
    let mut state = State::default();
    apply(&mut state, Record::VolumeAdded(record(Place::File("/a/v".into()))));
    apply(&mut state, given(access));
    restarted(&state)
}

fn asks(state: &State, peer: HostId, request: Request) -> Result<(), Denied> {
    judge(state, peer, Role::FormerOwner { migration: NUMBER }, request)
}

fn moves(state: &mut State, side: Side) -> MigrationId {
    let migration = MigrationId(state.next_migration);
    let image = |path: &str| ImageLocation::raw_file("a", path);
    let volumes = vec![MigratingVolume { volume: DISK, source: image("/a/v"), target: image("/b/v") }];
    apply(state, Record::MigrationStarted { migration, volumes, keep_source: false, side });
    migration
}

fn leaves_for(state: &mut State, peer: HostId) -> MigrationId {
    let (peer_name, store) = (String::new(), String::new());
    let side = Side::Outgoing { peer, peer_name, store, forwarding: Forwarding::WhileConnected };
    let migration = moves(state, side);
    apply(state, Record::Released { migration, attempt: ATTEMPT, generations: vec![(DISK, Generation(2))] });
    migration
}

fn ends(state: &mut State, migration: MigrationId) {
    let outcome = Outcome::Moved { left_over: String::new() };
    apply(state, Record::MigrationEnded { migration, outcome, summary: Summary::default() });
}

fn comes_from(state: &mut State, peer: HostId) -> MigrationId {
    let mut record = record(Place::File("/b/v".into()));
    record.generation = Generation(3);
    let remote = MigrationId(40);
    let migration =
        moves(state, Side::Incoming { peer, peer_name: String::new(), remote, volumes: vec![record] });
    apply(state, Record::TargetPrepared { migration, attempt: ATTEMPT });
    apply(state, Record::Owned { migration, attempt: ATTEMPT, generations: vec![(DISK, Generation(4))] });
    migration
}

#[test]
fn only_the_host_at_which_a_volume_is_attached_may_use_that_volume_and_only_until_it_ends() {
    let mut state = owner(ExportAccess::ReadWrite);
    for request in [Request::Volume(DISK), Request::Change(DISK)] {
        assert_eq!(asks(&state, B, request), Ok(()));
        assert_eq!(asks(&state, C, request), Err(Denied::Unknown));
    }
    assert_eq!(asks(&state, B, Request::Change(OTHER)), Err(Denied::Unknown));
    apply(&mut state, Record::AttachmentEnded { volume: DISK, host: B });
    assert_eq!(asks(&restarted(&state), B, Request::Volume(DISK)), Err(Denied::Unknown));
}

#[test]
fn a_host_that_may_only_read_changes_nothing() {
    let state = owner(ExportAccess::ReadOnly);
    assert_eq!(asks(&state, B, Request::Volume(DISK)), Ok(()));
    assert_eq!(asks(&state, B, Request::Change(DISK)), Err(Denied::NotGiven));
}

#[test]
fn an_attached_host_is_led_on_when_the_volume_moves_to_a_third_one() {
    let mut state = owner(ExportAccess::ReadWrite);
    let migration = leaves_for(&mut state, C);
    assert_eq!(asks(&state, B, Request::Change(DISK)), Ok(()));
    ends(&mut state, migration);
    assert_eq!(asks(&restarted(&state), B, Request::Change(DISK)), Ok(()));
    assert_eq!(state.attachments_given(DISK).count(), 1);
    apply(&mut state, Record::MovedForgotten { volume: DISK });
    assert!(asks(&restarted(&state), B, Request::Change(DISK)).is_err(), "nothing leads there");
}

#[test]
fn a_volume_that_goes_to_the_host_at_which_it_is_attached_ends_the_attachment_unless_it_is_handed_back() {
    let mut state = owner(ExportAccess::ReadWrite);
    let migration = leaves_for(&mut state, B);
    assert_eq!(state.attachments_given(DISK).count(), 0);
    assert_eq!(asks(&state, B, Request::Change(DISK)), Ok(()), "its last requests are under way");
    let mut back = state.clone();
    apply(&mut back, Record::HandedBack { migration, generations: Vec::new() });
    assert_eq!(restarted(&back).attachments_given(DISK).count(), 1);
    ends(&mut state, migration);
    let second = comes_from(&mut state, C);
    ends(&mut state, second);
    assert!(asks(&restarted(&state), B, Request::Change(DISK)).is_err(), "it has owned the volume since");
}

/// Returns the journal of B, at which A has attached the volume.
fn attached() -> State {
    let mut state = State::default();
    let record = record(Place::Nbd("sterna://a/v".into()));
    let (host_name, has_left) = ("a".into(), false);
    let attached = AttachedVolume { record, number: NUMBER, host: A, host_name, has_left };
    apply(&mut state, Record::Attached(Box::new(attached)));
    restarted(&state)
}

fn is_offered(state: &State) -> bool {
    let lane = state.lane_left(DISK, Users::default());
    state.attachment_of(DISK).is_some() && lane == LaneLeft::Needed
}

#[test]
fn an_attached_volume_is_offered_across_restarts_until_it_is_detached() {
    let mut state = attached();
    assert!(is_offered(&state));
    assert!(state.begins_with_lane(&state.moved[&DISK], false, false), "a start offers it without clients");
    assert_eq!(state.next_migration, NUMBER.0 + 1, "no migration gets its number");
    assert_eq!(state.attachments_with(A), [DISK]);
    apply(&mut state, Record::Detached { volume: DISK });
    assert!(restarted(&state).moved.is_empty() && state.attached.is_empty());
    let again = state.apply(&Entry { at_unix_ms: 5, records: vec![Record::Detached { volume: DISK }] });
    assert_eq!(again, Err(Inconsistent::UnknownVolume(DISK)));
}

#[test]
fn an_attachment_becomes_ownership_when_the_volume_arrives_and_is_one_again_when_it_is_handed_back() {
    let mut state = attached();
    let migration = comes_from(&mut state, C);
    assert!(state.attachment_of(DISK).is_none() && state.volumes.contains_key(&DISK));
    assert_eq!(state.attachment_before(DISK).map(|before| before.host), Some(A), "A is told");
    let mut back = restarted(&state);
    apply(&mut back, Record::HandedBack { migration, generations: Vec::new() });
    assert!(is_offered(&restarted(&back)));
    ends(&mut state, migration);
    apply(&mut state, Record::Detached { volume: DISK });
    let mut state = restarted(&state);
    assert!(state.volumes.contains_key(&DISK) && state.attached.is_empty());
    leaves_for(&mut state, A);
    assert!(state.attachment_of(DISK).is_none(), "it has left as any volume does");
}

#[test]
fn a_volume_that_was_here_before_is_attached_by_the_way_that_it_has_left() {
    let mut state = State::default();
    apply(&mut state, Record::VolumeAdded(record(Place::File("/a/v".into()))));
    let migration = leaves_for(&mut state, C);
    ends(&mut state, migration);
    let unneeded = LaneLeft::Unneeded { host: String::new() };
    assert_eq!(state.lane_left(DISK, Users::default()), unneeded);
    let attached = AttachedVolume {
        record: record(Place::Nbd("sterna://c/v".into())),
        number: migration,
        host: C,
        host_name: "c".into(),
        has_left: true,
    };
    apply(&mut state, Record::Attached(Box::new(attached)));
    let mut state = restarted(&state);
    assert!(is_offered(&state));
    assert_eq!(state.moved[&DISK].migration, migration, "where it went stays known");
    apply(&mut state, Record::Detached { volume: DISK });
    assert_eq!(restarted(&state).lane_left(DISK, Users::default()), unneeded);
}

#[test]
fn orders_about_attachments_are_read_as_they_were_sent_and_within_limits() {
    let offered = |name: &str, size_bytes, block_size_bytes, access| OfferedAttachment {
        volume: DISK,
        name: name.to_owned(),
        size_bytes,
        block_size_bytes,
        generation: Generation(4),
        access,
    };
    let refusal = Refusal { code: RefusalCode::NameTaken, detail: "why".into() };
    let messages = [
        Message::Attach { question: 1, offered: offered("v", 512, 4096, ExportAccess::ReadWrite) },
        Message::Attach { question: 1, offered: offered("v", 512, 4096, ExportAccess::ReadOnly) },
        Message::Detach { question: 2, volume: DISK, is_forced: true },
        Message::Attached { question: 2, refused: None },
        Message::Attached { question: 2, refused: Some(refusal) },
        Message::AttachmentGivenUp { volume: DISK },
    ];
    for message in messages {
        assert_eq!(decode(&encode(&message).unwrap()), Ok(message));
    }
    for (size_bytes, block_size_bytes) in [(0, 4096), (512, 0), (512, 4095)] {
        let offered = offered("v", size_bytes, block_size_bytes, ExportAccess::ReadWrite);
        assert_eq!(encode(&Message::Attach { question: 1, offered }), Err(WireError::Malformed));
    }
    let long = offered(&"v".repeat(300), 512, 4096, ExportAccess::ReadWrite);
    assert!(matches!(
        encode(&Message::Attach { question: 1, offered: long }),
        Err(WireError::TooMany { .. })
    ));
}
