//! A machine that a daemon starts, and that moves to another host while it works: its console is ours, wherever it runs.
//!
//! ```text
//!   QEMU at one host ───┐
//!   QEMU at the other ──┴── each connects to one socket ──► Talk: one console, which goes on where the other has ended
//! ```
//!
//! It is started by a [definition](MovingMachine::definition), and moved by whoever has the daemons. Dropping it kills
//! whatever QEMU has its console.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use testbed::nbd_client::Address;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use super::console::{Console, MachineMark};
use super::talk::{Talk, Unfinished};
use super::{
    END_DEADLINE, MEMORY_MIB, MachineOptions, QEMU, RECONNECT_SECONDS, START_DEADLINE, StoppedMachine,
    VERIFY_DEADLINE,
};
use crate::demo::{DemoGuest, Felt, Progress};
use crate::workload::Window;

/// What the definition calls the machine's disk.
const DISK: &str = "root";
/// The machine's memory: 8 KiB less than others have.
///
/// **N.B.** QEMU before 9.0 loses writes of a guest that it emulates (TCG) while it migrates, and the guest crashes sooner
/// or later: having asked which pages are dirty it does not make the processor tell of the next write. It takes that short
/// cut only with memory that is a multiple of 64 pages.
const MEMORY_KIB: u32 = (MEMORY_MIB << 10) - 8;
/// The address of its card: one of those that nobody has been given.
const MAC: &str = "52:54:00:7e:12:a1";

/// How the machine is on a network.
#[derive(Clone, Debug)]
pub struct NetworkCard {
    /// The tap that it is connected to, of this name on either host.
    pub tap: String,
    /// The machine's address, with the length of its prefix.
    pub address: (Ipv4Addr, u8),
    /// Where it answers.
    pub port: u16,
}

/// A machine that moves.
#[derive(Debug)]
pub struct MovingMachine {
    talk: Talk,
    options: MachineOptions,
    card: Option<NetworkCard>,
    /// Where each QEMU connects to: in its command line, and in no other's.
    socket: PathBuf,
    /// To all that have connected; those that have ended hear nothing.
    speak: Arc<Mutex<Vec<OwnedWriteHalf>>>,
    accepting: JoinHandle<()>,
}

impl MovingMachine {
    /// Listens on `socket` for a machine that is to be started.
    ///
    /// # Errors
    /// If it cannot be listened on.
    pub fn expect(socket: &Path, options: MachineOptions, card: Option<NetworkCard>) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).context("listen for the machine's console")?;
        let (talk, speak) = (Talk::new(), Arc::<Mutex<Vec<_>>>::default());
        let accepting = tokio::spawn({
            let (talk, speak, unfinished) = (talk.clone(), Arc::clone(&speak), Unfinished::default());
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let (output, input) = stream.into_split();
                    speak.lock().await.push(input);
                    talk.listen(output, Arc::clone(&unfinished));
                }
            }
        });
        Ok(Self { talk, options, card, socket: socket.to_owned(), speak, accepting })
    }

    /// The machine as `sterna vm add` takes it, with `volume` as its disk.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn definition(&self, volume: &str) -> anyhow::Result<String> {
        // TOML and JSON write strings and lists of them with the same words.
        let (words, volume) = (serde_json::Value::from(self.words()?), serde_json::Value::from(volume));
        Ok(format!("command = {words}\n[disks]\n{DISK} = {volume}\n"))
    }

    /// The command that starts the same machine without a daemon, with its disk at `disk` and its monitor at `monitor`.
    ///
    /// # Errors
    /// If a path is no Unicode.
    pub fn command(&self, disk: &Address, monitor: &Path) -> anyhow::Result<Vec<String>> {
        let in_option = |path: &Path| path.to_string_lossy().replace(',', ",,");
        let (socket, monitor) = (in_option(disk.socket()), in_option(monitor));
        let fill = |word: String| {
            let word = word.replace(&format!("{{disk:{DISK}}}"), &socket);
            let word = word.replace(&format!("{{export:{DISK}}}"), disk.export());
            word.replace("{qmp}", &monitor).replace("{name}", DISK)
        };
        Ok(self.words()?.into_iter().map(fill).collect())
    }

    /// The command, with places for what differs from host to host.
    fn words(&self) -> anyhow::Result<Vec<String>> {
        let text = |path: &Path| {
            let text = path.to_str().map(str::to_owned);
            text.with_context(|| format!("{} is no Unicode", path.display()))
        };
        let image = &self.options.image;
        let port = self.card.as_ref().map_or(0, |card| card.port);
        let mut kernel_words = self.options.kernel_words(port);
        // Two commas are one within a value.
        let console = text(&self.socket)?.replace(',', ",,");
        let mut words = vec![QEMU.to_owned()];
        let mut say = |option: &str, value: String| words.extend([option.to_owned(), value]);
        if let Some(NetworkCard { tap, address: (address, prefix_bits), .. }) = &self.card {
            kernel_words += &format!(" sterna.address={address}/{prefix_bits}");
            say("-netdev", format!("tap,id=lan,ifname={tap},script=no,downscript=no"));
            // It boots from no network.
            say("-device", format!("virtio-net-pci,netdev=lan,mac={MAC},romfile="));
        }
        say("-name", "{name}".to_owned());
        say("-accel", "tcg".to_owned());
        say("-machine", "pc".to_owned());
        say("-cpu", "max".to_owned());
        say("-m", format!("{MEMORY_KIB}K"));
        say("-display", "none".to_owned());
        say("-kernel", text(&image.kernel)?);
        say("-initrd", text(&image.initramfs)?);
        say("-append", kernel_words);
        say("-chardev", format!("socket,id=console,path={console},server=off"));
        say("-serial", "chardev:console".to_owned());
        say("-qmp", "unix:{qmp},server=on,wait=off".to_owned());
        say(
            "-blockdev",
            format!(
                "driver=nbd,node-name={DISK},server.type=unix,server.path={{disk:{DISK}}},export={{export:{DISK}}},\
                 reconnect-delay={RECONNECT_SECONDS},cache.direct=on,discard=unmap"
            ),
        );
        say("-device", format!("virtio-blk-pci,drive={DISK}"));
        words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
        Ok(words)
    }

    /// Waits until the machine has booted, filled its disk, and works.
    ///
    /// # Errors
    /// If it does not; the message ends with its console.
    pub async fn await_work(&self) -> anyhow::Result<()> {
        self.talk.wait_for("begin to work", START_DEADLINE, Console::works).await
    }

    /// Says something on the console of whichever QEMU is the machine's.
    async fn say(&self, command: &str) {
        for input in self.speak.lock().await.iter_mut() {
            // Those that have ended do not matter; if none hears it, the wait for what it leads to fails.
            let _ = input.write_all(format!("{command}\n").as_bytes()).await;
        }
    }
}

