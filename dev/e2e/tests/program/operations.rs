//! Tests of operation: the next command after a move, late links, limits, and restarts.

use std::net::TcpListener;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use testbed::own_address;

use crate::hosts::{host, init, wait_connected};

use crate::scene::{Scene, code, until};

/// Number of moves to and fro, each ordered when the one before has ended.
const MOVES: usize = 12;
/// A disk that takes ten minutes at 16 KiB/s, and a moment without a limit.
const SLOW_BYTES: usize = 8 << 20;
/// Descriptors that a daemon without volumes may have open, and too few to take one in.
const FEW_DESCRIPTORS: u64 = 100;

/// Two hosts that are paired and connected; the volume `v` is at the first one.
pub(crate) fn pair() -> (Scene, Scene) {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite"]);
    two.succeed(&["host", "join", &address, invitation["token"].as_str().unwrap()]);
    std::fs::write(one.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = one.path("image").display().to_string();
    one.succeed(&["volume", "create", "v", "--store", "a", "--image", &image]);
    wait_connected(&one, "two");
    (one, two)
}

/// Checks a condition until it holds.
fn wait_until(look: impl Fn() -> Value, is_so: impl Fn(&Value) -> bool) -> Value {
    until("it is as it must be", || Some(look()).filter(&is_so))
}

#[test]
fn a_move_that_has_ended_is_followed_by_the_next_one_at_once() {
    let (one, two) = pair();
    for turn in 0..MOVES {
        let (at, to) = if turn % 2 == 0 { (&one, "two:a") } else { (&two, "one:a") };
        at.succeed(&["migrate", "v", "--to", to]);
    }
    // The same holds for other commands.
    two.json(&["volume", "list"]);
    one.succeed(&["migrate", "v", "--to", "two:a"]);
    two.succeed(&["volume", "remove", "v"]);
}

#[test]
fn an_address_that_comes_late_is_listened_on_without_a_restart() {
    // Somebody else has it, as a link that is down has it: listening there fails.
    let address = own_address().unwrap();
    let occupied = TcpListener::bind(address).unwrap();
    let mut one = Scene::new();
    let elsewhere = own_address().unwrap();
    one.configure(&format!(
        "[hosts]\nlisten = ['{address}', '{elsewhere}']\nlinks = [{{ address = '{address}' }}]\n"
    ));
    one.start(None);
    init(&one, "one");
    let (_, shown) = one.json(&["host", "show"]);
    assert_eq!(shown["listening"], serde_json::json!([elsewhere.to_string()]), "{shown}");
    assert!(shown["problem"].as_str().unwrap().contains(&address.to_string()), "{shown}");
    one.create_volume();
    drop(occupied);
    wait_until(|| one.json(&["host", "show"]).1, |shown| shown["problem"].is_null());
    let (two, _) = host();
    init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite"]);
    two.succeed(&["host", "join", &address.to_string(), invitation["token"].as_str().unwrap()]);
    wait_connected(&one, "two");
}

#[test]
fn a_volume_for_which_there_are_too_few_descriptors_is_refused_and_not_made() {
    let scene = Scene::started();
    let process = Pid::from_raw(i32::try_from(scene.process()).unwrap()).unwrap();
    // The soft limit was raised when it started.
    let few = Rlimit { current: Some(FEW_DESCRIPTORS), maximum: Some(FEW_DESCRIPTORS) };
    let former = prlimit(Some(process), Resource::Nofile, few).unwrap();
    assert_eq!(former.current, former.maximum, "the soft limit is below the hard one");
    let line = ["volume", "create", "v", "--store", "a", "--size", "4MiB"];
    let (exit, error) = scene.json(&line);
    assert_eq!((exit, code(&error)), (4, "too_many_files"), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("LimitNOFILE="), "{error}");
    assert_eq!(scene.json(&["volume", "list"]).1, Value::Array(Vec::new()));
    assert!(scene.images("a").is_empty());
}

#[test]
fn a_limited_and_paused_move_to_another_host_is_so_after_a_restart_of_either() {
    let (mut one, mut two) = pair();
    one.succeed(&["migrate", "v", "--to", "two:a", "--bandwidth", "64KiB/s", "--detach"]);
    let (exit, paused) = one.json(&["migration", "pause", "m0"]);
    assert_eq!((exit, &paused["state"]), (0, &"paused".into()), "{paused}");
    assert!(paused["remaining_seconds"].is_null(), "{paused}");
    one.kill();
    one.start(None);
    let show = |scene: &Scene| scene.json(&["migration", "show", "m0"]).1;
    let restarted = wait_until(|| show(&one), |shown| !shown["waiting_for"].is_null());
    assert_eq!(restarted["state"], "paused", "{restarted}");
    two.stop();
    two.start(None);
    wait_connected(&one, "two");
    assert_eq!(show(&one)["state"], "paused");
    one.succeed(&["migration", "resume", "m0"]);
    let before = show(&one)["bytes_moved"].as_u64().unwrap();
    let moving = wait_until(|| show(&one), |shown| shown["bytes_moved"].as_u64().unwrap() > before);
    assert_eq!(moving["state"], "running", "{moving}");
    assert!(moving["bytes_moved"].as_u64().unwrap() < SLOW_BYTES as u64 / 2, "{moving}");
    one.succeed(&["migration", "cancel", "m0"]);
}

#[test]
fn how_fast_a_migration_copies_is_changed_while_it_does_and_stays_so_after_a_restart() {
    let (mut one, _two) = pair();
    one.succeed(&["migrate", "v", "--to", "two:a", "--bandwidth", "16KiB/s", "--detach"]);
    for (arguments, exit, code_of) in [
        (["migration", "set", "m9", "--bandwidth", "1MiB/s"], 3, "migration_not_found"),
        (["migration", "set", "m0", "--bandwidth", "fast"], 2, "invalid_command_line"),
    ] {
        let (code_found, error) = one.json(&arguments);
        assert_eq!((code_found, code(&error)), (exit, code_of), "{error}");
    }
    // It rests meanwhile: what is changed is changed durably.
    one.succeed(&["migration", "pause", "m0"]);
    assert!(one.succeed(&["migration", "set", "m0", "--bandwidth", "24KiB/s"]).contains("24.0 KiB/s"));
    one.succeed(&["migration", "set", "m0", "--bandwidth", "none"]);
    one.kill();
    one.start(None);
    let show = || one.json(&["migration", "show", "m0"]).1;
    wait_until(show, |shown| !shown["waiting_for"].is_null());
    one.succeed(&["migration", "resume", "m0"]);
    // It would take minutes as it was ordered.
    assert_eq!(wait_until(show, |shown| shown["state"] != "running")["state"], "moved");
    let (exit, error) = one.json(&["migration", "set", "m0", "--bandwidth", "none"]);
    assert_eq!((exit, code(&error)), (4, "not_migrating"), "{error}");
}

#[test]
fn a_migration_that_crawls_is_let_run_at_once() {
    let scene = Scene::started();
    std::fs::write(scene.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = scene.path("image").display().to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--image", &image]);
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "16KiB/s", "--detach"]);
    let show = || scene.json(&["migration", "show", "m0"]).1;
    wait_until(show, |shown| shown["bytes_moved"].as_u64().is_some_and(|moved| moved > 0));
    scene.succeed(&["migration", "set", "m0", "--bandwidth", "1Gbit/s"]);
    assert_eq!(wait_until(show, |shown| shown["state"] != "running")["state"], "moved");
}

