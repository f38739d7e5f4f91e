//! Tests of QEMU's NBD client: with `reconnect-delay` it keeps its disk while the daemon is killed and restarted, and while the
//! volume moves. They need `qemu-img`.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::scene::Scene;

/// Requests of the writer, enough to keep it at work until it is killed.
const REQUESTS: &str = "1000000000";

/// Lets `qemu-img bench` write to the volume `v`.
fn start_writer(scene: &Scene) -> Child {
    start_patient_writer(scene, 120)
}

/// Starts a writer as [`start_writer`], whose requests wait `seconds` for an absent daemon.
fn start_patient_writer(scene: &Scene, reconnect_s: u32) -> Child {
    let socket = scene.path("run/volumes/v.sock");
    let image = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=v,file.reconnect-delay={reconnect_s}",
        socket.display()
    );
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-w", "-c", REQUESTS, "-d", "16", "-s", "4096", "--image-opts", &image]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap_or_else(|error| panic!("qemu-img is needed, from the package qemu-utils: {error}"))
}

/// Writes that the daemon has answered.
fn writes(scene: &Scene) -> u64 {
    scene.json(&["volume", "show", "v"]).1["statistics"]["writes"].as_u64().unwrap_or(0)
}

/// Waits until the writer has made `count` more writes.
fn wait_for_writes(scene: &Scene, before: u64) {
    while writes(scene) < before + 100 {}
}

/// Kills the writer, which must still be at work: the first error would have ended it.
fn finish(mut writer: Child) {
    let ended = writer.try_wait().unwrap();
    // It may have ended by itself.
    let _ = writer.kill();
    let output = writer.wait_with_output().unwrap();
    assert!(ended.is_none(), "{ended:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn qemu_survives_a_killed_and_a_stopped_daemon() {
    let mut scene = Scene::started();
    scene.create_volume();
    let writer = start_writer(&scene);
    wait_for_writes(&scene, 0);
    scene.kill();
    scene.start(None);
    wait_for_writes(&scene, 0);
    scene.stop();
    scene.start(None);
    wait_for_writes(&scene, 0);
    finish(writer);
}

#[test]
fn qemu_survives_a_daemon_that_is_away_for_half_a_minute_with_the_delay_that_we_name() {
    let mut scene = Scene::started();
    scene.create_volume();
    // What documents say, and what adopted disks get.
    let writer = start_patient_writer(&scene, 60);
    wait_for_writes(&scene, 0);
    scene.kill();
    // QEMU tries 15 s after the loss, and then 31 s after it: the time away is what is tested.
    std::thread::sleep(Duration::from_secs(30));
    scene.start(None);
    wait_for_writes(&scene, 0);
    finish(writer);
}

#[test]
fn qemu_writes_on_while_the_volume_moves_there_and_back() {
    let scene = Scene::started();
    scene.create_volume();
    let writer = start_writer(&scene);
    wait_for_writes(&scene, 0);
    for store in ["b", "a"] {
        scene.succeed(&["migrate", "v", "--to", store]);
        wait_for_writes(&scene, writes(&scene));
    }
    finish(writer);
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!((&volume["generation"], &volume["statistics"]["errors"]), (&2.into(), &0.into()), "{volume}");
}
