//! Disks that take no writes: full ones (the target's store before the copying and in the middle of it, and that of the journal), and
//! a file system that became read-only.
//!
//! A small file system is mounted for each test. Where that is not allowed (no root), the tests are left out.

use std::path::Path;

use e2e::file_system::FileSystem;
use e2e::may_mount;

use crate::scene::{Scene, code, stop_and_verify};

#[test]
fn store_with_too_little_space_is_refused_with_both_numbers() {
    let mut scene = Scene::new();
    if !scene.mount_small_disk("b", 4 << 20) {
        return;
    }
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    let (exit, value) = scene.json(&["migrate", "v", "--to", "b"]);
    assert_eq!((exit, code(&value)), (4, "no_space"), "{value}");
    let message = value["error"]["message"].as_str().unwrap();
    assert!(message.contains("B free, and") && message.contains("make room there"), "{message}");
    assert!(scene.images("b").is_empty());
    let image = scene.path("a/v.img").display().to_string();
    let copy = ["volume", "create", "w", "--store", "b", "--image", &image];
    // The image is locked for writing by its own daemon, which is found first.
    assert_eq!(scene.json(&copy).0, 4);
    stop_and_verify(guest);
    scene.succeed(&["volume", "remove", "v", "--keep-image", "--force"]);
    assert_eq!(code(&scene.json(&copy).1), "no_space");
    assert!(scene.images("b").is_empty());
}

#[test]
fn store_that_becomes_full_during_the_copy_fails_the_migration_and_not_the_guest() {
    let mut scene = Scene::new();
    if !scene.mount_small_disk("b", 64 << 20) {
        return;
    }
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    fill(&scene.path("b/filler"));
    let watched = scene.run(&["migration", "watch", "m0"]);
    assert_eq!(watched.code, 5, "{watched:?}");
    let (_, migration) = scene.json(&["migration", "show", "m0"]);
    assert_eq!((&migration["state"], &migration["failure"]), (&"failed".into(), &"target-full".into()));
    assert_eq!(migration["guest"], "source");
    assert_eq!((scene.store_of_volume().as_str(), scene.images("b")), ("a", vec!["filler".to_owned()]));
    stop_and_verify(guest);
    // It works once there is space.
    std::fs::remove_file(scene.path("b/filler")).unwrap();
    scene.succeed(&["migrate", "v", "--to", "b"]);
}

#[test]
fn daemon_whose_data_disk_is_full_still_serves_and_moves_its_volumes() {
    let mut scene = Scene::new();
    if !scene.mount_small_disk("data", 6 << 20) {
        return;
    }
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    scene.kill();
    fill(&scene.path("data/filler"));
    scene.start(None);
    scene.succeed_after_a_kill(&["migrate", "v", "--to", "b"]);
    scene.kill();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "b");
    stop_and_verify(guest);
}

#[test]
fn store_that_became_read_only_is_reported_and_a_dry_run_says_what_would_fail() {
    let mut scene = Scene::new();
    if !may_mount() {
        return;
    }
    let disk = FileSystem::plain(&scene.path("b"), 64 << 20).unwrap();
    scene.start(None);
    scene.create_volume();
    scene.succeed(&["volume", "create", "w", "--store", "b", "--size", "8MiB"]);
    assert_eq!(scene.json(&["health"]).1["ready"], true);
    disk.become_read_only().unwrap();
    let (_, stores) = scene.json(&["store", "list"]);
    let store = stores.as_array().unwrap().iter().find(|store| store["name"] == "b").unwrap();
    assert!(store["problem"].as_str().unwrap().contains("takes no writes"), "{store}");
    let (_, health) = scene.json(&["health"]);
    assert_eq!(health["ready"], false, "{health}");
    assert!(health.to_string().contains("takes no writes"), "{health}");
    let (exit, refused) = scene.json(&["volume", "create", "x", "--store", "b", "--size", "1MiB"]);
    assert_eq!((exit, code(&refused)), (1, "storage_failed"), "{refused}");
    // Nothing comes here …
    let (exit, plan) = scene.json(&["migrate", "v", "--to", "b", "--dry-run"]);
    assert_eq!((exit, &plan["can_begin"]), (4, &false.into()), "{plan}");
    assert!(plan["refusals"].to_string().contains("takes no writes"), "{plan}");
    // … and nothing leaves without a flush.
    let (exit, plan) = scene.json(&["migrate", "w", "--to", "a", "--dry-run"]);
    assert_eq!((exit, &plan["can_begin"]), (4, &false.into()), "{plan}");
    assert!(plan["refusals"].to_string().contains("a flush fails"), "{plan}");
    scene.kill();
}

/// Fills what is left of a disk, down to the last page.
fn fill(path: &Path) {
    let mut filler = std::fs::File::create(path).unwrap();
    // The error is what ends it.
    std::io::copy(&mut std::io::repeat(1), &mut filler).unwrap_err();
}
