//! A VM in QEMU whose only work is to write and check its disk: its console is ours, whoever starts it and wherever it runs.
//!
//! ```text
//!   QEMU at one host ───┐                              (TCG, no KVM needed)
//!   QEMU at the other ──┴── each connects to one socket ──► Talk: one console, which goes on where the other has ended
//!     │ virtio-blk or virtio-scsi                             └─ ticks, wrong blocks, the verdict
//!     └─ NBD client, reconnecting ──► a volume
//! ```
//!
//! A daemon starts it by its [definition](Vm::definition), somebody by its [command](Vm::command), or [`Vm::launch`] does.
//! Emulated without KVM it does some ten thousand requests a second.

mod console;
mod disk;
mod image;
mod talk;

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use self::talk::{Talk, Unfinished};
use crate::nbd_client::Address;
use crate::wait::until;

pub use self::console::{Console, Tick, Verdict};
pub use self::disk::{Bus, DiskModel};
pub use self::image::GuestImage;

/// How long booting and filling may take: tens of seconds on a busy host, without KVM.
const START_DEADLINE: Duration = Duration::from_secs(300);
/// How long the comparison of the whole disk may take.
const VERIFY_DEADLINE: Duration = Duration::from_secs(300);
/// How long powering off may take.
const END_DEADLINE: Duration = Duration::from_secs(60);
/// What the kernel is told: to say little and only here, and to end the VM if it fails. Whether its timer ticks is not
/// checked: on a busy host without KVM it may not for as long as the check takes, and the kernel would give up.
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off no_timer_check";
/// How long QEMU tries to reach a server that went away; requests wait meanwhile.
const RECONNECT_SECONDS: u32 = 120;
/// The address of its card: one of those that nobody has been given.
const MAC: &str = "52:54:00:7e:12:a1";
const QEMU: &str = "qemu-system-x86_64";

/// What QEMU emulates.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// Its `-machine`.
    pub machine: &'static str,
    /// Its `-cpu`.
    pub cpu: &'static str,
    /// Its memory.
    ///
    /// **N.B.** QEMU before 9.0 loses writes of a guest that it emulates (TCG) while it migrates, and the guest crashes sooner
    /// or later: having asked which pages are dirty it does not make the processor tell of the next write. It takes that short
    /// cut only with memory that is a multiple of 64 pages, so a VM that moves has 8 KiB less.
    pub memory_kib: u32,
    /// Its `-smp`.
    ///
    /// **N.B.** QEMU 7.2 emulates a guest whose VM never has more than one processor without memory barriers, as if nobody else
    /// looked at its memory, but QEMU's devices do (8.1 makes those instructions barriers that are nothing else). Such a guest may ask
    /// for an interrupt of its disk too late for the disk to see it, and then waits for that for ever, with an idle disk and an idle
    /// server: we met it four times in about two hours of work. One that may get a second processor is emulated as it should be.
    pub processors: &'static str,
}

impl Hardware {
    /// What QEMU has by itself. Kernel, initramfs and a buffer for each worker fit into its memory many times.
    pub const USUAL: Self =
        Self { machine: "pc", cpu: "max", memory_kib: (256 << 10) - 8, processors: "1,maxcpus=2" };
    /// Less memory, and of a version and a model that another QEMU has as well.
    pub const SMALL: Self =
        Self { machine: "pc-i440fx-7.2", cpu: "qemu64", memory_kib: (128 << 10) - 8, ..Self::USUAL };
}

/// How a VM is on a network.
#[derive(Clone, Debug)]
pub struct NetworkCard {
    /// The tap that it is connected to, of this name on either host.
    pub tap: String,
    /// The VM's address, with the length of its prefix.
    pub address: (Ipv4Addr, u8),
    /// Where it answers.
    pub port: u16,
}

/// What a VM is, and how it works.
#[derive(Clone, Debug)]
pub struct VmOptions {
    /// What it boots from.
    pub image: GuestImage,
    /// What QEMU emulates.
    pub hardware: Hardware,
    /// Bytes of a request.
    pub block_bytes: u32,
    /// How many requests are in flight: each worker does one at a time.
    pub workers: u32,
    /// How long each worker rests between two requests: emulated without a pause, a VM takes a processor of its own.
    pub pause: Duration,
    /// How much of its disk it fills at first, in bytes.
    pub fill_bytes: u64,
    /// Decides which requests come.
    pub seed: u64,
    /// How much of its memory it checks and rewrites, at random, about 8 MB a second; in bytes.
    pub memory_bytes: u64,
    /// How much of its memory it writes as fast as it can, faster than a slow link carries; in bytes.
    pub swept_bytes: u64,
    /// How many disks it has, which it uses as one, striped.
    pub disks: usize,
    /// How it sees them.
    pub disk: DiskModel,
    /// Its network; `None`: it has none.
    pub card: Option<NetworkCard>,
}

