//! Tables of cells: the screen shows the part that fits, `--once` everything.

use api::{
    MigrationAtWork, Overview, PeerAtWork, Standby, StandbyRole, StandbyState, Store, StoreKind, Vm, VmState,
    VolumeAtWork, VolumeState,
};

use super::words::{course, latency, place, rate, requests, whole};
use crate::moments::moment;
use crate::output;
use console::units::{bytes, duration, percent};

pub(crate) struct Sheet {
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Vec<Cell>>,
    /// The text that is shown if there are no rows.
    pub(crate) when_empty: &'static str,
}

pub(crate) struct Column {
    pub(crate) title: &'static str,
    pub(crate) side: Side,
    /// If the screen is too narrow, columns of a higher rank are left out first.
    pub(crate) rank: u8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// A text with its meaning.
pub(crate) struct Cell {
    pub(crate) text: String,
    pub(crate) tone: Tone,
}

/// The meaning of a text, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Name,
    Quiet,
    /// The state is as expected.
    Good,
    /// An operation is under way.
    Busy,
    Warm,
    /// The administrator should act.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Name,
    Requests,
    Read,
    Written,
    Latency,
    Used,
}

impl Order {
    pub(crate) const ALL: [Self; 6] =
        [Self::Name, Self::Requests, Self::Read, Self::Written, Self::Latency, Self::Used];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::Read => "read",
            Self::Written => "written",
            Self::Latency => "latency",
            Self::Used => "used",
        }
    }

    fn of(self, volume: &VolumeAtWork) -> f64 {
        let activity = volume.activity.as_ref();
        let figure = match self {
            Self::Name => None,
            Self::Requests => activity.map(api::Activity::requests_per_second),
            Self::Read => activity.map(|activity| activity.bytes_read_per_second),
            Self::Written => activity.map(|activity| activity.bytes_written_per_second),
            Self::Latency => activity.and_then(|activity| activity.p99_us).map(|micros| micros as f64),
            Self::Used => volume.allocated_bytes.map(|bytes| bytes as f64),
        };
        figure.unwrap_or(-1.0)
    }
}

/// Sorts volumes by name, or by a figure with the highest first.
pub(crate) fn sort(volumes: &mut [&VolumeAtWork], order: Order, is_reversed: bool) {
    volumes.sort_by(|one, other| {
        let by = order.of(other).total_cmp(&order.of(one)).then_with(|| one.name.cmp(&other.name));
        if is_reversed { by.reverse() } else { by }
    });
}

pub(crate) fn volumes(volumes: &[&VolumeAtWork]) -> Sheet {
    let rows = volumes.iter().map(|volume| {
        let activity = volume.activity.as_ref();
        let used = volume.allocated_bytes.map_or_else(dash, bytes);
        vec![
            name(&volume.name),
            volume_state(volume),
            plain(volume_place(volume)),
            plain(requests(activity)),
            plain(rate(activity.map(|activity| activity.bytes_read_per_second))),
            plain(rate(activity.map(|activity| activity.bytes_written_per_second))),
            plain(latency(activity.and_then(|activity| activity.median_us))),
            plain(latency(activity.and_then(|activity| activity.p99_us))),
            plain(clients(volume)),
            plain(used),
            plain(bytes(volume.size_bytes)),
            quiet(volume_remark(volume)),
        ]
    });
    Sheet {
        columns: columns(&[
            ("VOLUME", Side::Left, 0),
            ("STATE", Side::Left, 1),
            ("PLACE", Side::Left, 3),
            ("REQ/S", Side::Right, 0),
            ("READ", Side::Right, 2),
            ("WRITTEN", Side::Right, 2),
            ("MEDIAN", Side::Right, 5),
            ("99/100", Side::Right, 1),
            ("CLIENTS", Side::Right, 6),
            ("USED", Side::Right, 4),
            ("SIZE", Side::Right, 5),
            ("", Side::Left, 7),
        ]),
        rows: rows.collect(),
        when_empty: "no volumes; make one with: sterna volume create NAME --size SIZE",
    }
}

