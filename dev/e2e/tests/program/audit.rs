//! Tests of the audit log: orders that were carried out, refused, malformed and abandoned, without secrets.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use e2e::http::{ask_api, request};
use serde_json::{Value, json};

use crate::hosts::{host, init, wait_connected};
use crate::scene::{Scene, code, until, wait_until};

/// Returns the log once it has `count` matching entries.
fn entries(scene: &Scene, is_looked_for: impl Fn(&Value) -> bool, count: usize) -> Vec<Value> {
    until("the audit log has the entries", || {
        // The first entry creates the file.
        let text = std::fs::read_to_string(scene.path("data/audit.log")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let found: Vec<Value> = lines.filter(&is_looked_for).collect();
        (found.len() >= count).then_some(found)
    })
}

/// Sends an order to the API; returns the status of the answer.
fn send(scene: &Scene, method: &str, path: &str, body: &str) -> u16 {
    let order = request(&format!("{method} {path} HTTP/1.1\r\nHost: sterna"), body);
    ask_api(scene, order.as_bytes()).unwrap().status
}

#[test]
fn orders_are_written_down_with_who_gave_them_and_what_came_of_them() {
    let mut scene = Scene::started();
    let made = scene.command(&["volume", "create", "v", "--size", "8MiB", "--store", "a"]).spawn().unwrap();
    let process = made.id();
    assert!(made.wait_with_output().unwrap().status.success());
    assert_eq!(scene.run(&["volume", "create", "v", "--size", "8MiB", "--store", "a"]).code, 4);
    scene.succeed(&["volume", "list"]);
    assert_eq!(send(&scene, "POST", "/v1/volumes", "{\"name\": "), 400);
    assert_eq!(send(&scene, "POST", "/v1/nothing?force=true&token=x", ""), 404);
    assert_eq!(send(&scene, "POST", "/v1/volumes/v/promote", "{\"ticket\":\"hush\",\"force\":true}"), 409);
    assert_eq!(send(&scene, "DELETE", "/v1/volumes/v?delete_image=true", ""), 200);

    let found = entries(&scene, |_| true, 6);
    let told: Vec<_> = found.iter().map(|e| (&e["order"], &e["path"], &e["status"], &e["outcome"])).collect();
    let expected = [
        ("POST", "/v1/volumes", 201, "done"),
        ("POST", "/v1/volumes", 409, "volume_exists"),
        ("POST", "/v1/volumes", 400, "invalid_request"),
        ("POST", "/v1/nothing", 404, "route_not_found"),
        ("POST", "/v1/volumes/v/promote", 409, "not_prepared"),
        ("DELETE", "/v1/volumes/v", 200, "done"),
    ];
    let expected: Vec<_> = expected.map(|(o, p, s, w)| (json!(o), json!(p), json!(s), json!(w))).into();
    assert_eq!(told, expected.iter().map(|(o, p, s, w)| (o, p, s, w)).collect::<Vec<_>>());

    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    assert_eq!(found[0]["by"], json!({"uid": user, "gid": group, "pid": process}));
    assert_eq!(found[2]["by"]["pid"], std::process::id());
    let source = json!({"kind": "create", "size_bytes": 8 << 20, "store": "a"});
    assert_eq!((&found[0]["details"]["name"], &found[0]["details"]["source"]), (&json!("v"), &source));
    assert_eq!(found[3]["details"], json!({"force": "true"}));
    assert_eq!(found[4]["details"], json!({"force": true}));
    assert_eq!(found[5]["details"], json!({"delete_image": "true"}));
    assert!(found.iter().all(|e| e["seconds"].as_f64().unwrap() >= 0.0 && e["time_unix_ms"].is_u64()));
    let mode = std::fs::metadata(scene.path("data/audit.log")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // The last order is in the log when the daemon has ended, and later orders follow it.
    send(&scene, "DELETE", "/v1/volumes/last", "");
    scene.stop();
    let whole = std::fs::read_to_string(scene.path("data/audit.log")).unwrap();
    assert!(whole.lines().last().unwrap().contains("/v1/volumes/last"), "{whole}");
    scene.start(None);
    send(&scene, "DELETE", "/v1/volumes/after", "");
    assert_eq!(entries(&scene, |_| true, 8)[7]["path"], "/v1/volumes/after");
}

#[test]
fn an_order_whose_client_does_not_wait_is_written_down() {
    let scene = Scene::started();
    let body = "{\"name\":\"left\",\"source\":{\"kind\":\"create\",\"size_bytes\":8388608,\"store\":\"a\"}}";
    // A server that meets the end of a connection together with its request may leave both: then there was no order.
    until("the order is begun", || {
        let mut stream = UnixStream::connect(scene.path("run/api.sock")).unwrap();
        stream.write_all(request("POST /v1/volumes HTTP/1.1\r\nHost: sterna", body).as_bytes()).unwrap();
        drop(stream);
        let text = std::fs::read_to_string(scene.path("data/audit.log")).unwrap_or_default();
        text.contains("\"left\"").then_some(())
    });
    let found = entries(&scene, |entry| entry["details"]["name"] == "left", 1);
    assert!(["done", "unanswered"].contains(&found[0]["outcome"].as_str().unwrap()), "{}", found[0]);
}

#[test]
fn what_other_hosts_do_is_written_down_and_no_log_has_an_invitation() {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    let id_of_two = init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite"]);
    let token = invitation["token"].as_str().unwrap();
    // A place where a user may put it by mistake.
    assert_ne!(two.run(&["host", "remove", token]).code, 0);
    assert_eq!(send(&two, "POST", &format!("/v1/{token}"), ""), 404);
    assert_eq!(two.json(&["vm", "start", token]).0, 3);
    two.succeed(&["host", "join", &address, token]);
    wait_connected(&one, "two");
    wait_connected(&two, "one");

    let joined = entries(&one, |entry| entry["order"] == "join", 1);
    assert_eq!(joined[0]["by"], json!({"host": id_of_two}));
    assert_eq!(joined[0]["details"], json!({"name": "two", "allow_machines": false}));
    let ordered = entries(&two, |entry| entry["path"] == "/v1/hosts", 1);
    assert_eq!(ordered[0]["details"], json!({"address": address}));

    // The target accepts only one of these offers.
    two.create_volume();
    let (exit, refused) = two.json(&["migrate", "v", "--to", "one:nowhere"]);
    assert!(exit != 0, "{refused}");
    two.succeed(&["migrate", "v", "--to", "one:a"]);
    let offers = entries(&one, |entry| entry["order"] == "offer", 1);
    let taken = offers.iter().find(|offer| offer["outcome"] == "done").unwrap();
    assert_eq!((&taken["by"], &taken["details"]["store"]), (&json!({"host": id_of_two}), &json!("a")));
    assert_eq!(taken["details"]["volumes"], json!(["v"]));
    assert!(offers.iter().all(|offer| offer["outcome"] == "done" || offer["details"]["store"] == "nowhere"));

    let secret = token.rsplit('-').next().unwrap();
    for scene in [&one, &two] {
        let text = std::fs::read_to_string(scene.path("data/audit.log")).unwrap();
        assert!(!text.contains(secret) && !text.contains("sterna-invitation"), "{text}");
    }
}

#[test]
fn a_full_disk_keeps_no_order_waiting_and_is_said() {
    let mut scene = Scene::new();
    std::fs::create_dir_all(scene.path("data")).unwrap();
    std::os::unix::fs::symlink("/dev/full", scene.path("data/audit.log")).unwrap();
    scene.start(None);
    scene.create_volume();
    let (exit, error) = scene.json(&["volume", "create", "v", "--size", "8MiB", "--store", "a"]);
    assert_eq!((exit, code(&error)), (4, "volume_exists"));
    assert!(scene.wait_for_log("cannot write the audit log"));
    wait_until("two entries are lost", || {
        scene.succeed(&["metrics"]).contains("\nsterna_audit_lost_total 2\n")
    });
    std::fs::remove_file(scene.path("data/audit.log")).unwrap();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    assert_eq!(entries(&scene, |_| true, 1)[0]["path"], "/v1/volumes/v/migrate");
    assert!(scene.wait_for_log("it lacks entries"));
}
