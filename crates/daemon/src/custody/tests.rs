//! Tests of custody with real files: what is refused, what is done, and that it is done to the checked file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use block::store::{Access, Image, Qcow2Image, Qcow2Options};
use chronicle::Generation;
use migration::custody::{Advice, Ending, Owner, Step, Word};
use migration::journal::{
    Entry, ExportSettings, ImageFormat, ImageLocation, MigratingVolume, Place, Record, Side, State,
    VolumeRecord,
};
use migration::recovery::Retirement;
use migration::{MigrationId, VolumeId};

use super::{Custody, CustodyError};
use crate::config::StoreConfig;
use crate::images::{fenced_path, half_made};
use crate::stores::Stores;

const V: VolumeId = VolumeId([1; 16]);
const BY_NAME: Owner = Owner::Administrator(Word::Plain);

fn location(path: &Path) -> ImageLocation {
    ImageLocation::raw_file("a", path.display().to_string())
}

fn volume(image: ImageLocation) -> Record {
    Record::VolumeAdded(VolumeRecord {
        volume: V,
        name: "v".into(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    })
}

fn custody(records: Vec<Record>) -> Custody {
    let mut state = State::default();
    state.apply(&Entry { at_unix_ms: 0, records }).unwrap();
    Custody::of_state(state)
}

/// Returns the records of a migration between stores that has left `from`, or would.
fn left(from: &Path, to: &Path) -> Vec<Record> {
    let moving = MigratingVolume { volume: V, source: location(from), target: location(to) };
    let side = Side::OneHost;
    vec![
        volume(location(to)),
        Record::MigrationStarted {
            migration: MigrationId(7),
            volumes: vec![moving],
            keep_source: false,
            side,
        },
    ]
}

fn image(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    path
}

/// A program that only has a file open.
struct Stranger(Child);

impl Stranger {
    fn with(path: &Path) -> Self {
        Self(Command::new("sleep").arg("600").stdin(File::open(path).unwrap()).spawn().unwrap())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[track_caller]
fn refused(result: Result<impl Sized, CustodyError>, why: &str) {
    let error = result.map(drop).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn images_are_discarded_and_retired_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.img");
    let nobodys = custody(Vec::new());
    let retire = |how| nobodys.retire(&location(&path), how, MigrationId(7));
    for _ in 0..2 {
        nobodys.discard(&location(&path), &Owner::Housekeeping).unwrap();
        retire(Retirement::Keep).unwrap();
    }
    std::fs::write(&path, b"old").unwrap();
    for _ in 0..2 {
        retire(Retirement::Keep).unwrap();
    }
    let fenced = fenced_path(&path, MigrationId(7));
    assert!(fenced.ends_with("a.img.moved-m7"));
    assert_eq!((path.exists(), std::fs::read(&fenced).unwrap()), (false, b"old".to_vec()));
    // A kept image is never overwritten by another one, and none stays under the name of a live one.
    std::fs::write(&path, b"new").unwrap();
    let other = retire(Retirement::Keep).unwrap().unwrap();
    assert!(other.ends_with("a.img.moved-m7-2") && !path.exists());
    assert_eq!(
        (std::fs::read(&fenced).unwrap(), std::fs::read(&other).unwrap()),
        (b"old".to_vec(), b"new".to_vec())
    );
    std::fs::write(&path, b"third").unwrap();
    retire(Retirement::Delete).unwrap();
    assert!(!path.exists());
}

/// Lets a folder take no changes, or lets it take them again; returns whether that is possible here.
fn set_immutable(folder: &Path, how: &str) -> bool {
    Command::new("chattr").arg(how).arg(folder).status().is_ok_and(|status| status.success())
}

#[test]
fn an_image_that_can_be_neither_deleted_nor_renamed_is_remembered_as_an_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("store");
    std::fs::create_dir(&below).unwrap();
    let (from, to) = (image(&below, "from.img"), image(folder.path(), "to.img"));
    let custody = custody(left(&from, &to));
    custody.confirm(&location(&from).place, &block::held::find(&from).unwrap()).unwrap();
    if !set_immutable(&below, "+i") {
        return omission::machine_lacks("folders that take no changes (chattr +i, as root)");
    }
    let retired = custody.retire(&location(&from), Retirement::Delete, MigrationId(7));
    let serve = || custody.check(Step::ServeReadWrite, &BY_NAME, &location(&from));
    let (is_left, served) = (from.exists(), serve());
    assert!(set_immutable(&below, "-i"));
    assert!(retired.is_err() && is_left);
    refused(served, "old copy");
    // It is deleted once that is possible.
    custody.retire(&location(&from), Retirement::Delete, MigrationId(7)).unwrap();
    assert!(!from.exists());
}

#[test]
fn image_of_a_store_that_is_not_there_is_not_taken_for_deleted() {
    let path = Path::new("/nonexistent/store/a.img");
    refused(custody(Vec::new()).delete(path, &Owner::Housekeeping), "cannot delete /nonexistent/store/a.img");
    custody(Vec::new()).retire(&location(path), Retirement::Keep, MigrationId(1)).unwrap_err();
}

#[test]
fn what_a_volume_is_served_from_stays_under_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "v.img");
    let other = folder.path().join("other.img");
    std::fs::hard_link(&path, &other).unwrap();
    let custody = custody(vec![volume(location(&path))]);
    for name in [&path, &other] {
        for owner in [BY_NAME, Owner::Housekeeping, Owner::Migration(MigrationId(3)), Owner::Volume(V)] {
            refused(custody.delete(name, &owner), "the volume \"v\" is served from it");
        }
        refused(custody.rename(name, &folder.path().join("new"), &BY_NAME), "\"v\" is served from it");
        refused(custody.check(Step::ServeReadOnly, &BY_NAME, &location(name)), "\"v\" is served from it");
    }
    custody.check_removal(V, &path).unwrap();
    custody.rename(&path, &folder.path().join("new"), &Owner::Volume(V)).unwrap();
}

