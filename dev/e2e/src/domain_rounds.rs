//! Random rounds with a domain of libvirt: it is adopted, moved and released, while others put overlays over its disk, plug a
//! second disk, unplug or exchange it, pause, reset, save, shut off or start the domain, or kill the daemon.
//!
//! ```text
//!   round:  an order ─┬─► something happens meanwhile ──► all is at rest ──► checks
//!                     └─► done, or refused by name
//!   checks: every image that a QEMU or the daemon has open is still there; the guest works on, or its disk has not changed while
//!           it was off; its second disk is the one that it was given
//! ```

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::Vm as VmShown;
use lab::workload::random::Random;
use testbed::{Host, Outcome, Program, until};

use crate::libvirt::{DOMAIN, Libvirtd};
use crate::vm::Vm;

const DISK_BYTES: u64 = 16 << 20;
/// All of the disk: a guest that was reset expects nothing of what it wrote before.
const FILL_BYTES: u64 = DISK_BYTES;
/// How long the daemon may have an image open that it has deleted.
const FREED_MAX: Duration = Duration::from_secs(10);
/// Requests of the guest in a round in which it runs.
const REQUESTS: u64 = 20;
/// Latest time of a disturbance during an order, in milliseconds.
const MEANWHILE_MS_MAX: u64 = 400;
/// Percentage of orders with a disturbance.
const DISTURBED: u64 = 40;

/// Actions of virsh on the domain.
const BY_HAND: [&str; 12] = [
    "overlay",
    "commit",
    "suspend",
    "resume",
    "reset",
    "destroy",
    "start",
    "managedsave",
    "managedsave-remove",
    "plug",
    "unplug",
    "exchange",
];
/// Name of the second disk in the guest.
const DATA: &str = "vdb";

/// Plays rounds and reports each to `told`. Returns how many of Sterna's orders succeeded and were refused; `None`
/// if this machine lacks something.
///
/// # Errors
/// If data is lost; the message has the round.
pub fn play(
    host: &mut Host,
    rounds: u32,
    seed: u64,
    mut told: impl FnMut(&str),
) -> anyhow::Result<Option<(u32, u32)>> {
    let Some(libvirt) = Libvirtd::start(host)? else { return Ok(None) };
    let image = host.path("disk.qcow2");
    let tool = Program::qemu_img();
    tool.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(DISK_BYTES.to_string()).succeed()?;
    let console = libvirt.domain(host, &[(&image, "qcow2")], FILL_BYTES)?;
    let random = Random::new(seed);
    let mut play =
        Play { libvirt, console, random, overlays: 0, saved: None, data: None, done: 0, refused: 0 };
    for round in 1..=rounds {
        let text = play.round(host).with_context(|| format!("round {round} of seed {seed}"))?;
        told(&format!("{round}: {text}"));
    }
    Ok(Some((play.done, play.refused)))
}

struct Play {
    libvirt: Libvirtd,
    console: Vm,
    random: Random,
    /// Number of overlays that were made.
    overlays: u32,
    /// A copy of the disk from when the domain was first found shut off.
    saved: Option<PathBuf>,
    /// The byte that fills the second disk, if there is one.
    data: Option<u8>,
    done: u32,
    refused: u32,
}

impl Play {
    fn round(&mut self, host: &mut Host) -> anyhow::Result<String> {
        let mut text = String::new();
        match self.random.below(10) {
            0..=5 => self.order(host, &mut text)?,
            6 => {
                host.kill()?;
                host.start()?;
                text += "the daemon is killed";
            }
            _ => {
                let what = BY_HAND[self.random.below(BY_HAND.len() as u64) as usize];
                text += &self.by_hand(host, what);
            }
        }
        until_at_rest(host)?;
        check_used_images(host).with_context(|| text.clone())?;
        self.check_disk(host).with_context(|| text.clone())?;
        Ok(text)
    }

