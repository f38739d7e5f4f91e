//! QEMU's own NBD client, with `reconnect-delay`, keeps its disk while the daemon is killed and started again, and
//! while the volume moves. `qemu-img` is what is needed; its absence fails the tests.

use std::process::{Child, Command, Stdio};

use crate::scene::Scene;

/// Requests that the writer makes: enough to be at work while the daemon is killed or the volume moves.
const REQUESTS: &str = "60000";

/// Lets `qemu-img bench` write to the volume `v`.
fn start_writer(scene: &Scene) -> Child {
    let socket = scene.path("run/volumes/v.sock");
    let image = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=v,file.reconnect-delay=30",
        socket.display()
    );
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-w", "-c", REQUESTS, "-d", "16", "-s", "4096", "--image-opts", &image]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap_or_else(|error| panic!("qemu-img is needed, from the package qemu-utils: {error}"))
}

/// Waits until the writer has begun.
fn wait_for_writes(scene: &Scene) {
    while scene.json(&["volume", "show", "v"]).1["statistics"]["writes"].as_u64().unwrap_or(0) < 100 {}
}

fn finish(mut writer: Child) {
    assert!(
        writer.try_wait().unwrap().is_none(),
        "the writer ended before the test was over: make more requests"
    );
    let output = writer.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn qemu_survives_a_killed_and_a_stopped_daemon() {
    let mut scene = Scene::started();
    scene.create_volume();
    let writer = start_writer(&scene);
    wait_for_writes(&scene);
    scene.kill();
    scene.start(None);
    wait_for_writes(&scene);
    scene.stop();
    scene.start(None);
    wait_for_writes(&scene);
    finish(writer);
}

#[test]
fn qemu_writes_on_while_the_volume_moves_there_and_back() {
    let scene = Scene::started();
    scene.create_volume();
    let writer = start_writer(&scene);
    wait_for_writes(&scene);
    for store in ["b", "a"] {
        scene.succeed(&["migrate", "v", "--to", store]);
    }
    finish(writer);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["generation"], &volume["statistics"]["errors"]), (&2.into(), &0.into()), "{volume}");
}