#[test]
fn what_a_served_chain_stands_on_stays() {
    let folder = tempfile::tempdir().unwrap();
    let base = image(folder.path(), "v.img.moved-m1");
    let top = folder.path().join("top.qcow2");
    let backing = Some(block::store::qcow2::BackingFile {
        path: base.display().to_string(),
        format: block::store::qcow2::Format::Raw,
    });
    drop(Qcow2Image::create(&top, 1 << 20, &Qcow2Options { cluster_size: 65536, backing }).unwrap());
    let image = ImageLocation {
        store: String::new(),
        place: Place::File(top.display().to_string()),
        format: ImageFormat::Qcow2,
    };
    let served = custody(vec![volume(image)]);
    let target = folder.path().join("v.img");
    let reserved = served.reserve(&target).unwrap().unwrap();
    let home = MigrationId(3);
    refused(served.take_back(&base, &target, &reserved, home), "the image of volume \"v\" stands on it");
    refused(served.discard(&location(&base), &BY_NAME), "the image of volume \"v\" stands on it");
    refused(
        served.check(Step::Advise(Advice::Delete), &BY_NAME, &location(&base)),
        "the image of volume \"v\" stands on it",
    );
    // It belongs to no volume, and lies beside.
    refused(custody(Vec::new()).take_back(&base, &target, &reserved, home), "top.qcow2 stands on it");
    // Its backing file is unknown, so it may be this one.
    std::fs::write(&top, b"QFI\xfb\0\0\0\x03 no header").unwrap();
    refused(served.discard(&location(&base), &BY_NAME), "its users are unknown");
    std::fs::remove_file(&top).unwrap();
    served.take_back(&base, &target, &reserved, home).unwrap();
    assert_eq!((base.exists(), std::fs::metadata(&target).unwrap().len()), (false, 1 << 20));
}

#[test]
fn what_another_program_has_open_is_neither_deleted_nor_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "v.img.moved-m1");
    let nobodys = custody(Vec::new());
    let stranger = Stranger::with(&path);
    refused(nobodys.discard(&location(&path), &BY_NAME), "sleep (process ");
    refused(nobodys.check_removal(V, &path), "sleep (process ");
    let target = folder.path().join("v.img");
    let reserved = nobodys.reserve(&target).unwrap().unwrap();
    refused(nobodys.take_back(&path, &target, &reserved, MigrationId(3)), "sleep (process ");
    drop(stranger);
    let taken = nobodys.take_back(&path, &target, &reserved, MigrationId(3)).unwrap();
    assert_eq!(taken, Ending::Taken);
}

