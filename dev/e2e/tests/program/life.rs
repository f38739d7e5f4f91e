//! Tests of a daemon's life: it is the only one, waits for a killed daemon's locks, drains, and finds everything again.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use crate::scene::{Scene, code, outcome_of, program, stop_and_verify, wait_until};

#[test]
fn two_daemons_share_neither_data_nor_stores_nor_sockets() {
    let scene = Scene::started();
    let second = |config: &str| {
        let path = scene.path("second.toml");
        std::fs::write(&path, config.replace("HERE", &scene.path("").display().to_string())).unwrap();
        let mut command = Command::new(program());
        command.arg("--json").arg("serve").arg("--config").arg(path).env("STERNA_LOG", "error");
        let outcome = outcome_of(command);
        let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!((outcome.code, code(&value)), (8, "serve_failed"), "{value}");
        value["error"]["message"].as_str().unwrap().to_owned()
    };
    let message = second("data_dir = 'HEREdata'\napi = 'unix:HEREother/api.sock'");
    let holder = format!("data is in use by another daemon (process {})", scene.process());
    assert!(message.contains(&holder), "{message}");
    let message = second("data_dir = 'HEREdata2'\napi = 'unix:HERErun/api2.sock'");
    assert!(message.contains("run/volumes is in use by another daemon"), "{message}");
    scene.succeed(&["volume", "list"]);
}

#[test]
fn store_of_another_daemon_cannot_be_used() {
    let first = Scene::started();
    let mut second = Scene::new();
    std::fs::remove_dir(second.path("b")).unwrap();
    std::os::unix::fs::symlink(first.path("b"), second.path("b")).unwrap();
    second.start(None);
    second.create_volume();
    let (exit, value) = second.json(&["migrate", "v", "--to", "b"]);
    assert_eq!((exit, code(&value)), (1, "storage_failed"), "{value}");
    assert!(value["error"]["message"].as_str().unwrap().contains("in use by another daemon"));
    let (_, stores) = second.json(&["store", "list"]);
    assert!(stores[1]["problem"].as_str().unwrap().contains("in use by another daemon"), "{stores}");
}

#[test]
fn sockets_are_private_and_at_the_same_place_after_a_restart() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let uri = |scene: &Scene| scene.json(&["volume", "show", "v"]).1["uri"].clone();
    let before = uri(&scene);
    for socket in ["run/api.sock", "run/volumes/v.sock"] {
        let mode = std::fs::metadata(scene.path(socket)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
    scene.stop();
    for socket in ["run/api.sock", "run/volumes/v.sock"] {
        assert!(!scene.path(socket).exists(), "{socket}");
    }
    scene.start(None);
    assert_eq!(uri(&scene), before);
    scene.kill();
    scene.start(None);
    assert_eq!(uri(&scene), before);
    stop_and_verify(guest);
}

#[test]
fn stopping_in_the_middle_of_a_migration_leaves_it_to_the_next_daemon() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut scene = Scene::started();
        scene.create_volume();
        let guest = scene.start_guest();
        scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "64KiB/s", "--detach"]);
        // An empty copy is not kept: the migration begins anew.
        let has_copied = || {
            let copied = scene.json(&["migration", "show", "m0"]).1["bytes_copied"].as_u64();
            Ok(copied.is_some_and(|bytes| bytes > 0).then_some(()))
        };
        testbed::until("something is copied", has_copied).unwrap();
        scene.signal(signal).unwrap();
        assert_eq!(scene.wait(), 0);
        assert!(scene.path("b/.v.img.partial").exists(), "it is not complete, and says so");
        scene.start(None);
        let (_, migration) = scene.json(&["migration", "show", "m0"]);
        assert_eq!(migration["phase"], "copying", "{migration}");
        assert_eq!(scene.store_of_volume(), "a");
        scene.succeed(&["migration", "set", "m0", "--bandwidth", "none"]);
        scene.succeed(&["migration", "watch", "m0"]);
        assert_eq!((scene.images("a"), scene.images("b")), (vec![], vec!["v.img".to_owned()]));
        stop_and_verify(guest);
    }
}

#[test]
fn a_migration_between_stores_goes_on_after_restarts_in_order_and_whoever_waits_goes_on_waiting() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let mut command = scene.command(&["migrate", "v", "--to", "b", "--bandwidth", "64KiB/s"]);
    let waiting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_migration(&scene);
    scene.succeed(&["migration", "set", "m0", "--bandwidth", "32KiB/s"]);
    scene.succeed(&["migration", "pause", "m0"]);
    for _ in 0..2 {
        scene.stop();
        scene.start(None);
        let (_, list) = scene.json(&["migration", "list"]);
        assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
        let paused = || Ok((scene.json(&["migration", "show", "m0"]).1["state"] == "paused").then_some(()));
        testbed::until("it rests", paused).unwrap();
    }
    scene.succeed(&["migration", "resume", "m0"]);
    scene.succeed(&["migration", "set", "m0", "--bandwidth", "none"]);
    let output = waiting.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stdout}{stderr}");
    assert!(!stderr.contains("begins again"), "{stderr}");
    assert_eq!(scene.store_of_volume(), "b");
    stop_and_verify(guest);
}

