//! Tests of bad input: it gets an exit code, a code in JSON and a message with advice, and changes nothing.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::process::Command;

use e2e::http::{ask_api, request};

use crate::scene::{Scene, code, outcome_of, program, read_at};

/// Runs a command that must be refused with this exit code, this code in JSON, and these words.
fn check(scene: &Scene, arguments: &[&str], expected: (i32, &str), words: &str) {
    let (exit, value) = scene.json(arguments);
    assert_eq!((exit, code(&value)), expected, "{arguments:?}: {value}");
    let message = value["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{arguments:?}: {message}");
    let outcome = scene.run(arguments);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (expected.0, ""));
    // A busy machine may have been waited for before.
    assert!(outcome.stderr.ends_with(&format!("sterna: {message}\n")), "{}", outcome.stderr);
}

#[test]
fn what_is_named_and_not_there_is_not_found() {
    let scene = Scene::started();
    let not_found = |what: &'static str| (3, what);
    for command in [&["migrate", "v", "--to", "b"][..], &["migrate", "v", "--to", "b", "--dry-run"]] {
        let words = "there is no volume and no VM \"v\"; see: sterna volume list, sterna vm list";
        check(&scene, command, not_found("volume_not_found"), words);
    }
    for command in [&["volume", "show", "v"][..], &["volume", "remove", "v"]] {
        check(
            &scene,
            command,
            not_found("volume_not_found"),
            "there is no volume \"v\"; see: sterna volume list",
        );
    }
    check(&scene, &["migration", "show", "m0"], not_found("migration_not_found"), "sterna migration list");
    check(
        &scene,
        &["migration", "cancel", "../x"],
        not_found("migration_not_found"),
        "no migration \"../x\"",
    );
    check(&scene, &["migration", "watch", "7"], not_found("migration_not_found"), "no migration \"7\"");
    scene.create_volume();
    check(
        &scene,
        &["migrate", "v", "--to", "c"],
        not_found("store_not_found"),
        "no store \"c\"; there are: a, b",
    );
    let create = ["volume", "create", "w", "--size", "1MiB", "--store", "c"];
    check(&scene, &create, not_found("store_not_found"), "there are: a, b");
    check(&scene, &["volume", "add", "w", "--image", "/no/such"], not_found("image_not_found"), "/no/such");
    let create = ["volume", "create", "w", "--store", "a", "--image", "/no/such"];
    check(&scene, &create, not_found("image_not_found"), "/no/such");
    assert_eq!(scene.images("a"), ["v.img"]);
}

#[test]
fn volume_that_cannot_be_made_is_refused_and_leaves_nothing() {
    let scene = Scene::started();
    scene.create_volume();
    let create =
        |name: &'static str, size: &'static str| ["volume", "create", name, "--store", "a", "--size", size];
    check(&scene, &create("v", "1MiB"), (4, "volume_exists"), "choose another name, or remove it first");
    for name in ["../v", ".v", "a/b", "a b"] {
        check(&scene, &create(name, "1MiB"), (2, "invalid_request"), "cannot be the name of a volume");
    }
    check(&scene, &create("w", "5000"), (2, "invalid_request"), "the next one is 5120");
    check(&scene, &create("w", "9999PiB"), (4, "target_too_small"), "no file can have");
    let unnamed = ["volume", "create", "w", "--size", "1MiB"];
    check(&scene, &unnamed, (2, "invalid_request"), "name one of the stores a, b");
    let long = "x".repeat(64);
    let scene_path = scene.path("run/volumes").display().to_string().len();
    // The longest path of a socket has 107 bytes.
    if scene_path + "/.sock".len() + long.len() > 107 {
        let create = ["volume", "create", &long, "--store", "a", "--size", "1MiB"];
        check(&scene, &create, (2, "invalid_request"), "choose a folder with a shorter path");
    }
    std::fs::write(scene.path("a/w.img"), b"somebody's").unwrap();
    check(&scene, &create("w", "1MiB"), (4, "target_exists"), "w.img exists already; move it away");
    assert_eq!(std::fs::read(scene.path("a/w.img")).unwrap(), b"somebody's");
    assert_eq!(scene.images("a"), ["v.img", "w.img"]);
}

