//! Volumes in qcow2 images: served where they are, made, copied in, and moved from format to format.

use crate::scene::{DISK_BYTES, Scene, code, qemu_img, qemu_io, stop_and_verify, wait_until};

/// An image of 8 MiB that stands on another one: 0x11 comes from the base, 0x22 from the top.
fn chain(scene: &Scene) -> String {
    let path = |name: &str| scene.path(name).display().to_string();
    let (base, top) = (path("base.qcow2"), path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", &base, "8M"]);
    qemu_io(&["-c", "write -P 0x11 0 2M", &base]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top]);
    qemu_io(&["-c", "write -P 0x22 1M 1M", &top]);
    top
}

#[test]
fn guest_keeps_its_disk_while_it_moves_from_format_to_format() {
    let scene = Scene::started();
    let size = DISK_BYTES.to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--size", &size, "--format", "qcow2"]);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["format"], &volume["size_bytes"]), (&"qcow2".into(), &DISK_BYTES.into()));
    let guest = scene.start_guest();
    // The format goes along unless somebody says otherwise.
    scene.succeed(&["migrate", "v", "--to", "b"]);
    assert_eq!((scene.images("a"), scene.images("b")), (vec![], vec!["v.qcow2".to_owned()]));
    scene.succeed(&["migrate", "v", "--to", "a", "--format", "raw", "--thick"]);
    assert_eq!((scene.images("a"), scene.images("b")), (vec!["v.img".to_owned()], vec![]));
    scene.succeed(&["migrate", "v", "--to", "b", "--format", "qcow2", "--thick"]);
    stop_and_verify(guest);
    let image = scene.path("b/v.qcow2").display().to_string();
    scene.succeed(&["volume", "remove", "v", "--keep-image"]);
    qemu_img(&["check", "-q", &image]);
}

/// The disk is idle. A guest's discards free space, also in a thick image.
#[test]
fn thick_target_takes_the_whole_size_in_either_format() {
    let scene = Scene::started();
    let size = DISK_BYTES.to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--size", &size]);
    let allocated = || scene.json(&["volume", "show", "v"]).1["allocated_bytes"].as_u64().unwrap();
    assert!(allocated() < DISK_BYTES);
    for (store, format) in [("b", "raw"), ("a", "qcow2")] {
        scene.succeed(&["migrate", "v", "--to", store, "--format", format, "--thick"]);
        assert!(allocated() >= DISK_BYTES, "{format}: {}", allocated());
    }
}

#[test]
fn image_with_a_backing_file_is_served_and_comes_out_flat() {
    let scene = Scene::started();
    let top = chain(&scene);
    let raw = scene.path("expected").display().to_string();
    qemu_img(&["convert", "-O", "raw", &top, &raw]);
    scene.succeed(&["volume", "add", "v", "--image", &top]);
    scene.succeed(&["migrate", "v", "--to", "a"]);
    scene.succeed(&["volume", "remove", "v", "--keep-image"]);
    let moved = scene.path("a/v.qcow2").display().to_string();
    qemu_img(&["check", "-q", &moved]);
    qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "raw", &moved, &raw]);
    assert!(!qemu_img(&["info", &moved]).contains("backing file"));
    // The former image is kept, with its backing file.
    qemu_img(&["check", "-q", &format!("{top}.moved-m0")]);
    // Copied in, it is what it was, in either format.
    for (name, format) in [("w", "raw"), ("x", "qcow2")] {
        scene.succeed(&["volume", "create", name, "--store", "b", "--image", &moved, "--format", format]);
        scene.succeed(&["volume", "remove", name, "--keep-image"]);
    }
    let copies = ["w.img", "x.qcow2"].map(|name| scene.path("b").join(name).display().to_string());
    qemu_img(&["compare", "-q", "-f", "raw", "-F", "raw", &copies[0], &raw]);
    qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "raw", &copies[1], &raw]);
}

#[test]
fn guest_that_writes_a_header_into_its_raw_disk_changes_nothing() {
    let mut scene = Scene::started();
    let raw = scene.path("guest.raw");
    std::fs::write(&raw, [0; 1 << 16]).unwrap();
    let path = raw.display().to_string();
    scene.succeed(&["volume", "add", "v", "--image", &path]);
    scene.stop();
    // A guest could write this header, which names a file of the host as its backing file.
    let trap = scene.path("trap.qcow2").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", &trap]);
    let mut bytes = std::fs::read(&trap).unwrap();
    bytes.resize(1 << 20, 0);
    std::fs::write(&raw, &bytes[..1 << 16]).unwrap();
    scene.start(None);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["state"], &volume["format"]), (&"serving".into(), &"raw".into()), "{volume}");
    scene.succeed(&["migrate", "v", "--to", "a"]);
    assert_eq!(std::fs::read(scene.path("a/v.img")).unwrap(), bytes[..1 << 16]);
    // To be copied in, it is not followed to that file either.
    std::fs::write(&raw, &bytes[..1 << 16]).unwrap();
    let (exit, refused) = scene.json(&["volume", "create", "w", "--store", "b", "--image", &path]);
    assert_eq!((exit, code(&refused)), (4, "image_unsuitable"), "{refused}");
    assert!(scene.images("b").is_empty());
    // Given anew it says what it looks like; only the user can say what it is.
    std::fs::write(&raw, [&b"KDMV"[..], &[0; 65532]].concat()).unwrap();
    let add = ["volume", "add", "w", "--image", &path];
    let (exit, refused) = scene.json(&add);
    assert_eq!((exit, code(&refused)), (4, "image_unsuitable"));
    assert!(refused["error"]["message"].as_str().unwrap().ends_with("--format raw"), "{refused}");
    scene.succeed(&[&add[..], &["--format", "raw"]].concat());
}

#[test]
fn killed_on_the_way_to_another_format_the_volume_is_in_one_place() {
    // Until the release the guest's writes are in the raw image, which has them as soon as they are acknowledged. A copy that was
    // complete is gone on with if it took so long that what it lacks had been kept, and is undone otherwise.
    const AT_SOURCE: [&str; 2] = ["v.img", ""];
    const AT_TARGET: [&str; 2] = ["", "v.qcow2"];
    for (point, allowed) in [
        ("before-create-image@2", &[AT_SOURCE][..]),
        ("after-create-image@2", &[AT_SOURCE]),
        ("after-prepared", &[AT_SOURCE, AT_TARGET]),
        ("after-released", &[AT_TARGET]),
        ("before-owned", &[AT_TARGET]),
    ] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        scene.run(&["migrate", "v", "--to", "b", "--format", "qcow2", "--detach"]);
        scene.wait_for_death();
        scene.start(None);
        // A migration that is not known, or has failed, has ended.
        wait_until(point, || scene.json(&["migration", "show", "m0"]).1["state"] != "running");
        stop_and_verify(guest);
        let there = |store: &str| scene.images(store).join(" ");
        let (source, target) = (there("a"), there("b"));
        assert!(allowed.contains(&[source.as_str(), target.as_str()]), "{point}: {source:?}, {target:?}");
    }
}

#[test]
fn thick_target_that_does_not_fit_is_refused_before_anything_is_copied() {
    let mut scene = Scene::new();
    if !scene.mount_small_disk("b", DISK_BYTES / 2) {
        return;
    }
    scene.start(None);
    // It is empty: a thin copy would fit.
    scene.create_volume();
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "b", "--thick"]);
    assert_eq!((exit, code(&refused)), (4, "no_space"), "{refused}");
    assert!(scene.images("b").is_empty());
    scene.succeed(&["migrate", "v", "--to", "b", "--thin"]);
}
