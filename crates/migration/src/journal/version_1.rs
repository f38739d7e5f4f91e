//! Journals of version 1: an image was a raw file, an export had no settings, and no place was fenced.
//!
//! They are read, never written: the first start of this program replaces the file. What has not changed since (stages,
//! outcomes, costs) is shared with the present version, whose variants are only appended.

use std::collections::BTreeMap;

use chronicle::{Epoch, Generation, StayId};
use serde::Deserialize;

use super::record::{ExportSettings, Outcome, Summary};
use super::side::Side;
use super::stage::Stage;
use super::{image, record, state};
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
    EpochsReserved { _volume: VolumeId, _reserved: Epoch },
    MigrationStarted { migration: MigrationId, volumes: Vec<MigratingVolume>, keep_source: bool },
    TargetPrepared { migration: MigrationId, attempt: Attempt },
    AttemptAborted { migration: MigrationId, attempt: Attempt },
    Released { migration: MigrationId, attempt: Attempt, generations: Vec<(VolumeId, Generation)> },
    Owned { migration: MigrationId, attempt: Attempt, generations: Vec<(VolumeId, Generation)> },
    HandedBack { migration: MigrationId, generations: Vec<(VolumeId, Generation)> },
    MigrationEnded { migration: MigrationId, outcome: Outcome, summary: Summary },
}

#[derive(Deserialize)]
struct VolumeRecord {
    volume: VolumeId,
    name: String,
    size_bytes: u64,
    block_size_bytes: u32,
    image: ImageLocation,
    generation: Generation,
}

#[derive(Deserialize)]
struct ImageLocation {
    store: String,
    path: String,
}

#[derive(Deserialize)]
struct MigratingVolume {
    volume: VolumeId,
    source: ImageLocation,
    target: ImageLocation,
}

#[derive(Deserialize)]
struct State {
    volumes: BTreeMap<VolumeId, VolumeState>,
    migrations: BTreeMap<MigrationId, MigrationState>,
    next_migration: u64,
}

#[derive(Deserialize)]
struct VolumeState {
    record: VolumeRecord,
    _epochs_reserved: Epoch,
    added_unix_ms: u64,
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
        Self {
            at_unix_ms: old.at_unix_ms,
            records: old.records.into_iter().filter_map(Record::into_present).collect(),
        }
    }
}

impl Record {
    /// As the present version says it; `None`: it need not be said any more.
    fn into_present(self) -> Option<record::Record> {
        use record::Record as Present;
        Some(match self {
            Self::Snapshot(state) => Present::Snapshot(Box::new((*state).into())),
            Self::VolumeAdded(record) => Present::VolumeAdded(record.into()),
            Self::VolumeRemoved { volume } => Present::VolumeRemoved { volume },
            Self::EpochsReserved { .. } => return None,
            Self::MigrationStarted { migration, volumes, keep_source } => Present::MigrationStarted {
                migration,
                volumes: moving(volumes),
                keep_source,
                side: Side::OneHost,
            },
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
        })
    }
}

impl From<State> for state::State {
    fn from(old: State) -> Self {
        Self {
            volumes: old.volumes.into_iter().map(|(id, volume)| (id, volume.into())).collect(),
            migrations: old.migrations.into_iter().map(|(id, migration)| (id, migration.into())).collect(),
            next_migration: old.next_migration,
            fences: BTreeMap::new(),
            moved: BTreeMap::new(),
            branches: BTreeMap::new(),
            origins: BTreeMap::new(),
        }
    }
}

impl From<VolumeState> for state::VolumeState {
    fn from(old: VolumeState) -> Self {
        Self {
            record: old.record.into(),
            stay: StayId::Made,
            added_unix_ms: old.added_unix_ms,
            resizing_to: None,
        }
    }
}

impl From<VolumeRecord> for record::VolumeRecord {
    fn from(old: VolumeRecord) -> Self {
        Self {
            volume: old.volume,
            name: old.name,
            size_bytes: old.size_bytes,
            block_size_bytes: old.block_size_bytes,
            image: old.image.into(),
            generation: old.generation,
            export: ExportSettings::default(),
        }
    }
}

impl From<ImageLocation> for image::ImageLocation {
    fn from(old: ImageLocation) -> Self {
        Self::raw_file(old.store, old.path)
    }
}

impl From<MigrationState> for state::MigrationState {
    fn from(old: MigrationState) -> Self {
        Self {
            volumes: moving(old.volumes),
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

fn moving(old: Vec<MigratingVolume>) -> Vec<record::MigratingVolume> {
    let converted = old.into_iter().map(|moving| record::MigratingVolume {
        volume: moving.volume,
        source: moving.source.into(),
        target: moving.target.into(),
    });
    converted.collect()
}
