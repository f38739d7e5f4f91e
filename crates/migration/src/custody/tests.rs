//! Tests the book of claims (which claim refuses which step of which owner) and the order of a step.

use chronicle::Generation;

use super::*;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::journal::{
    Entry, ExportSettings, Hollow, ImageFormat, ImageLocation, MigratingVolume, Place, Record, Side, State,
    VolumeRecord,
};

const V: VolumeId = VolumeId([1; 16]);
const W: VolumeId = VolumeId([2; 16]);

fn file(inode: u64) -> Found {
    Found::There(Identity::File { device: 1, inode })
}

fn object(path: &str, inode: u64) -> Object {
    Object { place: Place::File(path.to_owned()), found: file(inode), lasting: Some(lasting(inode)) }
}

fn lasting(inode: u64) -> Lasting {
    Lasting::File { inode, born: Some((5, 0)) }
}

/// Records that Sterna gave the file its name.
fn recorded(path: &str, inode: u64) -> Record {
    let known = KnownImage { lasting: lasting(inode), purpose: Purpose::Use };
    Record::ImageKnown { place: Place::File(path.to_owned()), known }
}

/// Returns the book of a journal that knows two unused files.
fn nobodys() -> Book {
    Book::of_journal(&state(vec![recorded("/a", 1), recorded("/b", 2)]))
}

fn volume(id: VolumeId, path: &str) -> Record {
    Record::VolumeAdded(VolumeRecord {
        volume: id,
        name: format!("v{}", id.0[0]),
        size_bytes: 4096,
        block_size_bytes: 4096,
        image: ImageLocation::raw_file("s", path),
        generation: Generation(0),
        export: ExportSettings::default(),
    })
}

fn state(records: Vec<Record>) -> State {
    let mut state = State::default();
    state.apply(&Entry { at_unix_ms: 0, records }).unwrap();
    state
}

/// Returns the book of a journal in which each path is the file of its inode; other paths are gone.
fn book(state: &State, files: &[(&str, u64)]) -> Book {
    let mut book = Book::of_journal(state);
    book.identify(|place| {
        files
            .iter()
            .find(|(path, _)| place.file() == Some(path))
            .map_or(Found::Gone, |(_, inode)| file(*inode))
    });
    book
}

fn claimed(kind: Kind) -> Book {
    let mut book = nobodys();
    book.add(Claim { kind, place: Place::File("/a".into()), found: file(1) });
    book
}

fn outgoing(target: &str) -> Record {
    let side = Side::Outgoing {
        peer: HostId([9; 32]),
        peer_name: "b".into(),
        store: "s1".into(),
        forwarding: crate::journal::Forwarding::Always,
    };
    let moving = MigratingVolume {
        volume: V,
        source: ImageLocation::raw_file("s", "/a"),
        target: ImageLocation::raw_file("s", target),
    };
    Record::MigrationStarted { migration: MigrationId(0), volumes: vec![moving], keep_source: false, side }
}

fn all_owners() -> [Owner; 7] {
    [
        Owner::Volume(V),
        Owner::Volume(W),
        Owner::Migration(MigrationId(0)),
        Owner::Migration(MigrationId(1)),
        Owner::Housekeeping,
        Owner::Administrator(Word::Plain),
        Owner::Administrator(Word::Insists),
    ]
}

#[test]
fn unknown_refuses_every_step_of_every_owner() {
    let unknown = claimed(Kind::Unknown { why: "the store is not mounted".into() });
    let nobody = nobodys();
    for step in Step::ALL {
        for owner in all_owners() {
            // An unknown claim counts against every object.
            assert!(unknown.ask(step, &owner, &object("/other", 7)).is_err(), "{step:?} {owner:?}");
            let found = Found::Unknown("EIO".into());
            let dark = Object { place: Place::File("/a".into()), found, lasting: None };
            assert!(nobody.ask(step, &owner, &dark).is_err(), "{step:?} {owner:?}");
            assert!(nobody.ask(step, &owner, &object("/a", 1)).is_ok(), "{step:?} {owner:?}");
        }
    }
}

