//! Tests of files in stores: listed, imported as volumes, and deleted only if they are half-made.

use serde_json::Value;

use crate::scene::{Scene, code, stop_and_verify};

fn scan(scene: &Scene, store: &str) -> Vec<Value> {
    let (exit, found) = scene.json(&["store", "scan", store]);
    assert_eq!(exit, 0, "{found}");
    found[0]["files"].as_array().unwrap().clone()
}

fn role(scene: &Scene, store: &str, name: &str) -> Option<String> {
    let files = scan(scene, store);
    let file = files.iter().find(|file| file["name"] == name)?;
    Some(file["role"].as_str().unwrap().to_owned())
}

/// Whether the image is marked as half-made.
fn is_marked(scene: &Scene, image: &str) -> bool {
    let (store, name) = image.split_once('/').unwrap();
    scene.path(store).join(format!(".{name}.partial")).exists()
}

fn refused(scene: &Scene, arguments: &[&str], expected: (i32, &str), words: &str) {
    let (exit, refused) = scene.json(arguments);
    assert_eq!((exit, code(&refused)), expected, "{arguments:?}: {refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{arguments:?}: {message}");
}

#[test]
fn a_target_is_marked_until_it_is_complete_and_a_lost_journal_takes_none_for_a_disk() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    assert_eq!(role(&scene, "b", "v.img").unwrap(), "target");
    assert_eq!(role(&scene, "a", "v.img").unwrap(), "volume");
    assert!(is_marked(&scene, "b/v.img") && !is_marked(&scene, "a/v.img"));
    drop(guest);
    scene.kill();
    std::fs::remove_dir_all(scene.path("data")).unwrap();
    scene.start(None);
    assert_eq!(role(&scene, "b", "v.img").unwrap(), "half-made");
    assert_eq!(role(&scene, "a", "v.img").unwrap(), "unclaimed");
    let said = scene.succeed(&["store", "scan"]);
    assert!(
        said.contains("sterna store drop b/v.img") && said.contains("sterna store import a/v.img"),
        "{said}"
    );

    let image = scene.path("b/v.img").display().to_string();
    refused(&scene, &["store", "import", "b/v.img"], (4, "image_unsuitable"), "sterna store drop b/v.img");
    refused(&scene, &["volume", "add", "v", "--image", &image], (4, "image_unsuitable"), "--fenced");
    refused(&scene, &["store", "drop", "a/v.img"], (4, "not_half_made"), "but an image");
    assert_eq!((scene.images("a").len(), scene.images("b").len()), (1, 1));
    let (target, away) = (scene.path("b/v.img"), scene.path("away"));
    std::fs::rename(&target, &away).unwrap();
    std::fs::write(&target, b"precious").unwrap();
    refused(&scene, &["store", "drop", "b/v.img"], (4, "not_half_made"), "has come to the name");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    std::fs::rename(&away, &target).unwrap();
    let said = scene.succeed_after_a_kill(&["store", "drop", "b/v.img"]);
    assert!(said.contains("v.img is deleted; "), "{said}");
    assert!(scene.images("b").is_empty() && !is_marked(&scene, "b/v.img"));

    scene.succeed(&["store", "import", "a/v.img"]);
    assert_eq!((role(&scene, "a", "v.img").unwrap(), scene.store_of_volume()), ("volume".into(), "a".into()));
    scene.succeed(&["migrate", "v", "--to", "b"]);
    // An image that a user had before stays.
    let said = scene.succeed(&["volume", "remove", "v"]);
    assert!(said.contains("its image is kept at"), "{said}");
    assert_eq!(
        (role(&scene, "b", "v.img").unwrap(), is_marked(&scene, "b/v.img")),
        ("unclaimed".into(), false)
    );
}

#[test]
fn a_half_made_image_that_is_served_by_order_has_no_mark_when_that_is_answered() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    scene.kill();
    std::fs::remove_dir_all(scene.path("data")).unwrap();
    scene.start(None);
    let link = scene.path("link.img");
    std::os::unix::fs::symlink(scene.path("b/v.img"), &link).unwrap();
    let add = ["volume", "add", "w", "--image", link.to_str().unwrap()];
    refused(&scene, &add, (4, "image_unsuitable"), "--fenced");
    scene.succeed(&[&add[..], &["--fenced"]].concat());
    assert!(!is_marked(&scene, "b/v.img"));
}

