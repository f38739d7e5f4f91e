//! The journal folded: what is true on this host now.

use std::collections::BTreeMap;

use chronicle::{Epoch, Generation};
use serde::{Deserialize, Serialize};

use super::image::{Fence, FencedContent, Place};
use super::record::{Entry, MigratingVolume, Outcome, Record, Summary, VolumeRecord};
use crate::identity::{Attempt, MigrationId, VolumeId};

/// Ended migrations that are remembered; older ones are forgotten when a new one starts.
const ENDED_MIGRATIONS_MAX: usize = 1000;

/// All volumes and migrations of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Volumes that this host serves, by identity.
    pub volumes: BTreeMap<VolumeId, VolumeState>,
    /// Migrations under way, and the latest that have ended.
    pub migrations: BTreeMap<MigrationId, MigrationState>,
    /// The identity that the next migration gets.
    pub next_migration: u64,
    /// Devices and exports that hold what migrations left there.
    pub fences: BTreeMap<Place, Fence>,
}

/// A volume that this host serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeState {
    /// As it was added, with the image and generation of now.
    pub record: VolumeRecord,
    /// Epochs up to this one may have been used.
    pub epochs_reserved: Epoch,
    /// When it was added, in milliseconds since 1970.
    pub added_unix_ms: u64,
    /// The size in bytes that its image was to grow to; `None` while it is not being resized.
    pub resizing_to: Option<u64>,
}

/// A migration and how far it has come, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationState {
    /// Its volumes.
    pub volumes: Vec<MigratingVolume>,
    /// Names of its volumes, which may be gone by now.
    pub names: Vec<String>,
    /// Whether the source images are kept afterwards.
    pub keep_source: bool,
    /// How far it has come.
    pub stage: Stage,
    /// The latest try that is known to be aborted.
    pub aborted: Attempt,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When it ended; `None` while it is under way.
    pub ended_unix_ms: Option<u64>,
    /// What it cost; all zero until it has ended.
    pub summary: Summary,
}

/// How far a migration has come, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The source owns the volumes; the target may hold parts of them.
    Copying,
    /// The source owns the volumes; the target has promised to wait.
    Prepared(Attempt),
    /// Past the commit point; the target does not yet own the volumes, but nobody else will.
    Released(Attempt),
    /// The target owns the volumes; the source images are still to be dealt with.
    Owned(Attempt),
    /// The source owns the volumes again; the target images are still to be dealt with.
    HandedBack,
    /// Nothing is left to do.
    Ended(Outcome),
}

/// A record that does not follow from those before it: the journal is damaged, or there is a defect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Inconsistent {
    /// A record names a volume that is not there.
    #[error("a record names volume {0}, which is unknown")]
    UnknownVolume(VolumeId),
    /// A record names a migration that is not there.
    #[error("a record names migration {0}, which is unknown")]
    UnknownMigration(MigrationId),
    /// A record does not fit how far the migration has come.
    #[error("migration {migration} is {stage:?}: a record of {record} does not fit")]
    OutOfOrder {
        /// Which.
        migration: MigrationId,
        /// How far it has come.
        stage: Stage,
        /// What was to be recorded.
        record: &'static str,
    },
}

