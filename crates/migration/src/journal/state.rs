//! The journal folded: what is true on this host now.

use std::collections::BTreeMap;

use chronicle::StayId;
use serde::{Deserialize, Serialize};

use super::filling::{Hollow, VolumeFilling};
use super::image::{Place, Reservation, ReservedContent};
use super::origin::Origin;
use super::record::{Entry, MigratingVolume, Outcome, Record, Summary, VolumeRecord};
use super::restored::Restored;
use super::side::{Branch, Moved, Promotion, Side};
use super::stage::Stage;
use crate::authority::is_needed;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::planted::{Bug, broken};

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
    pub reservations: BTreeMap<Place, Reservation>,
    /// Volumes that went to other hosts. None of them is in `volumes`.
    pub moved: BTreeMap<VolumeId, Moved>,
    /// Branches of the histories of volumes, as far as forced promotions on this host opened them.
    pub branches: BTreeMap<VolumeId, Vec<Branch>>,
    /// Whose the content of volumes was, as far as that is known. Not in the snapshot, but in records of their own behind it:
    /// a snapshot cannot grow.
    #[serde(skip)]
    pub origins: BTreeMap<VolumeId, Origin>,
    /// Volumes of this host that were handed over with blocks missing, and lack some. As above.
    #[serde(skip)]
    pub fillings: BTreeMap<VolumeId, VolumeFilling>,
    /// What this journal has waited for since it was put back from a backup; `None`: it never was. As above.
    #[serde(skip)]
    pub restored: Option<Restored>,
}

