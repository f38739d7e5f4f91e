//! Tests of a restored journal: none of its volumes is served before other hosts, or an administrator, have confirmed it.

use serde_json::Value;

use crate::hosts::{host, init, wait_connected};
use crate::scene::{Scene, code, until};

/// Waits until a volume has the expected state.
fn wait_for(scene: &Scene, name: &str, state: &str, words: &str) -> Value {
    let says = |volume: &Value| volume["message"].as_str().unwrap_or_default().contains(words);
    until(&format!("volume {name} is {state}: {words}"), || {
        let (_, volume) = scene.json(&["volume", "show", name]);
        (volume["state"] == state && says(&volume)).then_some(volume)
    })
}

fn export(scene: &Scene, name: &str) -> String {
    let (data, path) = (scene.path("data").display().to_string(), scene.path(name));
    std::fs::write(&path, scene.succeed(&["journal", "export", &data])).unwrap();
    path.display().to_string()
}

#[test]
fn what_another_host_has_is_not_served_and_what_all_confirm_is() {
    let ((mut one, address), (mut two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    for name in ["moves", "stays"] {
        one.succeed(&["volume", "create", name, "--store", "a", "--size", "1MiB"]);
    }
    let backup = export(&one, "journal.json");
    one.succeed(&["migrate", "moves", "--to", "two:a"]);
    let data = one.path("data").display().to_string();
    // A daemon has the folder; and a journal that is good is not replaced by mistake.
    let restore = ["journal", "restore", backup.as_str(), "--data-dir", data.as_str()];
    assert_eq!(one.run(&restore).code, 1);
    one.stop();
    two.stop();
    let refused = one.run(&restore);
    assert!(refused.code == 1 && refused.stderr.contains("--replace"), "{refused:?}");
    let said = one.succeed(&[&restore[..], &["--replace"]].concat());
    assert!(said.contains("unconfirmed") && said.contains("journal.before-restore-"), "{said}");
    // Nobody is there who could confirm.
    one.start(None);
    for name in ["moves", "stays"] {
        wait_for(&one, name, "unconfirmed", "have not said which host owns it: \"two\"");
    }
    let (exit, error) = one.json(&["migrate", "stays", "--to", "b"]);
    assert_eq!((exit != 0, code(&error)), (true, "volume_unavailable"), "{error}");
    let (exit, error) = one.json(&["volume", "create", "moves", "--store", "b", "--size", "1MiB"]);
    assert_eq!((exit != 0, code(&error)), (true, "volume_exists"), "{error}");
    assert_eq!(one.run(&["health"]).code, 10, "somebody who starts daemons is told");
    two.start(None);
    wait_for(&one, "stays", "serving", "");
    wait_for(&one, "moves", "unconfirmed", "another host has it, with generation 1");
    assert!(one.path("a/stays.img").exists() && !one.path("a/moves.img").exists());
    let (exit, error) = one.json(&["volume", "promote", "moves", "--restored"]);
    assert!(exit == 4 && code(&error) == "not_prepared", "{error}");
    assert_eq!(two.json(&["volume", "show", "moves"]).1["state"], "serving");
    let (_, removed) = one.json(&["volume", "remove", "moves"]);
    assert_eq!(removed["image_fate"], "kept", "{removed}");
    // It comes home as any other.
    two.succeed(&["migrate", "moves", "--to", "one:b"]);
    wait_for(&one, "moves", "serving", "");
    // A confirmed volume stays so after the next start.
    one.kill();
    one.start(None);
    wait_for(&one, "stays", "serving", "");
}

#[test]
fn a_host_alone_serves_what_is_there_and_people_say_the_rest() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["volume", "create", "gone", "--store", "a", "--size", "1MiB"]);
    scene.stop();
    let data = scene.path("data").display().to_string();
    std::fs::rename(scene.path("a/gone.img"), scene.path("gone.img")).unwrap();
    // The folder came from a backup as a whole: its list of hosts, if there was one, is as old.
    let said = scene.succeed(&["journal", "restore", &data, "--data-dir", &data]);
    assert!(said.contains("No volume is served automatically"), "{said}");
    scene.start(None);
    wait_for(&scene, "v", "unconfirmed", "the list of hosts may be of another time");
    scene.stop();
    let complete = ["journal", "restore", &data, "--data-dir", &data, "--hosts-complete"];
    scene.succeed(&complete);
    let (_, found) = scene.json(&["journal", "check", &data]);
    assert_eq!(found["volumes"][0]["owner"], "unconfirmed", "{found}");
    scene.start(None);
    wait_for(&scene, "v", "serving", "");
    wait_for(&scene, "gone", "unconfirmed", "its image is not there");
    let (exit, error) = scene.json(&["volume", "promote", "gone", "--restored", "--force"]);
    assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
    std::fs::rename(scene.path("gone.img"), scene.path("a/gone.img")).unwrap();
    wait_for(&scene, "gone", "serving", "");
    let (exit, error) = scene.json(&["volume", "promote", "gone", "--restored"]);
    assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
    // Another image of its name, which a migration has completed, may be the later one.
    scene.stop();
    std::fs::copy(scene.path("a/v.img"), scene.path("b/v.img")).unwrap();
    scene.succeed(&complete);
    scene.start(None);
    wait_for(&scene, "v", "unconfirmed", "another image of it");
    let (exit, error) = scene.json(&["volume", "promote", "v", "--restored"]);
    assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
    scene.succeed(&["volume", "promote", "v", "--restored", "--force"]);
    wait_for(&scene, "v", "serving", "");
    let audit = std::fs::read_to_string(scene.path("data/audit.log")).unwrap();
    assert!(
        audit.lines().any(|line| line.contains("promote") && line.contains("\"restored\":true")),
        "{audit}"
    );
}

