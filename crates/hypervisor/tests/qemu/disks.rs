//! Tests disks of running VMs, switched to an NBD export and back: no write on the way is lost.

use std::path::Path;
use std::process::Stdio;

use hypervisor::qemu::{ExportAddress, ImageFile, LocalDisk, RECONNECT_SECONDS, StayReason};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::scene::{DEADLINE, Scene, Started};

/// Bytes that each step writes at a place of its own.
const STEP_BYTES: usize = 64 << 10;

/// An NBD server that takes no locks, as needed at the beginning of an adoption.
struct Server {
    process: Child,
    address: ExportAddress,
}

impl Server {
    /// `None` if there is none, which is reported.
    async fn start(scene: &Scene) -> Option<Self> {
        let socket = scene.path("nbd");
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(&socket).arg("file").arg(scene.path("disk"));
        let Ok(process) = command.stdin(Stdio::null()).kill_on_drop(true).spawn() else {
            omission::machine_lacks("nbdkit");
            return None;
        };
        Some(Self::ready(process, socket).await)
    }

    /// Starts a server of a qcow2 image's content, for one client; it comes with `qemu-img`.
    async fn of_qcow2(scene: &Scene) -> Self {
        let socket = scene.path("qcow2");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=qcow2", "--socket"]).arg(&socket).arg(scene.path("disk"));
        let process = command.stdin(Stdio::null()).kill_on_drop(true).spawn().unwrap();
        Self::ready(process, socket).await
    }

    async fn ready(process: Child, socket: std::path::PathBuf) -> Self {
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::task::yield_now().await;
        }
        Self {
            process,
            address: ExportAddress { socket, export: String::new(), reconnect_s: RECONNECT_SECONDS },
        }
    }

    async fn end(mut self) {
        let process = self.process.id().unwrap().to_string();
        let told = std::process::Command::new("kill").arg(process).status().unwrap();
        assert!(told.success() && self.process.wait().await.unwrap().success());
    }
}

impl Started {
    async fn write(&self, step: u8) {
        let device = &self.disk().await.device;
        let start = usize::from(step) * STEP_BYTES;
        let command = format!("qemu-io -d {device} \"write -P {step} {start} {STEP_BYTES}\"");
        let arguments = json!({ "command-line": command });
        let said = self.qemu.qmp().execute("human-monitor-command", arguments, DEADLINE).await.unwrap();
        assert!(said.as_str().unwrap().is_empty(), "{said}");
    }

    async fn disk(&self) -> LocalDisk {
        // While it is switched it is no local disk, but its device stays.
        let devices = self.qemu.query_block().await.unwrap();
        let device = devices.into_iter().find_map(|device| device.device).unwrap();
        let disks = self.qemu.local_disks().await.unwrap();
        disks.into_iter().find_map(Result::ok).unwrap_or_else(|| LocalDisk {
            device,
            node: String::new(),
            is_named: true,
            format: "raw".to_owned(),
            drive: String::new(),
            file_node: None,
            file: "/".into(),
            backing: Vec::new(),
            size_bytes: 0,
            options: hypervisor::qemu::DiskOptions {
                is_read_only: false,
                cache_direct: false,
                cache_no_flush: false,
                detect_zeroes: "off".to_owned(),
            },
        })
    }

    fn has_open(&self, file: &Path) -> bool {
        let folder = format!("/proc/{}/fd", self.qemu.process().unwrap());
        let links = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        links.into_iter().any(|link| link == file)
    }
}

