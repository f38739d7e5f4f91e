//! The final report of the demo with a whole VM, as text and as JSON.

use std::fmt;

use anyhow::Context as _;
use api::{MemoryMove, MigrationHistory};
use serde::Serialize;

use super::super::followed::Followed;
use super::{Leg, MovedVmOptions, NAMES, Travelled};
use crate::demo::hosts::report::{milliseconds_of, rate_of};
use crate::demo::report::{
    Bytes, Figures, Wrong, change, disruption_row, grouped, milliseconds, row, seconds,
};
use crate::demo::{Felt, StoppedDemoGuest as _, Timeline};

/// The result of the demo with a whole VM.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineReport {
    /// The figures of the JSON output.
    pub figures: MachineFigures,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The VM's work, in a few words.
    pub machine: String,
    /// The kind of the hosts, and their link.
    pub link: String,
    /// The migrations in order, alternately to the other host and back.
    pub ways: Vec<MachineWay>,
    /// The outside client's figures; `None` without one.
    pub connection: Option<Connection>,
    /// Requests to the disk that were completed, from the first mark to the last.
    pub requests: u64,
    /// Bytes of memory that the VM has compared.
    pub memory_bytes: u64,
    /// The VM's requests to its disk, from the first measurement to the last.
    pub timeline: Timeline,
    /// All errors, counted; the first few in words.
    pub wrong: Wrong,
    /// The daemon's record of the first migration; `None` if unavailable.
    pub history: Option<MigrationHistory>,
}

/// The figures of the demo with a whole VM. Names and number of the fields are a contract with readers of the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MachineFigures {
    /// The plain demo's figures: bytes and seconds of all migrations together, and their common rate. The longest stall is the
    /// disk's in any of them; the disruption is the client's, if there is one.
    #[serde(flatten)]
    pub demo: Figures,
    /// Longest downtime of the VM, in milliseconds.
    pub downtime_ms: f64,
    /// The parts of the longest downtime.
    pub downtime_parts: DowntimeParts,
    /// The longest time between two answers to the client since the VM began to move, in milliseconds; `None` without a client.
    pub longest_connection_gap_ms: Option<f64>,
    /// Whether the client's one connection had all its answers, in order; `None` without a client.
    pub connection_survived: Option<bool>,
    /// The blocks that followed the disk; left out if it was complete at its handover.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub followed: Option<Followed>,
}

/// The parts of a downtime, in milliseconds; they add up to the whole.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DowntimeParts {
    /// The last of the VM's memory, and its devices, until they were loaded at the target.
    pub memory_ms: f64,
    /// The handover of the disk, with its gate closed.
    pub disk_ms: f64,
    /// The VM's first step at the target, and the messages between the hosts.
    pub start_ms: f64,
}

/// The figures of one migration.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineWay {
    /// How long the migration took, in seconds.
    pub migration_seconds: f64,
    /// Bytes of the disk that were written to the target.
    pub bytes_moved: u64,
    /// The memory that was sent; `None` if the daemon does not report it.
    pub memory: Option<MemoryMove>,
    /// Downtime of the VM, in milliseconds.
    pub downtime_ms: f64,
    /// The parts of the downtime.
    pub downtime_parts: DowntimeParts,
    /// The longest time without an answer to the client, in this migration and after it, in
    /// milliseconds; `None` without a client.
    pub connection_gap_ms: Option<f64>,
    /// Requests to the disk per second.
    pub iops: f64,
    /// The blocks that followed the disk; `None` if it was complete at its handover.
    pub followed: Option<Followed>,
}

/// The outside client's figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Connection {
    /// Number of answered requests.
    pub answers: u64,
    /// Why the connection was lost; `None` if it survived.
    pub lost: Option<String>,
    /// The longest time without an answer before the VM moved, in milliseconds.
    pub gap_before_ms: f64,
}

impl MachineReport {
    /// Returns the figures as one line of JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.figures)
    }

    /// Returns whether the VM's content and the client's connection are intact.
    pub fn is_good(&self) -> bool {
        self.figures.demo.verified && self.figures.connection_survived != Some(false)
    }
}

