//! Tests the client against monitors that keep the protocol, stretch it, and break it.

use super::exchange::EVENTS_KEPT;
use super::*;
use crate::qemu::Qemu;
use crate::qemu::error::ErrorClass;
use crate::qemu::fake_monitor::{FakeMonitor, GREETING, Reply};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

async fn ask(qmp: &Qmp, command: &str) -> Result<Value, QmpError> {
    qmp.execute(command, json!({}), LONG).await
}

#[tokio::test]
async fn answers_come_to_those_that_asked_and_refusals_keep_their_class() {
    let monitor = FakeMonitor::start(|command, arguments| match command {
        "double" => vec![
            Reply::Event("NEW_IN_QEMU_99", json!(null)),
            Reply::Return(json!(arguments["of"].as_u64().unwrap() * 2)),
        ],
        _ => vec![Reply::Refuse("CommandNotFound", "no such command")],
    });
    let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
    assert_eq!((qmp.version().major, qmp.version().minor), (7, 2));
    let twice = |number: u64| qmp.execute("double", json!({ "of": number }), LONG);
    let (one, two, three) = tokio::join!(twice(1), twice(2), twice(3));
    assert_eq!([one.unwrap(), two.unwrap(), three.unwrap()], [json!(2), json!(4), json!(6)]);
    let refused = ask(&qmp, "brew").await.unwrap_err();
    assert!(matches!(&refused, QmpError::Refused { class: ErrorClass::CommandNotFound, .. }), "{refused:?}");
    assert_eq!(refused.to_string(), "QEMU refuses brew: no such command");
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_nobodys() {
    let mut late = None;
    let monitor = FakeMonitor::start(move |command, _| match command {
        "slow" => {
            late = Some(());
            vec![]
        }
        // The answer to the slow command first, which had identity 2.
        _ => vec![
            Reply::Raw(b"{\"return\": \"late\", \"id\": 2}\n".to_vec()),
            Reply::Return(json!(late.is_some())),
        ],
    });
    let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
    let silent = qmp.execute("slow", json!({}), SHORT).await.unwrap_err();
    assert!(matches!(silent, QmpError::Silent { .. }), "{silent:?}");
    assert!(qmp.exchange.shared.waiting().is_empty());
    assert_eq!(ask(&qmp, "fast").await.unwrap(), json!(true));
}

#[tokio::test]
async fn when_the_monitor_goes_everybody_who_waits_is_told_and_nobody_waits_after_it() {
    let monitor = FakeMonitor::start(|command, _| match command {
        "end" => vec![Reply::Event("SHUTDOWN", json!({})), Reply::Close],
        _ => vec![],
    });
    let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
    let mut events = qmp.events();
    let (waiting, ending) = tokio::join!(ask(&qmp, "wait"), ask(&qmp, "end"));
    for answer in [waiting, ending, ask(&qmp, "more").await] {
        assert!(matches!(answer, Err(QmpError::Gone { .. })), "{answer:?}");
    }
    assert_eq!(qmp.closed().await, "the connection was closed");
    assert!(matches!(events.next().await, Heard::Event(Event { name, .. }) if name == "SHUTDOWN"));
    assert_eq!(events.next().await, Heard::Gone);
    assert_eq!(events.next().await, Heard::Gone);
}

#[tokio::test]
async fn a_listener_that_is_too_slow_is_told_what_it_missed() {
    let monitor = FakeMonitor::start(|_, _| {
        let mut replies = vec![Reply::Event("TICK", json!({})); EVENTS_KEPT + 7];
        replies.push(Reply::Return(json!({})));
        replies
    });
    let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
    let mut events = qmp.events();
    ask(&qmp, "tick").await.unwrap();
    assert_eq!(events.next().await, Heard::Missed(7));
    assert!(matches!(events.next().await, Heard::Event(_)));
}

#[tokio::test]
async fn garbage_and_endless_lines_end_the_connection() {
    for (garbage, expected) in [
        (b"hello\n".to_vec(), "no object of the protocol"),
        (vec![b' '; reader::LINE_BYTES_MAX + 1], "longer than"),
    ] {
        let monitor = FakeMonitor::start(move |_, _| vec![Reply::Raw(garbage.clone())]);
        let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
        let gone = ask(&qmp, "x").await.unwrap_err().to_string();
        assert!(gone.contains(expected), "{gone}");
    }
}

#[tokio::test]
async fn what_is_no_monitor_is_refused() {
    for greeting in ["hello", "{}", r#"{"QMP": 7}"#] {
        let monitor = FakeMonitor::start_with(greeting, |_, _| vec![]);
        let refused = Qmp::connect(&monitor.socket()).await.unwrap_err();
        assert!(matches!(refused, QmpError::NotAMonitor { .. }), "{refused:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let nobody = Qmp::connect(&folder.path().join("qmp")).await.unwrap_err();
    assert!(matches!(nobody, QmpError::Connect { .. }), "{nobody:?}");
    let monitor = FakeMonitor::start_with(GREETING, |_, _| vec![Reply::Refuse("GenericError", "no")]);
    let refused = Qmp::connect(&monitor.socket()).await.unwrap_err();
    assert!(matches!(refused, QmpError::Refused { .. }), "{refused:?}");
}

#[tokio::test]
async fn a_connection_that_is_closed_before_the_greeting_is_made_again_while_qemu_starts() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let closing = tokio::spawn(async move {
        for _ in 0..2 {
            drop(listener.accept().await.unwrap());
        }
    });
    let refused = Qmp::connect(&socket).await.unwrap_err();
    assert!(matches!(refused, QmpError::HungUp { .. }), "{refused:?}");
    let monitor = FakeMonitor::start(|_, _| vec![]);
    let started = async {
        closing.await.unwrap();
        std::fs::rename(monitor.socket(), &socket).unwrap();
    };
    let (connected, ()) = tokio::join!(Qemu::connect_within(&socket, Duration::from_secs(60)), started);
    assert!(connected.is_ok(), "{connected:?}");
    // Nothing listens on a socket that is closed for good.
    let refused = Qemu::connect_within(&folder.path().join("none"), SHORT).await.unwrap_err();
    assert!(refused.nobody_listens(), "{refused:?}");
}

#[tokio::test]
async fn a_monitor_that_serves_somebody_else_is_named_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    // The kernel accepts the connection, but no greeting comes.
    let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let busy = Qmp::connect_within(&socket, SHORT).await.unwrap_err();
    assert!(matches!(busy, QmpError::NoGreeting { .. }), "{busy:?}");
    assert!(busy.to_string().contains("libvirt"));
}

#[tokio::test]
async fn a_dropped_client_lets_the_monitor_go() {
    let mut monitor = FakeMonitor::start(|_, _| vec![Reply::Return(json!({}))]);
    let qmp = Qmp::connect(&monitor.socket()).await.unwrap();
    assert_eq!(monitor.heard().await.0, "qmp_capabilities");
    let mut events = qmp.events();
    drop(qmp);
    assert_eq!(events.next().await, Heard::Gone);
}
