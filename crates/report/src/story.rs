//! The headline, the main figures and the facts.

use api::{GuestLocation, ImageLocation, Migration, MigrationState, Recording};

use crate::figures::{bytes, change, grouped, latency, moment, seconds};
use crate::markup::escape;

/// Returns the outcome in one sentence, not escaped.
pub(crate) fn headline(migration: &Migration) -> String {
    let volume = &migration.volume;
    let (source, target) = (place(&migration.source), place(&migration.target));
    match (migration.state, migration.guest) {
        (MigrationState::Queued, _) => format!("{volume} is to move from {source} to {target}"),
        (MigrationState::Running | MigrationState::Paused, _) => {
            format!("{volume} is moving from {source} to {target}")
        }
        (MigrationState::Moved, _) => format!("{volume} moved from {source} to {target}"),
        (_, GuestLocation::Unknown) => format!("{volume}: the move from {source} to {target} is undecided"),
        (MigrationState::Cancelled, _) => {
            format!("{volume} stayed at {source}: the move to {target} was cancelled")
        }
        (MigrationState::Failed, _) => format!("{volume} stayed at {source}: the move to {target} failed"),
        (MigrationState::HandedBack, _) => {
            format!("{volume} came back to {source}: {target} could not start it")
        }
    }
}

pub(crate) fn header(migration: &Migration, recording: Option<&Recording>) -> String {
    let (class, word) = match migration.state {
        MigrationState::Queued => ("running", "waits for its turn".to_owned()),
        MigrationState::Running => {
            ("running", format!("under way, {:.0} %", (migration.fraction * 100.0).floor()))
        }
        MigrationState::Paused => {
            ("running", format!("paused at {:.0} %", (migration.fraction * 100.0).floor()))
        }
        MigrationState::Moved => ("moved", "moved".to_owned()),
        MigrationState::Failed => ("failed", "failed".to_owned()),
        MigrationState::Cancelled => ("cancelled", "cancelled".to_owned()),
        MigrationState::HandedBack => ("failed", "handed back".to_owned()),
    };
    let size =
        recording.map(|recording| format!(" · {}", bytes(recording.size_bytes as f64))).unwrap_or_default();
    let began = moment(migration.started_unix_ms);
    format!(
        "<header><p class=\"kind\"><span>Sterna</span> report of migration {id}</p><h1>{headline}</h1>\
         <p class=\"under\"><span class=\"state {class}\">{word}</span> {began}{size}</p>{why}</header>{tiles}",
        id = escape(&migration.id),
        headline = escape(&headline(migration)),
        why = why(migration),
        tiles = tiles(migration, recording),
    )
}

/// Returns the facts that are in no figure.
pub(crate) fn facts(migration: &Migration) -> String {
    let image = |location: &ImageLocation| format!("{}: {}", place(location), location.image);
    let kept = if migration.keep_source { "kept, renamed" } else { "deleted once the target had taken over" };
    let guest = match migration.guest {
        GuestLocation::Source => "at the source",
        GuestLocation::Target => "at the target",
        GuestLocation::Unknown => "unknown until the daemon is restarted",
    };
    let mut rows = vec![
        ("migration", migration.id.clone()),
        ("volume", migration.volume.clone()),
        ("from", image(&migration.source)),
        ("to", image(&migration.target)),
        ("began", moment(migration.started_unix_ms)),
        ("ended", migration.ended_unix_ms.map_or_else(|| "not yet".to_owned(), moment)),
        ("guest", guest.to_owned()),
        ("tries at the handover", migration.attempt.to_string()),
    ];
    if migration.state == MigrationState::Moved {
        rows.push(("source's image", kept.to_owned()));
    }
    rows.extend(migration.failure.clone().map(|failure| ("cause", failure)));
    let rows: Vec<String> = rows
        .iter()
        .map(|(name, value)| {
            format!("<tr><th scope=\"row\">{name}</th><td class=\"path\">{}</td></tr>", escape(value))
        })
        .collect();
    format!("<section><h2>Facts</h2><table class=\"facts\">{}</table></section>", rows.concat())
}

pub(crate) fn footer() -> String {
    format!(
        "<footer><p>Made by sterna {} from what the daemon recorded. Requests are counted, and their latency is taken, where \
         the daemon takes them from the guest's connection: the guest's own queues and its network are not in it. A \
         percentile is at most an eighth too high. Times count from the start of the migration.</p></footer>",
        env!("CARGO_PKG_VERSION")
    )
}

/// Returns the store, or a text if there is none.
pub(crate) fn place(location: &ImageLocation) -> String {
    location.store.clone().unwrap_or_else(|| "its own place".to_owned())
}

fn why(migration: &Migration) -> String {
    let mut lines = Vec::new();
    lines.extend(migration.message.as_ref().map(|message| escape(message)));
    if matches!(migration.state, MigrationState::Running | MigrationState::Paused) {
        lines.push("This page shows how it stood when it was made; make it again to see more.".to_owned());
        lines.extend(
            migration
                .waiting_for
                .as_ref()
                .map(|waiting| format!("It waits for {}.", escape(&waiting.reason))),
        );
        lines.extend(
            migration.suspended.as_ref().map(|reason| format!("Mirroring is suspended: {}.", escape(reason))),
        );
    }
    let is_bad = matches!(migration.state, MigrationState::Failed | MigrationState::HandedBack);
    let class = if is_bad { "why bad" } else { "why" };
    lines.iter().map(|line| format!("<p class=\"{class}\">{line}</p>")).collect()
}

fn tiles(migration: &Migration, recording: Option<&Recording>) -> String {
    let running = matches!(migration.state, MigrationState::Running | MigrationState::Paused);
    let mut tiles = vec![tile(
        if running { "so far" } else { "migration time" },
        &seconds(migration.seconds),
        &format!("{} a second", bytes(migration.bytes_moved as f64 / migration.seconds.max(0.001))),
    )];
    tiles.push(match migration.switch_over {
        Some(parts) => {
            tile("guest held", &latency(parts.gate_closed_ms * 1000.0), "once, at the switch-over")
        }
        None => tile("guest held", "—", "there was no switch-over"),
    });
    let before = recording.and_then(|recording| recording.before.as_ref());
    let during = recording.and_then(|recording| recording.during.as_ref());
    if let (Some(before), Some(during)) = (before, during) {
        let lost = change(before.iops, during.iops).unwrap_or_else(|| "—".to_owned());
        let detail = format!("{} before, {} while it ran", grouped(before.iops), grouped(during.iops));
        tiles.push(tile("guest IOPS", &lost, &detail));
    }
    let copied = format!(
        "{} copied, {} mirrored",
        bytes(migration.bytes_copied as f64),
        bytes(migration.bytes_mirrored as f64)
    );
    tiles.push(tile("moved", &bytes(migration.bytes_moved as f64), &copied));
    format!("<div class=\"tiles\">{}</div>", tiles.concat())
}

fn tile(name: &str, value: &str, detail: &str) -> String {
    format!("<div class=\"tile\"><p>{name}</p><strong>{value}</strong><small>{detail}</small></div>")
}