#[test]
fn no_mark_outlasts_a_migration_however_it_ends() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    assert!(is_marked(&scene, "b/v.img"));
    scene.succeed(&["migration", "cancel", "m0"]);
    scene.run(&["migration", "watch", "m0"]);
    assert!(!is_marked(&scene, "b/v.img") && scene.images("b").is_empty());
    scene.succeed(&["migrate", "v", "--to", "b"]);
    // Within seconds by itself; a daemon that starts does not wait for that.
    scene.stop();
    scene.start(None);
    assert!(!is_marked(&scene, "b/v.img"));
    assert_eq!(scene.store_of_volume(), "b");
    stop_and_verify(guest);
}

#[test]
fn an_image_in_a_store_becomes_a_volume_without_being_copied() {
    use std::os::unix::fs::MetadataExt as _;
    let scene = Scene::started();
    let found = scene.path("a/debian 12.raw");
    std::fs::write(&found, vec![7; 1 << 20]).unwrap();
    let inode = std::fs::metadata(&found).unwrap().ino();
    // Its name could not be a volume's.
    refused(
        &scene,
        &["store", "import", "a/debian 12.raw"],
        (2, "invalid_request"),
        "cannot be the name of a volume",
    );
    scene.succeed(&["store", "import", "a/debian 12.raw", "--name", "v"]);
    assert_eq!(scene.images("a"), ["v.img"]);
    assert_eq!(std::fs::metadata(scene.path("a/v.img")).unwrap().ino(), inode);
    let (_, shown) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&shown["store"], &shown["size_bytes"]), (&"a".into(), &(1 << 20).into()));
    drop(scene.connect());
    // It moves as any other, and what was somebody's is theirs to delete.
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let said = scene.succeed(&["volume", "remove", "v", "--delete-image"]);
    assert!(said.contains("deleted"), "{said}");
}

#[test]
fn what_is_somebodys_or_no_image_does_not_become_a_volume() {
    use rustix::fs::{FlockOperation, flock};
    let scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b", "--keep-source"]);
    let files: [(&str, &[u8]); 6] = [
        ("used.img", &[7; 4096]),
        ("empty.img", b""),
        ("odd.img", &[7; 1000]),
        ("other.img", b"KDMV and so on"),
        ("taken.img", &[7; 4096]),
        ("header.raw", b"QFI\xfb\0\0\0\x03"),
    ];
    for (name, content) in files {
        std::fs::write(scene.path("a").join(name), content).unwrap();
    }
    std::os::unix::fs::symlink("used.img", scene.path("a/link.img")).unwrap();
    let held = std::fs::File::open(scene.path("a/used.img")).unwrap();
    flock(&held, FlockOperation::LockShared).unwrap();
    for (file, name, expected, words) in [
        ("b/v.img", "w", (4, "image_in_use"), "the volume \"v\""),
        ("a/v.img.moved-m0", "w", (4, "image_unsuitable"), "the old copy of volume \"v\" that m0 left"),
        ("a/used.img", "w", (4, "image_in_use"), "used.img"),
        ("a/empty.img", "w", (4, "image_unsuitable"), "it is empty"),
        ("a/odd.img", "w", (4, "image_unsuitable"), "truncate"),
        ("a/other.img", "w", (4, "image_unsuitable"), "vmdk"),
        ("a/link.img", "w", (4, "image_unsuitable"), "symbolic link"),
        ("a/header.raw", "w", (4, "image_unsuitable"), "--format raw or --format qcow2"),
        ("a/taken.img", "v", (4, "volume_exists"), "v"),
        ("a/nothing.img", "w", (3, "image_not_found"), "sterna store scan a"),
        ("a/.sterna-lock", "w", (3, "image_not_found"), "sterna store scan a"),
        ("c/x.img", "w", (3, "store_not_found"), "there are: a, b"),
    ] {
        refused(&scene, &["store", "import", file, "--name", name], expected, words);
        let expected = if file.starts_with("c/") {
            expected.1
        } else if expected.0 == 3 {
            "image_not_found"
        } else {
            "not_half_made"
        };
        let (_, refused) = scene.json(&["store", "drop", file]);
        assert_eq!(code(&refused), expected, "{file}");
    }
    let before = scene.images("a");
    assert_eq!(before.len(), 8, "{before:?}");
    let (_, volumes) = scene.json(&["volume", "list"]);
    assert_eq!(volumes.as_array().unwrap().len(), 1);
    drop(held);
    // A name that is taken by a file keeps that file.
    std::fs::write(scene.path("a/w.img"), [1; 4096]).unwrap();
    refused(&scene, &["store", "import", "a/taken.img", "--name", "w"], (4, "target_exists"), "w.img");
    assert_eq!(std::fs::read(scene.path("a/w.img")).unwrap(), [1; 4096]);
    assert!(scene.path("a/taken.img").exists());
    let outcome = scene.run(&["store", "import", "/tmp/x.img"]);
    assert_eq!(outcome.code, 2, "{outcome:?}");
    assert!(outcome.stderr.contains("sterna volume add NAME --image"), "{outcome:?}");
}