#[test]
fn a_source_that_another_program_has_open_is_kept_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (image(folder.path(), "from.img"), image(folder.path(), "to.img"));
    let custody = custody(left(&from, &to));
    let stranger = Stranger::with(&from);
    let fault = custody.retire(&location(&from), Retirement::Delete, MigrationId(7)).unwrap_err();
    assert!(fault.detail.contains("sleep (process ") && fault.detail.contains("kept as "), "{fault}");
    drop(stranger);
    assert_eq!((from.exists(), fenced_path(&from, MigrationId(7)).exists()), (false, true));
}

#[test]
fn a_file_that_came_into_the_place_of_a_reserved_one_is_nobodys_to_delete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.img");
    let custody = custody(Vec::new());
    let reserved = custody.reserve(&path).unwrap().unwrap();
    assert!(half_made::is_marked(&path) && custody.reserve(&path).unwrap().is_none());
    std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    std::fs::write(&path, b"precious").unwrap();
    custody.unreserve(&path, &reserved);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let kept = image(folder.path(), "v.img.moved-m1");
    custody.take_back(&kept, &path, &reserved, MigrationId(3)).map(drop).unwrap_err();
    custody.place_made(&kept, &path, &reserved).unwrap_err();
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_link_is_deleted_and_what_it_leads_to_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (path, link) = (image(folder.path(), "file"), folder.path().join("v.img"));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    custody(Vec::new()).delete(&link, &Owner::Volume(V)).unwrap();
    assert!(path.exists() && std::fs::symlink_metadata(&link).is_err());
    std::fs::create_dir(&link).unwrap();
    refused(custody(Vec::new()).delete(&link, &Owner::Volume(V)), "its users are unknown");
}

#[test]
fn a_target_that_is_given_up_goes_while_this_daemon_still_has_it_open() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (image(folder.path(), "from.img"), image(folder.path(), "to.img"));
    let custody = custody(vec![volume(location(&to)), left(&to, &from).remove(1)]);
    let open = Image::open(&from, Access::ReadWrite).unwrap();
    custody.discard(&location(&from), &Owner::Migration(MigrationId(7))).unwrap();
    drop(open);
    assert_eq!((from.exists(), to.exists()), (false, true));
}

/// Makes a small image with the backing file `backing` as written.
fn overlay(path: &Path, backing: impl AsRef<[u8]>) {
    let (mut bytes, backing) = (vec![0; 4096], backing.as_ref());
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    bytes[8..16].copy_from_slice(&512_u64.to_be_bytes());
    bytes[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
    bytes[20..24].copy_from_slice(&16_u32.to_be_bytes());
    bytes[512..512 + backing.len()].copy_from_slice(backing);
    std::fs::write(path, bytes).unwrap();
}

/// Does the same, and says that the backing file is raw.
fn overlay_of_raw(path: &Path, backing: &str) {
    overlay(path, backing);
    let mut bytes = std::fs::read(path).unwrap();
    // An extension of version 2 follows the 72 bytes of the header: the format of the backing file.
    bytes[72..76].copy_from_slice(&0xe279_2aca_u32.to_be_bytes());
    bytes[76..80].copy_from_slice(&3_u32.to_be_bytes());
    bytes[80..83].copy_from_slice(b"raw");
    std::fs::write(path, bytes).unwrap();
}

fn of_two_stores(folder: &Path, records: Vec<Record>) -> Custody {
    let configured = ["fast", "slow"].map(|name| {
        std::fs::create_dir_all(folder.join(name)).unwrap();
        (name.to_owned(), StoreConfig::Folder { path: folder.join(name), format: None })
    });
    let custody = custody(records);
    custody.add_stores(&Stores::new(&configured.into()));
    custody
}

#[test]
fn an_image_in_another_store_keeps_what_it_stands_on_whatever_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let custody = of_two_stores(folder.path(), Vec::new());
    let base = image(&at("slow"), "base");
    std::os::unix::fs::symlink(&base, at("link")).unwrap();
    let text = base.display().to_string();
    for (name, backing) in [
        ("fast/any name", text.clone()),
        ("fast/a.img", "../slow/base".to_owned()),
        ("fast/b", format!("file:{text}")),
        ("fast/c", at("link").display().to_string()),
        ("fast/d", format!("json:{}", serde_json::json!({ "driver": "raw", "file.filename": text }))),
        ("fast/e", "nbd+unix:///v?socket=/run/sterna/volumes/v.sock".to_owned()),
    ] {
        overlay(&at(name), &backing);
        let location = match name {
            // The volume's image.
            "fast/e" => {
                let served = of_two_stores(folder.path(), vec![volume(location(&base))]);
                let why = format!("{} stands on the export of its volume", at(name).display());
                refused(served.check_removal(V, &base), &why);
                served.rename(&base, &at("slow/new"), &Owner::Volume(V)).unwrap();
                std::fs::rename(at("slow/new"), &base).unwrap();
                continue;
            }
            _ => location(&base),
        };
        let why = format!("{} stands on it", at(name).display());
        refused(custody.delete(&base, &BY_NAME), &why);
        refused(custody.rename(&base, &at("slow/new"), &Owner::Migration(MigrationId(3))), &why);
        refused(custody.check(Step::Zero, &Owner::Housekeeping, &location), &why);
        if name == "fast/c" {
            refused(custody.delete(&at("link"), &BY_NAME), &why);
        }
        std::fs::remove_file(at(name)).unwrap();
    }
    std::fs::remove_file(at("fast/e")).unwrap();
    custody.delete(&base, &BY_NAME).unwrap();
}

