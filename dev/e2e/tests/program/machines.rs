//! Tests of VMs by the program: added, refused, started on a volume, shown, stopped, and found again after a killed daemon.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::scene::{Scene, code, until};

/// Firmware that finds nothing to boot is a VM that runs.
const DEFINITION: &str = r#"
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "32", "-nodefaults", "-no-user-config", "-display", "none",
        "-qmp", "unix:{qmp},server=on,wait=off", "-device", "virtio-blk-pci,drive=disk", "-blockdev",
        "driver=nbd,node-name=disk,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60"]
    [disks]
    root = "v"
"#;

/// A daemon whose VM `m` ends with the test, however that ends: VMs outlive daemons.
struct Stage {
    scene: Scene,
}

impl std::ops::Deref for Stage {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl std::ops::DerefMut for Stage {
    fn deref_mut(&mut self) -> &mut Scene {
        &mut self.scene
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Ok(monitor) = UnixStream::connect(self.path("run/vms/m.qmp")) else { return };
        if let Ok(qemu) = rustix::net::sockopt::socket_peercred(&monitor) {
            // It may have ended by itself.
            let _ = kill_process(qemu.pid, Signal::KILL);
        }
    }
}

/// Starts a daemon with the volume `v`. Without QEMU it reports the omission and returns `None`.
fn scene() -> Option<Stage> {
    const QEMU: &str = "qemu-system-x86_64";
    if std::process::Command::new(QEMU).arg("--version").output().is_err() {
        omission::machine_lacks(QEMU);
        return None;
    }
    let scene = Scene::started();
    scene.create_volume();
    Some(Stage { scene })
}

fn definition(scene: &Scene, text: &str) -> PathBuf {
    let path = scene.path("vm.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn add(scene: &Scene, text: &str) -> (i32, Value) {
    let path = definition(scene, text);
    scene.json(&["vm", "add", "m", "--definition", path.to_str().unwrap()])
}

fn show(scene: &Scene) -> Value {
    scene.json(&["vm", "show", "m"]).1
}

/// Waits until the VM is in this state.
fn wait_for(scene: &Scene, state: &str) -> Value {
    until(&format!("the VM is {state}"), || Some(show(scene)).filter(|vm| vm["state"] == state))
}

#[test]
fn machine_is_added_started_seen_stopped_and_removed() {
    let Some(scene) = scene() else { return };
    assert_eq!(add(&scene, DEFINITION).1["state"], "stopped");
    assert_eq!(code(&add(&scene, DEFINITION).1), "vm_exists");
    let (status, started) = scene.json(&["vm", "start", "m"]);
    assert_eq!((status, &started["state"]), (0, &"running".into()), "{started}");
    assert!(started["hypervisor"].as_str().unwrap().starts_with("QEMU "), "{started}");
    assert!(scene.succeed(&["vm", "list"]).contains("running"));
    assert_eq!(code(&scene.json(&["vm", "start", "m"]).1), "vm_wrong_state");
    assert_eq!(code(&scene.json(&["vm", "remove", "m"]).1), "vm_wrong_state");
    assert_eq!(code(&scene.json(&["volume", "remove", "v", "--force"]).1), "volume_in_use");
    assert_eq!(scene.json(&["vm", "stop", "m", "--now"]).1["state"], "stopped");
    scene.succeed(&["vm", "remove", "m"]);
    assert_eq!(scene.json(&["vm", "show", "m"]).0, 3);
    scene.succeed(&["volume", "remove", "v"]);
}

#[test]
fn what_could_not_move_or_is_not_there_is_refused_when_it_is_added() {
    let Some(scene) = scene() else { return };
    for (from, to, expected) in [
        ("\"-nodefaults\"", "\"-device\", \"vfio-pci,host=01:00.0\"", "vm_unsuitable"),
        ("\"-nodefaults\"", "\"-cdrom\", \"/srv/seed.iso\"", "vm_unsuitable"),
        ("{qmp}", "{qpm}", "vm_unsuitable"),
        ("root = \"v\"", "root = \"w\"", "volume_not_found"),
    ] {
        let (status, refused) = add(&scene, &DEFINITION.replace(from, to));
        assert_eq!(code(&refused), expected, "{status}: {refused}");
    }
    assert_eq!(scene.json(&["vm", "list"]).1, Value::Array(Vec::new()));
}

#[test]
fn machine_runs_on_while_the_daemon_is_killed_and_is_found_again() {
    let Some(mut scene) = scene() else { return };
    add(&scene, DEFINITION);
    let process = scene.json(&["vm", "start", "m"]).1["process"].clone();
    scene.kill();
    scene.start(None);
    let found = wait_for(&scene, "running");
    assert_eq!(found["process"], process);
    // In order, too: VMs are not the daemon's to end.
    scene.stop();
    scene.start(None);
    assert_eq!(wait_for(&scene, "running")["process"], process);
    scene.succeed(&["vm", "stop", "m", "--now"]);
}

#[test]
fn machine_whose_qemu_is_killed_has_crashed_and_starts_again() {
    let Some(scene) = scene() else { return };
    add(&scene, DEFINITION);
    let process = scene.json(&["vm", "start", "m"]).1["process"].as_u64().unwrap();
    testbed::signal(process.try_into().unwrap(), Signal::KILL).unwrap();
    wait_for(&scene, "crashed");
    assert_eq!(scene.json(&["vm", "start", "m"]).1["state"], "running");
    scene.succeed(&["vm", "stop", "m", "--now"]);
}

#[test]
fn all_disks_of_a_vm_move_to_a_store_and_names_that_clash_are_told_apart() {
    let Some(stage) = scene() else { return };
    let size = (1 << 20).to_string();
    for volume in ["data", "m"] {
        stage.succeed(&["volume", "create", volume, "--store", "a", "--size", &size]);
    }
    let two = DEFINITION
        .replace("\"-qmp\"", "\"-blockdev\", \"driver=nbd,node-name=data,server.type=unix,server.path={disk:data},export={export:data},reconnect-delay=60\", \"-qmp\"")
        .replace("root = \"v\"", "root = \"v\"\n    data = \"data\"");
    assert_eq!(add(&stage, &two).0, 0);
    let stores = |stage: &Stage| {
        ["v", "data", "m"]
            .map(|name| stage.json(&["volume", "show", name]).1["store"].as_str().unwrap().to_owned())
    };
    // The volume of that name is meant where it could be either.
    stage.succeed(&["migrate", "m", "--to", "b"]);
    assert_eq!(stores(&stage), ["a", "a", "b"]);
    let (exit, plans) = stage.json(&["migrate", "vm:m", "--to", "b", "--dry-run"]);
    assert_eq!((exit, plans.as_array().unwrap().len()), (0, 2), "{plans}");
    let (exit, moved) = stage.json(&["migrate", "vm:m", "--to", "b"]);
    let states: Vec<_> = moved.as_array().unwrap().iter().map(|one| one["state"].as_str().unwrap()).collect();
    assert_eq!((exit, states), (0, vec!["moved", "moved"]), "{moved}");
    assert_eq!(stores(&stage), ["b", "b", "b"]);
    assert!(stage.succeed(&["migrate", "vm:m", "--to", "b"]).contains("are at b already"));
    stage.succeed(&["migrate", "volume:m", "--to", "a"]);
    stage.succeed(&["migrate", "vm:m", "--to", "a", "--detach"]);
    for migration in ["m4", "m5"] {
        stage.succeed(&["migration", "watch", migration]);
    }
    assert_eq!(stores(&stage), ["a", "a", "a"]);
    let (exit, error) = stage.json(&["migrate", "vm:v", "--to", "b"]);
    assert_eq!((exit, code(&error)), (3, "vm_not_found"), "{error}");
}
