//! Tests of the page's text, and that foreign texts cannot become markup.

use api::{
    Decisions, GuestFigures, GuestLocation, HistorySample, ImageFormat, ImageKind, ImageLocation, Migration,
    MigrationHistory, MigrationState, Phase, PhaseEntered, Recording, Suspension, SwitchOver, Waited,
};

use super::page;

fn migration() -> Migration {
    let image = |store: &str| ImageLocation {
        store: Some(store.to_owned()),
        image: format!("/srv/{store}/web1.raw"),
        kind: ImageKind::File,
        format: ImageFormat::Raw,
    };
    Migration {
        id: "m7".to_owned(),
        name: "web1".to_owned(),
        volume: "web1".to_owned(),
        source: image("fast"),
        target: image("large"),
        keep_source: false,
        strategy: None,
        strategy_reason: String::new(),
        mirrored_instead: false,
        rounds: Vec::new(),
        state: MigrationState::Moved,
        phase: Phase::Ended,
        fraction: 1.0,
        bytes_copied: 412 << 20,
        bytes_mirrored: 17 << 20,
        bytes_zero: 20 << 20,
        bytes_cloned: 0,
        bytes_moved: 429 << 20,
        bytes_missing: Some(0),
        bytes_per_second: 0.0,
        seconds: 2.0,
        remaining_seconds: None,
        attempt: 2,
        waiting_for: None,
        suspended: None,
        pace: None,
        limited_by: None,
        deadline: None,
        forecast: None,
        ticket: None,
        queue: None,
        shared: false,
        replica: None,
        retry_of: None,
        retried_as: None,
        goes_on: false,
        machine: None,
        switch_over: Some(SwitchOver {
            gate_closed_ms: 1.003,
            drain_ms: 0.004,
            prepare_ms: 0.515,
            release_ms: 0.181,
            own_ms: 0.147,
            start_ms: 0.156,
        }),
        failure: None,
        message: None,
        guest: GuestLocation::Target,
        started_unix_ms: 1_795_304_940_000,
        ended_unix_ms: Some(1_795_304_942_000),
        change: 9,
    }
}

fn sample(at_ms: f64, requests: u64, copied: u64) -> HistorySample {
    HistorySample {
        at_ms,
        length_ms: 100.0,
        reads: requests / 2,
        writes: requests - requests / 2,
        flushes: 0,
        bytes_read: requests * 4096,
        bytes_written: requests * 4096,
        errors: 0,
        median_us: (requests > 0).then_some(180),
        p99_us: (requests > 0).then_some(900),
        worst_us: (requests > 0).then_some(2500),
        bytes_copied: copied,
        bytes_mirrored: copied / 20,
        bytes_zero: 0,
        bytes_missing: None,
    }
}

fn figures(seconds: f64, iops: f64) -> GuestFigures {
    GuestFigures {
        seconds,
        iops,
        bytes_per_second: iops * 8192.0,
        median_us: Some(180),
        p99_us: Some(900),
        worst_us: Some(2500),
        errors: 0,
    }
}

fn recording() -> Recording {
    let before = (-20..0).map(|index| sample(f64::from(index) * 100.0, 800, 0));
    let during = (0..20).map(|index| sample(f64::from(index) * 100.0, 600, 20 << 20));
    let after = (20..40).map(|index| sample(f64::from(index) * 100.0, 810, 0));
    let entered = |at_ms, phase| PhaseEntered { at_ms, phase };
    Recording {
        size_bytes: 512 << 20,
        strategy: "mirror".to_owned(),
        rounds: Vec::new(),
        bandwidth_bytes_per_second: Some(200 << 20),
        mirror_wait_max_ms: 1000.0,
        ended_ms: Some(2000.0),
        samples: before.chain(during).chain(after).collect(),
        phases: vec![
            entered(0.0, Phase::Copying),
            entered(900.0, Phase::Closing),
            entered(900.5, Phase::Copying),
            entered(1950.0, Phase::Closing),
            entered(1950.1, Phase::Preparing),
            entered(1950.6, Phase::Releasing),
            entered(1950.8, Phase::Committing),
            entered(1951.0, Phase::Retiring),
            entered(2000.0, Phase::Ended),
        ],
        suspensions: vec![Suspension {
            at_ms: 300.0,
            ended_ms: Some(400.0),
            reason: "the target's store answered with an error".to_owned(),
        }],
        waits: vec![Waited { reason: "the bandwidth limit".to_owned(), total_ms: 700.0 }],
        decisions: Decisions {
            writes_mirrored: 4000,
            writes_in_part: 100,
            writes_source_only: 1900,
            writes_held: 12,
            held_longest_ms: 3.4,
            writes_answered_late: 2,
            chunks_copied: 840,
            chunks_copied_again: 31,
            target_flushes: 3,
            target_faults: 1,
            source_faults: 0,
            suspensions: 1,
            rounds_given_up: 0,
            bytes_followed: 0,
            bytes_pulled: 0,
        },
        before: Some(figures(2.0, 8000.0)),
        during: Some(figures(2.0, 6000.0)),
        after: Some(figures(2.0, 8100.0)),
    }
}

