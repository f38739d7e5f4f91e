//! Tests transfers of memory against monitors that behave like QEMU at its best and at its worst.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::qemu::fake_monitor::{FakeMonitor, Reply};
use crate::{MemoryMode, MigrationStatus, PostCopyStart, RunState};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn returned(value: Value) -> Vec<Reply> {
    vec![Reply::Return(value)]
}

fn status(name: &'static str) -> Reply {
    Reply::Event("MIGRATION", json!({ "status": name }))
}

async fn connect(monitor: &FakeMonitor) -> Qemu {
    Qemu::connect(&monitor.socket()).await.unwrap()
}

#[test]
fn a_path_that_qemu_would_read_otherwise_is_refused() {
    assert_eq!(address(Path::new("/run/m")).unwrap(), "unix:/run/m");
    let long = format!("/{}", "m".repeat(SOCKET_PATH_BYTES_MAX));
    for path in ["/run/m,server=on", &long] {
        assert!(matches!(address(Path::new(path)), Err(HypervisorError::Other(_))), "{path}");
    }
}

#[test]
fn a_move_begins_without_slowing_the_guest_down() {
    let options = MemoryOptions::for_downtime(Duration::from_secs(1_000_000));
    let parameters = parameters(options);
    assert_eq!(parameters["max-cpu-throttle"], 1);
    assert_eq!(parameters["downtime-limit"], 2_000_000);
    assert_eq!(parameters["max-bandwidth"], 1_u64 << 40);
    assert_eq!(parameters["max-postcopy-bandwidth"], 0);
}

#[tokio::test]
async fn a_limit_holds_before_and_after_the_vm_runs_at_the_target() {
    let mut monitor = FakeMonitor::start(|_, _| returned(json!({})));
    let qemu = connect(&monitor).await;
    qemu.limit_memory(NonZeroU64::new(100 << 20)).await.unwrap();
    qemu.limit_memory(None).await.unwrap();
    let mut limits = Vec::new();
    while limits.len() < 2 {
        let (name, arguments) = monitor.heard().await;
        if name == "migrate-set-parameters" {
            limits.push(arguments);
        }
    }
    let parameters =
        |before: u64, after: u64| json!({ "max-bandwidth": before, "max-postcopy-bandwidth": after });
    assert_eq!(limits, [parameters(100 << 20, 100 << 20), parameters(1 << 40, 0)]);
}

#[tokio::test]
async fn memory_is_offered_in_the_order_that_qemu_needs() {
    let mut monitor = FakeMonitor::start(|_, _| returned(json!({})));
    let qemu = connect(&monitor).await;
    let options = MemoryOptions::for_downtime(Duration::from_millis(300));
    qemu.offer_memory(Path::new("/run/memory"), options).await.unwrap();
    qemu.raise_throttle(200).await.unwrap();
    let mut heard = Vec::new();
    for _ in 0..6 {
        heard.push(monitor.heard().await);
    }
    let names: Vec<&str> = heard.iter().map(|(name, _)| name.as_str()).collect();
    let expected = [
        "qmp_capabilities",
        "query-migrate",
        "migrate-set-capabilities",
        "migrate-set-parameters",
        "migrate",
        "migrate-set-parameters",
    ];
    assert_eq!(names, expected);
    assert_eq!(heard[3].1["downtime-limit"], 300);
    assert_eq!(heard[4].1, json!({ "uri": "unix:/run/memory" }));
    assert_eq!(heard[5].1["max-cpu-throttle"], THROTTLE_MOST_PERCENT);
}

#[tokio::test]
async fn a_vm_that_cannot_be_migrated_is_refused_before_anything_is_set() {
    let monitor = FakeMonitor::start(|command, _| {
        assert_eq!(command, "query-migrate");
        returned(json!({ "blocked-reasons": ["VFIO device doesn't support migration"] }))
    });
    let options = MemoryOptions::for_downtime(SHORT);
    let refused = connect(&monitor).await.offer_memory(Path::new("/m"), options).await.unwrap_err();
    assert!(refused.to_string().contains("VFIO"), "{refused}");
}

async fn hazard(size: u64, emulated: bool) -> Option<String> {
    let monitor = FakeMonitor::start(move |command, _| match command {
        "query-kvm" => returned(json!({ "enabled": !emulated, "present": true })),
        "query-memory-size-summary" => returned(json!({ "base-memory": size, "plugged-memory": 0 })),
        other => unreachable!("{other}"),
    });
    connect(&monitor).await.memory_hazard().await.unwrap()
}

#[tokio::test]
async fn memory_that_an_old_hypervisor_would_damage_is_named_with_the_way_round() {
    let text = hazard(256 << 20, true).await.unwrap();
    assert!(text.contains("QEMU 7.2.22") && text.contains("-m 262136K"), "{text}");
    assert_eq!(hazard(262_136 << 10, true).await, None);
    assert_eq!(hazard(256 << 20, false).await, None);
}

