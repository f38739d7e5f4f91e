//! `sterna bench nbd`: a table for each workload.

use std::fmt::Write as _;

use lab::bench::nbd::{self, ContenderFigures, NbdOptions, NbdReport, WorkloadFigures};

use super::show::{figure_and_spread, mebibytes, median, microseconds, ratio, thousands};
use crate::args::BenchNbdArguments;
use crate::commands::CommandError;
use crate::output::{self, Format};
use crate::units::bytes;

pub(super) async fn run(order: BenchNbdArguments, format: Format) -> Result<(), CommandError> {
    let workloads = order.workloads();
    let bench = super::options(order.folder, order.size, order.rounds)?;
    let options = NbdOptions { bench, seconds: order.seconds, workloads };
    let report = nbd::run(&options, &mut super::progress(format)).await.map_err(CommandError::Bench)?;
    output::print(format, &report, text)?;
    Ok(())
}

/// The report for people.
fn text(report: &NbdReport) -> String {
    let NbdReport { environment, size_bytes, rounds, seconds, workloads } = report;
    let [machine, programs] = environment.lines();
    let mut text = format!(
        "{machine}\n{programs}\n\
         An image of {}, {rounds} rounds of {seconds} s each: medians, and from the least to the most.\n",
        bytes(*size_bytes)
    );
    for workload in workloads {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}\n{}{}", workload.title, table(workload), ratios(workload));
    }
    text
}

fn table(workload: &WorkloadFigures) -> String {
    let throughput = if workload.is_sequential() { "MiB/s" } else { "IOPS" };
    let header = ["", throughput, "", "OF RAW", "ADDED us", "LATENCY us", "99 % us", "CPU us"];
    let mut table = output::table(&header, &[1, 2, 3, 4, 5, 6, 7]);
    for contender in &workload.contenders {
        let ContenderFigures { server_cpu_us_per_request, added_us_per_request, iops_to_raw, .. } = contender;
        let cpu = server_cpu_us_per_request.as_ref().unwrap_or(&contender.client_cpu_us_per_request);
        let (throughput, spread) = match workload.is_sequential() {
            true => figure_and_spread(&contender.bytes_per_second, mebibytes),
            false => figure_and_spread(&contender.iops, thousands),
        };
        table.add_row([
            contender.name.to_owned(),
            throughput,
            spread,
            median(iops_to_raw.as_ref(), |ratio| format!("{ratio:.2}")),
            median(added_us_per_request.as_ref(), microseconds),
            microseconds(contender.mean_latency_us.median),
            microseconds(contender.p99_latency_us.median),
            microseconds(cpu.median),
        ]);
    }
    output::lines(&table)
}

fn ratios(workload: &WorkloadFigures) -> String {
    let mut parts = vec![format!("{} × its throughput", ratio(&workload.iops_sterna_to_peer))];
    parts.extend(
        workload.added_sterna_to_peer.as_ref().map(|added| format!("{} × its added time", ratio(added))),
    );
    parts.extend(workload.cpu_sterna_to_peer.as_ref().map(|cpu| format!("{} × its CPU time", ratio(cpu))));
    format!("sterna beside qemu-storage-daemon: {}\n", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use lab::bench::Summary;

    use super::*;

    fn summary(samples: &[f64]) -> Summary {
        Summary::of(samples.to_vec()).unwrap()
    }

    fn contender(name: &'static str, iops: &[f64], raw: Option<f64>) -> ContenderFigures {
        let of_raw = |value| raw.map(|_| summary(&[value]));
        ContenderFigures {
            name,
            iops: summary(iops),
            bytes_per_second: summary(&[819.2e6]),
            mean_latency_us: summary(&[240.0]),
            p99_latency_us: summary(&[912.4]),
            max_latency_us: summary(&[4000.0]),
            client_cpu_us_per_request: summary(&[4.2]),
            server_cpu_us_per_request: of_raw(6.5),
            iops_to_raw: of_raw(0.91),
            added_us_per_request: of_raw(22.5),
            added_mean_latency_us: of_raw(20.0),
        }
    }

    #[test]
    fn a_workload_is_a_table_and_a_sentence() {
        let mut workload = WorkloadFigures {
            name: "mixed-16",
            title: "8 KiB random, 70 % reads, depth 16",
            block_bytes: 8192,
            depth: 16,
            contenders: vec![
                contender("raw", &[66_000.0, 64_000.0, 70_000.0], None),
                contender("sterna", &[60_000.0], Some(1.0)),
                contender("qemu-storage-daemon", &[9_800.0], Some(1.0)),
            ],
            iops_sterna_to_peer: summary(&[1.25, 1.2, 1.3]),
            cpu_sterna_to_peer: Some(summary(&[0.5])),
            added_sterna_to_peer: None,
        };
        let expected =
            "                      IOPS               OF RAW  ADDED us  LATENCY us  99 % us  CPU us
raw                  66.0k  64.0k–70.0k       -         -         240      912     4.2
sterna               60.0k  60.0k–60.0k    0.91      22.5         240      912     6.5
qemu-storage-daemon   9800    9800–9800    0.91      22.5         240      912     6.5
sterna beside qemu-storage-daemon: 1.25 (1.20–1.30) × its throughput, 0.50 (0.50–0.50) × its CPU time
";
        assert_eq!(format!("{}{}", table(&workload), ratios(&workload)), expected);
        workload.block_bytes = 1 << 20;
        assert!(table(&workload).contains("MiB/s") && table(&workload).contains("781  781–781"));
    }
}
