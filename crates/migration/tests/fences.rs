//! Tests that the record which leaves a device or export behind, or incomplete, also fences it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, ImageFormat, ImageLocation, MigratingVolume, Outcome, Place, Record,
    ReservedContent, Side, State, Summary, VolumeRecord,
};
use migration::{Attempt, MigrationId, VolumeId};

const VOLUME: VolumeId = VolumeId([1; 16]);
const MIGRATION: MigrationId = MigrationId(3);
const ATTEMPT: Attempt = Attempt(1);

#[test]
fn device_that_was_left_is_fenced_and_the_one_that_was_reached_is_not() {
    use ReservedContent::{HalfMade, Kept, Left};
    let (mut state, device, export) = started(false);
    assert_eq!(reservations(&state), [(export.place.clone(), HalfMade)]);
    own(&mut state);
    assert_eq!(reservations(&state), [(device.place.clone(), Left)]);
    let generations = vec![(VOLUME, Generation(2))];
    apply(&mut state, Record::HandedBack { migration: MIGRATION, generations });
    assert_eq!(reservations(&state), [(export.place, HalfMade)]);

    let (mut state, ..) = started(true);
    own(&mut state);
    assert_eq!(reservations(&state), [(device.place.clone(), Kept)]);
    apply(&mut state, Record::ReservationLifted { place: device.place });
    assert_eq!(reservations(&state), []);
}

#[test]
fn migration_that_fails_leaves_its_target_fenced_until_somebody_takes_it() {
    let (mut state, _, export) = started(false);
    let ended = Record::MigrationEnded {
        migration: MIGRATION,
        outcome: Outcome::Cancelled,
        summary: Summary::default(),
    };
    apply(&mut state, ended);
    assert_eq!(reservations(&state), [(export.place.clone(), ReservedContent::HalfMade)]);
    assert_eq!(state.reservations[&export.place].volume, "v");
    apply(&mut state, Record::VolumeAdded(volume(2, export)));
    assert_eq!(reservations(&state), []);
}

#[test]
fn files_are_not_fenced_for_they_are_renamed_or_deleted() {
    let mut state = State::default();
    let (source, target) = (ImageLocation::raw_file("a", "/a"), ImageLocation::raw_file("b", "/b"));
    apply(&mut state, Record::VolumeAdded(volume(1, source.clone())));
    start(&mut state, source, target, false);
    own(&mut state);
    assert_eq!(reservations(&state), []);
}

/// Returns the state after the start of a migration from a device to an export.
fn started(keep_source: bool) -> (State, ImageLocation, ImageLocation) {
    let mut state = State::default();
    let at = |place| ImageLocation { store: "a".to_owned(), place, format: ImageFormat::Raw };
    let device = at(Place::Device("/dev/vg/lv".to_owned()));
    let export = at(Place::Nbd("nbd://host/disk".to_owned()));
    apply(&mut state, Record::VolumeAdded(volume(1, device.clone())));
    start(&mut state, device.clone(), export.clone(), keep_source);
    (state, device, export)
}

fn start(state: &mut State, source: ImageLocation, target: ImageLocation, keep_source: bool) {
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    apply(
        state,
        Record::MigrationStarted { migration: MIGRATION, volumes, keep_source, side: Side::OneHost },
    );
}

fn own(state: &mut State) {
    let generations = vec![(VOLUME, Generation(1))];
    apply(state, Record::TargetPrepared { migration: MIGRATION, attempt: ATTEMPT });
    let (migration, attempt) = (MIGRATION, ATTEMPT);
    apply(state, Record::Released { migration, attempt, generations: generations.clone() });
    apply(state, Record::Owned { migration, attempt, generations });
}

fn apply(state: &mut State, record: Record) {
    state.apply(&Entry { at_unix_ms: 0, records: vec![record] }).unwrap();
}

fn reservations(state: &State) -> Vec<(Place, ReservedContent)> {
    state.reservations.iter().map(|(place, fence)| (place.clone(), fence.content)).collect()
}

fn volume(number: u8, image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume: VolumeId([number; 16]),
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}
