//! Files and devices that others exchange under the names of images, while the daemon runs and while it does not: what Sterna does not
//! know is neither served, nor promised, nor deleted.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use testbed::LoopDevice;

use crate::scene::{DISK_BYTES, Scene, code, loop_device, stop_and_verify};

/// How long something is waited for that happens by itself.
const DEADLINE: Duration = Duration::from_secs(60);

/// Puts another file of the same size under the name, and moves what had it away.
fn exchange(path: &Path) -> PathBuf {
    let away = path.with_extension("away");
    std::fs::rename(path, &away).unwrap();
    std::fs::write(path, vec![0xEE; usize::try_from(DISK_BYTES).unwrap()]).unwrap();
    away
}

fn is_as_exchanged(path: &Path) -> bool {
    std::fs::read(path).unwrap().iter().all(|byte| *byte == 0xEE)
}

/// What the daemon says of `v` once it has tried to serve it.
fn tried(scene: &Scene, volume: &str) -> Value {
    let began = Instant::now();
    loop {
        let (_, shown) = scene.json(&["volume", "show", volume]);
        if matches!(shown["state"].as_str(), Some("serving" | "failed")) {
            return shown;
        }
        assert!(began.elapsed() < DEADLINE, "{shown}");
        // An interval of looks at the volume.
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_file_that_came_to_the_name_of_an_image_while_the_daemon_was_killed_is_neither_served_nor_deleted() {
    let mut scene = Scene::started();
    scene.create_volume();
    let image = scene.path("a/v.img");
    scene.kill();
    let away = exchange(&image);
    scene.start(None);
    let shown = tried(&scene, "v");
    assert_eq!(shown["state"], "failed", "{shown}");
    assert!(shown.to_string().contains("sterna volume promote NAME --exchanged"), "{shown}");
    let (exit, refused) = scene.json(&["volume", "remove", "v"]);
    assert_ne!(exit, 0, "{refused}");
    assert!(is_as_exchanged(&image));
    // The first file is under its name again, and is the image.
    std::fs::rename(&image, scene.path("a/other")).unwrap();
    std::fs::rename(&away, &image).unwrap();
    scene.kill();
    scene.start(None);
    assert_eq!(tried(&scene, "v")["state"], "serving");
    let (exit, refused) = scene.json(&["volume", "promote", "v", "--exchanged"]);
    assert_eq!((exit, code(&refused)), (2, "invalid_request"), "{refused}");
}

#[test]
fn a_backup_that_was_put_back_is_served_by_order_and_so_is_a_store_that_was_copied() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.kill();
    exchange(&scene.path("a/v.img"));
    scene.start(None);
    assert_eq!(tried(&scene, "v")["state"], "failed");
    let (exit, promoted) = scene.json(&["volume", "promote", "v", "--exchanged"]);
    assert_eq!((exit, &promoted["state"]), (0, &"serving".into()), "{promoted}");
    scene.kill();
    scene.start(None);
    assert_eq!(tried(&scene, "v")["state"], "serving");
    scene.succeed(&["volume", "create", "w", "--store", "a", "--size", "1MiB"]);
    scene.stop();
    let (store, copy) = (scene.path("a"), scene.path("copy"));
    assert!(Command::new("cp").arg("-a").arg(&store).arg(&copy).status().unwrap().success());
    std::fs::remove_dir_all(&store).unwrap();
    std::fs::rename(&copy, &store).unwrap();
    scene.start(None);
    for volume in ["v", "w"] {
        assert_eq!(tried(&scene, volume)["state"], "failed");
    }
    let (exit, promoted) = scene.json(&["volume", "promote", "--exchanged", "--store", "a"]);
    assert_eq!((exit, promoted.as_array().map(Vec::len)), (0, Some(2)), "{promoted}");
    for volume in ["v", "w"] {
        assert_eq!(tried(&scene, volume)["state"], "serving");
    }
}

#[test]
fn a_target_whose_name_leads_elsewhere_is_not_promised_and_its_source_stays() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let (source, target) = (scene.path("a/v.img"), scene.path("b/v.img"));
    scene.succeed(&["migrate", "v", "--to", "b", "--detach", "--bandwidth", "8MiB/s"]);
    let began = Instant::now();
    while !target.exists() || std::fs::metadata(&target).unwrap().len() == 0 {
        assert!(began.elapsed() < DEADLINE);
    }
    // It is there and its size is set: it is filled.
    exchange(&target);
    let ended = scene.run(&["migration", "watch", "m0"]);
    assert_ne!(ended.code, 0, "{ended:?}");
    assert_eq!(scene.store_of_volume(), "a");
    assert!(source.exists() && is_as_exchanged(&target));
    stop_and_verify(guest);
}

#[test]
fn a_source_stays_if_its_target_was_exchanged_while_the_daemon_was_killed() {
    let mut scene = Scene::new();
    scene.start(Some("after-owned"));
    scene.create_volume();
    scene.run(&["migrate", "v", "--to", "b"]);
    scene.wait_for_death();
    let target = scene.path("b/v.img");
    let away = exchange(&target);
    scene.start(None);
    assert_eq!(tried(&scene, "v")["state"], "failed");
    let kept = scene.path("a/v.img.moved-m0");
    assert!(kept.exists() && is_as_exchanged(&target) && away.exists());
}

#[test]
fn a_half_made_target_that_was_exchanged_is_left_over() {
    let mut scene = Scene::new();
    scene.start(Some("after-prepared"));
    scene.create_volume();
    scene.run(&["migrate", "v", "--to", "b"]);
    scene.wait_for_death();
    exchange(&scene.path("b/v.img"));
    scene.start(None);
    scene.run(&["migration", "watch", "m0"]);
    assert_eq!(scene.store_of_volume(), "a");
    assert!(is_as_exchanged(&scene.path("b/v.img")));
}

#[test]
fn an_old_copy_gets_another_name_where_the_first_one_is_not_free() {
    let scene = Scene::started();
    scene.create_volume();
    let others = scene.path("a/v.img.moved-m0");
    std::fs::write(&others, b"of another life").unwrap();
    scene.succeed(&["migrate", "v", "--to", "b", "--keep-source"]);
    assert_eq!(std::fs::read(&others).unwrap(), b"of another life");
    assert!(!scene.path("a/v.img").exists() && scene.path("a/v.img.moved-m0-2").exists());
    let (_, kept) = scene.json(&["replica", "list"]);
    assert!(kept.to_string().contains("v.img.moved-m0-2"), "{kept}");
}

#[test]
fn a_link_that_leads_to_another_device_is_not_followed_to_it() {
    let mut scene = Scene::started();
    let Some([one, two]) = devices(&scene) else { return };
    let link = scene.path("link");
    std::os::unix::fs::symlink(one.path(), &link).unwrap();
    scene.succeed(&["volume", "add", "d", "--device", link.to_str().unwrap()]);
    scene.kill();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(two.path(), &link).unwrap();
    scene.start(None);
    assert_eq!(tried(&scene, "d")["state"], "failed");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(one.path(), &link).unwrap();
    let began = Instant::now();
    while tried(&scene, "d")["state"] != "serving" {
        assert!(began.elapsed() < DEADLINE);
        // An interval of looks at the volume.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Two loop devices; `None` where that is not allowed.
fn devices(scene: &Scene) -> Option<[LoopDevice; 2]> {
    let [one, two] = ["one", "two"].map(|name| {
        let file = scene.path(name);
        std::fs::write(&file, vec![0; 1 << 20]).unwrap();
        loop_device(&file)
    });
    Some([one?, two?])
}