/// Switches the disk of a VM that was started with `words` there and back, twice, and checks every byte.
async fn check(scene: &Scene, words: &[&str]) {
    let Some(server) = Server::start(scene).await else { return };
    let started = scene.start_with("machine", words).await;
    let before = started.disk().await;
    let mut disk = before.clone();
    let mut step = 1;
    started.write(step).await;
    for round in 0..2 {
        if round == 1 {
            started.qemu.stop().await.unwrap();
            disk = started.qemu.lead_to_nothing(&disk, 0).await.unwrap();
            assert!(!started.has_open(&before.file), "QEMU still has the file open");
        }
        disk = started.qemu.lead_over_export(&disk, &server.address, 0).await.unwrap();
        assert!(!started.has_open(&before.file), "QEMU still has the file open");
        started.qemu.resume().await.unwrap();
        step += 1;
        started.write(step).await;
        // The caller does not know what the disk is over.
        disk.file_node = None;
        disk = started.qemu.lead_to_file(&disk, &image(&before), 0).await.unwrap();
        assert!(started.has_open(&before.file));
        step += 1;
        started.write(step).await;
    }
    // Its options are as before, and nothing is left over.
    let after = started.disk().await;
    assert_eq!((&after.options, &after.file), (&before.options, &before.file));
    let nodes = started.qemu.named_nodes().await.unwrap();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    started.qemu.quit().await.unwrap();
    started.qemu.closed().await;
    let image = std::fs::read(&before.file).unwrap();
    for step in 1..=step {
        let start = usize::from(step) * STEP_BYTES;
        assert!(image[start..start + STEP_BYTES].iter().all(|byte| *byte == step), "step {step}");
    }
}

#[tokio::test]
async fn a_disk_of_blockdev_is_led_over_an_export_and_back() {
    let Some(scene) = Scene::new() else { return };
    let file = format!("file,node-name=f,filename={}", scene.path("disk").display());
    let raw = "raw,node-name=d,file=f,detect-zeroes=unmap,discard=unmap";
    check(&scene, &["-blockdev", &file, "-blockdev", raw, "-device", "virtio-blk-pci,drive=d"]).await;
}

#[tokio::test]
async fn a_disk_of_drive_is_led_over_an_export_and_back() {
    let Some(scene) = Scene::new() else { return };
    let drive =
        format!("file={},if=none,id=drive-scsi0,format=raw,detect-zeroes=on", scene.path("disk").display());
    let device = "scsi-hd,bus=scsi.0,drive=drive-scsi0,id=scsi0";
    check(&scene, &["-device", "virtio-scsi-pci,id=scsi", "-drive", &drive, "-device", device]).await;
}

#[tokio::test]
async fn a_disk_of_drive_without_a_name_is_led_over_an_export_and_back() {
    let Some(scene) = Scene::new() else { return };
    let drive = format!("file={},if=virtio,format=raw", scene.path("disk").display());
    check(&scene, &["-drive", &drive]).await;
}

#[tokio::test]
async fn a_disk_whose_controller_has_an_io_thread_of_its_own_is_led_over_an_export_and_back() {
    let Some(scene) = Scene::new() else { return };
    let drive = format!("file={},if=none,id=drive-scsi0,format=raw", scene.path("disk").display());
    let threads = ["-object", "iothread,id=other", "-object", "iothread,id=own"];
    let controller = ["-device", "virtio-scsi-pci,id=scsi,iothread=own", "-drive", &drive];
    let device = ["-device", "scsi-hd,bus=scsi.0,drive=drive-scsi0,id=scsi0"];
    check(&scene, &[&threads[..], &controller, &device].concat()).await;
}

fn image(disk: &LocalDisk) -> ImageFile {
    let LocalDisk { file, format, node, .. } = disk.clone();
    ImageFile { path: file, format, node: Some(node).filter(|_| disk.is_named) }
}

#[tokio::test]
async fn a_qcow2_image_of_blockdev_is_led_over_an_export_of_its_content_and_back() {
    let blockdev = ["-blockdev", "file,node-name=f,filename=IMAGE", "-blockdev", "qcow2,node-name=d,file=f"];
    check_qcow2(&[&blockdev[..], &["-device", "virtio-blk-pci,drive=d"]].concat(), Some("d")).await;
}

#[tokio::test]
async fn a_qcow2_image_of_drive_is_led_over_an_export_of_its_content_and_back() {
    check_qcow2(&["-drive", "file=IMAGE,format=qcow2,if=virtio,cache=none"], None).await;
}