#[test]
fn what_is_served_or_stood_on_or_read_elsewhere_is_never_lost_by_anybodys_step() {
    let used = [
        Kind::Served { volume: W, name: "w".into() },
        Kind::BelowServed { volume: W, name: "w".into() },
        Kind::BelowImage { top: "/t.qcow2".into() },
        Kind::Reservoir { migration: MigrationId(7), host: "b".into() },
        Kind::Restored { volume: W, name: "w".into() },
    ];
    let others = all_owners().into_iter().filter(|owner| *owner != Owner::Volume(W));
    let others: Vec<Owner> = others.chain([Owner::Maker]).collect();
    for kind in used {
        for step in Step::ALL.into_iter().filter(|step| step.changes_bytes()) {
            for owner in &others {
                let refused = claimed(kind.clone()).ask(step, owner, &object("/a", 1));
                assert_eq!(refused.unwrap_err().claims, std::slice::from_ref(&kind), "{step:?} {owner:?}");
            }
        }
        // Even the volume's own removal does not delete it while it is served.
        claimed(kind).ask(Step::Discard, &Owner::Volume(W), &object("/a", 1)).unwrap_err();
    }
}

#[test]
fn claims_hold_by_name_and_by_identity() {
    let known = state(vec![volume(V, "/a"), recorded("/b", 2)]);
    let book = book(&known, &[("/a", 1)]);
    for (path, inode) in [("/a", 1), ("/link", 1), ("/a", 2)] {
        let refused = book.ask(Step::Discard, &Owner::Housekeeping, &object(path, inode)).unwrap_err();
        assert!(refused.to_string().contains("volume \"v1\" is served from it"), "{refused}");
    }
    book.ask(Step::Discard, &Owner::Housekeeping, &object("/b", 2)).unwrap();
}

#[test]
fn a_volume_may_rename_and_grow_its_own_image_and_nobody_elses() {
    let known = state(vec![volume(V, "/a"), volume(W, "/b")]);
    let mut book = book(&known, &[("/a", 1), ("/b", 1)]);
    // Both are served from one file.
    book.ask(Step::Rename, &Owner::Volume(V), &object("/a", 1)).unwrap_err();
    book.forget_volume(W);
    for step in [Step::Rename, Step::Resize, Step::Zero] {
        book.ask(step, &Owner::Volume(V), &object("/a", 1)).unwrap();
        book.ask(step, &Owner::Volume(W), &object("/a", 1)).unwrap_err();
    }
}

#[test]
fn a_reservoir_is_given_to_nobody_until_the_new_owner_has_everything() {
    let manifest = crate::filling::Manifest { units: 1, checksum: 2 };
    let hollow = Hollow { attempt: Attempt(1), manifests: vec![(V, manifest)] };
    let (migration, generations) = (MigrationId(0), vec![(V, Generation(1))]);
    let mut records = vec![
        volume(V, "/a"),
        outgoing(""),
        Record::Hollow { migration, hollow },
        Record::Released { migration, attempt: Attempt(1), generations },
    ];
    let released = book(&state(records.clone()), &[("/a", 1)]);
    for owner in [Owner::Administrator(Word::Plain), Owner::Administrator(Word::Insists)] {
        for step in [Step::ServeReadWrite, Step::ServeReadOnly, Step::Release, Step::Discard] {
            let refused = released.ask(step, &owner, &object("/hardlink", 1)).unwrap_err();
            assert!(refused.to_string().contains("reads missing blocks from it"), "{refused}");
        }
    }
    released.ask(Step::Fence, &Owner::Migration(migration), &object("/a", 1)).unwrap();
    records.push(Record::MigrationEnded {
        migration,
        outcome: crate::journal::Outcome::Moved { left_over: String::new() },
        summary: crate::journal::Summary::default(),
    });
    let ended = book(&state(records), &[("/a", 1)]);
    ended.ask(Step::ServeReadOnly, &Owner::Administrator(Word::Plain), &object("/a", 1)).unwrap();
}

#[test]
fn a_migration_deletes_its_own_target_whoever_has_a_lease_and_no_served_image() {
    let target = || {
        let mut book = claimed(Kind::Target { migration: MigrationId(0) });
        let (place, found) = (Place::File("/a".into()), file(1));
        book.add(Claim { kind: Kind::Foreign { holder: "sterna".into() }, place, found });
        book
    };
    let own = Owner::Migration(MigrationId(0));
    target().ask(Step::Discard, &own, &object("/a", 1)).unwrap();
    target().ask(Step::Discard, &Owner::Migration(MigrationId(1)), &object("/a", 1)).unwrap_err();
    target().ask(Step::ServeReadWrite, &Owner::Administrator(Word::Insists), &object("/a", 1)).unwrap_err();
    let mut stood_on = target();
    let kind = Kind::BelowServed { volume: W, name: "w".into() };
    stood_on.add(Claim { kind, place: Place::File("/a".into()), found: file(1) });
    stood_on.ask(Step::Discard, &own, &object("/a", 1)).unwrap_err();
}