pub(crate) fn vms(overview: &Overview) -> Sheet {
    let rows = overview.vms.iter().map(|vm| {
        let (word, tone) = vm_state(vm.state);
        vec![
            name(&vm.name),
            Cell { text: word.to_owned(), tone },
            plain(vm_disks(vm, &overview.volumes)),
            plain(vm.hypervisor.clone().unwrap_or_else(dash)),
            plain(vm.process.map_or_else(dash, |process| process.to_string())),
            quiet(vm.message.clone().unwrap_or_default()),
        ]
    });
    Sheet {
        columns: columns(&[
            ("VM", Side::Left, 0),
            ("STATE", Side::Left, 0),
            ("DISKS", Side::Left, 1),
            ("HYPERVISOR", Side::Left, 3),
            ("PROCESS", Side::Right, 2),
            ("", Side::Left, 4),
        ]),
        rows: rows.collect(),
        when_empty: "no VMs; add one with: sterna vm add, or take one over with: sterna vm adopt",
    }
}

pub(crate) fn standbys(standbys: &[Standby]) -> Sheet {
    let rows = standbys.iter().map(|standby| {
        let (word, tone) = standby_state(standby.state);
        let role = match standby.role {
            StandbyRole::Source => "kept at",
            StandbyRole::Standby => "kept for",
        };
        let problem = standby.vms.iter().find_map(|vm| vm.problem.clone());
        vec![
            name(&standby.name),
            Cell { text: word.to_owned(), tone },
            plain(format!("{role} {}", standby.host)),
            plain(standby.age_seconds.map_or_else(dash, duration)),
            plain(standby.every_seconds.map_or_else(dash, duration)),
            plain(standby.bytes_waiting.map_or_else(dash, bytes)),
            plain(standby.bytes_sent.map_or_else(dash, bytes)),
            compared(standby),
            plain(standby.volumes.join(", ")),
            quiet(standby.reason.clone().or(problem).unwrap_or_default()),
        ]
    });
    Sheet {
        columns: columns(&[
            ("STANDBY", Side::Left, 0),
            ("STATE", Side::Left, 0),
            ("HOST", Side::Left, 1),
            ("AGE", Side::Right, 0),
            ("EVERY", Side::Right, 2),
            ("WAITING", Side::Right, 1),
            ("SENT", Side::Right, 3),
            ("COMPARED", Side::Left, 3),
            ("VOLUMES", Side::Left, 4),
            ("", Side::Left, 5),
        ]),
        rows: rows.collect(),
        when_empty: "no standbys; keep one with: sterna standby add VOLUME --to HOST",
    }
}

/// Returns when everything was last compared with a standby.
fn compared(standby: &Standby) -> Cell {
    let differed = standby.compared.as_ref().is_some_and(|compared| compared.bytes_differing > 0);
    let tone = if differed { Tone::Bad } else { Tone::Plain };
    Cell { text: output::standbys::compared_when(standby), tone }
}

/// Returns the state of a standby in words.
pub(crate) fn standby_state(state: StandbyState) -> (&'static str, Tone) {
    let tone = match state {
        StandbyState::Current => Tone::Good,
        StandbyState::Seeding | StandbyState::Used => Tone::Busy,
        StandbyState::Paused | StandbyState::Waiting => Tone::Warm,
        StandbyState::Promoted => Tone::Quiet,
        StandbyState::Behind | StandbyState::NoRecoveryPoint | StandbyState::Diverged => Tone::Bad,
    };
    (output::standbys::state(state), tone)
}

/// Returns the volumes of a VM with their places and, if one is not served or moves, that.
fn vm_disks(vm: &Vm, volumes: &[VolumeAtWork]) -> String {
    let disk = |name: &String| match volumes.iter().find(|volume| volume.name == *name) {
        None => format!("{name} (not at this host)"),
        Some(volume) => {
            let place = volume_place(volume);
            match volume.state {
                _ if volume.migration.is_some() => format!("{name} ({place}, moving)"),
                VolumeState::Serving | VolumeState::Forwarding => format!("{name} ({place})"),
                _ => format!("{name} ({place}, {})", volume_state(volume).text),
            }
        }
    };
    vm.volumes.iter().map(disk).collect::<Vec<_>>().join(", ")
}

