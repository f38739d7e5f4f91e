//! Tests of the screen, drawn without a terminal.

use std::time::{Duration, Instant};

use api::Overview;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::{Value, json};

use super::state::{Keys, View};
use super::{Next, Top, draw};

const STARTED_MS: u64 = 1_795_573_340_000;

pub(crate) fn volume(name: &str, requests: f64) -> Value {
    json!({
        "name": name, "size_bytes": 4_u64 << 30, "allocated_bytes": 1_u64 << 30, "store": "fast", "host": null,
        "image": format!("/srv/fast/{name}.img"), "kind": "file", "format": "raw", "read_only": false, "state": "serving",
        "message": null, "creation": null, "migration": null, "connections": 1, "clients_elsewhere": 0, "errors": 0,
        "last_error": null,
        "activity": { "reads_per_second": requests, "writes_per_second": 0.0, "flushes_per_second": 0.0,
            "bytes_read_per_second": requests * 4096.0, "bytes_written_per_second": 0.0, "requests_in_flight": 1,
            "median_us": 140, "p99_us": 1630 },
    })
}

pub(crate) fn migration(id: &str, state: &str, phase: &str) -> Value {
    let place = |store: &str| json!({ "store": store, "image": format!("/srv/{store}/web1.img") });
    let ended = !matches!(state, "running" | "queued" | "paused");
    json!({
        "migration": {
            "id": id, "volume": "web1", "source": place("fast"), "target": place("large"), "keep_source": false,
            "state": state, "phase": phase, "fraction": if ended { 1.0 } else { 0.452 }, "bytes_copied": 700_u64 << 20,
            "bytes_mirrored": 0, "bytes_zero": 0, "bytes_moved": 700_u64 << 20, "bytes_missing": 800_u64 << 20,
            "bytes_per_second": 20e6, "seconds": 12.0, "remaining_seconds": { "earliest": 41.0, "latest": 50.0 },
            "attempt": 1, "waiting_for": null, "suspended": null, "switch_over": null, "failure": null, "message": null,
            "guest": "source", "started_unix_ms": STARTED_MS, "ended_unix_ms": ended.then_some(STARTED_MS + 12_000), "change": 7,
        },
        "samples": [{ "at_ms": 11_900.0, "length_ms": 100.0, "reads": 10, "writes": 0, "flushes": 0, "bytes_read": 0,
            "bytes_written": 0, "errors": 0, "median_us": 191, "p99_us": 812, "worst_us": 900, "bytes_copied": 0,
            "bytes_mirrored": 0, "bytes_zero": 0, "bytes_missing": 0 }],
        "recorded": true,
    })
}

/// Returns an overview `second` seconds after the daemon's start.
pub(crate) fn host(second: u64, volumes: &[Value], migrations: &[Value]) -> Overview {
    let ended = migrations.iter().filter(|told| told["migration"]["ended_unix_ms"].is_u64()).count();
    let told = json!({
        "taken_unix_ms": STARTED_MS + second * 1000, "name": "rack3-a",
        "host": { "version": "0.1.0", "pid": 1, "started_unix_ms": STARTED_MS, "data_dir": "/d", "runtime_dir": "/r",
            "engine": "auto", "volumes": volumes.len(), "migrations_running": 0 },
        "readiness": { "ready": true, "problems": [] },
        "peers": [{ "peer": { "name": "rack3-b", "id": "4a8b", "links": [], "connected": true, "since_ms": 1000 },
            "connections": [{ "connection": { "local": "10.0.0.1:7423", "remote": "10.0.0.2:7423", "up": true, "inbound": false,
                "since_ms": 1000, "bytes_sent": 0, "bytes_received": 0, "round_trip_us": 174, "packed_per_mille": 1000 },
                "bytes_sent_per_second": 2048.0, "bytes_received_per_second": null }] }],
        "stores": [{ "name": "fast", "path": "/srv/fast", "bytes_total": 100_u64 << 30, "bytes_free": 25_u64 << 30, "volumes": 2 }],
        "volumes": volumes, "vms": [], "standbys": [{ "name": "web1@rack9", "id": "5e1f", "role": "source", "host": "rack9",
            "store": "fast", "volumes": ["web1"], "state": "behind", "reason": "the link is slower than the guests write",
            "age_seconds": 95.0, "every_seconds": 10.0, "rpo_seconds": 60.0, "bytes_waiting": 1 << 20 }],
        "migrations": migrations, "migrations_ended": ended,
    });
    serde_json::from_value(told).unwrap()
}