#[test]
fn an_order_that_cannot_wait_on_after_a_restart_is_listed_with_its_reason() {
    let mut scene = Scene::new();
    std::fs::create_dir(scene.path("c")).unwrap();
    let limits = "[limits]\nmigrations_per_host = 1\n";
    scene.configure(&format!("[stores.c]\npath = '{}'\n{limits}", scene.path("c").display()));
    scene.start(None);
    std::fs::write(scene.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = scene.path("image").display().to_string();
    for name in ["v", "w"] {
        scene.succeed(&["volume", "create", name, "--store", "a", "--image", &image]);
    }
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "16KiB/s", "--detach"]);
    scene.succeed(&["migrate", "w", "--to", "c", "--detach"]);
    scene.stop();
    scene.configure(limits);
    scene.start(None);
    let (_, ended) = scene.json(&["migration", "show", "m1"]);
    assert_eq!((&ended["state"], &ended["failure"]), (&"failed".into(), &"not-begun".into()), "{ended}");
    assert!(ended["message"].as_str().unwrap().contains("after a restart"), "{ended}");
    assert_eq!(ended["volume"], "w", "{ended}");
    assert!(scene.succeed(&["migration", "list"]).contains("m1"));
    // The migration under way continues.
    assert_eq!(scene.json(&["migration", "show", "m0"]).1["state"], "running");
    scene.succeed(&["migration", "cancel", "m0"]);
    scene.succeed(&["migrate", "w", "--to", "b"]);
    assert_eq!(scene.json(&["migration", "show", "m2"]).1["state"], "moved");
}

