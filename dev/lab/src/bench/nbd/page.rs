//! The page of `bench nbd`: for each workload its table, and bars.

use super::{ContenderFigures, NbdReport, WorkloadFigures};
use crate::bench::page::{bar_chart, page, section};
use crate::bench::show::{mebibytes, microseconds, thousands};
use crate::bench::statistics::Summary;
use crate::demo::Bytes;

impl NbdReport {
    /// Returns the report as an HTML page.
    pub fn page(&self) -> String {
        let Self { environment, size_bytes, rounds, seconds, workloads } = self;
        let lead = format!(
            "What clients get over NBD from an image of {}: {rounds} rounds of {seconds} s each.",
            Bytes(*size_bytes)
        );
        let sections = workloads.iter().map(|workload| {
            let trace = workload.trace_table().map(|table| {
                let heading = format!("{}: where the time goes", workload.title);
                section(&heading, &table, "")
            });
            section(workload.title, &workload.table(), &charts(workload)) + &trace.unwrap_or_default()
        });
        page(
            "Sterna beside the raw disk and QEMU's storage daemon",
            &lead,
            environment,
            &sections.collect::<String>(),
        )
    }
}

fn charts(workload: &WorkloadFigures) -> String {
    let throughput = match workload.is_sequential() {
        true => {
            chart(workload, "Throughput in MiB/s", |contender| Some(&contender.bytes_per_second), mebibytes)
        }
        false => chart(workload, "Requests per second", |contender| Some(&contender.iops), thousands),
    };
    let added: fn(&ContenderFigures) -> Option<&Summary> =
        |contender| contender.added_us_per_request.as_ref();
    let cpu: fn(&ContenderFigures) -> Option<&Summary> =
        |contender| contender.server_cpu_us_per_request.as_ref();
    throughput
        + &chart(
            workload,
            "Time added to a request, beside the raw file, in microseconds",
            added,
            microseconds,
        )
        + &chart(workload, "CPU time of the server per request, in microseconds", cpu, microseconds)
}

fn chart(
    workload: &WorkloadFigures,
    caption: &str,
    summary: fn(&ContenderFigures) -> Option<&Summary>,
    show: impl Fn(f64) -> String,
) -> String {
    let measured = workload.contenders.iter().map(|contender| (contender.name, summary(contender)));
    bar_chart(caption, measured, show)
}