#[test]
fn a_host_whose_list_of_hosts_is_lost_serves_nothing_by_itself() {
    let ((mut one, address), (mut two, there)) = (host(), host());
    init(&one, "one");
    let two_is = init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    for name in ["moves", "stays"] {
        one.succeed(&["volume", "create", name, "--store", "a", "--size", "1MiB"]);
    }
    let backup = export(&one, "journal.json");
    one.succeed(&["migrate", "moves", "--to", "two:a"]);
    one.stop();
    // The data folder is lost, the stores are not.
    let data = one.path("data");
    std::fs::rename(&data, one.path("lost")).unwrap();
    std::fs::create_dir(&data).unwrap();
    let said = one.succeed(&["journal", "restore", &backup, "--data-dir", &data.display().to_string()]);
    assert!(said.contains("No volume is served automatically") && said.contains(&two_is), "{said}");
    one.start(None);
    for name in ["moves", "stays"] {
        let volume =
            wait_for(&one, name, "unconfirmed", "is lost, so any host that was in it may have the volume");
        assert!(volume["message"].as_str().unwrap().contains(&two_is), "{volume}");
    }
    assert_eq!(one.run(&["health"]).code, 10);
    // Nobody is let in by what the backup names.
    init(&one, "one");
    assert_eq!(one.json(&["host", "list"]).1.as_array().map(Vec::len), Some(0));
    two.succeed(&["host", "remove", "one", "--force"]);
    let token = two.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    one.succeed(&["host", "join", &there, &token]);
    wait_for(&one, "moves", "unconfirmed", "another host has it, with generation 1");
    wait_for(&one, "stays", "unconfirmed", "promote stays --restored");
    let (exit, error) = one.json(&["volume", "promote", "moves", "--restored"]);
    assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
    one.succeed(&["volume", "remove", "moves"]);
    one.succeed(&["volume", "promote", "stays", "--restored"]);
    wait_for(&one, "stays", "serving", "");
    two.stop();
}