#[test]
fn image_that_cannot_be_served_is_refused_and_unchanged() {
    let scene = Scene::started();
    let path = |name: &str| scene.path(name).display().to_string();
    std::fs::write(scene.path("odd.raw"), [7; 1000]).unwrap();
    std::fs::write(scene.path("empty.raw"), []).unwrap();
    std::fs::write(scene.path("disk.qcow2"), [&b"QFI\xfb"[..], &[0; 65532]].concat()).unwrap();
    std::fs::write(scene.path("disk.vmdk"), [&b"KDMV"[..], &[0; 65532]].concat()).unwrap();
    std::fs::write(scene.path("raw"), [7; 8192]).unwrap();
    let add = |image: &str| ["volume".to_owned(), "add".into(), "w".into(), "--image".into(), path(image)];
    for (image, expected, words) in [
        ("odd.raw", (4, "image_unsuitable"), "truncate -s %512"),
        ("empty.raw", (4, "image_unsuitable"), "it is empty"),
        ("disk.qcow2", (4, "image_unsuitable"), "cannot be served: "),
        ("disk.vmdk", (4, "image_unsuitable"), "qemu-img convert -O qcow2"),
        ("a", (4, "image_unsuitable"), "neither a regular file nor"),
        ("raw/below", (3, "image_not_found"), "does not exist"),
    ] {
        let arguments = add(image);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check(&scene, &arguments, expected, words);
    }
    let small = ["volume", "create", "w", "--store", "a", "--size", "4096", "--image", &path("raw")];
    check(&scene, &small, (4, "target_too_small"), "give a larger --size, or none");
    let qcow2 = ["volume", "create", "w", "--store", "a", "--image", &path("disk.qcow2")];
    check(&scene, &qcow2, (4, "image_unsuitable"), "qcow2");
    // One file is served once.
    scene.succeed(&["volume", "add", "v", "--image", &path("raw")]);
    check(
        &scene,
        &["volume", "add", "w", "--image", &path("raw")],
        (4, "image_in_use"),
        "is the volume \"v\"",
    );
    assert!(scene.images("a").is_empty());
}

#[test]
fn migration_that_cannot_work_is_refused_before_anything_is_made() {
    let scene = Scene::started();
    scene.create_volume();
    check(&scene, &["migrate", "v", "--to", "a"], (4, "same_store"), "choose another one");
    std::fs::write(scene.path("b/v.img"), b"somebody's").unwrap();
    check(&scene, &["migrate", "v", "--to", "b"], (4, "target_exists"), "b/v.img exists already");
    assert_eq!(std::fs::read(scene.path("b/v.img")).unwrap(), b"somebody's");
    std::fs::remove_file(scene.path("b/v.img")).unwrap();
    std::fs::rename(scene.path("b"), scene.path("unmounted")).unwrap();
    check(&scene, &["migrate", "v", "--to", "b"], (1, "storage_failed"), "create it, or mount its disk");
    std::fs::rename(scene.path("unmounted"), scene.path("b")).unwrap();
    assert_eq!(scene.json(&["migration", "list"]).1.as_array().unwrap().len(), 0);
    scene.succeed(&["migrate", "v", "--to", "b"]);
    check(&scene, &["migration", "cancel", "m0"], (4, "not_migrating"), "migration m0 has ended");
}

#[test]
fn volume_that_is_being_migrated_is_neither_migrated_nor_removed() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    check(&scene, &["migrate", "v", "--to", "b"], (4, "already_migrating"), "sterna migration cancel m0");
    check(&scene, &["volume", "remove", "v"], (4, "already_migrating"), "sterna migration cancel m0");
    check(&scene, &["volume", "remove", "v", "--force"], (4, "already_migrating"), "being migrated (m0)");
    scene.succeed(&["migration", "cancel", "m0"]);
    assert_eq!(scene.run(&["migration", "watch", "m0"]).code, 6);
    assert_eq!((scene.images("a"), scene.images("b")), (vec!["v.img".to_owned()], vec![]));
    check(&scene, &["volume", "remove", "v"], (4, "volume_in_use"), "disconnect it with --force");
    crate::scene::stop_and_verify(guest);
}

#[test]
fn removing_deletes_what_was_made_and_leaves_what_was_somebodys() {
    let scene = Scene::started();
    let raw = scene.path("raw");
    std::fs::write(&raw, [7; 8192]).unwrap();
    scene.succeed(&["volume", "add", "w", "--image", &raw.display().to_string()]);
    let (_, removed) = scene.json(&["volume", "remove", "w"]);
    assert_eq!(removed["image_fate"], "kept");
    assert_eq!(read_at(&raw, 0, 8192), [7; 8192]);

    scene.create_volume();
    let _client = scene.connect();
    assert_eq!(scene.run(&["volume", "remove", "v"]).code, 4);
    let (_, removed) = scene.json(&["volume", "remove", "v", "--force"]);
    assert_eq!(removed["image_fate"], "deleted");
    assert!(scene.images("a").is_empty());
    assert!(!scene.path("run/volumes/v.sock").exists());

    scene.create_volume();
    let (_, removed) = scene.json(&["volume", "remove", "v", "--keep-image"]);
    assert_eq!((&removed["image_fate"], scene.images("a")), (&"kept".into(), vec!["v.img".to_owned()]));
    scene.succeed(&["volume", "add", "v", "--image", removed["image"].as_str().unwrap()]);
}