/// A volume that this host serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeState {
    /// As it was added, with the image and generation of now.
    pub record: VolumeRecord,
    /// Its stay at this host: everything else that is durable about it here bears this.
    pub stay: StayId,
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
    /// Which side of it this host is.
    pub side: Side,
    /// How it was promoted, if it was.
    pub promotion: Option<Promotion>,
    /// What was known of volumes that have come home by it, in case they are handed back; empty once it has ended.
    pub returning: Vec<Moved>,
    /// The latest try in which blocks are left behind, if there was one. Not in the snapshot, but in a record behind it.
    #[serde(skip)]
    pub hollow: Option<Hollow>,
    /// Whether somebody has cancelled it. As above.
    #[serde(skip)]
    pub is_cancelled: bool,
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
    /// A record is about a journal that was put back, and this one never was.
    #[error("a record is about a journal that was put back, and this one never was")]
    NotRestored,
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
    /// A handover and an order to cancel it exclude each other, and the other one came first. That is no defect.
    #[error("{0} is cancelled, or handed over")]
    Overtaken(MigrationId),
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

    /// The migration that comes from `peer`, where it has the number `remote`.
    pub fn incoming(&self, peer: HostId, remote: MigrationId) -> Option<(MigrationId, &MigrationState)> {
        let comes = |state: &MigrationState| matches!(&state.side, Side::Incoming { peer: from, remote: number, .. } if (*from, *number) == (peer, remote));
        self.migrations.iter().rev().find(|(_, state)| comes(state)).map(|(id, state)| (*id, state))
    }

    /// The migration `id` of this host, if it goes to `peer`.
    pub fn outgoing(&self, peer: HostId, id: MigrationId) -> Option<&MigrationState> {
        let goes =
            |state: &&MigrationState| matches!(&state.side, Side::Outgoing { peer: to, .. } if *to == peer);
        self.migrations.get(&id).filter(goes)
    }

    /// The volume of that name that went to another host.
    pub fn moved_named(&self, name: &str) -> Option<(VolumeId, &Moved)> {
        let named = |moved: &Moved| moved.volume.record.name == name;
        self.moved.iter().find(|(_, moved)| named(moved)).map(|(id, moved)| (*id, moved))
    }

    fn apply_record(&mut self, at_unix_ms: u64, record: &Record) -> Result<(), Inconsistent> {
        match record {
            Record::Snapshot(state) => self.clone_from(state),
            Record::VolumeAdded(record) => {
                let volume = VolumeState {
                    record: record.clone(),
                    stay: StayId::Made,
                    added_unix_ms: at_unix_ms,
                    resizing_to: None,
                };
                self.reservations.remove(&record.image.place);
                self.moved.remove(&record.volume);
                let origin = if record.image.is_adopted() { Origin::Given } else { Origin::Made };
                self.volumes.insert(record.volume, volume);
                self.origins.insert(record.volume, origin);
            }
            Record::VolumeRemoved { volume } => {
                self.volumes.remove(volume).ok_or(Inconsistent::UnknownVolume(*volume))?;
                // N.B. what was given up is not said to be whole, ever: all that is left of it is at the host that it came from.
                self.fillings.retain(|known, filling| known != volume || filling.is_given_up);
                self.forget_origins();
            }
            Record::MigrationStarted { migration, volumes, keep_source, side } => {
                self.start(at_unix_ms, *migration, volumes, *keep_source, side);
            }
            Record::TargetPrepared { migration, .. } => self.advance(*migration, "prepared", record)?,
            Record::AttemptAborted { migration, attempt } => {
                let state = self.migration(*migration)?;
                state.aborted = state.aborted.max(*attempt);
                self.advance(*migration, "aborted", record)?;
            }
            Record::Discarding { migration, .. } => self.advance(*migration, "discarding", record)?,
            Record::Released { migration, generations, .. } => {
                self.advance(*migration, "released", record)?;
                self.volumes_leave(at_unix_ms, *migration, generations)?;
            }
            Record::Owned { migration, attempt, generations } => {
                let is_first = !self.migration(*migration)?.has_arrived();
                self.advance(*migration, "owned", record)?;
                self.volumes_arrive(at_unix_ms, *migration, generations)?;
                if is_first {
                    self.begin_fillings(*migration, *attempt);
                }
            }
            Record::Promoted { migration, attempt, generations, promotion } => {
                let is_first = !self.migration(*migration)?.has_arrived();
                self.advance(*migration, "promoted", record)?;
                self.open_branches(*migration, promotion)?;
                self.volumes_arrive(at_unix_ms, *migration, generations)?;
                if is_first {
                    self.begin_fillings(*migration, *attempt);
                }
            }
            Record::Hollow { migration, hollow } => {
                self.migration(*migration)?.hollow = Some(hollow.clone());
            }
            Record::FillingKnown { volume, filling } => {
                self.fillings.insert(*volume, (**filling).clone());
            }
            Record::Filled { volume } => {
                self.fillings.remove(volume);
                self.forget_hollows();
            }
            Record::MissingGivenUp { volume } => {
                if let Some(filling) = self.fillings.get_mut(volume) {
                    filling.is_given_up = true;
                }
            }
            Record::HandedBack { migration, generations } => {
                self.advance(*migration, "handed back", record)?;
                self.end_fillings(*migration);
                self.volumes_return(*migration, generations)?;
            }
            Record::MigrationEnded { migration, outcome, summary } => {
                self.advance(*migration, "ended", record)?;
                if matches!(outcome, Outcome::Moved { .. }) {
                    self.end_reservoirs(at_unix_ms, *migration);
                }
                let state = self.migration(*migration)?;
                state.ended_unix_ms = Some(at_unix_ms);
                state.summary = *summary;
                state.returning.clear();
                state.is_cancelled = false;
                self.forget_hollows();
                self.forget_origins();
            }
            Record::MovedForgotten { volume } => {
                self.forget_moved(*volume)?;
                self.forget_origins();
            }
            Record::OriginKnown { volume, origin } => self.learn_origin(*volume, *origin),
            Record::Restored(restored) => self.restored = Some((**restored).clone()),
            Record::Reinstated { volume, generation, stay, branch } => {
                self.reinstate(*volume, *generation, *stay, *branch)?;
            }
            Record::RestoredForgotten { volume } => self.forget_restored(*volume)?,
            Record::RestoredMore(more) => self.learn_more_of_restored(more)?,
            Record::DepartureConfirmed { volume } => self.confirm_departure(*volume)?,
            Record::ResizeBegun { volume, size_bytes } => {
                self.volume(*volume)?.resizing_to = Some(*size_bytes);
            }
            Record::Resized { volume, size_bytes } => {
                let state = self.volume(*volume)?;
                state.record.size_bytes = *size_bytes;
                state.resizing_to = None;
            }
            Record::ReservationLifted { place } => {
                self.reservations.remove(place);
            }
            Record::CancelOrdered { migration } => {
                self.advance(*migration, "cancelled", record)?;
                self.migration(*migration)?.is_cancelled = true;
            }
            Record::GrewElsewhere { volume, size_bytes } => self.grew_elsewhere(*volume, *size_bytes),
        }
        Ok(())
    }

    fn start(
        &mut self,
        at: u64,
        migration: MigrationId,
        volumes: &[MigratingVolume],
        keep_source: bool,
        side: &Side,
    ) {
        let name = |moving: &MigratingVolume| match side {
            Side::Incoming { volumes, .. } => {
                volumes.iter().find(|record| record.volume == moving.volume).map(|record| record.name.clone())
            }
            Side::OneHost | Side::Outgoing { .. } => {
                self.volumes.get(&moving.volume).map(|volume| volume.record.name.clone())
            }
        };
        let state = MigrationState {
            names: volumes.iter().map(|moving| name(moving).unwrap_or_default()).collect(),
            volumes: volumes.to_vec(),
            keep_source,
            stage: Stage::Copying,
            aborted: Attempt::NONE,
            started_unix_ms: at,
            ended_unix_ms: None,
            summary: Summary::default(),
            side: side.clone(),
            promotion: None,
            returning: Vec::new(),
            hollow: None,
            is_cancelled: false,
        };
        // From here on a half-made copy may be there; what was there before is gone.
        self.reserve_targets(migration, &state, ReservedContent::HalfMade);
        self.migrations.insert(migration, state);
        self.next_migration = self.next_migration.max(migration.0 + 1);
        self.forget_ended();
    }

    /// Forgets the oldest of many that have ended, except those by which it is known who may use a volume.
    fn forget_ended(&mut self) {
        if self.migrations.len() <= ENDED_MIGRATIONS_MAX {
            return;
        }
        // N.B. all are judged before any goes: what ends another's right is younger than that, and never goes first.
        let is_over = |(id, state): &(&MigrationId, &MigrationState)| {
            state.has_ended() && !is_needed(self, **id, state)
        };
        let ended: Vec<_> = self.migrations.iter().filter(is_over).map(|(id, _)| *id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MIGRATIONS_MAX)) {
            self.migrations.remove(id);
        }
    }

    fn advance(
        &mut self,
        migration: MigrationId,
        name: &'static str,
        record: &Record,
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?;
        if state.is_overtaken(record) {
            return Err(Inconsistent::Overtaken(migration));
        }
        match state.stage.after(&state.side, record) {
            Some(stage) => state.stage = stage,
            None => {
                let stage = state.stage.clone();
                return Err(Inconsistent::OutOfOrder { migration, stage, record: name });
            }
        }
        Ok(())
    }

    pub(super) fn volume(&mut self, volume: VolumeId) -> Result<&mut VolumeState, Inconsistent> {
        self.volumes.get_mut(&volume).ok_or(Inconsistent::UnknownVolume(volume))
    }

    pub(super) fn migration(&mut self, migration: MigrationId) -> Result<&mut MigrationState, Inconsistent> {
        self.migrations.get_mut(&migration).ok_or(Inconsistent::UnknownMigration(migration))
    }
}

impl MigrationState {
    /// Tells whether nothing is left to do.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended(_))
    }

    /// Tells whether an order to cancel it would be taken now.
    pub fn may_be_cancelled(&self) -> bool {
        self.stage.can_be_cancelled(&self.side)
    }

    /// Tells whether a record would hand over what is cancelled, or cancel what may be handed over.
    fn is_overtaken(&self, record: &Record) -> bool {
        match record {
            Record::CancelOrdered { .. } => !self.may_be_cancelled(),
            Record::Released { .. } => self.is_cancelled && !broken(Bug::CancelOvertaken),
            // On one host the promise is of no account without the release.
            Record::TargetPrepared { .. } => {
                self.is_cancelled
                    && matches!(self.side, Side::Incoming { .. })
                    && !broken(Bug::CancelOvertaken)
            }
            _ => false,
        }
    }

    /// Tells whether the volumes are at the target for good, which is this host: only what follows from that may be left to
    /// do, and no message or command changes it any more.
    pub fn has_arrived(&self) -> bool {
        self.side.has_target() && matches!(self.stage, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }))
    }
}
