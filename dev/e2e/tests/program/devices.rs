//! Volumes on block devices: made there, served where they are, moved there and back, and killed on the way.

use std::path::{Path, PathBuf};

use e2e::Program;
use testbed::LoopDevice;

use crate::scene::{DISK_BYTES, Scene, code, loop_device, qemu_img, read_at, stop_and_verify, until};

/// Bytes of the device: more than the volume's, as logical volumes are.
const DEVICE_BYTES: u64 = DISK_BYTES + (1 << 20);
/// The former content of the device.
const DIRT: u8 = 0xD1;

/// A loop device over a file with other content.
struct Device {
    device: LoopDevice,
    file: PathBuf,
}

impl Device {
    /// Makes one in the folder of the scene; `None` where that is not allowed.
    fn new(scene: &Scene) -> Option<Self> {
        let file = scene.path("disk");
        std::fs::write(&file, vec![DIRT; usize::try_from(DEVICE_BYTES).unwrap()]).unwrap();
        loop_device(&file).map(|device| Self { device, file })
    }

    fn path(&self) -> &str {
        self.device.path().to_str().unwrap()
    }

    /// Bytes of the device from `start` on, past the system's cache of it.
    fn bytes(&self, start: u64, length: usize) -> Vec<u8> {
        read_at(&self.file, start, length)
    }
}

/// A scene with the store `d` on a device.
fn scene() -> Option<(Scene, Device)> {
    let scene = Scene::new();
    let device = Device::new(&scene)?;
    scene.configure(&format!("[stores.d]\ndevice = '{}'\n", device.path()));
    Some((scene, device))
}

fn store(scene: &Scene, name: &str) -> serde_json::Value {
    let (_, stores) = scene.json(&["store", "list"]);
    stores.as_array().unwrap().iter().find(|store| store["name"] == name).unwrap().clone()
}

#[test]
fn volume_moves_to_a_device_that_held_something_else_and_back() {
    let Some((mut scene, device)) = scene() else { return };
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    assert_eq!(
        (&store(&scene, "d")["kind"], &store(&scene, "d")["occupied"]),
        (&"device".into(), &().into())
    );
    scene.succeed(&["migrate", "v", "--to", "d"]);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["kind"], &volume["image"]), (&"device".into(), &device.path().into()));
    assert!(scene.images("a").is_empty());
    assert!(store(&scene, "d")["occupied"].as_str().unwrap().contains("it holds the volume \"v\""));
    let (exit, refused) = scene.json(&["volume", "create", "w", "--store", "d", "--size", "1MiB"]);
    assert_eq!((exit, code(&refused)), (4, "store_occupied"));
    // What lies behind the volume is not the volume's.
    assert_eq!(device.bytes(DISK_BYTES, 4096), [DIRT; 4096]);
    // It is found again by its name, as large as it was.
    scene.kill();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "d");
    let (_, back) = scene.json(&["migrate", "v", "--to", "b", "--keep-source"]);
    assert_eq!(back["state"], "moved", "{back}");
    assert!(back["message"].as_str().unwrap().contains("still holds the kept copy"), "{back}");
    stop_and_verify(guest);
}

#[test]
fn device_that_a_volume_has_left_is_fenced_until_somebody_says_otherwise() {
    let Some((mut scene, device)) = scene() else { return };
    scene.start(None);
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "d"]);
    scene.succeed(&["migrate", "v", "--to", "a", "--keep-source"]);
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "d"]);
    assert_eq!((exit, code(&refused)), (4, "store_occupied"));
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.ends_with("if it is not needed: sterna store release d"), "{message}");
    scene.succeed(&["store", "release", "d"]);
    scene.succeed(&["migrate", "v", "--to", "d"]);
    scene.succeed(&["migrate", "v", "--to", "a"]);
    // The store is not configured, so a user could mistake the device for a disk.
    scene.stop();
    scene.configure("");
    scene.start(None);
    let add = ["volume", "add", "w", "--device", device.path()];
    let (exit, refused) = scene.json(&add);
    assert_eq!((exit, code(&refused)), (4, "place_fenced"), "{refused}");
    scene.succeed(&[&add[..], &["--fenced", "--read-only"]].concat());
    let (_, volume) = scene.json(&["volume", "show", "w"]);
    assert_eq!((&volume["read_only"], &volume["size_bytes"]), (&true.into(), &DEVICE_BYTES.into()));
    scene.succeed(&["volume", "remove", "w"]);
    assert_eq!(device.bytes(DISK_BYTES, 16), [DIRT; 16]);
}