#[test]
fn an_image_whose_header_or_name_is_not_understood_keeps_all() {
    let folder = tempfile::tempdir().unwrap();
    let custody = of_two_stores(folder.path(), Vec::new());
    let (base, other) = (image(&folder.path().join("slow"), "base"), folder.path().join("fast/x"));
    std::fs::write(&other, b"QFI\xfb\0\0\0\x03 no header").unwrap();
    refused(custody.delete(&base, &BY_NAME), "its users are unknown");
    overlay(&other, "ssh://somewhere/base");
    refused(custody.delete(&base, &BY_NAME), "stands on ssh://somewhere/base, which is not understood");
    // The header in a raw disk whose format is known means nothing: its guest has written it.
    std::fs::rename(&other, folder.path().join("fast/v.img.moved-m1")).unwrap();
    custody.delete(&base, &BY_NAME).unwrap();
}

#[test]
fn an_image_below_one_that_is_read_otherwise_or_not_at_all_stays() {
    let folder = tempfile::tempdir().unwrap();
    let custody = of_two_stores(folder.path(), Vec::new());
    let at = |name: &str| folder.path().join(name);
    let (base, top, middle) = (image(&at("slow"), "base"), at("fast/top"), at("mnt/middle"));
    // Raw, over qcow2, over the base.
    std::fs::create_dir(at("mnt")).unwrap();
    overlay(&middle, base.display().to_string());
    let options =
        serde_json::json!({ "driver": "raw", "file.driver": "qcow2", "file.file.filename": middle });
    overlay_of_raw(&top, &format!("json:{options}"));
    refused(custody.delete(&base, &BY_NAME), "stands on it");
    // The disk of the image between the two is not mounted.
    overlay(&top, middle.display().to_string());
    std::fs::remove_file(&middle).unwrap();
    refused(custody.delete(&base, &BY_NAME), "mount its disk");
    // A missing file among others is gone.
    std::fs::write(at("mnt/other"), b"").unwrap();
    custody.check_deletion(&base, &BY_NAME, |_| ()).unwrap();
    for bytes in
        [&b"QED\0"[..], b"# Disk DescriptorFile\n", &[&[0; 64][..], &0xbeda_107f_u32.to_le_bytes()].concat()]
    {
        std::fs::write(&top, bytes).unwrap();
        refused(custody.delete(&base, &BY_NAME), "which is not read here");
    }
}

#[test]
fn a_backing_file_whose_name_is_not_text_is_found() {
    use std::os::unix::ffi::OsStrExt as _;
    let folder = tempfile::tempdir().unwrap();
    let custody = of_two_stores(folder.path(), Vec::new());
    let base = image(&folder.path().join("slow"), "base");
    let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"b\xf6se"));
    std::os::unix::fs::symlink(folder.path().join("slow"), &odd).unwrap();
    overlay(&folder.path().join("fast/top"), odd.join("base").as_os_str().as_bytes());
    refused(custody.delete(&base, &BY_NAME), "stands on it");
}

