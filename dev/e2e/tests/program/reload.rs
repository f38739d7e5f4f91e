//! Tests of SIGHUP: the parts of the configuration that change while the daemon serves.

use rustix::process::Signal;

use crate::scene::{Scene, stop_and_verify};

#[test]
fn stores_and_limits_are_read_again_and_what_takes_a_restart_is_named() {
    let mut scene = Scene::new();
    std::fs::create_dir(scene.path("c")).unwrap();
    let store = format!("[stores.c]\npath = '{}'\n", scene.path("c").display());
    scene.configure("[limits]\nmigrations_per_host = 1\n");
    scene.start(None);
    for name in ["v", "w"] {
        scene.succeed(&["volume", "create", name, "--store", "a", "--size", "32MiB"]);
    }
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "16KiB/s", "--detach"]);
    scene.succeed(&["migrate", "w", "--to", "b", "--detach"]);
    assert_eq!(scene.json(&["migration", "show", "m1"]).1["state"], "queued");

    scene.configure(&format!("[limits]\nmigrations_per_host = 2\n{store}"));
    scene.signal(Signal::HUP).unwrap();
    assert!(scene.wait_for_log("the store can be used store=\"c\""));
    // Its turn has come.
    scene.succeed(&["migration", "watch", "m1"]);
    scene.succeed(&["migrate", "w", "--to", "c"]);
    assert_eq!(scene.json(&["volume", "show", "w"]).1["store"], "c");
    assert_eq!(scene.json(&["store", "list"]).1.as_array().unwrap().len(), 3);

    // Once more, with another one, and something that cannot change.
    std::fs::create_dir(scene.path("d")).unwrap();
    let another = format!("[stores.d]\npath = '{}'\n", scene.path("d").display());
    scene.configure(&format!("{another}[nbd]\nconnections_max = 3\n"));
    scene.signal(Signal::HUP).unwrap();
    assert!(scene.wait_for_log("the store can be used store=\"d\""));
    assert!(scene.wait_for_log("this change needs a restart"));
    let log = scene.log().unwrap();
    let named = log.lines().rfind(|line| line.contains("this change needs a restart")).unwrap();
    assert!(named.contains("[nbd], [stores.c]"), "a store stays until a restart: {named}");
    scene.succeed(&["migrate", "w", "--to", "d"]);

    // A wrong configuration changes nothing.
    scene.configure("[limits]\nmigrations_per_host = 'many'\n");
    scene.signal(Signal::HUP).unwrap();
    assert!(scene.wait_for_log("cannot reload the configuration"));
    scene.succeed(&["migrate", "w", "--to", "c"]);
    scene.succeed(&["migration", "cancel", "m0"]);
    stop_and_verify(guest);
}
