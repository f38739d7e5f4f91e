//! Tests that torn, corrupted and forged journals are described correctly, and never trusted more than by a daemon.

use chronicle::{BranchId, Generation, StayId};
use migration::filling::Manifest;
use migration::journal::{
    AttachedVolume, ExportSettings, GivenAttachment, HEADER, HEADER_BYTES, Hollow, ImageLocation,
    MigratingVolume, Origin, Outcome, Place, Promotion, Record, Summary, VolumeFilling, VolumeRecord, encode,
};
use migration::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};
use serde_json::Value;

use super::*;
use crate::journal::read_journal;

const VOLUME: VolumeId = VolumeId([1; 16]);
const MIGRATION: MigrationId = MigrationId(0);
const ATTEMPT: Attempt = Attempt(1);
const PEER: HostId = HostId([9; 32]);

fn image(name: &str) -> ImageLocation {
    ImageLocation::raw_file("store", format!("/store/{name}"))
}

fn volume() -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".into(),
        size_bytes: 1 << 30,
        block_size_bytes: 4096,
        image: image("v.img"),
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}

fn started(side: Side) -> Record {
    let volumes = vec![MigratingVolume { volume: VOLUME, source: image("v.img"), target: image("w.img") }];
    Record::MigrationStarted { migration: MIGRATION, volumes, keep_source: true, side }
}

fn outgoing() -> Side {
    Side::Outgoing {
        peer: PEER,
        peer_name: "b".into(),
        store: "fast".into(),
        forwarding: migration::journal::Forwarding::WhileConnected,
    }
}

fn incoming() -> Side {
    let (peer_name, remote) = ("b".into(), MigrationId(7));
    Side::Incoming { peer: PEER, peer_name, remote, volumes: vec![volume()] }
}

