//! A machine that Sterna starts and moves: its guest works on its disk and checks it, and its console is ours, wherever it
//! runs.
//!
//! ```text
//!   QEMU at alpha ──┐
//!   QEMU at beta ───┴── each connects to one socket ──► lines, in the order in which they came
//! ```

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use api::{Vm, VmState};
use testbed::{Host, until};

use crate::machine::guest_image;

/// What the machine is called.
pub const NAME: &str = "web1";
/// Bytes of a block that the guest checks.
const BLOCK_BYTES: u32 = 4096;
/// What its content comes from.
const SEED: u64 = 7;

/// The machine's memory: 128 MiB less 8 KiB, because QEMU before 9.0 loses writes of emulated guests that it migrates if
/// their memory is a multiple of 64 pages (docs/vm.md).
pub(crate) const MEMORY_KIB: u32 = (128 << 10) - 8;

/// Words of QEMU for [`Console::start_with_words`]: a software TPM, which the guest then uses and checks.
pub const TPM: [&str; 6] = [
    "-chardev",
    "socket,id=tpm,path={tpm}",
    "-tpmdev",
    "emulator,id=tpm0,chardev=tpm",
    "-device",
    "tpm-tis,tpmdev=tpm0",
];

/// [`TPM`], or nothing where there is no swtpm.
pub fn tpm_words() -> &'static [&'static str] {
    match std::process::Command::new("swtpm").arg("--version").output() {
        Ok(_) => &TPM,
        Err(_) => {
            omission::machine_lacks("swtpm");
            &[]
        }
    }
}

/// What the guest works on.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// How much of its disk it fills first, in bytes.
    pub fill_bytes: u64,
    /// How much of its memory it checks and rewrites, at random, about 8 MB a second; in bytes.
    pub memory_bytes: u64,
    /// How much of its memory it writes as fast as it can, faster than a slow link carries; in bytes.
    pub swept_bytes: u64,
}

/// The console of a machine that moves.
#[derive(Debug)]
pub struct Console {
    heard: Arc<Mutex<Heard>>,
    /// Where the machine's QEMU connects to: in its command line, and in no other.
    socket: String,
}

#[derive(Debug, Default)]
struct Heard {
    /// What the guest has said.
    lines: Vec<String>,
    /// To whichever QEMU is the guest's now.
    speak: Vec<UnixStream>,
}

