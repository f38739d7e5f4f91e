//! A machine in QEMU whose only work is to write and check its disk: the guest of `sterna demo --vm`. One that a daemon
//! starts, and moves to another host, is in [`moving`](MovingMachine).
//!
//! ```text
//!   QEMU (TCG, no KVM needed) ── virtio-blk or virtio-scsi ── NBD client, reconnecting ──► the volume's socket
//!     │ serial console
//!     └─ ticks, wrong blocks, the verdict ──► Console ──► marks, Felt
//!     ◄─ "verify", "end"
//! ```
//!
//! The machine is what a user of Sterna has: a kernel, a block driver, QEMU's own NBD client. Emulated without KVM it
//! does some ten thousand requests a second; the thread guest does more, but it is not a machine.

mod console;
mod disk;
mod image;
mod moving;
mod talk;

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use testbed::nbd_client::Address;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use self::console::{Console, Verdict};
use self::talk::{Talk, Unfinished};
use crate::demo::{DemoGuest, Felt, Progress, StoppedDemoGuest, Wrong, with_progress};
use crate::workload::{Window, verify_digest};

pub use self::console::MachineMark;
pub use self::disk::{Bus, DiskModel};
pub use self::image::GuestImage;
pub use self::moving::{MovingMachine, NetworkCard};

/// How long booting and filling may take: tens of seconds on a busy host, without KVM.
const START_DEADLINE: Duration = Duration::from_secs(300);
/// How long the comparison of the whole disk may take.
const VERIFY_DEADLINE: Duration = Duration::from_secs(300);
/// How long powering off may take.
const END_DEADLINE: Duration = Duration::from_secs(60);
/// What the kernel is told: to say little and only here, and to end the machine if it fails. Whether its timer ticks is not
/// checked: on a busy host without KVM it may not for as long as the check takes, and the kernel would give up.
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off no_timer_check";
/// How long QEMU tries to reach a server that went away; requests wait meanwhile.
const RECONNECT_SECONDS: u32 = 120;
/// Memory of the machine: kernel, initramfs and a buffer for each worker fit many times.
const MEMORY_MIB: u32 = 256;
/// Bytes of a page of memory, as the checker counts them.
const MEMORY_PAGE_BYTES: u64 = 4096;
/// The emulator.
const QEMU: &str = "qemu-system-x86_64";

/// How the machine works.
#[derive(Clone, Debug)]
pub struct MachineOptions {
    /// What it boots from.
    pub image: GuestImage,
    /// Bytes of a request.
    pub block_bytes: u32,
    /// How many requests are in flight: each worker does one at a time.
    pub workers: u32,
    /// How much of its disk it fills at first, in bytes.
    pub fill_bytes: u64,
    /// Decides which requests come.
    pub seed: u64,
    /// How much of its memory it checks as well, in bytes.
    pub memory_bytes: u64,
    /// How it sees its disk.
    pub disk: DiskModel,
}

impl MachineOptions {
    /// Memory of a machine in bytes; one that moves has 8 KiB less.
    pub const RAM_BYTES: u64 = (MEMORY_MIB as u64) << 20;

    /// The machine of the demo.
    pub fn new(image: GuestImage) -> Self {
        Self {
            image,
            block_bytes: 8192,
            workers: 16,
            fill_bytes: 256 << 20,
            seed: 1,
            memory_bytes: 0,
            disk: DiskModel::USUAL,
        }
    }

    /// What the machine does, in a few words.
    fn description(&self) -> String {
        let Self { block_bytes, workers, .. } = self;
        format!("Linux in QEMU, {} KiB, 70/30 random, {workers} outstanding", block_bytes / 1024)
    }

    /// What its kernel is told, for itself and for the checker, which answers clients on `port`; 0: on none.
    fn kernel_words(&self, port: u16) -> String {
        let Self { block_bytes, workers, fill_bytes, seed, memory_bytes, .. } = self;
        let check = format!("{block_bytes},{workers},{fill_bytes},{seed},{memory_bytes},{port}");
        format!("{KERNEL_WORDS} sterna.check={check}")
    }
}

/// A running machine.
///
/// Dropping it kills QEMU.
#[derive(Debug)]
pub struct Machine {
    qemu: Child,
    input: ChildStdin,
    talk: Talk,
    options: MachineOptions,
}

impl Machine {
    /// Boots the machine on a volume, and waits until it has filled its disk and works.
    ///
    /// # Errors
    /// If QEMU is missing, ends, or the machine does not begin to work; the message ends with its console.
    pub async fn start(
        address: &Address,
        options: MachineOptions,
        progress: &mut Progress,
    ) -> anyhow::Result<Self> {
        progress.begin("booting a machine");
        let mut qemu = Command::new(QEMU)
            .args(arguments(address, &options))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // QEMU's own complaints belong to the console's last lines.
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C is for the demo, which then ends the machine.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {QEMU}; scripts/install-packages demo installs it"))?;
        let talk = Talk::new();
        let input = qemu.stdin.take().context("QEMU has no standard input")?;
        talk.listen(qemu.stdout.take().context("QEMU has no standard output")?, Unfinished::default());
        talk.listen(qemu.stderr.take().context("QEMU has no standard error")?, Unfinished::default());
        let machine = Self { qemu, input, talk, options };
        machine.talk.wait_for("begin to work", START_DEADLINE, Console::works).await?;
        let seen = machine.talk.console().disk().cloned().context("the machine does not tell its disk")?;
        machine.options.disk.check(&seen).map_err(|error| machine.talk.with_console(error))?;
        Ok(machine)
    }

