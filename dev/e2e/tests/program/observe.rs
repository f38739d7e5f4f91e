//! Tests of readiness, and of the log about a migration.

use serde_json::Value;

use crate::scene::Scene;

#[test]
fn a_daemon_that_does_not_serve_a_volume_is_alive_and_not_ready() {
    let mut scene = Scene::started();
    scene.create_volume();
    assert_eq!(scene.succeed(&["health"]), "the daemon is ready\n");
    scene.stop();
    std::fs::remove_file(scene.path("a/v.img")).unwrap();
    scene.start(None);
    let said = scene.run(&["health"]);
    assert_eq!((said.code, said.stdout.starts_with("volume v: ")), (10, true), "{said:?}");
    let (code, readiness) = scene.json(&["health"]);
    assert_eq!((code, &readiness["ready"]), (10, &Value::Bool(false)), "{readiness}");
    assert_eq!(readiness["problems"][0]["part"], "volume", "{readiness}");
    scene.stop();
    assert_eq!(scene.run(&["health"]).code, 7);
}

#[test]
fn a_migration_that_has_ended_is_one_line_of_the_log_with_its_figures() {
    let mut scene = Scene::new();
    scene.start_with(&[("STERNA_LOG", "info"), ("STERNA_LOG_FORMAT", "json")]).unwrap();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    assert!(scene.wait_for_log("a migration has ended"));
    let log = scene.log().unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told: Vec<&Value> = lines.iter().map(|line| &line["fields"]).collect();
    let ended: Vec<_> = told.iter().filter(|told| told["message"] == "a migration has ended").collect();
    assert_eq!(ended.len(), 1, "{log}");
    assert_eq!(ended[0]["migration"], "m0");
    assert_eq!(ended[0]["volumes"], "v");
    assert_eq!((&ended[0]["direction"], &ended[0]["outcome"]), (&"local".into(), &"moved".into()));
    assert!(ended[0]["seconds"].as_f64().unwrap() > 0.0 && ended[0]["gate_closed_ms"].is_f64(), "{log}");
}