impl Console {
    /// Adds a machine with the volume `v` of `scene` as its disk, and starts it.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn start(scene: &Host, fill_bytes: u64) -> anyhow::Result<Self> {
        Self::start_with(scene, &["v"], fill_bytes)
    }

    /// Adds a machine with these volumes of `scene` as its disks, striped as one, and starts it.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn start_with(scene: &Host, volumes: &[&str], fill_bytes: u64) -> anyhow::Result<Self> {
        Self::start_busy(scene, volumes, Work { fill_bytes, memory_bytes: 0, swept_bytes: 0 })
    }

    /// As [`Console::start_with`], with more words for QEMU.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn start_with_words(
        scene: &Host,
        volumes: &[&str],
        fill_bytes: u64,
        words: &[&str],
    ) -> anyhow::Result<Self> {
        Self::start_as(scene, volumes, Work { fill_bytes, memory_bytes: 0, swept_bytes: 0 }, words)
    }

    /// As [`Console::start_with`]; the guest works on its memory as well if it is told to.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn start_busy(scene: &Host, volumes: &[&str], work: Work) -> anyhow::Result<Self> {
        Self::start_as(scene, volumes, work, &[])
    }

    /// As [`Console::start_with_words`], with the volume `v` and with `sections` at the end of the definition, in QEMU that
    /// may run as anybody: what it is to open is where everybody may read it.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn start_for_anybody(
        scene: &Host,
        fill_bytes: u64,
        words: &[&str],
        sections: &str,
    ) -> anyhow::Result<Self> {
        let work = Work { fill_bytes, memory_bytes: 0, swept_bytes: 0 };
        let socket = scene.path("console");
        let mut definition = text(&socket, &["v"], work, words)? + sections;
        let image = guest_image()?;
        for (file, name) in [(&image.kernel, "kernel"), (&image.initramfs, "initramfs")] {
            let copy = scene.path(name);
            std::fs::copy(file, &copy).context("copy the guest")?;
            std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o644))?;
            definition = definition.replace(&file.display().to_string(), &copy.display().to_string());
        }
        Self::start_text(scene, &socket, &definition)
    }

    fn start_as(scene: &Host, volumes: &[&str], work: Work, words: &[&str]) -> anyhow::Result<Self> {
        let socket = scene.path("console");
        Self::start_text(scene, &socket, &text(&socket, volumes, work, words)?)
    }

    fn start_text(scene: &Host, socket: &Path, text: &str) -> anyhow::Result<Self> {
        let console = Self::listen(socket)?;
        let definition = scene.path("vm.toml");
        std::fs::write(&definition, text).context("write the definition")?;
        let definition = definition.to_str().context("a folder that is not UTF-8")?;
        scene.sterna(["vm", "add", NAME, "--definition", definition])?.success()?;
        scene.sterna(["vm", "start", NAME])?.success()?;
        console.work_on(1)?;
        Ok(console)
    }

    /// Waits until the guest has made so many more requests.
    ///
    /// # Errors
    /// If it does not, or has found something wrong.
    pub fn work_on(&self, requests: u64) -> anyhow::Result<()> {
        let wanted = self.requests()? + requests;
        until("the guest works", || Ok((self.requests()? >= wanted).then_some(())))
    }

    /// What the guest has said of its TPM's counter last.
    pub fn tpm_counter(&self) -> Option<u64> {
        let heard = self.lock();
        let said = heard.lines.iter().rev().find_map(|line| line.split_once("sterna: tpm counter="));
        said.and_then(|(_, counter)| counter.trim().parse().ok())
    }

    /// What was said so far is of a run that has ended: another one begins.
    pub fn forget(&self) {
        self.lock().lines.clear();
    }

    /// Ends the guest's work; it then checks its whole disk.
    ///
    /// # Errors
    /// If anything is not as it was written.
    pub fn verify(&self) -> anyhow::Result<()> {
        self.verdict().map(drop)
    }

    /// As [`Console::verify`]; then compares an image, which nobody writes to any more, with what the guest knows.
    ///
    /// # Errors
    /// If anything is not as it was written.
    pub fn verify_image(&self, image: &Path) -> anyhow::Result<()> {
        let verdict = self.verdict()?;
        let word = |name: &str| {
            let found = verdict.split_whitespace().find_map(|word| word.strip_prefix(name));
            found.with_context(|| format!("no {name} in: {verdict}"))
        };
        let (blocks, digest) = (word("blocks=")?.parse()?, u64::from_str_radix(word("digest=")?, 16)?);
        let wrong = lab::workload::verify_digest(image, blocks, BLOCK_BYTES, SEED, digest, |_| {})?;
        ensure!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    }

    /// Lets a guest shut down that has checked its disk.
    pub fn end(&self) {
        self.say(b"end\n");
    }

    fn say(&self, words: &[u8]) {
        for stream in &mut self.lock().speak {
            // Those of machines that are gone.
            let _ = stream.write_all(words);
        }
    }

    fn verdict(&self) -> anyhow::Result<String> {
        self.say(b"verify\n");
        let verdict = until("the guest has checked its disk", || {
            let heard = self.lock();
            Ok(heard.lines.iter().find(|line| line.contains("sterna: verified")).cloned())
        })?;
        ensure!(verdict.contains("errors=0"), "{verdict}");
        Ok(verdict)
    }

    /// A console that whichever QEMU is the guest's connects to.
    pub(crate) fn listen(socket: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).context("listen for the console")?;
        // Whomever QEMU runs as.
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666))?;
        let heard = Arc::<Mutex<Heard>>::default();
        let console = Self { heard: Arc::clone(&heard), socket: socket.display().to_string() };
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let Ok(speak) = stream.try_clone() else { continue };
                locked(&heard).speak.push(speak);
                let heard = Arc::clone(&heard);
                std::thread::spawn(move || {
                    for line in BufReader::new(stream).lines().map_while(Result::ok) {
                        locked(&heard).lines.push(line);
                    }
                });
            }
        });
        Ok(console)
    }

    /// Requests that the guest has made, by its own account.
    fn requests(&self) -> anyhow::Result<u64> {
        let heard = self.lock();
        if let Some(line) = heard.lines.iter().find(|line| line.contains("sterna: failed")) {
            bail!("the guest says: {line}");
        }
        let Some((requests, errors)) = heard.lines.iter().rev().find_map(|line| whole_tick(line)) else {
            return Ok(0);
        };
        if errors > 0 {
            let wrong: Vec<_> = heard.lines.iter().filter(|line| line.contains("sterna: wrong")).collect();
            bail!("the guest says: {errors} errors: {wrong:#?}");
        }
        Ok(requests)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        locked(&self.heard)
    }
}

