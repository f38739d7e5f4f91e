//! Tests a lying monitor: a user who has a QEMU adopted may point Sterna at their own program. Whatever it sends, each query
//! ends, with an error or an answer that fits no movable VM; no code panics, and no memory grows without limit.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fake_monitor::{FakeMonitor, GREETING, Reply};
use super::{Heard, Look, Qemu};
use crate::{Hypervisor as _, HypervisorError, MigrationStatus};

const SOON: Duration = Duration::from_secs(10);
const QUESTIONS: [&str; 9] = [
    "query-status",
    "qom-list",
    "qom-get",
    "query-block",
    "query-named-block-nodes",
    "x-debug-query-block-graph",
    "query-block-jobs",
    "query-jobs",
    "query-block-exports",
];

fn honest(command: &str, arguments: &Value) -> Value {
    match command {
        "query-status" => json!({ "status": "running", "running": true }),
        "qom-list" if arguments["path"] == "/machine/peripheral" => {
            json!([{ "name": "type", "type": "string" }, { "name": "vdb", "type": "child<virtio-blk-pci>" }])
        }
        "qom-get" => json!("S1"),
        "query-block" => json!([{
            "device": "", "qdev": "/machine/peripheral/vdb/virtio-backend",
            "inserted": {
                "node-name": "root", "drv": "nbd", "file": "nbd+unix:///v?socket=/run/v.sock",
                "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
            },
        }]),
        "query-named-block-nodes" => {
            json!([{ "node-name": "root", "drv": "nbd", "file": "nbd+unix:///v?socket=/run/v.sock" }])
        }
        "x-debug-query-block-graph" => {
            json!({ "nodes": [{ "id": 1, "name": "root", "type": "block-driver" }], "edges": [] })
        }
        _ => json!([]),
    }
}

async fn look(socket: &std::path::Path) -> Result<Look, HypervisorError> {
    let qemu = Qemu::connect(socket).await?;
    let settings = [("vdb".to_owned(), "serial".to_owned())];
    let began = Instant::now();
    let looked = qemu.look(&settings).await;
    assert!(began.elapsed() < SOON);
    looked
}

fn lying(about: &'static str, lie: Vec<Reply>) -> FakeMonitor {
    FakeMonitor::start(move |command, arguments| match command == about {
        true => lie.clone(),
        false => vec![Reply::Return(honest(command, arguments))],
    })
}

#[tokio::test]
async fn an_honest_monitor_is_understood() {
    let monitor = FakeMonitor::start(|command, arguments| vec![Reply::Return(honest(command, arguments))]);
    let look = look(&monitor.socket()).await.unwrap();
    assert_eq!((look.devices.len(), look.drives.len(), look.works.len()), (1, 1, 0));
    assert_eq!(look.devices[0].settings["serial"], "S1");
    assert!(!look.drives[0].is_limited && look.drives[0].leaves.len() == 1);
}

#[tokio::test]
async fn answers_of_other_types_are_errors_or_another_vm() {
    let honest_look = {
        let monitor =
            FakeMonitor::start(|command, arguments| vec![Reply::Return(honest(command, arguments))]);
        look(&monitor.socket()).await.unwrap()
    };
    let lies = [
        json!(null),
        json!(7),
        json!("\u{1b}[2J"),
        json!({}),
        json!([7]),
        json!([{}]),
        json!([null, [], {"node-name": {}, "inserted": []}]),
        json!({"nodes": 1, "edges": {}}),
        json!({"nodes": [{"id": -1, "name": 3, "type": "block-driver"}], "edges": [{"parent": "x", "child": 1e99}]}),
        json!({"nodes": [{"id": 1, "name": "root", "type": "block-driver"}], "edges": [{"parent": 1, "child": 1}]}),
        json!(vec![json!({"id": "j", "type": "mirror", "status": "running", "device": "d"}); 5000]),
    ];
    for about in QUESTIONS {
        for lie in &lies {
            let monitor = lying(about, vec![Reply::Return(lie.clone())]);
            let looked = look(&monitor.socket()).await;
            // A setting that is not reported is no difference; otherwise the VM differs from the honest one.
            assert!(about == "qom-get" || looked.as_ref().ok() != Some(&honest_look), "{about}: {lie:.80}");
        }
    }
}

