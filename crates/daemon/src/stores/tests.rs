//! Tests of folders that are made consistent with the journal, and of missing stores.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, ImageFormat, ImageLocation, MigratingVolume, Outcome, Place, Record, Side, State,
    Summary, VolumeRecord,
};
use migration::{Attempt, MigrationId, VolumeId};

use super::{Occupant, Store, Stores, new_path, removed_path};
use crate::config::StoreConfig;
use crate::custody::Custody;
use crate::error::RequestError;

fn folder_store(folder: &Path) -> StoreConfig {
    StoreConfig::Folder { path: folder.to_owned(), format: None }
}

fn image_path(store: &Store) -> PathBuf {
    store.image_of("v", None, ImageFormat::Raw).unwrap().place.name().into()
}

fn stores(folder: &Path) -> Stores {
    Stores::new(&BTreeMap::from([("a".to_owned(), folder_store(folder))]))
}

fn state_with(path: &Path) -> State {
    let image = ImageLocation::raw_file("a", path.display().to_string());
    let record = VolumeRecord {
        volume: VolumeId([1; 16]),
        name: "v".into(),
        size_bytes: 3,
        block_size_bytes: 4096,
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    };
    let mut state = State::default();
    state.apply(&Entry { at_unix_ms: 0, records: vec![Record::VolumeAdded(record)] }).unwrap();
    state
}

/// Settles a store in which these files are of the journal.
fn settle(store: &Store, state: &State, made: &[&Path]) {
    let custody = Custody::of_state(state.clone());
    for path in made {
        custody.note_made(path, std::fs::File::open(path).unwrap()).unwrap();
    }
    store.settle(&custody, state).unwrap();
}

#[test]
fn interrupted_changes_are_completed_or_undone_as_the_journal_says() {
    let folder = tempfile::tempdir().unwrap();
    let stores = stores(folder.path());
    let store = stores.get("a").unwrap();
    let image = image_path(store);
    for staged in [new_path(&image), removed_path(&image)] {
        std::fs::write(&staged, b"abc").unwrap();
        settle(store, &state_with(&image), &[&staged]);
        assert_eq!((staged.exists(), std::fs::read(&image).unwrap()), (false, b"abc".to_vec()));
        std::fs::rename(&image, &staged).unwrap();
        // Nothing says that it is Sterna's.
        settle(store, &State::default(), &[]);
        assert!(staged.exists());
        settle(store, &State::default(), &[&staged]);
        assert_eq!((staged.exists(), image.exists()), (false, false));
    }
}

#[test]
fn files_of_others_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let stores = stores(folder.path());
    let store = stores.get("a").unwrap();
    let kept = [
        "other.img",
        "notes.txt",
        "v.img.moved-m1",
        ".x.img.sterna-new",
        "sterna-new",
        "v.qcow2.moved-m1",
        "v.vmdk",
    ];
    for name in kept {
        std::fs::write(folder.path().join(name), b"abc").unwrap();
    }
    std::fs::write(folder.path().join("empty.txt"), b"").unwrap();
    std::fs::write(folder.path().join("empty.img"), b"").unwrap();
    let reserved = folder.path().join("reserved.img");
    std::fs::write(&reserved, b"").unwrap();
    settle(store, &State::default(), &[&reserved]);
    for name in kept.into_iter().chain(["empty.txt", "empty.img"]) {
        assert!(folder.path().join(name).exists(), "{name}");
    }
    assert!(!reserved.exists());
}

#[test]
fn store_without_a_folder_has_a_problem_until_the_folder_is_there() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("later");
    let stores = stores(&folder);
    let store = stores.get("a").unwrap();
    let error = store.require().unwrap_err();
    assert!(error.message().ends_with("does not exist; create it, or mount its disk"), "{}", error.message());
    std::fs::create_dir(&folder).unwrap();
    store.require().unwrap();
    let space = store.space().unwrap().unwrap();
    assert!(space.free > 0 && space.free <= space.total);
    assert!(matches!(store.require_space(u64::MAX), Err(RequestError::NoSpace { .. })));
    // Another daemon cannot use it at the same time.
    assert!(matches!(
        Stores::new(&BTreeMap::from([("b".to_owned(), folder_store(&folder))])).get("b").unwrap().require(),
        Err(RequestError::StoreUnusable { .. })
    ));
}