pub(crate) fn stores(stores: &[&Store]) -> Sheet {
    let rows = stores.iter().map(|store| {
        let is_known = store.bytes_total > 0;
        let size = |count| if is_known { bytes(count) } else { dash() };
        let used =
            store.bytes_total.saturating_sub(store.bytes_free) as f64 / store.bytes_total.max(1) as f64;
        let remark = [&store.problem, &store.occupied, &store.impairment].into_iter().flatten();
        let remark = remark.cloned().collect::<Vec<_>>().join("; ");
        let tone = if store.problem.is_some() { Tone::Bad } else { Tone::Quiet };
        vec![
            name(&store.name),
            plain(kind(store.kind)),
            plain(size(store.bytes_free)),
            plain(size(store.bytes_total)),
            plain(if is_known { percent(used) } else { dash() }),
            plain(store.volumes.to_string()),
            plain(store.path.clone()),
            Cell { text: remark, tone },
        ]
    });
    Sheet {
        columns: columns(&[
            ("STORE", Side::Left, 0),
            ("KIND", Side::Left, 3),
            ("FREE", Side::Right, 0),
            ("SIZE", Side::Right, 1),
            ("USED", Side::Right, 0),
            ("VOLUMES", Side::Right, 1),
            ("PATH", Side::Left, 4),
            ("", Side::Left, 2),
        ]),
        rows: rows.collect(),
        when_empty: "no stores",
    }
}

/// Returns the other hosts, with a row for each connection.
pub(crate) fn hosts(peers: &[&PeerAtWork]) -> Sheet {
    let mut rows = Vec::new();
    for PeerAtWork { peer, connections } in peers {
        let (word, tone) = if peer.connected { ("connected", Tone::Good) } else { ("away", Tone::Bad) };
        let since = peer.since_ms.map_or_else(dash, |since| duration(since as f64 / 1000.0));
        let mut host = Some((peer.name.clone(), word, since));
        let mut begin = || {
            let (named, word, since) = host.take().unwrap_or_default();
            vec![name(&named), Cell { text: word.to_owned(), tone }, plain(since)]
        };
        for told in connections {
            let connection = &told.connection;
            let (word, tone) = if connection.up { ("up", Tone::Good) } else { ("down", Tone::Bad) };
            let mut row = begin();
            row.extend([
                plain(format!("{} - {}", connection.local, connection.remote)),
                Cell { text: word.to_owned(), tone },
                plain(latency(connection.round_trip_us)),
                plain(rate(told.bytes_sent_per_second)),
                plain(rate(told.bytes_received_per_second)),
                quiet(connection.last_error.clone().filter(|_| !connection.up).unwrap_or_default()),
            ]);
            rows.push(row);
        }
        if connections.is_empty() {
            let mut row = begin();
            row.extend([dash(), dash(), dash(), dash(), dash()].map(plain));
            row.push(quiet(peer.last_error.clone().unwrap_or_default()));
            rows.push(row);
        }
    }
    Sheet {
        columns: columns(&[
            ("HOST", Side::Left, 0),
            ("STATE", Side::Left, 0),
            ("FOR", Side::Right, 3),
            ("LINK", Side::Left, 2),
            ("", Side::Left, 2),
            ("TRIP", Side::Right, 1),
            ("SENT", Side::Right, 1),
            ("RECEIVED", Side::Right, 1),
            ("", Side::Left, 4),
        ]),
        rows,
        when_empty: "no other hosts; pair one with: sterna host invite",
    }
}

pub(crate) fn migrations(migrations: &[&MigrationAtWork]) -> Sheet {
    let rows = migrations.iter().map(|MigrationAtWork { migration, .. }| {
        let (word, tone) = super::words::state(migration);
        let held = migration.switch_over.map(|parts| (parts.gate_closed_ms * 1000.0) as u64);
        vec![
            name(&migration.id),
            plain(migration.volume.clone()),
            plain(place(&migration.source)),
            plain(place(&migration.target)),
            Cell { text: word.to_owned(), tone },
            plain(super::words::done(migration)),
            plain(if migration.state.has_ended() { dash() } else { rate(Some(migration.bytes_per_second)) }),
            plain(bytes(migration.bytes_moved)),
            plain(duration(migration.seconds)),
            plain(latency(held)),
            plain(migration.ended_unix_ms.map_or_else(dash, moment)),
            quiet(course(migration)),
        ]
    });
    Sheet {
        columns: columns(&[
            ("MIGRATION", Side::Left, 0),
            ("VOLUME", Side::Left, 0),
            ("FROM", Side::Left, 2),
            ("TO", Side::Left, 1),
            ("STATE", Side::Left, 0),
            ("DONE", Side::Right, 4),
            ("RATE", Side::Right, 5),
            ("MOVED", Side::Right, 3),
            ("TIME", Side::Right, 1),
            ("HELD", Side::Right, 2),
            ("ENDED", Side::Left, 3),
            ("", Side::Left, 6),
        ]),
        rows: rows.collect(),
        when_empty: "no migrations; begin one with: sterna migrate VOLUME --to STORE",
    }
}

