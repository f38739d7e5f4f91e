//! Journals of version 3, written by version 0.1: residencies had no identity, and epochs were reserved.
//!
//! They are read, never written: the first start of this program replaces the file. Only the differences are here; the rest is
//! shared with the current version, whose variants are only appended. Files that version 0.1 stored beside its journal bear no
//! residency, and are not read: every copy lacks everything.

use std::collections::BTreeMap;

use chronicle::{Epoch, Generation, StayId};
use serde::Deserialize;

use super::image::{Place, Reservation};
use super::record::{MigratingVolume, Outcome, Summary, VolumeRecord};
use super::side::{Branch, Forwarding, Promotion, Side};
use super::stage::Stage;
use super::{record, side, state};
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};

#[derive(Deserialize)]
pub(super) struct Entry {
    at_unix_ms: u64,
    records: Vec<Record>,
}

#[derive(Deserialize)]
enum Record {
    Snapshot(Box<State>),
    VolumeAdded(VolumeRecord),
    VolumeRemoved {
        volume: VolumeId,
    },
    EpochsReserved {
        _volume: VolumeId,
        _reserved: Epoch,
    },
    MigrationStarted {
        migration: MigrationId,
        volumes: Vec<MigratingVolume>,
        keep_source: bool,
        side: Side,
    },
    TargetPrepared {
        migration: MigrationId,
        attempt: Attempt,
    },
    AttemptAborted {
        migration: MigrationId,
        attempt: Attempt,
    },
    Released {
        migration: MigrationId,
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
    },
    Owned {
        migration: MigrationId,
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
    },
    HandedBack {
        migration: MigrationId,
        generations: Vec<(VolumeId, Generation)>,
    },
    MigrationEnded {
        migration: MigrationId,
        outcome: Outcome,
        summary: Summary,
    },
    ResizeBegun {
        volume: VolumeId,
        size_bytes: u64,
    },
    Resized {
        volume: VolumeId,
        size_bytes: u64,
    },
    ReservationLifted {
        place: Place,
    },
    Promoted {
        migration: MigrationId,
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
        promotion: Promotion,
    },
    MovedForgotten {
        volume: VolumeId,
    },
}

#[derive(Deserialize)]
struct State {
    volumes: BTreeMap<VolumeId, VolumeState>,
    migrations: BTreeMap<MigrationId, MigrationState>,
    next_migration: u64,
    reservations: BTreeMap<Place, Reservation>,
    moved: BTreeMap<VolumeId, Moved>,
    branches: BTreeMap<VolumeId, Vec<Branch>>,
}

/// A volume, in the form of versions 2 and 3.
#[derive(Deserialize)]
pub(super) struct VolumeState {
    record: VolumeRecord,
    _epochs_reserved: Epoch,
    added_unix_ms: u64,
    resizing_to: Option<u64>,
}

#[derive(Deserialize)]
struct Moved {
    volume: VolumeState,
    migration: MigrationId,
    host: HostId,
    host_name: String,
    generation: Generation,
    forwarding: Forwarding,
    at_unix_ms: u64,
}

#[derive(Deserialize)]
struct MigrationState {
    volumes: Vec<MigratingVolume>,
    names: Vec<String>,
    keep_source: bool,
    stage: Stage,
    aborted: Attempt,
    started_unix_ms: u64,
    ended_unix_ms: Option<u64>,
    summary: Summary,
    side: Side,
    promotion: Option<Promotion>,
    returning: Vec<Moved>,
}

impl From<Entry> for record::Entry {
    fn from(old: Entry) -> Self {
        let records = old.records.into_iter().filter_map(Record::into_present).collect();
        Self { at_unix_ms: old.at_unix_ms, records }
    }
}

impl Record {
    /// Converts the record to the current version; `None` if it is not needed there.
    fn into_present(self) -> Option<record::Record> {
        use record::Record as Present;
        Some(match self {
            Self::Snapshot(state) => Present::Snapshot(Box::new((*state).into())),
            Self::VolumeAdded(record) => Present::VolumeAdded(record),
            Self::VolumeRemoved { volume } => Present::VolumeRemoved { volume },
            Self::EpochsReserved { .. } => return None,
            Self::MigrationStarted { migration, volumes, keep_source, side } => {
                Present::MigrationStarted { migration, volumes, keep_source, side }
            }
            Self::TargetPrepared { migration, attempt } => Present::TargetPrepared { migration, attempt },
            Self::AttemptAborted { migration, attempt } => Present::AttemptAborted { migration, attempt },
            Self::Released { migration, attempt, generations } => {
                Present::Released { migration, attempt, generations }
            }
            Self::Owned { migration, attempt, generations } => {
                Present::Owned { migration, attempt, generations }
            }
            Self::HandedBack { migration, generations } => Present::HandedBack { migration, generations },
            Self::MigrationEnded { migration, outcome, summary } => {
                Present::MigrationEnded { migration, outcome, summary }
            }
            Self::ResizeBegun { volume, size_bytes } => Present::ResizeBegun { volume, size_bytes },
            Self::Resized { volume, size_bytes } => Present::Resized { volume, size_bytes },
            Self::ReservationLifted { place } => Present::ReservationLifted { place },
            Self::Promoted { migration, attempt, generations, promotion } => {
                Present::Promoted { migration, attempt, generations, promotion }
            }
            Self::MovedForgotten { volume } => Present::MovedForgotten { volume },
        })
    }
}

impl From<State> for state::State {
    fn from(old: State) -> Self {
        Self {
            volumes: old.volumes.into_iter().map(|(id, volume)| (id, volume.into())).collect(),
            migrations: old.migrations.into_iter().map(|(id, migration)| (id, migration.into())).collect(),
            next_migration: old.next_migration,
            reservations: old.reservations,
            moved: old.moved.into_iter().map(|(id, moved)| (id, moved.into())).collect(),
            branches: old.branches,
            origins: BTreeMap::new(),
            fillings: BTreeMap::new(),
            restored: None,
        }
    }
}

impl From<VolumeState> for state::VolumeState {
    fn from(old: VolumeState) -> Self {
        Self {
            record: old.record,
            stay: StayId::Made,
            added_unix_ms: old.added_unix_ms,
            resizing_to: old.resizing_to,
        }
    }
}

impl From<Moved> for side::Moved {
    fn from(old: Moved) -> Self {
        Self {
            volume: old.volume.into(),
            migration: old.migration,
            host: old.host,
            host_name: old.host_name,
            generation: old.generation,
            forwarding: old.forwarding,
            at_unix_ms: old.at_unix_ms,
        }
    }
}

impl From<MigrationState> for state::MigrationState {
    fn from(old: MigrationState) -> Self {
        Self {
            volumes: old.volumes,
            names: old.names,
            keep_source: old.keep_source,
            stage: old.stage,
            aborted: old.aborted,
            started_unix_ms: old.started_unix_ms,
            ended_unix_ms: old.ended_unix_ms,
            summary: old.summary,
            side: old.side,
            promotion: old.promotion,
            returning: old.returning.into_iter().map(Into::into).collect(),
            hollow: None,
            is_cancelled: false,
        }
    }
}