/// Builds the report. Fails if a daemon does not report the downtime.
pub(super) fn report(
    travelled: Travelled,
    options: &MovedVmOptions,
    link: String,
) -> anyhow::Result<MachineReport> {
    let wrong = travelled.stopped.wrong();
    let ways = travelled.legs.iter().map(figures_of).collect::<anyhow::Result<Vec<_>>>()?;
    let longest = ways.iter().max_by(|one, other| one.downtime_ms.total_cmp(&other.downtime_ms));
    let longest = longest.context("the VM has not moved")?;
    let on_the_way: Vec<Felt> = travelled.legs.iter().map(|leg| leg.way.felt).collect();
    let stall = on_the_way.iter().map(|felt| felt.longest_stall).max().unwrap_or_default();
    let gap_ms = ways.iter().filter_map(|way| way.connection_gap_ms).reduce(f64::max);
    let demo = Figures {
        bytes_moved: ways.iter().map(|way| way.bytes_moved).sum(),
        migration_seconds: ways.iter().map(|way| way.migration_seconds).sum(),
        // The VM's clock stops during the downtime.
        longest_stall_ms: milliseconds_of(stall).max(longest.downtime_ms),
        iops_before: travelled.before.iops,
        iops_during: rate_of(&on_the_way),
        iops_after: travelled.legs.last().map_or(0.0, |leg| leg.after.0.iops),
        verified: wrong.count == 0,
        disruption_ms: travelled.disruption.map(milliseconds_of),
    };
    let figures = MachineFigures {
        demo,
        downtime_ms: longest.downtime_ms,
        downtime_parts: longest.downtime_parts,
        longest_connection_gap_ms: gap_ms,
        connection_survived: travelled.seen.as_ref().map(|seen| seen.outcome.lost.is_none()),
        followed: Followed::of_all(ways.iter().map(|way| way.followed)),
    };
    let connection = travelled.seen.map(|seen| Connection {
        answers: seen.outcome.answers,
        lost: seen.outcome.lost,
        gap_before_ms: milliseconds_of(seen.gap_before),
    });
    Ok(MachineReport {
        figures,
        disk_bytes: options.disk_bytes,
        machine: travelled.machine,
        link,
        ways,
        connection,
        requests: travelled.whole.requests,
        memory_bytes: travelled.stopped.memory_bytes(),
        timeline: travelled.timeline,
        wrong,
        history: travelled.legs.into_iter().next().and_then(|there| there.way.history),
    })
}

fn figures_of(Leg { way, gap, .. }: &Leg) -> anyhow::Result<MachineWay> {
    let machine = way.migration.machine.as_ref().context("the daemon does not tell of the VM")?;
    let downtime = machine.downtime.as_ref().context("the daemon does not tell how long the VM stood")?;
    let closed_ms = way.migration.switch_over.map_or(0.0, |parts| parts.gate_closed_ms);
    let disk_ms = closed_ms.min(downtime.handover_ms);
    let downtime_parts =
        DowntimeParts { memory_ms: downtime.memory_ms, disk_ms, start_ms: downtime.handover_ms - disk_ms };
    Ok(MachineWay {
        migration_seconds: way.migration.seconds,
        bytes_moved: way.migration.bytes_moved,
        memory: machine.memory.clone(),
        downtime_ms: downtime.total_ms,
        downtime_parts,
        connection_gap_ms: gap.map(milliseconds_of),
        iops: way.felt.iops,
        followed: Followed::of(way),
    })
}

impl fmt::Display for MachineReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MachineFigures { demo, .. } = self.figures;
        let [near, far] = NAMES;
        let disk = Bytes(self.disk_bytes);
        writeln!(
            formatter,
            "A VM with a {disk} disk moved from host \"{near}\" to host \"{far}\" and home again"
        )?;
        writeln!(formatter, "while it worked ({}):", self.machine)?;
        writeln!(formatter, "{}.\n", self.link)?;
        match self.ways.as_slice() {
            [there, home] => {
                there.write("there", formatter)?;
                home.write("home", formatter)?;
            }
            ways => write_many(ways, formatter)?,
        }
        self.write_connection(formatter)?;
        disruption_row(formatter, demo.disruption_ms)?;
        row(formatter, "IOPS before", &grouped(demo.iops_before), "")?;
        for (name, iops) in [("IOPS on the way", demo.iops_during), ("IOPS after", demo.iops_after)] {
            row(formatter, name, &grouped(iops), &change(demo.iops_before, iops))?;
        }
        if let Some((bars, marks)) = self.timeline.lines() {
            row(formatter, "IOPS over time", &bars, "")?;
            if !marks.is_empty() {
                row(formatter, "", &marks, "")?;
            }
        }
        let memory = Bytes(self.memory_bytes);
        let requests = grouped(self.requests as f64);
        let all = format!("{requests} requests, the whole disk, {memory} of memory, the image at home");
        if demo.verified {
            return row(formatter, "verified", "yes", &all);
        }
        row(formatter, "verified", "NO", &format!("{} wrong; the first:", grouped(self.wrong.count as f64)))?;
        self.wrong.first.iter().try_for_each(|line| writeln!(formatter, "    {line}"))
    }
}

