//! Tests of kept images of migrations: listed, and dropped completely.

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

use crate::scene::{Scene, code};

/// A daemon whose volume `v` has gone from `a` to `b` as m0, from there to `a` as m1, and to `b` as m2; images are
/// kept at the first two.
fn travelled() -> Scene {
    let scene = Scene::started();
    std::fs::write(scene.path("image"), vec![7; 1 << 20]).unwrap();
    let image = scene.path("image").display().to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--image", &image]);
    for (store, kept) in [("b", true), ("a", true), ("b", false)] {
        let keep: &[&str] = if kept { &["--keep-source"] } else { &[] };
        scene.succeed(&[&["migrate", "v", "--to", store], keep].concat());
    }
    scene
}

fn list(scene: &Scene) -> Vec<Value> {
    scene.json(&["replica", "list"]).1.as_array().unwrap().clone()
}

#[test]
fn kept_images_are_listed_with_what_they_take_and_dropped_one_by_one() {
    let scene = travelled();
    let found = list(&scene);
    let [first, second] = found.as_slice() else { panic!("{found:?}") };
    let word = |replica: &Value, name: &str| replica[name].as_str().unwrap().to_owned();
    assert_eq!([word(first, "migration"), word(first, "store"), word(first, "went_to")], ["m0", "a", "b"]);
    assert_eq!([word(second, "migration"), word(second, "store"), word(second, "went_to")], ["m1", "b", "a"]);
    assert_eq!((&first["volume"], &first["size_bytes"]), (&"v".into(), &(1 << 20).into()));
    assert!(first["allocated_bytes"].as_u64().unwrap() >= 1 << 20, "{first}");
    assert!(first["kept_unix_ms"].as_u64().unwrap() > 1_600_000_000_000, "{first}");
    // The way home from another host only.
    assert_eq!(first["shortens_return"], false);
    assert!(scene.succeed(&["replica", "list"]).contains("v.img.moved-m0"));
    for (migration, kept) in [("m0", "a/v.img.moved-m0"), ("m1", "b/v.img.moved-m1")] {
        let (_, moved) = scene.json(&["migration", "show", migration]);
        assert!(moved["message"].as_str().unwrap().contains(kept), "the new name is said: {moved}");
    }
    assert_eq!(scene.json(&["migration", "show", "m2"]).1["message"], Value::Null);
    let shown = scene.succeed(&["volume", "show", "v"]);
    assert!(shown.contains("2 images, "), "{shown}");
    assert!(shown.contains(" (left by migrations; sterna replica list)"), "{shown}");

    let outcome = scene.run(&["replica", "drop", "v"]);
    assert_eq!(outcome.code, 2, "{outcome:?}");
    assert!(outcome.stderr.contains("--migration with one of m0, m1"), "{outcome:?}");
    for (arguments, words) in
        [(["v", "--migration", "m2"].as_slice(), "there are those of m0, m1"), (&["w"], "replica list")]
    {
        let outcome = scene.run(&[&["replica", "drop"], arguments].concat());
        assert_eq!(outcome.code, 3, "{outcome:?}");
        assert!(outcome.stderr.contains(words), "{outcome:?}");
    }
    let said = scene.succeed(&["replica", "drop", "v", "--migration", "m0"]);
    assert!(said.contains("v.img.moved-m0, which m0 left"), "{said}");
    scene.succeed(&["replica", "drop", "v"]);
    assert_eq!(
        (list(&scene).len(), scene.images("a"), scene.images("b")),
        (0, vec![], vec!["v.img".to_owned()])
    );
    assert!(scene.succeed(&["replica", "list"]).starts_with("no images are kept"));
}

#[test]
fn an_image_that_somebody_uses_is_not_dropped() {
    let scene = travelled();
    let kept = scene.path("a/v.img.moved-m0");
    let drop_it = ["replica", "drop", "v", "--migration", "m0"];
    let held = std::fs::File::open(&kept).unwrap();
    flock(&held, FlockOperation::LockShared).unwrap();
    let (exit, refused) = scene.json(&drop_it);
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
    drop(held);
    scene.succeed(&["volume", "add", "w", "--image", &kept.display().to_string()]);
    let (exit, refused) = scene.json(&drop_it);
    assert_eq!((exit, code(&refused)), (4, "image_in_use"), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("the volume \"w\""), "{refused}");
    assert!(kept.exists());
    // An image that a user had before is listed, but only the user may delete it.
    scene.succeed(&["migrate", "w", "--to", "b"]);
    let (exit, refused) = scene.json(&["replica", "drop", "w"]);
    assert_eq!((exit, code(&refused)), (2, "invalid_request"), "{refused}");
    assert!(scene.path("a/v.img.moved-m0.moved-m3").exists());
}

#[test]
fn a_volume_of_the_same_name_may_be_made_beside_what_was_kept() {
    let scene = travelled();
    scene.succeed(&["volume", "remove", "v"]);
    scene.create_volume();
    assert_eq!(list(&scene).len(), 2);
    assert_eq!(scene.images("a"), ["v.img", "v.img.moved-m0"]);
}

#[test]
fn a_crash_while_one_is_dropped_leaves_all_of_it_or_nothing() {
    for (point, left) in [("before-discard", 2), ("after-discard", 1)] {
        let mut scene = travelled();
        scene.stop();
        scene.start(Some(point));
        scene.run(&["replica", "drop", "v", "--migration", "m0"]);
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(list(&scene).len(), left, "{point}");
        if left == 2 {
            scene.succeed(&["replica", "drop", "v", "--migration", "m0"]);
        }
        assert!(scene.images("a").is_empty());
    }
}

#[test]
fn no_more_images_are_kept_than_the_configuration_says_and_the_oldest_go() {
    let mut scene = travelled();
    scene.succeed(&["migrate", "v", "--to", "a", "--keep-source"]);
    let numbers = |scene: &Scene| -> Vec<String> {
        list(scene).iter().map(|kept| kept["migration"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(numbers(&scene), ["m0", "m1", "m3"]);
    scene.stop();
    scene.configure("[limits]\nkept_images_per_volume = 2\n");
    scene.start(None);
    assert!(scene.wait_for_log("gave up the oldest kept image"));
    assert_eq!(numbers(&scene), ["m1", "m3"]);
    // Of a volume that is no more, what was kept may be the only copy.
    scene.succeed(&["volume", "remove", "v"]);
    scene.stop();
    scene.configure("[limits]\nkept_images_per_volume = 1\n");
    scene.start(None);
    scene.create_volume();
    assert_eq!(numbers(&scene), ["m1", "m3"]);
}

#[test]
fn all_that_was_kept_of_a_volume_is_dropped_at_once() {
    let scene = travelled();
    let kept = list(&scene).len();
    let (exit, dropped) = scene.json(&["replica", "drop", "v", "--all"]);
    assert_eq!((exit, dropped.as_array().unwrap().len()), (0, kept), "{dropped}");
    assert!(list(&scene).is_empty());
    let (exit, refused) = scene.json(&["replica", "drop", "v", "--all"]);
    assert_eq!((exit, code(&refused)), (3, "replica_not_found"), "{refused}");
}
