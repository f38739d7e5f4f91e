//! Parses the checker's lines on the VM's console, and records them.
//!
//! ```text
//!   sterna: disk device=/dev/vda sector_bytes=512 blocks=32768 bytes=268435456
//!   sterna: filled bytes=134217728
//!   sterna: tick at_ms=100 requests=1926 stall_us=12841 p99_us=9120 errors=0
//!   sterna: wrong block 17: expected version 3, found from byte 0 on zeroes
//!   sterna: verified blocks=32768 seed=7 digest=26cc72efe3d2049f memory_pages=0 errors=0
//!   sterna: tpm counter=3
//!   sterna: failed flush: Input/output error
//! ```
//!
//! All other lines are the kernel's, and are only kept for error messages.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{bail, ensure};

/// Largest number of console lines that are kept for error messages.
const LINES_KEPT_MAX: usize = 200;
/// Largest number of kept descriptions of wrong blocks.
const WRONG_KEPT_MAX: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Line {
    Disk(SeenDisk),
    Filled,
    Tick(Tick),
    TpmCounter(u64),
    Wrong(String),
    Verified(Verdict),
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenDisk {
    /// Its device file, whose name depends on the bus.
    pub(super) device: String,
    pub(super) sector_bytes: u64,
}

/// The checker's figures of about a tenth of a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Time since it began to work, by the VM's own clock, which stops while the VM is paused.
    pub at_ms: u64,
    /// Requests completed since it began to work.
    pub requests: u64,
    /// The longest time without a completion that ended in this tick, or still lasts.
    pub stall_us: u64,
    /// 99th percentile of the requests' latency in this tick; 0 without requests.
    pub p99_us: u64,
    /// Wrong blocks and failed requests since it began to work.
    pub errors: u64,
}

/// The outcome of the checker's comparison of its whole disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Number of blocks on the disk.
    pub blocks: u64,
    /// The seed of every stamp.
    pub seed: u64,
    /// Digest over the version of every block.
    pub digest: u64,
    /// Number of compared pages of its memory.
    pub memory_pages: u64,
    /// Wrong blocks and pages, and failed requests, from the start on.
    pub errors: u64,
}

/// The record of the console.
#[derive(Debug, Default)]
pub struct Console {
    lines: VecDeque<String>,
    /// Number of QEMUs that are connected, and whether there was any.
    connections: usize,
    was_connected: bool,
    disk: Option<SeenDisk>,
    ticks: Vec<Tick>,
    tpm_counter: Option<u64>,
    last_word: Option<Instant>,
    wrong: Vec<String>,
    verdict: Option<Verdict>,
    failure: Option<String>,
}

impl Console {
    pub(super) fn take(&mut self, line: &str, now: Instant) {
        match parse(line) {
            Some(Line::Disk(disk)) => self.disk = Some(disk),
            Some(Line::Tick(tick)) => self.ticks.push(tick),
            Some(Line::TpmCounter(counter)) => self.tpm_counter = Some(counter),
            Some(Line::Wrong(what)) if self.wrong.len() < WRONG_KEPT_MAX => self.wrong.push(what),
            Some(Line::Verified(verdict)) => self.verdict = Some(verdict),
            Some(Line::Failed(why)) => self.failure = Some(why),
            Some(Line::Filled | Line::Wrong(_)) | None => {}
        }
        self.last_word = Some(now);
        if self.lines.len() == LINES_KEPT_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line.to_owned());
    }

    /// Notes one more connection of a QEMU.
    pub(super) fn open(&mut self) {
        self.connections += 1;
        self.was_connected = true;
    }

    pub(super) fn close(&mut self) {
        self.connections = self.connections.saturating_sub(1);
    }

    /// Returns whether all connections have ended, after at least one.
    pub(super) fn is_closed(&self) -> bool {
        self.was_connected && self.connections == 0
    }

    pub(super) fn disk(&self) -> Option<&SeenDisk> {
        self.disk.as_ref()
    }

    /// Returns whether the checker has begun to work.
    pub(super) fn works(&self) -> bool {
        !self.ticks.is_empty()
    }

    /// Returns the requests completed since the checker began to work.
    pub(super) fn requests(&self) -> u64 {
        self.ticks.last().map_or(0, |tick| tick.requests)
    }

    /// Returns the time of the last line.
    pub(super) fn last_word(&self) -> Option<Instant> {
        self.last_word
    }

    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// Returns why the checker gave up.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Returns the first wrong blocks and failed requests.
    pub fn wrong(&self) -> &[String] {
        &self.wrong
    }

    /// Returns the last lines, for an error message.
    pub(super) fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Returns the figures of its work, ten for each second.
    pub fn ticks(&self) -> &[Tick] {
        &self.ticks
    }

    /// Returns the last value of its TPM's counter.
    pub fn tpm_counter(&self) -> Option<u64> {
        self.tpm_counter
    }

    /// Checks that the guest has found nothing wrong so far.
    ///
    /// # Errors
    /// If it has, or has given up.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if let Some(why) = &self.failure {
            bail!("the guest says: failed {why}");
        }
        let errors = self.ticks.last().map_or(0, |tick| tick.errors);
        ensure!(errors == 0, "the guest says: {errors} errors: {:#?}", self.wrong);
        Ok(())
    }

    /// Forgets all lines, but not the connections.
    pub(super) fn forget(&mut self) {
        let Self { connections, was_connected, .. } = *self;
        *self = Self { connections, was_connected, ..Self::default() };
    }
}

