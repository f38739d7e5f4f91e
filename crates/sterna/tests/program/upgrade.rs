//! Tests that this version continues with data folders of killed daemons of version 0.1 (`tests/version_0_1/`).
//!
//! ```text
//!   one   raw: a ─m0─► b       left: a ─m1─► two:a       came: two:a ─m2─► b       qcow2: a
//!         slow: a ─m3, a part copied─► b                 queued: a ─m4, waits for m3─► b
//! ```
//! Their journals name images below `/mnt`: each daemon sees the folder of its host there, in a mount namespace of its own.
//! The images are made anew, each of bytes that no other one has; mounting needs root.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use testbed::nbd_client::{Address, Client, ClientOptions, Operation};
use testbed::{Program, own_address};

use crate::hosts::wait_connected;
use crate::scene::{PROGRAM, Scene, code};

/// Where version 0.1 listened at each host.
const ADDRESSES: [(&str, &str); 2] = [("one", "127.0.0.1:18961"), ("two", "127.0.0.1:18962")];
/// Size of the volumes but for `slow`.
const VOLUME_BYTES: usize = 1 << 20;
const SLOW_BYTES: usize = 8 << 20;
/// Raw images by host, and what each byte of them is.
const IMAGES: [(&str, &str, u8); 7] = [
    ("one", "b/raw.img", 1),
    ("one", "b/came.img", 2),
    ("one", "a/slow.img", 3),
    ("two", "a/left.img", 4),
    // The kept image differs, so that the test can distinguish it from the volume.
    ("one", "a/raw.img.moved-m0", 5),
    ("one", "a/left.img.moved-m1", 6),
    ("two", "a/came.img.moved-m1", 7),
];
/// What each byte of `qcow2` is.
const QCOW2_BYTE: u8 = 8;

#[test]
fn data_folder_of_version_0_1_says_what_it_said() {
    let Some([mut one, _two]) = hosts() else { return };
    start(&mut one);
    // The order that waited when the daemon was killed is carried out in its turn.
    one.succeed(&["migration", "watch", "m4"]);
    for (name, id, place, generation, byte) in [
        ("came", "daf740658f69f619831adbec5b88bc0e", "b/came.img", 1, 2),
        ("qcow2", "ee83bb75ad51c64da8ae5cc7d3094e82", "a/qcow2.qcow2", 0, QCOW2_BYTE),
        ("queued", "ab524a8ebd398e249a19d581cb935ef1", "b/queued.img", 1, 0),
        ("raw", "69fec997860468a145cd13b509f3ccca", "b/raw.img", 1, 1),
        ("slow", "31887bb9bf4f363ae6bb9ab81604320d", "a/slow.img", 0, 3),
    ] {
        let (_, volume) = one.json(&["volume", "show", name]);
        let known = ["id", "image", "generation", "state"].map(|field| volume[field].clone());
        assert_eq!(known, [json!(id), json!(format!("/mnt/{place}")), json!(generation), json!("serving")]);
        let size = if name == "slow" { SLOW_BYTES } else { VOLUME_BYTES };
        assert_eq!(volume["size_bytes"], size, "{volume}");
        check_content(&one, name, size, byte);
    }
    assert_eq!(one.json(&["volume", "list"]).1.as_array().unwrap().len(), 5);

    let (exit, refused) = one.json(&["migrate", "left", "--to", "b"]);
    assert_eq!((exit, code(&refused)), (3, "volume_not_found"), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("host \"two\" (m1)"), "{refused}");

    let (_, migrations) = one.json(&["migration", "list"]);
    let brief = |migration: &Value| {
        let word = |value: &Value| value.as_str().unwrap().to_owned();
        let [from, to] = ["source", "target"].map(|side| word(&migration[side]["store"]));
        [word(&migration["id"]), word(&migration["volume"]), from, to, word(&migration["state"])].join(" ")
    };
    let history: Vec<_> = migrations.as_array().unwrap().iter().map(brief).collect();
    let expected = [
        "m0 raw a b moved",
        "m1 left a two:a moved",
        "m2 came two b moved",
        "m3 slow a b failed",
        "m4 queued a b moved",
    ];
    assert_eq!(history, expected);
    assert_eq!(
        (&migrations[0]["bytes_copied"], &migrations[0]["keep_source"]),
        (&VOLUME_BYTES.into(), &true.into())
    );
    let report = one.path("report.html").display().to_string();
    one.succeed(&["migration", "report", "m0", "--output", &report]);

    let (_, kept) = one.json(&["replica", "list"]);
    let images: Vec<_> =
        kept.as_array().unwrap().iter().map(|kept| kept["image"].as_str().unwrap()).collect();
    assert_eq!(images, ["/mnt/a/left.img.moved-m1", "/mnt/a/raw.img.moved-m0"]);
    // The half-made image was deleted.
    assert_eq!(one.images("b"), ["came.img", "queued.img", "raw.img"]);
}