#[test]
fn client_that_waits_for_a_migration_survives_a_restart_and_says_what_became_of_it() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let mut command = scene.command(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s"]);
    let mut waiting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It says so when it knows that the migration has begun.
    let lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let mut progress = lines.map(Result::unwrap).skip_while(|line| line.contains("waiting for the answer"));
    assert!(progress.next().unwrap().starts_with("m0 v: copying"));
    scene.kill();
    scene.start(None);
    let output = waiting.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(5), "{stdout}");
    assert!(stdout.starts_with("m0 failed: the daemon stopped before the handover"), "{stdout}");
    assert!(stdout.contains("\nv is at a\n"), "{stdout}");
    stop_and_verify(guest);
}

#[test]
fn ctrl_c_cancels_a_migration_that_is_waited_for() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let mut command = scene.command(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s"]);
    command.stderr(Stdio::piped()).stdout(Stdio::piped());
    let waiting = command.spawn().unwrap();
    wait_for_migration(&scene);
    testbed::signal(waiting.id(), Signal::INT).unwrap();
    let output = waiting.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{stderr}");
    assert!(stderr.contains("cancelling m0; press Ctrl-C again to stop waiting"), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().next(), Some("m0 was cancelled; v is at a"));
    assert!(scene.images("b").is_empty());
    stop_and_verify(guest);
}

#[test]
fn image_that_somebody_holds_is_waited_for_and_that_is_said() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.stop();
    let held = std::fs::File::open(scene.path("a/v.img")).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    scene.start(None);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(volume["state"], "waiting", "{volume}");
    assert!(volume["message"].as_str().unwrap().contains("its image is in use by"), "{volume}");
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "b"]);
    assert_eq!((exit, code(&refused)), (4, "volume_unavailable"));
    drop(held);
    assert!(scene.wait_for_log("serving volume=v"));
    stop_and_verify(scene.start_guest());
}

#[test]
fn volume_whose_image_is_missing_keeps_no_other_from_being_served_and_comes_back() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["volume", "create", "w", "--store", "b", "--size", "1MiB"]);
    scene.stop();
    std::fs::rename(scene.path("b"), scene.path("unmounted")).unwrap();
    scene.start(None);
    stop_and_verify(scene.start_guest());
    let (_, volume) = scene.json(&["volume", "show", "w"]);
    assert_eq!(volume["state"], "failed");
    assert!(volume["message"].as_str().unwrap().contains("b/w.img does not exist"), "{volume}");
    std::fs::rename(scene.path("unmounted"), scene.path("b")).unwrap();
    assert!(scene.wait_for_log("serving volume=w"));
}

#[test]
fn kept_source_is_fenced_under_another_name() {
    let scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b", "--keep-source"]);
    assert_eq!(
        (scene.images("a"), scene.images("b")),
        (vec!["v.img.moved-m0".into()], vec!["v.img".to_owned()])
    );
    // An image that was served in place is never deleted, kept source or not.
    let raw = scene.path("raw");
    std::fs::write(&raw, [7; 8192]).unwrap();
    scene.succeed(&["volume", "add", "w", "--image", &raw.display().to_string()]);
    scene.succeed(&["migrate", "w", "--to", "a"]);
    assert!(!raw.exists());
    assert_eq!(std::fs::read(scene.path("raw.moved-m1")).unwrap(), [7; 8192]);
}

