//! `sterna bench mirror`: a table of copies, and one of migrations under load.

use lab::bench::Summary;
use lab::bench::mirror::{self, IdleReport, LoadReport, MirrorOptions, MirrorReport};

use super::show::{figure_and_spread, mebibytes, median, ratio, thousands};
use crate::args::BenchMirrorArguments;
use crate::commands::CommandError;
use crate::output::{self, Format};
use crate::units::bytes;

pub(super) async fn run(order: BenchMirrorArguments, format: Format) -> Result<(), CommandError> {
    let (parts, seconds, guest_iops) = (order.parts(), order.seconds, order.guest_iops);
    let bench = super::options(order.folder, order.size, order.rounds)?;
    let options = MirrorOptions { bench, parts, seconds, guest_iops };
    let report = mirror::run(&options, &mut super::progress(format)).await.map_err(CommandError::Bench)?;
    output::print(format, &report, text)?;
    Ok(())
}

/// The report for people.
fn text(report: &MirrorReport) -> String {
    let MirrorReport { environment, size_bytes, rounds, idle, load } = report;
    let [machine, programs] = environment.lines();
    let size = bytes(*size_bytes);
    let mut text = format!(
        "{machine}\n{programs}\nAn image of {size}, {rounds} rounds: medians, and from the least to the most.\n"
    );
    if let Some(idle) = idle {
        let data = bytes(idle.data_bytes);
        text +=
            &format!("\nNobody uses the image; {data} of it are data, the rest holes\n{}", idle_table(idle));
    }
    if let Some(load) = load {
        let limit = match load.guest_iops {
            Some(iops) => format!("{iops} IOPS"),
            None => "as fast as it can".to_owned(),
        };
        text +=
            &format!("\nUnder a guest: 8 KiB random, 70 % reads, depth 16, {limit}\n{}", load_table(load));
    }
    text + "every copy was compared with its source\n"
}

fn idle_table(report: &IdleReport) -> String {
    let mut table = output::table(&["", "SECONDS", "", "MiB/s", "CPU s", "TAKES"], &[1, 2, 3, 4, 5]);
    for contender in &report.contenders {
        let (seconds, spread) = figure_and_spread(&contender.seconds, seconds);
        table.add_row([
            contender.name.to_owned(),
            seconds,
            spread,
            mebibytes(contender.bytes_per_second.median),
            median(contender.server_cpu_seconds.as_ref(), self::seconds),
            bytes(contender.allocated_bytes.median as u64),
        ]);
    }
    format!(
        "{}sterna: {} × the time of the best off-line copy, {} × that of the best mirror of QEMU\n",
        output::lines(&table),
        ratio(&report.sterna_to_best_copy),
        ratio(&report.sterna_to_best_mirror),
    )
}

fn load_table(report: &LoadReport) -> String {
    let header =
        ["", "SECONDS", "", "IOPS BEFORE", "DURING", "LOST", "TIME x LOSS s", "WORST ms", "99 % ms", "CPU s"];
    let mut table = output::table(&header, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    for contender in &report.contenders {
        let (seconds, spread) = figure_and_spread(&contender.seconds, seconds);
        table.add_row([
            contender.name.to_owned(),
            seconds,
            spread,
            thousands(contender.iops_before.median),
            thousands(contender.iops_during.median),
            format!("{:.0} %", contender.iops_lost.median * 100.0),
            self::seconds(contender.seconds_times_lost.median),
            milliseconds(contender.worst_latency_ms.median),
            milliseconds(contender.p99_latency_ms.median),
            self::seconds(contender.server_cpu_seconds.median),
        ]);
    }
    let difference =
        |summary: &Summary| format!("{:+.2} s ({:+.2} to {:+.2})", summary.median, summary.min, summary.max);
    format!(
        "{}sterna beside the better mode of QEMU, each: {} × its time, {} × its worst latency, time × loss {}\n",
        output::lines(&table),
        ratio(&report.seconds_to_best_mirror),
        ratio(&report.worst_latency_to_best_mirror),
        difference(&report.seconds_times_lost_less_best_mirror),
    )
}

fn seconds(value: f64) -> String {
    format!("{value:.2}")
}

fn milliseconds(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use lab::bench::mirror::{IdleFigures, LoadFigures};

    use super::*;

    fn summary(samples: &[f64]) -> Summary {
        Summary::of(samples.to_vec()).unwrap()
    }

    #[test]
    fn copies_are_a_table_and_a_sentence() {
        let contender = |name, seconds: &[f64], cpu| IdleFigures {
            name,
            seconds: summary(seconds),
            bytes_per_second: summary(&[1e9]),
            server_cpu_seconds: cpu,
            allocated_bytes: summary(&[f64::from(3 << 29)]),
        };
        let report = IdleReport {
            data_bytes: 3 << 29,
            contenders: vec![
                contender("sterna", &[1.5, 1.25, 2.0], Some(summary(&[0.5]))),
                contender("cp", &[1.5], None),
            ],
            sterna_to_best_copy: summary(&[1.0]),
            sterna_to_best_mirror: summary(&[0.75, 0.5]),
        };
        let expected = "        SECONDS             MiB/s  CPU s    TAKES
sterna     1.50  1.25–2.00    954   0.50  1.5 GiB
cp         1.50  1.50–1.50    954      -  1.5 GiB
sterna: 1.00 (1.00–1.00) × the time of the best off-line copy, 0.62 (0.50–0.75) × that of the best mirror of QEMU
";
        assert_eq!(idle_table(&report), expected);
    }

    #[test]
    fn migrations_under_load_are_a_table_and_a_sentence() {
        let figures = LoadFigures {
            name: "sterna",
            seconds: summary(&[2.0]),
            iops_before: summary(&[52_000.0]),
            iops_during: summary(&[26_000.0]),
            iops_after: summary(&[52_000.0]),
            iops_lost: summary(&[0.5]),
            seconds_times_lost: summary(&[1.0]),
            worst_latency_ms: summary(&[31.4]),
            p99_latency_ms: summary(&[2.25]),
            worst_latency_before_ms: summary(&[3.0]),
            server_cpu_seconds: summary(&[1.75]),
            compared_bytes: summary(&[1.0]),
            moments: Vec::new(),
        };
        let report = LoadReport {
            guest_iops: None,
            contenders: vec![figures],
            seconds_to_best_mirror: summary(&[0.8]),
            seconds_times_lost_less_best_mirror: summary(&[-1.5]),
            worst_latency_to_best_mirror: summary(&[0.5]),
        };
        let expected = "        SECONDS             IOPS BEFORE  DURING  LOST  TIME x LOSS s  WORST ms  99 % ms  CPU s
sterna     2.00  2.00–2.00        52.0k   26.0k  50 %           1.00        31     2.25   1.75
sterna beside the better mode of QEMU, each: 0.80 (0.80–0.80) × its time, 0.50 (0.50–0.50) × its worst latency, time × loss -1.50 s (-1.50 to -1.50)
";
        assert_eq!(load_table(&report), expected);
    }
}
