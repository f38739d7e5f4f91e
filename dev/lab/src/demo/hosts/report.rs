//! The final report of the demo with two hosts, as text and as JSON.

use std::fmt;
use std::time::Duration;

use api::MigrationHistory;
use serde::Serialize;

use super::followed::Followed;
use super::travel::Cut;
use super::{HostsOptions, NAMES, Travelled, Way};
use crate::demo::report::{
    Bytes, Figures, Wrong, change, disruption_row, grouped, milliseconds, rate, row, seconds,
};
use crate::demo::{Felt, StoppedDemoGuest as _, Timeline};

/// A resumed migration may copy this multiple of the allocated bytes: it repeats what was in flight at the cut, and blocks that
/// the guest wrote in part.
const COPIED_AGAIN_MAX: f64 = 1.2;

/// The result of the demo with two hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct HostsReport {
    /// The figures of the JSON output.
    pub figures: HostsFigures,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The guest's work, in a few words.
    pub guest: String,
    /// The kind of the hosts, and their link.
    pub link: String,
    /// The migration to the other host, and the return.
    pub ways: [WayFigures; 2],
    /// The copied bytes of the first migration, and how many of them were necessary.
    pub copied: Copied,
    /// The cut of the link; `None` if the copying was over before.
    pub cut: Option<Cut>,
    /// Requests per second while the volume was at the other host.
    pub iops_forwarded: f64,
    /// Requests that the guest completed, from the first mark to the last.
    pub requests: u64,
    /// How often the guest had to connect again.
    pub reconnects: u64,
    /// The guest's requests, from the first measurement to the last.
    pub timeline: Timeline,
    /// All errors, counted; the first few in words.
    pub wrong: Wrong,
    /// The daemon's record of the first migration; `None` if unavailable.
    pub history: Option<MigrationHistory>,
}

/// The figures of the demo with two hosts. Names and number of the fields are a contract with readers of the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HostsFigures {
    /// The plain demo's figures: bytes and seconds of both migrations together, their longest stall, and their common rate.
    #[serde(flatten)]
    pub demo: Figures,
    /// Whether the copy resumed after the cut; false also if it was over before the cut.
    pub resumed: bool,
    /// The longest time without progress at the target during the copy, in milliseconds.
    pub longest_gap_ms: f64,
    /// The blocks that followed the disk; left out if it was complete at its handover.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub followed: Option<Followed>,
}

/// The figures of one migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WayFigures {
    /// How long the migration took, in seconds.
    pub migration_seconds: f64,
    /// Bytes written to the target.
    pub bytes_moved: u64,
    /// The longest time in which no request of the guest completed, in milliseconds.
    pub longest_stall_ms: f64,
    /// How long the gate was closed at the switch, in milliseconds, as the daemon reports.
    pub gate_closed_ms: Option<f64>,
    /// Completed requests per second.
    pub iops: f64,
    /// The blocks that followed the disk; `None` if it was complete at its handover.
    pub followed: Option<Followed>,
}

/// The bytes that a migration copied, and those that it had to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The volume's allocation in its store when the migration began.
    pub allocated_bytes: u64,
    /// Bytes that the guest wrote during the migration.
    pub written_bytes: u64,
    /// The part of these writes that was sent by value, and needed no copying.
    pub mirrored_bytes: u64,
    /// Bytes copied by the mover.
    pub copied_bytes: u64,
}

impl Copied {
    fn expected_bytes(&self) -> u64 {
        let again = self.written_bytes.saturating_sub(self.mirrored_bytes);
        ((self.allocated_bytes as f64 * COPIED_AGAIN_MAX) as u64).saturating_add(again)
    }

    /// Returns whether the copy resumed after the cut, instead of starting again.
    fn went_on(&self, cut: &Cut) -> bool {
        (1..self.copied_bytes).contains(&cut.bytes_copied) && self.copied_bytes <= self.expected_bytes()
    }
}

impl HostsReport {
    /// Returns the figures as one line of JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.figures)
    }
}

pub(super) fn report(travelled: Travelled, options: &HostsOptions, link: String) -> HostsReport {
    let wrong = travelled.stopped.wrong();
    let ways = travelled.ways.each_ref().map(figures_of);
    let [there, home] = &travelled.ways;
    let history = there.history.clone();
    let during = [there.felt, home.felt];
    let demo = Figures {
        bytes_moved: ways.iter().map(|way| way.bytes_moved).sum(),
        migration_seconds: ways.iter().map(|way| way.migration_seconds).sum(),
        longest_stall_ms: ways.iter().map(|way| way.longest_stall_ms).fold(0.0, f64::max),
        iops_before: travelled.before.iops,
        iops_during: rate_of(&during),
        iops_after: travelled.after.iops,
        verified: wrong.count == 0,
        disruption_ms: travelled.disruption.map(milliseconds_of),
    };
    let figures = HostsFigures {
        demo,
        resumed: there.cut.is_some_and(|cut| travelled.copied.went_on(&cut)),
        longest_gap_ms: milliseconds_of(there.longest_gap.max(home.longest_gap)),
        followed: Followed::of_all(ways.map(|way| way.followed)),
    };
    HostsReport {
        figures,
        disk_bytes: options.disk_bytes,
        guest: travelled.guest,
        link,
        copied: travelled.copied,
        cut: there.cut,
        ways,
        iops_forwarded: travelled.forwarded.iops,
        requests: travelled.whole.requests,
        reconnects: travelled.stopped.reconnects(),
        timeline: travelled.timeline,
        wrong,
        history,
    }
}

