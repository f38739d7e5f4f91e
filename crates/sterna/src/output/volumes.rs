//! Text output of `sterna volume`.

use api::{Replica, Volume, VolumeFilling};

use super::{dash, lines, properties, table};
use console::units::bytes;

pub(crate) fn volumes(volumes: &Vec<Volume>) -> String {
    if volumes.is_empty() {
        return "no volumes; make one with: sterna volume create NAME --size 4GiB\n".to_owned();
    }
    let mut table = table(&["VOLUME", "SIZE", "USED", "STORE", "STATE", "CLIENTS", "MIGRATION"], &[1, 2, 5]);
    for volume in volumes {
        let elsewhere: u32 = volume.clients_elsewhere.iter().map(|led| led.clients).sum();
        let clients = volume.statistics.as_ref().map(|statistics| match elsewhere {
            0 => statistics.connections.to_string(),
            elsewhere => format!("{}+{elsewhere}", statistics.connections),
        });
        table.add_row([
            volume.name.clone(),
            bytes(volume.size_bytes),
            volume.allocated_bytes.map_or_else(dash, bytes),
            store(volume).unwrap_or_else(|| "(in place)".to_owned()),
            state(volume),
            clients.unwrap_or_else(dash),
            volume.migration.clone().unwrap_or_else(dash),
        ]);
    }
    lines(&table)
}

/// Returns the state of a volume in one word, with the missing bytes.
fn state(volume: &Volume) -> String {
    match &volume.filling {
        None if volume.attached_by.is_some() => "attached".to_owned(),
        None => volume.state.name().to_owned(),
        Some(filling) => {
            let what = if filling.is_given_up { "lost" } else { "missing" };
            format!("{}, {} {what}", volume.state.name(), bytes(filling.bytes_missing))
        }
    }
}

/// Returns what an incomplete volume lacks, with its progress.
pub(crate) fn filling(filling: &VolumeFilling) -> String {
    if filling.is_given_up {
        return format!(
            "{} never arrived from host {}, and were given up: reading them is an I/O error until they are overwritten or \
             discarded (where they are: --json)",
            bytes(filling.bytes_missing),
            filling.host,
        );
    }
    let mut text = format!(
        "{} of {} have not arrived from host {} yet ({} pulled, {} pushed, {} overwritten here)",
        bytes(filling.bytes_missing),
        bytes(filling.bytes_at_handover),
        filling.host,
        bytes(filling.bytes_pulled),
        bytes(filling.bytes_pushed),
        bytes(filling.bytes_overwritten),
    );
    match filling.requests_waiting {
        0 => {}
        1 => text += "; one request waits for them",
        waiting => text += &format!("; {waiting} requests wait for them"),
    }
    match filling.reads_refused {
        0 => {}
        1 => text += "; one read failed for that, and its VM is stopped until the blocks arrive",
        refused => {
            text += &format!(
                "; {refused} reads failed for that, and their VM is stopped until the blocks arrive"
            );
        }
    }
    if filling.bytes_unreadable > 0 {
        text += &format!("; {} cannot be read there", bytes(filling.bytes_unreadable));
    }
    text + &filling.waits_for.as_ref().map(|awaited| format!("; it waits for {awaited}")).unwrap_or_default()
}

/// Returns a volume as lines of properties, with its images among `kept`.
pub(crate) fn volume(volume: &Volume, kept: &[Replica]) -> String {
    let mut rows = vec![
        ("volume", volume.name.clone()),
        ("uri", volume.uri.clone()),
        ("port", volume.tcp_uri.clone().unwrap_or_else(dash)),
        ("size", format!("{} ({} bytes)", bytes(volume.size_bytes), volume.size_bytes)),
        ("used", volume.allocated_bytes.map_or_else(dash, bytes)),
        ("store", store(volume).unwrap_or_else(|| "none: the image is served in place".to_owned())),
    ];
    rows.extend((!volume.image.is_empty()).then(|| ("image", image(volume))));
    rows.push(("state", volume.state.name().to_owned()));
    rows.extend(volume.message.clone().map(|message| ("why", message)));
    rows.extend(volume.migration.clone().map(|migration| ("migration", migration)));
    rows.extend(volume.filling.as_ref().map(|lacking| ("missing", filling(lacking))));
    rows.push(("generation", format!("{} (number of handovers)", volume.generation)));
    if let Some(statistics) = &volume.statistics {
        let guest = format!(
            "{} connected, {} requests in flight; {} reads ({}), {} writes ({}), {} flushes, {} errors{}",
            statistics.connections,
            statistics.requests_in_flight,
            statistics.reads,
            bytes(statistics.bytes_read),
            statistics.writes,
            bytes(statistics.bytes_written),
            statistics.flushes,
            statistics.errors,
            statistics.last_error.as_ref().map(|error| format!(", the latest: {error}")).unwrap_or_default(),
        );
        rows.extend([("guest", guest), ("engine", statistics.engine.clone())]);
    }
    let elsewhere =
        volume.clients_elsewhere.iter().map(|led| format!("{} at host {}", led.clients, led.host));
    let elsewhere: Vec<_> = elsewhere.collect();
    rows.extend(
        (!elsewhere.is_empty()).then(|| ("forwarded", format!("{} (led here)", elsewhere.join(", ")))),
    );
    let attached = volume.attachments.iter().map(|attached| {
        let access = if attached.read_only { ", read only" } else { "" };
        let word = if attached.is_confirmed { "" } else { ", not confirmed: attach it again, or detach it" };
        format!("at {}{access}{word}", attached.host)
    });
    let attached: Vec<_> = attached.collect();
    rows.extend((!attached.is_empty()).then(|| ("attached", attached.join("; "))));
    let kept: Vec<&Replica> = kept.iter().filter(|replica| replica.volume == volume.name).collect();
    if !kept.is_empty() {
        let images = if kept.len() == 1 { "image" } else { "images" };
        let taken: u64 = kept.iter().filter_map(|replica| replica.allocated_bytes).sum();
        let advice = "left by migrations; sterna replica list";
        rows.push(("kept", format!("{} {images}, {} ({advice})", kept.len(), bytes(taken))));
    }
    properties(&rows)
}

/// Returns the volume's store; `None` for an image that is served in place.
fn store(volume: &Volume) -> Option<String> {
    let elsewhere = volume.host.as_ref().map(|host| format!("at {host}"));
    elsewhere.or_else(|| volume.store.clone())
}

fn image(volume: &Volume) -> String {
    let access = if volume.read_only { ", read only" } else { "" };
    format!("{} ({}, {}{access})", volume.image, volume.kind.name(), volume.format.name())
}