#[test]
fn half_made_and_old_copies_are_served_only_by_an_order_that_insists() {
    let stale = Kind::Stale { volume: "v".into(), migration: MigrationId(1) };
    for kind in [Kind::HalfMade, stale] {
        for step in [Step::ServeReadWrite, Step::ServeReadOnly] {
            claimed(kind.clone())
                .ask(step, &Owner::Administrator(Word::Plain), &object("/a", 1))
                .unwrap_err();
            claimed(kind.clone()).ask(step, &Owner::Administrator(Word::Insists), &object("/a", 1)).unwrap();
        }
    }
    claimed(Kind::HalfMade).ask(Step::GiveBack, &Owner::Volume(V), &object("/a", 1)).unwrap_err();
    let its_own = Owner::Migration(MigrationId(1));
    claimed(Kind::HalfMade).ask(Step::ServeReadWrite, &its_own, &object("/a", 1)).unwrap();
}

#[test]
fn a_kept_image_goes_by_name_or_comes_home_unless_somebody_uses_it() {
    let kept = || claimed(Kind::Kept { volume: "v".into(), migration: MigrationId(1) });
    let (home, drop) = (Owner::Migration(MigrationId(3)), Owner::Administrator(Word::Plain));
    kept().ask(Step::TakeBack, &home, &object("/a", 1)).unwrap();
    kept().ask(Step::Discard, &drop, &object("/a", 1)).unwrap();
    let foreign = Kind::Foreign { holder: "qemu-nbd (process 7)".into() };
    for kind in [foreign, Kind::BelowServed { volume: W, name: "w".into() }] {
        let mut used = kept();
        used.add(Claim { kind, place: Place::File("/elsewhere".into()), found: file(1) });
        used.ask(Step::TakeBack, &home, &object("/a", 1)).unwrap_err();
        used.ask(Step::Discard, &drop, &object("/a", 1)).unwrap_err();
        used.ask(Step::Discard, &Owner::Housekeeping, &object("/a", 1)).unwrap_err();
    }
}

#[test]
fn a_step_is_taken_on_what_was_opened_locked_and_asked_about() {
    let place = || Place::File("/a".into());
    let begin = || Handling::new(Step::Discard, Owner::Housekeeping, place());
    let mut handling = begin();
    for (todo, event) in [
        (Todo::Open, Event::Opened(file(1), Some(lasting(1)))),
        (Todo::Lock, Event::Locked),
        (Todo::Claims, Event::Gathered(nobodys())),
        (Todo::Compare, Event::Compared(file(1))),
        (Todo::Act, Event::Acted),
        (Todo::Sync, Event::Synced),
    ] {
        assert_eq!(handling.next().unwrap(), todo);
        handling.handle_event(event);
    }
    assert_eq!(handling.next().unwrap_err(), Ok(Ending::Taken));

    // Another file has taken the name.
    let mut exchanged = begin();
    exchanged.handle_event(Event::Opened(file(1), Some(lasting(1))));
    exchanged.handle_event(Event::Locked);
    exchanged.handle_event(Event::Gathered(nobodys()));
    exchanged.handle_event(Event::Compared(file(2)));
    assert!(exchanged.next().unwrap_err().is_err());

    // A foreign program holds it.
    let mut held = begin();
    held.handle_event(Event::Opened(file(1), Some(lasting(1))));
    held.handle_event(Event::Held("qemu-img (process 7)".into()));
    held.handle_event(Event::Gathered(nobodys()));
    let refused = held.next().unwrap_err().unwrap_err();
    assert!(refused.to_string().contains("qemu-img (process 7) uses it"), "{refused}");

    let mut gone = begin();
    gone.handle_event(Event::Opened(Found::Gone, None));
    gone.handle_event(Event::Synced);
    assert_eq!(gone.next().unwrap_err(), Ok(Ending::Gone));
}

#[test]
fn nobody_is_told_to_shorten_an_image() {
    let raw = Place::File("/a".into());
    assert_eq!(remedy_for_size(&raw, ImageFormat::Raw, 1, 2), Remedy::Lengthen);
    assert_eq!(remedy_for_size(&raw, ImageFormat::Raw, 2, 1), Remedy::KeepLonger);
    assert_eq!(remedy_for_size(&raw, ImageFormat::Qcow2, 1, 2), Remedy::ByItsProgram);
    assert_eq!(remedy_for_size(&Place::Device("/dev/x".into()), ImageFormat::Raw, 2, 1), Remedy::NoFile);
}