#[test]
fn of_two_at_once_one_gets_the_image() {
    let scene = Scene::started();
    for round in 0..5 {
        let file = format!("x{round}.img");
        std::fs::write(scene.path("a").join(&file), [7; 4096]).unwrap();
        let order = |name: &str| {
            let mut command = scene.command(&["store", "import", &format!("a/{file}"), "--name", name]);
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap()
        };
        let names = [format!("p{round}"), format!("q{round}")];
        let mut both = names.each_ref().map(|name| order(name));
        let done = both.each_mut().map(|child| child.wait().unwrap().success());
        assert_eq!(done.iter().filter(|done| **done).count(), 1, "{done:?}");
    }
    let (_, volumes) = scene.json(&["volume", "list"]);
    let volumes = volumes.as_array().unwrap();
    assert_eq!(volumes.len(), 5);
    assert!(volumes.iter().all(|volume| volume["state"] == "serving"), "{volumes:?}");
}

#[test]
fn a_file_that_another_program_left_half_made_is_deleted_only_by_name_and_while_nobody_has_it_open() {
    use rustix::fs::{FlockOperation, flock};
    let scene = Scene::started();
    let path = scene.path("a/two\nlines.img.partial");
    std::fs::write(&path, [7; 4096]).unwrap();
    let said = scene.succeed(&["store", "scan", "a"]);
    assert!(said.contains("a/two\\nlines.img.partial") && said.contains("half-made"), "{said}");
    let held = std::fs::File::open(&path).unwrap();
    flock(&held, FlockOperation::LockShared).unwrap();
    let name = "a/two\nlines.img.partial";
    refused(&scene, &["store", "drop", name], (4, "image_in_use"), "\"two\\nlines.img.partial\"");
    assert!(path.exists());
    drop(held);
    scene.succeed(&["store", "drop", name]);
    assert!(!path.exists());
    refused(&scene, &["store", "drop", name], (3, "image_not_found"), "does not exist");
}

#[test]
fn a_store_that_cannot_be_looked_at_hides_no_other() {
    let scene = Scene::started();
    scene.create_volume();
    std::fs::remove_dir_all(scene.path("b")).unwrap();
    let (exit, found) = scene.json(&["store", "scan"]);
    assert_eq!((exit, found[0]["files"][0]["name"].as_str()), (1, Some("v.img")), "{found}");
    assert!(found[1]["problem"].as_str().unwrap().contains("does not exist"), "{found}");
    let outcome = scene.run(&["store", "scan"]);
    assert!(outcome.code == 1 && outcome.stdout.contains("the content of store b is unknown"), "{outcome:?}");
}

#[test]
fn a_crash_while_an_image_is_imported_loses_nothing() {
    for (point, is_known) in [("before-added", false), ("after-added", true)] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        std::fs::write(scene.path("a/found.img"), [7; 4096]).unwrap();
        scene.run(&["store", "import", "a/found.img", "--name", "v"]);
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(std::fs::read(scene.path("a/v.img")).unwrap(), [7; 4096], "{point}");
        if !is_known {
            scene.succeed(&["store", "import", "a/v.img"]);
        }
        assert_eq!(scene.store_of_volume(), "a");
    }
}
