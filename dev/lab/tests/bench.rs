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

/// The result of a variant's metric in a part: a finite figure of one round.
fn result<'a>(report: &'a Value, part: &str, variant: &str, metric: &str) -> &'a Value {
    let mut results = all(report, "results");
    let found =
        results.find(|one| one["part"] == part && one["variant"] == variant && one["metric"] == metric);
    let found = found.unwrap_or_else(|| panic!("no {metric} of {variant} in {part}: {report}"));
    assert!(found["median"].as_f64().unwrap().is_finite(), "{found}");
    for other in ["min", "lower_quartile", "upper_quartile", "max"] {
        assert_eq!(found[other], found["median"], "{found}");
    }
    assert_eq!(found["samples"].as_array().unwrap().len(), 1, "{found}");
    found
}

fn median(report: &Value, part: &str, variant: &str, metric: &str) -> f64 {
    result(report, part, variant, metric)["median"].as_f64().unwrap()
}

fn all<'a>(report: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    report[name].as_array().unwrap().iter()
}

/// The variants of a part that have a metric, in their order.
fn variants<'a>(report: &'a Value, part: &str, metric: &str) -> Vec<&'a str> {
    let results = all(report, "results").filter(|one| one["part"] == part && one["metric"] == metric);
    results.map(|one| one["variant"].as_str().unwrap()).collect()
}

/// Runs a benchmark with a page; returns its report, and the number of charts on the page.
fn measured(mut command: Command, folder: &Path) -> (Value, usize) {
    let pages = tempfile::tempdir().unwrap();
    let page = pages.path().join("page.html");
    command.args(["--json", "--html"]).arg(&page);
    let outcome = Outcome::of(command);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    let charts = std::fs::read_to_string(&page).unwrap().matches("<svg ").count();
    (serde_json::from_str(&outcome.stdout).unwrap(), charts)
}

#[test]
fn bench_nbd_measures_everybody_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["nbd", "--only", "mixed-16", "--only", "sequential-writes", "--seconds", "1", "--trace"];
    let (report, charts) = measured(bench(folder.path(), &arguments), folder.path());
    assert_eq!((report["bench"].as_str(), charts), (Some("nbd"), 0));
    for program in ["sterna", "fio", "qemu-storage-daemon"] {
        assert!(report["environment"]["versions"][program].is_string(), "{report}");
    }
    let caches = report["environment"]["dropped_caches"].as_str().unwrap();
    assert!(["all", "images"].contains(&caches), "{report}");
    let parts: Vec<_> = all(&report, "parts").map(|part| part["name"].as_str().unwrap()).collect();
    assert_eq!(parts, ["mixed-16", "mixed-16-trace", "sequential-writes", "sequential-writes-trace"]);
    for workload in ["mixed-16", "sequential-writes"] {
        for metric in ["iops", "bytes_per_second", "mean_latency_us", "p99_latency_us", "max_latency_us"] {
            let everybody = variants(&report, workload, metric);
            assert_eq!(everybody, ["raw", "sterna", "qemu-storage-daemon"]);
            assert!(
                everybody.iter().all(|variant| median(&report, workload, variant, metric) > 0.0),
                "{report}"
            );
        }
        for metric in ["iops_to_raw", "added_us_per_request"] {
            assert_eq!(variants(&report, workload, metric), ["sterna", "qemu-storage-daemon"]);
        }
        result(&report, workload, "sterna", "iops_to_peer");
        let part = format!("{workload}-trace");
        let stages = variants(&report, &part, "step_us_per_request");
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
    }
}

#[test]
fn bench_mirror_compares_every_copy_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (report, charts) = measured(bench(folder.path(), &["mirror", "--seconds", "1"]), folder.path());
    // One for each contender under load.
    assert_eq!(charts, 3);
    let mirrors = ["qemu mirror, background", "qemu mirror, write-blocking"];
    let everybody = [&["sterna", "cp", "qemu-img convert"], &mirrors[..]].concat();
    assert_eq!(variants(&report, "idle", "seconds"), everybody);
    for metric in ["seconds_to_best_copy", "seconds_to_best_mirror"] {
        assert_eq!(variants(&report, "idle", metric), ["sterna"]);
    }
    let data = f64::from(48 << 20);
    for variant in everybody {
        assert!(median(&report, "idle", variant, "allocated_bytes") >= data, "{report}");
        assert_eq!(median(&report, "idle", variant, "compared_bytes"), f64::from(64 << 20));
    }
    // Holes are preserved at the target.
    assert!(median(&report, "idle", "sterna", "allocated_bytes") < data * 1.1, "{report}");

    assert_eq!(variants(&report, "load", "seconds"), [&["sterna"], &mirrors[..]].concat());
    result(&report, "load", "sterna", "seconds_times_lost_less_best_mirror");
    for variant in variants(&report, "load", "seconds") {
        for metric in ["seconds", "iops_before", "iops_after", "worst_latency_ms", "compared_bytes"] {
            assert!(median(&report, "load", variant, metric) > 0.0, "{metric} of {variant}: {report}");
        }
        let curve = all(&report, "curves").find(|curve| curve["variant"] == variant).unwrap();
        let points = curve["lines"][0]["points"].as_array().unwrap();
        let seconds = |point: &Value| point[0].as_f64();
        assert!(seconds(&points[0]) < Some(0.0) && seconds(points.last().unwrap()) > Some(0.0), "{curve}");
    }
}