impl State {
    /// Adds what `entry` says.
    ///
    /// # Errors
    /// [`Inconsistent`]; the state is as far as the records before the bad one say.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), Inconsistent> {
        entry.records.iter().try_for_each(|record| self.apply_record(entry.at_unix_ms, record))
    }

    /// The volume of that name.
    pub fn volume_named(&self, name: &str) -> Option<(VolumeId, &VolumeState)> {
        self.volumes.iter().find(|(_, volume)| volume.record.name == name).map(|(id, volume)| (*id, volume))
    }

    /// Migrations that have not ended.
    pub fn unfinished(&self) -> impl Iterator<Item = (MigrationId, &MigrationState)> {
        self.migrations.iter().filter(|(_, state)| !state.has_ended()).map(|(id, state)| (*id, state))
    }

    fn apply_record(&mut self, at_unix_ms: u64, record: &Record) -> Result<(), Inconsistent> {
        match record {
            Record::Snapshot(state) => self.clone_from(state),
            Record::VolumeAdded(record) => {
                let volume = VolumeState {
                    record: record.clone(),
                    epochs_reserved: Epoch(0),
                    added_unix_ms: at_unix_ms,
                    resizing_to: None,
                };
                self.fences.remove(&record.image.place);
                self.volumes.insert(record.volume, volume);
            }
            Record::VolumeRemoved { volume } => {
                self.volumes.remove(volume).ok_or(Inconsistent::UnknownVolume(*volume))?;
            }
            Record::EpochsReserved { volume, reserved } => self.volume(*volume)?.epochs_reserved = *reserved,
            Record::MigrationStarted { migration, volumes, keep_source } => {
                self.start(at_unix_ms, *migration, volumes, *keep_source);
            }
            Record::TargetPrepared { migration, attempt } => {
                self.advance(*migration, "prepared", |from| match from {
                    Stage::Copying | Stage::Prepared(_) => Some(Stage::Prepared(*attempt)),
                    _ => None,
                })?;
            }
            Record::AttemptAborted { migration, attempt } => {
                let state = self.migration(*migration)?;
                state.aborted = state.aborted.max(*attempt);
                self.advance(*migration, "aborted", |from| match from {
                    Stage::Prepared(prepared) if prepared > attempt => Some(Stage::Prepared(*prepared)),
                    Stage::Copying | Stage::Prepared(_) => Some(Stage::Copying),
                    _ => None,
                })?;
            }
            Record::Released { migration, attempt, .. } => {
                self.advance(*migration, "released", |from| match from {
                    Stage::Prepared(prepared) if prepared == attempt => Some(Stage::Released(*attempt)),
                    // A commit whose fate was unknown is repeated.
                    Stage::Released(released) if released == attempt => Some(Stage::Released(*attempt)),
                    _ => None,
                })?;
            }
            Record::Owned { migration, attempt, generations } => {
                self.advance(*migration, "owned", |from| match from {
                    Stage::Released(known) | Stage::Owned(known) if known == attempt => {
                        Some(Stage::Owned(*attempt))
                    }
                    _ => None,
                })?;
                self.change_hands(*migration, generations, Side::Target)?;
            }
            Record::HandedBack { migration, generations } => {
                self.advance(*migration, "handed back", |from| match from {
                    Stage::Owned(_) | Stage::HandedBack => Some(Stage::HandedBack),
                    _ => None,
                })?;
                self.change_hands(*migration, generations, Side::Source)?;
            }
            Record::MigrationEnded { migration, outcome, summary } => {
                self.advance(*migration, "ended", |from| match (from, outcome) {
                    // A commit whose fate was unknown is repeated.
                    (Stage::Ended(known), outcome) => (known == outcome).then(|| from.clone()),
                    (Stage::Owned(_), Outcome::Moved { .. })
                    | (Stage::HandedBack, Outcome::HandedBack { .. })
                    | (Stage::Copying | Stage::Prepared(_), Outcome::Cancelled | Outcome::Failed { .. }) => {
                        Some(Stage::Ended(outcome.clone()))
                    }
                    _ => None,
                })?;
                let state = self.migration(*migration)?;
                state.ended_unix_ms = Some(at_unix_ms);
                state.summary = *summary;
            }
            Record::ResizeBegun { volume, size_bytes } => {
                self.volume(*volume)?.resizing_to = Some(*size_bytes);
            }
            Record::Resized { volume, size_bytes } => {
                let state = self.volume(*volume)?;
                state.record.size_bytes = *size_bytes;
                state.resizing_to = None;
            }
            Record::FenceLifted { place } => {
                self.fences.remove(place);
            }
        }
        Ok(())
    }

    fn start(&mut self, at: u64, migration: MigrationId, volumes: &[MigratingVolume], keep_source: bool) {
        let names = volumes.iter().map(|moving| {
            self.volumes.get(&moving.volume).map_or_else(String::new, |volume| volume.record.name.clone())
        });
        let state = MigrationState {
            names: names.collect(),
            volumes: volumes.to_vec(),
            keep_source,
            stage: Stage::Copying,
            aborted: Attempt::NONE,
            started_unix_ms: at,
            ended_unix_ms: None,
            summary: Summary::default(),
        };
        // From here on a half-made copy may be there; what was there before is gone.
        self.fence(migration, &state, Side::Target, FencedContent::HalfMade);
        self.migrations.insert(migration, state);
        self.next_migration = self.next_migration.max(migration.0 + 1);
        let ended: Vec<_> =
            self.migrations.iter().filter(|(_, state)| state.has_ended()).map(|(id, _)| *id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MIGRATIONS_MAX)) {
            self.migrations.remove(id);
        }
    }

    fn advance(
        &mut self,
        migration: MigrationId,
        record: &'static str,
        step: impl FnOnce(&Stage) -> Option<Stage>,
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?;
        match step(&state.stage) {
            Some(stage) => state.stage = stage,
            None => return Err(Inconsistent::OutOfOrder { migration, stage: state.stage.clone(), record }),
        }
        Ok(())
    }

    fn change_hands(
        &mut self,
        migration: MigrationId,
        generations: &[(VolumeId, Generation)],
        side: Side,
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?.clone();
        let left = if state.keep_source { FencedContent::Kept } else { FencedContent::Left };
        match side {
            Side::Target => self.fence(migration, &state, Side::Source, left),
            Side::Source => self.fence(migration, &state, Side::Target, FencedContent::HalfMade),
        }
        for volume in state.volumes {
            let image = match side {
                Side::Source => volume.source,
                Side::Target => volume.target,
            };
            self.fences.remove(&image.place);
            let state = self.volume(volume.volume)?;
            state.record.image = image;
            if let Some((_, generation)) = generations.iter().find(|(id, _)| *id == volume.volume) {
                state.record.generation = *generation;
            }
        }
        Ok(())
    }

    /// Fences the places on one side of a migration whose content stays when its volume is not there.
    fn fence(&mut self, migration: MigrationId, state: &MigrationState, side: Side, content: FencedContent) {
        for (moving, volume) in state.volumes.iter().zip(&state.names) {
            let image = match side {
                Side::Source => &moving.source,
                Side::Target => &moving.target,
            };
            if image.place.outlasts_its_volume() {
                let fence = Fence { volume: volume.clone(), migration, content };
                self.fences.insert(image.place.clone(), fence);
            }
        }
    }

    fn volume(&mut self, volume: VolumeId) -> Result<&mut VolumeState, Inconsistent> {
        self.volumes.get_mut(&volume).ok_or(Inconsistent::UnknownVolume(volume))
    }

    fn migration(&mut self, migration: MigrationId) -> Result<&mut MigrationState, Inconsistent> {
        self.migrations.get_mut(&migration).ok_or(Inconsistent::UnknownMigration(migration))
    }
}

impl MigrationState {
    /// Tells whether nothing is left to do.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended(_))
    }
}

#[derive(Clone, Copy)]
enum Side {
    Source,
    Target,
}