    /// Gives Sterna an order, perhaps with a disturbance.
    fn order(&mut self, host: &mut Host, text: &mut String) -> anyhow::Result<()> {
        let is_adopted = !host.ask::<Vec<VmShown>>(&["vm", "list"])?.is_empty();
        let socket = self.libvirt.socket()?;
        let store = if self.random.below(2) == 0 { "a" } else { "b" };
        let adopt = ["vm", "adopt", "--libvirt", DOMAIN, "--store", store, "--libvirt-socket", &socket];
        let words: Vec<&str> = match self.random.below(3) {
            _ if !is_adopted => adopt.to_vec(),
            0 => vec!["migrate", DOMAIN, "--to", store],
            _ => vec!["vm", "release", DOMAIN],
        };
        *text += &words[..2].join(" ");
        let disturbance = BY_HAND[self.random.below(BY_HAND.len() as u64) as usize];
        let is_disturbed = self.random.below(100) < DISTURBED;
        let pause = Duration::from_millis(self.random.below(MEANWHILE_MS_MAX));
        let order = host.command(&words)?;
        let outcome = std::thread::scope(|scope| {
            let order = scope.spawn(move || order.run());
            if is_disturbed {
                std::thread::sleep(pause);
                *text += ", meanwhile ";
                *text += &self.by_hand(host, disturbance);
            }
            order.join().map_err(|_| anyhow::anyhow!("the order panicked"))?
        });
        let Outcome { code, stderr, .. } = outcome?;
        if code == 0 {
            self.done += 1;
        } else {
            // An order that takes long says first that it waits for the daemon.
            let is_named = stderr.contains("sterna: ") && stderr.len() > 20;
            ensure!(is_named, "refused without a reason: {stderr}");
            self.refused += 1;
            *text += &format!(": refused: {}", stderr.trim().trim_start_matches("sterna: "));
        }
        Ok(())
    }

    /// Does something by virsh; libvirt may refuse it.
    fn by_hand(&mut self, host: &Host, what: &str) -> String {
        let overlay = host.path(&format!("overlay-{}.qcow2", self.overlays));
        let spec = format!("vda,snapshot=external,file={},driver=qcow2", overlay.display());
        let words: Vec<&str> = match what {
            "overlay" => {
                self.overlays += 1;
                vec!["snapshot-create-as", DOMAIN, "--disk-only", "--no-metadata", "--diskspec", &spec]
            }
            "commit" => vec!["blockcommit", DOMAIN, "vda", "--active", "--pivot"],
            "plug" | "unplug" | "exchange" => {
                let done = self.change_data(host, what);
                return format!("{what}{}", if done.is_ok() { "" } else { " (libvirt refuses)" });
            }
            other => vec![other, DOMAIN],
        };
        let done = self.libvirt.virsh(&words);
        if done.is_ok() && matches!(what, "destroy" | "reset" | "managedsave" | "start") {
            self.console.forget();
        }
        format!("{what}{}", if done.is_ok() { "" } else { " (libvirt refuses)" })
    }

    /// Plugs or unplugs the second disk of a domain that runs, or puts another into its place.
    fn change_data(&mut self, host: &Host, what: &str) -> anyhow::Result<()> {
        if what != "plug" {
            self.libvirt.virsh(&["detach-disk", DOMAIN, DATA, "--live"])?;
            until("the guest has let its second disk go", || Ok(self.data_disk()?.is_none().then_some(())))?;
            self.data = None;
        }
        if what != "unplug" {
            self.overlays += 1;
            let pattern = self.overlays as u8;
            let file = host.path(&format!("data-{}.raw", self.overlays));
            std::fs::write(&file, vec![pattern; DISK_BYTES as usize])?;
            let path = file.to_str().context("a folder that is not UTF-8")?;
            let words =
                ["attach-disk", DOMAIN, path, DATA, "--targetbus", "virtio", "--subdriver", "raw", "--live"];
            self.libvirt.virsh(&words)?;
            self.data = Some(pattern);
        }
        Ok(())
    }

    /// The second disk that the domain has: its format, and where it is.
    fn data_disk(&self) -> anyhow::Result<Option<(String, String)>> {
        source_of(&self.libvirt.virsh(&["dumpxml", DOMAIN])?, DATA)
    }

    /// The second disk is the one that was plugged. It ends with the QEMU that it was plugged into.
    fn check_data(&mut self) -> anyhow::Result<()> {
        match (self.data_disk()?, self.data) {
            (Some((format, source)), Some(pattern)) => {
                let read = format!("read -P {pattern} 0 {DISK_BYTES}");
                let tool = Program::qemu_io();
                let read = tool.args(["-U", "-r", "-f", &format, "-c", &read, &source]).succeed()?;
                ensure!(!read.contains("failed"), "the disk is not the one with {pattern}: {source}: {read}");
            }
            (Some((_, source)), None) => bail!("a second disk that nobody has plugged: {source}"),
            (None, _) => self.data = None,
        }
        Ok(())
    }

    /// The guest works on; or the disk of a domain that is off is what it was.
    fn check_disk(&mut self, host: &Host) -> anyhow::Result<()> {
        let state = self.libvirt.virsh(&["domstate", DOMAIN])?;
        match state.trim() {
            "running" => self.check_guest(),
            "paused" => {
                self.libvirt.virsh(&["resume", DOMAIN])?;
                self.check_guest()
            }
            "shut off" => self.check_image(host),
            other => bail!("the domain is {other}"),
        }
    }