#[test]
fn a_kept_image_is_read_as_the_journal_says_whatever_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut records = left(&at("fast/v.img"), &at("slow/v.img"));
    let Record::MigrationStarted { volumes, .. } = &mut records[1] else { panic!() };
    volumes[0].source.format = ImageFormat::Qcow2;
    let custody = of_two_stores(folder.path(), records);
    let base = image(&at("slow"), "base");
    overlay(&at("fast/v.img.moved-m7"), base.display().to_string());
    refused(custody.delete(&base, &BY_NAME), "stands on it");
}

#[test]
fn the_image_of_a_volume_that_somebody_has_renamed_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "v.img");
    let custody = custody(vec![volume(location(&path))]);
    let served = Image::open(&path, Access::ReadWrite).unwrap();
    let renamed = folder.path().join("x.img.moved-m9");
    std::fs::rename(&path, &renamed).unwrap();
    refused(custody.delete(&renamed, &BY_NAME), "a volume that this daemon serves");
    drop(served);
}

#[test]
fn an_export_leads_to_its_volume_by_its_port_and_by_a_link_to_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("v.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    std::fs::create_dir_all(folder.path().join("slow")).unwrap();
    let base = image(&folder.path().join("slow"), "base");
    let mut added = volume(location(&base));
    if let Record::VolumeAdded(record) = &mut added {
        record.export.listen = Some("0.0.0.0:10991".to_owned());
    }
    let custody = of_two_stores(folder.path(), vec![added]);
    for uri in ["nbd://127.0.0.1:10991".to_owned(), format!("nbd+unix:///?socket={}", link.display())] {
        overlay(&folder.path().join("fast/top"), &uri);
        refused(custody.check_removal(V, &base), "stands on the export of its volume");
    }
}

#[test]
fn a_chain_that_a_program_has_open_keeps_the_name_of_what_is_below() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (from, to) = (image(folder.path(), "from.img"), image(folder.path(), "to.img"));
    let custody = custody(left(&from, &to));
    let top = elsewhere.path().join("top");
    overlay(&top, from.display().to_string());
    let opened = File::open(&from).unwrap();
    let mut qemu = Command::new("sleep");
    qemu.arg("600").stdin(opened).stdout(File::open(&top).unwrap());
    let qemu = Stranger(qemu.spawn().unwrap());
    let retire = || custody.retire(&location(&from), Retirement::Keep, MigrationId(7));
    let fault = retire().unwrap_err().to_string();
    assert!(fault.contains(&format!("{}, which sleep", top.display())), "{fault}");
    drop(qemu);
    retire().unwrap();
    assert!(!from.exists());
}

#[test]
fn a_file_that_came_to_the_name_of_an_image_is_not_taken_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "v.img");
    let custody = custody(vec![volume(location(&path))]);
    let place = Place::File(path.display().to_string());
    let held = || block::held::find(&path).unwrap();
    // The first opening records the image.
    custody.confirm(&place, &held()).unwrap();
    custody.confirm_filled(&place).unwrap();
    let away = folder.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    custody.confirm_filled(&place).unwrap_err();
    image(folder.path(), "v.img");
    refused(custody.confirm(&place, &held()), "another file or device has its name");
    refused(custody.confirm_filled(&place), "another file or device has its name");
    let to = folder.path().join("to");
    refused(custody.rename(&path, &to, &Owner::Volume(V)), "another file or device has its name");
    refused(custody.delete(&path, &Owner::Migration(MigrationId(7))), "served from it");
    // An administrator says that this is the image.
    assert!(
        custody.accept(&Owner::Volume(V), &place).unwrap()
            && !custody.accept(&Owner::Volume(V), &place).unwrap()
    );
    custody.confirm(&place, &held()).unwrap();
    custody.rename(&path, &to, &Owner::Volume(V)).unwrap();
}