#[test]
fn volumes_of_version_0_1_go_on_moving() {
    let Some([mut one, mut two]) = hosts() else { return };
    start(&mut one);
    start(&mut two);
    one.succeed(&["migration", "watch", "m4"]);
    one.succeed(&["migrate", "raw", "--to", "a"]);
    one.succeed(&["migrate", "qcow2", "--to", "b", "--format", "raw"]);
    wait_connected(&one, "two");
    wait_connected(&two, "one");
    two.succeed(&["migrate", "left", "--to", "one:b"]);
    one.succeed(&["migrate", "came", "--to", "two:b"]);
    let check = |one: &Scene, two: &Scene| {
        for (name, byte) in [("raw", 1), ("qcow2", QCOW2_BYTE), ("left", 4)] {
            check_content(one, name, VOLUME_BYTES, byte);
        }
        check_content(two, "came", VOLUME_BYTES, 2);
        assert_eq!(one.images("b"), ["left.img", "qcow2.img", "queued.img"]);
    };
    check(&one, &two);
    // The journals have been written anew by then. One after the other: each serves what has left for the other.
    for scene in [&mut two, &mut one] {
        scene.stop();
        start(scene);
    }
    check(&one, &two);
}

/// The two hosts as version 0.1 left them; none where a daemon cannot see its folder at `/mnt`.
fn hosts() -> Option<[Scene; 2]> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, which mounting needs");
        return None;
    }
    let own = ADDRESSES.map(|_| own_address().unwrap().to_string());
    Some([0, 1].map(|index| {
        let scene = Scene::new();
        let (name, own_address) = (ADDRESSES[index].0, &own[index]);
        let left = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/version_0_1").join(name);
        copy_folder(&left, &scene.path("data"));
        // Nobody listens where they listened.
        let mut known = fs::read_to_string(left.join("hosts.json")).unwrap();
        for ((_, before), now) in ADDRESSES.iter().zip(&own) {
            known = known.replace(before, now);
        }
        fs::write(scene.path("data/hosts.json"), known).unwrap();
        let store = |name: &str| format!("[stores.{name}]\npath = '/mnt/{name}'\n");
        let hosts =
            format!("[hosts]\nlisten = ['{own_address}']\nlinks = [{{ address = '{own_address}' }}]\n");
        let places =
            format!("data_dir = '{}'\napi = '{}'\n", scene.path("data").display(), scene.address().unwrap());
        fs::write(scene.folder().configuration(), [places, store("a"), store("b"), hosts].concat()).unwrap();
        make_images(&scene, name);
        scene
    }))
}

/// Copies a folder, with files that only their owner can read.
fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &copy);
        } else {
            fs::copy(&path, &copy).unwrap();
            fs::set_permissions(&copy, Permissions::from_mode(0o600)).unwrap();
        }
    }
}

fn make_images(scene: &Scene, host: &str) {
    for (_, image, byte) in IMAGES.into_iter().filter(|image| image.0 == host) {
        let bytes = if image.contains("slow") { SLOW_BYTES } else { VOLUME_BYTES };
        fs::write(scene.path(image), vec![byte; bytes]).unwrap();
    }
    if host == "one" {
        let empty = |image: &str| File::create_new(scene.path(image)).unwrap();
        empty("a/queued.img").set_len(VOLUME_BYTES as u64).unwrap();
        empty("b/slow.img").set_len(SLOW_BYTES as u64).unwrap();
        let image = scene.path("a/qcow2.qcow2").display().to_string();
        let size = VOLUME_BYTES.to_string();
        let create = ["create", "-q", "-f", "qcow2", &image, &size];
        Program::of_package("qemu-img", "qemu-utils").args(create).succeed().unwrap();
        let write = format!("write -q -P {QCOW2_BYTE} 0 {size}");
        Program::of_package("qemu-io", "qemu-utils").args(["-c", &write, &image]).succeed().unwrap();
    }
}

/// Starts a daemon that sees the folder of its host at `/mnt`.
fn start(scene: &mut Scene) {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /mnt && exec \"$@\""]);
    command.arg(scene.folder().root()).arg(PROGRAM);
    scene.start_by(command).unwrap();
}

/// Reads a whole volume, as its clients do: each of its bytes is `expected`.
fn check_content(scene: &Scene, name: &str, size: usize, expected: u8) {
    let address = Address::new(scene.path(&format!("run/volumes/{name}.sock")), name);
    let mut client = Client::connect(&address, ClientOptions::default()).unwrap();
    let whole = Operation::Read { offset: 0, buffer: vec![!expected; size] };
    let Operation::Read { buffer, .. } = client.perform(whole).unwrap() else { unreachable!() };
    let wrong = buffer.iter().find(|byte| **byte != expected);
    assert_eq!(wrong, None, "{name} is to be all {expected}");
}