/// Returns a journal of these commits behind an empty snapshot, and the end of each entry.
fn journal(commits: &[Vec<Record>]) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut ends) = (HEADER.to_vec(), Vec::new());
    let snapshot = vec![Record::Snapshot(Box::default())];
    for (sequence, records) in [&snapshot].into_iter().chain(commits).enumerate() {
        let entry = Entry { at_unix_ms: 1000 + sequence as u64, records: records.clone() };
        encode(sequence as u64, &entry, &mut bytes).unwrap();
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn a_move() -> Vec<Vec<Record>> {
    let generations = vec![(VOLUME, Generation(1))];
    vec![
        vec![Record::VolumeAdded(volume())],
        vec![started(outgoing())],
        vec![Record::Released { migration: MIGRATION, attempt: ATTEMPT, generations }],
    ]
}

fn examine(bytes: &[u8]) -> JournalExamination {
    let path = Path::new("journal");
    let (found, fault) = JournalExamination::of_bytes(path, bytes);
    // A daemon decides the same.
    let read = read_journal(path, bytes);
    assert_eq!((found.intact, fault.is_none()), (read.is_ok(), read.is_ok()));
    assert_eq!(found.problem.is_some(), read.is_err());
    if let Ok(state) = read {
        assert_eq!(state, found.state);
    }
    // It can be printed in any case.
    let exported = found.export();
    assert_eq!(exported["entries"].as_array().unwrap().len() as u64, found.entries);
    serde_json::to_string(&exported).unwrap();
    found
}

#[test]
fn a_volume_is_told_where_it_is() {
    let check = |commits: &[Vec<Record>], owner, host: Option<&str>| {
        let (bytes, ends) = journal(commits);
        let found = examine(&bytes);
        let [volume] = found.volumes.as_slice() else { panic!("{found:?}") };
        assert_eq!((volume.owner, volume.host.as_deref(), volume.name.as_str()), (owner, host, "v"));
        assert_eq!(
            (found.entries, found.end_bytes),
            (commits.len() as u64 + 1, *ends.last().unwrap() as u64)
        );
        assert_eq!(found.last_unix_ms, Some(1000 + commits.len() as u64));
        found
    };
    check(&a_move()[..1], JournalOwner::Here, None);
    let found = check(&a_move()[..2], JournalOwner::Here, None);
    assert_eq!((found.migrations[0].stage, found.migrations[0].incoming), ("copying", false));
    let found = check(&a_move(), JournalOwner::Elsewhere, Some("b"));
    assert_eq!((found.volumes[0].generation, found.migrations[0].stage), (1, "released"));
    let arrival = [vec![started(incoming())]];
    let found = check(&arrival, JournalOwner::Arriving, Some("b"));
    assert_eq!((found.migrations[0].incoming, found.migrations[0].host.as_deref()), (true, Some("b")));
}

#[test]
fn a_journal_that_ends_anywhere_is_told_up_to_there() {
    let (whole, ends) = journal(&a_move());
    for length in 0..=whole.len() {
        for room in [0, 100] {
            let bytes = [&whole[..length], &vec![0; room][..]].concat();
            let found = examine(&bytes);
            // If only zeroes are missing, the reserved space has them.
            let is_whole =
                |end: usize| end <= length || room > 0 && whole[length..end].iter().all(|byte| *byte == 0);
            let entries = ends.iter().filter(|end| is_whole(**end)).count();
            assert_eq!(found.entries, entries as u64, "{length}");
            assert_eq!(found.intact, entries > 0, "{length}: {found:?}");
            if found.intact {
                // Zeroes at the end of a torn commit look like reserved space.
                let torn = bytes.get(ends[entries - 1]..).unwrap_or_default();
                let last = torn.iter().rposition(|byte| *byte != 0);
                assert_eq!(found.torn_bytes, last.map_or(0, |last| last as u64 + 1), "{length}");
            }
        }
    }
}

#[test]
fn no_flipped_bit_is_believed() {
    let (whole, ends) = journal(&a_move());
    let sound = examine(&whole).state;
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            let found = examine(&bytes);
            let before = ends.iter().filter(|end| **end <= at).count();
            if at >= HEADER_BYTES {
                assert_eq!(found.entries, before as u64, "byte {at}, bit {bit}");
                assert_ne!(found.state, sound, "byte {at}, bit {bit}");
                // Only the last entry, which may not have been acknowledged, may be missing.
                assert_eq!(found.intact, before + 1 == ends.len(), "byte {at}, bit {bit}: {found:?}");
            }
        }
    }
}

#[test]
fn records_that_contradict_each_other_are_told_up_to_there() {
    let mut commits = a_move();
    commits.push(vec![Record::Owned { migration: MigrationId(5), attempt: ATTEMPT, generations: vec![] }]);
    let found = examine(&journal(&commits).0);
    assert!(!found.intact && found.problem.unwrap().contains("contradicts itself"));
    assert_eq!((found.entries, found.volumes.len()), (4, 1));
}

#[test]
fn a_file_of_any_kind_is_told_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL_FILE);
    let refused = |path: &Path| JournalExamination::of(path).unwrap_err().to_string();
    assert!(refused(folder.path()).contains("cannot be read"));
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused(folder.path());
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    refused(folder.path());
    std::fs::remove_dir(&path).unwrap();
    std::fs::File::create(&path).unwrap().set_len(FILE_BYTES_MAX + 1).unwrap();
    assert!(refused(folder.path()).contains("another file"));
    for garbage in [&b""[..], b"STERNAJ", b"STERNAJ\xff", b"#!/bin/sh", &[0xff; 5000]] {
        std::fs::write(&path, garbage).unwrap();
        assert!(!JournalExamination::of(folder.path()).unwrap().intact, "{garbage:?}");
    }
    std::fs::write(&path, journal(&a_move()).0).unwrap();
    // By the file, and by its folder.
    for path in [folder.path(), &path] {
        assert!(JournalExamination::of(path).unwrap().intact);
    }
}