#[test]
fn image_is_copied_in_with_its_holes() {
    let scene = Scene::started();
    let raw = scene.path("raw");
    std::fs::File::create(&raw).unwrap().set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::OpenOptions::new().write(true).open(&raw).unwrap(),
        b"marker",
        40 << 20,
    )
    .unwrap();
    let create = ["volume", "create", "v", "--store", "a", "--size", "80MiB", "--image"];
    scene.succeed(&[&create[..], &[&raw.display().to_string()]].concat());
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(volume["size_bytes"], 80 << 20);
    assert!(volume["allocated_bytes"].as_u64().unwrap() < 1 << 20, "{volume}");
    assert_eq!(read_at(&scene.path("a/v.img"), 40 << 20, 6), b"marker");
}

#[test]
fn wrong_command_lines_and_absent_daemons_have_codes_of_their_own() {
    let scene = Scene::new();
    for arguments in
        [&["frobnicate"][..], &["volume", "create", "v"], &["volume", "create", "v", "--size", "4Gib"]]
    {
        assert_eq!(scene.run(arguments).code, 2, "{arguments:?}");
        let (exit, error) = scene.json(arguments);
        assert_eq!((exit, code(&error)), (2, "invalid_command_line"), "{arguments:?}");
    }
    check(&scene, &["store", "list"], (7, "daemon_unreachable"), "no daemon answers at unix:");
    let mut command = Command::new(program());
    command.args(["--host", "tcp:1.2.3.4", "store", "list"]);
    assert_eq!(outcome_of(command).code, 2);
}

#[test]
fn typo_in_the_configuration_names_the_key_and_the_nearest_valid_one() {
    let scene = Scene::new();
    scene.configure("[limits]\nmirror_wait_max = 3\n");
    let config = scene.path("sterna.toml").display().to_string();
    check(
        &scene,
        &["serve", "--config", &config],
        (2, "invalid_configuration"),
        "unknown key \"limits.mirror_wait_max\"; did you mean \"mirror_wait_max_ms\"?",
    );
    check(
        &scene,
        &["serve", "--config", "/no/such"],
        (2, "invalid_configuration"),
        "/no/such cannot be read",
    );
}

#[test]
fn a_path_that_lacks_the_method_says_which_it_has() {
    let scene = Scene::started();
    let answer = ask_api(&scene, request("PUT /v1/volumes HTTP/1.1\r\nHost: x", "").as_bytes()).unwrap().text;
    let head = answer.to_lowercase();
    assert!(head.starts_with("http/1.1 405 ") && head.contains("\r\nallow: get,head,post\r\n"), "{answer}");
    assert!(answer.contains("method_not_allowed") && answer.contains("/v1/volumes"), "{answer}");
}

#[test]
fn garbage_on_the_api_gets_an_error_and_harms_nobody() {
    let scene = Scene::started();
    let post = |path: &str, body: &str| request(&format!("POST {path} HTTP/1.1\r\nHost: x"), body);
    let cases = [
        (post("/v1/volumes", "{"), 400, "invalid_request"),
        (post("/v1/volumes", r#"{"name":"v","source":{"kind":"steal"}}"#), 400, "invalid_request"),
        (post("/v1/volumes/v/migrate", r#"{"to":"b","fast":true}"#), 400, "invalid_request"),
        (post("/v1/volumes", &"x".repeat(70 << 10)), 413, "request_too_large"),
        (
            "PATCH /v1/migrations/m0 HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
                .into(),
            400,
            "bandwidth_bytes_per_second",
        ),
        (post("/v1/host", ""), 405, "method_not_allowed"),
        (post("/v2/volumes", ""), 404, "route_not_found"),
        (
            "DELETE /v1/volumes/v?force=perhaps HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(),
            400,
            "invalid_request",
        ),
        (
            "GET /v1/volumes/%2e%2e%2fx HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(),
            404,
            "volume_not_found",
        ),
    ];
    for (request, status, code) in cases {
        let answer = ask_api(&scene, request.as_bytes()).unwrap();
        assert!(answer.status == status && answer.body().contains(code), "{request:.60}: {answer:?}");
    }
    let bad_path = b"GET /v1/volumes/%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert!(ask_api(&scene, bad_path).unwrap().body().contains("invalid_request"));
    for garbage in [&b"\0\xff\x16\x03\x01"[..], b"GET", b"NBDMAGICIHAVEOPT", &[b'A'; 200_000]] {
        let mut stream = UnixStream::connect(scene.path("run/api.sock")).unwrap();
        let _ = stream.write_all(garbage);
        drop(stream);
    }
    scene.succeed(&["volume", "list"]);
}
