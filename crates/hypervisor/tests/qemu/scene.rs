//! Two QEMU processes without guests: firmware that finds nothing to boot makes a running VM.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hypervisor::qemu::{Heard, Qemu};
use hypervisor::{MemoryOptions, MemoryTransfer, MigrationStatus, RunState};
use tempfile::TempDir;
use tokio::process::{Child, Command};

pub(super) const DEADLINE: Duration = Duration::from_secs(120);
pub(super) const DISK_BYTES: u64 = 1 << 20;
const QEMU: &str = "qemu-system-x86_64";

pub(super) struct Scene {
    folder: TempDir,
}

pub(super) struct Started {
    pub(super) process: Child,
    pub(super) qemu: Qemu,
    pub(super) memory: PathBuf,
}

impl Scene {
    /// `None` if there is no QEMU, which is reported.
    pub(super) fn new() -> Option<Self> {
        let is_there = std::process::Command::new(QEMU).arg("--version").output().is_ok();
        if !is_there {
            omission::machine_lacks(QEMU);
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::File::create(folder.path().join("disk")).unwrap().set_len(DISK_BYTES).unwrap();
        Some(Self { folder })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) async fn start(&self, name: &str, more: &[&str]) -> Started {
        let file = format!("file,node-name=file,filename={}", text(&self.path("disk")));
        let disk = ["-blockdev", &file, "-blockdev", "raw,node-name=disk,file=file"];
        let device = ["-device", "virtio-blk-pci,drive=disk"];
        self.start_with(name, &[&disk[..], &device[..], more].concat()).await
    }

    pub(super) async fn start_with(&self, name: &str, more: &[&str]) -> Started {
        let path = |ending: &str| self.folder.path().join(format!("{name}.{ending}"));
        let socket = path("qmp");
        let process = Command::new(QEMU)
            .args(["-accel", "tcg", "-m", "32", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", text(&socket))])
            .args(more)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let qemu = Qemu::connect_within(&socket, DEADLINE).await.unwrap();
        Started { process, qemu, memory: path("memory") }
    }

    pub(super) async fn start_target(&self, name: &str) -> Started {
        self.start(name, &["-incoming", "defer", "-S"]).await
    }

    pub(super) async fn pair(&self) -> (Started, Started) {
        let source = self.start("source", &[]).await;
        let target = self.start_target("target").await;
        self.offer(&source, &target).await;
        (source, target)
    }

    pub(super) async fn offer(&self, source: &Started, target: &Started) {
        target.qemu.expect_memory(&target.memory, MemoryTransfer::default()).await.unwrap();
        let options = MemoryOptions::for_downtime(Duration::from_millis(300));
        source.qemu.offer_memory(&target.memory, options).await.unwrap();
        source.qemu.await_status(&[MigrationStatus::PreSwitchover], DEADLINE).await.unwrap();
    }

    pub(super) async fn until_running(&self, qemu: &Started) {
        let mut events = qemu.qemu.events();
        while qemu.qemu.status().await.unwrap() != RunState::Running {
            assert_ne!(events.next().await, Heard::Gone);
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