fn figures_of(way: &Way) -> WayFigures {
    WayFigures {
        migration_seconds: way.migration.seconds,
        bytes_moved: way.migration.bytes_moved,
        longest_stall_ms: milliseconds_of(way.felt.longest_stall),
        gate_closed_ms: way.migration.switch_over.map(|parts| parts.gate_closed_ms),
        iops: way.felt.iops,
        followed: Followed::of(way),
    }
}

pub(super) fn rate_of(windows: &[Felt]) -> f64 {
    let requests: u64 = windows.iter().map(|felt| felt.requests).sum();
    let seconds: f64 =
        windows.iter().filter(|felt| felt.iops > 0.0).map(|felt| felt.requests as f64 / felt.iops).sum();
    if seconds > 0.0 { requests as f64 / seconds } else { 0.0 }
}

pub(super) fn milliseconds_of(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

impl fmt::Display for HostsReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostsFigures { demo, longest_gap_ms, .. } = self.figures;
        let [near, far] = NAMES;
        writeln!(
            formatter,
            "A {} disk moved from host \"{near}\" to host \"{far}\" and home again",
            Bytes(self.disk_bytes)
        )?;
        writeln!(formatter, "under a working guest ({}):", self.guest)?;
        writeln!(formatter, "{}.\n", self.link)?;
        for (name, way) in [("there", &self.ways[0]), ("home", &self.ways[1])] {
            let WayFigures { migration_seconds, bytes_moved, .. } = *way;
            let speed = Bytes(rate(bytes_moved, migration_seconds));
            row(formatter, &format!("migration, {name}"), &seconds(migration_seconds), "")?;
            row(formatter, "  bytes moved", &Bytes(bytes_moved).to_string(), &format!("{speed}/s"))?;
            let stall = milliseconds(way.longest_stall_ms);
            row(formatter, "  longest stall", &stall, "no request of the guest completed for so long")?;
            if let Some(gate_closed_ms) = way.gate_closed_ms {
                let held = milliseconds(gate_closed_ms);
                row(formatter, "  switch-over", &held, "new requests were held")?;
            }
            if let Some(followed) = way.followed {
                followed.write(formatter)?;
            }
        }
        self.write_cut(formatter)?;
        let gap = milliseconds(longest_gap_ms);
        row(formatter, "longest gap", &gap, "nothing arrived at the other host for so long")?;
        disruption_row(formatter, demo.disruption_ms)?;
        row(formatter, "IOPS before", &grouped(demo.iops_before), "")?;
        for (name, iops) in [
            ("IOPS on the way", self.ways[0].iops),
            ("IOPS forwarded", self.iops_forwarded),
            ("IOPS on the way home", self.ways[1].iops),
            ("IOPS after", demo.iops_after),
        ] {
            row(formatter, name, &grouped(iops), &change(demo.iops_before, iops))?;
        }
        if self.reconnects > 0 {
            row(formatter, "reconnects", &self.reconnects.to_string(), "")?;
        }
        if let Some((bars, marks)) = self.timeline.lines() {
            writeln!(formatter, "  {:<20} {bars}\n  {:<20} {marks}", "IOPS over time", "")?;
        }
        let reads = format!("{} requests, the whole disk, the image at home", grouped(self.requests as f64));
        if demo.verified {
            return row(formatter, "verified", "yes", &reads);
        }
        row(formatter, "verified", "NO", &format!("{} wrong; the first:", grouped(self.wrong.count as f64)))?;
        self.wrong.first.iter().try_for_each(|line| writeln!(formatter, "    {line}"))
    }
}

impl HostsReport {
    fn write_cut(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(cut) = self.cut else {
            return row(formatter, "resumed", "no", "the copying was over before the link could be cut");
        };
        let remark = format!("at {:.0} % of the copying there", cut.fraction * 100.0);
        row(formatter, "link cut", &seconds(cut.length.as_secs_f64()), &remark)?;
        let Copied { copied_bytes, .. } = self.copied;
        let (first, rest) = (Bytes(cut.bytes_copied), Bytes(copied_bytes.saturating_sub(cut.bytes_copied)));
        let resumed = if self.figures.resumed { "yes" } else { "NO" };
        let most = Bytes(self.copied.expected_bytes());
        row(formatter, "resumed", resumed, &format!("{first} copied before, {rest} after; at most {most}"))
    }
}
