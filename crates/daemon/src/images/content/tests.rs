//! Tests of the roles of files in a store.

use std::os::unix::ffi::OsStrExt as _;

use api::FileRole;
use chronicle::Generation;
use migration::journal::{Entry, ExportSettings, MigratingVolume, Place, Record, Side, VolumeRecord};
use migration::{MigrationId, VolumeId};

use super::*;

/// Makes a folder, and a journal that has `v.img`, which migration 7 moves to `w.img`.
fn scene() -> (tempfile::TempDir, State) {
    let folder = tempfile::tempdir().unwrap();
    let image = |name: &str| ImageLocation::raw_file("a", folder.path().join(name).display().to_string());
    let volume = VolumeId([1; 16]);
    let record = VolumeRecord {
        volume,
        name: "v".into(),
        size_bytes: 4096,
        block_size_bytes: 4096,
        image: image("v.img"),
        generation: Generation(0),
        export: ExportSettings::default(),
    };
    let moving = MigratingVolume { volume, source: image("v.img"), target: image("w.img") };
    let mut state = State::default();
    let started = Record::MigrationStarted {
        migration: MigrationId(7),
        volumes: vec![moving],
        keep_source: false,
        side: Side::OneHost,
    };
    state.apply(&Entry { at_unix_ms: 0, records: vec![Record::VolumeAdded(record), started] }).unwrap();
    (folder, state)
}

fn found(folder: &Path, state: &State) -> Vec<StoreFile> {
    let (files, left_out) = of_folder(folder, folder, state).unwrap();
    assert_eq!(left_out, 0);
    files
}

fn role(folder: &Path, state: &State, name: &str) -> FileRole {
    let files = found(folder, state);
    let file = files.iter().find(|file| file.name == name).unwrap_or_else(|| panic!("{name}: {files:?}"));
    // Asking for the single file gives the same.
    assert_eq!(of_file(&folder.join(name), folder, state).unwrap().as_ref(), Some(file));
    file.role
}

#[test]
fn a_file_is_what_the_journal_its_mark_and_its_name_say() {
    let (folder, state) = scene();
    let folder = folder.path();
    for name in
        ["v.img", "w.img", "x.img", "half.img", "copy.partial", "v.img.moved-m3", "y.img.sterna-new", "text"]
    {
        std::fs::write(folder.join(name), [7; 4096]).unwrap();
    }
    // The journal overrides a mark that was left over.
    for name in ["v.img", "half.img"] {
        half_made::mark(&folder.join(name), None).unwrap();
    }
    for (name, expected) in [
        ("v.img", FileRole::Volume),
        ("w.img", FileRole::Target),
        ("x.img", FileRole::Unclaimed),
        ("half.img", FileRole::HalfMade),
        ("copy.partial", FileRole::HalfMade),
        ("v.img.moved-m3", FileRole::StaleReplica),
        ("y.img.sterna-new", FileRole::Unsettled),
        ("text", FileRole::Other),
    ] {
        assert_eq!(role(folder, &state, name), expected, "{name}");
    }
    let files = found(folder, &state);
    let volume = files.iter().find(|file| file.name == "v.img").unwrap();
    assert_eq!((volume.volume.as_deref(), volume.migration.as_deref()), (Some("v"), Some("m7")));
    assert_eq!((volume.size_bytes, volume.format), (Some(4096), Some(api::ImageFormat::Raw)));
    // Marks, and the lock, are not listed as files.
    assert_eq!(files.len(), 8, "{files:?}");
}

#[test]
fn a_half_made_image_that_was_renamed_by_hand_is_still_half_made() {
    let (folder, state) = scene();
    let folder = folder.path();
    let (half, renamed) = (folder.join("half.img"), folder.join("backup.img"));
    std::fs::write(&half, [7; 4096]).unwrap();
    let place = Place::File(half.display().to_string());
    half_made::mark(&half, crate::custody::lasting_at(&place).unwrap().as_ref()).unwrap();
    std::fs::rename(&half, &renamed).unwrap();
    assert_eq!(role(folder, &state, "backup.img"), FileRole::HalfMade);
    let note = found(folder, &state)[0].note.clone().unwrap();
    assert!(note.contains("half.img"), "{note}");
}

#[test]
fn what_is_no_file_is_told_and_neither_opened_nor_followed() {
    let (folder, state) = scene();
    let folder = folder.path();
    std::fs::create_dir(folder.join("folder.img")).unwrap();
    let pipe = folder.join("pipe.qcow2");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::write(folder.join("x.img"), [7; 4096]).unwrap();
    std::os::unix::fs::symlink("x.img", folder.join("link.img")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.join("dangling.img")).unwrap();
    std::os::unix::fs::symlink("loop.qcow2", folder.join("loop.qcow2")).unwrap();
    std::fs::write(folder.join(std::ffi::OsStr::from_bytes(b"bad\xff.img")), [7; 4096]).unwrap();
    std::fs::write(folder.join("two\nlines.img"), [7; 4096]).unwrap();
    for file in found(folder, &state) {
        let expected = if file.name == "x.img" { FileRole::Unclaimed } else { FileRole::Other };
        let is_odd_name = file.name == "two\nlines.img";
        assert!(
            file.role == expected && (is_odd_name || file.note.is_some() || expected != FileRole::Other),
            "{file:?}"
        );
    }
    assert_eq!(found(folder, &state).len(), 8);
}

#[test]
fn a_link_to_a_volumes_image_is_that_image() {
    let (folder, state) = scene();
    let folder = folder.path();
    std::fs::write(folder.join("v.img"), [7; 4096]).unwrap();
    // As with bind mounts, or a folder that was configured by another path.
    let other = tempfile::tempdir().unwrap();
    let path = other.path().join("store");
    std::os::unix::fs::symlink(folder, &path).unwrap();
    assert_eq!(role(&path, &state, "v.img"), FileRole::Volume);
}

#[test]
fn garbage_for_qcow2_images_harms_nobody() {
    let (folder, state) = scene();
    let folder = folder.path();
    let header = [&b"QFI\xfb\0\0\0\x03"[..], &[0xff; 120]].concat();
    for length in 0..header.len() {
        std::fs::write(folder.join("g.qcow2"), &header[..length]).unwrap();
        let [file] = found(folder, &state).try_into().unwrap();
        assert_eq!(file.role, FileRole::Unclaimed);
        assert_eq!(file.size_bytes.is_some(), !(4..32).contains(&length), "{length}: {file:?}");
    }
    std::fs::write(folder.join("g.qcow2"), b"KDMV").unwrap();
    let [file] = found(folder, &state).try_into().unwrap();
    assert!(file.role == FileRole::Other && file.note.unwrap().contains("vmdk"));
}
