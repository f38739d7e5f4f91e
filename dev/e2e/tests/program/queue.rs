//! Tests of the queue: migrations beyond a limit wait, are shown, cancelled, and survive a restart; failed ones are repeated.

use serde_json::Value;

use crate::scene::{Scene, code};

/// Bytes of a disk of which a slow migration copies the first part only: at 16 KiB/s it takes ten minutes.
const SLOW_BYTES: usize = 8 << 20;
/// A rate at which nothing ends by itself while a test runs.
const SLOW: [&str; 2] = ["--bandwidth", "16KiB/s"];

/// A daemon with these limits, the volume `v` on its way from `a` to `b` as m0, slowly, and the volumes `w` and `x` in `a`.
fn busy(limits: &str) -> Scene {
    let mut scene = Scene::new();
    let stores = ["c", "d"].map(|name| {
        std::fs::create_dir(scene.path(name)).unwrap();
        format!("[stores.{name}]\npath = '{}'\n", scene.path(name).display())
    });
    scene.configure(&format!("{}[limits]\n{limits}\n", stores.concat()));
    scene.start(None);
    std::fs::write(scene.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = scene.path("image").display().to_string();
    for (name, store) in [("v", "a"), ("w", "a"), ("x", "a"), ("y", "c")] {
        scene.succeed(&["volume", "create", name, "--store", store, "--image", &image]);
    }
    scene.succeed(&[&["migrate", "v", "--to", "b", "--detach", "--keep-source"], SLOW.as_slice()].concat());
    scene
}

fn order(scene: &Scene, name: &str, to: &str) -> Value {
    let (exit, migration) = scene.json(&["migrate", name, "--to", to, "--detach"]);
    assert_eq!(exit, 0, "{migration}");
    migration
}

fn show(scene: &Scene, id: &str) -> Value {
    scene.json(&["migration", "show", id]).1
}

/// Follows a migration to its end, which must be the store `b`.
fn moves(scene: &Scene, id: &str) {
    let outcome = scene.run(&["migration", "watch", id]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(outcome.stdout.contains("is at b"), "{outcome:?}");
}

#[test]
fn what_is_beyond_the_limit_waits_in_order_and_begins_by_itself() {
    let scene = busy("migrations_per_host = 1");
    let (second, third) = (order(&scene, "w", "b"), order(&scene, "x", "b"));
    for (migration, place) in [(&second, 1), (&third, 2)] {
        assert_eq!((&migration["state"], &migration["phase"]), (&"queued".into(), &"queued".into()));
        assert_eq!((&migration["guest"], &migration["queue"]["place"]), (&"source".into(), &place.into()));
    }
    let reason = third["waiting_for"]["reason"].as_str().unwrap();
    assert!(reason.contains("number 2 of 2") && reason.contains("limits.migrations_per_host"), "{reason}");
    let list = scene.succeed(&["migration", "list"]);
    assert!(list.lines().any(|line| line.contains("m2") && line.contains("number 2 of 2")), "{list}");
    // What cannot be done with it says what can.
    for (command, expected) in [
        (["migration", "pause", "m1"].as_slice(), "volume_busy"),
        (&["migration", "retry", "m1"], "cannot_retry"),
        (&["volume", "remove", "w"], "already_migrating"),
        (&["migrate", "w", "--to", "b"], "already_migrating"),
        (&["migrate", "y", "--to", "c"], "same_store"),
    ] {
        let (exit, refused) = scene.json(command);
        assert_eq!((exit, code(&refused)), (4, expected), "{command:?}");
    }
    // A cancelled queued migration ends at once, and the next one gets its place.
    let cancelled = scene.json(&["migration", "cancel", "m1"]).1;
    assert_eq!((&cancelled["state"], &cancelled["bytes_moved"]), (&"cancelled".into(), &0.into()));
    assert_eq!(scene.run(&["migration", "watch", "m1"]).code, 6);
    assert_eq!(show(&scene, "m2")["queue"]["place"], 1);
    scene.succeed(&["migration", "cancel", "m0"]);
    moves(&scene, "m2");
    let (_, volume) = scene.json(&["volume", "show", "w"]);
    assert_eq!((&volume["store"], &volume["migration"]), (&"a".into(), &Value::Null));
    // Numbers are given once.
    assert_eq!(order(&scene, "w", "b")["id"], "m3");
    moves(&scene, "m3");
}

#[test]
fn a_full_store_keeps_nothing_from_going_to_another() {
    let scene = busy("migrations_per_store = 1");
    let waits = order(&scene, "w", "d");
    assert_eq!(waits["state"], "queued", "{waits}");
    let reason = waits["queue"]["reason"].as_str().unwrap();
    assert!(reason.contains("the store \"a\"") && reason.contains("migrations_per_store"), "{reason}");
    // It keeps its place in d, too: what was ordered later does not overtake it there.
    assert_eq!(order(&scene, "y", "d")["state"], "queued");
    scene.succeed(&["migration", "cancel", "m1"]);
    assert_eq!(scene.run(&["migration", "watch", "m2"]).code, 0);
    assert_eq!(show(&scene, "m0")["state"], "running");
}

#[test]
fn what_waited_waits_again_after_a_restart_and_has_its_turn() {
    let stop = |scene: &mut Scene| scene.stop();
    for ends in [Scene::kill, stop] {
        let mut scene = busy("migrations_per_host = 1");
        order(&scene, "w", "b");
        order(&scene, "x", "b");
        ends(&mut scene);
        scene.start(None);
        // The first one resumes, or has ended by the restart if it had just begun, and frees its place.
        scene.run(&["migration", "set", "m0", "--bandwidth", "none"]);
        for id in ["m1", "m2"] {
            moves(&scene, id);
        }
        let first = show(&scene, "m0");
        assert!(first["state"] == "moved" || first["failure"] == "daemon-stopped", "{first}");
    }
}

#[test]
fn what_cannot_begin_in_its_turn_says_why_and_can_be_done_once_more() {
    let scene = busy("migrations_per_host = 1");
    order(&scene, "w", "b");
    std::fs::write(scene.path("b/w.img"), b"somebody's").unwrap();
    scene.succeed(&["migration", "cancel", "m0"]);
    let outcome = scene.run(&["migration", "watch", "m1"]);
    assert_eq!(outcome.code, 5, "{outcome:?}");
    assert!(outcome.stdout.contains("b/w.img exists already"), "{outcome:?}");
    let failed = show(&scene, "m1");
    assert_eq!((&failed["failure"], &failed["guest"]), (&"not-begun".into(), &"source".into()));
    std::fs::remove_file(scene.path("b/w.img")).unwrap();
    let outcome = scene.run(&["migration", "retry", "m1"]);
    assert_eq!((outcome.code, outcome.stdout.lines().next()), (0, Some("w is at b (m2)")), "{outcome:?}");
}

#[test]
fn a_retry_has_the_same_options_and_both_say_so() {
    let scene = busy("");
    let (exit, refused) = scene.json(&["migration", "retry", "m0"]);
    assert_eq!((exit, code(&refused)), (4, "cannot_retry"));
    assert!(refused["error"]["message"].as_str().unwrap().contains("it is under way"), "{refused}");
    scene.succeed(&["migration", "cancel", "m0"]);
    assert_eq!(scene.run(&["migration", "watch", "m0"]).code, 6);
    let (exit, again) = scene.json(&["migration", "retry", "m0", "--detach"]);
    assert_eq!((exit, &again["id"], &again["retry_of"]), (0, &"m1".into(), &"m0".into()), "{again}");
    assert_eq!((&again["volume"], &again["keep_source"]), (&"v".into(), &true.into()));
    assert_eq!(show(&scene, "m0")["retried_as"], "m1");
    assert!(scene.succeed(&["migration", "list"]).contains("retried as m1"));
    let kept = std::fs::read_to_string(scene.path("data/dockets/m1.json")).unwrap();
    let kept: Value = serde_json::from_str(&kept).unwrap();
    assert_eq!(kept["docket"]["order"]["bandwidth_bytes_per_second"], 16 << 10, "{kept}");
    // What ended well, is somewhere else or was never there is not done once more.
    let (_, moved) = scene.json(&["migrate", "w", "--to", "b"]);
    for (id, exit, words) in
        [(moved["id"].as_str().unwrap(), 4, "it has succeeded"), ("m99", 3, "no migration")]
    {
        let outcome = scene.run(&["migration", "retry", id]);
        assert_eq!(outcome.code, exit, "{outcome:?}");
        assert!(outcome.stderr.contains(words), "{outcome:?}");
    }
    scene.succeed(&["migration", "cancel", "m1"]);
    assert_eq!(scene.run(&["migration", "watch", "m1"]).code, 6);
    scene.succeed(&["volume", "remove", "v"]);
    let outcome = scene.run(&["migration", "retry", "m1"]);
    assert_eq!(outcome.code, 4, "{outcome:?}");
    assert!(outcome.stderr.contains("\"v\" is not here now"), "{outcome:?}");
}

/// The time of day, in milliseconds since 1970.
fn now_ms() -> u64 {
    u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

#[test]
fn what_is_ordered_for_a_time_waits_for_it_also_over_a_restart() {
    let mut scene = Scene::started();
    scene.create_volume();
    let ordered = now_ms();
    let (exit, queued) = scene.json(&["migrate", "v", "--to", "b", "--at", "6s", "--detach"]);
    assert_eq!((exit, &queued["state"]), (0, &"queued".into()), "{queued}");
    let begins = queued["queue"]["begins_unix_ms"].as_u64().unwrap();
    assert!((ordered + 6000..now_ms() + 6000).contains(&begins), "{queued}");
    let list = scene.succeed(&["migration", "list"]);
    assert!(list.contains("begins at 2"), "{list}");
    // It holds nobody up, and its volume has one order at a time.
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "b"]);
    assert_eq!((exit, code(&refused)), (4, "already_migrating"));

    scene.kill();
    scene.start(None);
    moves(&scene, "m0");
    let moved = show(&scene, "m0");
    assert!(moved["started_unix_ms"].as_u64().unwrap() >= begins, "{moved} began before {begins}");
}

#[test]
fn a_time_that_makes_no_sense_is_refused_by_name() {
    let scene = Scene::started();
    scene.create_volume();
    for (option, time, expected) in [
        ("--at", "soon", "a time is written 04:00"),
        ("--at", "2020-01-01T04:00Z", "it has passed"),
        ("--deadline", "25:00", "a time is written 04:00"),
    ] {
        let outcome = scene.run(&["migrate", "v", "--to", "b", option, time]);
        assert_eq!(outcome.code, 2, "{outcome:?}");
        assert!(outcome.stderr.contains(expected), "{outcome:?}");
    }
    let outcome = scene.run(&["migrate", "v", "--to", "b", "--at", "2h", "--deadline", "1h"]);
    assert_eq!(outcome.code, 2, "{outcome:?}");
    assert!(outcome.stderr.contains("the deadline comes before the ordered beginning"), "{outcome:?}");
    let plan = scene.run(&["migrate", "v", "--to", "b", "--at", "2h", "--dry-run"]);
    assert!(plan.stdout.contains("begins at 2"), "{plan:?}");
}
