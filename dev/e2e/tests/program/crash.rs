//! Kills the daemon at every step of a migration while a guest writes. After the restart, exactly one store serves the volume at
//! the same socket, no acknowledged write is lost, and no unfinished image is left.

use serde_json::Value;

use crate::scene::{Scene, stop_and_verify};

/// Expected state of a migration after a crash and a restart, with the volume's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// It is not in the journal; the volume is in `a`.
    NeverBegan,
    /// It failed; the volume is in `a`.
    Stayed,
    /// It was cancelled; the volume is in `a`.
    Cancelled,
    /// The volume is in `b`.
    Moved,
}

#[test]
fn killed_before_the_commit_point_the_volume_stays() {
    check_move("before-started", Expected::NeverBegan);
    // The first image made is the volume's own.
    for point in ["after-started", "before-create-image@2", "after-create-image@2"] {
        check_move(point, Expected::Stayed);
    }
    for point in ["before-prepared", "after-prepared", "before-released"] {
        check_move(point, Expected::Stayed);
    }
}

#[test]
fn killed_behind_the_commit_point_the_volume_moves() {
    for point in ["after-released", "before-owned", "after-owned"] {
        check_move(point, Expected::Moved);
    }
    for point in ["before-retire", "after-retire", "before-ended", "after-ended"] {
        check_move(point, Expected::Moved);
    }
}

#[test]
fn killed_while_a_migration_is_cancelled_the_volume_stays() {
    let points = [
        "before-discarding",
        "after-discarding",
        "before-discard",
        "after-discard",
        "before-ended",
        "after-ended",
    ];
    for point in points {
        check_cancel(point, Expected::Cancelled);
    }
}

#[test]
fn killed_again_while_it_recovers_it_ends_the_same_way() {
    for point in ["before-aborted", "after-aborted", "before-discarding", "after-discarding"] {
        check_recovery("after-prepared", point, Expected::Stayed);
    }
    for point in ["before-discard", "after-discard", "before-ended"] {
        check_recovery("after-prepared", point, Expected::Stayed);
    }
    for point in ["before-owned", "after-owned", "before-retire", "after-retire", "before-ended"] {
        check_recovery("after-released", point, Expected::Moved);
    }
}

#[test]
fn killed_while_a_volume_is_made_there_is_a_volume_or_nothing() {
    for (point, exists) in [
        ("before-create-image", false),
        ("after-create-image", false),
        ("before-added", false),
        ("after-added", true),
    ] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        scene.run(&["volume", "create", "v", "--store", "a", "--size", "1MiB"]);
        scene.wait_for_death();
        scene.start(None);
        let expected: &[&str] = if exists { &["v.img"] } else { &[] };
        assert_eq!(scene.images("a"), expected, "{point}");
        let (_, volumes) = scene.json(&["volume", "list"]);
        assert_eq!(volumes.as_array().unwrap().len(), expected.len(), "{point}");
        if exists {
            assert_eq!(scene.store_of_volume(), "a");
        } else {
            scene.succeed(&["volume", "create", "v", "--store", "a", "--size", "1MiB"]);
        }
    }
}

#[test]
fn killed_while_a_volume_is_removed_it_is_there_or_gone() {
    for (point, exists) in [("before-removed", true), ("after-removed", false)] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        scene.create_volume();
        stop_and_verify(scene.start_guest());
        scene.run(&["volume", "remove", "v", "--force"]);
        scene.wait_for_death();
        scene.start(None);
        let expected: &[&str] = if exists { &["v.img"] } else { &[] };
        assert_eq!(scene.images("a"), expected, "{point}");
        assert_eq!(scene.run(&["volume", "show", "v"]).code, if exists { 0 } else { 3 }, "{point}");
    }
}

#[test]
fn killed_while_the_journal_is_compacted_nothing_is_forgotten() {
    for point in ["before-compact", "after-compact"] {
        let mut scene = Scene::started();
        scene.create_volume();
        scene.succeed(&["migrate", "v", "--to", "b"]);
        scene.kill();
        scene.start(Some(point));
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(scene.store_of_volume(), "b", "{point}");
        assert_eq!(migration(&scene)["state"], "moved", "{point}");
    }
}