#[test]
fn every_record_is_exported_by_a_name_of_its_own() {
    let (migration, attempt, generations) = (MIGRATION, ATTEMPT, vec![(VOLUME, Generation(1))]);
    let hollow = Hollow { attempt, manifests: vec![(VOLUME, Manifest { units: 5, checksum: 1 })] };
    let filling = VolumeFilling {
        peer: PEER,
        peer_name: "b".into(),
        remote: MigrationId(7),
        index: VolumeIndex::all(1).next().unwrap(),
        stay: StayId::Arrived(0),
        manifest: Manifest { units: 5, checksum: 1 },
        is_given_up: false,
    };
    let given = GivenAttachment {
        host: HostId([7; 32]),
        host_name: "b".into(),
        access: migration::journal::ExportAccess::ReadOnly,
        is_confirmed: true,
        has_gone_there: false,
    };
    let attached = AttachedVolume {
        record: volume(),
        number: migration,
        host: HostId([7; 32]),
        host_name: "b".into(),
        has_left: false,
    };
    let promotion = Promotion::Force { branches: vec![(VOLUME, BranchId([3; 16]))] };
    let failed = Outcome::Failed { code: migration::journal::FailureCode::NotBegun, detail: "why".into() };
    let records = [
        Record::Snapshot(Box::default()),
        Record::VolumeAdded(volume()),
        Record::VolumeRemoved { volume: VOLUME },
        started(Side::OneHost),
        Record::TargetPrepared { migration, attempt },
        Record::AttemptAborted { migration, attempt },
        Record::Released { migration, attempt, generations: generations.clone() },
        Record::Owned { migration, attempt, generations: generations.clone() },
        Record::HandedBack { migration, generations: generations.clone() },
        Record::MigrationEnded { migration, outcome: failed.clone(), summary: Summary::default() },
        Record::ResizeBegun { volume: VOLUME, size_bytes: 1 },
        Record::Resized { volume: VOLUME, size_bytes: 1 },
        Record::ReservationLifted { place: Place::Device("/dev/x".into()) },
        Record::Promoted { migration, attempt, generations, promotion },
        Record::MovedForgotten { volume: VOLUME },
        Record::OriginKnown { volume: VOLUME, origin: Origin::Given },
        Record::Discarding { migration, outcome: failed },
        Record::Hollow { migration, hollow },
        Record::FillingKnown { volume: VOLUME, filling: Box::new(filling) },
        Record::Filled { volume: VOLUME },
        Record::MissingGivenUp { volume: VOLUME },
        Record::Restored(Box::default()),
        Record::Reinstated { volume: VOLUME, generation: Generation(1), stay: migration, branch: None },
        Record::RestoredForgotten { volume: VOLUME },
        Record::RestoredMore(Box::default()),
        Record::DepartureConfirmed { volume: VOLUME },
        Record::CancelOrdered { migration },
        Record::GrewElsewhere { volume: VOLUME, size_bytes: 1 },
        Record::AttachmentGiven { volume: VOLUME, given: Box::new(given) },
        Record::AttachmentEnded { volume: VOLUME, host: HostId([7; 32]) },
        Record::Attached(Box::new(attached)),
        Record::Detached { volume: VOLUME },
    ];
    let exported: Vec<Value> = records.iter().map(export::record).collect();
    let names: BTreeSet<&str> = exported.iter().map(|record| record["record"].as_str().unwrap()).collect();
    assert_eq!(names.len(), records.len());
    let of = |name: &str| exported.iter().find(|record| record["record"] == name).unwrap();
    assert_eq!(of("owned")["generations"][VOLUME.to_string()], 1);
    assert_eq!(of("migration-ended")["outcome"]["code"], "not-begun");
    assert_eq!(of("promoted")["promotion"]["branches"][VOLUME.to_string()], "03".repeat(16));
    assert_eq!(of("origin-known")["origin"], "given");
    assert_eq!(of("volume-added")["image"]["place"], "/store/v.img");
}
