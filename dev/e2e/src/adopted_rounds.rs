//! Random rounds with a VM that was started by hand: it is adopted, moved and released, while others use its monitor. They put overlays
//! over its disk, commit them, plug a second disk, unplug or exchange it, and pause, continue or reset the VM.
//!
//! ```text
//!   scene:  a host, a QEMU ──► rounds ──► QEMU is shut down ──► its disk has what the guest wrote
//!   round:  an order ─┬─► a disturbance happens meanwhile ──► nothing is under way ──► checks
//!                     └─► done, or refused by name
//!   checks: every image that a QEMU or the daemon has open is still there, the guest works, and its second disk is the right one
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::Vm as VmShown;
use lab::workload::random::Random;
use serde_json::json;
use testbed::{DEADLINE, Host, Outcome, Program, until};

use crate::by_hand::ByHand;
use crate::domain_rounds::{check_used_images, until_at_rest};
use crate::qmp::{Disk, Qmp};
use crate::vm::NAME;

const DISK_BYTES: u64 = 16 << 20;
/// All of the disk: a guest that was reset expects nothing of what it wrote before.
const FILL_BYTES: u64 = DISK_BYTES;
/// Requests of the guest in a round.
const REQUESTS: u64 = 20;
/// Latest time of a disturbance during an order, in milliseconds.
const MEANWHILE_MS_MAX: u64 = 400;
/// Percentage of orders with a disturbance.
const DISTURBED: u64 = 50;
/// Longest wait for a guest to release a disk; it may be booting.
const UNPLUG_MAX: Duration = Duration::from_secs(10);
/// Time between two questions to QEMU meanwhile.
const POLL: Duration = Duration::from_millis(20);
/// Identity of the second disk's device.
const DATA: &str = "data";

/// Actions on the VM without Sterna.
const BY_HAND: [&str; 9] =
    ["overlay", "commit", "stop", "cont", "system_reset", "plug", "unplug", "exchange", "snapshot of data"];

/// Plays one scene of rounds and reports each to `told`. Returns how many of Sterna's orders succeeded and were refused.
///
/// # Errors
/// If data is lost; the message has the round.
pub fn play(
    host: &mut Host,
    rounds: u32,
    seed: u64,
    mut told: impl FnMut(&str),
) -> anyhow::Result<(u32, u32)> {
    let own = host.path("own.qmp");
    let monitor = format!("unix:{},server=on,wait=off", own.display());
    let words = ["-drive", "file=IMAGE,if=virtio,format=raw", "-qmp", &monitor];
    let machine = ByHand::start(host, "raw", DISK_BYTES, FILL_BYTES, &words)?;
    let own = Qmp::connect(&own)?;
    let random = Random::new(seed);
    let mut play = Play { machine, own, random, made: 0, data: None, done: 0, refused: 0 };
    for round in 1..=rounds {
        let text = play.round(host).with_context(|| format!("round {round} of seed {seed}"))?;
        told(&format!("{round}: {text}"));
    }
    told(&play.shut_down(host).with_context(|| format!("the end of seed {seed}"))?);
    Ok((play.done, play.refused))
}

