//! Volumes in the exports of other NBD servers, which are volumes of a second daemon here.

use crate::scene::{DISK_BYTES, Scene, code, stop_and_verify};

/// The former content of the export.
const DIRT: u8 = 0xD1;

/// A scene with the store `r`, and the scene of the daemon that serves it: the volume `v` there, full of dirt.
fn scenes() -> (Scene, Scene) {
    let server = Scene::started();
    let image = server.path("dirt");
    std::fs::write(&image, vec![DIRT; usize::try_from(DISK_BYTES).unwrap()]).unwrap();
    server.succeed(&["volume", "create", "v", "--store", "a", "--image", &image.display().to_string()]);
    let scene = Scene::new();
    scene.configure(&format!("[stores.r]\nnbd = '{}'\n", uri(&server)));
    (scene, server)
}

fn uri(server: &Scene) -> String {
    server.json(&["volume", "show", "v"]).1["uri"].as_str().unwrap().to_owned()
}

#[test]
fn volume_moves_to_another_server_that_held_something_else_and_back() {
    let (mut scene, server) = scenes();
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "r"]);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["kind"], &volume["image"]), (&"nbd".into(), &uri(&server).into()));
    scene.kill();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "r");
    let (_, back) = scene.json(&["migrate", "v", "--to", "b"]);
    assert_eq!(back["state"], "moved", "{back}");
    assert!(back["message"].as_str().unwrap().contains("still holds the old copy"), "{back}");
    stop_and_verify(guest);
    // The old copy there is complete, and is not served by mistake.
    let at_last = std::fs::read(scene.path("b/v.img")).unwrap();
    assert_eq!(at_last.len() as u64, DISK_BYTES);
    scene.stop();
    scene.configure("");
    scene.start(None);
    let (exit, refused) = scene.json(&["volume", "add", "w", "--nbd", &uri(&server)]);
    assert_eq!((exit, code(&refused)), (4, "place_fenced"), "{refused}");
    scene.succeed(&["volume", "add", "w", "--nbd", &uri(&server), "--fenced", "--read-only"]);
    scene.succeed(&["volume", "remove", "w"]);
}

#[test]
fn killed_on_the_way_to_another_server_the_volume_is_in_one_place() {
    for (point, ends_at) in [
        ("after-started", "a"),
        ("after-prepared", "a"),
        ("before-released", "a"),
        ("after-released", "r"),
        ("after-owned", "r"),
        ("before-ended", "r"),
    ] {
        let (mut scene, server) = scenes();
        scene.start(Some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        scene.run(&["migrate", "v", "--to", "r", "--detach"]);
        scene.wait_for_death();
        scene.start(None);
        assert_eq!(scene.store_of_volume(), ends_at, "{point}");
        let next = if ends_at == "a" { "r" } else { "b" };
        scene.succeed(&["migrate", "v", "--to", next]);
        stop_and_verify(guest);
        drop(server);
    }
}

#[test]
fn server_that_is_not_there_is_named_and_nothing_is_begun() {
    let mut scene = Scene::new();
    scene.configure("[stores.r]\nnbd = 'nbd+unix:///v?socket=/nonexistent/socket'\n");
    scene.start(None);
    scene.create_volume();
    let (exit, refused) = scene.json(&["migrate", "v", "--to", "r"]);
    assert_eq!((exit, code(&refused)), (1, "storage_failed"), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("/nonexistent/socket"), "{refused}");
    assert_eq!(scene.store_of_volume(), "a");
    stop_and_verify(scene.start_guest());
}