#[test]
fn new_volume_on_a_device_reads_as_zeroes_or_as_the_image_it_was_made_of() {
    let Some((mut scene, device)) = scene() else { return };
    scene.start(None);
    let size = DISK_BYTES.to_string();
    scene.succeed(&["volume", "create", "v", "--store", "d", "--size", &size]);
    let zeroes = vec![0; usize::try_from(DISK_BYTES).unwrap()];
    assert!(device.bytes(0, zeroes.len()) == zeroes);
    assert_eq!(device.bytes(DISK_BYTES, 16), [DIRT; 16]);
    stop_and_verify(scene.start_guest());
    let removed = scene.json(&["volume", "remove", "v"]).1;
    assert_eq!(removed["image_fate"], "kept");
    let image = scene.path("given");
    std::fs::write(&image, [7; 8192]).unwrap();
    let image = image.display().to_string();
    scene.succeed(&["volume", "create", "v", "--store", "d", "--size", &size, "--image", &image]);
    assert_eq!(device.bytes(0, 8192), [7; 8192]);
    assert!(device.bytes(8192, 1 << 20) == zeroes[..1 << 20]);
}

#[test]
fn what_does_not_fit_a_device_is_refused_before_anything_is_written() {
    let Some((mut scene, device)) = scene() else { return };
    scene.start(None);
    scene.succeed(&["volume", "create", "v", "--store", "a", "--size", "64MiB"]);
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "d"]);
    assert_eq!((exit, code(&refused)), (4, "target_too_small"), "{refused}");
    for flag in [&["--thick"][..], &["--format", "qcow2"]] {
        let (exit, refused) = scene.json(&[&["migrate", "v", "--to", "d"], flag].concat());
        assert_eq!((exit, code(&refused)), (2, "invalid_request"), "{refused}");
    }
    assert_eq!(device.bytes(0, 4096), [DIRT; 4096]);
    let (exit, refused) = scene.json(&["volume", "add", "w", "--device", device.path()]);
    assert_eq!((exit, code(&refused)), (4, "image_unsuitable"), "it is a store: {refused}");
    let (exit, refused) = scene.json(&["volume", "add", "w", "--image", "/dev/zero"]);
    assert_eq!((exit, code(&refused)), (4, "image_unsuitable"), "{refused}");
    let below = scene.path("disk").display().to_string();
    let (exit, refused) = scene.json(&["volume", "add", "w", "--image", &below]);
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "the store's device stands on it: {refused}");
    let plain = scene.path("plain");
    std::fs::write(&plain, [0; 4096]).unwrap();
    let plain = plain.display().to_string();
    let (exit, refused) = scene.json(&["volume", "add", "w", "--device", &plain]);
    assert_eq!((exit, code(&refused)), (4, "image_unsuitable"), "{refused}");
    assert!(!Path::new(&scene.path("a")).join("w.img").exists());
}

