//! Text output of a dry run.

use api::{Expected, Forecast, MigrationPlan, PlannedVolume};

use super::{dash, lines, place, properties, table, turn};
use console::units::{bytes, duration};

/// Returns the effects of a migration, and its obstacles.
pub(crate) fn plan(plan: &MigrationPlan) -> String {
    let mut table = table(&["VOLUME", "SIZE", "HOLDS", "FROM", "TO", "FREE THERE"], &[1, 2, 5]);
    for volume in &plan.volumes {
        table.add_row([
            volume.name.clone(),
            bytes(volume.size_bytes),
            bytes(volume.held_bytes),
            place(&volume.source),
            target(volume),
            volume.free_bytes.map_or_else(dash, bytes),
        ]);
    }
    let mut text = lines(&table) + &properties(&rows(plan));
    let first = match (plan.can_begin, plan.host.as_deref()) {
        (true, None) => format!("{} would move; nothing was begun\n", plan.name),
        (true, Some(host)) => format!("{} would move to {host}; nothing was begun\n", plan.name),
        (false, _) => format!("{} would not move:\n", plan.name),
    };
    text += &first;
    plan.refusals.iter().for_each(|refusal| text += &format!("  refused: {}\n", refusal.message));
    plan.warnings.iter().for_each(|warning| text += &format!("  N.B. {warning}\n"));
    text
}

fn rows(plan: &MigrationPlan) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if let Some(machine) = &plan.machine {
        let state = if machine.stopped { " (stopped, and stays so)" } else { "" };
        rows.push(("vm", format!("{}{state}", machine.name)));
        if !machine.stopped {
            rows.push(("memory", machine.memory_bytes.map_or_else(dash, bytes)));
        }
        if let Some(most) = machine.max_downtime_ms {
            let least = machine.least_downtime_ms;
            let least = least.map(|least| format!(" (the distance alone takes {least:.1} ms)"));
            rows.push(("VM pauses", format!("{most} ms at most{}", least.unwrap_or_default())));
        }
    }
    let copied = format!("at most {}, and what guests write meanwhile", bytes(plan.bytes_max));
    rows.push(("copied", copied));
    rows.extend(plan.volumes.iter().filter_map(way));
    for link in &plan.links {
        let round_trip = link.round_trip_us.map(|us| format!(", {:.1} ms round trip", us as f64 / 1000.0));
        let speed = link.bytes_per_second.map(|speed| format!(", carried {}/s", bytes(speed)));
        let ends = format!("{} to {}", link.local, link.remote);
        rows.push(("link", ends + &round_trip.unwrap_or_default() + &speed.unwrap_or_default()));
    }
    if let (Some(rate), Some(origin)) = (plan.bytes_per_second, plan.rate) {
        rows.push(("rate", format!("{}/s ({})", bytes(rate), origin.name())));
    }
    if plan.strategy != api::Strategy::Auto {
        rows.push(("strategy", plan.strategy.name().to_owned()));
    }
    rows.extend(chosen(&plan.strategy_reason));
    rows.extend(plan.forecast.iter().flat_map(expected));
    rows.extend(plan.queue.as_ref().map(|queue| ("would wait", turn(queue))));
    rows
}

/// Returns how a volume would get to another store of its host; `None`: it goes to another host, or stays.
fn way(volume: &PlannedVolume) -> Option<(&'static str, String)> {
    let PlannedVolume { name, cloned, copied_because, .. } = volume;
    match (cloned, copied_because) {
        (true, _) => Some((
            "way",
            format!("{name} is cloned: both images share their blocks, and none is read or written"),
        )),
        (false, Some(why)) => Some(("way", format!("{name} is copied, because {why}"))),
        (false, None) => None,
    }
}

/// Returns why the daemon chose the strategy; `None`: it was ordered.
pub(crate) fn chosen(reason: &str) -> Option<(&'static str, String)> {
    (!reason.is_empty()).then(|| ("chosen", format!("because {reason}")))
}

