//! Tests of `sterna journal` with and without a daemon, for intact, torn and damaged journals.

use std::os::unix::fs::FileExt as _;

use serde_json::Value;

use crate::scene::{Outcome, Scene, code};

fn check(scene: &Scene, path: &str) -> (i32, Value) {
    scene.json(&["journal", "check", path])
}

/// A daemon whose volume `v` has gone to store `b`, and its data folder.
fn moved() -> (Scene, String) {
    let scene = Scene::started();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let data = scene.path("data").display().to_string();
    (scene, data)
}

#[test]
fn an_intact_journal_is_told_beside_its_daemon_and_without_it() {
    let (mut scene, data) = moved();
    let (exit, beside) = check(&scene, &data);
    assert_eq!((exit, &beside["intact"]), (0, &true.into()), "{beside}");
    let volume = &beside["volumes"][0];
    assert_eq!(
        (&volume["name"], &volume["owner"], &volume["store"]),
        (&"v".into(), &"here".into(), &"b".into())
    );
    assert_eq!(volume["generation"], 1, "{beside}");
    assert!(beside["entries"].as_u64().unwrap() > 4 && beside["migrations"] == Value::Array(Vec::new()));
    let said = scene.succeed(&["journal", "check", &data]);
    assert!(said.contains("journal is intact") && said.contains("b/v.img"), "{said}");
    scene.kill();
    let (exit, alone) = check(&scene, &data);
    assert_eq!((exit, &alone["volumes"]), (0, &beside["volumes"]), "{alone}");
    // By the configuration, as the daemon finds it.
    let config = scene.path("sterna.toml").display().to_string();
    let (exit, configured) = scene.json(&["journal", "check", "--config", &config]);
    assert_eq!((exit, &configured["path"]), (0, &alone["path"]), "{configured}");
    // Looking at it has changed nothing.
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "b");
}

#[test]
fn a_journal_that_is_written_to_is_never_taken_for_a_damaged_one() {
    let scene = Scene::started();
    let data = scene.path("data").display().to_string();
    let mut orders = (0..8)
        .map(|number| {
            let name = format!("v{number}");
            let order = ["volume", "create", &name, "--store", "a", "--size", "1MiB"];
            scene.command(&order).stdout(std::process::Stdio::null()).spawn().unwrap()
        })
        .collect::<Vec<_>>();
    let mut looks = 0;
    while orders.iter_mut().any(|order| order.try_wait().unwrap().is_none()) || looks < 20 {
        let (exit, found) = check(&scene, &data);
        assert_eq!(exit, 0, "{found}");
        looks += 1;
    }
    let (_, found) = check(&scene, &data);
    assert_eq!(found["volumes"].as_array().unwrap().len(), 8, "{found}");
}

#[test]
fn what_a_daemon_would_refuse_is_refused_and_told_up_to_there() {
    let (mut scene, data) = moved();
    scene.kill();
    let file = std::fs::File::options().read(true).write(true).open(scene.path("data/journal")).unwrap();
    let (_, sound) = check(&scene, &data);
    let end = sound["end_bytes"].as_u64().unwrap();
    // A commit that was cut off is no damage.
    file.write_all_at(&[9, 0, 0, 0, 1, 2, 3], end).unwrap();
    let (exit, torn) = check(&scene, &data);
    assert_eq!((exit, &torn["torn_bytes"], &torn["entries"]), (0, &7.into(), &sound["entries"]), "{torn}");
    assert!(scene.succeed(&["journal", "check", &data]).contains("which nothing relies on"));
    // The damaged record was acknowledged, and later records follow it.
    let mut byte = [0];
    file.read_exact_at(&mut byte, end / 2).unwrap();
    file.write_all_at(&[!byte[0]], end / 2).unwrap();
    let Outcome { code, stdout, .. } = scene.run(&["journal", "check", &data]);
    assert!(code == 1 && stdout.contains("is damaged at byte") && stdout.contains("before that"), "{stdout}");
    let Outcome { code, stdout, stderr, .. } = scene.run(&["journal", "export", &data]);
    let exported: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &exported["examination"]["intact"]), (1, &false.into()), "{exported}");
    assert!(stderr.contains("is damaged at byte"), "{stderr}");
    scene.start(None);
    assert!(scene.ensure_alive().is_err(), "a daemon goes on with a journal that is said to be damaged");
}

#[test]
fn an_export_has_every_record_and_what_they_come_to() {
    let (scene, data) = moved();
    let exported: Value = serde_json::from_str(&scene.succeed(&["journal", "export", &data])).unwrap();
    let records: Vec<&str> = exported["entries"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|entry| entry["records"].as_array().unwrap())
        .map(|record| record["record"].as_str().unwrap())
        .collect();
    let expected = [
        "snapshot",
        "volume-added",
        "migration-started",
        "target-prepared",
        "released",
        "owned",
        "migration-ended",
    ];
    assert!(expected.iter().all(|name| records.contains(name)), "{records:?}");
    assert_eq!(exported["state"]["volumes"][0]["image"]["store"], "b");
    assert_eq!(exported["state"]["migrations"][0]["stage"], "ended");
    assert_eq!(exported["document"], "sterna-journal");
}

#[test]
fn what_is_no_journal_has_codes_of_its_own() {
    let scene = Scene::new();
    let folder = scene.path("a").display().to_string();
    let (exit, refused) = check(&scene, &folder);
    assert_eq!((exit, code(&refused)), (3, "journal_not_found"), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("sterna journal check PATH"), "{refused}");
    std::fs::create_dir(scene.path("a/journal")).unwrap();
    let (exit, refused) = check(&scene, &folder);
    assert_eq!((exit, code(&refused)), (1, "journal_unreadable"), "{refused}");
    let file = scene.path("b/other");
    std::fs::write(&file, b"#!/bin/sh").unwrap();
    let (exit, found) = check(&scene, &file.display().to_string());
    assert_eq!((exit, &found["intact"]), (1, &false.into()), "{found}");
}