#[tokio::test]
async fn a_status_that_is_told_while_qemu_does_not_answer_is_heard() {
    // The status is "device" with a stalled stream: the query is never answered.
    let mut monitor = FakeMonitor::start(|_, _| vec![]);
    let qemu = connect(&monitor).await;
    let wanted = [MigrationStatus::Completed];
    let telling = async {
        while monitor.heard().await.0 != "query-migrate" {}
        monitor.act(status("device"));
        monitor.act(status("completed"));
    };
    let (waited, ()) = tokio::join!(qemu.await_status(&wanted, LONG), telling);
    assert_eq!(waited.unwrap(), MigrationStatus::Completed);
}

#[tokio::test]
async fn a_status_is_found_by_asking_if_its_event_is_lost() {
    let asked = AtomicUsize::new(0);
    let monitor = FakeMonitor::start(move |_, _| {
        let is_first = asked.fetch_add(1, Ordering::Relaxed) == 0;
        returned(json!({ "status": if is_first { "active" } else { "pre-switchover" } }))
    });
    let qemu = connect(&monitor).await;
    let status = qemu.await_status(&[MigrationStatus::PreSwitchover], LONG).await;
    assert_eq!(status.unwrap(), MigrationStatus::PreSwitchover);
}

#[tokio::test]
async fn a_move_that_fails_ends_the_wait_with_qemus_reason() {
    let asked = AtomicUsize::new(0);
    let monitor = FakeMonitor::start(move |_, _| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => vec![Reply::Return(json!({ "status": "active" })), status("failed")],
        _ => returned(json!({ "status": "failed", "error-desc": "Unable to write to socket" })),
    });
    let qemu = connect(&monitor).await;
    let failed = qemu.await_status(&[MigrationStatus::Completed], LONG).await.unwrap_err();
    assert!(matches!(failed, HypervisorError::MigrationEnded { .. }), "{failed:?}");
    assert!(failed.to_string().contains("Unable to write"), "{failed}");
}

#[tokio::test]
async fn a_wait_that_is_over_says_what_was_seen_last() {
    let monitor = FakeMonitor::start(|_, _| returned(json!({ "status": "active" })));
    let qemu = connect(&monitor).await;
    // Enough time for an answer, even on a busy host.
    let deadline = Duration::from_secs(2);
    let late = qemu.await_status(&[MigrationStatus::PreSwitchover], deadline).await.unwrap_err();
    let expected = "waited 2000 ms for QEMU's migration to be pre-switchover, and it is still active";
    assert_eq!(late.to_string(), expected);
    let silent = FakeMonitor::start(|_, _| vec![]);
    let late = connect(&silent).await.await_status(&[MigrationStatus::Completed], SHORT).await;
    assert!(late.unwrap_err().to_string().ends_with("still silent"));
}

#[tokio::test]
async fn a_target_is_stopped_before_it_listens_and_refused_if_it_does_not_wait() {
    let mut monitor = FakeMonitor::start(|_, _| returned(json!({ "status": "inmigrate" })));
    let qemu = connect(&monitor).await;
    qemu.expect_memory(Path::new("/run/memory"), MemoryTransfer::default()).await.unwrap();
    let mut names = Vec::new();
    for _ in 0..6 {
        names.push(monitor.heard().await.0);
    }
    let expected = [
        "qmp_capabilities",
        "query-status",
        "stop",
        "migrate-set-capabilities",
        "migrate-set-parameters",
        "migrate-incoming",
    ];
    assert_eq!(names, expected);
    let running = FakeMonitor::start(|_, _| returned(json!({ "status": "running" })));
    let refused = connect(&running).await;
    let refused =
        refused.expect_memory(Path::new("/run/memory"), MemoryTransfer::default()).await.unwrap_err();
    assert_eq!(refused.to_string(), "the VM is running, and should be inmigrate");
}

/// A target in state `first` until it reports that its migration has completed, and in `then` from there on.
fn target(first: &'static str, then: &'static str, migration: &'static str) -> FakeMonitor {
    let asked = Arc::new(AtomicUsize::new(0));
    FakeMonitor::start(move |command, _| match command {
        "query-status" if asked.fetch_add(1, Ordering::Relaxed) == 0 => {
            vec![Reply::Return(json!({ "status": first })), status("completed")]
        }
        "query-status" => returned(json!({ "status": then })),
        _ => returned(json!({ "status": migration, "error-desc": "load of migration failed" })),
    })
}

#[tokio::test]
async fn a_loaded_target_is_paused_and_nothing_else() {
    connect(&target("inmigrate", "paused", "active")).await.await_loaded(LONG).await.unwrap();
    let running = connect(&target("inmigrate", "running", "active")).await.await_loaded(LONG).await;
    assert!(matches!(running, Err(HypervisorError::State { .. })), "{running:?}");
    let failed = connect(&target("inmigrate", "inmigrate", "failed")).await.await_loaded(LONG).await;
    assert!(failed.unwrap_err().to_string().contains("load of migration failed"));
    let late = connect(&target("inmigrate", "inmigrate", "active")).await.await_loaded(SHORT).await;
    assert!(matches!(late, Err(HypervisorError::Deadline { .. })), "{late:?}");
}