struct Play {
    machine: ByHand,
    own: Qmp,
    random: Random,
    /// Number of files and nodes that were made.
    made: u8,
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
                let what = self.draw();
                text += &self.by_hand(host, what).with_context(|| what)?;
            }
        }
        until_at_rest(host)?;
        check_used_images(host).with_context(|| text.clone())?;
        self.check_guest(host).with_context(|| text.clone())?;
        Ok(text)
    }

    fn draw(&mut self) -> &'static str {
        BY_HAND[self.random.below(BY_HAND.len() as u64) as usize]
    }

    /// Gives Sterna an order, perhaps with a disturbance.
    fn order(&mut self, host: &Host, text: &mut String) -> anyhow::Result<()> {
        let is_adopted = !host.ask::<Vec<VmShown>>(&["vm", "list"])?.is_empty();
        let monitor = self.machine.monitor.to_str().context("a folder that is not UTF-8")?.to_owned();
        let store = if self.random.below(2) == 0 { "a" } else { "b" };
        let words: Vec<&str> = match self.random.below(3) {
            _ if !is_adopted => vec!["vm", "adopt", NAME, "--qmp", &monitor],
            0 => vec!["vm", "release", NAME],
            _ => vec!["migrate", NAME, "--to", store],
        };
        *text += &words.join(" ").replace(&monitor, "QMP");
        let disturbance = self.draw();
        let is_disturbed = self.random.below(100) < DISTURBED;
        let pause = Duration::from_millis(self.random.below(MEANWHILE_MS_MAX));
        let order = host.command(&words)?;
        let outcome = std::thread::scope(|scope| {
            let order = scope.spawn(move || order.run());
            if is_disturbed {
                std::thread::sleep(pause);
                *text += ", meanwhile ";
                *text += &self.by_hand(host, disturbance).with_context(|| disturbance)?;
            }
            order.join().map_err(|_| anyhow::anyhow!("the order panicked"))?
        });
        let Outcome { code, stderr, .. } = outcome?;
        if code == 0 {
            self.done += 1;
            return Ok(());
        }
        let is_named = stderr.contains("sterna: ") && stderr.len() > 20;
        ensure!(is_named, "refused without a reason: {code} {stderr}");
        self.refused += 1;
        *text += &format!(": refused: {}", stderr.trim().lines().last().unwrap_or_default());
        Ok(())
    }

    /// Performs an action by the VM's other monitor; QEMU may refuse it.
    fn by_hand(&mut self, host: &Host, what: &str) -> anyhow::Result<String> {
        let done = match what {
            "overlay" => self.overlay(host, "vda"),
            "snapshot of data" => self.overlay(host, DATA),
            "commit" => self.commit(),
            "plug" if self.data.is_none() => self.plug(host),
            "plug" => return Ok("plug (it has one)".to_owned()),
            "unplug" => self.unplug(),
            "exchange" => self.unplug().and_then(|()| self.plug(host)),
            other => self.own.execute(other, &json!({})).map(drop),
        };
        if done.is_ok() && what == "system_reset" {
            self.machine.console.forget();
        }
        Ok(match done {
            Ok(()) => what.to_owned(),
            Err(error) => format!("{what} ({error:#})"),
        })
    }

    /// Returns the guest's first or second disk.
    fn disk(&mut self, which: &str) -> anyhow::Result<Option<Disk>> {
        let is_data = |disk: &Disk| disk.device.contains(&format!("/{DATA}/"));
        Ok(self.own.disks()?.into_iter().find(|disk| is_data(disk) == (which == DATA)))
    }

    fn overlay(&mut self, host: &Host, which: &str) -> anyhow::Result<()> {
        let disk = self.disk(which)?.context("there is no such disk")?;
        self.made += 1;
        let file = host.path(&format!("overlay-{}", self.made));
        let arguments = json!({
            "node-name": disk.node, "snapshot-file": file, "format": "qcow2",
            "snapshot-node-name": format!("overlay{}", self.made),
        });
        self.own.execute("blockdev-snapshot-sync", &arguments).map(drop)
    }

    /// Commits the overlays into the image below all of them.
    fn commit(&mut self) -> anyhow::Result<()> {
        let disk = self.disk("vda")?.context("there is no disk")?;
        self.own.execute("block-commit", &json!({ "job-id": "commit", "device": disk.node }))?;
        let begun = Instant::now();
        loop {
            let jobs = self.own.execute("query-block-jobs", &json!({}))?;
            let Some(job) = jobs.as_array().and_then(|jobs| jobs.first()) else { return Ok(()) };
            if job["ready"] == true {
                // The job may already have this order.
                let _ = self.own.execute("job-complete", &json!({ "id": "commit" }));
            }
            ensure!(begun.elapsed() < DEADLINE, "the commit does not end: {jobs}");
            std::thread::sleep(POLL);
        }
    }

    /// Gives the guest a second disk with new content.
    fn plug(&mut self, host: &Host) -> anyhow::Result<()> {
        self.made += 1;
        let (file, node) = (host.path(&format!("data-{}.raw", self.made)), format!("data{}", self.made));
        std::fs::write(&file, vec![self.made; DISK_BYTES as usize])?;
        let below = json!({ "driver": "file", "filename": file });
        self.own.execute("blockdev-add", &json!({ "driver": "raw", "node-name": node, "file": below }))?;
        let device = json!({ "driver": "virtio-blk-pci", "drive": node, "id": DATA, "addr": "0x8" });
        self.own.execute("device_add", &device)?;
        self.data = Some(self.made);
        Ok(())
    }

    /// Removes the second disk when the guest has released it.
    fn unplug(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while let Some(disk) = self.disk(DATA)? {
            ensure!(begun.elapsed() < UNPLUG_MAX, "the guest does not let it go");
            // A booting guest misses the request, and a paused guest receives it later.
            let asked = self.own.execute("device_del", &json!({ "id": DATA }));
            if let Err(error) = asked {
                ensure!(error.to_string().contains("already in the process"), "{error:#}");
            }
            std::thread::sleep(POLL);
            if self.disk(DATA)?.is_none() {
                // Sterna may have replaced the node.
                let _ = self.own.execute("blockdev-del", &json!({ "node-name": disk.node }));
            }
        }
        self.data = None;
        Ok(())
    }

    /// Checks that the guest works and has the right second disk.
    fn check_guest(&mut self, host: &Host) -> anyhow::Result<()> {
        until("the VM has not failed", || {
            let (_, state) = self.own.state()?;
            ensure!(!["io-error", "internal-error", "guest-panicked"].contains(&&*state), "it is {state}");
            Ok((!["inmigrate", "prelaunch", "finish-migrate", "postmigrate"].contains(&&*state))
                .then_some(()))
        })?;
        if !self.own.state()?.0 {
            self.own.execute("cont", &json!({}))?;
        }
        self.machine.console.work_on(REQUESTS)?;
        let disk = self.disk(DATA)?;
        match (disk, self.data) {
            (None, None) => Ok(()),
            // The guest has released the disk later than `unplug` waited.
            (None, Some(_)) => {
                self.data = None;
                Ok(())
            }
            (Some(disk), Some(pattern)) => check_pattern(&disk, pattern),
            (Some(disk), None) => anyhow::bail!("a disk that was taken away is there: {disk:?}"),
        }
        .with_context(|| format!("the VMs: {:?}", host.ask::<serde_json::Value>(&["vm", "list"])))
    }

    /// Shuts the VM down and checks its disk.
    fn shut_down(&mut self, host: &Host) -> anyhow::Result<String> {
        let disk = self.disk("vda")?.context("there is no disk")?;
        self.machine.console.verify()?;
        let verdict = self.machine.console.verdict()?;
        // QEMU may exit before it answers.
        let _ = self.own.execute("quit", &json!({}));
        until_at_rest(host)?;
        check_used_images(host)?;
        let raw = host.path("seen.raw");
        let source = disk.file;
        let tool = Program::qemu_img();
        let format = if disk.format == "nbd" { "raw" } else { &disk.format };
        tool.args(["convert", "-U", "-f", format, "-O", "raw", &source]).arg(&raw).succeed()?;
        crate::vm::verify_image(self.machine.console.options(), verdict, &PathBuf::from(&raw))?;
        Ok(format!("shut down; {} {source} is what the guest knows", disk.format))
    }
}

fn check_pattern(disk: &Disk, pattern: u8) -> anyhow::Result<()> {
    let format = if disk.format == "nbd" { "raw" } else { &disk.format };
    let tool = Program::qemu_io();
    let read = format!("read -P {pattern} 0 {DISK_BYTES}");
    let read = tool.args(["-U", "-r", "-f", format, "-c", &read, &disk.file]).succeed()?;
    ensure!(!read.contains("failed"), "the disk is not the one with {pattern}: {disk:?}: {read}");
    Ok(())
}
