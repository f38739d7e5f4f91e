//! Tests of volumes that grow: idle and in use, of every kind, while they move, and while the daemon is killed.

use testbed::nbd_client::{Client, Operation, WriteDurability};

use crate::scene::{DISK_BYTES, Scene, code, loop_device, qemu_img, stop_and_verify};

const MIB: u64 = 1 << 20;
/// What volumes grow to.
const LARGER: u64 = DISK_BYTES + 9 * MIB + 4096;

/// Resizes the volume `v`, which must succeed.
fn resize(scene: &Scene, size: u64) {
    let (exit, volume) = scene.json(&["volume", "resize", "v", &size.to_string()]);
    assert_eq!((exit, &volume["size_bytes"]), (0, &size.into()), "{volume}");
}

/// Is refused to resize the volume `v`; returns why.
fn refused(scene: &Scene, size: u64, expected: &str) -> String {
    let (exit, value) = scene.json(&["volume", "resize", "v", &size.to_string()]);
    assert_eq!(
        (exit, code(&value)),
        (if expected == "invalid_request" { 2 } else { 4 }, expected),
        "{value}"
    );
    value["error"]["message"].as_str().unwrap().to_owned()
}

fn read(client: &mut Client, offset: u64, length: u64) -> Vec<u8> {
    let buffer = vec![0xEE; usize::try_from(length).unwrap()];
    match client.perform(Operation::Read { offset, buffer }).unwrap() {
        Operation::Read { buffer, .. } => buffer,
        other => panic!("{other:?}"),
    }
}

fn write(client: &mut Client, offset: u64, byte: u8, length: u64) {
    let data = vec![byte; usize::try_from(length).unwrap()];
    client.perform(Operation::Write { offset, data, durability: WriteDurability::Durable }).unwrap();
}

/// A client that connects now sees the new size, zeroes behind the former end, and can use all of it.
fn check_new_part(scene: &Scene, former: u64, size: u64) {
    let mut client = scene.connect();
    assert_eq!(client.export().size, size);
    let new = read(&mut client, former, size - former);
    assert!(new.iter().all(|byte| *byte == 0), "what is new is not zero");
    write(&mut client, size - MIB, 0x77, MIB);
    write(&mut client, former, 0x78, 4096);
    assert_eq!(read(&mut client, size - MIB, MIB), vec![0x77; 1 << 20]);
    assert_eq!(read(&mut client, former, 4096), [0x78; 4096]);
}

fn check_new_part_is_kept(scene: &Scene, former: u64, size: u64) {
    scene.until_served("v");
    let mut client = scene.connect();
    assert_eq!(client.export().size, size);
    assert_eq!(read(&mut client, size - MIB, MIB), vec![0x77; 1 << 20]);
    assert_eq!(read(&mut client, former, 4096), [0x78; 4096]);
}

#[test]
fn volume_grows_while_its_guest_works_and_says_why_it_does_not() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let said = scene.succeed(&["volume", "resize", "v", "40MiB"]);
    assert_eq!(said, "v has 40.0 MiB (41943040 bytes); connected clients see that when they connect again\n");
    resize(&scene, 40 * MIB);
    assert!(refused(&scene, 39 * MIB, "cannot_shrink").contains("volumes never shrink"));
    assert!(refused(&scene, 41 * MIB + 512, "invalid_request").ends_with("the next one is 42995712"));
    let slip = refused(&scene, u64::MAX - 4095, "cannot_grow");
    assert!(slip.contains("whole store \"a\"") && slip.contains("--beyond-store"), "{slip}");
    let (_, too_large) =
        scene.json(&["volume", "resize", "v", &(u64::MAX - 4095).to_string(), "--beyond-store"]);
    let too_large = too_large["error"]["message"].as_str().unwrap();
    assert!(too_large.contains("a/v.img cannot grow: grow: File too large"), "{too_large}");
    assert_eq!(scene.json(&["volume", "resize", "w", "1GiB"]).0, 3);
    resize(&scene, LARGER);
    check_new_part(&scene, 40 * MIB, LARGER);
    scene.kill();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "a");
    check_new_part_is_kept(&scene, 40 * MIB, LARGER);
    scene.succeed_after_a_kill(&["migrate", "v", "--to", "b"]);
    check_new_part_is_kept(&scene, 40 * MIB, LARGER);
    stop_and_verify(guest);
    assert_eq!(std::fs::metadata(scene.path("b/v.img")).unwrap().len(), LARGER);
}

#[test]
fn image_of_an_odd_size_grows_and_a_read_only_one_does_not() {
    let scene = Scene::started();
    let image = scene.path("odd.raw");
    let former = 3 * 512 + 8192;
    std::fs::write(&image, vec![0x55; 3 * 512 + 8192]).unwrap();
    let path = image.display().to_string();
    scene.succeed(&["volume", "add", "v", "--image", &path, "--read-only"]);
    assert!(refused(&scene, 4 * MIB, "cannot_grow").contains("read-only"));
    scene.succeed(&["volume", "remove", "v"]);
    scene.succeed(&["volume", "add", "v", "--image", &path]);
    resize(&scene, 4 * MIB);
    let mut client = scene.connect();
    assert_eq!(read(&mut client, 0, former), vec![0x55; 3 * 512 + 8192]);
    drop(client);
    check_new_part(&scene, former, 4 * MIB);
    scene.succeed(&["migrate", "v", "--to", "a"]);
    check_new_part_is_kept(&scene, former, 4 * MIB);
}