fn drawn_at(top: &mut Top, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw::draw(frame, top, Instant::now())).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| row(y).trim_end().to_owned() + "\n").collect()
}

fn drawn(top: &mut Top) -> String {
    drawn_at(top, 80, 24)
}

fn press(top: &mut Top, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\u{1b}' => KeyCode::Esc,
            key => KeyCode::Char(key),
        };
        assert_eq!(top.press(KeyEvent::new(code, KeyModifiers::NONE)), Next::GoOn, "{key:?}");
    }
}

/// Returns the names in the first column of the table, from the top.
fn names(screen: &str) -> Vec<&str> {
    let rows = screen.lines().skip_while(|line| !line.starts_with("VOLUME")).skip(1);
    rows.filter_map(|line| line.split_whitespace().next()).take_while(|word| *word != "q").collect()
}

#[test]
fn an_ordinary_terminal_has_room_for_what_matters() {
    let mut top = Top::new();
    let mut moving = volume("web1", 840.0);
    moving["migration"] = "m6".into();
    let volumes = [volume("db-data", 250.0), moving];
    for second in 1..=3 {
        top.see(host(
            second,
            &volumes,
            &[migration("m6", "running", "copying"), migration("m5", "moved", "ended")],
        ));
    }
    insta::assert_snapshot!(drawn(&mut top));
}

#[test]
fn standbys_are_shown_with_their_age_and_what_holds_them_up() {
    let mut top = Top::new();
    top.see(host(1, &[volume("web1", 840.0)], &[]));
    press(&mut top, "3");
    let screen = drawn_at(&mut top, 140, 24);
    let shown = screen.lines().find(|line| line.starts_with("web1@rack9")).unwrap();
    for words in ["behind", "kept at rack9", "1 min 35 s", "1.0 MiB", "the link is slower"] {
        assert!(shown.contains(words), "{shown}");
    }
}

#[test]
fn every_view_fits_a_small_screen_a_large_one_and_one_that_is_too_small() {
    let mut top = Top::new();
    let many: Vec<_> = (0..200)
        .map(|index| volume(&format!("volume-{index:03}-{}", "x".repeat(40)), f64::from(index)))
        .collect();
    let moving: Vec<_> = (0..50).map(|index| migration(&format!("m{index}"), "running", "memory")).collect();
    top.see(host(1, &many, &moving));
    for view in View::ALL {
        for (width, height) in [(80, 24), (300, 100), (40, 10), (30, 8), (5, 2), (1, 1)] {
            let screen = drawn_at(&mut top, width, height);
            assert_eq!(screen.lines().count(), usize::from(height));
        }
        assert!(drawn(&mut top).contains(view.name()), "{view:?}");
        press(&mut top, "\t");
    }
    assert_eq!(top.view, View::Volumes);
    let screen = drawn_at(&mut top, 80, 24);
    assert!(screen.contains("50 migrations under way, 46 more"), "{screen}");
    // Scrolling stops at the end of the list.
    press(&mut top, "G");
    assert!(drawn(&mut top).contains("volume-199"), "{}", drawn(&mut top));
}

