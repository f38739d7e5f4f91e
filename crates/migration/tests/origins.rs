//! Tests the origin of a volume's content: it stays known wherever the volume goes, and `Given` is never lost.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, Frames, HEADER, ImageFate, ImageLocation, ImageWish, MigratingVolume, Origin,
    Outcome, Place, Record, Side, State, Summary, VolumeRecord, encode,
};
use migration::{Attempt, HostId, MigrationId, VolumeId};

const GIVEN: VolumeId = VolumeId([1; 16]);
const MADE: VolumeId = VolumeId([2; 16]);
const COMING: VolumeId = VolumeId([3; 16]);
const ATTEMPT: Attempt = Attempt(1);

fn image(store: &str, volume: VolumeId) -> ImageLocation {
    ImageLocation::raw_file(store, format!("/{store}/{volume}"))
}

fn volume(volume: VolumeId, image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume,
        name: volume.to_string(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}

fn apply(state: &mut State, records: Vec<Record>) {
    state.apply(&Entry { at_unix_ms: 0, records }).unwrap();
}

fn restarted(state: &State) -> State {
    read(state.snapshot())
}

fn read(records: Vec<Record>) -> State {
    let mut file = HEADER.to_vec();
    encode(0, &Entry { at_unix_ms: 0, records }, &mut file).unwrap();
    let mut state = State::default();
    Frames::new(&file).unwrap().for_each(|entry| state.apply(&entry).unwrap());
    state
}

fn owned(migration: MigrationId, side: Side, moving: MigratingVolume, origin: Origin) -> Vec<Record> {
    let generations = vec![(moving.volume, Generation(1))];
    let known = Record::OriginKnown { volume: moving.volume, origin };
    let started = Record::MigrationStarted { migration, volumes: vec![moving], keep_source: false, side };
    vec![
        started,
        known,
        Record::TargetPrepared { migration, attempt: ATTEMPT },
        Record::Released { migration, attempt: ATTEMPT, generations: generations.clone() },
        Record::Owned { migration, attempt: ATTEMPT, generations },
    ]
}

/// Returns a host with a volume that was given, one that was made, and one that comes from another host.
fn host() -> State {
    let mut state = State::default();
    apply(&mut state, vec![Record::VolumeAdded(volume(GIVEN, image("", GIVEN)))]);
    apply(&mut state, vec![Record::VolumeAdded(volume(MADE, image("a", MADE)))]);
    let side = Side::Incoming {
        peer: HostId([9; 32]),
        peer_name: "beta".to_owned(),
        remote: MigrationId(5),
        volumes: vec![volume(COMING, image("a", COMING))],
    };
    let moving =
        MigratingVolume { volume: COMING, source: image("beta", COMING), target: image("a", COMING) };
    let mut arrives = owned(MigrationId(0), side, moving, Origin::Given);
    // The release is the source's record.
    arrives.remove(3);
    apply(&mut state, arrives);
    state
}

fn origins(state: &State) -> [Origin; 3] {
    [GIVEN, MADE, COMING].map(|volume| state.origin_of(volume))
}

#[test]
fn an_origin_is_known_after_moves_and_restarts() {
    let mut state = restarted(&host());
    assert_eq!(origins(&state), [Origin::Given, Origin::Made, Origin::Given]);
    for (number, volume) in [GIVEN, MADE].into_iter().enumerate() {
        let source = state.volumes[&volume].record.image.clone();
        let moving = MigratingVolume { volume, source, target: image("b", volume) };
        let migration = MigrationId(number as u64 + 1);
        // A contrary report does not change the origin `Given`.
        apply(&mut state, owned(migration, Side::OneHost, moving, Origin::Made));
        state = restarted(&state);
        assert!(!state.volumes[&volume].record.image.is_adopted());
    }
    assert_eq!(origins(&state), [Origin::Given, Origin::Made, Origin::Given]);
}

#[test]
fn a_journal_that_says_no_origins_leaves_unknown_what_has_moved() {
    let mut state = host();
    let moving = MigratingVolume { volume: MADE, source: image("a", MADE), target: image("b", MADE) };
    apply(&mut state, owned(MigrationId(1), Side::OneHost, moving, Origin::Unknown));
    let old = read(vec![Record::Snapshot(Box::new(state))]);
    assert_eq!(origins(&old), [Origin::Given, Origin::Unknown, Origin::Unknown]);
}

#[test]
fn what_has_gone_is_forgotten() {
    let mut state = host();
    let ended = Record::MigrationEnded {
        migration: MigrationId(0),
        outcome: Outcome::Moved { left_over: String::new() },
        summary: Summary::default(),
    };
    apply(&mut state, vec![ended]);
    assert_eq!(state.origins.len(), 3);
    for volume in [GIVEN, MADE, COMING] {
        apply(&mut state, vec![Record::VolumeRemoved { volume }]);
    }
    assert!(state.origins.is_empty());
}

#[test]
fn only_what_sterna_made_is_deleted_unasked() {
    let in_store = image("a", MADE);
    let table = [
        (Origin::Made, ImageWish::Unsaid, ImageFate::Delete),
        (Origin::Given, ImageWish::Unsaid, ImageFate::KeepGiven),
        (Origin::Unknown, ImageWish::Unsaid, ImageFate::KeepUnknown),
        (Origin::Made, ImageWish::Keep, ImageFate::Keep),
        (Origin::Given, ImageWish::Delete, ImageFate::Delete),
        (Origin::Unknown, ImageWish::Delete, ImageFate::Delete),
    ];
    for (origin, wish, fate) in table {
        assert_eq!(ImageFate::of(&in_store, origin, wish), fate, "{origin:?} {wish:?}");
        // An image served in place, or one that is not a file, stays in any case.
        assert_ne!(ImageFate::of(&image("", GIVEN), origin, wish), ImageFate::Delete);
        let device = ImageLocation { place: Place::Device("/dev/vg/lv".to_owned()), ..in_store.clone() };
        assert_eq!(ImageFate::of(&device, origin, wish), ImageFate::Keep);
    }
}
