//! Prints results and errors: tables and text for users, JSON for programs.

pub(crate) mod access;
pub(crate) mod domains;
pub(crate) mod evacuations;
pub(crate) mod hosts;
mod plan;
pub(crate) mod replicas;
pub(crate) mod snapshots;
pub(crate) mod standbys;
pub(crate) mod store_content;
pub(crate) mod vms;
mod volumes;

use std::collections::BTreeMap;
use std::io::{self, Write as _};

use api::{ClientError, Migration, Store, StoreKind};
use console::units::{bytes, duration, percent};
use console::{print_error, properties};
use daemon::JournalError;

pub(crate) use console::{
    Format, lines, print, print_line, print_text_line, say, say_in_place, table, with_causes,
};
pub(crate) use plan::plan;
pub(crate) use volumes::{filling, volume, volumes};

use crate::commands::CommandError;
use crate::moments::local;
use crate::remotes::RemoteError;

/// Prints why a command failed: as text on standard error, or as JSON on standard output.
pub(crate) fn report_error(error: &CommandError, format: Format) -> io::Result<()> {
    let message = message(error) + advice(error);
    if format == Format::Text {
        return writeln!(io::stderr(), "sterna: {}", words::printable(&message));
    }
    // The daemon's codes are those of the API; docs/exit-codes.md has the others.
    let code = match error {
        CommandError::Client(ClientError::Refused(detail)) => serde_json::to_value(detail.code)?,
        CommandError::Client(ClientError::Unreachable { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            "not_permitted".into()
        }
        CommandError::Client(ClientError::Unreachable { .. })
        | CommandError::Lost { .. }
        | CommandError::Tunnel(_)
        | CommandError::NoDaemonThere { .. } => "daemon_unreachable".into(),
        CommandError::Remote(RemoteError::Unknown(_)) => "remote_not_found".into(),
        CommandError::Config(_) => "invalid_configuration".into(),
        CommandError::NoJournal { .. } => "journal_not_found".into(),
        CommandError::Journal(JournalError::Io { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            "not_permitted".into()
        }
        CommandError::Journal(_) => "journal_unreadable".into(),
        CommandError::Serve(_) => "serve_failed".into(),
        _ => "client_failed".into(),
    };
    print_error(&code, &message)
}

/// Returns the error with its causes. A user without permission is not told that no daemon answers.
fn message(error: &CommandError) -> String {
    match error {
        CommandError::Client(ClientError::Unreachable { address, source })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            match address.strip_prefix("https://") {
                Some(_) => format!("the daemon at {address} does not know this user's key: {source}"),
                None => format!("this user may not use the daemon's socket {address}: {source}"),
            }
        }
        error => with_causes(error),
    }
}

/// Returns advice for errors whose own text has none.
fn advice(error: &CommandError) -> &'static str {
    match error {
        CommandError::Client(ClientError::Unreachable { address, source })
            if source.kind() == io::ErrorKind::PermissionDenied && address.starts_with("https://") =>
        {
            "; its administrator can list the users with: sterna access list, and grant you access with: sterna access grant"
        }
        CommandError::Client(ClientError::Unreachable { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            "; members of the group of this socket may use it: sudo adduser USER sterna, and log in again (api_socket in the daemon's configuration)"
        }
        CommandError::Client(ClientError::Unreachable { .. }) => {
            "; start it with: systemctl start sterna, or: sterna serve; or name another with --host unix:PATH, --host ssh://USER@HOST, --host https://HOST:PORT or STERNA_HOST"
        }
        _ => "",
    }
}

pub(crate) fn stores(stores: &Vec<Store>) -> String {
    let header = ["STORE", "KIND", "FREE", "SIZE", "VOLUMES", "PROVISIONED", "WHERE"];
    let mut table = table(&header, &[2, 3, 4, 5]);
    for store in stores {
        let (free, total) = match &store.problem {
            // The size of an export is known only when it is opened.
            None if store.bytes_total > 0 => (bytes(store.bytes_free), bytes(store.bytes_total)),
            _ => (dash(), dash()),
        };
        let path = match store.problem.as_ref().or(store.occupied.as_ref()) {
            None => store.path.clone(),
            Some(why) => format!("{} ({why})", store.path),
        };
        let kind = store.kind.name().to_owned();
        let (volumes, provisioned) = (store.volumes.to_string(), bytes(store.bytes_provisioned));
        table.add_row([store.name.clone(), kind, free, total, volumes, provisioned, path]);
    }
    let overcommitted = stores.iter().filter_map(overcommitted).map(|warning| format!("\n!! {warning}\n"));
    let warnings = overcommitted.collect::<String>() + &impairments(stores);
    lines(&table) + &warnings + &unknown_images(stores) + &disk_advice(stores)
}

/// Returns each advice for faster guests once, with its stores.
fn disk_advice(stores: &[Store]) -> String {
    let mut said: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for store in stores {
        said.entry(store.advice.as_deref().unwrap_or_default()).or_default().push(&store.name);
    }
    let lines = said.into_iter().filter(|(advice, _)| !advice.is_empty());
    lines.map(|(advice, stores)| format!("\n{}: {advice}\n", stores.join(", "))).collect()
}

/// Returns a warning if the volumes of a store have more bytes than the store.
pub(crate) fn overcommitted(store: &Store) -> Option<String> {
    let is_over = store.kind == StoreKind::Folder
        && store.bytes_total > 0
        && store.bytes_provisioned > store.bytes_total;
    is_over.then(|| {
        format!(
            "store {} has {}, and its volumes have {} together: guests that fill them get no space; watch FREE, or move one away: \
             sterna migrate VOLUME --to STORE",
            store.name,
            bytes(store.bytes_total),
            bytes(store.bytes_provisioned)
        )
    })
}

/// Returns a line for each store that is slow or fails on purpose.
fn impairments(stores: &[Store]) -> String {
    let impaired = stores.iter().filter_map(|store| Some((&store.name, store.impairment.as_ref()?)));
    let lines = impaired.map(|(name, impairment)| {
        format!("\n!! store {name} is {impairment}\n   for tests and demonstrations only: remove stores.{name}.delay and .fault from the configuration otherwise\n")
    });
    lines.collect()
}

/// Returns advice about images that the daemon does not know, if there are any.
pub(crate) fn unknown_images(stores: &[Store]) -> String {
    let mut text = String::new();
    for store in stores.iter().filter(|store| !store.unknown_images.is_empty()) {
        text += &format!(
            "\nimages in store {} that belong to no volume of this host: {}\n",
            store.name,
            store.unknown_images.join(", ")
        );
    }
    let in_use = stores.iter().flat_map(|store| store.images_in_use.iter().map(move |image| (store, image)));
    let in_use =
        in_use.map(|(store, image)| format!("\nused without Sterna in store {}: {image}\n", store.name));
    let in_use = in_use.collect::<String>();
    if !text.is_empty() {
        text += "If the data folder was lost, restore it from a backup, or list the images and make volumes of them:\n  sterna \
                 store scan\n  sterna store import STORE/FILE\n";
    }
    text + &in_use
}

pub(crate) fn migrations(migrations: &Vec<Migration>) -> String {
    if migrations.is_empty() {
        return "no migrations; begin one with: sterna migrate VOLUME --to STORE\n".to_owned();
    }
    let header =
        ["MIGRATION", "VOLUME", "FROM", "TO", "STATE", "DONE", "MOVED", "BEGAN", "TIME", "GUEST AT", "WHY"];
    let mut table = table(&header, &[5, 6, 7, 8]);
    for migration in migrations {
        table.add_row([
            migration.id.clone(),
            migration.volume.clone(),
            place(&migration.source),
            place(&migration.target),
            migration.state.name().to_owned(),
            done(migration),
            at_source(migration).map_or_else(|| moved(migration), |host| format!("{host} knows")),
            format!("{} ago", replicas::age(migration.started_unix_ms)),
            duration(migration.seconds),
            guest(migration).to_owned(),
            why(migration),
        ]);
    }
    lines(&table)
}

/// Returns the progress of a migration. It is forgotten for a migration that failed before the daemon's restart.
fn done(migration: &Migration) -> String {
    let is_forgotten = migration.state.has_ended() && migration.fraction == 0.0;
    if is_forgotten || at_source(migration).is_some() { dash() } else { share(migration) }
}

/// Returns the progress in percent. After a restart of the source of an incomplete volume, only the new owner knows it.
pub(crate) fn share(migration: &Migration) -> String {
    let has_left = migration.guest == api::GuestLocation::Target && !migration.state.has_ended();
    let is_unknown = has_left && migration.bytes_missing.is_none();
    if is_unknown { "unknown".to_owned() } else { percent(migration.fraction) }
}

/// Returns the bytes that the target still lacks.
pub(crate) fn missing(migration: &Migration) -> String {
    migration.bytes_missing.map_or_else(|| "unknown".to_owned(), bytes)
}

/// Returns the bytes that were moved: those of the disks, and the memory that a VM's move has sent.
fn moved(migration: &Migration) -> String {
    let memory = migration.machine.as_ref().and_then(|machine| machine.memory.as_ref());
    bytes(migration.bytes_moved + memory.map_or(0, |memory| memory.sent_bytes))
}

fn why(migration: &Migration) -> String {
    let turn = migration.queue.as_ref().map(turn);
    // Waits with a limit are short, and follow each other.
    let waits =
        migration.waiting_for.as_ref().filter(|waiting| waiting.remaining_ms.is_none() && turn.is_none());
    let waits = waits.map(|waiting| format!("waits for {}", waiting.reason));
    let suspended = migration.suspended.as_ref().map(|reason| format!("suspended: {reason}"));
    let retried = migration.retried_as.as_ref().map(|id| format!("retried as {id}"));
    let said = [turn, migration.message.clone(), suspended, waits, retried].into_iter().flatten();
    said.collect::<Vec<_>>().join("; ")
}

/// Returns one migration as lines of properties: its progress while it is under way, its costs once it has ended.
pub(crate) fn migration(migration: &Migration) -> String {
    let mut rows = vec![
        ("migration", migration.id.clone()),
        ("volume", migration.volume.clone()),
        ("from", place_and_image(&migration.source)),
        ("to", place_and_image(&migration.target)),
        ("state", migration.state.name().to_owned()),
        ("guest at", guest(migration).to_owned()),
    ];
    rows.extend(migration.message.clone().map(|message| ("why", message)));
    rows.extend(migration.retry_of.clone().map(|id| ("retry of", id)));
    rows.extend(migration.retried_as.clone().map(|id| ("retried as", id)));
    if matches!(migration.state, api::MigrationState::Running | api::MigrationState::Paused) {
        rows.push(("phase", migration.phase.name().to_owned()));
        let progress = || format!("{}, {}", share(migration), remaining(migration));
        rows.push(("done", at_source(migration).map_or_else(progress, |host| format!("{host} knows"))));
    }
    rows.extend(limit(migration).map(|limit| ("limited by", limit)));
    rows.extend(migration.deadline.map(|deadline| ("deadline", hurry(&deadline, local(deadline.unix_ms)))));
    rows.extend(migration.forecast.map(|forecast| ("expected", plan::time(&forecast))));
    rows.extend(waiting(migration).map(|waiting| ("waits for", waiting)));
    if let Some(ticket) = &migration.ticket {
        rows.push(("ticket", ticket.clone()));
        let (target, volume) = (place(&migration.target), &migration.volume);
        rows.push((
            "",
            format!("if {target} cannot reach this host: sterna volume promote {volume} --ticket … there"),
        ));
    }
    rows.extend(migration.suspended.clone().map(|reason| ("suspended", reason)));
    rows.extend(migration.strategy.map(|strategy| ("strategy", copied_by(strategy, &migration.rounds))));
    if migration.mirrored_instead {
        rows.push(("", "the rounds did not converge, and a mirror goes on with what was left".to_owned()));
    }
    rows.extend(plan::chosen(&migration.strategy_reason));
    rows.extend(cost(migration));
    properties(&rows)
}

/// Returns the strategy, with the result of its latest round if it has rounds.
fn copied_by(strategy: api::Strategy, rounds: &[api::Round]) -> String {
    let Some(last) = rounds.last() else { return strategy.name().to_owned() };
    format!("{}, {} rounds; {} was written in the last", strategy.name(), rounds.len(), bytes(last.dirtied))
}

pub(crate) fn ended(migration: &Migration) -> String {
    let why = migration.message.as_deref().unwrap_or("no reason was recorded");
    let (volume, id) = (&migration.volume, &migration.id);
    let (source, target) = (place(&migration.source), place(&migration.target));
    let first = match (migration.state, migration.guest) {
        (api::MigrationState::Moved, _) => {
            let note = migration.message.iter().map(|message| format!("N.B. {message}\n"));
            let are = if volume.contains(", ") { "are" } else { "is" };
            let machine = if migration.machine.is_some() { ", and so is the VM" } else { "" };
            format!("{volume} {are} at {target}{machine} ({id})\n") + &note.collect::<String>()
        }
        (api::MigrationState::Cancelled, _) => {
            let who = migration.message.as_ref().map(|who| format!(": {who}")).unwrap_or_default();
            format!("{id} was cancelled{who}; {volume} is at {source}\n")
        }
        (_, api::GuestLocation::Unknown) => {
            format!("{id} failed: {why}\nit is unknown where {volume} is: restart the daemon to find out\n")
        }
        (_, api::GuestLocation::Target) => format!("{id} failed: {why}\n{volume} is at {target}\n"),
        (_, api::GuestLocation::Source) => format!("{id} failed: {why}\n{volume} is at {source}\n"),
    };
    first + &properties(&cost(migration))
}

/// Returns the text about a migration that was begun with `--detach`.
pub(crate) fn begun(migration: &Migration) -> String {
    let id = &migration.id;
    match &migration.queue {
        None => format!("{id} has begun; follow it with: sterna migration watch {id}\n"),
        Some(queue) => {
            format!("{id} is queued ({}); follow it with: sterna migration watch {id}\n", turn(queue))
        }
    }
}

pub(crate) fn turn(queue: &api::QueuePlace) -> String {
    match queue.begins_unix_ms {
        Some(begins) => format!("begins at {}", local(begins)),
        None => format!("number {} of {}: {}", queue.place, queue.waiting, queue.reason),
    }
}

/// Returns a deadline, written as `by`, and what it demands of guests.
pub(crate) fn hurry(deadline: &api::Deadline, by: String) -> String {
    let raised = deadline.raised_to_percent.map(|percent| match percent {
        api::FULL_SPEED_PERCENT => "at full speed, guests do not come first".to_owned(),
        percent => format!("guests may lose {percent} % for it"),
    });
    let late = deadline.late.then(|| "it will be missed".to_owned());
    std::iter::once(by).chain(raised).chain(late).collect::<Vec<_>>().join(", ")
}

/// Returns the expected time until the copying ends, as text.
pub(crate) fn remaining(migration: &Migration) -> String {
    match migration.remaining_seconds {
        None => "time left unknown".to_owned(),
        Some(range) if range.latest - range.earliest < 1.0 => format!("{} left", duration(range.latest)),
        Some(range) => format!("{} to {} left", duration(range.earliest), duration(range.latest)),
    }
}

/// Returns what limits the copying, and what guests lose to it. Its own limit is among its waits.
pub(crate) fn limit(migration: &Migration) -> Option<String> {
    let limit = migration.limited_by.filter(|limit| *limit != api::LimitedBy::Bandwidth)?;
    let lost = migration.pace.filter(|pace| pace.guests_lose_percent >= 1.0);
    let lost = lost.map(|pace| format!(", which lose up to {:.0} %", pace.guests_lose_percent));
    let by_guests = matches!(limit, api::LimitedBy::SourceGuests | api::LimitedBy::TargetGuests);
    Some(format!("{}{}", limit.words(), lost.filter(|_| by_guests).unwrap_or_default()))
}

pub(crate) fn waiting(migration: &Migration) -> Option<String> {
    let waiting = migration.waiting_for.as_ref()?;
    let limit = waiting
        .remaining_ms
        .filter(|remaining_ms| *remaining_ms >= 1000)
        .map(|remaining_ms| duration(remaining_ms as f64 / 1000.0));
    Some(match limit {
        Some(limit) => format!("{} (at most {limit} longer)", waiting.reason),
        None => waiting.reason.clone(),
    })
}

fn cost(migration: &Migration) -> Vec<(&'static str, String)> {
    let moved = format!(
        "{} ({} copied, {} mirrored; {} of zeroes not written)",
        bytes(migration.bytes_moved),
        bytes(migration.bytes_copied),
        bytes(migration.bytes_mirrored),
        bytes(migration.bytes_zero),
    );
    let mut rows = vec![("time", duration(migration.seconds))];
    rows.extend(at_source(migration).is_none().then_some(("moved", moved)));
    if migration.bytes_cloned > 0 {
        let cloned =
            format!("{}, which share their blocks with the old image", bytes(migration.bytes_cloned));
        rows.push(("cloned", cloned));
    }
    if migration.shared {
        let way = "straight to a store that both hosts can open; the link carries control only";
        rows.push(("written", way.to_owned()));
    }
    rows.extend(migration.replica.as_ref().map(|replica| ("sent", spared(migration, replica))));
    if let Some(parts) = migration.switch_over {
        let held = format!(
            "{:.2} ms (drain {:.2}, prepare {:.2}, release {:.2}, own {:.2}, start {:.2})",
            parts.gate_closed_ms,
            parts.drain_ms,
            parts.prepare_ms,
            parts.release_ms,
            parts.own_ms,
            parts.start_ms,
        );
        rows.push(("guest held", held));
    }
    if let Some(machine) = &migration.machine {
        rows.extend(machine.memory.as_ref().map(|memory| ("memory", memory_sent(memory))));
        rows.extend(machine.downtime.as_ref().map(|downtime| ("VM paused", stood_still(downtime))));
    }
    rows
}

/// Returns how much a kept image at the other host has saved.
fn spared(migration: &Migration, replica: &api::ReplicaUsed) -> String {
    format!(
        "{}; a kept image had {} of the {} that the volume has",
        bytes(migration.bytes_moved),
        bytes(replica.bytes_spared),
        bytes(replica.bytes_held)
    )
}

fn memory_sent(memory: &api::MemoryMove) -> String {
    let slowed = match memory.throttle_percent {
        0 | 1 => String::new(),
        percent => format!(", its processors slowed down by {percent} %"),
    };
    let (sent, total) = (bytes(memory.sent_bytes), bytes(memory.total_bytes));
    let streams =
        if memory.streams > 1 { format!(" over {} streams", memory.streams) } else { String::new() };
    let followed = if memory.post_copy { "; the rest followed after the switch-over" } else { "" };
    format!("{sent} sent for {total} in {} rounds{streams}{slowed}{followed}", memory.rounds)
}

fn stood_still(downtime: &api::MachineDowntime) -> String {
    format!(
        "{:.1} ms (last memory and devices {:.1}, handover {:.1})",
        downtime.total_ms, downtime.memory_ms, downtime.handover_ms,
    )
}

/// Returns the source host, if it is another one. Only that host knows the progress.
fn at_source(migration: &Migration) -> Option<&str> {
    let source = &migration.source;
    source.image.is_empty().then_some(source.store.as_deref()).flatten()
}

fn place(location: &api::ImageLocation) -> String {
    location.store.clone().unwrap_or_else(|| "(in place)".to_owned())
}

/// Returns the place with the path. The paths of another host's images are not known here.
fn place_and_image(location: &api::ImageLocation) -> String {
    format!("{}  {}", place(location), location.image).trim_end().to_owned()
}

fn guest(migration: &Migration) -> &'static str {
    match migration.guest {
        api::GuestLocation::Source => "source",
        api::GuestLocation::Target => "target",
        api::GuestLocation::Unknown => "unknown",
    }
}

pub(crate) fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_ask_is_not_told_that_nobody_answers() {
        let said = |kind: io::ErrorKind| {
            let address = "unix:/run/api.sock".to_owned();
            message(&CommandError::Client(ClientError::Unreachable { address, source: kind.into() }))
        };
        let refused = said(io::ErrorKind::PermissionDenied);
        assert!(
            refused.starts_with("this user may not use the daemon's socket unix:/run/api.sock: "),
            "{refused}"
        );
        let absent = said(io::ErrorKind::NotFound);
        assert!(absent.starts_with("no daemon answers at unix:/run/api.sock: "), "{absent}");
    }
}