#[test]
fn the_mark_of_an_image_goes_with_the_record_that_completes_it() {
    let (migration, generations) = (MigrationId(0), vec![(V, Generation(1))]);
    let Record::VolumeAdded(record) = volume(V, "/a") else { return };
    let (peer, peer_name, remote) = (HostId([9; 32]), "b".to_owned(), MigrationId(7));
    let side = Side::Incoming { peer, peer_name, remote, volumes: vec![record] };
    let moving = MigratingVolume {
        volume: V,
        source: ImageLocation::raw_file("b", ""),
        target: ImageLocation::raw_file("s", "/a"),
    };
    let started = Record::MigrationStarted { migration, volumes: vec![moving], keep_source: false, side };
    let prepared = Record::TargetPrepared { migration, attempt: Attempt(1) };
    let owned = Record::Owned { migration, attempt: Attempt(1), generations };
    let place = Place::File("/a".into());
    // Prepared: the source may still keep the volume, and then this copy is worthless.
    let mut records = vec![started, prepared];
    assert!(!is_complete(&place, &state(records.clone())));
    records.push(owned.clone());
    assert!(completes(&owned));
    assert_eq!(
        completed_by(std::slice::from_ref(&owned), &state(records.clone())),
        std::slice::from_ref(&place)
    );
    // The copy lacks blocks until it is filled.
    let manifest = crate::filling::Manifest { units: 1, checksum: 2 };
    let hollow = Hollow { attempt: Attempt(1), manifests: vec![(V, manifest)] };
    records.insert(1, Record::Hollow { migration, hollow });
    assert!(completed_by(&[owned], &state(records.clone())).is_empty());
    let filled = Record::Filled { volume: V };
    records.push(filled.clone());
    assert_eq!(completed_by(&[filled], &state(records)), [place]);
}

#[test]
fn an_image_that_its_volume_has_left_gets_another_name_also_if_some_chain_cannot_be_read() {
    let mut records = vec![volume(V, "/v.img.moved-m1"), outgoing("")];
    if let Record::MigrationStarted { volumes, .. } = &mut records[1] {
        volumes[0].source = ImageLocation::raw_file("s", "/v.img.moved-m1");
    }
    let generations = vec![(V, Generation(1))];
    records.push(Record::Released { migration: MigrationId(0), attempt: Attempt(1), generations });
    let mut known = book(&state(records), &[("/v.img.moved-m1", 1)]);
    let (place, found) = (Place::File("/v.img.moved-m1".into()), file(1));
    let kept = Kind::Kept { volume: "v".into(), migration: MigrationId(1) };
    let dark = Kind::Unknown { why: "EIO".into() };
    for kind in [kept, dark.clone()] {
        known.add(Claim { kind, place: place.clone(), found: found.clone() });
    }
    let (own, image) = (Owner::Migration(MigrationId(0)), Object { place, found, lasting: None });
    known.ask(Step::Fence, &own, &image).unwrap();
    assert_eq!(known.ask(Step::Discard, &own, &image).unwrap_err().claims, [dark]);
    known.ask(Step::Fence, &Owner::Migration(MigrationId(5)), &image).unwrap_err();
}

#[test]
fn what_an_export_is_stood_on_by_is_not_taken_away() {
    let kind = || Kind::BelowExport { top: "/o".into() };
    let book = claimed(kind());
    for owner in all_owners() {
        for step in [Step::Discard, Step::TakeBack, Step::Zero, Step::Release, Step::Advise(Advice::Delete)] {
            let refused = book.ask(step, &owner, &object("/a", 1)).unwrap_err();
            assert_eq!(refused.claims, [kind()], "{owner:?} {step:?}");
        }
        for step in [Step::Rename, Step::Restore, Step::Resize, Step::ServeReadWrite, Step::GiveBack] {
            assert!(book.ask(step, &owner, &object("/a", 1)).is_ok(), "{owner:?} {step:?}");
        }
    }
}