impl MachineReport {
    fn write_connection(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(connection) = &self.connection else {
            return row(formatter, "connection", "-", "not measured: the VM is on no network without root");
        };
        let answers = grouped(connection.answers as f64);
        match &connection.lost {
            None => {
                let remark = format!("one to a client outside; {answers} answers, none lost");
                row(formatter, "connection", "survived", &remark)?;
            }
            Some(why) => row(formatter, "connection", "LOST", &format!("after {answers} answers: {why}"))?,
        }
        let gap = milliseconds(self.figures.longest_connection_gap_ms.unwrap_or_default());
        let before = milliseconds(connection.gap_before_ms);
        row(formatter, "longest gap", &gap, &format!("between two answers; {before} before it moved"))
    }
}

impl MachineWay {
    fn write(&self, name: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DowntimeParts { memory_ms, disk_ms, start_ms } = self.downtime_parts;
        let sent = match &self.memory {
            Some(memory) => {
                format!("and {} of memory in {} rounds", Bytes(memory.sent_bytes), memory.rounds)
            }
            None => String::new(),
        };
        row(formatter, &format!("migration, {name}"), &seconds(self.migration_seconds), "")?;
        row(formatter, "  disk moved", &Bytes(self.bytes_moved).to_string(), &sent)?;
        if let Some(followed) = self.followed {
            followed.write(formatter)?;
        }
        row(formatter, "  downtime", &milliseconds(self.downtime_ms), "the VM stood still:")?;
        row(formatter, "    memory", &milliseconds(memory_ms), "the last of it, and the devices")?;
        row(formatter, "    disk", &milliseconds(disk_ms), "its handover")?;
        row(formatter, "    start", &milliseconds(start_ms), "the first step, and word of it")?;
        match self.connection_gap_ms {
            Some(gap_ms) => {
                row(formatter, "  longest gap", &milliseconds(gap_ms), "without an answer outside")
            }
            None => Ok(()),
        }
    }
}