#[test]
fn an_image_that_was_somebodys_stays_when_its_volume_is_removed_wherever_it_has_moved_to() {
    let mut scene = Scene::started();
    let raw = scene.path("raw");
    std::fs::write(&raw, [7; 8192]).unwrap();
    scene.succeed(&["volume", "add", "w", "--image", &raw.display().to_string()]);
    for store in ["a", "b"] {
        scene.succeed(&["migrate", "w", "--to", store]);
        // The journal begins anew at each start, with what it knew.
        scene.kill();
        scene.start(None);
        scene.until_served("w");
    }
    let image = scene.path("b/w.img");
    let (_, removed) = scene.json(&["volume", "remove", "w"]);
    assert_eq!((&removed["image_fate"], &removed["kept_because"]), (&"kept".into(), &"given".into()));
    assert_eq!(removed["image"], image.display().to_string());
    assert_eq!(std::fs::read(&image).unwrap(), [7; 8192]);
    // An image that is served in place is never deleted; an image in a store is, by order.
    scene.succeed(&["volume", "add", "w", "--image", &image.display().to_string()]);
    let refused = scene.run(&["volume", "remove", "w", "--delete-image"]);
    assert!(refused.code == 2 && refused.stderr.contains("in no folder of a store"), "{refused:?}");
    scene.succeed(&["migrate", "w", "--to", "a"]);
    let said = scene.succeed(&["volume", "remove", "w", "--delete-image"]);
    assert!(said.contains("a/w.img deleted") && scene.images("a").is_empty(), "{said}");
    // What Sterna made goes with its volume, also after it has moved.
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    scene.kill();
    scene.start(None);
    scene.until_served("v");
    scene.succeed(&["volume", "remove", "v"]);
    assert_eq!(scene.images("b"), ["w.img.moved-m2"]);
}

#[test]
fn images_that_a_daemon_without_its_data_folder_does_not_know_are_told() {
    let mut scene = Scene::started();
    scene.create_volume();
    assert!(!scene.succeed(&["volume", "list"]).contains("belong to no volume"));
    scene.stop();
    std::fs::remove_dir_all(scene.path("data")).unwrap();
    scene.start(None);
    let said = scene.succeed(&["volume", "list"]);
    assert!(
        said.contains("no volume of this host: v.img") && said.contains("sterna store import STORE/FILE"),
        "{said}"
    );
    let (_, stores) = scene.json(&["store", "list"]);
    assert_eq!(stores[0]["unknown_images"], serde_json::json!(["v.img"]), "{stores}");
    assert!(scene.succeed(&["store", "list"]).contains("v.img"));
}

#[test]
fn owner_and_mode_of_an_image_go_along() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    let scene = Scene::started();
    let raw = scene.path("raw");
    std::fs::write(&raw, [7; 8192]).unwrap();
    std::fs::set_permissions(&raw, std::fs::Permissions::from_mode(0o640)).unwrap();
    let owner =
        if rustix::process::geteuid().is_root() { 12_345 } else { std::fs::metadata(&raw).unwrap().uid() };
    std::os::unix::fs::chown(&raw, Some(owner), None).unwrap();
    scene.succeed(&["volume", "add", "w", "--image", &raw.display().to_string()]);
    for store in ["a", "b"] {
        scene.succeed(&["migrate", "w", "--to", store]);
        let found = std::fs::metadata(scene.path(store).join("w.img")).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o777), (owner, 0o640), "{store}");
    }
}

#[test]
fn watching_prints_every_change_as_a_line_of_json() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "16MiB/s", "--detach"]);
    let outcome = scene.run(&["migration", "watch", "m0", "--json"]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let lines: Vec<serde_json::Value> =
        outcome.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let fractions: Vec<f64> = lines.iter().map(|line| line["fraction"].as_f64().unwrap()).collect();
    assert!(fractions.is_sorted(), "progress runs backwards: {fractions:?}");
    let last = lines.last().unwrap();
    assert_eq!((&last["state"], &last["fraction"]), (&"moved".into(), &1.0.into()));
    // What the guest discards before its turn comes is not copied: it has time for a part of what it filled.
    assert!(last["bytes_copied"].as_u64().unwrap() >= 4 << 20, "{last}");
    stop_and_verify(guest);
}

#[test]
fn guest_keeps_its_disk_while_it_moves_ten_times() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    for generation in 1..=10 {
        let store = if generation % 2 == 1 { "b" } else { "a" };
        let (exit, migration) = scene.json(&["migrate", "v", "--to", store]);
        assert_eq!((exit, &migration["state"]), (0, &"moved".into()), "{migration}");
        let parts = &migration["switch_over"];
        let part = |name: &str| parts[name].as_f64().unwrap();
        let sum: f64 =
            ["drain_ms", "prepare_ms", "release_ms", "own_ms", "start_ms"].into_iter().map(part).sum();
        assert!((sum - part("gate_closed_ms")).abs() < 0.01, "{parts}");
        assert_eq!(scene.json(&["volume", "show", "v"]).1["generation"], generation);
    }
    stop_and_verify(guest);
    assert_eq!((scene.images("a"), scene.images("b")), (vec!["v.img".to_owned()], vec![]));
}

/// Waits until a migration is under way.
fn wait_for_migration(scene: &Scene) {
    wait_until("a migration begins", || !scene.json(&["migration", "list"]).1.as_array().unwrap().is_empty());
}