#[tokio::test]
async fn bytes_without_end_and_depths_end_the_connection() {
    let deep = format!("{{\"return\": {}{}, \"id\": 2}}\n", "[".repeat(100_000), "]".repeat(100_000));
    for raw in [vec![b'x'; 9 << 20], deep.into_bytes(), b"{\"return\"\n".to_vec(), vec![0xff, b'\n']] {
        let monitor = lying("query-block", vec![Reply::Raw(raw)]);
        let error = look(&monitor.socket()).await.unwrap_err();
        assert!(error.is_gone(), "{error}");
    }
}

#[tokio::test]
async fn answers_to_nobody_twice_and_out_of_order_mislead_nobody() {
    let status = json!({ "status": "shutdown", "running": false });
    let stray = move |id: u64| Reply::Raw(format!("{{\"return\": {status}, \"id\": {id}}}\n").into_bytes());
    let monitor = FakeMonitor::start(move |command, arguments| {
        // Before the true answer come some to commands that were not sent yet, or are answered already.
        let mut replies: Vec<_> = [0, 1, 999, u64::MAX].map(&stray).into();
        replies.push(Reply::Return(honest(command, arguments)));
        replies.push(stray(1));
        replies
    });
    let look = look(&monitor.socket()).await.unwrap();
    assert_eq!(look.state, crate::RunState::Running);
}

#[tokio::test]
async fn forged_events_say_nothing_that_is_not_asked_after() {
    let monitor = FakeMonitor::start(|command, arguments| {
        let mut replies = vec![
            Reply::Event("MIGRATION", json!({ "status": "\u{1b}]0;completed\u{7}" })),
            Reply::Event("MIGRATION", json!(["completed"])),
            Reply::Event("STOP", json!(7)),
            Reply::Event("\u{1b}[31mSHUTDOWN", json!({ "guest": "yes" })),
        ];
        replies.push(Reply::Return(match command {
            "query-migrate" => json!({ "status": "active", "ram": "all" }),
            _ => honest(command, arguments),
        }));
        replies
    });
    let qemu = Qemu::connect(&monitor.socket()).await.unwrap();
    let completed = qemu.await_status(&[MigrationStatus::Completed], Duration::from_millis(300)).await;
    assert!(matches!(completed, Err(HypervisorError::Deadline { .. })), "{completed:?}");
    assert_eq!(qemu.run_state().await.unwrap(), crate::RunState::Running);
}

#[tokio::test]
async fn a_flood_of_events_is_lost_to_who_is_too_slow_and_answers_still_come() {
    let monitor = FakeMonitor::start(|command, arguments| {
        let mut replies = vec![Reply::Event("NOISE", json!({ "x": "y".repeat(1000) })); 5000];
        replies.push(Reply::Return(honest(command, arguments)));
        replies
    });
    let qemu = Qemu::connect(&monitor.socket()).await.unwrap();
    let mut events = qemu.events();
    qemu.look(&[]).await.unwrap();
    assert!(matches!(events.next().await, Heard::Missed(_)));
}

#[tokio::test]
async fn a_greeting_that_is_none_or_never_ends_is_refused() {
    let endless: &'static str = Box::leak("x".repeat(9 << 20).into_boxed_str());
    for greeting in
        ["", "{}", "[]", "{\"QMP\": {\"version\": {\"qemu\": {\"major\": \"\\u001b\"}}}}", endless]
    {
        let monitor = FakeMonitor::start_with(greeting, |_, _| vec![Reply::Close]);
        assert!(Qemu::connect(&monitor.socket()).await.is_err(), "{greeting:.40}");
    }
    // It greets, and hangs up at the first command.
    let monitor = FakeMonitor::start_with(GREETING, |_, _| vec![Reply::Close]);
    assert!(Qemu::connect(&monitor.socket()).await.is_err());
}