/// What a tick says of requests and errors; `None`: it is none, or one that the machine's stop has cut in two.
fn whole_tick(line: &str) -> Option<(u64, u64)> {
    let (_, tick) = line.split_once("sterna: tick")?;
    let number = |name: &str| tick.split_whitespace().find_map(|word| word.strip_prefix(name)?.parse().ok());
    // The errors are its last word.
    Some((number("requests=")?, number("errors=")?))
}

impl Drop for Console {
    /// Ends the machine, at whichever host it is: it outlives the daemons, also those of a test that has failed.
    fn drop(&mut self) {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        for process in processes {
            let Some(number) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command);
            if command.starts_with("qemu-system") && command.contains(&self.socket) {
                kill(number);
            }
        }
    }
}

/// The machines of a host.
///
/// # Errors
/// What the daemon says.
pub fn vms(scene: &Host) -> anyhow::Result<Vec<Vm>> {
    scene.ask(&["vm", "list"])
}

/// Waits until the machine runs at `there`, and `elsewhere` knows of none.
///
/// # Errors
/// If that does not happen.
pub fn check_at(there: &Host, elsewhere: &Host) -> anyhow::Result<()> {
    until("the machine is at one host only", || {
        let (found, other) = (vms(there)?, vms(elsewhere)?);
        let runs = matches!(found.as_slice(), [vm] if vm.state == VmState::Running);
        Ok((runs && other.is_empty()).then_some(()))
    })
}

/// Kills QEMU.
pub fn kill(process: u32) {
    let process = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(process) = process {
        // It may have ended.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}

/// The words of QEMU that start the guest: its kernel, and what it is to do with its disks; it speaks to `console`.
pub(crate) fn guest_words(console: &Path, disks: usize, work: Work) -> anyhow::Result<[String; 10]> {
    let Work { fill_bytes, memory_bytes, swept_bytes } = work;
    let image = guest_image()?;
    let text = |path: &Path| path.display().to_string();
    let more: String = ('b'..).take(disks.saturating_sub(1)).collect();
    let more = if more.is_empty() { more } else { format!(" sterna.disks={more}") };
    Ok([
        "-kernel".to_owned(),
        text(&image.kernel),
        "-initrd".to_owned(),
        text(&image.initramfs),
        "-append".to_owned(),
        format!(
            "console=ttyS0 quiet sterna.check={BLOCK_BYTES},4,{fill_bytes},{SEED},{memory_bytes},0,{swept_bytes}{more}"
        ),
        "-chardev".to_owned(),
        format!("socket,id=console,path={},server=off", console.display()),
        "-serial".to_owned(),
        "chardev:console".to_owned(),
    ])
}

fn text(console: &Path, volumes: &[&str], work: Work, words: &[&str]) -> anyhow::Result<String> {
    let guest = guest_words(console, volumes.len(), work)?;
    let guest: String = guest
        .iter()
        .map(String::as_str)
        .chain(words.iter().copied())
        .map(|word| format!("\"{word}\", "))
        .collect();
    let devices: String = (0..volumes.len())
        .map(|disk| {
            format!(
                r#",
  "-blockdev", "driver=nbd,node-name=disk{disk},server.type=unix,server.path={{disk:disk{disk}}},export={{export:disk{disk}}},reconnect-delay=60",
  "-device", "virtio-blk-pci,drive=disk{disk}""#
            )
        })
        .collect();
    let disks: String =
        volumes.iter().enumerate().map(|(disk, volume)| format!("disk{disk} = \"{volume}\"\n")).collect();
    Ok(format!(
        r#"
command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "{MEMORY_KIB}K", "-name", "{{name}}", "-display", "none", "-nodefaults",
  "-machine", "pc-i440fx-7.2", {guest}
  "-qmp", "unix:{{qmp}},server=on,wait=off"{devices}]
[disks]
{disks}"#
    ))
}

fn locked(heard: &Mutex<Heard>) -> std::sync::MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}