#[test]
fn a_source_is_not_deleted_if_the_name_of_its_target_leads_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (image(folder.path(), "from.img"), image(folder.path(), "to.img"));
    let custody = custody(left(&from, &to));
    let place = Place::File(to.display().to_string());
    custody.confirm(&place, &block::held::find(&to).unwrap()).unwrap();
    std::fs::rename(&to, folder.path().join("away")).unwrap();
    let fault = custody.retire(&location(&from), Retirement::Delete, MigrationId(7)).unwrap_err();
    assert!(fault.detail.contains("it is kept as "), "{fault}");
    let kept = fenced_path(&from, MigrationId(7));
    assert!(kept.exists());
    let kept = Place::File(kept.display().to_string());
    assert!(custody.is_kept(&kept, MigrationId(7)) && !custody.is_kept(&kept, MigrationId(8)));
}

/// Records the image at `path` as its volume's, as the first opening does.
fn record(custody: &Custody, path: &Path) {
    let place = Place::File(path.display().to_string());
    custody.confirm(&place, &block::held::find(path).unwrap()).unwrap();
}

#[test]
fn a_source_whose_folder_is_out_of_sight_is_not_taken_for_gone() {
    for how in [Retirement::Delete, Retirement::Keep] {
        let folder = tempfile::tempdir().unwrap();
        let (store, away) = (folder.path().join("s"), folder.path().join("away"));
        std::fs::create_dir(&store).unwrap();
        let (from, to) = (image(&store, "from.img"), image(folder.path(), "to.img"));
        let custody = custody(left(&from, &to));
        record(&custody, &from);
        record(&custody, &to);
        // Another file system comes over the folder.
        std::fs::rename(&store, &away).unwrap();
        std::fs::create_dir(&store).unwrap();
        let retire = || custody.retire(&location(&from), how, MigrationId(7));
        let fault = retire().unwrap_err();
        assert!(fault.detail.contains("its folder is not the one in which it was"), "{fault}");
        std::fs::remove_dir(&store).unwrap();
        std::fs::rename(&away, &store).unwrap();
        // It is seen again, and is no image to serve.
        let serve = custody.check(Step::ServeReadWrite, &BY_NAME, &location(&from));
        refused(serve, "it is an old copy of volume \"v\" that migration m7 left");
        retire().unwrap();
        assert!(!from.exists());
    }
}

#[test]
fn an_image_that_existed_before_is_deleted_by_no_order_under_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (image(folder.path(), "web1.img"), image(folder.path(), "to.img"));
    let mut records = left(&from, &to);
    let Record::MigrationStarted { volumes, .. } = &mut records[1] else { unreachable!() };
    volumes[0].source.store.clear();
    let custody = custody(records);
    record(&custody, &from);
    let kept = custody.retire(&location(&from), Retirement::Keep, MigrationId(7)).unwrap().unwrap();
    for owner in
        [BY_NAME, Owner::Administrator(Word::Insists), Owner::Housekeeping, Owner::Migration(MigrationId(7))]
    {
        refused(custody.discard(&location(&kept), &owner), "it existed before Sterna served it");
    }
    custody.check(Step::Advise(Advice::Delete), &BY_NAME, &location(&kept)).unwrap();
    assert!(custody.is_kept(&Place::File(kept.display().to_string()), MigrationId(7)));
}

#[test]
fn an_image_whose_name_has_become_a_link_to_it_can_be_accepted_and_is_not_called_exchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "v.img");
    let custody = custody(vec![volume(location(&path))]);
    record(&custody, &path);
    let place = Place::File(path.display().to_string());
    let big = folder.path().join("big.img");
    // Copied, and then linked.
    std::fs::copy(&path, &big).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&big, &path).unwrap();
    refused(
        custody.confirm(&place, &block::held::find(&path).unwrap()),
        "another file or device has its name",
    );
    assert!(custody.accept(&Owner::Volume(V), &place).unwrap());
    record(&custody, &path);
    let to = folder.path().join("to");
    let rename = || custody.rename(&path, &to, &Owner::Volume(V));
    refused(rename(), &format!("its name is a link to it, {}", big.display()));
    std::fs::remove_file(&path).unwrap();
    std::fs::rename(&big, &path).unwrap();
    assert_eq!(rename().unwrap(), Ending::Taken);
}
