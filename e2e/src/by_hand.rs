//! A machine that somebody starts by hand, with a plain image file and without Sterna; its console is ours, wherever it runs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

use crate::program::Program;
use crate::scene::Scene;
use crate::vm::{Console, MEMORY_KIB, Work, guest_words};

const QEMU: &str = "qemu-system-x86_64";

/// A machine that was started by hand. Dropping it ends it, at whichever host it is.
#[derive(Debug)]
pub struct ByHand {
    /// What its guest says.
    pub console: Console,
    /// Where its image is at first.
    pub image: PathBuf,
    /// Its monitor's socket at first.
    pub monitor: PathBuf,
    qemu: Child,
}

impl ByHand {
    /// Starts a machine on a new image in the folder of `scene`, and waits until its guest works. `words` say how the image is
    /// attached, with its path for `IMAGE`.
    ///
    /// # Errors
    /// If there is no QEMU, or the guest does not begin to work.
    pub fn start(
        scene: &Scene,
        format: &str,
        size_bytes: u64,
        fill_bytes: u64,
        words: &[&str],
    ) -> anyhow::Result<Self> {
        let image = scene.path("by-hand.img");
        let path = image.to_str().context("a folder that is not UTF-8")?;
        let size = size_bytes.to_string();
        let create = ["create", "-q", "-f", format, path, &size];
        Program::of_package("qemu-img", "qemu-utils").args(create).run()?.success()?;
        let socket = scene.path("console");
        let console = Console::listen(&socket)?;
        let monitor = scene.path("by-hand.qmp");
        let mut command = Command::new(QEMU);
        command
            .args(["-accel", "tcg", "-nodefaults", "-display", "none", "-name", "by-hand"])
            .args(["-m", &format!("{MEMORY_KIB}K")])
            .args(guest_words(&socket, 1, Work { fill_bytes, memory_bytes: 0, swept_bytes: 0 })?)
            .arg("-pidfile")
            .arg(scene.path("by-hand.pid"))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .args(words.iter().map(|word| word.replace("IMAGE", path)))
            .stdin(Stdio::null());
        let qemu =
            command.spawn().with_context(|| format!("start {QEMU}; the package qemu-system-x86 has it"))?;
        let machine = Self { console, image, monitor, qemu };
        machine.console.work_on(1)?;
        Ok(machine)
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // It has ended by itself if it has moved.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The files that a process has open.
///
/// # Errors
/// If there is no such process.
pub fn open_files(process: u32) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(Path::new("/proc").join(process.to_string()).join("fd"))?;
    Ok(entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect())
}