impl VmOptions {
    /// The VM of the demo.
    pub fn new(image: GuestImage) -> Self {
        Self {
            image,
            hardware: Hardware::USUAL,
            block_bytes: 8192,
            workers: 16,
            pause: Duration::ZERO,
            fill_bytes: 256 << 20,
            seed: 1,
            memory_bytes: 0,
            swept_bytes: 0,
            disks: 1,
            disk: DiskModel::USUAL,
            card: None,
        }
    }

    /// What the VM does, in a few words.
    pub fn description(&self) -> String {
        let Self { block_bytes, workers, .. } = self;
        format!("Linux in QEMU, {} KiB, 70/30 random, {workers} outstanding", block_bytes / 1024)
    }

    /// What its kernel is told, for itself and for the checker, which answers clients on a port; 0: on none.
    fn kernel_words(&self) -> String {
        let Self { block_bytes, workers, fill_bytes, seed, memory_bytes, swept_bytes, .. } = self;
        let (port, pause_us) = (self.card.as_ref().map_or(0, |card| card.port), self.pause.as_micros());
        let check = format!(
            "{block_bytes},{workers},{fill_bytes},{seed},{memory_bytes},{port},{swept_bytes},{pause_us}"
        );
        let mut words = format!("{KERNEL_WORDS} sterna.check={check}");
        let more: String = ('b'..).take(self.disks.saturating_sub(1)).collect();
        if !more.is_empty() {
            words += &format!(" sterna.disks={more}");
        }
        if let Some(NetworkCard { address: (address, prefix_bits), .. }) = &self.card {
            words += &format!(" sterna.address={address}/{prefix_bits}");
        }
        words
    }
}

/// A VM. Dropping it kills whatever QEMU has its console, at whichever host: VMs outlive the daemons that have started them.
#[derive(Debug)]
pub struct Vm {
    talk: Talk,
    options: VmOptions,
    /// Where each QEMU connects to: in its command line, and in no other's.
    socket: PathBuf,
    /// To all that have connected; those that have ended hear nothing.
    speak: Arc<Mutex<Vec<UnixStream>>>,
    /// If it was started here, and the folder of its sockets.
    launched: Option<(Child, TempDir)>,
}