#[test]
fn a_volume_that_came_home_after_the_backup_is_served() {
    let ((mut one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    for name in ["home", "away"] {
        one.succeed(&["volume", "create", name, "--store", "a", "--size", "1MiB"]);
        one.succeed(&["migrate", name, "--to", "two:a", "--serve-here"]);
    }
    let backup = export(&one, "journal.json");
    two.succeed(&["migrate", "home", "--to", "one:a"]);
    one.stop();
    let data = one.path("data").display().to_string();
    one.succeed(&["journal", "restore", &backup, "--data-dir", &data, "--replace"]);
    let (_, found) = one.json(&["journal", "check", &data]);
    assert!(
        found["volumes"].as_array().unwrap().iter().all(|volume| volume["owner"] == "unconfirmed"),
        "{found}"
    );
    one.start(None);
    wait_for(&one, "home", "serving", "");
    wait_for(&one, "away", "forwarding", "");
    assert_eq!(one.run(&["health"]).code, 0);
}

#[test]
fn a_volume_that_grew_after_the_backup_has_all_of_its_bytes() {
    let mut scene = Scene::started();
    for format in ["raw", "qcow2"] {
        scene.succeed(&["volume", "create", format, "--store", "a", "--size", "1MiB", "--format", format]);
    }
    let backup = export(&scene, "journal.json");
    for name in ["raw", "qcow2"] {
        scene.succeed(&["volume", "resize", name, "3MiB"]);
    }
    scene.stop();
    let data = scene.path("data").display().to_string();
    scene.succeed(&["journal", "restore", &backup, "--data-dir", &data, "--replace"]);
    scene.start(None);
    for name in ["raw", "qcow2"] {
        let volume = wait_for(&scene, name, "serving", "");
        assert_eq!(volume["size_bytes"], 3 << 20, "{volume}");
    }
}

#[test]
fn an_order_hears_a_host_that_is_up_before_it_counts_it_as_silent() {
    let ((mut one, address), (mut two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    one.succeed(&["volume", "create", "v", "--store", "a", "--size", "1MiB"]);
    let backup = export(&one, "journal.json");
    one.succeed(&["migrate", "v", "--to", "two:a"]);
    one.stop();
    two.stop();
    // The image comes back from the backup as well.
    std::fs::write(one.path("a/v.img"), vec![0; 1 << 20]).unwrap();
    let data = one.path("data").display().to_string();
    one.succeed(&["journal", "restore", &backup, "--data-dir", &data, "--replace"]);
    one.start(None);
    wait_for(&one, "v", "unconfirmed", "have not said which host owns it");
    two.start(None);
    two.until_served("v");
    // It is between two attempts to reach the other host.
    let (exit, error) = one.json(&["volume", "promote", "v", "--restored"]);
    assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
}

#[test]
fn an_image_that_is_half_made_or_missing_is_not_taken_while_another_host_is_silent() {
    let ((mut one, address), (mut two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    for name in ["half", "gone"] {
        one.succeed(&["volume", "create", name, "--store", "a", "--size", "1MiB"]);
    }
    let backup = export(&one, "journal.json");
    one.stop();
    two.stop();
    std::fs::write(one.path("a/.half.img.partial"), "sterna: half-made\n").unwrap();
    std::fs::remove_file(one.path("a/gone.img")).unwrap();
    let data = one.path("data").display().to_string();
    one.succeed(&["journal", "restore", &backup, "--data-dir", &data, "--replace"]);
    one.start(None);
    let words = "have not said which host owns it: \"two\", and its image is";
    for (name, forced) in [("half", 0), ("gone", 4)] {
        wait_for(&one, name, "unconfirmed", words);
        let (exit, error) = one.json(&["volume", "promote", name, "--restored"]);
        assert_eq!((exit, code(&error)), (4, "not_prepared"), "{error}");
        assert_eq!(one.json(&["volume", "promote", name, "--restored", "--force"]).0, forced);
    }
    // It has come there meanwhile: the order looks again.
    std::fs::write(one.path("a/gone.img"), vec![0; 1 << 20]).unwrap();
    one.succeed(&["volume", "promote", "gone", "--restored"]);
}