#[test]
fn qcow2_volume_grows_over_a_longer_backing_file_and_stays_whole() {
    let mut scene = Scene::started();
    let [base, top, moved] =
        ["base.raw", "top.qcow2", "b/v.qcow2"].map(|name| scene.path(name).display().to_string());
    // What the base has behind the end of the top must not show through, when the top reaches there.
    std::fs::write(&base, vec![0xBA; 8 << 20]).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top, "2097664"]);
    scene.succeed(&["volume", "add", "v", "--image", &top]);
    let former = 2_097_664;
    resize(&scene, 6 * MIB);
    check_new_part(&scene, former, 6 * MIB);
    // More than one second-level table describes: the first-level table moves.
    resize(&scene, 3 << 30);
    scene.kill();
    scene.start(None);
    let mut client = scene.connect();
    assert_eq!(client.export().size, 3 << 30);
    assert_eq!(read(&mut client, 4096, 4096), [0xBA; 4096]);
    assert_eq!(read(&mut client, 5 * MIB, MIB), vec![0x77; 1 << 20]);
    assert_eq!(read(&mut client, 6 * MIB, 4 * MIB), vec![0; 4 << 20]);
    write(&mut client, (3 << 30) - MIB, 0x44, MIB);
    drop(client);
    scene.succeed(&["migrate", "v", "--to", "b"]);
    scene.succeed(&["volume", "remove", "v", "--keep-image"]);
    for image in [&format!("{top}.moved-m0"), &moved] {
        qemu_img(&["check", "-q", "-f", "qcow2", image]);
    }
    qemu_img(&["compare", "-q", &format!("{top}.moved-m0"), &moved]);
}

#[test]
fn volume_on_a_device_grows_as_far_as_the_device_does() {
    let mut scene = Scene::new();
    let file = scene.path("disk");
    std::fs::write(&file, vec![0xD1; usize::try_from(DISK_BYTES + MIB).unwrap()]).unwrap();
    let Some(device) = loop_device(&file) else { return };
    scene.configure(&format!("[stores.d]\ndevice = '{}'\n", device.path().display()));
    scene.start(None);
    scene.succeed(&["volume", "create", "v", "--store", "d", "--size", &DISK_BYTES.to_string()]);
    let guest = scene.start_guest();
    let reason = refused(&scene, LARGER, "cannot_grow");
    let room = format!("has room for {} bytes: make the device larger first", DISK_BYTES + MIB);
    assert!(reason.ends_with(&room), "{reason}");
    // A logical volume is extended, so its new part has foreign content.
    let mut longer = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
    std::io::Write::write_all(&mut longer, &vec![0xD2; usize::try_from(16 * MIB).unwrap()]).unwrap();
    device.follow_size().unwrap();
    resize(&scene, LARGER);
    check_new_part(&scene, DISK_BYTES, LARGER);
    scene.kill();
    scene.start(None);
    check_new_part_is_kept(&scene, DISK_BYTES, LARGER);
    stop_and_verify(guest);
}

#[test]
fn volume_on_another_server_grows_when_that_has_made_room() {
    let server = Scene::started();
    server.create_volume();
    let uri = server.json(&["volume", "show", "v"]).1["uri"].as_str().unwrap().to_owned();
    let scene = Scene::started();
    scene.succeed(&["volume", "add", "v", "--nbd", &uri]);
    let guest = scene.start_guest();
    let reason = refused(&scene, LARGER, "cannot_grow");
    assert!(reason.ends_with("have its server make the export larger first"), "{reason}");
    resize(&server, LARGER);
    resize(&scene, LARGER);
    check_new_part(&scene, DISK_BYTES, LARGER);
    stop_and_verify(guest);
    check_new_part_is_kept(&server, DISK_BYTES, LARGER);
}

#[test]
fn volume_that_grows_while_it_moves_under_load_loses_nothing() {
    for format in ["raw", "qcow2"] {
        let scene = Scene::started();
        scene.create_volume();
        let guest = scene.start_guest();
        let migrate = ["migrate", "v", "--to", "b", "--bandwidth", "4MiB/s", "--format", format, "--detach"];
        scene.succeed(&migrate);
        let mut former = DISK_BYTES;
        for size in [DISK_BYTES + 4096, DISK_BYTES + 5 * MIB, LARGER] {
            resize(&scene, size);
            let mut client = scene.connect();
            assert_eq!(client.export().size, size);
            assert_eq!(read(&mut client, former, 4096), [0; 4096]);
            write(&mut client, former, 0x31, 4096);
            former = size;
        }
        check_new_part(&scene, former - 2 * MIB, LARGER);
        scene.succeed(&["migration", "watch", "m0"]);
        assert_eq!(scene.store_of_volume(), "b");
        check_new_part_is_kept(&scene, former - 2 * MIB, LARGER);
        let mut client = scene.connect();
        for written in [DISK_BYTES, DISK_BYTES + 4096, DISK_BYTES + 5 * MIB] {
            assert_eq!(read(&mut client, written, 4096), [0x31; 4096], "{format}");
        }
        drop(client);
        stop_and_verify(guest);
        scene.succeed(&["volume", "remove", "v", "--keep-image"]);
        if format == "qcow2" {
            qemu_img(&["check", "-q", &scene.path("b/v.qcow2").display().to_string()]);
        }
    }
}

