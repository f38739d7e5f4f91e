//! A VM in QEMU that writes and checks its disk. Its console connects to this process, whichever host runs it.
//!
//! ```text
//!   QEMU at one host ───┐                              (TCG, no KVM needed)
//!   QEMU at the other ──┴── each connects to one socket ──► Talk: one console for both
//!     │ virtio-blk or virtio-scsi                             └─ ticks, wrong blocks, the verdict
//!     └─ NBD client, reconnecting ──► a volume
//! ```
//!
//! It is started by a daemon with its [definition](Vm::definition), by its [command](Vm::command), or by [`Vm::launch`]. Emulated
//! without KVM it makes about ten thousand requests a second.

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

/// Longest time for booting and filling, which take tens of seconds on a busy host without KVM.
const START_DEADLINE: Duration = Duration::from_secs(300);
/// Longest time for the comparison of the whole disk.
const VERIFY_DEADLINE: Duration = Duration::from_secs(300);
/// Longest time for powering off.
const END_DEADLINE: Duration = Duration::from_secs(60);
/// The kernel's command line: few messages, only on the console, and the end of the VM at a panic. The timer is not checked,
/// because on a busy host without KVM it may stand still during the check, and the kernel would give up.
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off no_timer_check";
/// Time for which QEMU tries to reconnect to an absent server, while requests wait.
const RECONNECT_SECONDS: u32 = 120;
/// Address of its network card, from an unassigned range.
const MAC: &str = "52:54:00:7e:12:a1";
const QEMU: &str = "qemu-system-x86_64";

/// The hardware that QEMU emulates.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// The value of QEMU's `-machine`.
    pub machine: &'static str,
    /// The value of QEMU's `-cpu`.
    pub cpu: &'static str,
    /// Size of its memory in KiB.
    ///
    /// **N.B.** QEMU before 9.0 loses writes of an emulated guest (TCG) while it migrates, and the guest crashes sooner or later:
    /// after it has read the dirty pages, it misses the next write to them. It takes this short cut only if the memory is a
    /// multiple of 64 pages, so a VM that moves has 8 KiB less.
    pub memory_kib: u32,
    /// The value of QEMU's `-smp`.
    ///
    /// **N.B.** QEMU 7.2 emulates a guest that can have only one processor without memory barriers, although QEMU's devices
    /// access its memory from other threads (8.1 keeps only explicit barriers). Such a guest may request an interrupt of its disk
    /// too late for the disk to see it, and then waits for ever. That happened four times in about two hours of work. A guest
    /// that can get a second processor is emulated correctly.
    pub processors: &'static str,
}

impl Hardware {
    /// QEMU's defaults. The memory is large enough for the kernel, the initramfs and a buffer for each worker.
    pub const USUAL: Self =
        Self { machine: "pc", cpu: "max", memory_kib: (256 << 10) - 8, processors: "1,maxcpus=2" };
    /// Less memory, with a version and a model that other QEMU versions have as well.
    pub const SMALL: Self =
        Self { machine: "pc-i440fx-7.2", cpu: "qemu64", memory_kib: (128 << 10) - 8, ..Self::USUAL };
}

/// The network card of a VM.
#[derive(Clone, Debug)]
pub struct NetworkCard {
    /// Name of its tap, the same on either host.
    pub tap: String,
    /// The VM's address, with the length of its prefix.
    pub address: (Ipv4Addr, u8),
    /// Port at which the guest answers.
    pub port: u16,
}

/// The options of a VM.
#[derive(Clone, Debug)]
pub struct VmOptions {
    /// Its kernel and initramfs.
    pub image: GuestImage,
    /// The hardware that QEMU emulates.
    pub hardware: Hardware,
    /// Size of a request in bytes.
    pub block_bytes: u32,
    /// Number of requests in flight, one for each worker.
    pub workers: u32,
    /// Pause of each worker between two requests. Without it an emulated VM uses a whole processor.
    pub pause: Duration,
    /// Bytes of its disk that it fills at first.
    pub fill_bytes: u64,
    /// Seed of its random requests.
    pub seed: u64,
    /// Bytes of its memory that it checks and rewrites at random, about 8 MB a second.
    pub memory_bytes: u64,
    /// Bytes of its memory that it writes as fast as it can, faster than a slow link.
    pub swept_bytes: u64,
    /// Number of its disks, which it uses as one striped disk.
    pub disks: usize,
    /// The model of its disks.
    pub disk: DiskModel,
    /// Its network card; `None`: it has none.
    pub card: Option<NetworkCard>,
}

impl VmOptions {
    /// Returns the options of the demo's VM.
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

    /// Returns a short description of the VM's work.
    pub fn description(&self) -> String {
        let Self { block_bytes, workers, .. } = self;
        format!("Linux in QEMU, {} KiB, 70/30 random, {workers} outstanding", block_bytes / 1024)
    }

