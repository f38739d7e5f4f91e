//! Tests of disks of VMs that were started by hand: adopted, moved, and released as plain files.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::scene::{DEADLINE, DISK_BYTES, Scene, code};

const QEMU: &str = "qemu-system-x86_64";

/// A VM that was started by hand; it ends with the test.
pub(crate) struct Machine {
    pub(crate) qemu: Child,
    pub(crate) image: PathBuf,
}

impl Machine {
    /// Starts a VM on a raw image. `words` are the options that attach it, with `IMAGE` for its path. Without QEMU it reports the
    /// omission and returns `None`.
    pub(crate) fn start(scene: &Scene, words: &[&str]) -> Option<Self> {
        let image = scene.path("disk.raw");
        let content: Vec<u8> = (0..DISK_BYTES / 4).flat_map(|number| (number as u32).to_le_bytes()).collect();
        std::fs::write(&image, content).unwrap();
        let monitor = scene.path("m.qmp");
        let mut command = Command::new(QEMU);
        command
            .args(["-accel", "tcg", "-m", "32", "-nodefaults", "-no-user-config", "-display", "none", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .args(words.iter().map(|word| word.replace("IMAGE", image.to_str().unwrap())))
            .stdin(Stdio::null());
        let Ok(qemu) = command.spawn() else {
            omission::machine_lacks(QEMU);
            return None;
        };
        let machine = Self { qemu, image };
        let began = Instant::now();
        // The socket exists a moment before QEMU listens on it.
        while UnixStream::connect(&monitor).is_err() {
            assert!(began.elapsed() < DEADLINE, "QEMU makes no monitor");
            std::thread::yield_now();
        }
        Some(machine)
    }

    pub(crate) fn has_open(&self, file: &Path) -> bool {
        let folder = format!("/proc/{}/fd", self.qemu.id());
        let entries = std::fs::read_dir(folder).unwrap();
        let mut links = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        links.any(|link| link == file)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

pub(crate) fn adopt(scene: &Scene) -> String {
    scene.succeed(&["vm", "adopt", "m", "--qmp", scene.path("m.qmp").to_str().unwrap()])
}

/// Adopts a VM's disk, moves it to a store, releases it, and compares the VM's options before and after.
fn check(words: &[&str]) {
    let scene = Scene::started();
    let Some(machine) = Machine::start(&scene, words) else { return };
    assert!(adopt(&scene).contains("are served as: m"));
    assert!(!machine.has_open(&machine.image));
    let (_, vm) = scene.json(&["vm", "show", "m"]);
    assert_eq!((&vm["state"], &vm["process"]), (&"running".into(), &machine.qemu.id().into()), "{vm}");
    let (_, volume) = scene.json(&["volume", "show", "m"]);
    assert_eq!(volume["statistics"]["connections"], 1, "{volume}");
    assert_eq!(code(&scene.json(&["volume", "remove", "m", "--force"]).1), "vm_wrong_state");
    assert_eq!(code(&scene.json(&["vm", "stop", "m"]).1), "vm_wrong_state");
    scene.succeed(&["migrate", "m", "--to", "b"]);
    scene.succeed(&["vm", "release", "m"]);
    let [name] = scene.images("b").try_into().unwrap();
    let released = scene.path("b").join(name);
    assert!(machine.has_open(&released));
    assert_eq!(scene.json(&["vm", "list"]).1, serde_json::json!([]));
    assert_eq!(scene.json(&["volume", "list"]).1, serde_json::json!([]));
    drop(machine);
    let original = std::fs::read(scene.path("disk.raw.moved-m0")).unwrap();
    assert!(original == std::fs::read(&released).unwrap(), "the image is another one");
}

#[test]
fn disk_of_blockdev_is_adopted_moved_and_released() {
    let raw = "raw,node-name=d,file=f,discard=unmap";
    check(&[
        "-blockdev",
        "file,node-name=f,filename=IMAGE",
        "-blockdev",
        raw,
        "-device",
        "virtio-blk-pci,drive=d",
    ]);
}

#[test]
fn disk_of_drive_is_adopted_moved_and_released() {
    let drive = "file=IMAGE,if=none,id=drive-scsi0,format=raw,detect-zeroes=on";
    let device = "scsi-hd,bus=scsi.0,drive=drive-scsi0,id=scsi0";
    check(&["-device", "virtio-scsi-pci,id=scsi", "-drive", drive, "-device", device]);
}

#[test]
fn a_vm_that_is_a_client_of_a_volume_is_bound_to_it_and_nothing_moves_under_it() {
    let scene = Scene::started();
    scene.create_volume();
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    let uri = volume["uri"].as_str().unwrap();
    let drive = format!("file={uri},if=virtio,format=raw");
    let Some(machine) = Machine::start(&scene, &["-drive", &drive]) else { return };
    assert!(adopt(&scene).contains("are served as: v"));
    let (_, vm) = scene.json(&["vm", "show", "m"]);
    let (state, volumes) = (&vm["state"], &vm["volumes"]);
    assert_eq!((state, volumes), (&"running".into(), &serde_json::json!(["v"])), "{vm}");
    assert_eq!(vm["process"], machine.qemu.id(), "{vm}");
    // It has never reconnected.
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(
        (&volume["statistics"]["connections"], &volume["generation"]),
        (&1.into(), &0.into()),
        "{volume}"
    );
    assert_eq!(code(&scene.json(&["volume", "remove", "v", "--force"]).1), "vm_wrong_state");
    scene.succeed(&["migrate", "v", "--to", "b"]);
    // It cannot be adopted twice.
    let other = ["vm", "adopt", "other", "--qmp", scene.path("m.qmp").to_str().unwrap()].map(str::to_owned);
    assert_eq!(code(&scene.json(&other.each_ref().map(String::as_str)).1), "volume_in_use");
    scene.succeed(&["vm", "release", "m"]);
    assert_eq!(scene.json(&["vm", "list"]).1, serde_json::json!([]));
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(
        (&volume["state"], &volume["statistics"]["connections"]),
        (&"serving".into(), &1.into()),
        "{volume}"
    );
}

#[test]
fn a_monitor_whose_process_is_no_client_of_a_volume_is_not_believed_that_it_is() {
    let scene = Scene::started();
    scene.create_volume();
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    let drive = format!("file={},if=virtio,format=raw", volume["uri"].as_str().unwrap());
    let Some(_machine) = Machine::start(&scene, &["-drive", &drive]) else { return };
    // This process relays the answers of the QEMU that uses the volume.
    let (liar, told) = (scene.path("liar.qmp"), scene.path("m.qmp"));
    let listener = UnixListener::bind(&liar).unwrap();
    let lying = std::thread::spawn(move || {
        let (mut daemon, _) = listener.accept().unwrap();
        let mut qemu = UnixStream::connect(told).unwrap();
        let (mut orders, mut executed) = (daemon.try_clone().unwrap(), qemu.try_clone().unwrap());
        let forth = std::thread::spawn(move || {
            // Either may have hung up.
            let _ = std::io::copy(&mut orders, &mut executed);
            let _ = executed.shutdown(Shutdown::Both);
        });
        let _ = std::io::copy(&mut qemu, &mut daemon);
        forth.join().unwrap();
    });
    let (_, refused) = scene.json(&["vm", "adopt", "m", "--qmp", liar.to_str().unwrap()]);
    assert_eq!(code(&refused), "vm_unsuitable", "{refused}");
    assert!(refused.to_string().contains("has no connection to that volume's socket"), "{refused}");
    assert_eq!(scene.json(&["vm", "list"]).1, serde_json::json!([]));
    lying.join().unwrap();
    // The answers of QEMU itself are accepted.
    assert!(adopt(&scene).contains("are served as: v"));
}

#[test]
fn disk_that_is_not_moved_is_released_where_it_was_also_after_the_daemon_was_killed() {
    let mut scene = Scene::started();
    let Some(machine) = Machine::start(&scene, &["-drive", "file=IMAGE,if=virtio,format=raw"]) else {
        return;
    };
    adopt(&scene);
    scene.kill();
    scene.start(None);
    scene.succeed(&["vm", "release", "m"]);
    assert!(machine.has_open(&machine.image));
    // The same again succeeds.
    adopt(&scene);
    scene.succeed(&["vm", "release", "m"]);
    assert!(machine.has_open(&machine.image));
}

#[test]
fn disk_that_cannot_be_adopted_is_named_and_stays() {
    let scene = Scene::started();
    let Some(machine) = Machine::start(&scene, &["-drive", "file=IMAGE,if=virtio,format=raw"]) else {
        return;
    };
    let monitor = scene.path("m.qmp");
    let monitor = monitor.to_str().unwrap();
    let (_, refused) = scene.json(&["vm", "adopt", "m", "--qmp", monitor, "--disk", "nothing"]);
    assert_eq!(code(&refused), "vm_unsuitable", "{refused}");
    scene.create_volume();
    // The name of the volume is taken.
    let (_, refused) = scene.json(&["vm", "adopt", "v", "--qmp", monitor]);
    assert_eq!(code(&refused), "volume_exists", "{refused}");
    let (exit, refused) = scene.json(&["vm", "adopt", "m", "--qmp", scene.path("nobody").to_str().unwrap()]);
    assert_eq!((exit, code(&refused)), (4, "vm_unsuitable"), "{refused}");
    assert!(machine.has_open(&machine.image));
    assert_eq!(scene.json(&["vm", "list"]).1, serde_json::json!([]));
}