fn write_many(ways: &[MachineWay], formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
    row(formatter, "round trips", &(ways.len() / 2).to_string(), "")?;
    let rows: [(&str, fn(&MachineWay) -> Option<f64>); 4] = [
        ("migration", |way| Some(way.migration_seconds * 1000.0)),
        ("downtime", |way| Some(way.downtime_ms)),
        ("  of which memory", |way| Some(way.downtime_parts.memory_ms)),
        ("longest gap, a way", |way| way.connection_gap_ms),
    ];
    for (name, figure) in rows {
        let mut sorted: Vec<f64> = ways.iter().filter_map(figure).collect();
        sorted.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (sorted.first(), sorted.last()) {
            let range = format!("{} to {}", milliseconds(*least), milliseconds(*most));
            row(formatter, name, &milliseconds(sorted[sorted.len() / 2]), &format!("the median of {range}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(downtime_ms: f64) -> MachineWay {
        MachineWay {
            migration_seconds: 4.5,
            bytes_moved: 300 << 20,
            memory: Some(MemoryMove {
                total_bytes: 256 << 20,
                remaining_bytes: 0,
                sent_bytes: 128 << 20,
                rounds: 4,
                dirty_bytes_per_second: 0,
                bytes_per_second: 0,
                throttle_percent: 0,
                streams: 1,
                post_copy: false,
            }),
            downtime_ms,
            downtime_parts: DowntimeParts { memory_ms: downtime_ms - 6.0, disk_ms: 4.0, start_ms: 2.0 },
            connection_gap_ms: Some(downtime_ms + 3.0),
            iops: 2_000.0,
            followed: None,
        }
    }

    fn report() -> MachineReport {
        let ways = vec![way(41.0), way(38.0)];
        MachineReport {
            figures: MachineFigures {
                demo: Figures {
                    bytes_moved: 600 << 20,
                    migration_seconds: 9.0,
                    longest_stall_ms: 41.0,
                    iops_before: 2_500.0,
                    iops_during: 2_000.0,
                    iops_after: 2_500.0,
                    verified: true,
                    disruption_ms: Some(400.0),
                },
                downtime_ms: ways[0].downtime_ms,
                downtime_parts: ways[0].downtime_parts,
                longest_connection_gap_ms: ways[0].connection_gap_ms,
                connection_survived: Some(true),
                followed: None,
            },
            disk_bytes: 256 << 20,
            machine: "Linux in QEMU".to_owned(),
            link: "two hosts".to_owned(),
            ways,
            connection: Some(Connection { answers: 9_000, lost: None, gap_before_ms: 5.0 }),
            requests: 42_000,
            memory_bytes: 64 << 20,
            timeline: Timeline::default(),
            wrong: Wrong::default(),
            history: None,
        }
    }

    #[test]
    fn the_report_is_aligned_and_its_downtime_adds_up() {
        let way = |name: &str, parts: [&str; 5]| {
            let [downtime, memory, disk, start, gap] = parts;
            format!(
                "  migration, {name:<9}       4.50 s
    disk moved              300 MiB   and 128 MiB of memory in 4 rounds
    downtime             {downtime:>10}   the VM stood still:
      memory             {memory:>10}   the last of it, and the devices
      disk               {disk:>10}   its handover
      start              {start:>10}   the first step, and word of it
    longest gap          {gap:>10}   without an answer outside
"
            )
        };
        let expected = "A VM with a 256 MiB disk moved from host \"a\" to host \"b\" and home again
while it worked (Linux in QEMU):
two hosts.

"
        .to_owned()
            + &way("there", ["41 ms", "35 ms", "4.0 ms", "2.0 ms", "44 ms"])
            + &way("home", ["38 ms", "32 ms", "4.0 ms", "2.0 ms", "41 ms"])
            + "  connection               survived   one to a client outside; 9,000 answers, none lost
  longest gap                 44 ms   between two answers; 5.0 ms before it moved
  disruption                 0.40 s   below 90 % of before, or twice its latency
  IOPS before                 2,500
  IOPS on the way             2,000   -20 %
  IOPS after                  2,500   +0 %
  verified                      yes   42,000 requests, the whole disk, 64.0 MiB of memory, the image at home
";
        assert_eq!(report().to_string(), expected);
    }

    #[test]
    fn many_ways_are_told_by_their_medians() {
        let mut report = report();
        report.ways = [41.0, 38.0, 44.0, 39.0].map(way).to_vec();
        let text = report.to_string();
        let has = |name: &str, value: &str, remark: &str| {
            let line = format!("  {name:<20} {value:>12}   {remark}");
            assert!(text.lines().any(|found| found == line.trim_end()), "{line}: {text}");
        };
        has("round trips", "2", "");
        has("downtime", "41 ms", "the median of 38 ms to 44 ms");
        has("  of which memory", "35 ms", "the median of 32 ms to 38 ms");
    }

    #[test]
    fn a_lost_connection_is_told_and_is_not_good() {
        let mut report = report();
        assert!(report.is_good());
        report.figures.connection_survived = Some(false);
        report.connection =
            Some(Connection { lost: Some("reset".to_owned()), answers: 7, gap_before_ms: 5.0 });
        assert!(!report.is_good());
        assert!(report.to_string().contains("LOST   after 7 answers: reset"), "{report}");
    }

    #[test]
    fn without_a_client_there_is_nothing_of_a_connection() {
        let mut report = report();
        (report.connection, report.figures.connection_survived) = (None, None);
        report.figures.longest_connection_gap_ms = None;
        assert!(report.is_good() && report.to_string().contains("not measured"), "{report}");
        let value: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        let expected = serde_json::json!({
            "bytes_moved": 600 << 20, "migration_seconds": 9.0, "longest_stall_ms": 41.0, "iops_before": 2_500.0,
            "iops_during": 2_000.0, "iops_after": 2_500.0, "verified": true, "disruption_ms": 400.0,
            "downtime_ms": 41.0, "downtime_parts": {"memory_ms": 35.0, "disk_ms": 4.0, "start_ms": 2.0},
            "longest_connection_gap_ms": null, "connection_survived": null,
        });
        assert_eq!(value, expected);
    }
}