// How it is started.
impl Vm {
    /// Listens on `socket` for a VM that is to be started.
    ///
    /// # Errors
    /// If it cannot be listened on.
    pub fn expect(socket: &Path, options: VmOptions) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).context("listen for the VM's console")?;
        // Whomever QEMU runs as.
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666))?;
        let (talk, speak) = (Talk::new(), Arc::<Mutex<Vec<_>>>::default());
        // Ends with the process, which has few of them.
        std::thread::spawn({
            let (talk, speak, unfinished) = (talk.clone(), Arc::clone(&speak), Unfinished::default());
            move || {
                for output in listener.incoming().map_while(Result::ok) {
                    let Ok(input) = output.try_clone() else { continue };
                    locked(&speak).push(input);
                    talk.listen(output, Arc::clone(&unfinished));
                }
            }
        });
        Ok(Self { talk, options, socket: socket.to_owned(), speak, launched: None })
    }

    /// Starts QEMU with its disk at `disk`, and does not wait.
    ///
    /// # Errors
    /// If there is no QEMU.
    pub fn launch(disk: &Address, options: VmOptions) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("sterna-vm-").tempdir().context("make a folder")?;
        let mut vm = Self::expect(&folder.path().join("console"), options)?;
        let words = vm.command(disk, &folder.path().join("qmp"))?;
        let mut qemu = Command::new(QEMU)
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // QEMU's own complaints belong to the console's last lines.
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C is for whoever has started it, and ends the VM.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {QEMU}; scripts/install-packages demo installs it"))?;
        vm.talk.listen(qemu.stderr.take().context("QEMU has no standard error")?, Unfinished::default());
        vm.launched = Some((qemu, folder));
        Ok(vm)
    }

    /// The VM as `sterna vm add` takes it, with these volumes as its disks, and with more words for QEMU.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn definition(&self, volumes: &[&str], more: &[&str]) -> anyhow::Result<String> {
        let more = more.iter().map(|word| (*word).to_owned());
        // TOML and JSON write strings and lists of them with the same words.
        let words = serde_json::Value::from_iter(self.words()?.into_iter().chain(more));
        let disk = |(number, volume): (usize, &&str)| {
            format!("disk{number} = {}\n", serde_json::Value::from(*volume))
        };
        let disks: String = volumes.iter().enumerate().map(disk).collect();
        Ok(format!("command = {words}\n[disks]\n{disks}"))
    }

    /// The command that starts the same VM without a daemon, with its disk at `disk` and its monitor at `monitor`.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn command(&self, disk: &Address, monitor: &Path) -> anyhow::Result<Vec<String>> {
        let (socket, monitor) = (in_option(disk.socket())?, in_option(monitor)?);
        let fill = |word: String| {
            let word = word.replace("{disk:disk0}", &socket).replace("{export:disk0}", disk.export());
            word.replace("{qmp}", &monitor).replace("{name}", "vm")
        };
        Ok(self.words()?.into_iter().map(fill).collect())
    }

    /// Words of QEMU that start the guest: its kernel, and its console.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn guest_words(&self) -> anyhow::Result<[String; 10]> {
        let GuestImage { kernel, initramfs } = &self.options.image;
        let console = format!("socket,id=console,path={},server=off", in_option(&self.socket)?);
        let append = self.options.kernel_words();
        let (kernel, initramfs) = (text(kernel)?, text(initramfs)?);
        let words = ["-kernel", kernel, "-initrd", initramfs, "-append", &append, "-chardev", &console];
        let [a, b, c, d, e, f, g, h] = words.map(str::to_owned);
        Ok([a, b, c, d, e, f, g, h, "-serial".to_owned(), "chardev:console".to_owned()])
    }

    /// The command, with places for what differs from host to host.
    fn words(&self) -> anyhow::Result<Vec<String>> {
        let Hardware { machine, cpu, memory_kib, processors } = self.options.hardware;
        let words = ["-accel", "tcg", "-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"];
        let mut words: Vec<String> = [QEMU].into_iter().chain(words).map(str::to_owned).collect();
        words.extend(self.guest_words()?);
        let mut say = |option: &str, value: String| words.extend([option.to_owned(), value]);
        if let Some(NetworkCard { tap, .. }) = &self.options.card {
            say("-netdev", format!("tap,id=lan,ifname={tap},script=no,downscript=no"));
            // It boots from no network.
            say("-device", format!("virtio-net-pci,netdev=lan,mac={MAC},romfile="));
        }
        say("-name", "{name}".to_owned());
        say("-machine", machine.to_owned());
        say("-cpu", cpu.to_owned());
        say("-m", format!("{memory_kib}K"));
        say("-smp", processors.to_owned());
        say("-qmp", "unix:{qmp},server=on,wait=off".to_owned());
        for number in 0..self.options.disks {
            let node = format!("disk{number}");
            say(
                "-blockdev",
                format!(
                    "driver=nbd,node-name={node},server.type=unix,server.path={{disk:{node}}},export={{export:{node}}},\
                     reconnect-delay={RECONNECT_SECONDS},cache.direct=on,discard=unmap"
                ),
            );
            for device in self.options.disk.devices(&node) {
                say("-device", device);
            }
        }
        Ok(words)
    }
}

// What it says, and what is said to it.
impl Vm {
    /// What it is.
    pub fn options(&self) -> &VmOptions {
        &self.options
    }

    /// What its console has said so far.
    pub fn console(&self) -> MutexGuard<'_, Console> {
        self.talk.console()
    }

    /// What was said so far is of a run that has ended: another one begins.
    pub fn forget(&self) {
        self.console().forget();
    }

    /// Lets a guest shut down that has checked its disk.
    pub fn end(&self) {
        self.say("end");
    }

    /// Waits until it has booted, filled its disk, and works.
    ///
    /// # Errors
    /// If it does not, or has found another disk; the message ends with its console.
    pub async fn begins_to_work(&self) -> anyhow::Result<()> {
        self.talk.wait_for("begin to work", START_DEADLINE, Console::works).await?;
        let seen = self.console().disk().cloned().context("the VM does not tell its disk")?;
        self.options.disk.check(&seen).map_err(|error| self.talk.with_console(error))
    }

    /// Waits until it has done so many requests, counted from when it began to work.
    ///
    /// # Errors
    /// If it ends or stops working before; the message ends with its console.
    pub async fn has_done(&self, requests: u64) -> anyhow::Result<()> {
        self.talk.wait_for("do its work", START_DEADLINE, |console| console.requests() >= requests).await
    }

    /// Ends with the reason as soon as it has failed, ended or fallen silent.
    pub async fn failure(&self) -> anyhow::Error {
        self.talk.failure().await
    }

    /// Lets it finish its requests and compare its whole disk, then powers it off.
    ///
    /// # Errors
    /// If it does not. What it has found wrong is no error: the verdict tells.
    pub async fn stop(&mut self) -> anyhow::Result<Verdict> {
        self.say("verify");
        let verified = |console: &Console| console.verdict().is_some();
        self.talk.wait_for("verify its disk", VERIFY_DEADLINE, verified).await?;
        let verdict = self.console().verdict().context("a verdict that was seen is gone")?;
        self.end();
        self.talk.wait_for("power off", END_DEADLINE, Console::is_closed).await?;
        self.check_end()?;
        Ok(verdict)
    }

    fn say(&self, command: &str) {
        for input in locked(&self.speak).iter_mut() {
            // Those that have ended do not matter; if none hears it, the wait for what it leads to fails.
            let _ = input.write_all(format!("{command}\n").as_bytes());
        }
    }

    /// Checks how QEMU has ended, if it was started here.
    fn check_end(&mut self) -> anyhow::Result<()> {
        let Some((mut qemu, _folder)) = self.launched.take() else { return Ok(()) };
        let status = qemu.wait().context("wait for QEMU")?;
        if status.success() {
            return Ok(());
        }
        Err(self.talk.with_console(anyhow!("QEMU ended with {status}")))
    }
}