#[test]
fn lane_that_ends_by_a_defect_is_started_again_and_its_migration_is_ended() {
    for (point, expected) in [
        ("lane-prepared", Expected::Stayed),
        ("lane-released", Expected::Stayed),
        ("lane-owned", Expected::Moved),
        ("lane-ended", Expected::Moved),
    ] {
        let mut scene = Scene::new();
        scene.start(Some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        scene.run(&["migrate", "v", "--to", "b", "--detach"]);
        assert!(scene.wait_for_log("the volume's thread has ended because of a defect"), "{point}");
        assert!(scene.wait_for_log("serving volume=v"), "{point}");
        let process = scene.process();
        stop_and_verify(guest);
        // The migration had just begun, so nothing of its copy was kept; it ends.
        scene.run(&["migration", "watch", "m0"]);
        check_end(&scene, point, expected);
        // Nothing is left that would prevent the next migration.
        let other = if expected == Expected::Moved { "a" } else { "b" };
        scene.succeed(&["migrate", "v", "--to", other]);
        assert_eq!(scene.process(), process);
    }
}

#[test]
fn unknown_fail_point_is_refused() {
    let mut scene = Scene::new();
    scene.start(Some("before-lunch"));
    assert_eq!(scene.wait(), 8);
}

/// Kills the daemon at `point` of a migration from `a` to `b`.
fn check_move(point: &str, expected: Expected) {
    let mut scene = Scene::new();
    scene.start(Some(point));
    scene.create_volume();
    let guest = scene.start_guest();
    scene.run(&["migrate", "v", "--to", "b", "--detach"]);
    scene.wait_for_death();
    forget_copy(&scene, expected);
    scene.start(None);
    stop_and_verify(guest);
    check_end(&scene, point, expected);
    // It can be moved again.
    let other = if expected == Expected::Moved { "a" } else { "b" };
    scene.succeed(&["migrate", "v", "--to", other]);
}

/// Kills the daemon at `point` of a migration that is cancelled while it copies.
fn check_cancel(point: &str, expected: Expected) {
    let mut scene = Scene::new();
    scene.start(Some(point));
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--detach", "--bandwidth", "1MiB/s"]);
    scene.run(&["migration", "cancel", "m0"]);
    scene.wait_for_death();
    scene.start(None);
    stop_and_verify(guest);
    check_end(&scene, point, expected);
}

/// Kills the daemon at `first` of a migration, and at `second` of the restart.
fn check_recovery(first: &str, second: &str, expected: Expected) {
    let mut scene = Scene::new();
    scene.start(Some(first));
    scene.create_volume();
    let guest = scene.start_guest();
    scene.run(&["migrate", "v", "--to", "b", "--detach"]);
    scene.wait_for_death();
    forget_copy(&scene, expected);
    scene.start(Some(second));
    scene.wait_for_death();
    scene.start(None);
    stop_and_verify(guest);
    check_end(&scene, &format!("{first}, {second}"), expected);
}

/// Removes what the killed daemon has recorded of its copy. A daemon on a busy machine lives long enough to record what the copy lacks,
/// and the next one would continue the migration.
fn forget_copy(scene: &Scene, expected: Expected) {
    if expected != Expected::Moved {
        for entry in std::fs::read_dir(scene.path("data/chronicles")).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

fn check_end(scene: &Scene, points: &str, expected: Expected) {
    let (state, guest, store) = match expected {
        Expected::NeverBegan => (None, "", "a"),
        Expected::Stayed => (Some("failed"), "source", "a"),
        Expected::Cancelled => (Some("cancelled"), "source", "a"),
        Expected::Moved => (Some("moved"), "target", "b"),
    };
    assert_eq!(scene.store_of_volume(), store, "{points}");
    let other = if store == "a" { "b" } else { "a" };
    assert_eq!((scene.images(store), scene.images(other)), (vec!["v.img".to_owned()], vec![]), "{points}");
    // No complete image is marked as half-made, at the latest soon after the start.
    for store in ["a", "b"] {
        let mark = scene.path(store).join(".v.img.partial");
        testbed::until(&format!("{points}: the mark goes"), || Ok((!mark.exists()).then_some(()))).unwrap();
    }
    let (_, list) = scene.json(&["migration", "list"]);
    let Some(state) = state else {
        assert_eq!(list, Value::Array(Vec::new()), "{points}");
        return;
    };
    let shown = migration(scene);
    assert_eq!((&shown["state"], &shown["guest"]), (&state.into(), &guest.into()), "{points}: {shown}");
    if expected == Expected::Stayed {
        assert_eq!(shown["failure"], "daemon-stopped", "{points}");
        assert!(shown["message"].as_str().unwrap().contains("the daemon stopped before the handover"));
    }
}

fn migration(scene: &Scene) -> Value {
    let (code, list) = scene.json(&["migration", "list"]);
    assert_eq!((code, list.as_array().map(Vec::len)), (0, Some(1)), "{list}");
    list[0].clone()
}
