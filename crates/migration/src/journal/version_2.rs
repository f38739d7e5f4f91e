//! Journals of version 2: both sides of every migration were on one host.
//!
//! They are read, never written: the first start of this program replaces the file. Only what has changed since is
//! here; the rest is shared with the present version, whose variants are only appended.

use std::collections::BTreeMap;

use chronicle::{Epoch, Generation};
use serde::Deserialize;

use super::image::{Fence, Place};
use super::record::{MigratingVolume, Outcome, Summary, VolumeRecord};
use super::side::Side;
use super::stage::Stage;
use super::state::VolumeState;
use super::{record, state};
use crate::identity::{Attempt, MigrationId, VolumeId};

/// One commit.
#[derive(Deserialize)]
pub(super) struct Entry {
    at_unix_ms: u64,
    records: Vec<Record>,
}

#[derive(Deserialize)]
enum Record {
    Snapshot(Box<State>),
    VolumeAdded(VolumeRecord),
    VolumeRemoved { volume: VolumeId },
    EpochsReserved { volume: VolumeId, reserved: Epoch },
    MigrationStarted { migration: MigrationId, volumes: Vec<MigratingVolume>, keep_source: bool },
    TargetPrepared { migration: MigrationId, attempt: Attempt },
    AttemptAborted { migration: MigrationId, attempt: Attempt },
    Released { migration: MigrationId, attempt: Attempt, generations: Vec<(VolumeId, Generation)> },
    Owned { migration: MigrationId, attempt: Attempt, generations: Vec<(VolumeId, Generation)> },
    HandedBack { migration: MigrationId, generations: Vec<(VolumeId, Generation)> },
    MigrationEnded { migration: MigrationId, outcome: Outcome, summary: Summary },
    ResizeBegun { volume: VolumeId, size_bytes: u64 },
    Resized { volume: VolumeId, size_bytes: u64 },
    FenceLifted { place: Place },
}

#[derive(Deserialize)]
struct State {
    volumes: BTreeMap<VolumeId, VolumeState>,
    migrations: BTreeMap<MigrationId, MigrationState>,
    next_migration: u64,
    fences: BTreeMap<Place, Fence>,
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
}

impl From<Entry> for record::Entry {
    fn from(old: Entry) -> Self {
        Self { at_unix_ms: old.at_unix_ms, records: old.records.into_iter().map(Into::into).collect() }
    }
}

impl From<Record> for record::Record {
    fn from(old: Record) -> Self {
        match old {
            Record::Snapshot(state) => Self::Snapshot(Box::new((*state).into())),
            Record::VolumeAdded(record) => Self::VolumeAdded(record),
            Record::VolumeRemoved { volume } => Self::VolumeRemoved { volume },
            Record::EpochsReserved { volume, reserved } => Self::EpochsReserved { volume, reserved },
            Record::MigrationStarted { migration, volumes, keep_source } => {
                Self::MigrationStarted { migration, volumes, keep_source, side: Side::OneHost }
            }
            Record::TargetPrepared { migration, attempt } => Self::TargetPrepared { migration, attempt },
            Record::AttemptAborted { migration, attempt } => Self::AttemptAborted { migration, attempt },
            Record::Released { migration, attempt, generations } => {
                Self::Released { migration, attempt, generations }
            }
            Record::Owned { migration, attempt, generations } => {
                Self::Owned { migration, attempt, generations }
            }
            Record::HandedBack { migration, generations } => Self::HandedBack { migration, generations },
            Record::MigrationEnded { migration, outcome, summary } => {
                Self::MigrationEnded { migration, outcome, summary }
            }
            Record::ResizeBegun { volume, size_bytes } => Self::ResizeBegun { volume, size_bytes },
            Record::Resized { volume, size_bytes } => Self::Resized { volume, size_bytes },
            Record::FenceLifted { place } => Self::FenceLifted { place },
        }
    }
}

impl From<State> for state::State {
    fn from(old: State) -> Self {
        Self {
            volumes: old.volumes,
            migrations: old.migrations.into_iter().map(|(id, migration)| (id, migration.into())).collect(),
            next_migration: old.next_migration,
            fences: old.fences,
            moved: BTreeMap::new(),
            branches: BTreeMap::new(),
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
            side: Side::OneHost,
            promotion: None,
            returning: Vec::new(),
        }
    }
}