// For callers without a runtime.
impl Vm {
    /// Waits until the guest has made so many more requests.
    ///
    /// # Errors
    /// If it does not, or has found something wrong.
    pub fn work_on(&self, requests: u64) -> anyhow::Result<()> {
        let done = || {
            let console = self.console();
            console.check()?;
            anyhow::Ok(console.requests())
        };
        let wanted = done()? + requests;
        until("the guest works", || Ok((done()? >= wanted).then_some(())))
            .map_err(|error| self.talk.with_console(error))
    }

    /// Ends the guest's work; it then checks its whole disk, and its memory.
    ///
    /// # Errors
    /// If anything is not as it was written.
    pub fn verify(&self) -> anyhow::Result<()> {
        self.verdict().map(drop)
    }

    /// As [`Self::verify`]; returns what the guest knows of its disk.
    ///
    /// # Errors
    /// As there.
    pub fn verdict(&self) -> anyhow::Result<Verdict> {
        self.say("verify");
        let verdict = until("the guest has checked its disk", || Ok(self.console().verdict()))
            .map_err(|error| self.talk.with_console(error))?;
        ensure!(verdict.errors == 0, "{verdict:?}: {:#?}", self.console().wrong());
        Ok(verdict)
    }

    /// As [`Self::verdict`]; then powers it off.
    ///
    /// # Errors
    /// As there, and if it does not end in order.
    pub fn verify_and_end(mut self) -> anyhow::Result<Verdict> {
        let verdict = self.verdict()?;
        self.end();
        until("the guest powers off", || Ok(self.console().is_closed().then_some(())))?;
        self.check_end()?;
        Ok(verdict)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        kill_those_with(&self.socket);
        if let Some((qemu, _)) = &mut self.launched {
            // It may have ended by itself.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// Kills every QEMU whose command has this path in it.
fn kill_those_with(path: &Path) {
    let path = path.to_string_lossy();
    for process in std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
        let number = process.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(process_id) = number.and_then(Pid::from_raw) else { continue };
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        if command.starts_with(QEMU) && command.contains(path.as_ref()) {
            // It may have ended.
            let _ = kill_process(process_id, Signal::KILL);
        }
    }
}

/// A panic elsewhere makes nothing of it wrong.
fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is no Unicode", path.display()))
}

/// A path within an option's value, where two commas are one.
fn in_option(path: &Path) -> anyhow::Result<String> {
    Ok(text(path)?.replace(',', ",,"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_has_its_places_and_the_card_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let image = GuestImage { kernel: "/boot/kernel".into(), initramfs: "/boot/\"initramfs\"".into() };
        let card = NetworkCard { tap: "guest".to_owned(), address: (Ipv4Addr::LOCALHOST, 24), port: 80 };
        let options = VmOptions { memory_bytes: 4096, disks: 2, card: Some(card), ..VmOptions::new(image) };
        let vm = Vm::expect(&folder.path().join("a,b"), options).unwrap();
        let text = vm.definition(&["first", "second"], &["-more"]).unwrap();
        for part in [
            "a,,b,server=off",
            "{qmp}",
            "{disk:disk1}",
            "/boot/\\\"initramfs\\\"",
            "ifname=guest",
            ",4096,80,0,0 sterna.disks=b sterna.address=127.0.0.1/24",
            "\"-more\"]\n[disks]\ndisk0 = \"first\"\ndisk1 = \"second\"\n",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}