impl DemoGuest for MovingMachine {
    type Mark = MachineMark;
    type Stopped = StoppedMachine;

    fn description(&self) -> String {
        self.options.description()
    }

    fn mark(&self) -> MachineMark {
        self.talk.console().mark()
    }

    /// By the machine's own clock, which stands still while the machine does.
    fn between(&self, first: &MachineMark, last: &MachineMark) -> Felt {
        self.talk.console().between(*first, *last)
    }

    /// By the machine's own clock, which stands still while the machine does.
    fn windows(&self, first: &MachineMark, last: &MachineMark) -> Vec<Window> {
        self.talk.console().windows(*first, *last)
    }

    async fn failure(&self) -> anyhow::Error {
        self.talk.failure().await
    }

    /// Its memory is compared, too.
    async fn stop_and_verify(self, progress: &mut Progress) -> anyhow::Result<StoppedMachine> {
        progress.begin("verifying memory and disk in the machine");
        self.say("verify").await;
        let verified = |console: &Console| console.verdict().is_some();
        self.talk.wait_for("verify its disk", VERIFY_DEADLINE, verified).await?;
        let verdict = self.talk.console().verdict().context("a verdict that was seen is gone")?;
        self.say("end").await;
        self.talk.wait_for("power off", END_DEADLINE, Console::is_closed).await?;
        Ok(StoppedMachine::new(verdict, &self.talk, &self.options))
    }
}

impl Drop for MovingMachine {
    fn drop(&mut self) {
        self.accepting.abort();
        kill_those_with(&self.socket);
    }
}

/// Kills every QEMU whose command has this path in it: machines outlive the daemons that have started them.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::GuestImage;

    #[tokio::test]
    async fn the_definition_has_its_places_and_the_card_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let image = GuestImage { kernel: "/boot/kernel".into(), initramfs: "/boot/\"initramfs\"".into() };
        let card = NetworkCard { tap: "guest".to_owned(), address: (Ipv4Addr::LOCALHOST, 24), port: 80 };
        let options = MachineOptions { memory_bytes: 4096, ..MachineOptions::new(image) };
        let machine = MovingMachine::expect(&folder.path().join("a,b"), options, Some(card)).unwrap();
        let text = machine.definition("disk1").unwrap();
        for part in [
            "a,,b,server=off",
            "{qmp}",
            "{disk:root}",
            "/boot/\\\"initramfs\\\"",
            "ifname=guest",
            ",4096,80 sterna.address=127.0.0.1/24",
            "[disks]\nroot = \"disk1\"\n",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}
