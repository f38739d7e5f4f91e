//! A VM that is started by hand, with a plain image file and without Sterna. Its console connects to the
//! test, whichever host runs it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;
use testbed::{Host, Program};

use crate::vm::{Vm, Work};

const QEMU: &str = "qemu-system-x86_64";

/// A VM that was started by hand. Dropping it ends it at any host.
#[derive(Debug)]
pub struct ByHand {
    /// The console of its guest.
    pub console: Vm,
    /// First path of its image, or of its first image.
    pub image: PathBuf,
    /// First path of its monitor's socket.
    pub monitor: PathBuf,
    qemu: Child,
}

impl ByHand {
    /// Starts a VM on a new image in the folder of `scene`, and waits until its guest works. `words` are the options that attach
    /// the image, with `IMAGE` for its path.
    ///
    /// # Errors
    /// If there is no QEMU, or the guest does not begin to work.
    pub fn start(
        scene: &Host,
        format: &str,
        size_bytes: u64,
        fill_bytes: u64,
        words: &[&str],
    ) -> anyhow::Result<Self> {
        Self::start_on(scene, format, size_bytes, fill_bytes, &["IMAGE"], words)
    }

    /// Starts it as [`ByHand::start`], with several images for these `places` in the words, which the guest uses as one disk.
    ///
    /// # Errors
    /// Those of [`ByHand::start`].
    pub fn start_on(
        scene: &Host,
        format: &str,
        size_bytes: u64,
        fill_bytes: u64,
        places: &[&str],
        words: &[&str],
    ) -> anyhow::Result<Self> {
        let mut images = Vec::new();
        for place in places {
            let image = scene.path(&format!("by-hand-{place}.img"));
            let path = image.to_str().context("a folder that is not UTF-8")?.to_owned();
            let size = size_bytes.to_string();
            let create = ["create", "-q", "-f", format, &path, &size];
            Program::qemu_img().args(create).run()?.success()?;
            images.push((place, image, path));
        }
        let attached = |word: &str| {
            images.iter().fold(word.to_owned(), |word, (place, _, path)| word.replace(*place, path))
        };
        let socket = scene.path("console");
        let console = Vm::expect(&socket, Work::on_disk(fill_bytes).options(places.len())?)?;
        let hardware = console.options().hardware;
        let monitor = scene.path("by-hand.qmp");
        let mut command = Command::new(QEMU);
        command
            .args(["-accel", "tcg", "-nodefaults", "-display", "none", "-name", "by-hand"])
            .args(["-m", &format!("{}K", hardware.memory_kib), "-smp", hardware.processors])
            .args(console.guest_words()?)
            .arg("-pidfile")
            .arg(scene.path("by-hand.pid"))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .args(words.iter().map(|word| attached(word)))
            .stdin(Stdio::null());
        let qemu =
            command.spawn().with_context(|| format!("start {QEMU}; the package qemu-system-x86 has it"))?;
        let image = images.into_iter().next().map(|(_, image, _)| image).context("a VM has a disk")?;
        let machine = Self { console, image, monitor, qemu };
        machine.console.work_on(1)?;
        Ok(machine)
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // After a move it has ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Returns the files that a process has open.
///
/// # Errors
/// If there is no such process.
pub fn open_files(process: u32) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(Path::new("/proc").join(process.to_string()).join("fd"))?;
    Ok(entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect())
}