#[test]
fn migrations_are_listed_as_far_as_they_are_of_interest() {
    let scene = Scene::started();
    std::fs::write(scene.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = scene.path("image").display().to_string();
    for name in ["v", "w"] {
        scene.succeed(&["volume", "create", name, "--store", "a", "--image", &image]);
    }
    assert!(scene.succeed(&["migration", "list", "--running"]).contains("no such migrations"));
    scene.succeed(&["migrate", "v", "--to", "b"]);
    scene.succeed(&["migrate", "w", "--to", "b", "--bandwidth", "16KiB/s", "--detach"]);
    let listed = |arguments: &[&str]| {
        let (_, listed) = scene.json(&[&["migration", "list"], arguments].concat());
        listed
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let mut all = listed(&[]);
    all.sort();
    assert_eq!(all, ["m0", "m1"]);
    assert_eq!(listed(&["--running"]), ["m1"]);
    assert_eq!(listed(&["--since", "0s"]), ["m1"], "what has not ended is of interest");
    assert_eq!(listed(&["--since", "1h"]).len(), 2);
    assert!(scene.succeed(&["migration", "list"]).contains(" ago"));
    assert_eq!(scene.run(&["migration", "list", "--since", "yesterday"]).code, 2);
    scene.succeed(&["migration", "cancel", "m1"]);
}

#[test]
fn a_store_that_has_promised_more_than_it_has_is_told_of() {
    let mut scene = Scene::new();
    if !scene.mount_small_disk("small", 64 << 20) {
        return;
    }
    scene.configure(&format!("[stores.small]\npath = '{}'\n", scene.path("small").display()));
    scene.start(None);
    let create = |name| scene.run(&["volume", "create", name, "--store", "small", "--size", "40MiB"]);
    let first = create("v");
    assert!(first.code == 0 && !first.stderr.contains("warning"), "{first:?}");
    let second = create("w");
    assert!(second.code == 0 && second.stderr.contains("its volumes have 80.0 MiB together"), "{second:?}");
    let (_, stores) = scene.json(&["store", "list"]);
    let provisioned: Vec<_> =
        stores.as_array().unwrap().iter().map(|store| &store["bytes_provisioned"]).collect();
    assert_eq!(provisioned, [0, 0, 80 << 20]);
    assert!(scene.succeed(&["store", "list"]).contains("!! store small has 64.0 MiB"));
    let larger = scene.run(&["volume", "resize", "v", "48MiB"]);
    assert!(larger.stderr.contains("88.0 MiB together"), "{larger:?}");
}