    /// Waits until the machine has done so many requests, counted from when it began to work.
    ///
    /// # Errors
    /// If it ends or stops working before; the message ends with its console.
    pub async fn wait_for_requests(&mut self, requests: u64) -> anyhow::Result<()> {
        self.talk.wait_for("do its work", START_DEADLINE, |console| console.requests() >= requests).await
    }

    /// Lets the machine finish its requests and compare its whole disk, then powers it off.
    async fn verify(&mut self) -> anyhow::Result<Verdict> {
        self.say("verify").await?;
        let verified = |console: &Console| console.verdict().is_some();
        self.talk.wait_for("verify its disk", VERIFY_DEADLINE, verified).await?;
        let verdict = self.talk.console().verdict().context("a verdict that was seen is gone")?;
        self.say("end").await?;
        match timeout(END_DEADLINE, self.qemu.wait()).await {
            Ok(status) => {
                check_end(status.context("wait for QEMU")?).map_err(|error| self.talk.with_console(error))?;
            }
            // It has nothing to lose: the comparison is done and flushed.
            Err(_) => self.qemu.kill().await.context("kill QEMU")?,
        }
        Ok(verdict)
    }

    async fn say(&mut self, command: &str) -> anyhow::Result<()> {
        self.input
            .write_all(format!("{command}\n").as_bytes())
            .await
            .context("write to the machine's console")
    }
}

impl DemoGuest for Machine {
    type Mark = MachineMark;
    type Stopped = StoppedMachine;

    fn description(&self) -> String {
        self.options.description()
    }

    fn mark(&self) -> MachineMark {
        self.talk.console().mark()
    }

    fn between(&self, first: &MachineMark, last: &MachineMark) -> Felt {
        self.talk.console().between(*first, *last)
    }

    fn windows(&self, first: &MachineMark, last: &MachineMark) -> Vec<Window> {
        self.talk.console().windows(*first, *last)
    }

    async fn failure(&self) -> anyhow::Error {
        self.talk.failure().await
    }

    async fn stop_and_verify(mut self, progress: &mut Progress) -> anyhow::Result<StoppedMachine> {
        progress.begin("verifying the whole disk in the machine");
        let verdict = self.verify().await?;
        Ok(StoppedMachine::new(verdict, &self.talk, &self.options))
    }
}

/// A machine that has compared its disk and is powered off.
#[derive(Debug)]
pub struct StoppedMachine {
    verdict: Verdict,
    wrong: Wrong,
    block_bytes: u32,
}

impl StoppedMachine {
    fn new(verdict: Verdict, talk: &Talk, options: &MachineOptions) -> Self {
        let wrong = Wrong { count: verdict.errors, first: talk.console().wrong().to_vec() };
        Self { verdict, wrong, block_bytes: options.block_bytes }
    }

    /// Bytes of its memory that it has compared.
    pub fn memory_bytes(&self) -> u64 {
        self.verdict.memory_pages * MEMORY_PAGE_BYTES
    }
}

impl StoppedDemoGuest for StoppedMachine {
    async fn verify_image(&mut self, image: &Path, progress: &mut Progress) -> anyhow::Result<()> {
        progress.begin("verifying the target's image");
        let Verdict { blocks, seed, digest, .. } = self.verdict;
        let (image, block_bytes) = (image.to_owned(), self.block_bytes);
        let disk_bytes = blocks * u64::from(block_bytes);
        let findings = with_progress(progress, disk_bytes, move |report| {
            verify_digest(&image, blocks, block_bytes, seed, digest, report)
        })
        .await?;
        self.wrong.count += findings.len() as u64;
        self.wrong.first.extend(findings);
        Ok(())
    }

    fn wrong(&self) -> Wrong {
        self.wrong.clone()
    }

    /// QEMU does not tell.
    fn reconnects(&self) -> u64 {
        0
    }
}

fn arguments(address: &Address, options: &MachineOptions) -> Vec<OsString> {
    let MachineOptions { image, disk: model, .. } = options;
    // JSON, because a comma in a path would mean something to QEMU's other syntax.
    let disk = serde_json::json!({
        "driver": "nbd",
        "node-name": "disk",
        "export": address.export(),
        "reconnect-delay": RECONNECT_SECONDS,
        "server": {"type": "unix", "path": address.socket().to_string_lossy()},
        "cache": {"direct": true},
        "discard": "unmap",
    });
    let words: [OsString; _] = [
        "-accel".into(),
        "tcg".into(),
        "-cpu".into(),
        "max".into(),
        "-m".into(),
        MEMORY_MIB.to_string().into(),
        "-nodefaults".into(),
        "-no-user-config".into(),
        "-no-reboot".into(),
        "-display".into(),
        "none".into(),
        "-kernel".into(),
        image.kernel.clone().into(),
        "-initrd".into(),
        image.initramfs.clone().into(),
        "-append".into(),
        options.kernel_words(0).into(),
        "-chardev".into(),
        "stdio,id=console,signal=off".into(),
        "-serial".into(),
        "chardev:console".into(),
        "-blockdev".into(),
        disk.to_string().into(),
    ];
    words.into_iter().chain(model.arguments()).collect()
}

fn check_end(status: ExitStatus) -> anyhow::Result<()> {
    if status.success() { Ok(()) } else { Err(anyhow!("QEMU ended with {status}")) }
}
