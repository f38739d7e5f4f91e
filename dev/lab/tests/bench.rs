//! Tests of short benchmarks: the shape of their output, the errors for missing programs, and that they clean up. They need fio
//! and qemu-storage-daemon. The benchmark of links needs root, and is left out without it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the whole file is tests and their support")]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testbed::program::sterna;

#[derive(Debug)]
struct Outcome {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Outcome {
    fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// Returns `bench` of this package's program, without the caller's settings.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna-lab"));
    command.arg("bench").env("STERNA_PROGRAM", sterna().unwrap());
    command.env_remove("STERNA_LOG").env_remove("STERNA_HOST").stdin(Stdio::null());
    command
}

fn bench(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = program();
    command.args(arguments).args(["--rounds", "1", "--size", "64MiB", "--folder"]).arg(folder);
    command
}

fn expect_empty(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

fn page() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html").to_str().unwrap().to_owned();
    (folder, page)
}

fn expect_figure(figure: &Value) {
    let median = figure["median"].as_f64().unwrap_or_else(|| panic!("no figure: {figure}"));
    assert!(median.is_finite(), "{figure}");
    for other in ["min", "lower_quartile", "upper_quartile", "max"] {
        assert_eq!(figure[other], figure["median"], "{figure}");
    }
    assert_eq!(figure["samples"].as_array().unwrap().len(), 1, "{figure}");
}

#[test]
fn bench_nbd_measures_everybody_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (pages, page) = page();
    let arguments = ["nbd", "--only", "mixed-16", "--only", "sequential-writes", "--seconds", "1", "--json"];
    let more = ["--trace", "--html", &page];
    let outcome = Outcome::of(bench(folder.path(), &[&arguments[..], &more].concat()));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    // Three charts for each workload.
    assert_eq!(std::fs::read_to_string(&page).unwrap().matches("<svg ").count(), 6);
    drop(pages);
    expect_empty(folder.path());
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    for program in ["sterna", "fio", "qemu-storage-daemon"] {
        assert!(report["environment"]["versions"][program].is_string(), "{report}");
    }
    assert!(
        ["all", "images"].contains(&report["environment"]["dropped_caches"].as_str().unwrap()),
        "{report}"
    );
    let workloads = report["workloads"].as_array().unwrap();
    let names: Vec<_> = workloads.iter().map(|workload| workload["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["mixed-16", "sequential-writes"]);
    for workload in workloads {
        expect_figure(&workload["iops_sterna_to_peer"]);
        let contenders = workload["contenders"].as_array().unwrap();
        let names: Vec<_> = contenders.iter().map(|contender| contender["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["raw", "sterna", "qemu-storage-daemon"]);
        let trace = contenders[1]["trace"].as_array().unwrap();
        let stages: Vec<_> = trace.iter().map(|stage| stage["name"].as_str().unwrap()).collect();
        let (of_connection, of_ring) = stages.split_at(7);
        assert_eq!(
            of_connection,
            ["intake", "device", "outbox", "send", "whole", "device-idle", "client-idle"],
            "{workload}"
        );
        // The engine with threads has no ring.
        assert!(
            of_ring.is_empty() || of_ring == ["queued", "disk", "handed-back", "asleep", "looking"],
            "{workload}"
        );
        trace.iter().for_each(|stage| expect_figure(&stage["us_per_request"]));
        assert!(contenders[0]["trace"].is_null() && contenders[2]["trace"].is_null(), "{workload}");
        for (index, contender) in contenders.iter().enumerate() {
            for figure in ["iops", "bytes_per_second", "mean_latency_us", "p99_latency_us", "max_latency_us"]
            {
                expect_figure(&contender[figure]);
                assert!(contender[figure]["median"].as_f64() > Some(0.0), "{figure}: {contender}");
            }
            for figure in ["server_cpu_us_per_request", "iops_to_raw", "added_us_per_request"] {
                match index {
                    0 => assert!(contender[figure].is_null(), "{figure}: {contender}"),
                    _ => expect_figure(&contender[figure]),
                }
            }
        }
    }
}

#[test]
fn bench_mirror_compares_every_copy_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (pages, page) = page();
    let outcome = Outcome::of(bench(folder.path(), &["mirror", "--seconds", "1", "--json", "--html", &page]));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    // One chart of copies, three of migrations, and one for each contender.
    assert_eq!(std::fs::read_to_string(&page).unwrap().matches("<svg ").count(), 7);
    drop(pages);
    expect_empty(folder.path());
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let names = |contenders: &Value| -> Vec<String> {
        let contenders = contenders.as_array().unwrap().iter();
        contenders.map(|contender| contender["name"].as_str().unwrap().to_owned()).collect()
    };

    let idle = &report["idle"];
    let mirrors = ["qemu mirror, background", "qemu mirror, write-blocking"];
    assert_eq!(names(&idle["contenders"]), [&["sterna", "cp", "qemu-img convert"], &mirrors[..]].concat());
    expect_figure(&idle["sterna_to_best_copy"]);
    expect_figure(&idle["sterna_to_best_mirror"]);
    let data = idle["data_bytes"].as_f64().unwrap();
    assert_eq!(data, f64::from(48 << 20));
    for contender in idle["contenders"].as_array().unwrap() {
        expect_figure(&contender["seconds"]);
        assert!(contender["allocated_bytes"]["median"].as_f64() >= Some(data), "{contender}");
    }
    // Holes are preserved at the target.
    assert!(idle["contenders"][0]["allocated_bytes"]["median"].as_f64() < Some(data * 1.1), "{idle}");

    let load = &report["load"];
    assert_eq!(names(&load["contenders"]), [&["sterna"], &mirrors[..]].concat());
    expect_figure(&load["seconds_times_lost_less_best_mirror"]);
    for contender in load["contenders"].as_array().unwrap() {
        for figure in ["seconds", "iops_before", "iops_after", "worst_latency_ms", "compared_bytes"] {
            expect_figure(&contender[figure]);
            assert!(contender[figure]["median"].as_f64() > Some(0.0), "{figure}: {contender}");
        }
        let moments = contender["moments"][0].as_array().unwrap();
        assert!(moments.first().unwrap()["seconds"].as_f64() < Some(0.0), "{moments:?}");
        assert!(moments.last().unwrap()["seconds"].as_f64() > Some(0.0), "{moments:?}");
    }
}

#[test]
fn bench_link_measures_everybody_and_leaves_nothing_behind() {
    if let Err(error) = lab::network::check() {
        omission::machine_lacks(&format!("what hosts need: {error}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (pages, page) = page();
    let arguments =
        ["link", "--only", "near", "--only", "two-links", "--only", "guest", "--seconds", "1", "--json"];
    let outcome = Outcome::of(bench(folder.path(), &[&arguments[..], &["--html", &page]].concat()));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    // One chart for each copy, two of guests, and one for each contender with a guest.
    assert_eq!(std::fs::read_to_string(&page).unwrap().matches("<svg ").count(), 8);
    drop(pages);
    expect_empty(folder.path());
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let copies = report["copies"].as_array().unwrap();
    for (copy, (name, megabits)) in copies.iter().zip([("near", 1000.0), ("two-links", 1500.0)]) {
        assert_eq!(copy["name"], name);
        let contenders = copy["contenders"].as_array().unwrap();
        for (index, contender) in contenders.iter().enumerate() {
            expect_figure(&contender["seconds"]);
            expect_figure(&contender["bytes_per_second"]);
            // No contender can be faster than its link.
            let megabits_seen = contender["bytes_per_second"]["median"].as_f64().unwrap() * 8.0 / 1e6;
            assert!(megabits_seen < megabits, "{contender}");
            match index {
                0 => assert_eq!((&contender["name"], contender["to_tcp"].is_null()), (&"tcp".into(), true)),
                _ => expect_figure(&contender["to_tcp"]),
            }
        }
    }
    let guest = report["guest"]["contenders"].as_array().unwrap();
    assert_eq!((copies.len(), guest.len()), (2, 4));
    for contender in guest {
        for figure in ["seconds", "written_bytes_per_second", "written_to_link", "worst_latency_ms"] {
            expect_figure(&contender[figure]);
        }
        assert!(contender["ended"].as_u64() <= Some(1), "{contender}");
    }
}

#[test]
fn bench_strategies_makes_every_figure_of_migrations_that_were_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (pages, page) = page();
    let mut command = program();
    command.args(["strategies", "--scale", "tiny", "--json", "--html", &page, "--folder"]).arg(folder.path());
    let outcome = Outcome::of(command);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    expect_empty(folder.path());
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let names: Vec<_> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    let expected = "figure-4 figure-6 figure-8-reads figure-8-writes figure-9 figure-5 figure-7 table-1-time \
                    table-1-downtime table-2-latency table-2-variance figure-2 rewrites figure-3-uniform figure-3-zipf figure-3-zipf-writes \
                    figure-10 slow-target figure-11 figure-11-phases hosts-handover hosts-time hosts-downtime hosts-penalty \
                    hosts-followed hosts-pulled";
    assert_eq!(names, expected.split(' ').collect::<Vec<_>>());
    assert_eq!(std::fs::read_to_string(&page).unwrap().matches("<svg ").count(), figures.len());
    drop(pages);
    for figure in figures {
        let points =
            figure["series"].as_array().unwrap().iter().flat_map(|line| line["points"].as_array().unwrap());
        assert!(points.into_iter().any(|point| point["y"]["median"].is_number()), "nothing is in {figure}");
    }
    let samples = report["samples"].as_array().unwrap();
    for column in ["mirror", "tracking", "not incremental", "three-phase", "post-copy"] {
        assert!(
            samples.iter().any(|sample| sample["column"] == column && sample["moved"] == true),
            "{column}"
        );
    }
    for sample in samples {
        let (moved, compared) = (sample["moved"] == true, sample["compared_bytes"].as_u64().unwrap());
        assert_eq!(moved, compared > 0, "{sample}");
        let is_mirror = sample["column"] == "mirror";
        assert!(moved || !is_mirror, "mirroring converges: {sample}");
        assert_eq!(is_mirror, sample["bytes_mirrored"].as_u64() > Some(0), "{sample}");
        let has_rounds = !is_mirror && sample["column"] != "post-copy";
        assert_eq!(has_rounds, !sample["rounds"].as_array().unwrap().is_empty(), "{sample}");
        let is_handed_over_first = sample["column"] == "post-copy";
        assert!(!is_handed_over_first || sample["bytes_followed"].as_u64() > Some(0), "{sample}");
        assert!(
            sample["bytes_copied"].as_u64() > Some(0) && sample["offline_seconds"].as_f64() > Some(0.0),
            "{sample}"
        );
    }
}

#[test]
fn bench_return_brings_a_volume_there_and_home_and_compares_it() {
    let folder = tempfile::tempdir().unwrap();
    let (pages, page) = page();
    let order = ["return", "--only", "web", "--seconds", "1", "--json", "--html", &page];
    let outcome = Outcome::of(bench(folder.path(), &order));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    expect_empty(folder.path());
    let shown = std::fs::read_to_string(&page).unwrap();
    assert!(
        shown.contains("a web server") && shown.contains("figure-5") && shown.contains("<polyline"),
        "{shown}"
    );
    drop(pages);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let [load] = &report["loads"].as_array().unwrap()[..] else { panic!("one load was asked for: {report}") };
    assert_eq!(load["load"], "web");
    assert!(load["compared_bytes"][0].as_u64() > Some(0), "{load}");
    let [figure] = &report["figures"].as_array().unwrap()[..] else {
        panic!("one figure is of it: {report}")
    };
    let points = |line: usize| figure["series"][line]["points"].as_array().unwrap();
    let seconds = |point: &Value| point["x"].as_f64().unwrap();
    // All phases: from a second before the order to a second after the return.
    let (there, home) = (points(1), points(2));
    assert!(seconds(&there[0]).abs() < 0.001 && seconds(&home[0]) > seconds(&there[1]), "{figure}");
    let life = points(0);
    assert!(seconds(&life[0]) < 0.0 && seconds(life.last().unwrap()) > seconds(&home[1]) - 0.5, "{figure}");
    let moved = |way: &str| load[way]["bytes_moved"]["median"].as_f64().unwrap();
    // N.B. This is no speed: the return sends only the later writes.
    assert!(moved("there") >= f64::from(64 << 20) && moved("home") < moved("there") / 2.0, "{load}");
}

#[test]
fn an_interrupted_benchmark_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = bench(folder.path(), &["nbd", "--seconds", "3600", "--only", "mixed-1"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("round 1 of 1")), "it never began");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let said: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said:?}");
    assert!(said.iter().any(|line| line.contains("everything has been cleaned up")), "{said:?}");
    expect_empty(folder.path());
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = Outcome::of(bench(folder.path(), &["nbd", "--html", "/no/such/folder/page.html"]));
    assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{outcome:?}");
    assert!(outcome.stderr.contains("the page /no/such/folder/page.html cannot be written"), "{outcome:?}");
}

#[test]
fn a_missing_program_is_named_with_its_package() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = bench(folder.path(), &["nbd", "--json"]);
    command.env("PATH", folder.path());
    let outcome = Outcome::of(command);
    let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((outcome.code, &error["error"]["code"]), (1, &"bench_failed".into()), "{outcome:?}");
    assert!(outcome.stdout.contains("fio is needed and not installed"), "{outcome:?}");
    assert!(outcome.stdout.contains("apt-get install fio"), "{outcome:?}");
}
