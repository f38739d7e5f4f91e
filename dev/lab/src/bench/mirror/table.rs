//! The figures of copies and migrations, as tables and sentences.

use super::{IdleReport, LoadReport};
use crate::bench::Summary;
use crate::bench::show::{
    Table, figure_and_spread, mebibytes, median, milliseconds, ratio, seconds, thousands,
};
use crate::demo::Bytes;

impl IdleReport {
    /// Returns the copies as a table.
    pub fn table(&self) -> Table {
        let row = |contender: &super::IdleFigures| {
            let [time, spread] = figure_and_spread(&contender.seconds, seconds);
            vec![
                contender.name.to_owned(),
                time,
                spread,
                mebibytes(contender.bytes_per_second.median),
                median(contender.server_cpu_seconds.as_ref(), seconds),
                Bytes(contender.allocated_bytes.median as u64).to_string(),
            ]
        };
        Table {
            header: ["", "SECONDS", "", "MiB/s", "CPU s", "TAKES"].map(str::to_owned).to_vec(),
            rows: self.contenders.iter().map(row).collect(),
            conclusion: format!(
                "sterna: {} × the time of the best off-line copy, {} × that of the best mirror of QEMU",
                ratio(&self.sterna_to_best_copy),
                ratio(&self.sterna_to_best_mirror),
            ),
        }
    }
}

impl LoadReport {
    /// Returns the migrations as a table.
    pub fn table(&self) -> Table {
        let row = |contender: &super::LoadFigures| {
            let [time, spread] = figure_and_spread(&contender.seconds, seconds);
            vec![
                contender.name.to_owned(),
                time,
                spread,
                thousands(contender.iops_before.median),
                thousands(contender.iops_during.median),
                format!("{:.0} %", contender.iops_lost.median * 100.0),
                seconds(contender.seconds_times_lost.median),
                milliseconds(contender.worst_latency_ms.median),
                milliseconds(contender.p99_latency_ms.median),
                seconds(contender.server_cpu_seconds.median),
            ]
        };
        let difference = |summary: &Summary| {
            format!("{:+.2} s ({:+.2} to {:+.2})", summary.median, summary.min, summary.max)
        };
        Table {
            header: [
                "",
                "SECONDS",
                "",
                "IOPS BEFORE",
                "DURING",
                "LOST",
                "TIME x LOSS s",
                "WORST ms",
                "99 % ms",
                "CPU s",
            ]
            .map(str::to_owned)
            .to_vec(),
            rows: self.contenders.iter().map(row).collect(),
            conclusion: format!(
                "sterna beside the better mode of QEMU, each: {} × its time, {} × its worst latency, time × loss {}",
                ratio(&self.seconds_to_best_mirror),
                ratio(&self.worst_latency_to_best_mirror),
                difference(&self.seconds_times_lost_less_best_mirror),
            ),
        }
    }

    /// Returns a sentence about the guest's load.
    pub fn guest(&self) -> String {
        let limit = match self.guest_iops {
            Some(iops) => format!("{iops} IOPS"),
            None => "as fast as it can".to_owned(),
        };
        format!("8 KiB random, 70 % reads, depth 16, {limit}")
    }
}