#[test]
fn killed_on_the_way_to_a_device_the_volume_is_in_one_place() {
    for (point, ends_at) in [
        ("after-started", "a"),
        ("after-create-image@2", "a"),
        ("after-prepared", "a"),
        ("before-released", "a"),
        ("after-released", "d"),
        ("after-owned", "d"),
        ("before-retire", "d"),
        ("after-ended", "d"),
    ] {
        let Some((mut scene, device)) = scene() else { return };
        scene.start(Some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        scene.run(&["migrate", "v", "--to", "d", "--detach"]);
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(scene.store_of_volume(), ends_at, "{point}");
        // A device that was not reached takes the volume the next time; one that was lets it go.
        let next = if ends_at == "a" { "d" } else { "b" };
        scene.succeed_after_a_kill(&["migrate", "v", "--to", next]);
        stop_and_verify(guest);
        assert_eq!(scene.images("a"), Vec::<String>::new(), "{point}");
        drop(device);
    }
}

#[test]
fn killed_on_the_way_from_a_device_the_volume_is_in_one_place() {
    for (point, ends_at) in [("after-prepared", "d"), ("after-released", "a"), ("before-ended", "a")] {
        let Some((mut scene, device)) = scene() else { return };
        scene.start(Some(point));
        let size = DISK_BYTES.to_string();
        scene.succeed(&["volume", "create", "v", "--store", "d", "--size", &size]);
        let guest = scene.start_guest();
        scene.run(&["migrate", "v", "--to", "a", "--detach"]);
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(scene.store_of_volume(), ends_at, "{point}");
        stop_and_verify(guest);
        let left = if ends_at == "a" { vec!["v.img".to_owned()] } else { Vec::new() };
        assert_eq!(scene.images("a"), left, "{point}");
        drop(device);
    }
}

#[test]
fn a_file_below_a_loop_device_is_served_to_nobody_who_writes() {
    let scene = Scene::started();
    let Some(device) = Device::new(&scene) else { return };
    let file = device.file.clone();
    let file = file.to_str().unwrap();
    let (exit, refused) = scene.json(&["volume", "add", "v", "--image", file, "--format", "raw"]);
    let message = refused["error"]["message"].as_str().unwrap();
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
    assert!(message.contains(&format!("the loop device {} uses it", device.path())), "{message}");
    scene.succeed(&["volume", "add", "r", "--image", file, "--format", "raw", "--read-only"]);
    scene.succeed(&["volume", "remove", "r"]);
    drop(device);
    let add = ["volume", "add", "v", "--image", file, "--format", "raw"];
    until("the device is let go", || (scene.json(&add).0 == 0).then_some(()));
}

#[test]
fn an_image_over_a_file_below_a_loop_device_is_served_to_nobody_who_writes() {
    let mut scene = Scene::started();
    let Some(device) = Device::new(&scene) else { return };
    let (base, top) = (device.file.display().to_string(), scene.path("top.qcow2").display().to_string());
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top]);
    let add = ["volume", "add", "v", "--image", &top];
    let (exit, refused) = scene.json(&add);
    let message = refused["error"]["message"].as_str().unwrap();
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
    assert!(message.contains(&format!("the loop device {} uses it", device.path())), "{message}");
    drop(device);
    // Whoever looks at the devices at this moment keeps it.
    until("the device is let go", || (scene.json(&add).0 == 0).then_some(()));
    scene.kill();
    // Somebody mounts what the image stands on, while no daemon serves it.
    let Some(device) = loop_device(Path::new(&base)) else { return };
    let made = Program::of_package("mkfs.ext4", "e2fsprogs").args(["-q", "-F"]).arg(device.path());
    made.succeed().unwrap();
    let folder = scene.path("mounted");
    std::fs::create_dir(&folder).unwrap();
    let mount = Program::of_package("mount", "mount").arg(device.path()).arg(&folder);
    if mount.succeed().is_err() {
        return;
    }
    scene.start(None);
    let refused = until("the volume is not served", || {
        let (_, shown) = scene.json(&["volume", "show", "v"]);
        shown["message"].as_str().filter(|why| why.contains("the loop device")).map(str::to_owned)
    });
    Program::of_package("umount", "mount").arg(&folder).succeed().unwrap();
    assert!(refused.contains(&*base), "{refused}");
    drop(device);
    scene.until_served("v");
}

#[test]
fn a_loop_device_shares_its_bytes_with_what_is_below_it_and_with_others_over_that() {
    let scene = Scene::new();
    let Some(device) = Device::new(&scene) else { return };
    let [Some(over), Some(beside)] = [device.device.path(), &device.file].map(loop_device) else { return };
    let path = |device: &LoopDevice| device.path().to_str().unwrap().to_owned();
    scene.configure(&format!(
        "[stores.over]\ndevice = '{}'\n[stores.beside]\ndevice = '{}'\n",
        path(&over),
        path(&beside)
    ));
    let mut scene = scene;
    scene.start(None);
    let refused = |arguments: &[&str]| {
        let (exit, refused) = scene.json(arguments);
        let message = refused["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
        assert!(message.contains("the loop device") && message.contains(" uses it"), "{message}");
    };
    let size = DISK_BYTES.to_string();
    // Each of them is over bytes that another one is over as well.
    for store in ["over", "beside"] {
        refused(&["volume", "create", "v", "--store", store, "--size", &size]);
    }
    refused(&["volume", "add", "v", "--device", device.path()]);
    assert!(device.bytes(0, 1 << 20).iter().all(|byte| *byte == DIRT), "something was overwritten");
    drop(beside);
    // What stands on it is only the other name of its bytes, and is served there.
    scene.succeed(&["volume", "create", "v", "--store", "over", "--size", &size]);
    let (exit, refused) = scene.json(&["volume", "add", "w", "--device", device.path()]);
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
}