/// Switches the disk of a VM with a qcow2 image there and back, twice, and checks the written data.
async fn check_qcow2(words: &[&str], name: Option<&str>) {
    let Some(scene) = Scene::new() else { return };
    let path = scene.path("disk");
    let path = path.to_str().unwrap();
    std::fs::remove_file(path).unwrap();
    let Some(()) = qemu_img(["create", "-q", "-f", "qcow2", path, "64M"]) else { return };
    let words: Vec<String> = words.iter().map(|word| word.replace("IMAGE", path)).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let started = scene.start_with("machine", &words).await;
    let before = started.disk().await;
    let mut disk = before.clone();
    for round in 0..2 {
        started.write(3 * round + 1).await;
        started.qemu.stop().await.unwrap();
        disk = started.qemu.lead_to_nothing(&disk, 0).await.unwrap();
        assert!(!started.has_open(&before.file), "QEMU still has the file open");
        let server = Server::of_qcow2(&scene).await;
        disk = started.qemu.lead_over_export(&disk, &server.address, 0).await.unwrap();
        assert_eq!(disk.format, "raw");
        started.qemu.resume().await.unwrap();
        started.write(3 * round + 2).await;
        started.qemu.stop().await.unwrap();
        disk = started.qemu.lead_to_nothing(&disk, 0).await.unwrap();
        server.end().await;
        disk = started.qemu.lead_to_file(&disk, &image(&before), 0).await.unwrap();
        assert!(started.has_open(&before.file));
        started.qemu.resume().await.unwrap();
        started.write(3 * round + 3).await;
    }
    let after = started.disk().await;
    assert_eq!(
        (&after.options, &after.format, after.size_bytes),
        (&before.options, &before.format, 64 << 20)
    );
    assert!(name.is_none_or(|name| after.node == name), "{after:?}");
    let nodes = started.qemu.named_nodes().await.unwrap();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    started.qemu.quit().await.unwrap();
    started.qemu.closed().await;
    qemu_img(["check", "-q", path]).unwrap();
    let raw = scene.path("raw");
    qemu_img(["convert", "-O", "raw", path, raw.to_str().unwrap()]).unwrap();
    let content = std::fs::read(&raw).unwrap();
    for step in 1..=6_u8 {
        let start = usize::from(step) * STEP_BYTES;
        assert!(content[start..start + STEP_BYTES].iter().all(|byte| *byte == step), "step {step}");
    }
}

/// Runs `qemu-img`, which must succeed; `None` if there is none, which is reported.
fn qemu_img<'a>(words: impl IntoIterator<Item = &'a str>) -> Option<()> {
    let Ok(status) = std::process::Command::new("qemu-img").args(words).status() else {
        omission::machine_lacks("qemu-img");
        return None;
    };
    assert!(status.success());
    Some(())
}

#[tokio::test]
async fn a_disk_that_cannot_be_led_stays_where_it_was() {
    let Some(scene) = Scene::new() else { return };
    let started = scene.start("machine", &[]).await;
    let disk = started.disk().await;
    let nowhere =
        ExportAddress { socket: scene.path("nobody"), export: String::new(), reconnect_s: RECONNECT_SECONDS };
    started.qemu.lead_over_export(&disk, &nowhere, 0).await.unwrap_err();
    started.write(1).await;
    assert_eq!(started.disk().await, disk);
    // The tests show what can be opened, and the VM has its disk as before.
    started.qemu.prove_export(&disk, &nowhere, 0).await.unwrap_err();
    started.qemu.prove_file(&disk, &scene.path("none"), 0).await.unwrap_err();
    started.qemu.prove_file(&disk, &disk.file, 0).await.unwrap();
    started.qemu.end_proof(0).await;
    assert_eq!((started.disk().await, started.qemu.named_nodes().await.unwrap().len()), (disk.clone(), 2));
    started.write(2).await;
    let bitmap = json!({ "node": "disk", "name": "nightly" });
    started.qemu.qmp().execute("block-dirty-bitmap-add", bitmap, DEADLINE).await.unwrap();
    let staying = started.qemu.local_disks().await.unwrap().remove(0).unwrap_err();
    assert_eq!(staying.reason, StayReason::Bitmaps(vec!["nightly".to_owned()]));
}