#[test]
fn target_of_a_migration_that_cannot_grow_refuses_and_is_named() {
    let mut scene = Scene::new();
    let file = scene.path("disk");
    std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
    let Some(device) = loop_device(&file) else { return };
    scene.configure(&format!("[stores.d]\ndevice = '{}'\n", device.path().display()));
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "d", "--bandwidth", "1MiB/s", "--detach"]);
    let reason = refused(&scene, LARGER, "cannot_grow");
    assert!(reason.contains("the target of m0 (cancel that with: sterna migration cancel m0)"), "{reason}");
    assert_eq!(std::fs::metadata(scene.path("a/v.img")).unwrap().len(), DISK_BYTES, "nothing has changed");
    scene.succeed(&["migration", "cancel", "m0"]);
    scene.run(&["migration", "watch", "m0"]);
    resize(&scene, LARGER);
    stop_and_verify(guest);
}

#[test]
fn killed_while_it_grows_a_volume_has_one_size_or_the_other_and_all_that_was_written() {
    for format in ["raw", "qcow2"] {
        for (point, sizes) in [
            ("before-resize-begun", [DISK_BYTES; 2]),
            ("after-resize-begun", [LARGER; 2]),
            ("before-resized", [LARGER; 2]),
            ("after-resized", [LARGER; 2]),
        ] {
            let mut scene = Scene::new();
            scene.start(Some(point));
            let size = DISK_BYTES.to_string();
            scene.succeed(&["volume", "create", "v", "--store", "a", "--size", &size, "--format", format]);
            let guest = scene.start_guest();
            scene.run(&["volume", "resize", "v", &LARGER.to_string()]);
            scene.wait_for_death();
            scene.start(None);
            check_end(&scene, &format!("{format}, {point}"), sizes[0]);
            stop_and_verify(guest);
        }
    }
}

#[test]
fn killed_again_while_it_ends_a_growth_it_ends_the_same_way() {
    for format in ["raw", "qcow2"] {
        for point in ["before-grow", "after-grow", "before-resized", "after-resized"] {
            let mut scene = Scene::new();
            scene.start(Some("before-resized"));
            let size = DISK_BYTES.to_string();
            scene.succeed(&["volume", "create", "v", "--store", "a", "--size", &size, "--format", format]);
            let guest = scene.start_guest();
            scene.run(&["volume", "resize", "v", &LARGER.to_string()]);
            scene.wait_for_death();
            scene.start(Some(point));
            scene.wait_for_death();
            scene.start(None);
            check_end(&scene, &format!("{format}, {point}"), LARGER);
            stop_and_verify(guest);
        }
    }
}

#[test]
fn killed_while_it_grows_and_moves_a_volume_is_at_its_source_and_whole() {
    for point in ["after-resize-begun", "before-resized", "after-resized"] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
        scene.run(&["volume", "resize", "v", &LARGER.to_string()]);
        scene.wait_for_death();
        scene.start(None);
        check_end(&scene, point, LARGER);
        assert!(scene.images("b").is_empty(), "{point}");
        scene.succeed(&["migrate", "v", "--to", "b"]);
        check_new_part_is_kept(&scene, DISK_BYTES, LARGER);
        stop_and_verify(guest);
    }
}

#[test]
fn growth_that_cannot_be_ended_after_a_crash_leaves_the_volume_as_it_was() {
    let mut scene = Scene::new();
    let file = scene.path("disk");
    std::fs::File::create(&file).unwrap().set_len(LARGER).unwrap();
    let Some(device) = loop_device(&file) else { return };
    scene.configure(&format!("[stores.d]\ndevice = '{}'\n", device.path().display()));
    scene.start(Some("after-resize-begun"));
    scene.succeed(&["volume", "create", "v", "--store", "d", "--size", &DISK_BYTES.to_string()]);
    let guest = scene.start_guest();
    scene.run(&["volume", "resize", "v", &LARGER.to_string()]);
    scene.wait_for_death();
    // Somebody has made the device smaller meanwhile.
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(DISK_BYTES).unwrap();
    device.follow_size().unwrap();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "d");
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(volume["size_bytes"], DISK_BYTES);
    stop_and_verify(guest);
}

/// The volume is in store `a` with `size`, and usable to its end.
fn check_end(scene: &Scene, scene_name: &str, size: u64) {
    assert_eq!(scene.store_of_volume(), "a", "{scene_name}");
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(volume["size_bytes"], size, "{scene_name}");
    if size == DISK_BYTES {
        resize(scene, LARGER);
    }
    check_new_part(scene, DISK_BYTES, LARGER);
}