    /// Returns the kernel's command line, with the options of the checker. The checker answers clients on a port; 0: on none.
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

/// A VM. Dropping it kills every QEMU that has its console, because VMs outlive the daemons that have started them.
#[derive(Debug)]
pub struct Vm {
    talk: Talk,
    options: VmOptions,
    /// The socket that each of its QEMUs connects to. The path is in no other QEMU's command line.
    socket: PathBuf,
    /// The connections of all QEMUs, also of ended ones.
    speak: Arc<Mutex<Vec<UnixStream>>>,
    /// QEMU and the folder of its sockets, if it was started here.
    launched: Option<(Child, TempDir)>,
}

impl Vm {
    /// Listens on `socket` for a VM that will be started.
    ///
    /// # Errors
    /// If it cannot be listened on.
    pub fn expect(socket: &Path, options: VmOptions) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).context("listen for the VM's console")?;
        // QEMU may run as any user.
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666))?;
        let (talk, speak) = (Talk::new(), Arc::<Mutex<Vec<_>>>::default());
        // The thread ends with the process, which has few VMs.
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
            // QEMU's own errors are added to the console.
            .stderr(Stdio::piped())
            // With a process group of its own, it does not get Ctrl-C. The program that has started it ends the VM.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {QEMU}; scripts/install-packages demo installs it"))?;
        vm.talk.listen(qemu.stderr.take().context("QEMU has no standard error")?, Unfinished::default());
        vm.launched = Some((qemu, folder));
        Ok(vm)
    }

    /// Returns the definition for `sterna vm add`, with these volumes as disks, and with more arguments for QEMU.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn definition(&self, volumes: &[&str], more: &[&str]) -> anyhow::Result<String> {
        let more = more.iter().map(|word| (*word).to_owned());
        // TOML and JSON have the same syntax for lists of strings.
        let words = serde_json::Value::from_iter(self.words()?.into_iter().chain(more));
        let disk = |(number, volume): (usize, &&str)| {
            format!("disk{number} = {}\n", serde_json::Value::from(*volume))
        };
        let disks: String = volumes.iter().enumerate().map(disk).collect();
        Ok(format!("command = {words}\n[disks]\n{disks}"))
    }

    /// Returns the command that starts the VM without a daemon, with its disk at `disk` and its monitor at `monitor`.
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

    /// Returns QEMU's arguments for the guest's kernel and console.
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

    /// Returns the command, with placeholders for everything that differs from host to host.
    fn words(&self) -> anyhow::Result<Vec<String>> {
        let Hardware { machine, cpu, memory_kib, processors } = self.options.hardware;
        let words = ["-accel", "tcg", "-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"];
        let mut words: Vec<String> = [QEMU].into_iter().chain(words).map(str::to_owned).collect();
        words.extend(self.guest_words()?);
        let mut say = |option: &str, value: String| words.extend([option.to_owned(), value]);
        if let Some(NetworkCard { tap, .. }) = &self.options.card {
            say("-netdev", format!("tap,id=lan,ifname={tap},script=no,downscript=no"));
            // It does not boot from the network.
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

// Communication over its console.
impl Vm {
    /// Returns the options of the VM.
    pub fn options(&self) -> &VmOptions {
        &self.options
    }

    /// Returns the record of its console.
    pub fn console(&self) -> MutexGuard<'_, Console> {
        self.talk.console()
    }

    /// Forgets the record of an ended run, before another one begins.
    pub fn forget(&self) {
        self.console().forget();
    }

    /// Shuts a guest down that has checked its disk.
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

    /// Waits until it has made `requests` requests since it began to work.
    ///
    /// # Errors
    /// If it ends or stops working before; the message ends with its console.
    pub async fn has_done(&self, requests: u64) -> anyhow::Result<()> {
        self.talk.wait_for("do its work", START_DEADLINE, |console| console.requests() >= requests).await
    }

    /// Returns the reason once the VM has failed, ended or fallen silent.
    pub async fn failure(&self) -> anyhow::Error {
        self.talk.failure().await
    }

    /// Ends its work, makes it compare its whole disk, and powers it off.
    ///
    /// # Errors
    /// If it does not do so. Wrong blocks are no error, but a part of the verdict.
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
            // Errors of ended QEMUs are ignored. If none gets the command, the wait for its result fails.
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

// These are for callers without a runtime.
impl Vm {
    /// Waits until the guest has made `requests` more requests.
    ///
    /// # Errors
    /// If it does not, or has found a wrong block.
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

    /// Ends the guest's work, after which it checks its whole disk and its memory.
    ///
    /// # Errors
    /// If any byte differs from the written one.
    pub fn verify(&self) -> anyhow::Result<()> {
        self.verdict().map(drop)
    }

    /// Verifies as [`Self::verify`], and returns the guest's verdict.
    ///
    /// # Errors
    /// Those of [`Self::verify`].
    pub fn verdict(&self) -> anyhow::Result<Verdict> {
        self.say("verify");
        let verdict = until("the guest has checked its disk", || Ok(self.console().verdict()))
            .map_err(|error| self.talk.with_console(error))?;
        ensure!(verdict.errors == 0, "{verdict:?}: {:#?}", self.console().wrong());
        Ok(verdict)
    }

    /// Verifies as [`Self::verdict`], then powers it off.
    ///
    /// # Errors
    /// Those of [`Self::verify`], and if it does not end in order.
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
            // QEMU may have ended by itself.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// Kills every QEMU with this path in its command line.
fn kill_those_with(path: &Path) {
    let path = path.to_string_lossy();
    for process in std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
        let number = process.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(process_id) = number.and_then(Pid::from_raw) else { continue };
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        if command.starts_with(QEMU) && command.contains(path.as_ref()) {
            // The process may have ended.
            let _ = kill_process(process_id, Signal::KILL);
        }
    }
}

/// Locks a value, also after a panic of another thread, which leaves it consistent.
fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is no Unicode", path.display()))
}

/// Returns a path for an option's value, with doubled commas.
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