fn parse(line: &str) -> Option<Line> {
    // The kernel may have begun a line before.
    let words = line.split_once("sterna: ")?.1.trim_end();
    let (kind, rest) = words.split_once(' ').unwrap_or((words, ""));
    let value = |name: &str| {
        rest.split(' ').find_map(|word| word.strip_prefix(name).and_then(|word| word.strip_prefix('=')))
    };
    let number = |name| value(name).and_then(|text| text.parse::<u64>().ok());
    Some(match kind {
        "disk" => Line::Disk(SeenDisk {
            device: value("device")?.to_owned(),
            sector_bytes: number("sector_bytes")?,
        }),
        "filled" => Line::Filled,
        "tick" => Line::Tick(Tick {
            at_ms: number("at_ms")?,
            requests: number("requests")?,
            stall_us: number("stall_us")?,
            p99_us: number("p99_us")?,
            errors: number("errors")?,
        }),
        "tpm" => Line::TpmCounter(number("counter")?),
        "wrong" => Line::Wrong(rest.to_owned()),
        "verified" => Line::Verified(Verdict {
            blocks: number("blocks")?,
            seed: number("seed")?,
            digest: u64::from_str_radix(value("digest")?, 16).ok()?,
            memory_pages: number("memory_pages")?,
            errors: number("errors")?,
        }),
        "failed" => Line::Failed(rest.to_owned()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn console(lines: &[&str]) -> Console {
        let mut console = Console::default();
        lines.iter().for_each(|line| console.take(line, Instant::now()));
        console
    }

    #[test]
    fn the_checkers_words_are_understood_between_those_of_the_kernel() {
        let console = console(&[
            "[    1.23] virtio_blk virtio1: [vda] 32768 512-byte logical blocks",
            "sterna: disk device=/dev/vda sector_bytes=512 blocks=4 bytes=32768",
            "[    2.0] clocksource: sterna: tick at_ms=100 requests=10 stall_us=900 p99_us=700 errors=0",
            "sterna: wrong block 17: expected version 3, found from byte 0 on zeroes",
            "sterna: tpm counter=3",
            "sterna: verified blocks=4 seed=7 digest=26cc72efe3d2049f memory_pages=8 errors=1",
        ]);
        assert!(console.works());
        let disk = SeenDisk { device: "/dev/vda".to_owned(), sector_bytes: 512 };
        assert_eq!(console.disk(), Some(&disk));
        assert_eq!(console.wrong(), ["block 17: expected version 3, found from byte 0 on zeroes"]);
        let verdict =
            Verdict { blocks: 4, seed: 7, digest: 0x26cc_72ef_e3d2_049f, memory_pages: 8, errors: 1 };
        assert_eq!(console.verdict(), Some(verdict));
        assert_eq!(console.failure(), None);
        assert_eq!(console.tpm_counter(), Some(3));
        assert_eq!(console.text().lines().count(), 6);
    }

    #[test]
    fn a_machine_is_gone_when_its_last_connection_is() {
        let mut console = Console::default();
        assert!(!console.is_closed(), "it has not come yet");
        console.open();
        console.open();
        console.close();
        assert!(!console.is_closed(), "it moves");
        console.close();
        assert!(console.is_closed());
    }

    proptest! {
        #[test]
        fn no_line_can_upset_the_parser(rest in ".*") {
            let _ = parse(&rest);
            let _ = parse(&format!("sterna: {rest}"));
            let _ = parse(&format!("sterna: tick {rest}"));
        }
    }
}