#[tokio::test]
async fn a_target_that_ends_while_it_loads_is_gone() {
    let monitor = FakeMonitor::start(|_, _| vec![Reply::Close]);
    let gone = connect(&monitor).await.await_loaded(LONG).await.unwrap_err();
    assert!(gone.is_gone(), "{gone:?}");
}

async fn agreed(transfer: MemoryTransfer) -> (bool, bool, u64) {
    let mut monitor = FakeMonitor::start(|_, _| returned(json!({ "status": "inmigrate" })));
    connect(&monitor).await.expect_memory(Path::new("/run/memory"), transfer).await.unwrap();
    let is_on = |name: &str, arguments: &Value| {
        let capabilities = arguments["capabilities"].as_array().unwrap();
        capabilities.iter().find(|known| known["capability"] == name).unwrap()["state"].as_bool().unwrap()
    };
    let (mut side_streams, mut post_copy) = (false, false);
    loop {
        let (name, arguments) = monitor.heard().await;
        match name.as_str() {
            "migrate-set-capabilities" => {
                side_streams = is_on("multifd", &arguments);
                post_copy = is_on("postcopy-ram", &arguments);
            }
            "migrate-set-parameters" => {
                return (side_streams, post_copy, arguments["multifd-channels"].as_u64().unwrap());
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn both_sides_are_told_which_way_the_memory_goes_and_what_an_earlier_try_wanted_is_taken_back() {
    let side_streams = std::num::NonZeroU8::new(3);
    let (mode, pre_copy) = (MemoryMode::PostCopy, MemoryMode::PreCopy);
    assert_eq!(agreed(MemoryTransfer::default()).await, (false, false, 1));
    assert_eq!(agreed(MemoryTransfer { side_streams, mode: pre_copy }).await, (true, false, 3));
    // QEMU cannot do both.
    assert_eq!(agreed(MemoryTransfer { side_streams, mode }).await, (false, true, 1));
}

#[tokio::test]
async fn a_vm_that_is_about_to_switch_over_with_all_of_its_memory_is_let() {
    for (status, expected) in [("paused", PostCopyStart::Begun), ("finish-migrate", PostCopyStart::TooLate)] {
        let mut monitor = FakeMonitor::start(move |_, _| returned(json!({ "status": status })));
        assert_eq!(connect(&monitor).await.begin_post_copy().await.unwrap(), expected);
        let mut names = Vec::new();
        for _ in 0..if expected == PostCopyStart::Begun { 4 } else { 3 } {
            names.push(monitor.heard().await.0);
        }
        // N.B. it is paused before sending: a failure then does not resume it.
        assert_eq!(names[1..3], ["stop", "query-status"]);
        assert_eq!(names.get(3).is_some_and(|name| name == "migrate-start-postcopy"), status == "paused");
    }
}

#[tokio::test]
async fn memory_for_a_file_needs_no_answer_and_a_vm_that_does_not_run() {
    let in_state = |state: &'static str| {
        FakeMonitor::start(move |command, _| match command {
            "query-status" => returned(json!({ "status": state })),
            _ => returned(json!({})),
        })
    };
    let stream = Path::new("/run/memory");
    let mut paused = in_state("paused");
    connect(&paused).await.save_memory(stream).await.unwrap();
    let mut waiting = in_state("inmigrate");
    connect(&waiting).await.expect_saved_memory(stream).await.unwrap();
    for (monitor, order) in [(&mut paused, "migrate"), (&mut waiting, "migrate-incoming")] {
        let mut states = Vec::new();
        loop {
            let (name, arguments) = monitor.heard().await;
            if name == "migrate-set-capabilities" {
                states = arguments["capabilities"].as_array().unwrap().clone();
            }
            if name == order {
                assert_eq!(arguments, json!({ "uri": "unix:/run/memory" }));
                break;
            }
        }
        let is_set =
            |wanted: &str| states.iter().any(|one| one["capability"] == wanted && one["state"] == true);
        assert!(is_set("late-block-activate") && is_set("events"), "{states:?}");
        for other in ["return-path", "pause-before-switchover", "multifd", "postcopy-ram"] {
            let is_named = states.iter().any(|one| one["capability"] == other);
            assert!(is_named && !is_set(other), "{other}");
        }
    }
    let running = in_state("running");
    let qemu = connect(&running).await;
    let refused = qemu.save_memory(stream).await.unwrap_err();
    assert!(matches!(refused, HypervisorError::State { found: RunState::Running, .. }), "{refused:?}");
    let refused = qemu.expect_saved_memory(stream).await.unwrap_err();
    assert!(matches!(refused, HypervisorError::State { .. }), "{refused:?}");
}
