//! A machine in QEMU whose only work is to write and check its disk: the guest of `sterna demo --vm`.
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

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio::time::timeout;

use self::console::{Console, Verdict};
use crate::demo::{DemoGuest, Felt, Progress, StoppedDemoGuest, Wrong, with_progress, with_tail};
use crate::nbd_client::Address;
use crate::workload::verify_digest;

pub use self::console::MachineMark;
pub use self::disk::{Bus, DiskModel};
pub use self::image::GuestImage;

/// How long booting and filling may take: tens of seconds on a busy host, without KVM.
const START_DEADLINE: Duration = Duration::from_secs(300);
/// A machine that is silent for so long is lost; ticks come ten times a second while it works.
const SILENCE_MAX: Duration = Duration::from_secs(60);
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
    /// How it sees its disk.
    pub disk: DiskModel,
}

impl MachineOptions {
    /// The machine of the demo.
    pub fn new(image: GuestImage) -> Self {
        Self { image, block_bytes: 8192, workers: 16, fill_bytes: 256 << 20, seed: 1, disk: DiskModel::USUAL }
    }
}

/// A running machine.
///
/// Dropping it kills QEMU.
#[derive(Debug)]
pub struct Machine {
    qemu: Child,
    input: ChildStdin,
    console: Arc<Mutex<Console>>,
    /// Changes with every line; closes with the console.
    lines: watch::Receiver<()>,
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
        let console = Arc::new(Mutex::new(Console::default()));
        let (sender, lines) = watch::channel(());
        let input = qemu.stdin.take().context("QEMU has no standard input")?;
        let output = qemu.stdout.take().context("QEMU has no standard output")?;
        let complaints = qemu.stderr.take().context("QEMU has no standard error")?;
        tokio::spawn(listen(output, Arc::clone(&console), sender.clone()));
        tokio::spawn(listen(complaints, Arc::clone(&console), sender));
        let mut machine = Self { qemu, input, console, lines, options };
        machine.wait_for("begin to work", START_DEADLINE, Console::works).await?;
        let seen = lock(&machine.console).disk().cloned().context("the machine does not tell its disk")?;
        machine.options.disk.check(&seen).map_err(|error| machine.with_console(error))?;
        Ok(machine)
    }

    /// Waits until the machine has done so many requests, counted from when it began to work.
    ///
    /// # Errors
    /// If it ends or stops working before; the message ends with its console.
    pub async fn wait_for_requests(&mut self, requests: u64) -> anyhow::Result<()> {
        self.wait_for("do its work", START_DEADLINE, |console| console.requests() >= requests).await
    }

    /// Lets the machine finish its requests and compare its whole disk, then powers it off.
    async fn verify(&mut self) -> anyhow::Result<Verdict> {
        self.say("verify").await?;
        self.wait_for("verify its disk", VERIFY_DEADLINE, |console| console.verdict().is_some()).await?;
        let verdict = lock(&self.console).verdict().context("a verdict that was seen is gone")?;
        self.say("end").await?;
        match timeout(END_DEADLINE, self.qemu.wait()).await {
            Ok(status) => {
                check_end(status.context("wait for QEMU")?).map_err(|error| self.with_console(error))?;
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

    /// Waits until the console has said what `condition` looks for.
    async fn wait_for(
        &mut self,
        what: &str,
        deadline: Duration,
        condition: impl Fn(&Console) -> bool,
    ) -> anyhow::Result<()> {
        let said = async {
            loop {
                {
                    let console = lock(&self.console);
                    if condition(&console) {
                        return Ok(());
                    }
                    if let Some(why) = console.failure() {
                        bail!("the machine could not {what}: {why}");
                    }
                }
                if self.lines.changed().await.is_err() {
                    bail!("the machine ended before it could {what}");
                }
            }
        };
        let seconds = deadline.as_secs();
        let said = timeout(deadline, said).await;
        said.unwrap_or_else(|_| Err(anyhow!("the machine did not {what} within {seconds} s")))
            .map_err(|error| self.with_console(error))
    }

    fn with_console(&self, error: anyhow::Error) -> anyhow::Error {
        with_tail(error, "the machine's console", &lock(&self.console).text())
    }
}

impl DemoGuest for Machine {
    type Mark = MachineMark;
    type Stopped = StoppedMachine;

    fn description(&self) -> String {
        let MachineOptions { block_bytes, workers, .. } = &self.options;
        format!("Linux in QEMU, {} KiB, 70/30 random, {workers} outstanding", block_bytes / 1024)
    }

    fn mark(&self) -> MachineMark {
        lock(&self.console).mark()
    }

    fn between(&self, first: &MachineMark, last: &MachineMark) -> Felt {
        lock(&self.console).between(*first, *last)
    }

    fn rates(&self, first: &MachineMark, last: &MachineMark) -> Vec<f64> {
        lock(&self.console).rates(*first, *last)
    }

    async fn failure(&self) -> anyhow::Error {
        let mut lines = self.lines.clone();
        loop {
            let closed = matches!(timeout(SILENCE_MAX, lines.changed()).await, Ok(Err(_)));
            let console = lock(&self.console);
            let silent = console.last_word().is_none_or(|last_word| last_word.elapsed() >= SILENCE_MAX);
            let failure = console.failure().map(str::to_owned);
            drop(console);
            let why = match failure {
                Some(why) => why,
                None if closed => "QEMU ended".to_owned(),
                None if silent => format!("it has said nothing for {} s", SILENCE_MAX.as_secs()),
                None => continue,
            };
            return self.with_console(anyhow!("the machine stopped working: {why}"));
        }
    }

    async fn stop_and_verify(mut self, progress: &mut Progress) -> anyhow::Result<StoppedMachine> {
        progress.begin("verifying the whole disk in the machine");
        let verdict = self.verify().await?;
        let first = lock(&self.console).wrong().to_vec();
        let wrong = Wrong { count: verdict.errors, first };
        Ok(StoppedMachine { verdict, wrong, block_bytes: self.options.block_bytes })
    }
}

/// A machine that has compared its disk and is powered off.
#[derive(Debug)]
pub struct StoppedMachine {
    verdict: Verdict,
    wrong: Wrong,
    block_bytes: u32,
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

/// Reads the console, line by line, to its end.
async fn listen(
    output: impl tokio::io::AsyncRead + Unpin,
    console: Arc<Mutex<Console>>,
    changed: watch::Sender<()>,
) {
    let mut lines = BufReader::new(output).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let line = String::from_utf8_lossy(&line);
        lock(&console).take(line.trim_end(), Instant::now());
        changed.send_replace(());
    }
}

fn arguments(address: &Address, options: &MachineOptions) -> Vec<OsString> {
    let MachineOptions { image, block_bytes, workers, fill_bytes, seed, disk: model } = options;
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
    let kernel_words = format!("{KERNEL_WORDS} sterna.check={block_bytes},{workers},{fill_bytes},{seed}");
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
        kernel_words.into(),
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

/// A panic elsewhere does not make the console wrong.
fn lock(console: &Mutex<Console>) -> MutexGuard<'_, Console> {
    console.lock().unwrap_or_else(PoisonError::into_inner)
}