/// Returns a forecast as lines: what to expect, and how sure that is.
fn expected(forecast: &Forecast) -> Vec<(&'static str, String)> {
    let whole = |figure: f64| bytes(figure as u64);
    let origin = match (forecast.learned_from, forecast.probed) {
        (0, true) => "nothing has gone this way yet: its disks were probed for a moment".to_owned(),
        (0, false) => "nothing has gone this way yet".to_owned(),
        (1, _) => "learned from one migration of this way".to_owned(),
        (count, _) => format!("learned from {count} migrations of this way"),
    };
    let mut rows = vec![
        ("time", format!("{}; {origin}", time(forecast))),
        ("sends", between(&forecast.bytes, whole)),
        ("guests held", between(&forecast.downtime_ms, |ms| format!("{ms:.0} ms"))),
    ];
    if forecast.ends_percent < 100 {
        rows.push(("ends by itself", format!("{} of 100 times", forecast.ends_percent)));
    }
    rows
}

/// Returns the expected duration.
pub(crate) fn time(forecast: &Forecast) -> String {
    between(&forecast.seconds, duration)
}

fn between(expected: &Expected, written: impl Fn(f64) -> String) -> String {
    let (least, middle, most) = (written(expected.least), written(expected.middle), written(expected.most));
    if least == most { middle } else { format!("about {middle} ({least} to {most})") }
}

fn target(volume: &PlannedVolume) -> String {
    let Some(target) = &volume.target else { return dash() };
    let begun = if volume.replica { " (begins with a kept image)" } else { "" };
    let way = if volume.shared { ", written straight there" } else { "" };
    format!("{} {} ({}){begun}{way}", place(target), target.image, target.format.name())
}

#[cfg(test)]
mod tests {
    use api::{ErrorCode, ErrorDetail, ImageFormat, ImageKind, ImageLocation, PlannedMachine};

    use super::*;

    #[test]
    fn a_plan_says_what_moves_how_long_it_takes_and_what_is_in_the_way() {
        let location = |store: &str, image: &str| ImageLocation {
            store: Some(store.to_owned()),
            image: image.to_owned(),
            kind: ImageKind::File,
            format: ImageFormat::Raw,
        };
        let volume = PlannedVolume {
            name: "root".to_owned(),
            size_bytes: 4 << 30,
            held_bytes: 1 << 30,
            source: location("a", "/a/root.img"),
            target: Some(location("beta:a", "/b/root.img")),
            free_bytes: Some(8 << 30),
            replica: false,
            shared: true,
            cloned: false,
            copied_because: None,
        };
        let mut found = MigrationPlan {
            name: "web1".to_owned(),
            can_begin: true,
            refusals: Vec::new(),
            warnings: vec!["stays behind: a window".to_owned()],
            host: Some("beta".to_owned()),
            volumes: vec![volume],
            machine: Some(PlannedMachine {
                name: "web1".to_owned(),
                stopped: false,
                memory_bytes: Some(256 << 20),
                max_downtime_ms: Some(300),
                least_downtime_ms: Some(15.0),
            }),
            bytes_max: (1 << 30) + (256 << 20),
            strategy: api::Strategy::Mirror,
            strategy_reason: String::new(),
            links: Vec::new(),
            bytes_per_second: Some(125_000_000),
            rate: Some(api::RateOrigin::Stated),
            forecast: Some(Forecast {
                seconds: Expected { least: 9.0, middle: 10.7, most: 14.0 },
                bytes: Expected { least: 1.1e9, middle: 1.2e9, most: 1.3e9 },
                downtime_ms: Expected { least: 40.0, middle: 40.0, most: 40.0 },
                ends_percent: 100,
                learned_from: 3,
                probed: false,
            }),
            queue: None,
        };
        let text = plan(&found);
        for words in [
            "beta:a /b/root.img (raw)",
            "300 ms at most (the distance alone takes 15.0 ms)",
            "(stated)",
            "about 11 s (9.0 s to 14 s); learned from 3 migrations of this way",
            "web1 would move to beta; nothing was begun",
            "N.B. stays behind: a window",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        found.machine = found.machine.map(|machine| PlannedMachine {
            stopped: true,
            memory_bytes: None,
            max_downtime_ms: None,
            least_downtime_ms: None,
            ..machine
        });
        let text = plan(&found);
        assert!(text.contains("web1 (stopped, and stays so)"), "{text}");
        assert!(!text.contains("memory") && !text.contains("pauses"), "{text}");
        found.can_begin = false;
        found.refusals.push(ErrorDetail { code: ErrorCode::NoSpace, message: "make room".to_owned() });
        let text = plan(&found);
        assert!(text.contains("web1 would not move:\n  refused: make room"), "{text}");
    }
}