#[test]
fn only_store_need_not_be_named() {
    let one = stores(Path::new("/a"));
    assert_eq!(one.choose(None).unwrap().name(), "a");
    assert!(matches!(one.choose(Some("b")), Err(RequestError::StoreNotFound { .. })));
    let two = ["a", "b"].map(|name| (name.to_owned(), folder_store(Path::new(&format!("/{name}")))));
    let two = Stores::new(&BTreeMap::from(two));
    let error = two.choose(None).unwrap_err();
    assert_eq!(
        error.message(),
        "name one of the stores a, b: with --store, or as HOST:STORE if it is another host's"
    );
}

#[test]
fn store_of_one_volume_is_taken_by_a_volume_a_migration_or_what_was_kept() {
    let configured = StoreConfig::Device { path: "/dev/x".into() };
    let stores = Stores::new(&BTreeMap::from([("d".to_owned(), configured)]));
    let store = stores.get("d").unwrap();
    assert!(matches!(
        store.image_of("v", Some(ImageFormat::Qcow2), ImageFormat::Raw),
        Err(RequestError::Invalid(_))
    ));
    let device = store.image_of("v", None, ImageFormat::Qcow2).unwrap();
    assert_eq!((device.place.clone(), device.format), (Place::Device("/dev/x".into()), ImageFormat::Raw));
    let mut state = state_with(Path::new("/a/v.img"));
    let claim = store.claim(&state).unwrap();
    assert!(matches!(
        store.claim(&state),
        Err(RequestError::StoreOccupied { occupant: Occupant::Operation, .. })
    ));
    drop(claim);

    let file = ImageLocation::raw_file("a", "/a/v.img");
    let (volume, migration, attempt) = (VolumeId([1; 16]), MigrationId(0), Attempt(1));
    let apply = |state: &mut State, record| {
        state.apply(&Entry { at_unix_ms: 0, records: vec![record] }).unwrap();
        store.occupant(state)
    };
    let there = vec![MigratingVolume { volume, source: file.clone(), target: device.clone() }];
    let started =
        Record::MigrationStarted { migration, volumes: there, keep_source: false, side: Side::OneHost };
    assert_eq!(apply(&mut state, started), Some(Occupant::Migration(migration)));
    let prepared = Record::TargetPrepared { migration, attempt };
    assert_eq!(apply(&mut state, prepared), Some(Occupant::Migration(migration)));
    let generations = vec![(volume, Generation(1))];
    apply(&mut state, Record::Released { migration, attempt, generations: generations.clone() });
    let owned = Record::Owned { migration, attempt, generations };
    assert_eq!(apply(&mut state, owned), Some(Occupant::Volume("v".into())));
    let outcome = Outcome::Moved { left_over: String::new() };
    apply(&mut state, Record::MigrationEnded { migration, outcome, summary: Summary::default() });

    let (migration, generations) = (MigrationId(1), vec![(volume, Generation(2))]);
    let back = vec![MigratingVolume { volume, source: device.clone(), target: file }];
    apply(
        &mut state,
        Record::MigrationStarted { migration, volumes: back, keep_source: true, side: Side::OneHost },
    );
    apply(&mut state, Record::TargetPrepared { migration, attempt });
    apply(&mut state, Record::Released { migration, attempt, generations: generations.clone() });
    let kept = Some(Occupant::Kept { volume: "v".into(), migration });
    assert_eq!(apply(&mut state, Record::Owned { migration, attempt, generations }), kept);
    assert_eq!(apply(&mut state, Record::ReservationLifted { place: device.place }), None);
}