/// Returns the text of a page without styles and scripts, with one line for each row, paragraph or word of a plot.
fn text(page: &str) -> String {
    let body = page.split("<main>").nth(1).unwrap().split("</main>").next().unwrap();
    let mut text = String::new();
    for piece in body.split('<').skip(1) {
        let (tag, content) = piece.split_once('>').unwrap();
        let ends_line = ["/tr", "/p", "/h1", "/h2", "/li", "/figcaption", "/dd", "/dt", "/div", "/svg"];
        if ends_line.contains(&tag) && !text.ends_with('\n') {
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        // The tests of scales cover the values at the axes.
        let is_shown = !tag.starts_with("text") && !tag.starts_with("title");
        if is_shown && !content.trim().is_empty() {
            text.push_str(content.trim());
            text.push(' ');
        }
    }
    text
}

fn history(migration: Migration, recording: Option<Recording>) -> MigrationHistory {
    MigrationHistory { migration, recording }
}

#[test]
fn a_page_tells_the_whole_story() {
    let page = page(&history(migration(), Some(recording())));
    insta::assert_snapshot!(text(&page));
}

#[test]
fn a_page_without_a_recording_tells_what_the_journal_knows() {
    let failed = Migration {
        state: MigrationState::Failed,
        guest: GuestLocation::Source,
        switch_over: None,
        failure: Some("daemon-stopped".to_owned()),
        message: Some("the daemon stopped while it was under way".to_owned()),
        ..migration()
    };
    let page = page(&history(failed, None));
    insta::assert_snapshot!(text(&page));
}

#[test]
fn a_machine_that_went_along_is_told_of_with_parts_that_add_up() {
    let mut history = history(migration(), Some(recording()));
    history.migration.machine = Some(api::MachineMove {
        memory: Some(api::MemoryMove {
            total_bytes: 256 << 20,
            remaining_bytes: 0,
            sent_bytes: 96 << 20,
            rounds: 3,
            dirty_bytes_per_second: 0,
            bytes_per_second: 0,
            throttle_percent: 25,
            streams: 4,
            post_copy: false,
        }),
        downtime: Some(api::MachineDowntime { total_ms: 42.504, memory_ms: 37.5, handover_ms: 5.004 }),
    });
    let page = page(&history);
    for part in
        ["42.50 ms", "37.50 ms", "1.00 ms", "4.00 ms", "96.0 MiB", "in 3 rounds", "slowed down by 25 %"]
    {
        assert!(page.contains(part), "{part}");
    }
    history.migration.machine = None;
    assert!(!self::page(&history).contains("<h2>The VM</h2>"));
}

#[test]
fn hostile_names_stay_text() {
    let hostile = "</script><script>alert(1)</script><img src=x onerror='alert(2)' \"quoted\" &amp;";
    let location = ImageLocation {
        store: Some(hostile.to_owned()),
        image: hostile.to_owned(),
        kind: ImageKind::File,
        format: ImageFormat::Raw,
    };
    let mut migration = Migration {
        id: hostile.to_owned(),
        volume: hostile.to_owned(),
        source: location.clone(),
        target: location,
        failure: Some(hostile.to_owned()),
        message: Some(hostile.to_owned()),
        suspended: Some(hostile.to_owned()),
        ..migration()
    };
    let mut recording = recording();
    recording.strategy = hostile.to_owned();
    recording.suspensions[0].reason = hostile.to_owned();
    recording.waits[0].reason = hostile.to_owned();
    for state in
        [MigrationState::Queued, MigrationState::Moved, MigrationState::Running, MigrationState::Failed]
    {
        migration.state = state;
        for recording in [None, Some(recording.clone())] {
            let page = page(&history(migration.clone(), recording));
            // There are only the page's own two scripts.
            assert_eq!(page.matches("<script").count(), 2, "{page}");
            assert_eq!(page.matches("</script").count(), 2);
            assert!(!page.contains("<img") && !page.contains("onerror='") && !page.contains("\"quoted\""));
        }
    }
}

#[test]
fn a_page_asks_nobody_for_anything() {
    let page = page(&history(migration(), Some(recording())));
    for word in ["http:", "https:", "//", "url(", "@import", "<link", "<iframe", "src=", "href="] {
        // A line of the script may begin with two slashes: it is a comment.
        let found = page.lines().filter(|line| line.contains(word) && !line.trim_start().starts_with("// "));
        assert_eq!(found.count(), 0, "{word}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn figures_that_cannot_be_are_never_shown() {
    let mut states = Vec::new();
    for state in [
        MigrationState::Running,
        MigrationState::Moved,
        MigrationState::Failed,
        MigrationState::Cancelled,
        MigrationState::HandedBack,
    ] {
        let migration = Migration { state, seconds: 0.0, switch_over: None, ..migration() };
        states.push(history(migration.clone(), None));
        let whole = recording();
        let samples =
            [Vec::new(), vec![sample(0.0, 0, 0)], vec![sample(-100.0, 5, 0)], whole.samples.clone()];
        for samples in samples {
            let recording =
                Recording { samples, ended_ms: None, before: None, phases: Vec::new(), ..whole.clone() };
            states.push(history(migration.clone(), Some(recording)));
        }
        let mut odd = whole.clone();
        odd.samples.iter_mut().for_each(|sample| sample.length_ms = 0.0);
        odd.size_bytes = 0;
        states.push(history(migration, Some(odd)));
    }
    for history in &states {
        let page = page(history);
        let text = text(&page);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(!page.contains("NaN") && !page.contains("=\"inf"), "{history:?}");
    }
}
