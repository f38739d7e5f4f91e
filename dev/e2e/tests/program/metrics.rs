//! Tests of the metrics: Prometheus' own parser accepts them, and they are true.

use serde_json::Value;
use testbed::Program;
use testbed::nbd_client::{Operation, WriteDurability};

use crate::hosts::{host, init, wait_connected};
use crate::scene::{Scene, wait_until};

/// Of a host of the distribution, with its packages.
const PYTHON: &str = "/usr/bin/python3";
/// Reads the file that it is given, judges it, and prints its samples as JSON.
const READ: &str = r#"
import json, sys
from prometheus_client.parser import text_string_to_metric_families as parse

samples = {}
for family in parse(open(sys.argv[1]).read()):
    assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
    assert family.name.startswith("sterna_"), family
    counts = {}
    for sample in family.samples:
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        key = sample.name + "{" + labels + "}"
        assert key not in samples, key
        samples[key] = sample.value
        if sample.name.endswith("_bucket"):
            series = tuple(sorted((n, v) for n, v in sample.labels.items() if n != "le"))
            counts.setdefault(series, []).append((float(sample.labels["le"]), sample.value))
    for series, buckets in counts.items():
        assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(v for _, v in buckets), buckets
        assert buckets[-1][0] == float("inf"), buckets
        whole = family.name + "_count{" + ",".join(f"{n}={v}" for n, v in series) + "}"
        assert samples[whole] == buckets[-1][1], whole
print(json.dumps(samples))
"#;

/// The samples that the daemon tells, by name and labels.
fn samples(scene: &Scene) -> Value {
    let path = scene.path("metrics");
    std::fs::write(&path, scene.succeed(&["metrics"])).unwrap();
    let read = Program::of_package(PYTHON, "python3 (with python3-prometheus-client)");
    let read = read.arg("-c").arg(READ).arg(&path).succeed().unwrap();
    serde_json::from_str(&read).unwrap()
}

#[test]
fn figures_are_what_a_guest_did_and_what_became_of_its_migrations() {
    let scene = Scene::started();
    scene.create_volume();
    let before = samples(&scene);
    assert_eq!(before["sterna_volume_requests_total{operation=write,volume=v}"], 0.0);
    assert_eq!(before["sterna_volume_connections{volume=v}"], 0.0);
    let mut guest = scene.connect();
    for turn in 0..10 {
        guest
            .perform(Operation::Write {
                offset: turn * 4096,
                data: vec![7; 4096],
                durability: WriteDurability::Volatile,
            })
            .unwrap();
    }
    guest.perform(Operation::Flush).unwrap();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let after = samples(&scene);
    for (name, value) in [
        ("sterna_volume_requests_total{operation=write,volume=v}", 10.0),
        ("sterna_volume_requests_total{operation=flush,volume=v}", 1.0),
        ("sterna_volume_written_bytes_total{volume=v}", 40_960.0),
        ("sterna_volume_request_duration_seconds_count{volume=v}", 11.0),
        ("sterna_volume_connections{volume=v}", 1.0),
        ("sterna_volume_up{volume=v}", 1.0),
        ("sterna_volume_state{state=serving,volume=v}", 1.0),
        ("sterna_migrations{phase=copying}", 0.0),
        ("sterna_migrations_ended_total{direction=local,outcome=failed}", 0.0),
        ("sterna_store_up{store=a}", 1.0),
        ("sterna_journal_failures_total{}", 0.0),
    ] {
        assert_eq!(after[name], value, "{name}: {after:#}");
    }
    let least = [
        ("sterna_migration_bytes_total{kind=copied}", 40_960.0),
        ("sterna_volume_request_duration_seconds_sum{volume=v}", 1e-6),
        ("sterna_journal_commits_total{}", 4.0),
        ("sterna_store_free_bytes{store=a}", 1.0),
        ("sterna_data_folder_free_bytes{}", 1.0),
        ("sterna_start_time_seconds{}", 1.7e9),
    ];
    for (name, least) in least {
        assert!(after[name].as_f64().is_some_and(|value| value >= least), "{name}: {after:#}");
    }
    // What a migration was is counted a moment after it is shown as ended.
    wait_until("the migration is counted", || {
        samples(&scene)["sterna_migrations_ended_total{direction=local,outcome=moved}"] == 1.0
    });
    assert!(scene.json(&["metrics"]).1["metrics"].as_str().unwrap().starts_with("# HELP sterna_"));
}

#[test]
fn another_host_and_the_link_with_it_are_told_by_name_and_address() {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite"]);
    two.succeed(&["host", "join", &address, invitation["token"].as_str().unwrap()]);
    wait_connected(&one, "two");
    let told = samples(&one);
    assert_eq!(told["sterna_host_connected{host=two}"], 1.0, "{told:#}");
    let links: Vec<_> = told.as_object().unwrap().keys().filter(|name| name.contains("_link_up{")).collect();
    assert!(!links.is_empty() && links.iter().all(|name| name.contains("host=two,local=1")), "{links:?}");
}
