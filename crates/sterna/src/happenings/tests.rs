//! Tests of the events between overviews.

use api::Overview;
use serde_json::Value;

use super::*;
use crate::top::tests::{host, migration, volume};

/// Returns the events of each overview, without their times.
fn told(looks: impl IntoIterator<Item = Overview>) -> Vec<String> {
    let mut seen = Seen::default();
    let happened = looks.into_iter().flat_map(|look| seen.look(look)).collect::<Vec<_>>();
    happened.iter().map(|happening| happening.line()[22..].to_owned()).collect()
}

fn of(told: &Value) -> Migration {
    serde_json::from_value(told["migration"].clone()).unwrap()
}

#[test]
fn volumes_come_and_go_and_change_their_state() {
    let mut failed = volume("b", 0.0);
    failed["state"] = "failed".into();
    failed["message"] = "its image is gone".into();
    let lines = told([
        host(1, &[volume("a", 1.0)], &[]),
        // A changed load of a guest is no event.
        host(2, &[volume("a", 900.0), volume("b", 1.0)], &[]),
        host(3, &[failed], &[]),
    ]);
    assert_eq!(
        lines,
        [
            "daemon rack3-a: version 0.1.0 has 1 volume, 0 VMs, 1 store, 1 other host, 0 migrations under way",
            "volume b: serving in fast, 4.0 GiB",
            "volume b: failed in fast, 4.0 GiB: its image is gone",
            "volume a: it is gone",
        ]
    );
}

#[test]
fn the_state_of_a_standby_is_told_and_not_its_age() {
    let older = |second: u64, state: &str| {
        let mut overview = host(second, &[], &[]);
        overview.standbys[0].age_seconds = Some(second as f64);
        overview.standbys[0].state = serde_json::from_value(state.into()).unwrap();
        overview
    };
    let lines = told([older(1, "current"), older(2, "current"), older(3, "behind")]);
    assert_eq!(lines[1..], ["standby web1@rack9: behind, for web1"]);
}

#[test]
fn a_migration_is_told_from_its_beginning_to_its_end_once() {
    let lines = told([
        host(1, &[], &[migration("m1", "moved", "ended")]),
        host(2, &[], &[migration("m1", "moved", "ended"), migration("m2", "running", "copying")]),
        host(3, &[], &[migration("m1", "moved", "ended"), migration("m2", "running", "closing")]),
        host(4, &[], &[migration("m1", "moved", "ended"), migration("m2", "moved", "ended")]),
        host(5, &[], &[migration("m1", "moved", "ended"), migration("m2", "moved", "ended")]),
    ]);
    assert_eq!(
        lines[1..],
        [
            "migration m2: web1 moves from fast to large",
            "migration m2: copying, 45.2 %",
            "migration m2: closing, 45.2 %",
            "migration m2: moved in 12 s, 700.0 MiB moved",
        ]
    );
}

#[test]
fn one_that_has_begun_and_ended_between_two_looks_is_told_whole() {
    let lines = told([host(1, &[], &[]), host(2, &[], &[migration("m3", "failed", "ended")])]);
    assert_eq!(
        lines[1..],
        ["migration m3: web1 moves from fast to large", "migration m3: failed in 12 s, 700.0 MiB moved"]
    );
}

#[test]
fn what_is_under_way_at_first_is_told_and_what_ended_before_is_not() {
    let lines =
        told([host(1, &[], &[migration("m0", "moved", "ended"), migration("m1", "paused", "copying")])]);
    assert_eq!(lines[1..], ["migration m1: web1 moves from fast to large, paused, 45.2 %"]);
}

#[test]
fn news_of_one_migration_and_looks_tell_the_same_once_whatever_comes_first() {
    let mut seen = Seen::default();
    seen.look(host(1, &[], &[migration("m1", "running", "copying")]));
    let mut closing = of(&migration("m1", "running", "closing"));
    closing.change = 9;
    assert_eq!(seen.news_of(&closing).len(), 1);
    // This overview is older.
    assert_eq!(seen.look(host(2, &[], &[migration("m1", "running", "copying")])), []);
    let ended = of(&migration("m1", "moved", "ended"));
    assert_eq!(seen.news_of(&Migration { change: 12, ..ended }).len(), 1);
    assert_eq!(seen.look(host(3, &[], &[migration("m1", "moved", "ended")])), []);
    assert_eq!(seen.under_way(), []);
}

#[test]
fn a_daemon_that_goes_away_is_told_once_and_a_restart_loses_nothing() {
    let mut seen = Seen::default();
    seen.look(host(1, &[volume("a", 1.0)], &[migration("m1", "running", "copying")]));
    assert_eq!(seen.lose("connection refused").len(), 1);
    assert_eq!(seen.lose("connection refused"), []);
    let mut restarted = host(9, &[], &[migration("m1", "failed", "ended")]);
    restarted.host.started_unix_ms += 5000;
    let events: Vec<Event> = seen.look(restarted).iter().map(|happening| happening.event).collect();
    assert_eq!(events, [Event::Back, Event::Ended, Event::Removed]);
}

#[test]
fn a_line_is_a_line_whatever_is_in_it() {
    let mut failed = volume("a", 1.0);
    failed["message"] = "one\ntwo\u{1b}[2J".into();
    let mut seen = Seen::default();
    seen.look(host(1, &[volume("a", 1.0)], &[]));
    let line = seen.look(host(2, &[failed], &[]))[0].line();
    assert!(
        line.starts_with("2026-11-25T02:22:22Z  volume a: ") && !line.contains(['\n', '\u{1b}']),
        "{line}"
    );
}
