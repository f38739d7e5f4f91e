//! Where the time of requests goes inside the daemon, as its log of traced connections says.

use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::Value;

use crate::bench::metric::{Metric, Unit};
use crate::bench::report::{Sample, Section};

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

const SHARE: Metric = Metric::less("step_us_per_request", "us A REQUEST", Unit::Microseconds);
const MEDIAN: Metric = Metric::less("step_median_us", "MEDIAN us", Unit::Microseconds);
const P99: Metric = Metric::less("step_p99_us", "99 % us", Unit::Microseconds);

/// Returns the part with the steps of a workload's requests, a row each.
pub(super) fn section(workload: &str) -> Section {
    Section {
        name: part_of(workload),
        title: "where the time of a request goes in Sterna".to_owned(),
        columns: vec![SHARE, MEDIAN, P99],
        ..Section::default()
    }
}

fn part_of(workload: &str) -> String {
    format!("{workload}-trace")
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

impl StageSample {
    /// Returns a row for each step of a workload's requests.
    pub(super) fn samples(stages: &[Self], workload: &str) -> Vec<Sample> {
        let requests = count_of(stages, WHOLE) as f64;
        let row = |Self { stage, sum_us, median_us, p99_us, .. }: &Self| {
            let values = [(SHARE, sum_us / requests), (MEDIAN, *median_us), (P99, *p99_us)];
            Sample::of(values).row(stage).part(part_of(workload))
        };
        stages.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Results;

    /// Returns the time in each step ÷ requests.
    fn shares(stages: &[StageSample]) -> Vec<(String, f64)> {
        let mut results = Results::of(1);
        for sample in StageSample::samples(stages, "mixed-16") {
            results.keep("", "", None, 0, sample);
        }
        let (found, _) = results.into_found();
        let shares =
            found.into_iter().filter(|found| found.metric == SHARE && found.part == "mixed-16-trace");
        shares.map(|found| (found.variant, found.summary.median)).collect()
    }

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
        let expected = [("device", 50.0), ("whole", 70.0), ("device-idle", 5.0)];
        assert_eq!(
            shares(&busiest(&log, CONNECTION).unwrap()),
            expected.map(|(step, us)| (step.to_owned(), us))
        );
    }

    #[test]
    fn what_a_ring_did_is_shared_by_the_requests_of_the_connection() {
        let of_ring = |line: String| line.replace(CONNECTION.message, RING.message);
        let log = [line("whole", 10, 700.0)].concat()
            + &[of_ring(line("queued", 1, 1.0)), of_ring(line("disk", 1, 9.0))].concat()
            + &[of_ring(line("queued", 20, 40.0)), of_ring(line("disk", 20, 300.0))].concat();
        let stages = [busiest(&log, CONNECTION).unwrap(), busiest(&log, RING).unwrap()].concat();
        let expected = [("whole", 70.0), ("queued", 4.0), ("disk", 30.0)];
        assert_eq!(shares(&stages), expected.map(|(step, us)| (step.to_owned(), us)));
    }

    #[test]
    fn a_log_without_requests_has_no_time_line() {
        assert_eq!(busiest("", CONNECTION), None);
        assert_eq!(busiest(&line("whole", 0, 0.0), CONNECTION), None);
    }
}