    fn check_guest(&mut self) -> anyhow::Result<()> {
        if let Some(saved) = self.saved.take() {
            std::fs::remove_file(saved)?;
        }
        self.console.work_on(REQUESTS)?;
        self.check_data()
    }

    fn check_image(&mut self, host: &Host) -> anyhow::Result<()> {
        let definition = self.libvirt.virsh(&["dumpxml", DOMAIN, "--inactive"])?;
        let (format, source) = source_of(&definition, "vda")?.context("a domain with a disk")?;
        let tool = || Program::qemu_img();
        match &self.saved {
            Some(saved) => {
                let compared =
                    tool().args(["compare", "-U", "-f", "raw", "-F", &format]).arg(saved).arg(&source);
                compared.succeed().with_context(|| format!("what is in {source} has changed"))?;
            }
            None => {
                let saved = host.path("saved.raw");
                let converted =
                    tool().args(["convert", "-U", "-f", &format, "-O", "raw", &source]).arg(&saved);
                converted.succeed().with_context(|| format!("read {source}"))?;
                self.saved = Some(saved);
            }
        }
        Ok(())
    }
}

/// Returns the source of a disk of a domain that is shut off, and its format; `None` without such a disk.
fn source_of(definition: &str, target: &str) -> anyhow::Result<Option<(String, String)>> {
    let is_it = |disk: &&str| disk.contains(&format!("<target dev='{target}'"));
    let disks = definition.split("<disk ").skip(1).map(|disk| disk.split("</disk>").next().unwrap_or(disk));
    let mut disks = disks.filter(is_it);
    let Some(disk) = disks.next() else { return Ok(None) };
    // A backing file has a source as well.
    let disk = disk.split("<backingStore").next().unwrap_or(disk);
    let value = |name: &str| Some(disk.split_once(&format!("{name}='"))?.1.split('\'').next()?.to_owned());
    let format = value(" type").context("a format")?;
    let source = match (value("file"), value("socket"), value("protocol='nbd' name")) {
        (Some(file), None, _) => file,
        (_, Some(socket), Some(export)) => format!("nbd+unix:///{export}?socket={socket}"),
        _ => bail!("a disk that is nowhere: {disk}"),
    };
    Ok(Some((format, source)))
}

/// Waits until no operation is under way.
pub(crate) fn until_at_rest(host: &Host) -> anyhow::Result<()> {
    host.until_idle()?;
    until("no disk changes sides", || {
        let vms: Vec<VmShown> = host.ask(&["vm", "list"])?;
        let is_under_way = |vm: &VmShown| {
            let said = vm.message.as_deref().unwrap_or_default();
            said.contains("libvirt copies") || said.contains("libvirt gives")
        };
        Ok((!vms.iter().any(is_under_way)).then_some(()))
    })
}

/// Returns once every image that the daemon or a QEMU has open has a name. The daemon frees the space of a deleted image bit by bit,
/// and has the file open until then.
pub(crate) fn check_used_images(host: &Host) -> anyhow::Result<()> {
    let begun = std::time::Instant::now();
    loop {
        match look_at_used_images(host) {
            Err(_) if begun.elapsed() < FREED_MAX => std::thread::sleep(Duration::from_millis(50)),
            looked => return looked,
        }
    }
}

/// Checks that every file of the host that the daemon or a QEMU has open still has a name.
fn look_at_used_images(host: &Host) -> anyhow::Result<()> {
    let root = host.path("");
    let root = root.canonicalize()?;
    for process in std::fs::read_dir("/proc")?.flatten() {
        let name = process.file_name();
        if !name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        let is_meant = command.contains("qemu-system") || command.contains(&*root.to_string_lossy());
        // The process may end during the check.
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else { continue };
        for descriptor in descriptors.flatten().filter(|_| is_meant) {
            check_descriptor(&root, &descriptor.path()).with_context(|| command.replace('\0', " "))?;
        }
    }
    Ok(())
}

fn check_descriptor(root: &Path, descriptor: &Path) -> anyhow::Result<()> {
    let Ok(link) = std::fs::read_link(descriptor) else { return Ok(()) };
    let Ok(open) = std::fs::metadata(descriptor) else { return Ok(()) };
    let is_image = open.is_file() && link.starts_with(root) && open.len() >= DISK_BYTES / 2;
    ensure!(!is_image || open.nlink() > 0, "an image that is used is gone: {}", link.display());
    Ok(())
}