#[test]
fn a_file_that_came_to_the_name_of_an_image_is_nobodys_to_change_but_an_administrators() {
    let book = nobodys();
    let exchanged = object("/a", 7);
    let changing: Vec<Step> = Step::ALL.into_iter().filter(|step| *step != Step::Restore).collect();
    for step in changing {
        for owner in [Owner::Volume(V), Owner::Migration(MigrationId(0)), Owner::Housekeeping] {
            let refused = book.ask(step, &owner, &exchanged).unwrap_err();
            assert_eq!(refused.claims, [Kind::Exchanged], "{step:?} {owner:?}");
            assert!(refused.to_string().contains("sterna volume promote NAME --exchanged"), "{refused}");
            book.ask(step, &owner, &object("/a", 1)).unwrap();
        }
    }
    let by_name = Owner::Administrator(Word::Plain);
    book.ask(Step::Discard, &by_name, &exchanged).unwrap_err();
    book.ask(Step::ServeReadWrite, &by_name, &exchanged).unwrap();
    // The daemon by itself does not delete an unrecorded file.
    let unrecorded = object("/c", 3);
    let refused = book.ask(Step::Discard, &Owner::Housekeeping, &unrecorded).unwrap_err();
    assert_eq!(refused.claims, [Kind::Unrecorded]);
    book.ask(Step::Discard, &by_name, &unrecorded).unwrap();
    // An image of unknown identity is not taken for the recorded one.
    let dark = Object { lasting: None, ..object("/a", 1) };
    assert_eq!(book.ask(Step::Discard, &Owner::Volume(V), &dark).unwrap_err().claims, [Kind::Exchanged]);
}

#[test]
fn what_existed_before_is_claimed_by_its_identity_and_a_link_is_no_exchange() {
    let with = |purpose| {
        let known = KnownImage { lasting: lasting(3), purpose };
        let place = Place::File("/c".into());
        book(&state(vec![outgoing(""), Record::ImageKnown { place, known }]), &[("/c", 3)])
    };
    let given = with(Purpose::Given(MigrationId(0)));
    for owner in all_owners().into_iter().filter(|owner| *owner != Owner::Maker) {
        let refused = given.ask(Step::Discard, &owner, &object("/c", 3)).unwrap_err();
        assert!(refused.claims.contains(&Kind::Given), "{owner:?}");
    }
    let hidden = with(Purpose::Hidden(MigrationId(0)));
    let serve = hidden.ask(Step::ServeReadWrite, &Owner::Administrator(Word::Plain), &object("/c", 3));
    assert!(matches!(serve.unwrap_err().claims.as_slice(), [Kind::Stale { migration: MigrationId(0), .. }]));

    let mut linked = with(Purpose::Use);
    linked.link(&Place::File("/c".into()), "/big".into(), lasting(3));
    let refused = linked.ask(Step::Discard, &Owner::Volume(V), &object("/c", 7)).unwrap_err();
    assert_eq!(refused.claims, [Kind::Linked { to: "/big".into() }]);
    linked.link(&Place::File("/c".into()), "/big".into(), lasting(5));
    let refused = linked.ask(Step::Discard, &Owner::Volume(V), &object("/c", 7)).unwrap_err();
    assert_eq!(refused.claims, [Kind::Exchanged]);
}

#[test]
fn a_name_is_known_for_as_long_as_somebody_uses_it() {
    let place = |path: &str| Place::File(path.to_owned());
    let kept = KnownImage { lasting: lasting(3), purpose: Purpose::Kept(MigrationId(0)) };
    let passing = KnownImage { lasting: lasting(4), purpose: Purpose::Passing };
    let mut journal = state(vec![
        volume(V, "/a"),
        recorded("/a", 1),
        recorded("/b", 2),
        outgoing(""),
        Record::ImageKnown { place: place("/kept"), known: kept },
        Record::ImageKnown { place: place("/new"), known: passing },
    ]);
    // A restart knows the same.
    let entry = Entry { at_unix_ms: 0, records: journal.snapshot() };
    let mut again = State::default();
    again.apply(&entry).unwrap();
    assert_eq!(again, journal);
    journal.apply(&Entry { at_unix_ms: 0, records: vec![Record::VolumeRemoved { volume: V }] }).unwrap();
    let names: Vec<&str> = journal.images.keys().map(Place::name).collect();
    assert_eq!(names, ["/a", "/kept", "/new"], "the migration that leaves it has not ended");
    let forgotten = Record::ImageForgotten { place: place("/new") };
    journal.apply(&Entry { at_unix_ms: 0, records: vec![forgotten] }).unwrap();
    assert!(!journal.images.contains_key(&place("/new")));
}