#[test]
fn vms_are_shown_with_their_state_and_the_places_of_their_disks() {
    let mut top = Top::new();
    let mut moving = volume("web1-0", 840.0);
    moving["migration"] = "m6".into();
    let mut seen = host(1, &[moving, volume("web1-1", 0.0)], &[]);
    let vm = |name: &str, state: &str, volumes: &[&str]| {
        let vm =
            json!({ "name": name, "state": state, "volumes": volumes, "monitor": "/m", "added_unix_ms": 1 });
        serde_json::from_value(vm).unwrap()
    };
    seen.vms = vec![vm("web1", "io_error", &["web1-0"]), vm("web2", "paused", &["web1-1", "gone"])];
    top.see(seen);
    press(&mut top, "2");
    let screen = drawn_at(&mut top, 120, 24);
    for (vm, state, disks) in [
        ("web1", "I/O error", "web1-0 (fast, moving)"),
        // The rest is cut off.
        ("web2", "paused", "web1-1 (fast), gone (not at"),
    ] {
        let row = screen.lines().find(|line| line.starts_with(vm)).unwrap_or_default();
        assert!(row.contains(state) && row.contains(disks), "{screen}");
    }
}

#[test]
fn volumes_are_sorted_and_filtered_by_keys() {
    let mut top = Top::new();
    top.see(host(1, &[volume("a", 10.0), volume("b", 30.0), volume("c", 20.0)], &[]));
    assert_eq!(names(&drawn(&mut top)), ["a", "b", "c"]);
    press(&mut top, "s");
    assert_eq!(names(&drawn(&mut top)), ["b", "c", "a"]);
    press(&mut top, "r");
    assert_eq!(names(&drawn(&mut top)), ["a", "c", "b"]);
    press(&mut top, "/C\n");
    assert_eq!(names(&drawn(&mut top)), ["c"]);
    // A letter in a filter is not a command.
    press(&mut top, "/q");
    assert!(drawn(&mut top).contains("no row contains that"));
    press(&mut top, "\u{1b}");
    assert_eq!((names(&drawn(&mut top)).len(), top.keys), (3, Keys::Commands));
    assert_eq!(top.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)), Next::Quit);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    press(&mut top, "/");
    assert_eq!(top.press(control_c), Next::Quit);
}

#[test]
fn a_daemon_that_is_away_is_said_and_what_was_told_before_stays() {
    let mut top = Top::new();
    assert!(drawn(&mut top).contains("waiting for the answer"));
    let since = Instant::now() - Duration::from_secs(5);
    top.lose("connection refused".to_owned(), since);
    assert!(drawn(&mut top).contains("the daemon does not answer, for 5.0 s"), "{}", drawn(&mut top));
    top.see(host(1, &[volume("a", 10.0)], &[]));
    assert!(!drawn(&mut top).contains("does not answer"));
    top.lose("connection refused".to_owned(), since);
    let screen = drawn(&mut top);
    assert!(screen.contains("does not answer") && names(&screen) == ["a"], "{screen}");
    // The last figures are not shown as present.
    assert!(screen.contains("requests -"), "{screen}");
}

#[test]
fn what_is_waited_for_is_said_when_it_has_lasted_from_one_look_to_the_next() {
    let mut waiting = migration("m6", "running", "copying");
    waiting["migration"]["waiting_for"] =
        json!({ "reason": "the target to answer", "remaining_ms": 299_000 });
    let mut top = Top::new();
    top.see(host(1, &[], &[waiting.clone()]));
    assert!(!drawn(&mut top).contains("waits for"), "{}", drawn(&mut top));
    top.see(host(2, &[], &[waiting]));
    assert!(drawn(&mut top).contains("waits for the target to answer"), "{}", drawn(&mut top));
}

#[test]
fn help_is_over_everything_and_any_key_closes_it() {
    let mut top = Top::new();
    top.see(host(1, &[], &[]));
    press(&mut top, "?");
    assert!(drawn(&mut top).contains("show only rows"));
    press(&mut top, "x");
    assert!(!drawn(&mut top).contains("show only rows"));
}

#[test]
fn texts_of_others_do_not_move_the_cursor() {
    let mut top = Top::new();
    let mut failed = volume("a", 0.0);
    failed["state"] = "failed".into();
    failed["message"] = "\u{1b}[2J\u{1b}]0;title\u{7}<img src=x>".into();
    top.see(host(1, &[failed], &[]));
    let screen = drawn_at(&mut top, 200, 24);
    assert!(
        screen.contains("<img src=x>") && !screen.contains('\u{1b}') && !screen.contains('\u{7}'),
        "{screen}"
    );
}
