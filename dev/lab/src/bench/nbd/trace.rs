//! Where the time of requests goes inside the daemon, as its log of traced connections says.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::WorkloadFigures;
use crate::bench::show::{Table, microseconds};
use crate::bench::statistics::Summary;

/// The environment that makes a daemon log the times of its connections, one JSON object a line.
pub(super) const LOG: [(&str, &str); 2] = [
    ("STERNA_LOG", "info,export::nbd::timeline=trace,block::engine::ring::timing=trace"),
    ("STERNA_LOG_FORMAT", "json"),
];

/// The daemon's message about a connection's times, and the stage that counts its requests.
const CONNECTION: Kind = Kind { message: "time line", counted_by: WHOLE };
/// The same for a ring, which counts operations.
const RING: Kind = Kind { message: "times of a ring", counted_by: "disk" };

#[derive(Clone, Copy)]
struct Kind {
    message: &'static str,
    counted_by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct StageSample {
    stage: String,
    count: u64,
    sum_us: f64,
    median_us: f64,
    p99_us: f64,
}

/// A step of a request, or a pause between requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageFigures {
    /// The step's name in the daemon's log.
    pub name: String,
    /// Time in this step ÷ requests, in microseconds.
    pub us_per_request: Summary,
    /// Median time of the step, to within an eighth; in microseconds.
    pub median_us: Summary,
    /// Time within which 99 % of the steps ended, to within an eighth; in microseconds.
    pub p99_us: Summary,
}

/// The step that counts the requests; all others are divided by its count.
const WHOLE: &str = "whole";

/// Reads a daemon's log of the connection with the most requests, and of the ring with the most operations: none if the engine
/// has no ring. Fails if the log has neither.
pub(super) fn read(log: &Path) -> anyhow::Result<Vec<StageSample>> {
    let log = std::fs::read_to_string(log).context("read the daemon's log")?;
    let mut stages = busiest(&log, CONNECTION).context("the daemon has logged no time line")?;
    stages.extend(busiest(&log, RING).unwrap_or_default());
    Ok(stages)
}

fn busiest(log: &str, kind: Kind) -> Option<Vec<StageSample>> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut groups: Vec<Vec<StageSample>> = vec![Vec::new()];
    for line in lines.filter(|line| line["fields"]["message"] == kind.message) {
        let stage: StageSample = serde_json::from_value(line["fields"].clone()).ok()?;
        let known = |group: &Vec<StageSample>| group.iter().any(|seen| seen.stage == stage.stage);
        if groups.last().is_some_and(known) {
            groups.push(Vec::new());
        }
        groups.last_mut()?.push(stage);
    }
    let busiest = groups.into_iter().max_by_key(|stages| count_of(stages, kind.counted_by))?;
    if count_of(&busiest, kind.counted_by) > 0 { Some(busiest) } else { None }
}

fn count_of(stages: &[StageSample], name: &str) -> u64 {
    stages.iter().find(|stage| stage.stage == name).map_or(0, |stage| stage.count)
}

impl StageFigures {
    /// Sums up the rounds, stage by stage; returns nothing if a round was not traced.
    pub(super) fn of(rounds: &[&[StageSample]]) -> Vec<Self> {
        let names = rounds.first().copied().unwrap_or_default().iter().map(|stage| &stage.stage);
        names.filter_map(|name| Self::of_stage(name, rounds)).collect()
    }

    fn of_stage(name: &str, rounds: &[&[StageSample]]) -> Option<Self> {
        let summary = |figure: &dyn Fn(&StageSample, f64) -> f64| {
            let of_round = |stages: &&[StageSample]| {
                let stage = stages.iter().find(|stage| stage.stage == name)?;
                Some(figure(stage, count_of(stages, WHOLE) as f64))
            };
            Summary::of(rounds.iter().map(of_round).collect::<Option<_>>()?)
        };
        Some(Self {
            name: name.to_owned(),
            us_per_request: summary(&|stage, requests| stage.sum_us / requests)?,
            median_us: summary(&|stage, _| stage.median_us)?,
            p99_us: summary(&|stage, _| stage.p99_us)?,
        })
    }
}

impl WorkloadFigures {
    /// Returns the time of requests in Sterna by stage; `None` without tracing.
    pub fn trace_table(&self) -> Option<Table> {
        let [raw, sterna, _] = &self.contenders[..] else { return None };
        let whole = sterna.trace.iter().find(|stage| stage.name == WHOLE)?.us_per_request.median;
        let row = |stage: &StageFigures| {
            let figures = [&stage.us_per_request, &stage.median_us, &stage.p99_us];
            let figures = figures.map(|summary| microseconds(summary.median));
            [stage.name.clone()].into_iter().chain(figures).collect()
        };
        let [own, limit] =
            [sterna, raw].map(|contender| microseconds(f64::from(self.depth) / contender.iops.median * 1e6));
        Some(Table {
            header: ["in sterna", "us A REQUEST", "MEDIAN us", "99 % us"].map(str::to_owned).to_vec(),
            rows: sterna.trace.iter().map(row).collect(),
            conclusion: format!(
                "a request takes {own} us, and {limit} us of the raw file; it is in the server for {} us",
                microseconds(whole)
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(stage: &str, count: u64, sum_us: f64) -> String {
        format!(
            "{{\"level\":\"TRACE\",\"fields\":{{\"message\":\"time line\",\"export\":\"bench\",\"stage\":\"{stage}\",\
             \"count\":{count},\"sum_us\":{sum_us:?},\"median_us\":2.0,\"p99_us\":9.0}}}}\n"
        )
    }

    #[test]
    fn the_busiest_connection_counts_and_rests_are_shared_by_all_requests() {
        let log = ["not JSON\n".to_owned(), line("device", 1, 5.0), line("whole", 1, 6.0)].concat()
            + &[line("device", 10, 500.0), line("whole", 10, 700.0), line("device-idle", 2, 50.0)].concat()
            + &[line("device", 3, 5.0), line("whole", 3, 6.0)].concat();
        let stages = busiest(&log, CONNECTION).unwrap();
        let figures = StageFigures::of(&[&stages]);
        let told: Vec<_> =
            figures.iter().map(|stage| (stage.name.as_str(), stage.us_per_request.median)).collect();
        assert_eq!(told, [("device", 50.0), ("whole", 70.0), ("device-idle", 5.0)]);
    }

    #[test]
    fn what_a_ring_did_is_shared_by_the_requests_of_the_connection() {
        let of_ring = |line: String| line.replace(CONNECTION.message, RING.message);
        let log = [line("whole", 10, 700.0)].concat()
            + &[of_ring(line("queued", 1, 1.0)), of_ring(line("disk", 1, 9.0))].concat()
            + &[of_ring(line("queued", 20, 40.0)), of_ring(line("disk", 20, 300.0))].concat();
        let stages = [busiest(&log, CONNECTION).unwrap(), busiest(&log, RING).unwrap()].concat();
        let figures = StageFigures::of(&[&stages]);
        let told: Vec<_> =
            figures.iter().map(|stage| (stage.name.as_str(), stage.us_per_request.median)).collect();
        assert_eq!(told, [("whole", 70.0), ("queued", 4.0), ("disk", 30.0)]);
    }

    #[test]
    fn a_log_without_requests_has_no_time_line() {
        assert_eq!(busiest("", CONNECTION), None);
        assert_eq!(busiest(&line("whole", 0, 0.0), CONNECTION), None);
    }
}