#[test]
fn bench_link_measures_everybody_and_leaves_nothing_behind() {
    if let Err(error) = lab::network::check() {
        omission::machine_lacks(&format!("what hosts need: {error}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["link", "--only", "near", "--only", "two-links", "--only", "guest", "--seconds", "1"];
    let (report, charts) = measured(bench(folder.path(), &arguments), folder.path());
    // One for each contender with a guest.
    assert_eq!(charts, 4);
    assert!(report["settings"]["congestion_control"].is_string(), "{report}");
    for (part, megabits) in [("near", 1000.0), ("two-links", 1500.0)] {
        let everybody = variants(&report, part, "seconds");
        assert_eq!(everybody.len(), 4, "{report}");
        // No contender can be faster than its link.
        let megabits_seen = |variant: &&str| median(&report, part, variant, "bytes_per_second") * 8.0 / 1e6;
        assert!(everybody.iter().all(|variant| megabits_seen(variant) < megabits), "{report}");
        assert_eq!(variants(&report, part, "to_tcp"), everybody[1..]);
    }
    let everybody = variants(&report, "guest", "ended");
    assert_eq!(everybody.len(), 4, "{report}");
    for variant in everybody {
        for metric in ["seconds", "guest_bytes_per_second", "of_link", "worst_latency_ms"] {
            result(&report, "guest", variant, metric);
        }
        assert!(median(&report, "guest", variant, "ended") <= 1.0, "{report}");
    }
}

#[test]
fn bench_strategies_makes_every_figure_of_migrations_that_were_compared() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["strategies", "--scale", "tiny", "--folder"]).arg(folder.path());
    let (report, charts) = measured(command, folder.path());
    let parts: Vec<_> = all(&report, "parts").map(|part| part["name"].as_str().unwrap()).collect();
    let expected = "outstanding size database database-phases rewrites rounds-uniform rounds-zipf rounds-zipf-writes \
                    slow-target over-time hosts";
    assert_eq!(parts, expected.split(' ').collect::<Vec<_>>());
    assert!(charts >= 24, "{charts}");
    for part in parts {
        assert!(all(&report, "results").any(|one| one["part"] == part), "nothing is in {part}: {report}");
    }
    let moved: Vec<_> = all(&report, "results").filter(|one| one["metric"] == "moved").collect();
    for variant in ["mirror", "tracking", "not incremental", "three-phase", "post-copy"] {
        assert!(moved.iter().any(|one| one["variant"] == variant && one["median"] == 1.0), "{variant}");
    }
    for migration in moved {
        let same = |one: &&Value| ["part", "variant", "x"].iter().all(|name| one[*name] == migration[*name]);
        let of = |metric: &str| {
            let found = all(&report, "results").filter(same).find(|one| one["metric"] == metric);
            found.and_then(|one| one["median"].as_f64())
        };
        let has_moved = migration["median"] == 1.0;
        assert_eq!(of("compared_bytes") > Some(0.0), has_moved, "{migration}");
        let (is_mirror, is_late) = (migration["variant"] == "mirror", migration["variant"] == "post-copy");
        assert!(has_moved || !is_mirror, "mirroring converges: {migration}");
        if has_moved {
            assert_eq!(of("bytes_mirrored") > Some(0.0), is_mirror, "{migration}");
            assert!(!is_late || of("bytes_followed") > Some(0.0), "{migration}");
            assert!(of("bytes_copied") > Some(0.0) && of("seconds_to_offline") > Some(0.0), "{migration}");
        }
    }
    let curve =
        all(&report, "curves").find(|curve| curve["part"] == "slow-target" && curve["variant"] == "mirror");
    assert_eq!(curve.unwrap()["lines"][1]["name"], "Equation 1");
}

#[test]
fn bench_return_brings_a_volume_there_and_home_and_compares_it() {
    let folder = tempfile::tempdir().unwrap();
    let (report, charts) =
        measured(bench(folder.path(), &["return", "--only", "web", "--seconds", "1"]), folder.path());
    assert_eq!(charts, 1);
    assert_eq!(variants(&report, "web", "iops"), ["before", "there", "away", "home", "after"]);
    assert!(median(&report, "web", "home", "compared_bytes") > 0.0);
    let [curve] = &report["curves"].as_array().unwrap()[..] else { panic!("one curve is of it: {report}") };
    let seconds = |point: &Value| point[0].as_f64().unwrap();
    // All phases: from a second before the order to a second after the return.
    let (there, home) = (&curve["migrations"][0], &curve["migrations"][1]);
    assert!(seconds(there) == 0.0 && seconds(home) > there[1].as_f64().unwrap(), "{curve}");
    let life = curve["lines"][0]["points"].as_array().unwrap();
    let end = home[1].as_f64().unwrap() - 0.5;
    assert!(seconds(&life[0]) < 0.0 && seconds(life.last().unwrap()) > end, "{curve}");
    let moved = |way: &str| median(&report, "web", way, "bytes_moved");
    // N.B. This is no speed: the return sends only the later writes.
    assert!(moved("there") >= f64::from(64 << 20) && moved("home") < moved("there") / 2.0, "{report}");
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