/// Returns the ended migrations, the latest first.
pub(crate) fn ended(overview: &Overview) -> Vec<&MigrationAtWork> {
    overview.migrations.iter().rev().filter(|told| told.migration.state.has_ended()).collect()
}

/// Returns the migrations that are queued or under way, the active ones first.
pub(crate) fn under_way(overview: &Overview) -> Vec<&MigrationAtWork> {
    let mut found: Vec<_> =
        overview.migrations.iter().filter(|told| !told.migration.state.has_ended()).collect();
    found.sort_by_key(|told| told.migration.state == api::MigrationState::Queued);
    found
}

fn columns(given: &[(&'static str, Side, u8)]) -> Vec<Column> {
    given.iter().map(|&(title, side, rank)| Column { title, side, rank }).collect()
}

fn volume_state(volume: &VolumeAtWork) -> Cell {
    let (text, tone) = match volume.state {
        VolumeState::Serving if volume.migration.is_some() => ("moving", Tone::Busy),
        VolumeState::Serving => ("serving", Tone::Good),
        VolumeState::Failed | VolumeState::Unconfirmed => (volume.state.name(), Tone::Bad),
        VolumeState::Creating | VolumeState::Arriving => (volume.state.name(), Tone::Busy),
        VolumeState::Forwarding => ("forwarding", Tone::Quiet),
        VolumeState::Waiting | VolumeState::Removing => (volume.state.name(), Tone::Warm),
    };
    Cell { text: text.to_owned(), tone }
}

pub(crate) fn volume_place(volume: &VolumeAtWork) -> String {
    match (&volume.host, &volume.store) {
        (Some(host), _) => format!("at {host}"),
        (None, Some(store)) => store.clone(),
        (None, None) => "(in place)".to_owned(),
    }
}

fn volume_remark(volume: &VolumeAtWork) -> String {
    let is_elsewhere = volume.state == VolumeState::Forwarding;
    if let Some(message) = volume.message.as_ref().filter(|_| !is_elsewhere) {
        return message.clone();
    }
    if let Some(filling) = &volume.filling {
        return output::filling(filling);
    }
    match (&volume.last_error, volume.errors) {
        (_, 0) => String::new(),
        (Some(error), count) => format!("{} requests failed: {error}", whole(count as f64)),
        (None, count) => format!("{} requests failed", whole(count as f64)),
    }
}

fn clients(volume: &VolumeAtWork) -> String {
    match volume.clients_elsewhere {
        0 => volume.connections.to_string(),
        elsewhere => format!("{}+{elsewhere}", volume.connections),
    }
}

/// Returns the state of a VM in one word.
pub(crate) fn vm_state(state: VmState) -> (&'static str, Tone) {
    let tone = match state {
        VmState::Running => Tone::Good,
        VmState::Paused | VmState::Unknown => Tone::Warm,
        VmState::Crashed | VmState::IoError => Tone::Bad,
        VmState::Stopped | VmState::Suspended | VmState::ShutDown => Tone::Quiet,
        VmState::Starting | VmState::Arriving | VmState::Leaving => Tone::Busy,
    };
    (state.words(), tone)
}

fn kind(kind: StoreKind) -> String {
    kind.name().to_owned()
}

fn dash() -> String {
    super::words::DASH.to_owned()
}

fn name(text: &str) -> Cell {
    Cell { text: text.to_owned(), tone: Tone::Name }
}

fn plain(text: String) -> Cell {
    Cell { text, tone: Tone::Plain }
}

fn quiet(text: String) -> Cell {
    Cell { text, tone: Tone::Quiet }
}
