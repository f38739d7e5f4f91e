//! Tests of faults while disks are adopted or released. In the end the VM runs on its disk, and the next command works.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::adoption::{Machine, adopt};
use crate::scene::{Scene, code, wait_until};

const DRIVE: [&str; 2] = ["-drive", "file=IMAGE,if=virtio,format=raw"];

/// Sends a command to QEMU's monitor.
fn tell(scene: &Scene, command: &str, arguments: &Value) -> Value {
    let mut stream = UnixStream::connect(scene.path("m.qmp")).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    lines.next().unwrap().unwrap();
    for (command, arguments) in [("qmp_capabilities", &json!({})), (command, arguments)] {
        writeln!(stream, "{}", json!({ "execute": command, "arguments": arguments })).unwrap();
        let answer = loop {
            let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if answer.get("event").is_none() {
                break answer;
            }
        };
        if command != "qmp_capabilities" {
            return answer["return"].clone();
        }
    }
    unreachable!("the command was sent")
}

fn runs(scene: &Scene) -> bool {
    tell(scene, "query-status", &json!({}))["status"] == "running"
}

fn notes(scene: &Scene) -> Value {
    let text = std::fs::read(scene.path("data/paused.json")).unwrap_or_else(|_| b"{\"paused\":[]}".to_vec());
    serde_json::from_slice::<Value>(&text).unwrap()["paused"].clone()
}

/// Runs a command with a daemon that kills itself at a step, then starts another daemon and checks the result.
fn kill_at(scene: &mut Scene, machine: &Machine, command: &[&str], point: &str) {
    scene.stop();
    scene.start(Some(point));
    scene.run(command);
    scene.wait_for_death();
    scene.start(None);
    wait_until(&format!("no notes are left after {command:?}, {point}"), || notes(scene) == json!([]));
    assert!(runs(scene), "{command:?} {point}");
    let vms = scene.json(&["vm", "list"]).1;
    let is_adopted = vms != json!([]);
    assert_eq!(machine.has_open(&machine.image), !is_adopted, "{command:?} {point}: {vms}");
    // Either way the next command works.
    if is_adopted {
        assert_eq!(vms[0]["state"], "running", "{vms}");
        scene.succeed(&["vm", "release", "m"]);
    } else {
        adopt(scene);
        scene.succeed(&["vm", "release", "m"]);
    }
    assert!(machine.has_open(&machine.image) && runs(scene), "{command:?} {point}");
}

#[test]
fn killed_at_each_step_of_an_adoption_and_of_a_release_the_machine_runs_on_its_disk() {
    let mut scene = Scene::started();
    let Some(machine) = Machine::start(&scene, &DRIVE) else { return };
    let monitor = scene.path("m.qmp").display().to_string();
    let points: Vec<String> = (1..=4)
        .flat_map(|pass| [format!("before-exchange@{pass}"), format!("after-exchange@{pass}")])
        .collect();
    for point in &points {
        kill_at(&mut scene, &machine, &["vm", "adopt", "m", "--qmp", &monitor], point);
    }
    for point in &points {
        adopt(&scene);
        kill_at(&mut scene, &machine, &["vm", "release", "m"], point);
    }
    let before = std::fs::read(&machine.image).unwrap();
    let expected: Vec<u8> = (0..before.len() / 4).flat_map(|number| (number as u32).to_le_bytes()).collect();
    assert!(before == expected, "the image is another one");
}

/// Checks that an adoption is refused without a trace: the VM runs on its file, and the daemon does not know it.
fn check_refused(scene: &Scene, machine: &Machine, file: &Path, expected: &str) {
    let monitor = scene.path("m.qmp");
    let (_, refused) = scene.json(&["vm", "adopt", "m", "--qmp", monitor.to_str().unwrap()]);
    assert_eq!(code(&refused), "vm_unsuitable", "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains(expected), "{refused}");
    assert!(machine.has_open(file) && runs(scene));
    let nodes = tell(scene, "query-named-block-nodes", &json!({}));
    assert_eq!(nodes.as_array().unwrap().len(), 2, "{nodes}");
    for list in [["vm", "list"], ["volume", "list"]] {
        assert_eq!(scene.json(&list).1, json!([]));
    }
}

#[test]
fn a_qemu_that_could_not_connect_to_its_disk_or_open_it_again_is_not_paused_for_that() {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, to run QEMU as another user");
    }
    let mut scene = Scene::started();
    // A daemon leaves the mode of a folder that it has not made.
    scene.stop();
    scene.start(None);
    let words = [&DRIVE[..], &["-runas", "nobody"]].concat();
    let Some(machine) = Machine::start(&scene, &words) else { return };
    check_refused(&scene, &machine, &machine.image, "could not open");
    let mode =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(&machine.image, 0o666);
    mode(&scene.path(""), 0o711);
    mode(&scene.path("run"), 0o700);
    check_refused(&scene, &machine, &machine.image, "cannot connect");
}

#[test]
fn an_image_that_was_renamed_or_replaced_is_not_taken_for_the_one_that_qemu_has() {
    let scene = Scene::started();
    let Some(machine) = Machine::start(&scene, &DRIVE) else { return };
    let aside = scene.path("aside.raw");
    // When it answers, it has opened its image.
    assert!(runs(&scene));
    std::fs::rename(&machine.image, &aside).unwrap();
    check_refused(&scene, &machine, &aside, "does not have the file open");
    std::fs::copy(&aside, &machine.image).unwrap();
    check_refused(&scene, &machine, &aside, "does not have the file open");
    std::fs::rename(&aside, &machine.image).unwrap();
    adopt(&scene);
}

#[test]
fn a_machine_that_is_paused_is_let_run() {
    let scene = Scene::started();
    let Some(_machine) = Machine::start(&scene, &DRIVE) else { return };
    assert_eq!(code(&scene.json(&["vm", "resume", "m"]).1), "vm_not_found");
    adopt(&scene);
    tell(&scene, "stop", &json!({}));
    assert_eq!(scene.json(&["vm", "show", "m"]).1["state"], "paused");
    let resumed = scene.json(&["vm", "resume", "m"]).1;
    assert_eq!(resumed["state"], "running", "{resumed}");
    // A running VM keeps running. A VM that was paused by hand stays paused after the release.
    scene.succeed(&["vm", "resume", "m"]);
    tell(&scene, "stop", &json!({}));
    scene.succeed(&["vm", "release", "m"]);
    assert!(!runs(&scene));
}
