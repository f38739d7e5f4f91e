//! Tests of the printed tables of benchmarks.

use lab::bench::Summary;
use lab::bench::link::{CopyFigures, CopyReport, GuestFigures, GuestReport};
use lab::bench::mirror::{IdleFigures, IdleReport, LoadFigures, LoadReport};
use lab::bench::nbd::{ContenderFigures, WorkloadFigures};

use super::lines;

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
        trace: Vec::new(),
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
    let expected = "                      IOPS               OF RAW  ADDED us  LATENCY us  99 % us  CPU us
raw                  66.0k  64.0k–70.0k       -         -         240      912     4.2
sterna               60.0k  60.0k–60.0k    0.91      22.5         240      912     6.5
qemu-storage-daemon   9800    9800–9800    0.91      22.5         240      912     6.5
sterna beside qemu-storage-daemon: 1.25 (1.20–1.30) × its throughput, 0.50 (0.50–0.50) × its CPU time
";
    assert_eq!(lines(&workload.table()), expected);
    workload.block_bytes = 1 << 20;
    let sequential = lines(&workload.table());
    assert!(sequential.contains("MiB/s") && sequential.contains("781  781–781"), "{sequential}");
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
    let expected = "        SECONDS             MiB/s  CPU s     TAKES
sterna     1.50  1.25–2.00    954   0.50  1.50 GiB
cp         1.50  1.50–1.50    954      -  1.50 GiB
sterna: 1.00 (1.00–1.00) × the time of the best off-line copy, 0.62 (0.50–0.75) × that of the best mirror of QEMU
";
    assert_eq!(lines(&report.table()), expected);
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
    assert_eq!(lines(&report.table()), expected);
}

#[test]
fn copies_over_links_are_a_table_and_a_sentence() {
    let contender = |name, seconds: &[f64], to_tcp: Option<&[f64]>| CopyFigures {
        name,
        seconds: summary(seconds),
        bytes_per_second: summary(&[f64::from(100 << 20)]),
        to_tcp: to_tcp.map(summary),
        second_half_bytes_per_second: Some(summary(&[f64::from(110 << 20)])),
        second_half_to_tcp: to_tcp.map(|_| summary(&[0.97])),
    };
    let report = CopyReport {
        name: "near",
        title: "1 Gbit/s, round trip 0.5 ms",
        link_bytes_per_second: f64::from(125 << 20),
        round_trip_ms: 0.59,
        contenders: vec![
            contender("tcp", &[2.0], None),
            contender("sterna", &[2.5, 2.0, 3.0], Some(&[0.8, 0.75, 0.9])),
        ],
    };
    let expected = "        SECONDS             MiB/s  OF LINK  OF TCP  SECOND HALF
tcp        2.00  2.00–2.00    100     0.80       -            -
sterna     2.50  2.00–3.00    100     0.80    0.80         0.97
sterna: 0.80 (0.75–0.90) × what TCP carries
";
    assert_eq!(lines(&report.table()), expected);
    assert_eq!(report.heading(), "1 Gbit/s, round trip 0.5 ms; measured: 0.59 ms");
}

#[test]
fn migrations_over_links_tell_how_many_have_ended() {
    let figures = GuestFigures {
        name: "sterna",
        ended: 1,
        seconds: summary(&[3.0, 30.0]),
        written_bytes_per_second_before: summary(&[f64::from(240 << 20)]),
        written_bytes_per_second: summary(&[f64::from(60 << 20)]),
        written_to_link: summary(&[0.5]),
        worst_latency_ms: summary(&[90.0]),
        p99_latency_ms: summary(&[5.0]),
        moments: Vec::new(),
    };
    let link_bytes_per_second = f64::from(120 << 20);
    let report = GuestReport { title: "a guest", link_bytes_per_second, contenders: vec![figures] };
    let expected = "         ENDED  SECONDS              MiB/s BEFORE  DURING  OF LINK  WORST ms  99 % ms
sterna  1 of 2    16.50  3.00–30.00           240      60     0.50        90     5.00
the link carries 120 MiB/s; a migration that has not ended when the image could have been brought over four times is given up
";
    assert_eq!(lines(&report.table()), expected);
}
